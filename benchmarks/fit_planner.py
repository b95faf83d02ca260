"""Fits the planner's weights to measured steps.

    pip install scipy
    python benchmarks/fit_planner.py --replicas 2

Times training steps of layers whose tables all have one placement, of many
shapes, and fits what `tfrs_embed/tools/planner/cost.py` says that these cost:
by placement the time of a byte of rows, of an id and of a table, and the
latency of a collective, none of them negative, by least squares of relative
errors.
Prints the weights in the units of that module, and what each layer took beside
what it is predicted with them. benchmarks/plans.py then times plans that the
fit has not seen.
"""

import argparse
import gc
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import plans
import tensorflow as tf
from scipy.optimize import nnls

import tfrs_embed
from tfrs_embed.configs.hardware import hardware
from tfrs_embed.distribution.exchange_kind import vectors_are_less
from tfrs_embed.tools.planner import cost

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
from traffic_of_ids import FeatureIds, exchange_of_ids

#: Tables, their rows, width and ids of a sample; samples of a replica.
SHAPES = [
    (1, 1_000_000, 64, 1, 8192),
    (8, 100_000, 16, 1, 2048),
    (26, 10_000, 16, 1, 1024),
    (40, 1_000, 16, 1, 256),
    (4, 100_000, 32, 10, 2048),
    (8, 50_000, 64, 8, 1024),
    (26, 100_000, 16, 10, 1024),
    (2, 200_000, 128, 4, 2048),
    (2, 100_000, 16, 50, 1024),
]
KINDS = ("row", "vectors", "table", "column", "replicated")
#: What is fitted of each kind, besides the latency.
TERMS = ("bytes", "ids", "operations")


def build(strategy, kind, shape, batches=2):
    """A layer's step, its batches, and what the model multiplies weights by."""
    count, rows, dim, hotness, batch = shape
    tables = [(rows, dim, hotness)] * count
    world = strategy.num_replicas_in_sync
    ids = [
        [plans.draw(tables, batch, r, b) for r in range(world)]
        for b in range(batches)
    ]
    seen = [
        {n: np.concatenate([each[n] for each in of]) for n in ids[0][0]}
        for of in ids
    ]
    place = "row" if kind == "vectors" else kind
    plan = tfrs_embed.plan(
        plans.features(tables, [place] * count),
        seen,
        replicas=world,
        topology="cpu",
        optimizer="adagrad",
    )
    step = plans.make_step(strategy, tables, plan)
    values = [
        {
            n: strategy.experimental_distribute_values_from_function(
                lambda context, of=of, n=n: tf.constant(
                    of[context.replica_id_in_sync_group][n]
                )
            )
            for n in ids[0][0]
        }
        for of in ids
    ]
    machine = hardware("cpu")
    unique = sum(t.unique_share * t.hotness * batch for t in plan.tables)
    looked_up = count * hotness * batch
    update = 2 * (1 + 1)  # The row and Adagrad's slot, read and written.
    passes = cost._PASSES
    moved = passes * looked_up
    slices = sum(len(t.ranks) or 1 for t in plan.tables) / count
    # Copies are updated by all replicas' rows.
    moved += update * (unique * world if kind == "replicated" else looked_up)
    per_replica = [moved * 4 * dim, looked_up * slices, 0.0]
    # The host's cores and memory are shared by all replicas.
    terms = [world * x / machine.memory_bandwidth for x in per_replica]
    terms[2] = world * count * slices * machine.operation
    if place == "row":
        sent = exchange_of_rows(tables, seen, world).passed_bytes
    else:
        # All-to-alls, or all-gathers, whose bytes are passed on.
        passes = world - 1 if kind == "replicated" else 1
        sent = passes * plan.sent_bytes
    fixed = cost.transfer_time(sent, world, machine)
    if kind == "vectors":
        fixed += (
            world * world * count * batch * cost._VECTOR_PASSES * 4 * dim
        ) / machine.memory_bandwidth
    return step, values, terms, plan.collectives, fixed


def exchange_of_rows(tables, seen, world):
    """The exchange of tables by row."""
    names = list(seen[0])
    size = len(seen[0][names[0]]) // world
    by_rank = [
        [
            FeatureIds(n, seen[0][n][r * size : (r + 1) * size], size)
            for n in names
        ]
        for r in range(world)
    ]
    shapes = {
        n: (rows, dim) for n, (rows, dim, _) in zip(names, tables, strict=True)
    }
    return exchange_of_ids(shapes, by_rank)[0]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="a round")
    args = parser.parse_args()
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * args.replicas
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(args.replicas)]
    )
    cases = {}
    for kind in KINDS:
        for shape in SHAPES:
            _, _, dim, hotness, _ = shape
            less = vectors_are_less(hotness, dim, args.replicas)
            if kind in ("row", "vectors") and less != (kind == "vectors"):
                continue
            cases[kind, shape] = build(strategy, kind, shape)
    times = {name: [] for name in cases}
    for step, values, *_ in cases.values():
        step(values[0])
    gc.disable()
    for _ in range(args.rounds):
        for name, (step, values, *_) in cases.items():
            step(values[0])  # Brings the tables back into the caches.
            for i in range(args.steps):
                begin = time.perf_counter()
                step(values[i % len(values)])
                times[name].append(time.perf_counter() - begin)
    measured = np.array([np.median(each) for each in times.values()])
    matrix = np.zeros([len(cases), 1 + len(KINDS) * len(TERMS)])
    fixed = np.zeros(len(cases))
    for i, ((kind, _), case) in enumerate(cases.items()):
        _, _, terms, collectives, fixed[i] = case
        at = 1 + KINDS.index(kind) * len(TERMS)
        matrix[i, 0] = collectives
        matrix[i, at : at + len(TERMS)] = terms
    weights, _ = nnls(
        matrix / measured[:, None], (measured - fixed).clip(0) / measured
    )
    print(f"latency of a collective: {weights[0] * 1e3:.2f} ms")
    for i, kind in enumerate(KINDS):
        found = weights[1 + i * len(TERMS) :][: len(TERMS)]
        print(
            f"{kind:10}",
            *(f"{t} {w:8.2f}" for t, w in zip(TERMS, found, strict=True)),
        )
    predicted = matrix @ weights + fixed
    for ((kind, shape), _), one, other in zip(
        cases.items(), measured, predicted, strict=True
    ):
        print(
            f"{kind:10} {shape!s:30} {1e3 * one:8.2f} ms, predicted "
            f"{1e3 * other:8.2f}"
        )


if __name__ == "__main__":
    main()
