"""Sharded tables, beside Keras's own embedding under the same strategy.

Starts processes of its own: one with several logical CPUs for each
MirroredStrategy, and several that talk over loopback for each
MultiWorkerMirroredStrategy. The parts:

    step    time of a training step on one large table, beside one device, and a
            replicated tf_keras Embedding with its new and its legacy optimizer,
            in turns over several rounds; bytes sent. With several of
            --communication-dtype, the first is what others are compared with
    tables  collectives and time of a step on few and on many tables
    memory  of a process that holds a table's shards, or copies of it
    soak    memory over thousands of steps of changing batch sizes
    model   the counters' numbers beside those of scaling_model.py
    hot     bytes and time of steps and evaluations, with copies of the most
            frequent rows and without
"""

import argparse
import os
import pathlib
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("sharded_worker.py")
PARTS = ["model", "step", "tables", "memory", "soak", "hot"]


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--clusters",
        nargs="+",
        default=["one:2", "mirrored:2", "mirrored:4", "workers:2"],
        help="logical CPUs of one process, or processes of one CPU; one:2 is "
        "one device with the batches of two replicas, for the first part",
    )
    parser.add_argument(
        "--check-model", action="store_true", help="short for --parts model"
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="a replica")
    parser.add_argument("--hotness", type=int, default=10)
    parser.add_argument(
        "--hot-rows", type=int, nargs="+", default=[10_000], help="numbers of"
    )
    parser.add_argument(
        "--communication-dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        default=["float32"],
        help="what rows and gradients are sent as, for the first part",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="a round")
    parser.add_argument(
        "--batches", type=int, default=4, help="different ones, in turns"
    )
    parser.add_argument(
        "--tables", type=int, nargs="+", default=[2, 200], help="numbers of"
    )
    parser.add_argument(
        "--keras-tables",
        action="store_true",
        help="time as many tables in Keras, too; tracing them takes minutes",
    )
    parser.add_argument(
        "--keras",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time replicated tables of Keras, too",
    )
    parser.add_argument("--soak-steps", type=int, default=5000)
    parser.add_argument(
        "--soak-batch", type=int, default=512, help="a replica's largest"
    )
    # The processes' arguments: one of the parts, on one of the clusters.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", help=argparse.SUPPRESS)
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.check_model:
        args.parts = ["model"]
    return args


def run(cluster, part, contender=""):
    """Runs a part on a cluster; returns what its first process prints."""
    command = [sys.executable, str(WORKER), *sys.argv[1:]]
    command += ["--part", part, "--cluster", cluster, "--contender", contender]
    env = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    kind, count = cluster.split(":")
    if kind != "workers":
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        codes, outputs = [done.returncode], [done.stdout]
    else:
        # It brings TensorFlow into this process, which does nothing with it.
        from tfrs_embed.testing import LocalCluster

        with LocalCluster(command, int(count), env) as workers:
            codes = workers.wait()
            outputs = [workers.output(i) for i in range(len(codes))]
    if any(codes):
        sys.exit("\n".join(outputs))
    # The workers' results are among TensorFlow's messages.
    return "\n".join(s for s in outputs[0].splitlines() if s.startswith("|"))


def main():
    args = parse()
    for part in args.parts:
        print(f"\n## {part}\n", flush=True)
        contenders = ["ours", "keras"] if part == "memory" else [""]
        for number, (cluster, contender) in enumerate(
            (c, k)
            for c in args.clusters
            for k in contenders
            if part == "step" or not c.startswith("one:")
        ):
            lines = run(cluster, part, contender).splitlines()
            # One header for all.
            print("\n".join(lines[2 if number else 0 :]), flush=True)


if __name__ == "__main__":
    main()
