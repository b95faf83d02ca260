"""Measures saving and restoring a large table, beside a plain variable.

    python benchmarks/checkpoints.py [--gib 4]
    python benchmarks/checkpoints.py --deltas [--gib 4] [--share 0.01]
    python benchmarks/checkpoints.py --marks [--rounds 60]

Each runs in a process of its own, whose peak memory is the kernel's count. What
is written is flushed to the disk, and what is read comes from where the system
has it: for a file that was just written, mostly from memory.

--deltas: a table with Adagrad's slots, of whose rows a share changes between
saves: a save of all, a delta, and what a full checkpoint in a thread costs.
--marks: steps of layers that mark changed rows, and of layers that don't, in
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

KINDS = ("plain", "ours", "mirrored", "workers")


def peak_mb() -> float:
    """The most memory that this process had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(what: str, gib: float, dim: int, folder: str) -> dict[str, float]:
    """Saves and restores a table of a size in this process.

    Args:
        what: "plain", a variable; "ours", a layer's table, trained before;
            "mirrored", the same in shards of two logical CPUs; "workers", in
            shards of two processes, of which this is one.
        gib: the table's size in GiB of 2^30 bytes.
        dim: its width.
        folder: where to save.

    Returns:
        "save" and "restore", GB/s, and "extra_save" and "extra_restore", the
        peak memory above the table, MB.
    """
    import tensorflow as tf

    import tfrs_embed

    rows = int(gib * 2**30) // (4 * dim)
    held = bytes_ = rows * dim * 4

    @tf.function
    def wait_for_all() -> None:
        tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1))

    if what == "plain":
        with tf.device("CPU:0"):
            table = tf.Variable(tf.zeros([rows, dim]), trainable=False)
        saver = tf.train.Checkpoint(table=table)
    else:
        strategy = tf.distribute.get_strategy()
        if what == "mirrored":
            [cpu] = tf.config.list_physical_devices("CPU")
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * 2
            )
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if what == "workers":
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            held = bytes_ // 2
        with strategy.scope():
            layer = tfrs_embed.PartialTPUEmbedding(
                {
                    "id": tfrs_embed.FeatureConfig(
                        "id",
                        tfrs_embed.TableConfig(
                            "table", rows, dim, initializer="zeros"
                        ),
                    )
                },
                "sgd",
                size_threshold=0,
            )
            layer.build(None)

        def step() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                vectors = layer({"id": tf.constant([1, 2, 3])}, training=True)
                loss = tf.reduce_sum(vectors["id"])
            return tape.gradient(loss, layer.trainable_variables)

        # TensorFlow copies a table that was trained when it is read.
        tf.function(lambda: strategy.run(step))()
        saver = tf.train.Checkpoint(layer=layer)
    result = {}
    before = peak_mb()
    path = f"{folder}/checkpoint"
    if what == "workers" and strategy.cluster_resolver.task_id:
        path = f"{folder}/other/checkpoint"
    for name, call in (("save", saver.write), ("restore", saver.read)):
        if name == "restore" and what == "workers":
            # The chief's, which has all, and is there when it says so.
            strategy.run(wait_for_all)
            path = f"{folder}/checkpoint"
        begin = time.perf_counter()
        call(path)
        if name == "save":
            os.sync()
        result[name] = bytes_ / 1e9 / (time.perf_counter() - begin)
        result[f"extra_{name}"] = peak_mb() - max(before, held / 2**20)
    return result


def measure_deltas(
    gib: float, dim: int, share: float, rounds: int, folder: str
) -> None:
    """Prints what full saves and deltas of a table take, in turns."""
    import numpy as np
    import tensorflow as tf

    import tfrs_embed

    rows = int(gib * 2**30) // (4 * dim)
    table = tfrs_embed.TableConfig("table", rows, dim, initializer="zeros")
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("id", table), "adagrad", size_threshold=0
    )
    saver = tf.train.Checkpoint(layer=layer)
    manager = tfrs_embed.checkpoint.DeltaManager(
        saver, f"{folder}/deltas", full_every=10**6, max_to_keep=1
    )
    layer.build(None)

    @tf.function
    def step(ids: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        return tape.gradient(loss, layer.trainable_variables)

    rng = np.random.default_rng(0)

    def train() -> int:
        """Changes a share of the rows; returns how many."""
        ids = rng.choice(rows, int(share * rows), replace=False)
        for part in np.array_split(ids, -(-len(ids) // 8192)):
            step(tf.constant(part))
        return len(ids)

    def timed(call: Callable[[], Any], flush: bool = True) -> float:
        os.sync()
        begin = time.perf_counter()
        call()
        if flush:
            os.sync()
        return time.perf_counter() - begin

    def size(prefix: str) -> int:
        files = pathlib.Path(folder).glob(f"**/{prefix}.*")
        return sum(file.stat().st_size for file in files)

    train()
    first = timed(manager.save)
    times: dict[str, list[float]] = {"full": [], "delta": []}
    for _ in range(rounds):
        changed = train()
        times["full"].append(timed(lambda: saver.write(f"{folder}/full")))
        times["delta"].append(timed(manager.save))
    full, delta = (statistics.median(t) for t in times.values())
    name = pathlib.Path(str(manager.latest_checkpoint)).name
    wanted = changed * (8 * dim + 8)
    print(
        f"[{rows}, {dim}] float32 with Adagrad's slots, {changed} rows change, "
        f"medians of {rounds} rounds\n"
        f"first save {first:.2f} s\n"
        f"all         {full:.2f} s, {size('full') / 1e6:.0f} MB\n"
        f"delta       {delta:.3f} s, {size(name) / 1e6:.1f} MB, "
        f"{full / delta:.0f} times as fast, "
        f"{size(name) / wanted:.3f} of the changed rows' bytes"
    )
    manager._full_every = 2
    train()
    before = peak_mb()
    # The save begins the thread; the next one takes its file.
    pauses = [timed(manager.save, flush=False)]
    begin = time.perf_counter()
    steps, ids = 0, tf.constant(rng.integers(0, rows, 8192))
    assert manager._next is not None
    while not manager._next.is_done:
        step(ids)
        steps += 1
    took = time.perf_counter() - begin
    grown = peak_mb() - before
    pauses.append(timed(manager.save, flush=False))
    manager.wait()
    alone = timed(lambda: [step(ids) for _ in range(20)]) / 20
    print(
        f"in a thread {took:.2f} s, {steps} steps meanwhile "
        f"({1e3 * took / max(1, steps):.1f} ms each, alone {1e3 * alone:.1f})"
        f", saves stop training for {max(pauses):.3f} s, "
        f"{max(pauses) / full:.3f} of a save of all; memory grows by "
        f"{grown:.0f} MB, {grown / (rows * dim * 8 / 2**20):.3f}"
    )


def measure_marks(rounds: int) -> None:
    """Prints what marking changed rows adds to steps, in turns."""
    import numpy as np
    import tensorflow as tf

    import tfrs_embed

    print("| tables | rows x dim | ids of a table | plain, ms | marked, ms "
          "| ratio of a round |\n|---|---|---|---|---|---|")  # fmt: skip
    rng = np.random.default_rng(0)
    for tables, rows, dim, bags, size in (
        (1, 4_000_000, 64, 8192, 20),
        (1, 4_000_000, 16, 8192, 20),
        (26, 100_000, 16, 4096, 1),
        (200, 50_000, 16, 256, 1),
    ):
        names = [f"table_{i}" for i in range(tables)]
        steps = []
        for marks in (False, True):
            layer = tfrs_embed.PartialTPUEmbedding(
                {
                    name: tfrs_embed.FeatureConfig(
                        name,
                        tfrs_embed.TableConfig(
                            name, rows, dim, combiner="sum", initializer="zeros"
                        ),
                        output_shape=[bags, dim],
                    )
                    for name in names
                },
                "adagrad",
                size_threshold=0,
            )
            if marks:
                layer.tables[names[0]].track_changes()

            def step(ids: Any, layer: Any = layer) -> Any:
                with tf.GradientTape() as tape:
                    found = layer(ids, training=True).values()
                    loss = tf.add_n([tf.reduce_sum(v) for v in found])
                return tape.gradient(loss, layer.trainable_variables)

            steps.append(tf.function(step))
        batches = [
            {
                name: tf.constant(rng.integers(0, rows, [bags, size]))
                for name in names
            }
            for _ in range(4)
        ]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 2):
            for which in (0, 1) if turn % 2 else (1, 0):
                begin = time.perf_counter()
                for batch in batches:
                    steps[which](batch)
                took = 1e3 * (time.perf_counter() - begin) / len(batches)
                if turn > 1:  # The first ones trace.
                    times[which].append(took)
        plain, marked = map(statistics.median, times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        print(
            f"| {tables} | {rows:,} x {dim} | {bags} bags of {size} "
            f"| {plain:.2f} | {marked:.2f} | {ratio:.3f} |",
            flush=True,
        )


def run(command: list[str], what: str) -> dict[str, float]:
    """Runs a measurement in processes of its own."""
    from tfrs_embed.testing import LocalCluster

    with LocalCluster(command, 2 if what == "workers" else 1) as cluster:
        codes = cluster.wait(1200)
        output = cluster.output(0)
    assert not any(codes), output
    return json.loads(
        next(x for x in reversed(output.splitlines()) if x.startswith("{"))
    )


def main() -> None:
    """Prints a table of throughput and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--deltas", action="store_true")
    parser.add_argument("--marks", action="store_true")
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--folder", default=None, help="a disk to save to")
    args = parser.parse_args()
    if args.marks:
        measure_marks(args.rounds)
        return
    if args.deltas:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure_deltas(args.gib, args.dim, args.share, args.rounds, folder)
        return
    if args.only:
        found = measure(args.only, args.gib, args.dim, args.folder)
        print(json.dumps(found))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for what in KINDS:
            command = [sys.executable, str(pathlib.Path(__file__).resolve())]
            command += ["--only", what, "--gib", str(args.gib)]
            command += ["--dim", str(args.dim)]
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found = run([*command, "--folder", folder], what)
            results.setdefault(what, []).append(found)
    print(f"{args.gib} GiB, [rows, {args.dim}] float32, {args.rounds} rounds")
    print("| | save GB/s | of plain | extra MB | restore GB/s | of plain "
          "| extra MB |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for what, found in results.items():
        row = [what]
        for name in ("save", "restore"):
            mine = statistics.median(f[name] for f in found)
            plain = statistics.median(f[name] for f in results["plain"])
            extra = max(f[f"extra_{name}"] for f in found)
            row += [f"{mine:.2f}", f"{mine / plain:.2f}", f"{extra:.0f}"]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
