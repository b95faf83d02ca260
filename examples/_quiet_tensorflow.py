"""Imports TensorFlow, and leaves out what it prints of every start.

A program imports this before anything that imports TensorFlow. TensorFlow logs
its first lines before it reads TF_CPP_MIN_LOG_LEVEL; here they come under that
level, which is 2, errors alone, unless the environment says otherwise. A level
of 0 or 1 shows all of them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile

_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)|[IW]\d{4} "
)
# On machines without GPUs, where it is no error. Where there are drivers, it
# is one, and is shown.
_NO_DRIVERS = "Could not find cuda drivers"
_NO_GPU = "failed call to cuInit"


def told(lines: list[str]) -> list[str]:
    """Returns the lines of a start that tell of something wrong."""
    no_drivers = any(_NO_DRIVERS in line for line in lines)
    return [
        line
        for line in lines
        if not _NOISE.match(line) and not (no_drivers and _NO_GPU in line)
    ]


def _start() -> None:
    """Imports TensorFlow and finds the devices, with its lines kept back."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            import tensorflow as tf

            # No more than a look at what there is: programs still configure it.
            tf.config.list_physical_devices()
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines(True)
            sys.stderr.writelines(told(lines))


if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") not in ("0", "1"):
    _start()
