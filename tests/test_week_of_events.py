"""A week of events equals dicts to the bit, through kills."""

import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
from tfrs_embed.testing import LocalCluster

from process_tiers import nightly
from run_in_processes import TESTS, environment
from week_of_events import DAYS, RULES, STEPS_A_DAY, expected

pytestmark = pytest.mark.more

WORLDS = {"": 1, "mirrored:2": 2, "mirrored:3": 3, "workers:2": 2}


def run(strategy, folder, kill, limit_s=300):
    """Runs the job; returns its exit codes, and what it printed."""
    command = [sys.executable, str(TESTS / "week_of_events.py")]
    command += [str(folder), str(kill)]
    env = environment(strategy)
    if strategy.startswith("workers"):
        count = int(strategy[-1])
        with LocalCluster(command, count, env) as cluster:
            codes = cluster.wait(limit_s)
            return codes, cluster.output(0)
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return [done.returncode], done.stdout + done.stderr


@nightly(lambda strategy: strategy != "workers:2")
@pytest.mark.parametrize("strategy", WORLDS)
def test_a_week_equals_dicts_through_kills(strategy, tmp_path):
    steps = DAYS * STEPS_A_DAY
    for kill in (*random.Random(strategy).sample(range(9, steps // 2), 2), 0):
        codes, said = run(strategy, tmp_path, kill)
        if pathlib.Path(tmp_path, "result.npz").exists():
            break
        assert set(codes) == {-9}, said[-3000:]
    assert set(codes) == {0}, said[-3000:]
    found = np.load(tmp_path / "result.npz", allow_pickle=True)
    wanted = expected(RULES, WORLDS[strategy])
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name)
