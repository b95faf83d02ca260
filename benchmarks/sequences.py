"""Times training on histories: ragged vectors beside padded ones and fbgemm's.

    python benchmarks/sequences.py --fbgemm /path/to/its/bin/python

Features of ids whose rows have --mean ids on average and --longest at most,
each in a table of its own that Adagrad trains. The loss is the sum of all
vectors' squares, in all contenders: combiner=None (ragged),
max_sequence_length=LONGEST (padded), and fbgemm's tables on CPUs with
PoolingMode.NONE. Each has a process; they take turns, so that whatever else the
machine does meets them alike. Memory is the peak of all steps above what a
process has after a step of one id each, with its tables.
"""

import argparse
import json
import os
import statistics
import sys
import time

import numpy as np
from contenders import Contender

RATE, INITIAL, EPSILON = 0.05, 0.1, 1e-7  # Adagrad's.
ALPHA = 1.05  # The ids' power law.
SCALE = 0.01  # Of the tables' initial rows.


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--features", type=int, default=4)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--mean", type=int, default=200, help="ids of a row")
    parser.add_argument("--longest", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--each", type=int, default=2, help="steps in a round")
    parser.add_argument(
        "--fbgemm",
        default=sys.executable,
        help="the interpreter that has torch and fbgemm_gpu",
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_batches(args):
    """Batches: of each feature the ids, and the rows' lengths.

    The first has one id of each feature.
    """
    rng = np.random.default_rng(0)
    batches = [[(np.array([0]), np.array([1]))] * args.features]
    for _ in range(2):
        lengths = rng.lognormal(0.0, 1.0, (args.features, args.batch))
        # Cutting the longest rows takes ids, which the others get.
        for _ in range(20):
            lengths *= args.mean / lengths.mean()
            lengths = np.minimum(lengths, args.longest)
        lengths = lengths.astype(np.int64)
        lengths[:, 0] = args.longest
        batches.append(
            [
                ((rng.zipf(ALPHA, each.sum()) - 1) % args.rows, each)
                for each in lengths
            ]
        )
    return batches


def load_ours(args):
    """A step of this library, and its batches."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    import tensorflow as tf
    import tf_keras

    import tfrs_embed

    ragged = args.contender == "ragged"
    form = (
        {"combiner": None} if ragged else {"max_sequence_length": args.longest}
    )
    start = tf_keras.initializers.Constant(SCALE)
    layer = tfrs_embed.PartialTPUEmbedding(
        [
            tfrs_embed.FeatureConfig(
                name,
                tfrs_embed.TableConfig(name, args.rows, args.dim, start),
                **form,
            )
            for name in map(str, range(args.features))
        ],
        tf_keras.optimizers.legacy.Adagrad(
            RATE, initial_accumulator_value=INITIAL, epsilon=EPSILON
        ),
        size_threshold=0,
    )
    layer.build(None)

    spec = tf.RaggedTensorSpec([None, None], tf.int64, 1)

    @tf.function(input_signature=[[spec] * args.features])
    def step(ids):
        with tf.GradientTape() as tape:
            vectors = layer(ids, training=True)
            if ragged:
                vectors = [each.values for each in vectors]
            loss = tf.add_n([tf.reduce_sum(tf.square(v)) for v in vectors])
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)
        return loss

    batches = [
        [tf.RaggedTensor.from_row_lengths(*feature) for feature in batch]
        for batch in make_batches(args)
    ]
    return batches, lambda ids: float(step(ids))


def load_fbgemm(args):
    """A step of fbgemm, and its batches."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(args.rows, args.dim, *place)] * args.features,
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=RATE,
        eps=EPSILON,
        pooling_mode=PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for weights in layer.split_embedding_weights():
        weights.data.fill_(SCALE)
    for (accumulator,) in layer.split_optimizer_states():
        accumulator.fill_(INITIAL)
    batches = [
        (
            torch.from_numpy(np.concatenate([ids for ids, _ in batch])),
            torch.from_numpy(
                np.cumsum([0, *np.concatenate([each for _, each in batch])])
            ),
        )
        for batch in make_batches(args)
    ]

    def step(batch):
        loss = layer(*batch).square().sum()
        loss.backward()
        return float(loss)

    return batches, step


def kilobytes(name):
    """A line of this process's memory in /proc."""
    with open("/proc/self/status", encoding="ascii") as file:
        [line] = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1])


def answer(args):
    """Answers numbers of steps with their seconds, peak and last loss."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    load = load_fbgemm if args.contender == "fbgemm" else load_ours
    [least, *batches], step = load(args)
    step(least)
    before = kilobytes("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # Forgets the peak.
    for line in sys.stdin:
        seconds = []
        for i in range(int(line)):
            start = time.perf_counter()
            loss = step(batches[i % len(batches)])
            seconds.append(time.perf_counter() - start)
        peak = (kilobytes("VmHWM") - before) / 1024
        print(json.dumps([seconds, peak, loss]), file=channel, flush=True)


class Process(Contender):
    """A contender's process."""

    def __init__(self, contender, args):
        options = ["--contender", contender]
        for name in ("features", "rows", "dim", "batch", "mean", "longest"):
            options += [f"--{name}", str(getattr(args, name))]
        python = args.fbgemm if contender == "fbgemm" else None
        super().__init__(*options, python=python)
        self.seconds, self.losses = [], []
        self.begin(self.train, 2)  # Allocates what stays.
        self.seconds = []

    def train(self, steps):
        seconds, self.peak, loss = self.ask(steps)
        self.seconds.append(statistics.mean(seconds))
        self.losses.append(loss)


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    names = ["padded", "ragged", "fbgemm"]
    processes = {name: Process(name, args) for name in names}
    there = [name for name in names if not processes[name].missing]
    for number in range(args.rounds):
        # Not always in one order: who comes after whom counts.
        for name in np.roll(there, number):
            processes[name].train(args.each)
    first = processes[there[0]]
    print(f"{'contender':<10} {'ms':>8} of {there[0]:<8} {'peak MiB':>9}")
    for name, process in processes.items():
        if process.missing:
            print(f"{name:<10} missing: {process.missing}")
            continue
        # They train alike.
        np.testing.assert_allclose(process.losses, first.losses, rtol=1e-3)
        median = statistics.median(process.seconds)
        share = median / statistics.median(first.seconds)
        print(
            f"{name:<10} {median * 1e3:8.1f} {share:11.3f} {process.peak:9.0f}"
        )
    for process in processes.values():
        process.close()


if __name__ == "__main__":
    main()
