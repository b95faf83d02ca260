"""The processor time that TableStatistics takes of a training run.

Runs of `--every` steps with the callback and without it take turns; what is
compared is their processor time, which other programs on the machine hardly
change.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed


def make_model(tables: int, rows: int, dim: int) -> tf_keras.Model:
    """A model of tables and a small MLP."""
    features = {
        f"f{i}": tfrs_embed.FeatureConfig(
            f"f{i}", tfrs_embed.TableConfig(f"t{i}", rows, dim)
        )
        for i in range(tables)
    }
    inputs = {name: tf_keras.Input([], dtype=tf.int64) for name in features}
    layer = tfrs_embed.PartialTPUEmbedding(features, "adagrad")
    hidden = tf.concat(list(layer(inputs).values()), -1)
    for width in (256, 64, 1):
        hidden = tf_keras.layers.Dense(width, "relu")(hidden)
    model = tf_keras.Model(inputs, hidden)
    model.compile("adam", "mse")
    return model


def main() -> None:
    """Prints the processor time of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = make_model(args.tables, args.rows, args.dim)
    random = np.random.default_rng(0)
    batch = {
        f"f{i}": random.zipf(1.2, args.batch) % args.rows
        for i in range(args.tables)
    }
    data = tf.data.Dataset.from_tensors((batch, np.zeros(args.batch)))
    data = data.cache().repeat(args.every)
    model.fit(data.take(20), verbose=0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for watched in (False, True):
                callback = tfrs_embed.monitoring.TableStatistics(
                    folder, args.every
                )
                start = time.process_time()
                model.fit(
                    data, verbose=0, callbacks=[callback] if watched else []
                )
                seconds[watched].append(time.process_time() - start)
        [layer] = callback._layers()
        monitor = tfrs_embed.monitoring.TableMonitor(layer, sample=10_000)
        for _ in range(args.rounds + 1):
            start = time.process_time()
            monitor.measure()
            reports.append(time.process_time() - start)
    without = statistics.median(seconds[False])
    print(f"{args.every} steps: {without:.2f} s")
    print(f"with the callback: {statistics.median(seconds[True]):.2f} s")
    one = statistics.median(reports[1:])
    print(f"a report: {one * 1e3:.0f} ms, {one / without:.2%} of the steps")


if __name__ == "__main__":
    main()
