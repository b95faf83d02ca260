"""Times the best rows of a table for a batch of queries.

    python benchmarks/retrieval.py --faiss /path/to/its/bin/python

Each contender has a process, with the same rows and queries; they take turns,
so that whatever else the machine does meets them alike. "top_k" is the table's
own. "matmul, 1" is a matrix product of all rows, and a top_k of all scores;
"matmul, N" is the same of N blocks of the rows, and a top_k of their best.
Memory is the peak of all calls above what a process has after loading, with its
table.
"""

import argparse
import json
import os
import statistics
import sys
import time

import numpy as np
from contenders import Contender

SEED = 0


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[1, 10], help="of matmul"
    )
    parser.add_argument(
        "--only", nargs="*", help="the contenders; by default all"
    )
    parser.add_argument(
        "--faiss",
        default=sys.executable,
        help="the interpreter that has faiss-cpu",
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_rows(args):
    return np.random.default_rng(SEED).standard_normal(
        (args.rows, args.dim), np.float32
    )


def make_queries(args):
    return np.random.default_rng(SEED + 1).standard_normal(
        (args.queries, args.dim), np.float32
    )


def load_ours(args):
    """The table of a layer."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    import tensorflow as tf

    import tfrs_embed

    dynamic = args.contender == "keys"
    table = tfrs_embed.TableConfig(
        "items",
        args.rows,
        args.dim,
        "zeros",
        keys=tfrs_embed.DynamicKeys() if dynamic else None,
    )
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("items", table), "sgd", size_threshold=0
    )
    layer.build(None)
    items = layer.tables["items"]
    if dynamic:
        items.give_rows(np.arange(args.rows))
    items.table.assign(make_rows(args))
    find = tf.function(lambda queries: items.top_k(queries, args.k))
    queries = tf.constant(make_queries(args))
    return lambda: [each.numpy() for each in find(queries)]


def load_matmul(args):
    """TensorFlow's matrix product and top_k, of some blocks of rows."""
    import tensorflow as tf

    number = int(args.contender.split()[1])
    size = -(-args.rows // number)
    whole = make_rows(args)
    blocks = [
        tf.constant(whole[start : start + size])
        for start in range(0, args.rows, size)
    ]
    del whole
    queries = tf.constant(make_queries(args))

    @tf.function
    def best(rows):
        return tf.math.top_k(tf.matmul(queries, rows, transpose_b=True), args.k)

    def find():
        found = [best(rows) for rows in blocks]
        scores = tf.concat([each.values for each in found], 1)
        ids = tf.concat(
            [each.indices + i * size for i, each in enumerate(found)], 1
        )
        top = tf.math.top_k(scores, args.k)
        ids = tf.gather(ids, top.indices, batch_dims=1)
        return top.values.numpy(), ids.numpy()

    return find


def load_tfrs(args):
    """TFRS's layers."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    kinds = tfrs.layers.factorized_top_k
    if args.contender == "Streaming":
        rows = tf.constant(make_rows(args))
        blocks = tf.data.Dataset.range(0, args.rows, 65_536).map(
            lambda start: rows[start : start + 65_536]
        )
        index = kinds.Streaming(k=args.k).index_from_dataset(blocks)
    else:
        index = kinds.BruteForce(k=args.k).index(make_rows(args))
    queries = tf.constant(make_queries(args))
    find = tf.function(lambda queries: index(queries))
    return lambda: [each.numpy() for each in find(queries)]


def load_faiss(args):
    """faiss's exact index of inner products."""
    import faiss

    index = faiss.IndexFlatIP(args.dim)
    index.add(make_rows(args))
    queries = make_queries(args)
    return lambda: index.search(queries, args.k)


def kilobytes(name):
    """A line of this process's memory in /proc."""
    with open("/proc/self/status", encoding="ascii") as file:
        [line] = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1])


def loader(contender):
    """The function that loads a contender."""
    kinds = {"top_k": load_ours, "keys": load_ours, "faiss": load_faiss}
    kind = load_matmul if contender.startswith("matmul") else load_tfrs
    return kinds.get(contender, kind)


def answer(args):
    """Answers each line with a call's seconds, peak and results."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    find = loader(args.contender)(args)
    before = kilobytes("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # Forgets the peak.
    for _ in sys.stdin:
        start = time.perf_counter()
        scores, ids = find()
        seconds = time.perf_counter() - start
        peak = (kilobytes("VmHWM") - before) / 1024
        found = [float(np.sum(scores)), ids[:, 0].tolist()]
        print(json.dumps([seconds, peak, found]), file=channel, flush=True)


class Process(Contender):
    """A contender's process."""

    def __init__(self, contender, args):
        options = ["--contender", contender]
        for name in ("rows", "dim", "queries", "k"):
            options += [f"--{name}", str(getattr(args, name))]
        python = args.faiss if contender == "faiss" else None
        super().__init__(*options, python=python)
        self.seconds = []
        self.begin(self.find)  # Traces.
        self.seconds = []

    def find(self):
        seconds, self.peak, self.found = self.ask("")
        self.seconds.append(seconds)


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    names = args.only or [
        "top_k",
        "keys",
        *(f"matmul, {n}" for n in args.blocks),
        "BruteForce",
        "Streaming",
        "faiss",
    ]
    processes = {name: Process(name, args) for name in names}
    there = [name for name in names if not processes[name].missing]
    for number in range(args.rounds):
        # Not always in one order: who comes after whom counts.
        for name in np.roll(there, number):
            processes[name].find()
    first = processes[there[0]]
    print(f"{'contender':<12} {'s':>7} of {there[0]:<8} {'peak MiB':>9}")
    for name, process in processes.items():
        if process.missing:
            print(f"{name:<12} missing: {process.missing}")
            continue
        # They find the same.
        np.testing.assert_allclose(
            process.found[0], first.found[0], rtol=1e-5, err_msg=name
        )
        assert process.found[1] == first.found[1], name
        median = statistics.median(process.seconds)
        share = median / statistics.median(first.seconds)
        print(f"{name:<12} {median:7.3f} {share:11.3f} {process.peak:9.0f}")
    for process in processes.values():
        process.close()


if __name__ == "__main__":
    main()
