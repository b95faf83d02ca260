"""The best rows of tables that a TPU holds."""

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import layers
from process_tiers import on
from reference import best_ids
from tfrs_embed import FeatureConfig, TableConfig

pytestmark = on("tpu:2x4")


@pytest.mark.parametrize("threshold", [0, None])
def test_between_steps(strategy, threshold):
    values = np.random.default_rng(0).integers(-3, 4, [91, 8])
    values = values.astype(np.float32)
    table = TableConfig("t", *values.shape)
    with strategy.scope():
        layer = layers.PartialTPUEmbedding(
            FeatureConfig("f", table),
            "sgd",
            batch_size=8,
            size_threshold=threshold,
        )
        layer.build(None)
        layer(tf.zeros([8], tf.int32), training=False)
    layer.load_tables({"t": values})
    queries = values[3:6]
    found = layer.tables["t"].top_k(queries, 7)
    for each, wanted in zip(
        found, best_ids(queries @ values.T, 7), strict=True
    ):
        np.testing.assert_array_equal(each, wanted)
    run = tf.function(
        lambda: strategy.run(lambda: layer.tables["t"].top_k(queries, 7))
    )
    with pytest.raises(NotImplementedError, match=r"Table 't': top_k"):
        run()
