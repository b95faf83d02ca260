"""Times what a large table takes to start: its build and the first step.

    python benchmarks/starting.py [--gib 5] [--optimizer sgd] [--replicas 2]

Each round has a process of its own; the best of the rounds. Seconds are those
of the wall clock, and those of processors in user and system mode, which count
less of what else the machine does. --no-kernels: with TensorFlow's operations.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

ALPHA = 1.05  # The ids' power law.
BATCH = 65_536


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=5, help="of the rows")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--initializer", help="[the table's default]")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def timed(call):
    """Returns the seconds of a call: wall, user, system."""

    def now():
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime, used.ru_stime

    before = now()
    call()
    return [b - a for a, b in zip(before, now(), strict=True)]


def measure(args):
    """Builds a layer and trains it, in this process."""
    import numpy as np
    import tensorflow as tf

    import tfrs_embed

    strategy = tf.distribute.get_strategy()
    if args.replicas > 1:
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * args.replicas
        )
        devices = [f"CPU:{i}" for i in range(args.replicas)]
        strategy = tf.distribute.MirroredStrategy(devices)
    rows = int(args.gib * 2**30) // (4 * args.dim)
    with strategy.scope():
        table = tfrs_embed.TableConfig(
            "items", rows, args.dim, args.initializer, dtype=args.dtype
        )
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("items", table), args.optimizer
        )
    rng = np.random.default_rng(0)
    ids = tf.constant((rng.zipf(ALPHA, BATCH // args.replicas) - 1) % rows)

    def replica_step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(ids, training=True)))
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)
        return loss

    @tf.function
    def step(ids):
        return strategy.run(replica_step, (ids,))

    tfrs_embed.kernels.status()

    def build():
        with strategy.scope():
            layer.build(None)

    return {
        "build": timed(build),
        "first step": timed(lambda: step(ids)),
        "second step": timed(lambda: step(ids)),
    }


def main():
    args = parse()
    if args.worker:
        print(json.dumps(measure(args)))
        return
    env = dict(os.environ)
    if args.no_kernels:
        env["TFRS_EMBED_KERNELS"] = "off"
    found = []
    for _ in range(args.rounds):
        worker = subprocess.run(
            [sys.executable, *sys.argv, "--worker"],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found.append(json.loads(worker.stdout.splitlines()[-1]))
    print(f"{'':<12} {'wall':>6} {'user':>6} {'system':>6}")
    for part in found[0]:
        best = min(each[part] for each in found)
        print(f"{part:<12} " + " ".join(f"{s:6.2f}" for s in best))


if __name__ == "__main__":
    main()
