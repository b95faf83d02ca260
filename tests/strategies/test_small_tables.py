"""Small tables, whose gradients Keras's optimizers get from all replicas."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import on
from strategies.replicas import distribute

pytestmark = [on("mirrored:2"), on("keras:3 mirrored:2", tier="more")]


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
def test_a_row_of_several_replicas_gets_the_sum_of_its_gradients(
    strategy, kind
):
    make = getattr(keras.optimizers, kind)
    with strategy.scope():
        table = tfrs_embed.TableConfig("t", 6, 2, "ones")
        layer = layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), None
        )
        layer.build(None)
        optimizer = make(0.1)
        optimizer.build(layer.trainable_variables)
    replicas = strategy.num_replicas_in_sync
    # Each has row 1 twice, and one row of its own.
    ids = [np.array([1, 1, 2 + i]) for i in range(replicas)]

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 3)
        weights = layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    dense = tf.Variable(tf.ones([6, 2]))
    expected = make(0.1)
    given = distribute(strategy, ids)
    run = tf.function(lambda ids: strategy.run(step, (ids,)))
    for _ in range(3):
        run(given)
        with tf.GradientTape() as tape:
            rows = tf.gather(dense, np.concatenate(ids))
            loss = tf.reduce_sum(rows**3)
        gradient = tf.convert_to_tensor(tape.gradient(loss, dense))
        expected.apply_gradients([(gradient, dense)])
    assert np.abs(dense[1] - 1.0).min() > 0.05
    np.testing.assert_allclose(layer.embedding_tables["t"], dense, rtol=1e-5)


@pytest.mark.parametrize("built", [True, False])
def test_a_layer_that_fit_builds_trains_as_one_that_was_built(strategy, built):
    """Keras 3 first calls a model for its shapes, and makes no variables."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(6, 2, "ones")
            self.head = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, ids):
            return self.head(self.table(ids))

    ids, targets = np.array([1, 1, 2, 1]), np.zeros([4, 1], np.float32)
    with strategy.scope():
        model = Model()
        if built:
            model.table.build(None)
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(ids, targets, batch_size=4, epochs=3, shuffle=False, verbose=0)

    table, kernel = tf.Variable(tf.ones([6, 2])), tf.Variable(tf.ones([2, 1]))
    bias, expected = tf.Variable([0.0]), keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            output = tf.gather(table, ids) @ kernel + bias
            loss = tf.reduce_mean((output - targets) ** 2)
        weights = [table, kernel, bias]
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, weights))
        expected.apply_gradients(zip(gradients, weights, strict=True))
    np.testing.assert_allclose(model.table.embeddings, table, rtol=1e-4)
