"""A training step on one table, beside TensorFlow Recommenders off-TPU.

Times a whole step (lookup, a sum over the outputs, backward pass, update) of
each contender in turn, over several rounds, so that a change in the machine's
speed meets them all. Prints the median of each, and its ratio to tfrs.
"""

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# tensorflow_recommenders needs tf.keras to be Keras 2.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

tpu = tf.tpu.experimental.embedding


def make_ids(args, rows):
    """Ids with the power law that recommenders' ids have."""
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.05, args.batch * args.hotness) - 1) % rows
    return tf.constant(ids.reshape(args.batch, args.hotness), tf.int64)


def make_table(args, rows, initializer="zeros"):
    return tpu.TableConfig(
        rows,
        args.dim,
        combiner="sum",
        name="table",
        initializer=tf_keras.initializers.get(initializer),
    )


def ours(args, rows, optimizer, output_shape=None, **kwargs):
    """This library's layer."""
    return tfrs_embed.PartialTPUEmbedding(
        tpu.FeatureConfig(make_table(args, rows), output_shape=output_shape),
        optimizer,
        size_threshold=0,
        **kwargs,
    )


def theirs(args, rows, optimizer):
    """Tfrs's layer, which off-TPU the model's optimizer trains."""
    return tfrs.layers.embedding.TPUEmbedding(
        tpu.FeatureConfig(make_table(args, rows)), optimizer
    )


def make_step(layer, ids, optimizer=None):
    """A traced training step."""

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            activations = layer(ids)
            if activations.shape.rank == 3:
                activations = tf.reduce_sum(activations, 1)
            loss = tf.reduce_sum(activations * activations)
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        if optimizer is not None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


def legacy(name):
    return getattr(tf_keras.optimizers.legacy, name)(0.01)


def contenders(args):
    """Name -> a function that makes a traced step."""
    rows, batch = args.rows, args.batch
    dense = make_ids(args, rows)
    ragged = tf.RaggedTensor.from_uniform_row_length(
        tf.reshape(dense, [-1]), args.hotness
    )
    ragged = tf.RaggedTensor.from_row_splits(
        ragged.flat_values, ragged.row_splits
    )

    def tfrs_step(ids, name):
        optimizer = legacy(name)
        return make_step(theirs(args, rows, optimizer), ids, optimizer)

    yield "tfrs Adagrad, dense ids", lambda: tfrs_step(dense, "Adagrad")
    yield "tfrs Adagrad, ragged ids", lambda: tfrs_step(ragged, "Adagrad")
    for name in ("SGD", "Adagrad", "Adam", "FTRL"):
        optimizer = getattr(tpu, name)(0.01)
        yield (
            f"tfrs_embed {name}, dense ids",
            lambda o=optimizer: make_step(ours(args, rows, o), dense),
        )
        yield (
            f"tfrs_embed {name}, dense ids, combined",
            lambda o=optimizer: make_step(
                ours(args, rows, o, output_shape=[batch]), dense
            ),
        )
        yield (
            f"tfrs_embed {name}, ragged ids",
            lambda o=optimizer: make_step(ours(args, rows, o), ragged),
        )
    for other in (rows // 10, rows * 5):
        # The same ids: only the table's size differs.
        ids = tf.constant(dense.numpy() % min(rows // 10, other))
        yield (
            f"tfrs_embed Adagrad, {other:,} rows, {rows // 10:,} used",
            lambda r=other, i=ids: make_step(
                ours(args, r, tpu.Adagrad(0.01), output_shape=[batch]), i
            ),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hotness", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="a round")
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()

    steps = {n: make for n, make in contenders(args) if args.only in n}
    times = {name: [] for name in steps}
    made = {name: make() for name, make in steps.items()}
    for step in made.values():
        step()  # Traces, and creates the variables.
    gc.disable()
    for _ in range(args.rounds):
        for name, step in made.items():
            step()  # Brings the table back into the caches.
            for _ in range(args.steps):
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)

    reference = {
        kind: statistics.median(times[name])
        for kind in ("dense", "ragged")
        for name in [f"tfrs Adagrad, {kind} ids"]
        if name in times
    }
    print(
        f"{args.rows:,} x {args.dim}, batch {args.batch}, hotness "
        f"{args.hotness}, {len(os.sched_getaffinity(0))} cores, TensorFlow "
        f"{tf.__version__}"
    )
    print("| step | ms, median | ms, fastest | of tfrs |")
    print("|---|---|---|---|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        kind = "ragged" if "ragged" in name or "combined" in name else "dense"
        ratio = f"{median / reference[kind]:.2f}" if kind in reference else ""
        print(
            f"| {name} | {median * 1e3:.1f} | {min(seconds) * 1e3:.1f} "
            f"| {ratio} |"
        )


if __name__ == "__main__":
    main()
