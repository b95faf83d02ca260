"""What a step sends: the formulas of docs/scaling.md, counted and traced."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import nightly, on
from reference import Ragged
from strategies.replicas import distribute, local_ids
from tfrs_embed.distribution.exchange_kind import ELEMENT_SIZES
from tfrs_embed.distribution.replicas import bucket_of
from traffic_of_ids import FeatureIds, expected_traffic
from training_helpers import differentiate

pytestmark = [
    on("mirrored:2", "mirrored:4", "workers:3", tier="nightly"),
]

ROWS, DIM = 1000, 4


def make_step(strategy, dims, mirrored=False, **options):
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
        layer = make(configs, optimizer="sgd", **options)

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


@on("workers:3", tier="more")
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
        assert traffic.unique_keys == counts[replica].sum()
        assert traffic.bytes == (world - 1) * (
            8 * (1 + capacity) + 8 * DIM * capacity
        )


@on("mirrored:2", tier="more")
def test_collectives_do_not_grow_with_the_number_of_tables(strategy):
    found = {
        tables: train_once(strategy, tables, draw(strategy, tables, 3))
        for tables in (2, 20)
    }
    assert {t.collectives for ts in found.values() for t in ts} == {4}


WIDTHS = {"a": 16, "b": 16, "c": 32, "d": 8, "half": 16}
#: Each feature's table, ids of a bag (None: they differ), whether it has
#: weights. Ten ids and more are exchanged by vectors.
FEATURES = {
    "one": [("a", 12, False)],
    "one_width": [("a", 12, False), ("b", 15, False), ("a", 16, False)],
    "two_widths": [("a", 12, False), ("c", 16, False)],
    "weighted": [("a", 12, True), ("c", 16, False)],
    "rows_of_one_width": [("a", 12, False), ("b", 15, False), ("c", 1, False)],
    "rows_of_one_table": [
        ("a", 12, False),
        ("a", 1, False),
        ("a", None, False),
    ],
    "rows_of_all": [
        ("a", 12, False),
        ("b", 3, True),
        ("c", None, False),
        ("c", 16, True),
        ("d", 1, False),
    ],
    "rows_of_two_bytes": [
        ("a", 12, False),
        ("b", 1, False),
        ("half", 1, False),
        ("half", None, False),
        ("half", 8, False),
    ],
}


def feature_ids(rng, table, size, weighted, bags):
    """One replica's ids of a feature, as layers and as the model take them."""
    if size is not None:
        ids = rng.integers(0, ROWS, (bags, size))
        return ids, FeatureIds(table, ids, bags, False, weighted)
    ids = [rng.integers(0, ROWS, n).tolist() for n in rng.integers(0, 9, bags)]
    flat = np.concatenate(ids).astype(np.int64)
    return Ragged(ids), FeatureIds(table, flat, bags, True, weighted)


@on(
    "mirrored:4",
    tier="more",
    when=lambda name, dtype: (name, dtype) == ("rows_of_all", "float32"),
)
@on(
    "mirrored:2",
    tier="more",
    when=lambda name, dtype: dtype == "float16" or name == "two_widths",
)
@nightly(
    lambda name: (
        name in ("rows_of_one_width", "rows_of_one_table", "rows_of_two_bytes")
    )
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in FEATURES), ("rows_of_all", "float16")],
)
def test_vectors_bytes_are_those_of_the_model(strategy, name, dtype):
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            ROWS,
            dim,
            placement="row",
            dtype="bfloat16" if name == "half" else "float32",
        )
        for name, dim in WIDTHS.items()
    }
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            {
                str(i): tfrs_embed.FeatureConfig(str(i), tables[table])
                for i, (table, *_) in enumerate(FEATURES[name])
            },
            optimizer="adagrad",
            communication_dtype=dtype,
        )
    rng = np.random.default_rng(len(name))
    batches, known = [], []
    for rank in range(strategy.num_replicas_in_sync):
        # Unequal batches, the largest on neither end.
        bags = (5, 11, 3, 8)[rank]
        each = [feature_ids(rng, *f, bags) for f in FEATURES[name]]
        ids = {str(i): ids for i, (ids, _) in enumerate(each)}
        weights = {
            str(i): np.ones(ids.shape, np.float32)
            for i, (ids, of_feature) in enumerate(each)
            if of_feature.weighted
        }
        batches.append((ids, weights))
        known.append([of_feature for _, of_feature in each])

    def step(ids, weights):
        weights = {key: weights.get(key) for key in ids} if weights else None
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights)
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)

    function = tf.function(lambda *given: strategy.run(step, given))
    spread = distribute(strategy, batches)
    operations = function.get_concrete_function(*spread).graph.get_operations()
    function(*spread)
    expected = expected_traffic(
        {table: (ROWS, dim) for table, dim in WIDTHS.items()},
        known,
        element=ELEMENT_SIZES[dtype],
        narrow=["half"],
    )
    ranks = local_ids(strategy)
    counted = layer._engine_layer.engine.traffic()
    for rank, found in zip(ranks, counted, strict=True):
        assert found == expected[rank]
    collectives = sum(o.type.startswith("Collective") for o in operations)
    assert collectives == len(ranks) * expected[0].collectives


@on("mirrored:2")
def test_kernels_read_and_update_all_tables_of_a_width_together(strategy):
    if not tfrs_embed.kernels.status().loaded:
        pytest.skip("no kernels")
    _, step = make_step(strategy, [DIM] * 3)
    ids = distribute(strategy, draw(strategy, 3, 3))
    nodes = step.get_concrete_function(ids).graph.as_graph_def().node
    here = len(local_ids(strategy))
    assert [n.op for n in nodes].count("TfrsEmbedReadRows") == here
    updates = [n for n in nodes if n.op == "TfrsEmbedUpdate"]
    assert [[*n.attr["spans"].list.i] for n in updates] == [[3]] * here


@on("workers:3", tier="more")
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


@on("mirrored:2", tier="more")
def test_a_further_table_of_a_width_takes_few_operations(
    strategy, needs_kernels
):
    made = {}
    for tables in (10, 30):
        _, step = make_step(strategy, [DIM] * tables)
        ids = distribute(strategy, draw(strategy, tables, 3))
        graph = step.get_concrete_function(ids).graph.as_graph_def()
        nodes = [
            *graph.node,
            *(n for f in graph.library.function for n in f.node_def),
        ]
        made[tables] = len(nodes) / len(local_ids(strategy))
    assert (made[30] - made[10]) / 20 < 32


def ancestors(operation):
    """All operations that one waits for."""
    found, left = set(), [operation]
    while left:
        one = left.pop()
        before = {t.op for t in one.inputs} | set(one.control_inputs)
        left += before - found
        found |= before
    return found


@on("mirrored:2", tier="more")
def test_gradients_are_sent_while_the_dense_backward_pass_goes_on(strategy):
    table = tfrs_embed.TableConfig("t", ROWS, DIM, placement="row")
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), "sgd"
        )
        dense = [tf.Variable(tf.ones([DIM, DIM])) for _ in range(2)]

    def step(ids, others):
        with tf.GradientTape() as tape:
            # One product is of other inputs, one is of the activations.
            both = layer(ids) + tf.matmul(others, dense[0])
            loss = tf.reduce_sum(tf.matmul(both, dense[1]) ** 2)
        differentiate(tape, loss, [*layer.trainable_variables, *dense])

    given = [
        (np.arange(6), np.ones([6, DIM], np.float32))
        for _ in range(strategy.num_replicas_in_sync)
    ]
    function = tf.function(lambda *batch: strategy.run(step, batch))
    made = function.get_concrete_function(*distribute(strategy, given))
    operations = made.graph.get_operations()
    products = {o for o in operations if o.type == "MatMul"}
    sent = [o for o in operations if o.type == "CollectiveAllToAllV2"]
    here = len(local_ids(strategy))
    assert (len(products), len(sent)) == (5 * here, 3 * here)
    # Of both products and the gradient of one; not those of either variable.
    waited_for = {o: len(ancestors(o) & products) for o in sent}
    assert sorted(waited_for.values()) == [*[0] * 2 * here, *[3] * here]
    gradients = {o for o, number in waited_for.items() if number}
    assert not any(gradients & ancestors(o) for o in products)


@on("mirrored:2", tier="more")
def test_capacities_are_few_and_close():
    capacities = {}
    for count in (*range(1, 200), *range(200, 20_000, 97)):
        capacity, number = (int(n) for n in bucket_of(tf.constant(count)))
        assert max(8, count) <= capacity <= max(8, count * 9 / 8)
        # A number, and so an instance key, is bound to one capacity.
        assert capacities.setdefault(number, capacity) == capacity
    assert len(capacities) < 120
    assert max(capacities) < 512
