"""Features whose ids are not combined, on several replicas."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import on
from strategies.replicas import distribute, of_chief
from tfrs_embed import DistributedEmbedding, FeatureConfig, TableConfig
from training_helpers import assert_unchanged, differentiate, state, tables_of

pytestmark = [
    on("mirrored:2", "workers:2", tier="nightly"),
    on("mirrored:2", tier="more", when=lambda place: place == "column"),
    on("workers:2", tier="more", when=lambda place: place == "row"),
]

PLACES = pytest.mark.parametrize("place", ["row", "column", "replicated"])


def make_layer(strategy, place):
    table = TableConfig("movies", 40, 4, placement=place)
    feature = FeatureConfig("history", table, combiner=None)
    with strategy.scope():
        return DistributedEmbedding({"history": feature}, optimizer="sgd")


def ragged(rows, splits=None):
    if splits is None:
        return tf.ragged.constant(rows, tf.int64, ragged_rank=1)
    return tf.RaggedTensor.from_row_splits(
        tf.constant(rows, tf.int64), splits, validate=False
    )


@PLACES
def test_fit_and_serve(strategy, place, tmp_path):
    layer = make_layer(strategy, place)
    with strategy.scope():
        history = tf_keras.Input([None], dtype=tf.int64, ragged=True, name="h")
        vectors = layer({"history": history})["history"]
        sums = tf_keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))
        model = tf_keras.Model(history, tf_keras.layers.Dense(1)(sums(vectors)))
        model.compile("sgd", "mse")
    ids = ragged([[3, 7, 3], [], [0], [39, 3]] * 2)
    data = tf.data.Dataset.from_tensor_slices((ids, tf.ones([8, 1]))).batch(8)
    before = tables_of(layer)["movies"]
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    rows = tables_of(layer)["movies"]
    assert (rows != before).any(1).nonzero()[0].tolist() == [0, 3, 7, 39]
    path = of_chief(strategy, tmp_path) / "served"
    tfrs_embed.serving.export(model, str(path), progress=False)
    served = tf.saved_model.load(str(path))
    found = served.serve(ids)
    dense = model.layers[-1].kernel.numpy(), model.layers[-1].bias.numpy()
    expected = [rows[each].sum(0) @ dense[0] + dense[1] for each in ids.numpy()]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@PLACES
def test_bad_splits_of_one_replica_change_nothing(strategy, place):
    layer = make_layer(strategy, place)

    def replica_step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(inputs, training=True)["history"])
        differentiate(tape, loss, layer.trainable_variables)

    step = tf.function(lambda inputs: strategy.run(replica_step, (inputs,)))
    good, bad = ragged([[3, 7], [1]]), ragged([3, 7, 1], [0, 4, 3])
    others = [good] * (strategy.num_replicas_in_sync - 1)
    step(distribute(strategy, [{"history": each} for each in [*others, good]]))
    before = state(layer)
    batches = distribute(
        strategy, [{"history": each} for each in [*others, bad]]
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"history.*row splits \[0 4 3\]"
    ):
        step(batches)
    assert_unchanged(layer, before)
    step(distribute(strategy, [{"history": each} for each in [*others, good]]))
    assert layer.step.numpy() == 2
