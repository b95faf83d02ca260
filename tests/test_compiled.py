"""tf.function(jit_compile=True), inside of which no layer works."""

import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from helpers import assert_unchanged, state

TABLE = tfrs_embed.TableConfig("t", 9, 3)
FEATURE = tfrs_embed.FeatureConfig("f", TABLE)
LAYERS = {
    "partial": lambda: tfrs_embed.PartialTPUEmbedding(
        FEATURE, "adagrad", size_threshold=0
    ),
    "partial, small": lambda: tfrs_embed.PartialTPUEmbedding(
        FEATURE, None, size_threshold=None
    ),
    "distributed": lambda: tfrs_embed.DistributedEmbedding(FEATURE),
    "by key": lambda: tfrs_embed.All2AllDenseEmbedding(
        9, 3, 1, 1, optimizer="sgd"
    ),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_compiled_functions_are_refused(make):
    layer = make()
    rank = 3 if isinstance(layer, tfrs_embed.All2AllDenseEmbedding) else 1
    ids = tf.zeros([2, 1, 1][:rank], tf.int64)
    layer(ids)
    before = state(layer)

    @tf.function(jit_compile=True)
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        return tape.gradient(loss, layer.trainable_variables)

    with pytest.raises(NotImplementedError, match="Leave jit_compile out"):
        step(ids)
    assert_unchanged(layer, before)
    tf.function(layer)(ids)


def test_a_compiled_plain_layer_is_refused():
    layer = tfrs_embed.Embedding(9, 3)
    with pytest.raises(NotImplementedError, match="Leave jit_compile out"):
        tf.function(layer, jit_compile=True)(tf.constant([1]))


def test_compiled_models_are_refused():
    layer = LAYERS["partial"]()
    model = tf_keras.Sequential([layer, tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match="Leave jit_compile out"):
        model.fit(tf.constant([1, 2]), tf.constant([1.0, 2.0]), verbose=0)
    model.compile("sgd", "mse")
    model.fit(tf.constant([1, 2]), tf.constant([1.0, 2.0]), verbose=0)
