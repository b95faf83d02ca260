"""Runs tests/emulated in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

import tfrs_embed

FOLDER = pathlib.Path(__file__).parent / "emulated"


@pytest.mark.parametrize(
    "file", ["test_training.py", "test_strategy.py", "test_keras.py"]
)
def test_emulated_slices(file):
    root = pathlib.Path(tfrs_embed.__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(FOLDER / file)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(root), os.environ.get("PYTHONPATH", "")]
            ),
            "TFRS_EMBED_TEST_EMULATED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]
