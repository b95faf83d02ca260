"""Running tests in processes that have several replicas, or another Keras."""

import os
import pathlib
import subprocess
import sys
import time

from tfrs_embed.testing import LocalCluster

import process_tiers
import tfrs_embed
from nightly_flag import TIMEOUT_S
from process_tiers import TESTS


def environment(strategy):
    """The variables of a process that runs tests under a strategy."""
    root = pathlib.Path(tfrs_embed.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return {
        "PYTHONPATH": path,
        "TFRS_EMBED_TEST_STRATEGY": strategy,
        "TFRS_EMBED_TEST_TIER": "",
        "TFRS_EMBED_TEST_KERAS": os.environ.get("TFRS_EMBED_TEST_KERAS", "2"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def run_process(process, tier, folder):
    """Runs all tests that a process of process_tiers.PROCESSES has in a tier.

    Args:
        process: the process's name.
        tier: the tier's.
        folder: an empty folder for all of the tests.
    """
    keras, strategy = process_tiers.keras_and_strategy(process)
    run(
        process_tiers.files(process),
        strategy,
        TFRS_EMBED_TEST_KERAS=keras,
        TFRS_EMBED_TEST_TIER=tier,
        TFRS_EMBED_TEST_FOLDER=str(folder),
    )


def run(tests, strategy, **env):
    """Runs tests under a strategy, in one process or one for each worker.

    Args:
        tests: files in this folder, or tests of them, as pytest names these.
        strategy: "mirrored:2", "workers:3", "tpu:2x4", ...; "": none.
        **env: further variables.
    """
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(TESTS / test) for test in tests]
    kind, _, count = strategy.partition(":")
    env = {**environment(strategy), **env}
    if kind != "workers":
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return
    # Workers wait for one that has failed.
    with LocalCluster([*command, "-x"], int(count), env) as cluster:
        codes = cluster.wait(TIMEOUT_S)
        output = "\n".join(cluster.output(i)[-5000:] for i in range(len(codes)))
        assert codes == [0] * len(codes), output


class ForkedCluster(LocalCluster):
    """A `LocalCluster` of forks.

    Args:
        server: the fork server.
        command: the script that each worker runs, and its arguments.
        workers: the number of workers.
        env: environment variables on top of this process's.
        pause: seconds to wait before each worker starts.
    """

    def __init__(self, server, command, workers, env, pause=0):
        self._server, self._pause = server, pause
        super().__init__(command, workers, env)

    def _start(self, command, env, log):
        time.sleep(self._pause)
        return self._server.start(command, env, log)
