"""Which steps overlap on an emulated slice: what tapes record, in loops."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfrs_embed
from process_tiers import on
from tfrs_embed.compat.graphs import operations
from training_helpers import differentiate

pytestmark = [on("tpu:2x4"), on("tpu:4x4", tier="more")]

IDS = {"f": np.arange(8)}
RATE = 0.05
#: What three steps leave of a row of ones: see `Squares`.
STALE, FRESH, SAME = "stale", "fresh", "same"


def make_layer(strategy):
    table = tfrs_embed.TableConfig(
        "t", 40, 4, tf.constant_initializer(1.0), combiner="sum"
    )
    with strategy.scope():
        return tfrs_embed.PartialTPUEmbedding(
            {"f": tfrs_embed.FeatureConfig("f", table)},
            tf.tpu.experimental.embedding.SGD(RATE),
            pipeline_execution_with_tensor_core=True,
            size_threshold=0,
            batch_size=8,
        )


def loss_of(vectors):
    return tf.reduce_sum(vectors["f"] ** 2)


def kind_of(strategy, layer):
    """Whether three steps were pipelined, sequential or made no update."""
    [row] = {*layer.embedding_tables["t"].numpy()[:8].ravel().round(5)}
    step = 2 * RATE * strategy.num_replicas_in_sync  # Of a row's value.
    stale = 1 - step * (1 + 1 + (1 - step))
    found = {STALE: stale, FRESH: (1 - step) ** 3, SAME: 1.0}
    return {round(v, 5): k for k, v in found.items()}.get(round(float(row), 5))


def is_marked(function):
    """Whether any operation of a function is marked for pipelining."""
    return any(
        "_embedding_pipelining" in op.node_def.attr
        for op in operations(function.graph)
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, STALE),
        ({"training": None}, STALE),
        ({"training": True}, STALE),
        ({"training": False}, SAME),
    ],
    ids=str,
)
def test_a_loop_on_the_device(strategy, arguments, kind):
    layer = make_layer(strategy)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(layer(ids, **arguments))
        differentiate(tape, loss, layer.trainable_variables)

    @tf.function
    def loop(ids):
        for _ in tf.range(3):
            strategy.run(step, (ids,))

    loop = loop.get_concrete_function(IDS)
    assert is_marked(loop) == (kind == STALE)
    loop(IDS)
    assert kind_of(strategy, layer) == kind


def test_a_loop_around_the_function(strategy):
    layer = make_layer(strategy)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(layer(ids))
        differentiate(tape, loss, layer.trainable_variables)

    @tf.function
    def one(ids):
        strategy.run(step, (ids,))

    for _ in range(3):
        one(IDS)
    assert not is_marked(one.get_concrete_function(IDS))
    assert kind_of(strategy, layer) == FRESH


@pytest.mark.parametrize("training", [None, True])
def test_a_loop_without_a_tape(strategy, training):
    layer = make_layer(strategy)

    @tf.function
    def loop(ids):
        for _ in tf.range(3):
            strategy.run(layer, (ids,), {"training": training})

    loop(IDS)
    assert not is_marked(loop.get_concrete_function(IDS))
    assert kind_of(strategy, layer) == SAME


class Model(tfrs.Model):
    """Calls its layer as TFRS's own models do: without `training`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def compute_loss(self, inputs, training=False):
        return loss_of(self.layer(inputs))


@pytest.mark.parametrize(("at_once", "kind"), [(3, STALE), (1, FRESH)])
def test_fit_of_a_tfrs_model(strategy, at_once, kind):
    layer = make_layer(strategy)
    with strategy.scope():
        model = Model(layer)
        model.distribute_reduction_method = "first"
        model.compile("sgd", steps_per_execution=at_once)
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors(IDS).repeat(),
        tf.distribute.InputOptions(experimental_fetch_to_device=False),
    )
    model.fit(data, steps_per_epoch=3, verbose=0)
    assert kind_of(strategy, layer) == kind
    model.evaluate(data, steps=2 * at_once, verbose=0)
    assert kind_of(strategy, layer) == kind
