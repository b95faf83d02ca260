"""The example that trains on a stream: killed, it goes on where it was."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import documentation
from run_in_processes import environment

pytestmark = pytest.mark.tools

PROGRAM = documentation.ROOT / "examples" / "streaming.py"
DAYS, RATINGS = 10, 150
DAY = re.compile(r"\d{4}-\d\d-\d\d  ")
FIRST_DAY_S = 875_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ratings of users and movies that come and go, in MovieLens's format."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("data")
    with (folder / "ml-100k.inter").open("w") as file:
        print("user_id\titem_id\trating\ttimestamp", file=file)
        # Every fourth day, as the program tests after a month.
        for day in range(DAYS):
            for second in range(RATINGS):
                user = 3 * day + rng.integers(20)
                movie = 5 * day + rng.integers(40)
                stars = 1 + (user + movie + rng.integers(2)) % 5
                when = FIRST_DAY_S + 4 * day * 86_400 + second
                print(user, movie, stars, when, sep="\t", file=file)
    return folder


def start(data, checkpoints):
    command = [sys.executable, str(PROGRAM), "--data", str(data)]
    command += ["--checkpoints", str(checkpoints), "--capacity", "0.4"]
    command += ["--batch_size", "16", "--admission", "2"]
    return subprocess.Popen(
        command,
        env={**os.environ, **environment("")},
        stdout=subprocess.PIPE,
        text=True,
    )


def results(lines):
    return [x for x in lines if DAY.match(x) or x.startswith("test_rmse=")]


def run_and_kill(process, days, after_s):
    """Kills it some time after it has printed so many days."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(map(bool, map(DAY.match, lines))) == days:
            time.sleep(after_s)
            process.send_signal(signal.SIGKILL)
            break
    lines += process.stdout.readlines()
    process.stdout.close()
    assert process.wait(60) == -signal.SIGKILL
    return results(lines)


# By day test_week_of_events.py kills such a job.
@pytest.mark.nightly
def test_a_killed_run_goes_on_and_ends_the_same(data, tmp_path):
    # Beside the others, which mostly wait for TensorFlow to be imported.
    whole = start(data, tmp_path / "whole")
    printed = []
    # After its third day's line, and then in the fifth day.
    for days, after_s in ((3, 0), (2, 0.03)):
        process = start(data, tmp_path / "killed")
        printed.append(run_and_kill(process, days, after_s))
    last = start(data, tmp_path / "killed")
    output, _ = last.communicate(timeout=120)
    assert last.returncode == 0
    printed.append(results(output.splitlines(keepends=True)))
    expected = results(whole.communicate(timeout=120)[0].splitlines(True))
    assert whole.returncode == 0
    assert len(expected) == DAYS + 1
    assert sum(int(line.split()[-2]) for line in expected[:DAYS]) > DAYS

    # A day may be saved and not printed, but is never trained on twice.
    begins = [expected.index(lines[0]) for lines in printed]
    for begin, lines in zip(begins, printed, strict=True):
        assert lines == expected[begin : begin + len(lines)]
    assert begins[0] == 0
    for i in (0, 1):
        end = begins[i] + len(printed[i])
        assert end <= begins[i + 1] <= end + 1
    assert printed[-1][-1] == expected[-1]
