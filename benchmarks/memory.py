"""Times tables that take less memory, beside float32 and Adagrad.

    python benchmarks/memory.py

Training steps of samples of --width ids that follow a power law, on tables of
each dtype and optimizer. All contenders take turns, so that whatever else the
machine does meets them alike. Bytes are those of a row and its slots.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed

ALPHA = 1.05  # The ids' power law.
RATE = 0.01
CONTENDERS = [
    (dtype, rounding, optimizer)
    for optimizer in ("adagrad", "row_wise_adagrad")
    for dtype, rounding in (
        ("float32", "stochastic"),
        ("bfloat16", "stochastic"),
        ("bfloat16", "nearest"),
        ("float16", "stochastic"),
    )
]
OPTIMIZERS = {
    "adagrad": tf_keras.optimizers.legacy.Adagrad,
    "row_wise_adagrad": tfrs_embed.optimizers.RowWiseAdagrad,
}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--width", type=int, default=10, help="ids a sample")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--each", type=int, default=10, help="steps in a round")
    return parser.parse_args()


def make_step(args, dtype, rounding, optimizer):
    """A layer of one table and its training step."""
    table = tfrs_embed.TableConfig(
        "items",
        args.rows,
        args.dim,
        initializer="uniform",
        combiner="sum",
        dtype=dtype,
        rounding=rounding,
    )
    feature = tfrs_embed.FeatureConfig(
        "items", table, output_shape=(args.batch, args.dim)
    )
    layer = tfrs_embed.PartialTPUEmbedding(feature, OPTIMIZERS[optimizer](RATE))
    layer.build(None)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(ids, training=True)))
        # A function leaves out updates whose gradients nobody uses.
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)
        return loss

    return layer, step


def row_bytes(layer):
    """The bytes of a row and its slots."""
    state = layer.tables["items"]
    return sum(
        v.dtype.size * int(np.prod(v.shape[1:]))
        for v in state.variables.values()
    )


def main():
    args = parse()
    rng = np.random.default_rng(0)
    ranks = rng.zipf(ALPHA, (8, args.batch, args.width)) - 1
    batches = [tf.constant(ids) for ids in ranks % args.rows]
    made = [make_step(args, *contender) for contender in CONTENDERS]
    for layer, step in made:
        before = layer.embedding_tables["items"].numpy()
        for ids in batches:
            step(ids)
        after = layer.embedding_tables["items"].numpy()
        assert (before != after).any(), "These steps don't train."
    times = [[] for _ in made]
    for number in range(args.rounds):
        # Not always in one order: who comes after whom counts.
        for i in np.roll(np.arange(len(made)), number):
            for ids in batches[:2]:
                made[i][1](ids)
            begin = time.perf_counter()
            for j in range(args.each):
                made[i][1](batches[j % len(batches)])
            times[i].append((time.perf_counter() - begin) / args.each)
    print(tfrs_embed.kernels.status())
    first = statistics.median(times[0])
    most = row_bytes(made[0][0])
    print(f"{'rows':<22} {'optimizer':<18} {'ms':>6} ratio  bytes  share")
    for (dtype, rounding, optimizer), (layer, _), each in zip(
        CONTENDERS, made, times, strict=True
    ):
        median = statistics.median(each)
        size = row_bytes(layer)
        name = dtype if dtype == "float32" else f"{dtype}, {rounding}"
        print(
            f"{name:<22} {optimizer:<18} {median * 1e3:6.2f} "
            f"{median / first:5.2f} {size:6} {size / most:6.3f}"
        )


if __name__ == "__main__":
    main()
