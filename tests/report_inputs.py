"""A run's checkpoints, exported models and log, for reports."""

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed import FeatureConfig, TableConfig

#: A name that HTML, mathematics and columns of 400 pixels must bear.
ODD = "genres/<b>of</b> $all$ kinds & 'more'" + "_very_long" * 12
ROWS = {"users": 3_000, "movies": 1_000, ODD: 200}
DIM = 8


def features():
    """A feature for each table."""
    return {
        f"feature_{i}": FeatureConfig(f"f{i}", TableConfig(name, rows, DIM))
        for i, (name, rows) in enumerate(ROWS.items())
    }


def ids(samples):
    """Ids of which some are much more frequent, and half are never there."""
    rng = np.random.default_rng(0)
    return {
        name: rng.zipf(1.5, samples) % (feature.table.vocabulary_size // 2)
        for name, feature in features().items()
    }


def make(folder):
    """Makes all of them in a folder."""
    # A gradient may be too small to change a slot: always the same ones.
    tf_keras.utils.set_random_seed(1)
    layer = tfrs_embed.PartialTPUEmbedding(
        features(), "adagrad", size_threshold=10
    )
    inputs = {
        name: tf_keras.Input([], dtype="int64", name=name)
        for name in features()
    }
    vectors = tf_keras.layers.Concatenate()(list(layer(inputs).values()))
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(vectors))
    model.compile("adam", "mse")
    given, ratings = ids(400), np.ones(400)
    log = tfrs_embed.monitoring.TableStatistics(
        folder / "log", every=2, batches=[given]
    )
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), str(folder / "run"), max_to_keep=5
    )
    for _ in range(3):
        model.fit(given, ratings, batch_size=100, callbacks=[log], verbose=0)
        manager.save()
    # Dead rows, and one that training has spoilt.
    table = layer.embedding_tables["movies"]
    values = table[:].numpy()
    values[600:] = 0
    values[3, 2] = np.nan
    table.assign(values)
    manager.save()
    table.assign(np.nan_to_num(values))
    for rows in ("float32", "int8"):
        tfrs_embed.serving.export(
            model, str(folder / f"model_{rows}"), rows=rows
        )
    keys = tfrs_embed.DynamicEmbedding(DIM, input_dim=1_000)
    for batch in ([1, 1, 1, 1, 1, 1, 7], [8, 9, 1]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keys(tf.constant(batch, tf.int64)))
        tape.gradient(loss, keys.trainable_variables)
    tf.train.Checkpoint(keys=keys).save(str(folder / "keys" / "checkpoint"))
