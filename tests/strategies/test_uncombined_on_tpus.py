"""Features whose ids are not combined, on an emulated slice."""

import numpy as np
import pytest
import tensorflow as tf

from process_tiers import on
from reference import Ragged, Sparse
from strategies.replicas import distribute, local
from tfrs_embed import FeatureConfig, PartialTPUEmbedding, TableConfig

pytestmark = on("tpu:2x4", tier="more")

Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
BATCH, WIDTH, DIM = 8, 3, 4
ENGINES = {
    "SparseCore": {"size_threshold": 0, "embedding_feature": Hardware.V2},
    "replicated": {
        "size_threshold": 0,
        "embedding_feature": Hardware.UNSUPPORTED,
    },
    "Keras": {"size_threshold": None},
}


def look_up(strategy, engine, ids):
    """Looks each replica's ids up; returns its vectors, and the table."""
    table = TableConfig("movies", 40, DIM)
    feature = FeatureConfig("history", table, combiner=None)
    with strategy.scope():
        layer = PartialTPUEmbedding(
            {"history": feature}, "sgd", **ENGINES[engine]
        )
    inputs = distribute(
        strategy, [{"history": ids}] * strategy.num_replicas_in_sync
    )
    run = tf.function(lambda x: strategy.run(layer, (x,))["history"])
    return local(strategy, run(inputs)), layer.embedding_tables["movies"]


@pytest.mark.parametrize("engine", ENGINES)
def test_dense_ids_have_a_vector_each(strategy, engine):
    ids = np.arange(BATCH * WIDTH).reshape(BATCH, WIDTH)
    found, table = look_up(strategy, engine, ids)
    for vectors in found.values():
        np.testing.assert_allclose(vectors, table.numpy()[ids], rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "ids",
    [Ragged([[1, 2]] * BATCH), Sparse({(0, 1): 3}, (BATCH, WIDTH))],
    ids=["ragged", "sparse"],
)
def test_ragged_ids_are_an_error_that_says_what_to_do(strategy, engine, ids):
    message = (
        r"'history' \(table 'movies'\): with combiner=None .*TPU's program .*"
        "dense ids, or declare a max_sequence_length"
    )
    with pytest.raises(ValueError, match=message):
        look_up(strategy, engine, ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_a_tape_records_are_an_error(strategy, engine):
    """TPUs give weights no gradient, which would be None without a word."""
    table = TableConfig("movies", 40, DIM, combiner="sum")
    with strategy.scope():
        layer = PartialTPUEmbedding(
            {"history": FeatureConfig("history", table)},
            "sgd",
            **ENGINES[engine],
        )

    def step(ids, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(layer(ids, weights)["history"])
        return tape.gradient(loss, weights)

    given = np.arange(BATCH), np.ones(BATCH, np.float32)
    inputs = [
        distribute(
            strategy, [{"history": each}] * strategy.num_replicas_in_sync
        )
        for each in given
    ]
    run = tf.function(lambda *args: strategy.run(step, args))
    with pytest.raises(NotImplementedError, match=r"'history'.*the weights"):
        run(*inputs)
