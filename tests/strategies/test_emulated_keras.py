"""Keras models that are written for a TPU train on emulated slices."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from tfrs_embed.testing import EmulatedTPUStrategy

from process_tiers import on

pytestmark = on("tpu:4x4", tier="more")

tpu = tf.tpu.experimental.embedding
BATCH = 32  # Of the slice.
STEPS = 8


def make_model(strategy, pipelined):
    tables = [
        tpu.TableConfig(100, 8, tf.zeros_initializer(), combiner=c, name=n)
        for n, c in (("users", "sum"), ("items", "mean"))
    ]
    per_replica = BATCH // strategy.num_replicas_in_sync
    features = {
        t.name: tpu.FeatureConfig(t, output_shape=[per_replica]) for t in tables
    }
    with strategy.scope():
        inputs = {
            "users": tf.keras.Input([], dtype=tf.int64),
            "items": tf.keras.Input([None], dtype=tf.int64, ragged=True),
        }
        layer = tfrs.layers.embedding.TPUEmbedding(
            features, tpu.Adagrad(0.2), pipelined
        )
        vectors = layer(inputs)
        x = tf.keras.layers.Concatenate()([vectors["users"], vectors["items"]])
        dense = tf.keras.layers.Dense(
            1, kernel_initializer=tf.keras.initializers.RandomNormal(0, 0.5, 3)
        )
        model = tf.keras.Model(inputs, dense(x))
        model.compile(
            tf.keras.optimizers.SGD(0.05),
            "mse",
            metrics=["mae"],
            steps_per_execution=2,
        )
    return model, layer


def make_dataset(strategy):
    rng = np.random.default_rng(0)
    users = rng.integers(0, 100, STEPS * BATCH)
    lengths = rng.integers(0, 4, users.size)
    items = tf.RaggedTensor.from_row_lengths(
        rng.integers(0, 100, lengths.sum()), lengths
    )
    labels = (users % 5).astype(np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"users": users, "items": items}, labels)
    )
    dataset = dataset.batch(BATCH, drop_remainder=True).repeat()
    return strategy.experimental_distribute_dataset(
        dataset, tf.distribute.InputOptions(experimental_fetch_to_device=False)
    )


@pytest.mark.parametrize("topology", [(1, 4), (2, 2)])
def test_a_keras_model_trains(topology):
    strategy = EmulatedTPUStrategy(topology)
    model, layer = make_model(strategy, pipelined=True)
    data = make_dataset(strategy)
    history = model.fit(data, epochs=4, steps_per_epoch=STEPS, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.3 * losses[0], losses
    loss, _ = model.evaluate(data, steps=STEPS, verbose=0)
    assert loss < losses[-1]
    predictions = model.predict(data, steps=2, verbose=0)
    assert predictions.shape == (2 * BATCH, 1)
    assert [*layer.embedding_tables] == ["items_users"]


def test_keras_pipelines_by_its_steps_per_execution():
    strategy = EmulatedTPUStrategy((1, 2))
    tables = {}
    for name, pipelined, steps in (
        ("sequential", False, 2),
        ("pipelined", True, 2),
        ("one step", True, 1),
    ):
        tf.keras.utils.set_random_seed(1)
        model, layer = make_model(strategy, pipelined)
        model.compile("sgd", "mse", steps_per_execution=steps)
        model.fit(make_dataset(strategy), steps_per_epoch=STEPS, verbose=0)
        tables[name] = layer.embedding_tables["items_users"].values[0].numpy()
    np.testing.assert_array_equal(tables["one step"], tables["sequential"])
    assert np.abs(tables["pipelined"] - tables["sequential"]).max() > 1e-3
