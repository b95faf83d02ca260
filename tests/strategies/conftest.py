"""Tests that run under a strategy, in processes of their own.

TensorFlow's devices are set before its first operation, so these tests are not
collected with the others: tests/test_strategies.py runs them, with the strategy
named in an environment variable. Under several workers each of them runs the
same tests in the same order, and asserts about its own replicas.
"""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

KIND, _, COUNT = os.environ.get("TFRS_EMBED_TEST_STRATEGY", "").partition(":")
collect_ignore_glob = [] if KIND else ["test_*.py"]


def make_strategy():
    import tensorflow as tf

    if KIND == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if KIND == "tpu":
        from tfrs_embed.testing import EmulatedTPUStrategy

        chips, sparse_cores = COUNT.split("x")
        return EmulatedTPUStrategy((int(chips), int(sparse_cores)))
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * int(COUNT)
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(int(COUNT))]
    )


# Before the tests are imported, which may make tensors.
STRATEGY = make_strategy() if KIND else None


@pytest.fixture
def strategy():
    """The strategy of this process: one, as a second would share its keys."""
    return STRATEGY
