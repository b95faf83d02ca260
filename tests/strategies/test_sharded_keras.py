"""Sharded tables in Keras's loops, against a model on one device."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed

PER_REPLICA, DIM, USERS, ITEMS = 4, 3, 40, 60


def make_model(
    optimizer=None, policy=None, make=tfrs_embed.PartialTPUEmbedding, **kwargs
):
    """A functional model with two sharded tables and a mirrored one."""
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            rows,
            DIM,
            combiner="sum",
            initializer=tf_keras.initializers.RandomNormal(seed=seed),
        )
        for seed, (name, rows) in enumerate(
            {"user": USERS, "item": ITEMS, "hour": 5}.items()
        )
    }
    inputs = {
        "user": tf_keras.Input([], dtype=tf.int64, name="user"),
        "items": tf_keras.Input(
            [None], dtype=tf.int64, ragged=True, name="items"
        ),
        "hour": tf_keras.Input([], dtype=tf.int64, name="hour"),
    }
    layer = make(
        {
            "user": tfrs_embed.FeatureConfig("user", tables["user"]),
            "items": tfrs_embed.FeatureConfig("items", tables["item"]),
            "hour": tfrs_embed.FeatureConfig("hour", tables["hour"]),
        },
        optimizer="adagrad" if optimizer is None else optimizer,
        size_threshold=20,
        dtype=policy,
        **kwargs,
    )
    vectors = layer(inputs)
    product = vectors["user"] * vectors["items"] + vectors["hour"]
    dense = tf_keras.layers.Dense(
        1, kernel_initializer=tf_keras.initializers.RandomNormal(seed=7)
    )
    model = tf_keras.Model(inputs, dense(product))
    return model, layer


def sum_of_squares(labels, predictions):
    return tf.square(labels - tf.cast(predictions, tf.float32))


def compile_model(model, **kwargs):
    model.compile(
        optimizer=tf_keras.optimizers.SGD(0.05),
        loss=tf_keras.losses.MeanSquaredError(
            reduction=tf_keras.losses.Reduction.SUM
        ),
        **kwargs,
    )


def make_samples(number, seed=0):
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, ITEMS, rng.integers(0, 4)) for _ in range(number)]
    inputs = {
        "user": rng.integers(0, USERS, number),
        "items": tf.ragged.constant(
            [i.tolist() for i in items], dtype=tf.int64, ragged_rank=1
        ),
        "hour": rng.integers(0, 5, number),
    }
    return inputs, rng.normal(size=(number, 1)).astype(np.float32)


def as_batches(samples, size):
    return tf.data.Dataset.from_tensor_slices(samples).batch(size)


def distribute(strategy, samples):
    """Gives replica r of step s the batch number s * replicas + r."""
    batches = as_batches(samples, PER_REPLICA)

    def mine(context):
        local = strategy.num_replicas_in_sync // context.num_input_pipelines
        worker = context.input_pipeline_id
        return (
            batches.enumerate()
            .filter(
                lambda i, _: i // local % context.num_input_pipelines == worker
            )
            .map(lambda _, batch: batch)
        )

    return strategy.distribute_datasets_from_function(mine)


@pytest.fixture
def steps(strategy):
    """Three steps of the global batch, and one of half a replica's."""
    whole = 3 * PER_REPLICA * strategy.num_replicas_in_sync
    return make_samples(whole + PER_REPLICA // 2)


def one_device(steps, strategy, **kwargs):
    """A model trained on the global batches without a strategy."""
    model, layer = make_model(**kwargs)
    compile_model(model)
    batches = as_batches(steps, PER_REPLICA * strategy.num_replicas_in_sync)
    model.fit(batches, epochs=2, verbose=0)
    return model, layer


def fit(model, strategy, steps):
    """Trains until the data is out, which some replicas' is first; twice."""
    for _ in range(2):
        model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)


def assert_equal_tables(layer, expected, **kwargs):
    kwargs = {"rtol": 1e-4, "atol": 1e-5, **kwargs}
    for name, table in expected.embedding_tables.items():
        np.testing.assert_allclose(
            layer.embedding_tables[name].numpy(),
            table.numpy(),
            err_msg=name,
            **kwargs,
        )


@pytest.mark.parametrize(
    ("make", "steps_per_execution"),
    [
        (tfrs_embed.PartialTPUEmbedding, 1),
        (tfrs_embed.PartialTPUEmbedding, 3),
        (tfrs_embed.DistributedEmbedding, 3),
    ],
)
def test_fit_equals_one_device(strategy, steps, make, steps_per_execution):
    with strategy.scope():
        model, layer = make_model(make=make)
        compile_model(model, steps_per_execution=steps_per_execution)
    single, expected = one_device(steps, strategy, make=make)
    fit(model, strategy, steps)
    assert_equal_tables(layer, expected)
    for ours, theirs in zip(
        model.layers[-1].get_weights(),
        single.layers[-1].get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert layer.step.numpy() == 8


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


def test_initial_values_are_those_of_one_device(strategy):
    with strategy.scope():
        _, layer = make_model()
    _, expected = make_model()
    assert_equal_tables(layer, expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_float16(strategy, steps, scaled):
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
    _, expected = one_device(steps, strategy)
    fit(model, strategy, steps)
    assert_equal_tables(layer, expected, rtol=0.05, atol=0.02)


def test_an_overflow_on_one_replica_skips_the_step_on_all(strategy):
    with strategy.scope():
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.05), initial_scale=8.0
        )
        model, layer = make_model(policy="mixed_float16")
        compile_model(model)
        model.optimizer = optimizer
        optimizer.build(model.trainable_variables)
    before = {k: v.numpy() for k, v in layer.embedding_tables.items()}
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


def test_a_model_built_by_its_first_step(strategy, steps):
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
    _, expected = one_device(steps, strategy)
    fit(model, strategy, steps)
    assert_equal_tables(model.embed, expected)
