"""Makes the modules of examples/ importable, and TensorFlow's start quiet.

It has to be imported before them, and before TensorFlow.
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import _quiet_tensorflow  # noqa: F401
