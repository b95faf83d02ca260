"""What a step sends: the formulas of docs/scaling.md, counted and traced."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from helpers import differentiate
from strategies.replicas import distribute, local_ids
from tfrs_embed.distribution.replicas import bucket_of

ROWS, DIM = 1000, 4


def make_step(strategy, dims, mirrored=False):
    """A layer of tables of these widths, and a function that trains it."""
    make = tfrs_embed.PartialTPUEmbedding
    placement = "sharded"
    if mirrored:
        make, placement = tfrs_embed.DistributedEmbedding, "default_device"
    configs = {
        str(i): tfrs_embed.FeatureConfig(
            str(i),
            tfrs_embed.TableConfig(
                f"table {i}", ROWS, dim, placement=placement
            ),
        )
        for i, dim in enumerate(dims)
    }
    with strategy.scope():
        layer = make(configs, optimizer="sgd")

    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(dict(zip(configs, tf.unstack(ids), strict=True)))
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)

    return layer, tf.function(lambda ids: strategy.run(step, (ids,)))


def train_once(strategy, tables, ids):
    layer, step = make_step(strategy, [DIM] * tables)
    step(distribute(strategy, ids))
    return layer.tpu_embedding.engine.traffic()


def draw(strategy, tables, number=50):
    rng = np.random.default_rng(tables)
    return [
        rng.integers(0, ROWS, (tables, number))
        for _ in range(strategy.num_replicas_in_sync)
    ]


@pytest.mark.parametrize("tables", [1, 5])
def test_bytes_are_those_of_the_formula(strategy, tables):
    world = strategy.num_replicas_in_sync
    ids = draw(strategy, tables)
    unique = [[set(table.tolist()) for table in each] for each in ids]
    # Tables begin on different shards.
    counts = np.array(
        [
            [
                sum(
                    (i + t * world // tables) % world == shard
                    for t, table in enumerate(each)
                    for i in table
                )
                for shard in range(world)
            ]
            for each in unique
        ]
    )
    capacity = int(bucket_of(tf.constant(counts.max()))[0])
    assert counts.max() <= capacity <= max(8, counts.max() * 9 / 8)
    found = train_once(strategy, tables, ids)
    for replica, traffic in zip(local_ids(strategy), found, strict=True):
        remote = counts[replica].sum() - counts[replica][replica]
        assert traffic.unique_keys == counts[replica].sum()
        assert traffic.least_bytes == remote * (8 + 8 * DIM)
        assert traffic.bytes == (world - 1) * (
            8 * (1 + capacity) + 8 * DIM * capacity
        )


def test_collectives_do_not_grow_with_the_number_of_tables(strategy):
    found = {
        tables: train_once(strategy, tables, draw(strategy, tables, 3))
        for tables in (2, 20)
    }
    assert {t.collectives for ts in found.values() for t in ts} == {4}


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("dims", [[DIM] * 3, [DIM, DIM + 1, DIM]])
def test_a_steps_graph_has_the_collectives_of_the_formula(
    strategy, dims, mirrored
):
    layer, step = make_step(strategy, dims, mirrored)
    ids = distribute(strategy, draw(strategy, len(dims), 3))
    made = step.get_concrete_function(ids).graph.as_graph_def()
    of_functions = [n for f in made.library.function for n in f.node_def]
    found, of_branches = (
        collections.Counter(n.op for n in nodes if "Collective" in n.op)
        for nodes in (made.node, of_functions)
    )
    here, widths = len(local_ids(strategy)), len(set(dims))
    exchanges = (
        {"CollectiveGatherV2": 2 * widths * here}
        if mirrored
        else {"CollectiveAllToAllV2": 3 * widths * here}
    )
    # Are all ids valid, and the longest message: of gradients by itself.
    decisions = 2 if mirrored else 1
    assert found == {"CollectiveReduceV2": decisions * here, **exchanges}
    # What is wrong where, and what differs.
    branches = 2 if mirrored else 3
    assert of_branches == {"CollectiveGatherV2": branches * here}
    if not mirrored:  # Whose traffic is not counted.
        step(ids)
        counted = [t.collectives for t in layer.tpu_embedding.engine.traffic()]
        assert counted == [sum(found.values()) // here] * here


def test_capacities_are_few_and_close():
    capacities = {}
    for count in (*range(1, 200), *range(200, 20_000, 97)):
        capacity, number = (int(n) for n in bucket_of(tf.constant(count)))
        assert max(8, count) <= capacity <= max(8, count * 9 / 8)
        # A number, and so an instance key, is bound to one capacity.
        assert capacities.setdefault(number, capacity) == capacity
    assert len(capacities) < 120
    assert max(capacities) < 512
