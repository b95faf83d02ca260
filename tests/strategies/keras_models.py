"""A model with sharded tables, its data, and the same on one device."""

import numpy as np
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


def one_device(steps, strategy, **kwargs):
    """A model trained on the global batches without a strategy."""
    model, layer = make_model(**kwargs)
    compile_model(model)
    batches = as_batches(steps, PER_REPLICA * strategy.num_replicas_in_sync)
    model.fit(batches, epochs=2, verbose=0)
    return model, layer


def assert_equal_heads(model, expected):
    """Compares the layer on top of the embeddings."""
    for ours, theirs in zip(
        model.layers[-1].get_weights(),
        expected.layers[-1].get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_equal_tables(layer, expected, **kwargs):
    kwargs = {"rtol": 1e-4, "atol": 1e-5, **kwargs}
    for name, table in expected.embedding_tables.items():
        np.testing.assert_allclose(
            layer.embedding_tables[name].numpy(),
            table.numpy(),
            err_msg=name,
            **kwargs,
        )
