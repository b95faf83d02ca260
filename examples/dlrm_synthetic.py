"""Trains a DLRM (Naumov et al. 2019) on synthetic clicks, and measures it.

    python dlrm_synthetic.py --replicas 2   # GPUs, or parts of the CPU
    python dlrm_synthetic.py --workers 2    # processes on this machine

On a cluster, start it once per worker, with TF_CONFIG set, or with --slurm.

All tables are sharded by row over the replicas. Ids have a power law, as in
recommenders' logs: few of them make up most of a batch. A click depends on
hidden weights of the ids and of the dense features, so there is something to
learn. With --table_files the tables are in files: they may be larger than
memory.
"""

from __future__ import annotations

import os
import resource
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import cluster
import common_flags
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags

import tfrs_embed

FLAGS = flags.FLAGS
for _name, _default, _what in (
    ("tables", 8, "embedding tables"),
    ("rows", 100_000, "rows of each table"),
    ("dim", 16, "width of each table"),
    ("hotness", 1, "ids per sample and table"),
    ("batch", 1024, "samples per replica"),
    ("steps", 300, "training steps"),
    ("log_every", 50, "steps between two lines"),
    ("replicas", None, "replicas in this process; if not given, GPUs, or 2"),
):
    common_flags.count(_name, _default, _what)
flags.DEFINE_string("table_files", None, "a folder, for tables in files")
common_flags.workers()

ALPHA = 1.05
DENSE_FEATURES = 13
WARM_UP = 10  # Steps that are not timed: the first is traced.


def main(_: list[str]) -> None:
    """Trains on one process's replicas, or starts workers, or is one."""
    if FLAGS.replicas and (FLAGS.workers or cluster.given()):
        raise SystemExit(
            "--replicas is for one process, without other workers."
        )
    if cluster.given():
        strategy = cluster.join()
    elif FLAGS.workers:
        cluster.run_workers(FLAGS.workers)
        return
    else:
        strategy = cluster.local_replicas(FLAGS.replicas)
    try:
        train(strategy)
    except NotImplementedError as error:  # Too many logical CPUs.
        raise SystemExit(error) from None


def train(strategy: tf.distribute.Strategy) -> None:
    """Trains the model and prints how it went."""
    tf_keras.utils.set_random_seed(0)
    replicas = strategy.num_replicas_in_sync
    say = print if cluster.is_first(strategy) else lambda *_: None
    with strategy.scope():
        model = DLRM()
        optimizer = tf_keras.optimizers.Adam(1e-3)
    layer = model.embeddings
    say(layer.placement)
    batch = replicas * FLAGS.batch
    say(f"replicas: {replicas}, global batch: {batch:,}")

    def replica_step(
        dense: tf.Tensor, ids: tf.Tensor, clicks: tf.Tensor
    ) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(dense, ids, training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits)
            # Gradients are summed over the replicas.
            loss = tf.reduce_sum(losses) / batch
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return loss

    @tf.function
    def step(inputs: tuple) -> tf.Tensor:
        losses = strategy.run(replica_step, inputs)
        return strategy.reduce("SUM", losses, axis=None)

    def made(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = clicks(context)
        if not FLAGS.table_files:
            return dataset
        return layer.prefetch(dataset, lambda _, ids, __: model.by_table(ids))

    batches = iter(strategy.distribute_datasets_from_function(made))
    losses: list[float] = []
    warm_up = min(WARM_UP, FLAGS.steps - 1)
    start, before = time.perf_counter(), None
    for i in range(FLAGS.steps):
        if i == warm_up:
            start, before = time.perf_counter(), traffic(layer)
        losses.append(float(step(next(batches))))
        if i == 0 or (i + 1) % FLAGS.log_every == 0:
            recent = np.mean(losses[-FLAGS.log_every :])
            say(f"step {i + 1}: loss {recent:.4f}")
    steps = FLAGS.steps - warm_up
    seconds = (time.perf_counter() - start) / steps

    if before is None:
        say("one replica: no exchange")
    for replica, (first, last) in enumerate(
        zip(before or [], traffic(layer) or [], strict=True)
    ):
        each = {k: (last[k] - first[k]) / steps for k in last}
        say(
            f"replica {replica} sent, per step: {each['bytes'] / 1e6:.3f} MB "
            f"in {each['collectives']:.0f} collectives, for "
            f"{each['unique_keys']:,.0f} unique ids"
        )
    say(f"peak memory {peak_memory() / 2**20:,.0f} MiB in this process")
    say(
        f"samples_per_s={batch / seconds:.0f} ms_per_step={seconds * 1e3:.2f} "
        f"loss={np.mean(losses[-max(1, FLAGS.steps // 10) :]):.4f}"
    )


# Model.


class DLRM(tf_keras.Model):
    """Embeddings and dense features, their dot products, and an MLP on top."""

    def __init__(self) -> None:
        super().__init__()
        features, storage = {}, None
        if FLAGS.table_files:
            storage = tfrs_embed.FileStorage(FLAGS.table_files)
        for i in range(FLAGS.tables):
            table = tfrs_embed.TableConfig(
                f"table_{i}",
                FLAGS.rows,
                FLAGS.dim,
                initializer=tf_keras.initializers.RandomUniform(-0.05, 0.05),
                combiner="sum",
                storage=storage,
            )
            features[table.name] = tfrs_embed.FeatureConfig(
                table.name, table, output_shape=[FLAGS.batch, FLAGS.dim]
            )
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            features,
            # A rare row's gradient is that of one sample among a batch: next
            # to Keras's initial accumulator of 0.1 it would do nothing.
            tf_keras.optimizers.Adagrad(0.02, initial_accumulator_value=1e-6),
            size_threshold=0,  # All are sharded, in a small trial too.
        )
        self.bottom = mlp([64, FLAGS.dim])
        self.top = mlp([64, 32])
        self.click = tf_keras.layers.Dense(1)

    def by_table(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the embeddings' inputs, of [batch, tables, hotness] ids."""
        names = self.embeddings.placement.tables
        return {t.table: ids[:, i] for i, t in enumerate(names)}

    def call(
        self, dense: tf.Tensor, ids: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        vectors = self.embeddings(self.by_table(ids), training=training)
        bottom = self.bottom(dense)
        stacked = tf.stack([bottom, *vectors.values()], axis=1)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        # Each pair once.
        row, column = np.tril_indices(stacked.shape[1], -1)
        flat = tf.reshape(products, [-1, stacked.shape[1] ** 2])
        pairs = tf.gather(flat, row * stacked.shape[1] + column, axis=1)
        return self.click(self.top(tf.concat([bottom, pairs], axis=1)))[:, 0]


def mlp(units: list[int]) -> tf_keras.Sequential:
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(n, activation="relu") for n in units]
    )


# Data.


def clicks(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Endless batches for this process's replicas, of which no two are alike.

    Each is ([batch, dense features], [batch, tables, hotness] ids, [batch]
    clicks).
    """
    replicas = context.num_replicas_in_sync
    here = replicas // context.num_input_pipelines
    first = context.input_pipeline_id * here
    dense_weights = tf.random.stateless_normal([DENSE_FEATURES], [0, 0])

    def make(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # Replica `first + i % here`, in step i // here.
        number = i // here * replicas + first + i % here
        seeds = tf.random.split([0, number], 3)
        dense = tf.random.stateless_normal(
            [FLAGS.batch, DENSE_FEATURES], seeds[0]
        )
        ids = power_law(
            [FLAGS.batch, FLAGS.tables, FLAGS.hotness], FLAGS.rows, seeds[1]
        )
        # Logits with a standard deviation of 2, half of their variance each.
        of_dense = tf.linalg.matvec(dense, dense_weights)
        of_ids = tf.reduce_sum(hidden_weights(ids), axis=[1, 2])
        logits = of_dense * (2 / DENSE_FEATURES) ** 0.5
        logits += of_ids * (2 / FLAGS.tables / FLAGS.hotness) ** 0.5
        drawn = tf.random.stateless_uniform([FLAGS.batch], seeds[2])
        return dense, ids, tf.cast(drawn < tf.sigmoid(logits), tf.float32)

    return (
        tf.data.Dataset.counter(dtype=tf.int32)
        .map(make, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(2 * here)
    )


def power_law(shape: list[int], rows: int, seed: tf.Tensor) -> tf.Tensor:
    """Ids below `rows`, with probabilities that fall as (id + 1)^-ALPHA."""
    uniform = tf.random.stateless_uniform(shape, seed, dtype=tf.float64)
    g = 1 - ALPHA
    low, high = 1.0, (rows + 1.0) ** g
    ids = tf.cast((uniform * (high - low) + low) ** (1 / g), tf.int64) - 1
    return tf.minimum(ids, rows - 1)  # Rounding may go one too far.


def hidden_weights(ids: tf.Tensor) -> tf.Tensor:
    """A weight for each id of each table, by hashing: mean 0, deviation 1."""
    table = tf.range(tf.shape(ids)[1], dtype=tf.int64)[:, None]
    # Products wrap around, which mixes their upper bits.
    mixed = (ids * 1_000_003 + table) * 0x2545F4914F6CDD1D
    upper = tf.bitwise.right_shift(tf.bitcast(mixed, tf.uint64), 40)
    uniform = tf.cast(upper, tf.float32) / 2.0**24
    return (uniform - 0.5) * 12**0.5


# Measurements.


def traffic(
    layer: tfrs_embed.PartialTPUEmbedding,
) -> list[dict[str, int]] | None:
    """The traffic of each replica here; None: there is one in all."""
    large = layer.tpu_embedding
    counted = large.engine.traffic() if large else []
    return [vars(t) for t in counted] or None


def peak_memory() -> int:
    """Bytes that this process had in memory at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
