"""Times layers of many tables: the first step, which traces, and later ones.

    python benchmarks/many_tables.py --kinds static --clusters one:2 mirrored:2

static: --static tables of one width, sharded by row; dynamic: --dynamic tables
of `DynamicKeys`. Each cluster is a process of its own; see sharded.py. Beside
times that depend on the machine, the numbers that don't: the operations of a
traced step, those of all replicas, and how many of them are collectives.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

ROWS = 1000
DIM = 16
BATCH = 256  # A replica.


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ["static", "dynamic"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument(
        "--clusters", nargs="+", default=["one:2", "mirrored:2"]
    )
    parser.add_argument("--static", type=int, default=200, help="tables")
    parser.add_argument("--dynamic", type=int, default=26, help="tables")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--operations", action="store_true", help="print them by their kind"
    )
    # A process's own.
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_layer(kind, number):
    import tf_keras

    import tfrs_embed

    keys = tfrs_embed.DynamicKeys() if kind == "dynamic" else None
    features = {
        f"table_{i}": tfrs_embed.FeatureConfig(
            f"table_{i}",
            tfrs_embed.TableConfig(
                f"table_{i}",
                4 * ROWS if keys else ROWS,
                DIM,
                combiner="sum",
                keys=keys,
            ),
        )
        for i in range(number)
    }
    return tfrs_embed.PartialTPUEmbedding(
        features, tf_keras.optimizers.Adagrad(0.01), size_threshold=0
    )


def operations(step, ids):
    """Counts the operations of a traced step's graph and functions."""
    graph = step.get_concrete_function(ids).graph.as_graph_def()
    functions = [f.node_def for f in graph.library.function]
    return collections.Counter(
        node.op for nodes in [graph.node, *functions] for node in nodes
    )


def measure(args):
    import sharded_worker
    import tensorflow as tf

    strategy = sharded_worker.make_strategy(args.cluster)
    count, replicas = args.cluster.split(":")
    number = args.dynamic if args.kind == "dynamic" else args.static
    batch = BATCH * (int(replicas) if count == "one" else 1)
    with strategy.scope():
        layer = make_layer(args.kind, number)

    def replica_step(ids):
        with tf.GradientTape() as tape:
            vectors = tf.concat(list(layer(ids, training=True).values()), -1)
            loss = tf.reduce_sum(vectors * vectors)
        # A function leaves out updates whose gradients nobody uses.
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)

    @tf.function
    def step(ids):
        def run(ids):
            names = [f"table_{i}" for i in range(number)]
            replica_step(dict(zip(names, tf.unstack(ids), strict=True)))

        strategy.run(run, args=(ids,))

    batches = [
        sharded_worker.distribute(
            strategy,
            lambda r, b=b: sharded_worker.make_ids(
                (number, batch, 1), ROWS, b, r
            ),
        )
        for b in range(4)
    ]
    start, busy = time.perf_counter(), time.process_time()
    step(batches[0])
    first = time.perf_counter() - start
    busy = time.process_time() - busy
    times = []
    for i in range(args.steps):
        start = time.perf_counter()
        step(batches[i % 4])
        times.append(time.perf_counter() - start)
    counts = operations(step, batches[0])
    collectives = sum(n for op, n in counts.items() if "Collective" in op)
    row = [
        args.kind,
        f"{number}",
        args.cluster,
        f"{first:.1f}",
        f"{busy:.1f}",
        f"{sorted(times)[len(times) // 2] * 1e3:.1f}",
        f"{counts.total():,}",
        f"{collectives // strategy.num_replicas_in_sync}",
    ]
    print(f"| {' | '.join(row)} |")
    if args.operations:
        for op, n in counts.most_common():
            print(f"| {n:6} {op}")


def main():
    args = parse()
    if args.kind:
        measure(args)
        return
    print(
        "| kind | tables | cluster | first step, s | of processors, s ", end=""
    )
    print(
        "| ms | operations | collectives of a replica |\n|---"
        + 7 * "|---"
        + "|"
    )
    for kind in args.kinds:
        for cluster in args.clusters:
            command = [sys.executable, str(pathlib.Path(__file__))]
            command += [*sys.argv[1:], "--kind", kind, "--cluster", cluster]
            env = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
            done = subprocess.run(
                command,
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                sys.exit(done.stdout)
            lines = done.stdout.splitlines()
            print("\n".join(s for s in lines if s.startswith("|")), flush=True)


if __name__ == "__main__":
    main()
