"""Workers that die, stop, come late or differ: no hang, no silent damage."""

import re
import signal
import sys
import time

import pytest

import tfrs_embed
from processes import TESTS, environment
from tfrs_embed.testing import LocalCluster

pytestmark = pytest.mark.xdist_group("faults")

WITHIN_S = 30


def start(folder, fault="none", heartbeat=None, **kwargs):
    command = [sys.executable, str(TESTS / "strategies/train_worker.py")]
    command += ["--folder", str(folder), "--fault", fault]
    if heartbeat:
        command += ["--heartbeat", str(heartbeat)]
    return LocalCluster(command, 2, environment("workers:2"), **kwargs)


def losses(output):
    return dict(re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE))


def wait_for(condition, timeout):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a job in which nothing happens."""
    with start(tmp_path_factory.mktemp("undisturbed")) as cluster:
        assert cluster.wait(300) == [0, 0], cluster.output(0)
        found = losses(cluster.output(0))
        assert found == losses(cluster.output(1))
        assert len(found) == 6
        return found


@pytest.mark.parametrize("fault", ["killed", "stopped", "raised"])
def test_the_others_end_and_the_job_resumes(tmp_path, fault, undisturbed):
    with start(tmp_path, fault) as cluster:
        wait_for(lambda: "step 2 loss" in cluster.output(1), 300)
        begin = time.monotonic()
        wait_for(lambda: cluster.processes[0].poll() is not None, WITHIN_S + 30)
        assert time.monotonic() - begin < WITHIN_S
        output = cluster.output(0)
        assert cluster.processes[0].returncode != 0
        assert "UnavailableError" in output
        assert re.search(r"unhealthy.*\s.*task:1", output), output[-2000:]
        assert losses(output) == {k: undisturbed[k] for k in ("0", "1", "2")}
        if fault == "killed":
            assert cluster.processes[1].wait(1) == -signal.SIGKILL
    if fault != "killed":
        return
    # Again, with a worker that comes late: the other waits.
    with start(tmp_path, delays=[0, 5]) as cluster:
        assert cluster.wait(300) == [0, 0], cluster.output(0)
        resumed = losses(cluster.output(0))
    assert resumed == {k: undisturbed[k] for k in ("3", "4", "5")}


def stop_for(cluster, seconds):
    """Lets worker 1 go on so long after it has stopped itself."""
    wait_for(lambda: "step 2 loss" in cluster.output(1), 300)
    time.sleep(seconds)
    cluster.signal(1, signal.SIGCONT)


def test_a_worker_may_stand_still_for_less_than_the_timeout(
    tmp_path, undisturbed
):
    # Longer than TensorFlow's own timeout.
    with start(tmp_path, "stopped", heartbeat=60) as cluster:
        stop_for(cluster, 20)
        assert cluster.wait(60) == [0, 0], cluster.output(0)
        assert losses(cluster.output(0)) == undisturbed


def test_a_worker_that_stands_still_for_longer_ends_the_job(tmp_path):
    with start(tmp_path, "stopped", heartbeat=3) as cluster:
        wait_for(lambda: "step 2 loss" in cluster.output(1), 300)
        begin = time.monotonic()
        wait_for(lambda: cluster.processes[0].poll() is not None, WITHIN_S)
        assert time.monotonic() - begin < 10
        output = cluster.output(0)
        assert re.search(r"unhealthy.*\s.*task:1", output), output[-2000:]


@pytest.mark.parametrize("seconds", [0, -1, True, "5", float("inf"), None])
def test_bad_timeouts_are_refused(seconds):
    with pytest.raises(ValueError, match=re.escape(repr(seconds))):
        tfrs_embed.set_heartbeat_timeout(seconds)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "tables",
            "worker 1: Table 'items': vocabulary_size is 50 here, 51 there",
        ),
        ("order", r"Layer 'user'\. On worker 1 it is Layer 'item'"),
        ("missing", "Worker 1 has not built Layer 'item' within 5 s"),
    ],
    ids=["tables", "order", "missing"],
)
def test_workers_that_build_other_tables_are_noticed(tmp_path, fault, message):
    with start(tmp_path, fault) as cluster:
        wait_for(lambda: cluster.processes[0].poll() is not None, 120)
        assert cluster.processes[0].returncode == 1
        assert re.search(f"RuntimeError: .*{message}", cluster.output(0))
        assert "step 0" not in cluster.output(0)
