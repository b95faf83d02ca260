"""The measurements, in processes that sharded.py starts."""

import gc
import os
import pathlib
import statistics
import sys
import time

import numpy as np
import scaling_model
import sharded
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed.distribution.exchange_kind import ELEMENT_SIZES

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import traffic_of_ids as traffic

tpu = tf.tpu.experimental.embedding


def make_strategy(cluster):
    """Must come before TensorFlow's first operation."""
    kind, count = cluster.split(":")
    if kind == "one":
        return tf.distribute.get_strategy()
    if kind == "mirrored":
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * int(count)
        )
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(int(count))]
        )
    # TensorFlow would give each process as many threads as there are cores.
    threads = max(1, len(os.sched_getaffinity(0)) // int(count))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return tf.distribute.MultiWorkerMirroredStrategy()


def make_ids(shape, rows, *seed):
    """Ids with the power law that recommenders' ids have."""
    rng = np.random.default_rng(seed)
    ids = rng.zipf(1.05, shape) - 1
    # What is beyond the table goes anywhere in it. Modulo the number of rows
    # would favour shard 0: large draws are multiples of powers of two.
    return np.where(ids < rows, ids, rng.integers(rows, size=shape))


def distribute(strategy, make):
    """Gives each replica what `make` makes of its number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(make(context.replica_id_in_sync_group))
    )


class Replicated(tf_keras.layers.Layer):
    """Keras's embeddings, combined by sum."""

    def __init__(self, tables):
        super().__init__()
        self.tables = {
            name: tf_keras.layers.Embedding(rows, dim)
            for name, (rows, dim) in tables.items()
        }

    def call(self, ids, training=None):
        return {
            name: tf.reduce_sum(self.tables[name](ids[name]), 1) for name in ids
        }


def make_layer(strategy, kind, tables, communication_dtype="float32"):
    """A layer: tables are {name: (rows, dim)}."""
    with strategy.scope():
        if kind == "keras":
            return Replicated(tables)
        features = {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    *shape,
                    combiner="sum",
                    name=name,
                    initializer=tf_keras.initializers.RandomUniform(
                        -0.05, 0.05, seed=1
                    ),
                ),
                output_shape=[None],
            )
            for name, shape in tables.items()
        }
        return tfrs_embed.PartialTPUEmbedding(
            features,
            tf_keras.optimizers.Adagrad(0.01),
            size_threshold=0,
            communication_dtype=communication_dtype,
        )


def make_replica_step(layer, optimizer=None):
    """A replica's training step on {name: [batch, hotness]}."""

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(a * a)
                    for a in layer(ids, training=True).values()
                ]
            )
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        if optimizer is None:
            # A function leaves out updates whose gradients nobody uses.
            for gradient in gradients:
                tf.identity(gradient)
        else:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


def make_step(
    strategy,
    kind,
    tables,
    optimizers=tf_keras.optimizers,
    communication_dtype="float32",
):
    """A layer, and its traced step on [tables, batch, hotness] a replica."""
    layer = make_layer(strategy, kind, tables, communication_dtype)
    with strategy.scope():
        # The sharded layer has a scalar for it; its own optimizer trains the
        # tables.
        optimizer = optimizers.Adagrad(0.01)
    replica_step = make_replica_step(layer, optimizer)

    @tf.function
    def step(ids):
        def run(ids):
            # Two hundred arguments would cost more than the step.
            replica_step(dict(zip(tables, tf.unstack(ids), strict=True)))

        strategy.run(run, args=(ids,))

    return layer, step


def alternate(args, steps, batches):
    """Times {name: step} in turns; returns {name: seconds}."""
    times = {name: [] for name in steps}
    for step in steps.values():
        step(batches[0])  # Traces, and creates the variables.
    gc.disable()
    for _ in range(args.rounds):
        for name, step in steps.items():
            step(batches[0])  # Brings the table back into the caches.
            for i in range(args.steps):
                start = time.perf_counter()
                step(batches[i % len(batches)])
                times[name].append(time.perf_counter() - start)
    gc.enable()
    return times


def difference(after, before, replica=0):
    """The traffic of a local replica between two readings of its counters."""
    return traffic.Traffic(
        *(
            getattr(after[replica], field) - getattr(before[replica], field)
            for field in traffic.Traffic.__annotations__
        )
    )


def step(args, strategy):
    """Time of a training step, and what it sends."""
    world = strategy.num_replicas_in_sync
    table = {"table": (args.rows, args.dim)}
    legacy = tf_keras.optimizers.legacy
    layers, steps = {}, {}
    for dtype in args.communication_dtype:
        name = "sharded" if dtype == "float32" else f"sharded, {dtype}"
        layers[name], steps[name] = make_step(
            strategy, "ours", table, communication_dtype=dtype
        )
    first = next(iter(layers))
    if args.keras:
        steps["replicated"] = make_step(strategy, "keras", table)[1]
        steps["replicated, legacy"] = make_step(
            strategy, "keras", table, legacy
        )[1]
    # One device has the batches of all replicas.
    of_all = int(args.cluster.split(":")[1]) // world
    shape = (1, of_all * args.batch, args.hotness)
    ids = [
        [make_ids(shape, args.rows, b, r) for r in range(world)]
        for b in range(args.batches)
    ]
    batches = [distribute(strategy, each.__getitem__) for each in ids]
    times = alternate(args, steps, batches)
    counted = {}
    for name, dtype in zip(layers, args.communication_dtype, strict=True):
        if world == 1:
            break
        engine = layers[name].tpu_embedding.engine
        before = engine.traffic()
        for batch in batches:
            steps[name](batch)
        sent = difference(engine.traffic(), before)
        expected = [
            traffic.expected_traffic(
                {"table": (args.rows, args.dim)},
                [[traffic.FeatureIds("table", i[0], args.batch)] for i in each],
                element=ELEMENT_SIZES[dtype],
            )[0]
            for each in ids
        ]
        assert sent.bytes == sum(e.bytes for e in expected), (sent, expected)
        counted[name] = (
            f"{sent.bytes / args.batches / 1e6:.2f}",
            f"{sent.unique_keys // args.batches:,}",
        )
    yield (
        "table, Adagrad",
        "ms, median",
        "ms, fastest",
        f"of the {first}",
        "MB sent",
        "keys",
    )
    for name, seconds in times.items():
        ratio = statistics.median(seconds) / statistics.median(times[first])
        yield (
            name if world > 1 else "one device",
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{min(seconds) * 1e3:.1f}",
            f"{ratio:.2f}",
            *counted.get(name, ("", "")),
        )


def tables(args, strategy):
    """Collectives and time of a step on few and on many tables."""
    rows, dim, batch = 1000, 16, 256
    kinds = ["ours", "keras"] if args.keras_tables else ["ours"]
    yield "tables", "collectives", "bytes", "ms", "Keras's ms"
    for number in args.tables:
        shapes = {f"table_{i}": (rows, dim) for i in range(number)}
        layers, steps = {}, {}
        for kind in kinds:
            layers[kind], steps[kind] = make_step(strategy, kind, shapes)
        batches = [
            distribute(
                strategy,
                lambda r, b=b, n=number: make_ids((n, batch, 1), rows, b, r),
            )
            for b in range(args.batches)
        ]
        times = alternate(args, steps, batches)
        engine = layers["ours"].tpu_embedding.engine
        before = engine.traffic()
        steps["ours"](batches[0])
        sent = difference(engine.traffic(), before)
        yield (
            f"{number}",
            f"{sent.collectives}",
            f"{sent.bytes:,}",
            *(f"{statistics.median(times[k]) * 1e3:.1f}" for k in kinds),
            *[""] * (2 - len(kinds)),
        )


def resident():
    """This process's resident memory, in MB, now and at most."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":") for line in status)
    return [int(lines[k].split()[0]) * 1024 / 1e6 for k in ("VmRSS", "VmHWM")]


def memory(args, strategy):
    """Memory of one process, which may run several replicas."""
    world = strategy.num_replicas_in_sync
    local = len(strategy.extended.worker_devices)
    shape = (1, args.batch, args.hotness)

    def train(name, rows):
        layer, step = make_step(
            strategy, args.contender, {name: (rows, args.dim)}
        )
        seen = []
        for b in range(1 + args.steps):
            step(
                distribute(strategy, lambda r, b=b: make_ids(shape, rows, b, r))
            )
            if b in (0, args.steps):
                seen.append(resident())
        return layer, seen

    # The memory of TensorFlow and of a step, whatever the table's size.
    small, [*_, (before, _)] = train("small", args.rows // 10)
    large, [(built, _), (stepped, peak)] = train("large", args.rows)
    del small, large
    whole = 2 * args.rows * args.dim * 4 / 1e6
    sharded = args.contender == "ours"
    share = whole * local / (world if sharded else 1)
    yield (
        "table",
        "table and slot, MB",
        "of them here",
        "before",
        "grown in step 1",
        "in all steps",
        "at most",
    )
    yield (
        "sharded" if sharded else "replicated",
        *(
            f"{x:,.0f}"
            for x in (
                whole,
                share,
                before,
                built - before,
                stepped - before,
                peak - before,
            )
        ),
    )


def soak(args, strategy):
    """Memory over many steps of the tables alone: Keras's all-reduce leaks."""
    table = (100_000, 32)
    layer = make_layer(strategy, "ours", {"table": table})
    replica_step = make_replica_step(layer)
    pool = tf.constant(
        make_ids((2 * args.soak_batch, args.hotness), table[0], 0)
    )

    @tf.function
    def step(number):
        def run():
            replica = tf.distribute.get_replica_context()
            first, size = tf.unstack(
                tf.random.stateless_uniform(
                    [2],
                    tf.stack([replica.replica_id_in_sync_group, number]),
                    0,
                    args.soak_batch,
                    tf.int32,
                )
            )
            replica_step({"table": pool[first : first + size]})

        strategy.run(run)

    seen = []
    every = max(1, args.soak_steps // 10)
    for i in range(args.soak_steps + 1):
        step(tf.constant(i))
        if i % every == 0:
            gc.collect()
            seen.append(resident()[0])
    yield tuple(f"step {i * every:,}, MB" for i in range(len(seen)))
    yield tuple(f"{x:.1f}" for x in seen)


def check_model(strategy, number, batch, dims, hotness, skewed):
    """Compares a step's traffic with the model's; returns that, by rank."""
    world, rows = strategy.num_replicas_in_sync, 10_000
    widths = {f"table_{number}_{i}": dim for i, dim in enumerate(dims)}
    # Batches of different sizes, and tables of different hotness.
    ids = [
        {
            name: make_ids((batch * (r + 1), hotness + i), rows, number, r, i)
            for i, name in enumerate(widths)
        }
        for r in range(world)
    ]
    if skewed:  # One shard has all rows.
        ids = [{n: i // world * world for n, i in each.items()} for each in ids]
    layer = make_layer(strategy, "ours", {n: (rows, widths[n]) for n in widths})
    replica_step = make_replica_step(layer)
    mine = []

    def my_ids(name):
        mine.clear()
        return distribute(
            strategy, lambda rank: mine.append(rank) or ids[rank][name]
        )

    batches = {name: my_ids(name) for name in widths}

    @tf.function
    def step(ids):
        strategy.run(replica_step, args=(ids,))

    step(batches)
    engine = layer.tpu_embedding.engine
    before = engine.traffic()
    step(batches)
    expected = traffic.expected_traffic(
        {name: (rows, dim) for name, dim in widths.items()},
        [
            [traffic.FeatureIds(name, i, len(i)) for name, i in each.items()]
            for each in ids
        ],
    )
    for local, rank in enumerate(mine):
        counted = difference(engine.traffic(), before, local)
        # With ten workers or more, ranks are in another order than ids.
        assert counted == expected[rank], (rank, counted, expected[rank])
    # The counters don't look at what is run.
    operations = step.get_concrete_function(batches).graph.get_operations()
    collectives = sum(o.type.startswith("Collective") for o in operations)
    assert collectives == len(mine) * expected[0].collectives, collectives
    return expected


def model(args, strategy):
    """Whether the model of the traffic agrees with the counters."""
    yield (
        "widths",
        "batch",
        "ids of a sample",
        "ids",
        "collectives",
        "bytes a replica",
    )
    for number, (dims, batch, hotness, skewed) in enumerate(
        [
            ([8], 5, 1, False),
            ([16, 16, 16], 64, 1, False),
            ([8, 16, 16], 300, 1, False),
            ([4, 8, 4, 16], 300, 1, True),
            ([64], 3000, 1, False),
            # By vectors: all, and some on 4 replicas.
            ([16, 32, 16], 300, 14, False),
            ([16] * 5, 300, 7, False),
        ]
    ):
        by_rank = check_model(strategy, number, batch, dims, hotness, skewed)
        yield (
            f"{dims}",
            f"{batch:,} and more",
            ", ".join(f"{hotness + i}" for i in range(len(dims))),
            "of one shard" if skewed else "power law",
            f"{by_rank[0].collectives}",
            f"{by_rank[0].bytes:,}",
        )


def hot(args, strategy):
    """Bytes and time of a replica, with copies of frequent rows and without."""
    world = strategy.num_replicas_in_sync
    # A power law over the table's rows, of which the first are most frequent.
    shares = np.cumsum(np.arange(1, args.rows + 1) ** -1.05)
    cases = {}
    for hotness in (1, args.hotness):
        shape = (args.batch * args.hotness // hotness, hotness)
        drawn = [
            [
                np.searchsorted(
                    shares / shares[-1],
                    np.random.default_rng((b, r)).random(shape),
                )
                for r in range(world)
            ]
            for b in range(args.batches)
        ]
        batches = [distribute(strategy, each.__getitem__) for each in drawn]
        for number in (0, *args.hot_rows):
            table = tfrs_embed.TableConfig(
                f"table_{hotness}_{number}",
                args.rows,
                args.dim,
                "uniform",
                placement="row",
                hot_rows=range(number),
            )
            with strategy.scope():
                layer = tfrs_embed.DistributedEmbedding(
                    {"ids": tfrs_embed.FeatureConfig("ids", table)},
                    optimizer="adagrad",
                )
            steps = {
                "training": make_replica_step(layer),
                "evaluation": lambda ids, layer=layer: layer(
                    ids, training=False
                ),
            }
            cases[hotness, number] = layer, batches, drawn, steps
    yield (
        "ids of a sample",
        "hot rows",
        "",
        "MB sent",
        "of plain",
        "collectives",
        "ms, median",
    )
    for kind in ("training", "evaluation"):
        for hotness in (1, args.hotness):
            functions, sent = {}, {}
            for number in (0, *args.hot_rows):
                layer, batches, drawn, steps = cases[hotness, number]
                function = tf.function(
                    lambda ids, step=steps[kind]: strategy.run(
                        step, args=({"ids": ids},)
                    )
                )
                function(batches[0])
                engine = layer._engine_layer.engine
                before = engine.traffic()
                for batch in batches:
                    function(batch)
                sent[number] = difference(engine.traffic(), before)
                functions[number] = function
                if kind == "training":
                    expected = [
                        traffic.expected_traffic(
                            {"ids": (args.rows, args.dim)},
                            [
                                [traffic.FeatureIds("ids", i, len(i))]
                                for i in each
                            ],
                            {"ids": range(number)},
                        )[0].bytes
                        for each in drawn
                    ]
                    assert sent[number].bytes == sum(expected)
            times = alternate(args, functions, batches)
            for number, counted in sent.items():
                yield (
                    f"{hotness}",
                    f"{number:,}",
                    kind,
                    f"{counted.bytes / args.batches / 1e6:.2f}",
                    f"{counted.bytes / sent[0].bytes:.2f}",
                    f"{counted.collectives // args.batches}",
                    f"{statistics.median(times[number]) * 1e3:.1f}",
                )


def main():
    args = sharded.parse()
    strategy = make_strategy(args.cluster)
    parts = {f.__name__: f for f in (step, tables, memory, soak, model, hot)}
    header, *rows = parts[args.part](args, strategy)
    print(
        scaling_model.table(
            ["replicas", *header], [[args.cluster, *row] for row in rows]
        )
    )


if __name__ == "__main__":
    main()
