"""Sharded tables in Keras's loops, against a model on one device."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import nightly, on
from strategies.keras_models import (
    DIM,
    PER_REPLICA,
    USERS,
    as_batches,
    assert_equal_heads,
    assert_equal_tables,
    compile_model,
    distribute,
    make_model,
    make_samples,
    one_device,
)
from training_helpers import tables_of

pytestmark = on("mirrored:2", "workers:2", tier="nightly")


@pytest.fixture(scope="module")
def steps(strategy):
    """Three steps of the global batch, and one of half a replica's."""
    whole = 3 * PER_REPLICA * strategy.num_replicas_in_sync
    return make_samples(whole + PER_REPLICA // 2)


@pytest.fixture(scope="module")
def alone(steps, strategy):
    """The model, and its layer, that one device trains; only to be read."""
    trained = {}

    def of(make=tfrs_embed.PartialTPUEmbedding):
        if make not in trained:
            trained[make] = one_device(steps, strategy, make=make)
        return trained[make]

    return of


def sum_of_squares(labels, predictions):
    return tf.square(labels - tf.cast(predictions, tf.float32))


def fit(model, strategy, steps):
    """Trains until the data is out, which some replicas' is first; twice."""
    for _ in range(2):
        model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)


@on("mirrored:2")
@nightly(
    lambda make, steps_per_execution: (
        steps_per_execution == 1 or make is tfrs_embed.DistributedEmbedding
    )
)
@pytest.mark.parametrize(
    ("make", "steps_per_execution"),
    [
        (tfrs_embed.PartialTPUEmbedding, 1),
        (tfrs_embed.PartialTPUEmbedding, 3),
        (tfrs_embed.DistributedEmbedding, 3),
    ],
)
def test_fit_equals_one_device(
    strategy, steps, alone, make, steps_per_execution
):
    with strategy.scope():
        model, layer = make_model(make=make)
        compile_model(model, steps_per_execution=steps_per_execution)
    single, expected = alone(make)
    fit(model, strategy, steps)
    assert_equal_tables(layer, expected)
    assert_equal_heads(model, single)
    assert layer.step.numpy() == 8


@on("workers:2", tier="more")
def test_evaluate_and_predict(strategy, steps):
    with strategy.scope():
        model, _ = make_model()
        compile_model(model)
    single, _ = make_model()
    expected = single.predict(as_batches(steps, 8), verbose=0)
    loss = model.evaluate(distribute(strategy, steps), steps=4, verbose=0)
    assert np.isfinite(loss)
    dataset = as_batches(steps, PER_REPLICA * strategy.num_replicas_in_sync)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    found = model.predict(dataset.with_options(options), verbose=0)
    # Several workers share the samples out, in an order of their own.
    np.testing.assert_allclose(
        np.sort(found, 0), np.sort(expected, 0), rtol=1e-4, atol=1e-5
    )


@on("mirrored:2", "workers:2", tier="more")
def test_initial_values_are_those_of_one_device(strategy):
    with strategy.scope():
        _, layer = make_model()
    _, expected = make_model()
    assert_equal_tables(layer, expected, rtol=0, atol=0)


@on("workers:2", tier="more")
def test_weights_can_be_read_and_set(strategy, steps):
    with strategy.scope():
        model, layer = make_model()
        compile_model(model)
    before = model.get_weights()
    shapes = [w.shape for w in before]
    assert (USERS, DIM) in shapes
    fit(model, strategy, steps)
    trained = layer.embedding_tables["user"].numpy()
    model.set_weights(before)
    _, fresh = make_model()
    assert not np.array_equal(trained, fresh.embedding_tables["user"])
    assert_equal_tables(
        layer.tpu_embedding and _large(layer), _large(fresh), rtol=0, atol=0
    )
    assert layer.tpu_embedding.step.numpy() == 0


class _large:
    def __init__(self, layer):
        self.embedding_tables = {
            k: layer.embedding_tables[k] for k in ("user", "item")
        }


@nightly(lambda scaled: not scaled)
@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_float16(strategy, steps, alone, scaled):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("the next test has all that is different there")
    optimizer = tf_keras.optimizers.SGD(0.05)
    with strategy.scope():
        if scaled:
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
                tf_keras.optimizers.SGD(0.05), initial_scale=2.0**4
            )
        model, layer = make_model(policy="mixed_float16")
        model.compile(
            optimizer=optimizer,
            loss=tf_keras.losses.MeanSquaredError(
                reduction=tf_keras.losses.Reduction.SUM
            ),
        )
    _, expected = alone()
    fit(model, strategy, steps)
    assert_equal_tables(layer, expected, rtol=0.05, atol=0.02)


@on("workers:2", tier="more")
def test_an_overflow_on_one_replica_skips_the_step_on_all(strategy):
    with strategy.scope():
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.05), initial_scale=8.0
        )
        model, layer = make_model(policy="mixed_float16")
        compile_model(model)
        model.optimizer = optimizer
        optimizer.build(model.trainable_variables)
    before = tables_of(layer)
    samples = make_samples(PER_REPLICA * strategy.num_replicas_in_sync)
    # The last replica's labels are infinite.
    samples[1][-PER_REPLICA:] = np.inf

    def step(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = tf.reduce_sum(sum_of_squares(labels, outputs))
            loss = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    run = tf.function(lambda batch: strategy.run(step, (batch,)))
    run(next(iter(distribute(strategy, samples))))
    for name, table in layer.embedding_tables.items():
        np.testing.assert_array_equal(table.numpy(), before[name])
    assert layer.tpu_embedding.step.numpy() == 0
    assert float(optimizer.loss_scale) == 4.0


@on("workers:2", tier="more")
def test_a_model_built_by_its_first_step(strategy, steps, alone):
    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            _, self.embed = make_model()
            # Not built yet, unlike the one of the functional model.
            self.embed = type(self.embed).from_config(self.embed.get_config())
            self.dense = tf_keras.layers.Dense(
                1, kernel_initializer=tf_keras.initializers.RandomNormal(seed=7)
            )

        def call(self, inputs):
            v = self.embed(inputs)
            return self.dense(v["user"] * v["items"] + v["hour"])

    with strategy.scope():
        model = Model()
        compile_model(model)
    _, expected = alone()
    fit(model, strategy, steps)
    assert_equal_tables(model.embed, expected)
