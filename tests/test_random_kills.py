"""Workers that are killed at random moments, a few times of `make faults`."""

import pytest

from faults.kills import MODULES, WITHIN_S, Kill, Killer, draw
from forked_scripts import ForkServer
from run_in_processes import environment

pytestmark = [pytest.mark.more, pytest.mark.xdist_group("random kills")]

SEED = 5


@pytest.fixture(scope="module")
def killer(tmp_path_factory):
    with ForkServer(MODULES, environment("")) as server:
        yield Killer(server, tmp_path_factory.mktemp("jobs"))


def check(killer, kill):
    outcome = killer.run(kill)
    said = "\n".join(output[-3000:] for output in outcome.outputs)
    assert outcome.errors == [], f"{kill}, {outcome.phase}:\n{said}"
    assert outcome.seconds < WITHIN_S


# By day test_faults.py kills a worker of such a job.
@pytest.mark.nightly
@pytest.mark.parametrize("number", range(36))
def test_the_others_end_and_the_job_goes_on(killer, number):
    check(killer, draw(number, SEED))


def test_tables_in_files_of_one_process_go_on(killer):
    check(killer, Kill("files", 1, 0, "training", 0.5, deltas=True))


def test_all_hear_of_a_death_that_only_one_can_see(killer):
    # Worker 0 misses worker 2 and ends; worker 1 would miss worker 0.
    check(killer, Kill("mixed", 3, 2, "building", 0.65))
