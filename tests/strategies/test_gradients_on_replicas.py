"""The scenarios of tests/test_gradients.py with several replicas."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from gradient_scenarios import (
    BATCH,
    DIM,
    ROWS,
    SCENARIOS,
    Program,
    batches,
    expected,
    initial,
    optimizer,
)
from process_tiers import on
from strategies.replicas import distribute
from tfrs_embed.compat.strategies import is_tpu

pytestmark = on("mirrored:2", "tpu:2x4", tier="nightly")

# What neither a compiled program nor collectives have room for.
UNFIT = {"in_a_branch"}


def make_program(strategy, nested=False):
    with strategy.scope():
        table = tfrs_embed.TableConfig("table", ROWS, DIM)
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("feature", table),
            optimizer=tf_keras.optimizers.legacy.Adagrad(0.1),
            batch_size=BATCH,
            size_threshold=0,
        )
    # A TPU's tables are made for the first batch.
    [batch] = steps_of(strategy, 1)
    run(strategy, lambda ids, x: layer(ids), batch)
    layer.embedding_tables["table"].assign(initial())
    with strategy.scope():
        program = Program(
            layer,
            lambda: layer.trainable_variables,
            optimizer(legacy=True),
            tf.function if nested else (lambda function: function),
        )
    return layer, program


def run(strategy, step, global_batch):
    """Runs a step, each replica's on its share of a global batch."""
    ids, x = global_batch
    replicas = strategy.num_replicas_in_sync
    shares = list(
        zip(np.split(ids, replicas), np.split(x, replicas), strict=True)
    )
    shares = [(tf.constant(i), tf.constant(v)) for i, v in shares]

    @tf.function
    def on_all(ids, x):
        def on_replica(ids, x):
            step(ids, x)
            return 0

        strategy.run(on_replica, (ids, x))

    on_all(*distribute(strategy, shares))


def steps_of(strategy, count=2):
    return batches(count, BATCH * strategy.num_replicas_in_sync)


def assert_untrained(layer):
    found = layer.embedding_tables["table"].numpy()
    np.testing.assert_array_equal(found, initial())
    assert int(layer.step.numpy()) == 0


@on("tpu:2x4")
@on("mirrored:2", tier="more")
def test_no_updates_holds_for_the_replicas_of_a_run(strategy):
    layer, program = make_program(strategy)
    [batch] = steps_of(strategy, 1)

    def step(ids, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x))
        tape.gradient(loss, layer.trainable_variables)

    with tfrs_embed.no_updates():
        run(strategy, step, batch)
    assert_untrained(layer)
    run(strategy, step, batch)
    assert int(layer.step.numpy()) == 1


@on(
    "tpu:2x4",
    when=lambda scenario, nested: scenario.__name__ == "penalty" and not nested,
)
@on(
    "mirrored:2",
    tier="more",
    when=lambda scenario, nested: scenario.__name__ == "penalty" and nested,
)
@pytest.mark.parametrize("nested", [False, True], ids=["function", "nested"])
@pytest.mark.parametrize(
    "scenario",
    [s for s in SCENARIOS if s.__name__ not in UNFIT],
    ids=lambda s: s.__name__,
)
def test_a_table_is_as_a_variable_of_keras(strategy, scenario, nested):
    name = scenario.__name__
    if nested and name == "jacobian":
        pytest.skip("an error, which tests/test_gradients.py takes")
    if nested and is_tpu(strategy):
        pytest.skip("an error in the lookup, which another test takes")
    if name == "saliency":
        pytest.skip("its sum is of one replica")
    layer, program = make_program(strategy, nested)
    steps = steps_of(strategy)
    for batch in steps:
        run(strategy, lambda ids, x: scenario(program, ids, x), batch)
    size = BATCH * strategy.num_replicas_in_sync
    table, head, other = expected(scenario, len(steps), size)
    found = layer.embedding_tables["table"].numpy()
    np.testing.assert_allclose(found, table, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(program.head, head, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(program.other, other, rtol=1e-3, atol=1e-4)


def test_another_gradient_updates_nothing(strategy):
    layer, program = make_program(strategy)

    def saliency(ids, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            prediction = program.predict(ids, x)
        program.head.assign_add(
            0.0 * program.head + tf.reduce_sum(tape.gradient(prediction, x))
        )

    [batch] = steps_of(strategy, 1)
    with strategy.scope():
        program.head = tf.Variable(
            program.head, aggregation=tf.VariableAggregation.SUM
        )
    run(strategy, saliency, batch)
    assert_untrained(layer)


@on("tpu:2x4")
def test_an_unused_gradient_updates(strategy):
    layer, program = make_program(strategy)

    def step(ids, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        gradients = tape.gradient(loss, program.variables)
        program.apply(gradients[1:], program.variables[1:])

    for number, batch in enumerate(steps_of(strategy, 2)):
        run(strategy, step, batch)
        assert int(layer.step.numpy()) == number + 1


def test_a_second_update_of_one_lookup_is_an_error(strategy):
    layer, program = make_program(strategy)

    def step(ids, x):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        for _ in range(2):
            gradients = tape.gradient(loss, program.variables)
            program.apply(gradients, program.variables)

    [batch] = steps_of(strategy, 1)
    with pytest.raises(RuntimeError, match="a second time"):
        run(strategy, step, batch)
    assert_untrained(layer)
