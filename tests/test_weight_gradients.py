"""Gradients of ids' weights, where the conformance suite has no layer."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import layers
from process_tiers import on
from tfrs_embed import FeatureConfig, TableConfig

pytestmark = on("keras:3", tier="more")

IDS = tf.ragged.constant([[1, 2, 2], [], [9]], tf.int64)
WEIGHTS = np.array([0.5, 2.0, -1.0, 3.0], np.float32)
FACTORS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def make(threshold=0, combiner="mean", **options):
    table = TableConfig("t", 10, 4, "uniform", combiner=combiner)
    feature = FeatureConfig("f", table, **options)
    return layers.PartialTPUEmbedding(feature, "sgd", size_threshold=threshold)


def loss_of(lookup, weights):
    vectors = lookup(IDS, IDS.with_values(weights))
    return tf.reduce_sum(vectors * FACTORS)


def differences(lookup):
    """The gradient of the weights by differences of the loss."""
    found = []
    for i in range(len(WEIGHTS)):
        step = np.zeros_like(WEIGHTS)
        step[i] = 0.01
        up, down = (loss_of(lookup, WEIGHTS + s) for s in (step, -step))
        found.append((up - down) / 0.02)
    return np.array(found)


@pytest.mark.parametrize(
    "hashing",
    [
        None,
        tfrs_embed.Hash(),
        tfrs_embed.QuotientRemainder(20, operation="mult"),
    ],
    ids=["", "hash", "quotient"],
)
def test_a_constant_table_gives_weights_their_gradient(hashing):
    """Also if nothing is trained: layers that are frozen, training=False."""
    layer = make(hashing=hashing)
    expected = differences(functools.partial(layer, training=False))
    before = layer.embedding_tables["t"].numpy()
    for frozen in (False, True):
        layer.trainable = not frozen
        weights = tf.Variable(WEIGHTS)
        with tf.GradientTape() as tape:
            lookup = functools.partial(layer, training=frozen)
            loss = loss_of(lookup, weights)
        found = tape.gradient(loss, weights)
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)
    np.testing.assert_array_equal(layer.embedding_tables["t"], before)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_embedding_lookup(combiner):
    table = tf.Variable(tf.random.stateless_normal([10, 4], [1, 2]))
    weights = tf.Variable(WEIGHTS)

    def lookup(ids, weights):
        return tfrs_embed.embedding_lookup(table, ids, combiner, weights)

    with tf.GradientTape() as tape:
        loss = loss_of(lookup, weights)
    of_weights, of_table = tape.gradient(loss, [weights, table])
    np.testing.assert_allclose(
        of_weights, differences(lookup), rtol=1e-2, atol=1e-3
    )
    with tf.GradientTape() as tape:
        loss = loss_of(lookup, WEIGHTS)
    np.testing.assert_allclose(
        tf.convert_to_tensor(of_table),
        tf.convert_to_tensor(tape.gradient(loss, table)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
def test_in_a_function_of_its_own(threshold):
    layer = make(threshold)
    weights = tf.Variable(WEIGHTS)
    expected = differences(functools.partial(layer, training=False))
    loss = tf.function(lambda: loss_of(layer, weights * 1.0))
    with tf.GradientTape() as tape:
        value = loss()
    found = tape.gradient(value, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)


def test_a_bag_whose_weights_add_up_to_zero_gives_none():
    for combiner in ("mean", "sqrtn"):
        layer = make(combiner=combiner)
        weights = tf.Variable(tf.zeros_like(WEIGHTS))
        with tf.GradientTape() as tape:
            loss = loss_of(layer, weights)
        found = tape.gradient(loss, weights)
        np.testing.assert_array_equal(found, np.zeros_like(WEIGHTS))
