"""Running tests/strategies in processes that have several replicas."""

import os
import pathlib
import subprocess
import sys

import tfrs_embed
from tfrs_embed.testing import LocalCluster

#: Whether to run what finds little that the rest does not: `make nightly`.
ALL = bool(os.environ.get("TFRS_EMBED_NIGHTLY"))
FOLDER = pathlib.Path(__file__).parent / "strategies"


def environment(strategy):
    """The variables of a process that runs tests under a strategy."""
    root = pathlib.Path(tfrs_embed.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return {
        "PYTHONPATH": path,
        "TFRS_EMBED_TEST_STRATEGY": strategy,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def run(files, strategy, select=None, **env):
    """Runs test files under a strategy; fails with what they print.

    `select` is pytest's expression of what to run in them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(FOLDER / f) for f in files]
    command += [] if select is None else ["-k", select]
    kind, count = strategy.split(":")
    env = {**environment(strategy), **env}
    if kind != "workers":
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return
    with LocalCluster(command, int(count), env) as cluster:
        codes = cluster.wait(900)
        output = "\n".join(cluster.output(i)[-5000:] for i in range(len(codes)))
        assert codes == [0] * len(codes), output
