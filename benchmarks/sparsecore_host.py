"""Times SparseCore's host preprocessing: TensorFlow's kernels beside numpy.

Needs the tensorflow-tpu wheel, whose kernels run without a TPU. Both do one
chip's share of a step, from ids to buffers, in turns.
"""

import argparse
import time

import numpy as np
import tensorflow as tf

from tfrs_embed.sparsecore import Topology, buffers
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.testing import host_kernels

tpu = tf.tpu.experimental.embedding


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=4096, help="of a chip")
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def layout_of(args, tables, combiner):
    """Features spread over tables, with limits that hold anything."""
    configs = [
        tpu.TableConfig(args.rows, 16, combiner=combiner, name=f"t{i:02}")
        for i in range(tables)
    ]
    features = [
        tpu.FeatureConfig(configs[i % tables], output_shape=[args.batch])
        for i in range(args.features)
    ]
    name = "_".join(t.name for t in configs)
    limits = {name: 10_000_000}
    config = tpu.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits, max_unique_ids_per_table=limits
    )
    return Layout(features, tpu.SGD(), Topology.of((4, 4)), config)


def dense(args, rng):
    """One id a sample, a few of them very frequent."""
    uniform = rng.integers(0, args.rows, args.batch)
    frequent = rng.zipf(1.2, args.batch) % args.rows
    ids = np.where(rng.random(args.batch) < 0.5, uniform, frequent)
    return tf.constant(ids, tf.int32)


def ragged(args, rng):
    """0 to 6 ids a sample."""
    lengths = rng.integers(0, 7, args.batch)
    ids = rng.zipf(1.2, lengths.sum()) % args.rows
    return tf.RaggedTensor.from_row_lengths(tf.constant(ids, tf.int32), lengths)


def as_ids(tensor):
    if isinstance(tensor, tf.RaggedTensor):
        return Ids(
            tensor.row_splits.numpy().astype(np.int32), tensor.values.numpy()
        )
    return Ids(np.zeros(0, np.int32), tensor.numpy())


def kernels(layout, tensors):
    """Returns the wheel's preprocessing as a compiled graph, as in training."""

    @tf.function
    def run(tensors):
        return host_kernels.preprocess(layout, tensors, [None] * len(tensors))

    return lambda: run(tensors)


def main():
    args = parse()
    if not host_kernels.has_kernels():
        raise SystemExit("The kernels are in the tensorflow-tpu wheel alone.")
    rng = np.random.default_rng(0)
    print(
        f"One of 4 chips x 4 SparseCores, {args.features} features, batch "
        f"{args.batch} a chip; millions of ids a second, best and median of "
        f"{args.rounds}."
    )
    print(
        f"{'ids':<7}{'combiner':<10}{'tables':>6}{'ids a step':>12}"
        f"{'kernels':>16}{'numpy':>16}{'numpy/kernels':>15}"
    )
    for kind, make, combiner, tables in (
        ("dense", dense, "sum", 1),
        ("dense", dense, "sum", 2),
        ("dense", dense, "sum", args.features),
        ("ragged", ragged, "mean", 1),
        ("ragged", ragged, "mean", 2),
    ):
        layout = layout_of(args, tables, combiner)
        tensors = [make(args, rng) for _ in range(args.features)]
        ids = [as_ids(tensor) for tensor in tensors]
        number = sum(i.values.size for i in ids)
        contenders = {
            "kernels": kernels(layout, tensors),
            "numpy": lambda layout=layout, ids=ids: buffers.preprocess(
                layout, ids
            ),
        }
        times = {name: [] for name in contenders}
        for contender in contenders.values():
            contender()
        for _ in range(args.rounds):
            for name, contender in contenders.items():
                start = time.perf_counter()
                contender()
                times[name].append(time.perf_counter() - start)
        rates = {
            name: (number / min(t) / 1e6, number / np.median(t) / 1e6)
            for name, t in times.items()
        }
        cells = "".join(
            f"{f'{best:.1f} / {median:.1f}':>16}"
            for best, median in rates.values()
        )
        ratio = rates["numpy"][1] / rates["kernels"][1]
        print(
            f"{kind:<7}{combiner:<10}{tables:>6}{number:>12,}{cells}"
            f"{ratio:>14.2f}x"
        )


if __name__ == "__main__":
    main()
