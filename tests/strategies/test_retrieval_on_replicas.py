"""The best rows of tables that several replicas hold."""

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import keras, layers
from process_tiers import on
from reference import best_ids
from strategies.replicas import distribute, local
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig, TopK
from training_helpers import differentiate

pytestmark = [
    on("mirrored:2"),
    on(
        *("mirrored:4", "workers:2", "workers:3", "keras:3 mirrored:2"),
        tier="nightly",
    ),
]

# Uneven on 2, 3 and 4 replicas.
ROWS, DIM = 91, 32
PLACES = ("row", "hot rows", "column", "table", "replicated", "small")


def numbers(rng, *shape):
    """Small integers: exact dot products, of which many are equal."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def make_layer(strategy, place, rows=ROWS):
    rng = np.random.default_rng(0)
    values = numbers(rng, rows, DIM)
    places = {"hot rows": "row", "small": "auto"}
    table = TableConfig(
        "t",
        rows,
        DIM,
        placement=places.get(place, place),
        hot_rows=range(0, rows, 3) if place == "hot rows" else (),
    )
    with strategy.scope():
        layer = layers.PartialTPUEmbedding(
            FeatureConfig("f", table),
            "sgd",
            size_threshold=None if place == "small" else 0,
        )
        layer.build(None)
    layer.load_tables({"t": values})
    return layer, values


def queries_of(strategy, seed=1):
    """Each replica's queries, of different numbers."""
    rng = np.random.default_rng(seed)
    return [
        numbers(rng, 3 + i, DIM) for i in range(strategy.num_replicas_in_sync)
    ]


def check(found, expected):
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, wanted)


def columns_on_workers(strategy, place):
    return place == "column" and isinstance(
        strategy, tf.distribute.MultiWorkerMirroredStrategy
    )


@on("workers:2", when=lambda place: place == "row")
@on("mirrored:4", "workers:3", tier="more", when=lambda place: place == "row")
@pytest.mark.parametrize("place", PLACES)
def test_in_replicas(strategy, place):
    layer, values = make_layer(strategy, place)
    excluded = tf.constant([[4, 17, -1]])

    def find(queries):
        table = layer.tables["t"]
        some = tf.repeat(excluded, tf.shape(queries)[0], 0)
        # More than a shard has.
        return table.top_k(queries, 60), table.top_k(queries, 5, some)

    run = tf.function(lambda each: strategy.run(find, (each,)))
    queries = queries_of(strategy)
    if columns_on_workers(strategy, place):
        with pytest.raises(NotImplementedError, match=r"'t'.*columns"):
            run(distribute(strategy, queries))
        return
    for _ in range(2):
        found = local(strategy, run(distribute(strategy, queries)))
        for replica, (most, some) in found.items():
            scores = queries[replica] @ values.T
            check(most, best_ids(scores, 60))
            check(some, best_ids(scores, 5, [[4, 17]] * len(scores)))


@pytest.mark.parametrize("place", PLACES)
def test_outside_of_replicas(strategy, place):
    layer, values = make_layer(strategy, place)
    queries = queries_of(strategy)[0]
    expected = best_ids(queries @ values.T, 60)
    table = layer.tables["t"]
    check(table.top_k(queries, 60), expected)
    with strategy.scope():
        check(table.top_k(queries, 60), expected)
    find = tf.function(lambda queries: table.top_k(queries, 60))
    if table.exchange is None:
        check(find(queries), expected)
    else:
        error = NotImplementedError if place == "column" else RuntimeError
        with pytest.raises(error, match=r"'t'.*eagerly"):
            find(queries)


def test_fewer_rows_than_replicas(strategy):
    layer, values = make_layer(strategy, "row", rows=1)
    queries = queries_of(strategy)[0]
    expected = best_ids(queries @ values.T, 1)
    check(layer.tables["t"].top_k(queries, 1), expected)


def make_dynamic(strategy, keys):
    start = keras.initializers.RandomUniform(-1, 1, seed=1)
    table = TableConfig("t", 200, DIM, start, keys=DynamicKeys())
    with strategy.scope():
        layer = layers.PartialTPUEmbedding(FeatureConfig("f", table), "sgd")
        layer.build(None)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys) ** 2)
        differentiate(tape, loss, layer.trainable_variables)

    run = tf.function(lambda keys: strategy.run(step, (keys,)))
    run(distribute(strategy, keys))
    return layer.tables["t"]


@on("workers:2", tier="more")
def test_keys(strategy):
    rng = np.random.default_rng(0)
    batches = [
        rng.integers(-(2**62), 2**62, 10)
        for _ in range(strategy.num_replicas_in_sync)
    ]
    table = make_dynamic(strategy, batches)
    keys, values = table.keys(), np.asarray(table.variables["parameters"])
    queries = queries_of(strategy)
    run = tf.function(
        lambda each: strategy.run(lambda q: table.top_k(q, 15), (each,))
    )
    found = local(strategy, run(distribute(strategy, queries)))
    for replica, (scores, ids) in found.items():
        wanted = best_ids(queries[replica] @ values.T, 15, ids=keys)
        np.testing.assert_allclose(scores, wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(ids, wanted[1])
    _, ids = table.top_k(queries[0], 15)
    wanted = best_ids(queries[0] @ values.T, 15, ids=keys)
    np.testing.assert_array_equal(ids, wanted[1])
    more = len(keys) + 1
    message = rf"t.* has rows for {len(keys)} keys: k is {more}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        table.top_k(queries[0], more)
    run = tf.function(
        lambda each: strategy.run(lambda q: table.top_k(q, more), (each,))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run(distribute(strategy, queries))


def test_bad_arguments_of_all_replicas(strategy):
    layer, _ = make_layer(strategy, "row")
    queries = queries_of(strategy)
    run = tf.function(
        lambda each, k: strategy.run(layer.tables["t"].top_k, (each, k))
    )
    with pytest.raises(ValueError, match=r"Table 't' has 91 rows: k .* 92"):
        run(distribute(strategy, queries), 92)


def test_a_metric_of_the_form_of_tfrs_in_evaluation(strategy):
    """Keras calls it in replicas."""
    layer, values = make_layer(strategy, "row")
    best = TopK(layer.tables["t"], k=3)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.hits = keras.metrics.Mean(name="hits")

        def call(self, ids):
            return self.layer(ids)

        def test_step(self, ids):
            found = best(self(ids, training=False))[1]
            hit = tf.reduce_any(tf.cast(ids, tf.int64)[:, None] == found, 1)
            self.hits.update_state(tf.cast(hit, tf.float32))
            return {"hits": self.hits.result()}

    with strategy.scope():
        model = Model()
        model.compile("sgd")
    ids = np.arange(ROWS)
    data = tf.data.Dataset.from_tensor_slices(ids).batch(32)
    found = model.evaluate(data, return_dict=True, verbose=0)["hits"]
    expected = best_ids(values @ values.T, 3)[1]
    hits = np.any(expected == ids[:, None], 1).mean()
    np.testing.assert_allclose(found, hits, rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_functions_read_a_table_as_it_is_when_they_run(strategy, place):
    layer, before = make_layer(strategy, place)

    def read():
        return tf.convert_to_tensor(layer.embedding_tables["t"])

    @tf.function
    def here():
        return read()

    @tf.function
    def on_replicas():
        return strategy.run(lambda: tf.identity(read()))

    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if workers and place not in ("small", "replicated"):
        for function in (here, on_replicas):
            with pytest.raises(NotImplementedError, match=r"'t/.*eagerly"):
                function()
        return
    if place == "small" or workers:
        return  # A variable of Keras, or one that functions can't read.
    for value in (before, -before):
        layer.load_tables({"t": value})
        np.testing.assert_array_equal(here(), value)
        for found in local(strategy, on_replicas()).values():
            np.testing.assert_array_equal(found, value)


def test_a_step_reads_a_table_before_any_replica_updates_it(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return  # Which is an error.
    layer, before = make_layer(strategy, "row")

    def step(ids):
        with tf.GradientTape() as tape:
            vectors = layer(ids, training=True)
            table = tf.stop_gradient(layer.embedding_tables["t"].read())
            loss = tf.reduce_sum(tf.matmul(vectors, table, transpose_b=True))
        differentiate(tape, loss, layer.trainable_variables)
        return table

    function = tf.function(lambda ids: strategy.run(step, (ids,)))
    ids = [[r, 5] for r in range(strategy.num_replicas_in_sync)]
    seen = function(distribute(strategy, [np.array(i) for i in ids]))
    for found in local(strategy, seen).values():
        np.testing.assert_array_equal(found, before)
    change = np.zeros_like(before)
    for i in np.concatenate(ids):
        change[i] += before.sum(0)
    rate = 0.01  # Of Keras's "sgd".
    np.testing.assert_allclose(
        layer.embedding_tables["t"], before - rate * change, rtol=1e-5
    )
