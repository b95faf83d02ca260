"""A pytest plugin: parses the flags that TF-models' train_test.py reads.

Run as a program, that file defines them itself.
"""

from absl import flags
from official.recommendation.ranking import common


def pytest_configure():
    common.define_flags()
    flags.FLAGS(["train_test"])
