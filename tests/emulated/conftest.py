"""Tests of emulated slices, in a process of their own.

TensorFlow's logical CPUs are set before its first operation, so these tests are
not collected with the others: tests/test_emulated_tpu.py runs them.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

WANTED = os.environ.get("TFRS_EMBED_TEST_EMULATED") == "1"
collect_ignore_glob = [] if WANTED else ["test_*.py"]

if WANTED:
    # The largest slice first, before the tests are imported.
    from tfrs_embed.testing import EmulatedTPUStrategy

    EmulatedTPUStrategy((4, 4))
