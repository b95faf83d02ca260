"""Times plans on logical CPUs, beside what the planner predicts of them.

    python benchmarks/plans.py --replicas 2

Each plan has other placements of the same tables: all tables alike, mixed ones
by chance, and what the planner chooses. Their steps are timed in turns. What
counts is whether the predicted order is the measured one: Spearman's rank
correlation is printed at the end, and the time of the planner's choice beside
that of all tables by row.
"""

import argparse
import gc
import os
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

import tfrs_embed

PLACES = ("row", "table", "column", "replicated")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--plans", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2048, help="a replica's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="a round")
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        default="mixed",
        help="tables of several kinds, or 26 of 16 columns and 10 ids a sample",
    )
    return parser.parse_args()


#: Tables by model: (rows, dim, ids of a sample).
MODELS = {
    "mixed": [
        (1_000_000, 64, 1),
        (300_000, 32, 10),
        (200_000, 16, 20),
        (100_000, 32, 1),
        (50_000, 64, 5),
        (10_000, 16, 10),
        (1_000, 32, 1),
        (100, 16, 1),
    ],
    "26x16": [(100_000, 16, 10)] * 26,
}


def features(tables, places):
    """Configurations of a feature for each table."""
    return {
        f"t{i}": tfrs_embed.FeatureConfig(
            f"t{i}",
            tfrs_embed.TableConfig(
                f"t{i}",
                rows,
                dim,
                "uniform",
                combiner="sum",
                placement=place,
            ),
        )
        for i, ((rows, dim, _), place) in enumerate(
            zip(tables, places, strict=True)
        )
    }


def draw(tables, batch, *seed):
    """One replica's ids, by the power law that recommenders' ids have."""
    rng = np.random.default_rng(seed)
    ids = {}
    for i, (rows, _, hotness) in enumerate(tables):
        drawn = rng.zipf(1.05, (batch, hotness)) - 1
        others = rng.integers(rows, size=drawn.shape)
        ids[f"t{i}"] = np.where(drawn < rows, drawn, others)
    return ids


def choices(args, tables):
    """The placements of each plan, by its name; None: the planner chooses."""
    found = {f"all {place}": [place] * len(tables) for place in PLACES}
    found["the planner's"] = ["auto"] * len(tables)
    rng = np.random.default_rng(args.seed)
    while len(found) < args.plans:
        # Two or three kinds, so that engines' fixed costs differ too.
        kinds = rng.choice(PLACES, rng.integers(2, 4), replace=False)
        places = [str(rng.choice(kinds)) for _ in tables]
        found[f"mixed {len(found) - 4}"] = places
    return found


def make_step(strategy, tables, plan):
    """A step on one batch of each replica."""
    configs = features(tables, ["auto"] * len(tables))
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            configs, optimizer="adagrad", plan=plan
        )

    def replica_step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=True)
            loss = tf.add_n([tf.reduce_sum(v * v) for v in outputs.values()])
        # A function leaves out updates whose gradients nobody uses.
        for gradient in tape.gradient(loss, layer.trainable_variables):
            tf.identity(gradient)

    return tf.function(lambda ids: strategy.run(replica_step, (ids,)))


def spearman(first, second):
    """The rank correlation of two lists without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def main():
    args = parse()
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * args.replicas
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(args.replicas)]
    )
    tables = MODELS[args.model]
    ids = [
        [draw(tables, args.batch, r, b) for r in range(args.replicas)]
        for b in range(4)
    ]
    names = list(ids[0][0])
    seen = [
        {name: np.concatenate([each[name] for each in of]) for name in names}
        for of in ids
    ]
    batches = [
        {
            name: strategy.experimental_distribute_values_from_function(
                lambda context, of=of, name=name: tf.constant(
                    of[context.replica_id_in_sync_group][name]
                )
            )
            for name in names
        }
        for of in ids
    ]
    plans, steps = {}, {}
    for name, places in choices(args, tables).items():
        plans[name] = tfrs_embed.plan(
            features(tables, places),
            seen,
            replicas=args.replicas,
            topology="cpu",
            optimizer="adagrad",
        )
        steps[name] = make_step(strategy, tables, plans[name])
        steps[name](batches[0])
    times = {name: [] for name in steps}
    gc.disable()
    for _ in range(args.rounds):
        for name, step in steps.items():
            step(batches[0])  # Brings the tables back into the caches.
            for i in range(args.steps):
                begin = time.perf_counter()
                step(batches[i % len(batches)])
                times[name].append(time.perf_counter() - begin)
    measured = {name: np.median(each) for name, each in times.items()}
    print(f"{'plan':16} {'ms':>8} {'predicted':>9} {'MB sent':>8}  placements")
    for name in sorted(measured, key=measured.__getitem__):
        plan = plans[name]
        letters = " ".join(t.placement[:3] for t in plan.tables)
        print(
            f"{name:16} {1e3 * measured[name]:8.2f} {1e3 * plan.seconds:9.2f} "
            f"{plan.sent_bytes / 1e6:8.2f}  {letters}"
        )
    found = spearman(
        [measured[name] for name in plans],
        [plans[name].seconds for name in plans],
    )
    print(f"Spearman {found:.2f}")
    ratio = measured["the planner's"] / measured["all row"]
    print(f"the planner's choice takes {ratio:.2f} of all by row")


if __name__ == "__main__":
    main()
