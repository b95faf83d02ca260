"""Times what SparseCores need that runs without them.

    python benchmarks/sparsecore.py --parts host limits step

host: one chip's share of a step, from ids to buffers: TensorFlow's kernels
beside numpy, in turns. Needs the tensorflow-tpu wheel (make test-tpu-wheel
makes an environment with it), whose kernels run without a TPU.
limits: compute_limits on --batches batches.
step: a training step of a layer on emulated slices, and of TPUEmbeddingV2.
"""

import argparse
import itertools
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf
from tfrs_embed.testing import EmulatedTPUStrategy

import tfrs_embed
from tfrs_embed.sparsecore import Topology, buffers, compute_limits
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.sparsecore.layout import Layout

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import tensorflow_host

tpu = tf.tpu.experimental.embedding


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("host", "limits", "step")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--batch", type=int, default=4096, help="of a chip")
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--step_batch", type=int, default=1024)
    parser.add_argument("--step_rows", type=int, default=100_000)
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
    return Layout(features, Topology.of((4, 4)), config)


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
    return Ids(np.arange(len(tensor) + 1, dtype=np.int32), tensor.numpy())


def kernels(layout, tensors):
    """Returns the wheel's preprocessing as a compiled graph, as in training."""

    @tf.function
    def run(tensors):
        return tensorflow_host.preprocess(
            layout, tensors, [None] * len(tensors)
        )

    return lambda: run(tensors)


def time_host(args):
    if not has_kernels():
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


def time_limits(args):
    rng = np.random.default_rng(0)
    for tables, ours in itertools.product((1, args.features), (False, True)):
        if ours:
            config = [
                tfrs_embed.TableConfig(f"t{i}", args.rows, 16)
                for i in range(tables)
            ]
            features = [
                tfrs_embed.FeatureConfig(f"f{i}", config[i % tables])
                for i in range(args.features)
            ]
        else:
            config = [
                tpu.TableConfig(args.rows, 16, name=f"t{i}")
                for i in range(tables)
            ]
            features = [
                tpu.FeatureConfig(config[i % tables], output_shape=[args.batch])
                for i in range(args.features)
            ]
        some = [
            [dense(args, rng) for _ in range(args.features)] for _ in range(20)
        ]
        batches = itertools.islice(itertools.cycle(some), args.batches)
        start = time.perf_counter()
        compute_limits(batches, features, (4, 4), "sgd", progress=False)
        print(
            f"compute_limits: {args.batches} batches of {args.batch} x "
            f"{args.features} ids, {tables} tables, "
            f"{'a layer' if ours else 'TensorFlow'}'s configuration: "
            f"{time.perf_counter() - start:.1f} s"
        )


def median_ms(step, rounds):
    step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * np.median(times)


def time_step(args, strategies):
    rng = np.random.default_rng(0)
    batch, rows = args.step_batch, args.step_rows
    what = f"{args.features} features in a table of {rows:,} x 16, Adagrad"
    table = tfrs_embed.TableConfig("t", rows, 16)
    features = [
        tfrs_embed.FeatureConfig(f"f{i}", table) for i in range(args.features)
    ]
    limits = {"t": 1_000_000}
    config = tpu.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits,
        max_unique_ids_per_table=limits,
        max_ids_per_chip_per_sample=8,
    )
    ids = [rng.integers(0, rows, batch) for _ in range(args.features)]
    for strategy in strategies:
        with strategy.scope():
            layer = tfrs_embed.PartialTPUEmbedding(
                features,
                "adagrad",
                size_threshold=0,
                sparse_core_embedding_config=config,
            )

        def replica_step(layer=layer):
            inputs = [tf.constant(i) for i in ids]
            with tf.GradientTape() as tape:
                outputs = layer(inputs, training=True)
                loss = tf.add_n([tf.reduce_sum(o * o) for o in outputs])
            return tape.gradient(loss, layer.trainable_variables)

        run = tf.function(lambda s=strategy, f=replica_step: s.run(f))
        print(
            f"a step on {strategy.topology.name}, {batch} a chip, {what}: "
            f"{median_ms(run, args.rounds):.0f} ms"
        )
        embedding = tfrs_embed.TPUEmbeddingV2(
            [
                tpu.FeatureConfig(t, output_shape=[batch])
                for t in [tpu.TableConfig(rows, 16, name="t")]
                for _ in range(args.features)
            ],
            tpu.Adagrad(0.01),
            sparse_core_embedding_config=config,
            topology=strategy.topology,
        )
        chips = strategy.num_replicas_in_sync

        @tf.function
        def mid_level(embedding=embedding, chips=chips):
            found, kept = embedding([tf.tile(i, [chips]) for i in ids])
            embedding.apply_gradients([2.0 * f for f in found], kept)

        print(
            f"  the same with TPUEmbeddingV2: "
            f"{median_ms(mid_level, args.rounds):.0f} ms"
        )


def main():
    args = parse()
    # Before TensorFlow's first operation; the largest first.
    slices = ("v5p-8", "v6e-2")
    strategies = [EmulatedTPUStrategy(name) for name in slices]
    if "host" in args.parts:
        time_host(args)
    if "limits" in args.parts:
        time_limits(args)
    if "step" in args.parts:
        time_step(args, strategies)


if __name__ == "__main__":
    main()
