"""All that docs/tpu.md promises, on an emulated slice: one device's tables."""

import os
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tpu_wheel"))

import tiers
from promises import PROMISES

#: Whose promises this process is to keep; without the variable all.
HARDWARE = os.environ.get("TFRS_EMBED_TEST_HARDWARE", "V2 UNSUPPORTED").split()
OF_HARDWARE = [
    (p, h) for p in PROMISES for h in p.hardware if h.name in HARDWARE
]


def name(value):
    return getattr(value, "name", None)


@pytest.mark.parametrize(("promise", "hardware"), OF_HARDWARE, ids=name)
def test_tables_are_those_of_one_device(strategy, promise, hardware):
    # A function that is traced has no default.
    tf.config.set_soft_device_placement(False)
    replicas = strategy.num_replicas_in_sync
    with tiers.record("emulated", promise, hardware):
        layers = promise.run(strategy, 1.0, embedding_feature=hardware)
        one = tf.distribute.get_strategy()
        # Tracing takes longer than its few steps.
        tf.config.run_functions_eagerly(True)
        try:
            expected = promise.run(one, float(replicas))
        finally:
            tf.config.run_functions_eagerly(False)
        loose = "bfloat16" in promise.name
        for ours, theirs in zip(layers, expected, strict=True):
            for table, rows in theirs.embedding_tables.items():
                np.testing.assert_allclose(
                    ours.embedding_tables[table].numpy(),
                    rows.numpy(),
                    rtol=5e-2 if loose else 1e-4,
                    atol=5e-2 if loose else 1e-5,
                    err_msg=table,
                )
