"""Shows where the time of a training step goes.

    python benchmarks/step_profile.py

One table, as in the case "single" of run.py. It prints the median times of a
step, of a `tf.function` that does nothing, of one that takes a step's arguments
and does nothing with them, and, from TensorFlow's profiler, how long the
operations of a step ran, one kind a line. What no operation accounts for is
Python, the call of the function, and threads that wake up.
"""

import argparse
import collections
import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfrs_embed

ALPHA = 1.05  # The ids' power law.


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--width", type=int, default=10, help="ids a sample")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--operations", type=int, default=12, help="to show")
    return parser.parse_args()


def make_step(args):
    """A layer of one table and its training step."""
    table = tfrs_embed.TableConfig(
        "items", args.rows, args.dim, initializer="uniform", combiner="sum"
    )
    feature = tfrs_embed.FeatureConfig(
        "items", table, output_shape=(args.batch, args.dim)
    )
    optimizer = tf_keras.optimizers.legacy.Adagrad(0.01)
    layer = tfrs_embed.PartialTPUEmbedding(feature, optimizer)
    layer.build(None)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(ids, training=True)))
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, layer.trainable_variables, strict=True)
        )
        return loss

    return step


def milliseconds(function, inputs, steps):
    """The median time of a call."""
    for ids in inputs:
        function(ids)
    found = []
    for i in range(steps):
        begin = time.perf_counter()
        function(inputs[i % len(inputs)])
        found.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(found)


def operations(step, inputs, steps):
    """Milliseconds of a step that operations ran, by their kind.

    An operation that shares its work among threads counts once, for as long as
    it ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for i in range(steps):
            step(inputs[i % len(inputs)])
        tf.profiler.experimental.stop()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    found = collections.Counter()
    for plane in space.planes:
        if plane.name != "/host:CPU":
            continue
        names = {n: m.name for n, m in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                # "name:Kind" is an operation; others are parts of TensorFlow.
                node, _, kind = names[event.metadata_id].rpartition(":")
                if node and kind.isidentifier() and not node.endswith(":"):
                    found[kind] += event.duration_ps / 1e9 / steps
    return found


def main():
    args = parse()
    rng = np.random.default_rng(0)
    drawn = rng.zipf(ALPHA, (4, args.batch, args.width)) - 1
    inputs = [tf.constant(ids) for ids in drawn % args.rows]
    step = make_step(args)
    nothing = tf.function(lambda: tf.constant(0.0))
    unused = tf.function(lambda ids: tf.constant(0.0))
    whole = milliseconds(step, inputs, args.steps)
    empty = milliseconds(lambda ids: nothing(), inputs, args.steps)
    argument = milliseconds(unused, inputs, args.steps)
    found = operations(step, inputs, args.steps)
    print(tfrs_embed.kernels.status())
    print(f"a step                                   {whole:7.3f} ms")
    print(f"a function that does nothing             {empty:7.3f} ms")
    print(f"the same with a step's argument          {argument:7.3f} ms")
    print("\noperations while they are profiled, ms a step:")
    for kind, ms in found.most_common(args.operations):
        print(f"  {kind:<38} {ms:7.3f}")


if __name__ == "__main__":
    main()
