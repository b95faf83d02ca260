"""Measures how a training step grows with what it works on, and its memory.

    python benchmarks/growth.py [--axes tables width] [--chart docs/growth.svg]
    python benchmarks/growth.py --memory

Each size of an axis is a step of one layer, Adagrad, in a process of its own;
see AXES. The slope between two sizes is log(t2 / t1) / log(x2 / x1): 1 where
the time grows as the size does, 0 where it stays. --chart draws all axes
(matplotlib).

--memory measures what a process takes beside its tables and their slots: for
the first step, which traces, and at most for a moment in later ones.
"""

import argparse
import ctypes
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

#: What a step has, unless an axis or a case says otherwise. A step's `batch`
#: samples are those of all replicas; each has `ids` ids for each feature.
DEFAULTS = {
    "cluster": "one:1",
    "tables": 1,
    "features": 1,  # Of each table.
    "rows": 100_000,
    "dim": 16,
    "batch": 8192,
    "ids": 1,
    "ragged": False,
    "keys": False,
    "optimizer": "Adagrad",
    "kernels": True,
}
#: The name of each axis, what its sizes set, the sizes, and what all have.
AXES = {
    "tables": ("tables", [10, 100, 1000], {"batch": 1024, "rows": 10_000}),
    "features of a table": ("features", [10, 100, 1000], {"batch": 1024}),
    "width": ("dim", [16, 64, 256, 1024], {}),
    "batch": ("batch", [1024, 8192, 65_536], {"ids": 10}),
    "rows": ("rows", [10_000, 100_000, 1_000_000, 10_000_000], {"ids": 10}),
    "keys": (
        "rows",
        [10_000, 100_000, 1_000_000, 10_000_000],
        {"ids": 10, "keys": True},
    ),
    "replicas": (
        "cluster",
        [1, 2, 4, 8],
        {"ids": 10, "dim": 64, "rows": 1_000_000},
    ),
}
MANY = {"tables": 100, "rows": 10_000, "batch": 4096}
#: Named cases of --memory.
CASES = {
    "a hundred features": MANY,
    "a hundred features, ragged bags of 10": {
        **MANY,
        "ids": 10,
        "ragged": True,
    },
    "26 tables of 10,000,000 x 8": {
        "tables": 26,
        "rows": 10_000_000,
        "dim": 8,
        "optimizer": "RowWiseAdagrad",
    },
    "a table of 1,000,000 x 64, 10 ids": {
        "rows": 1_000_000,
        "dim": 64,
        "ids": 10,
    },
    "the same, ragged": {
        "rows": 1_000_000,
        "dim": 64,
        "ids": 10,
        "ragged": True,
    },
}
STEPS = 20
ROUNDS = 5


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--chart", help="a file to draw, .svg")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_layer(case):
    import tf_keras

    import tfrs_embed

    keys = tfrs_embed.DynamicKeys() if case["keys"] else None
    tables = [
        tfrs_embed.TableConfig(
            f"table_{i}",
            case["rows"],
            case["dim"],
            # Quick to make: a step doesn't depend on the values.
            initializer=tf_keras.initializers.Constant(0.01),
            combiner="sum",
            keys=keys,
        )
        for i in range(case["tables"])
    ]
    optimizer = {
        "Adagrad": tf_keras.optimizers.Adagrad,
        "RowWiseAdagrad": tfrs_embed.optimizers.RowWiseAdagrad,
    }[case["optimizer"]]
    return tfrs_embed.PartialTPUEmbedding(
        {
            f"{table.name}_{i}": tfrs_embed.FeatureConfig(
                f"{table.name}_{i}", table, output_shape=[None, case["dim"]]
            )
            for table in tables
            for i in range(case["features"])
        },
        optimizer(0.01),
        size_threshold=0,
    )


def make_inputs(case, names, batch, seed):
    """A replica's batch: ids by a power law, uniform ones for keys."""
    import numpy as np
    import sharded_worker
    import tensorflow as tf

    ids = case["ids"]
    if case["ragged"]:
        # Bags of 1 to 2 * ids - 1, with as many ids in all.
        lengths = np.resize(
            [*range(1, ids), *range(2 * ids - 1, ids - 1, -1)], batch
        )
        shape = (len(names), lengths.sum())
    else:
        shape = (len(names), batch, ids)
    if case["keys"]:
        rng = np.random.default_rng(seed)
        drawn = rng.integers(case["rows"], size=shape)
    else:
        drawn = sharded_worker.make_ids(shape, case["rows"], *seed)
    if case["ragged"]:
        return {
            name: tf.RaggedTensor.from_row_lengths(each, lengths)
            for name, each in zip(names, drawn, strict=True)
        }
    return dict(zip(names, tf.unstack(tf.constant(drawn)), strict=True))


def make_step(case):
    """Returns a layer, its traced step, and batches for it."""
    import numpy as np
    import sharded_worker
    import tensorflow as tf

    strategy = sharded_worker.make_strategy(case["cluster"])
    with strategy.scope():
        layer = make_layer(case)
        layer.build(None)
    if case["keys"]:
        for table in layer.tables.values():
            table.give_rows(np.arange(case["rows"]))
    names = [
        f"table_{t}_{f}"
        for t in range(case["tables"])
        for f in range(case["features"])
    ]
    replicas = strategy.num_replicas_in_sync

    def replica_step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.nn.l2_loss(v)
                    for v in tf.nest.flatten(layer(inputs, training=True))
                ]
            )
        # A function leaves out updates whose gradients nobody uses.
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)

    @tf.function
    def step(inputs):
        strategy.run(replica_step, args=(inputs,))

    def batch(number):
        if replicas == 1:
            return make_inputs(case, names, case["batch"], (number,))
        return strategy.experimental_distribute_values_from_function(
            lambda context: make_inputs(
                case,
                names,
                case["batch"] // replicas,
                (number, context.replica_id_in_sync_group),
            )
        )

    return layer, step, [batch(number) for number in range(4)]


def memory(which):
    """The process's memory in bytes, now (VmRSS) or at most (VmHWM)."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{which}:\s*(\d+) kB", text)[1])


def trim():
    """Gives back what malloc keeps for later, so that steps take it anew."""
    ctypes.CDLL(None).malloc_trim(0)


def measure(case):
    """Prints the figures of a case, in its own process."""
    import tensorflow as tf

    layer, step, batches = make_step(case)
    trim()
    built = memory("VmRSS")
    begin = time.perf_counter()
    step(batches[0])
    first = time.perf_counter() - begin
    for inputs in batches:
        step(inputs)
    trim()
    traced = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS.
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for i in range(STEPS):
            step(batches[i % len(batches)])
        times.append((time.perf_counter() - begin) / STEPS)
    peak = memory("VmHWM")
    variables = {
        id(v): v
        for state in layer.tables.values()
        for v in state.variables.values()
    }
    print(
        json.dumps(
            {
                "ms": 1e3 * statistics.median(times),
                "first": first,
                "tables": sum(
                    v.dtype.size * int(tf.size(v, tf.int64))
                    for v in variables.values()
                ),
                "traced": traced - built,
                "step": peak - traced,
            }
        )
    )


def run(case):
    """Measures a case in a process of its own."""
    case = {**DEFAULTS, **case}
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if not case["kernels"]:
        environment["TFRS_EMBED_KERNELS"] = "off"
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure_axis(name):
    """The milliseconds of a step, by size."""
    key, sizes, given = AXES[name]
    found = {}
    for size in sizes:
        value = size
        if name == "replicas":
            value = f"mirrored:{size}" if size > 1 else "one:1"
        found[size] = run({**given, key: value})["ms"]
    return found


def slopes(found):
    """The slope between each two sizes that follow each other."""
    points = [(math.log(x), math.log(t)) for x, t in found.items()]
    return [
        (t2 - t1) / (x2 - x1)
        for (x1, t1), (x2, t2) in itertools.pairwise(points)
    ]


def draw(lines, path):
    """Draws times in ms, by axis and size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        2, 4, figsize=(11, 5), sharey=True, layout="constrained"
    )
    panels = panels.ravel()
    for (name, found), panel in zip(lines.items(), panels, strict=False):
        panel.loglog(list(found), list(found.values()), "o-")
        panel.set_title(name, fontsize=10)
        sizes = list(found)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        panel.minorticks_off()
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
        between = zip(itertools.pairwise(sizes), slopes(found), strict=True)
        for (left, right), slope in between:
            panel.annotate(
                f"{slope:.2f}",
                (
                    math.sqrt(left * right),
                    math.sqrt(found[left] * found[right]),
                ),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    for panel in panels[len(lines) :]:
        panel.axis("off")
    for panel in panels[::4]:
        panel.set_ylabel("ms a step", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def print_memory():
    print("| | kernels | tables, MB | first step, MB | a step, MB | ms |")
    print("|---|---|---:|---:|---:|---:|")
    for name, case in CASES.items():
        for kernels in (True, False):
            found = run({**case, "kernels": kernels})
            sizes = (found[key] / 1e6 for key in ("tables", "traced", "step"))
            print(
                f"| {name} | {'yes' if kernels else 'no'} |",
                *(f"{size:,.0f} |" for size in sizes),
                f"{found['ms']:.1f} |",
                flush=True,
            )


def main():
    args = parse()
    if args.case:
        measure(args.case)
        return
    if args.memory:
        print_memory()
        return
    lines = {}
    print("| | size | ms | slope |\n|---|---:|---:|---:|")
    for name in args.axes:
        found = lines[name] = measure_axis(name)
        for (size, ms), slope in zip(
            found.items(),
            ["", *(f"{s:.2f}" for s in slopes(found))],
            strict=True,
        ):
            print(f"| {name} | {size:,} | {ms:.2f} | {slope} |", flush=True)
    if args.chart:
        draw(lines, args.chart)


if __name__ == "__main__":
    main()
