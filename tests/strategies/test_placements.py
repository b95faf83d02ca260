"""Tables by column and whole on one replica, beside those by row and copies."""

import tempfile

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import nightly, on
from reference import Ragged
from strategies.replicas import distribute, local, of_chief
from tfrs_embed import serving
from tfrs_embed.distribution.replicas import bucket_of
from training_helpers import assert_unchanged, differentiate, state

pytestmark = on("mirrored:2", "mirrored:4", "workers:3", tier="nightly")

PLACES = ("table", "column", "row", "replicated", "hot rows")
ROWS, DIM = 40, 32


def make_layer(strategy, place, rows=ROWS, dim=DIM, **options):
    """A layer of two tables, of which two features share one."""
    tables = [
        tfrs_embed.TableConfig(
            name,
            rows,
            width,
            initializer=tf.keras.initializers.RandomUniform(seed=seed),
            combiner=combiner,
            placement="row" if place == "hot rows" else place,
            hot_rows=range(0, rows, 3) if place == "hot rows" else (),
        )
        for seed, (name, width, combiner) in enumerate(
            (("user", dim, "mean"), ("item", 5, "sum"))
        )
    ]
    features = {
        "user": tfrs_embed.FeatureConfig("user", tables[0]),
        "friends": tfrs_embed.FeatureConfig("friends", tables[0]),
        "item": tfrs_embed.FeatureConfig("item", tables[1]),
    }
    with strategy.scope():
        return tfrs_embed.DistributedEmbedding(
            features, optimizer="adagrad", **options
        )


def draw(rng, batch, rows=ROWS):
    """One replica's ids."""
    return {
        "user": rng.integers(0, rows, batch),
        "friends": Ragged(
            [rng.integers(0, rows, n).tolist() for n in range(batch)]
        ),
        "item": rng.integers(0, rows, batch),
    }


def trained_by(layer, strategy):
    """A function that trains a layer on one batch of each replica."""

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(tf.square(v)) for v in layer(ids).values()]
            )
        differentiate(tape, loss, layer.trainable_variables)
        return loss

    function = tf.function(lambda ids: strategy.run(step, (ids,)))
    return lambda batches: local(
        strategy, function(distribute(strategy, batches))
    )


def batches_of(strategy, seed, sizes=(5,), rows=ROWS):
    rng = np.random.default_rng(seed)
    return [
        draw(rng, sizes[i % len(sizes)], rows)
        for i in range(strategy.num_replicas_in_sync)
    ]


def engine_of(layer):
    return layer._engine_layer.engine


def values(layer):
    return {
        f"{table}/{name}": np.asarray(variable)
        for table in ("user", "item")
        for name, variable in layer.tables[table].variables.items()
    }


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(
            value, expected[name], err_msg=name, **tolerance
        )


@on("mirrored:2", tier="more")
def test_places_are_reported(strategy):
    engines = {
        place: [t.engine for t in make_layer(strategy, place).placement.tables]
        for place in PLACES
    }
    assert engines == {
        "table": ["table"] * 2,
        "column": ["column"] * 2,
        "row": ["row"] * 2,
        "replicated": ["replicated"] * 2,
        "hot rows": ["row"] * 2,
    }


@on("mirrored:2", tier="more")
@pytest.mark.parametrize("place", ["table", "column"])
def test_bytes_are_those_of_the_formula(strategy, place):
    world = strategy.num_replicas_in_sync
    batches = batches_of(strategy, 1, (5, 2))
    layer = make_layer(strategy, place)
    trained_by(layer, strategy)(batches)
    engine = engine_of(layer)
    ranks = engine.ranks
    widths = {name: table.dim for name, table in engine.slices.items()}
    cut = 1 if place == "table" else min(2 ** (world.bit_length() - 1), 4)
    assert len(ranks["user"]) == cut
    assert len(ranks["item"]) == 1
    words, floats = np.zeros([2, world, world], int)
    for replica, ids in enumerate(batches):
        for feature, table in (
            ("user", "user"),
            ("friends", "user"),
            ("item", "item"),
        ):
            mine = ids[feature]
            if isinstance(mine, Ragged):
                sizes = [len(row) for row in mine.rows]
                lengths = len(sizes)
            else:
                sizes, lengths = [1] * len(mine), 0
            for rank in ranks[table]:
                words[replica, rank] += 4 + lengths + sum(sizes)
                floats[replica, rank] += len(sizes) * widths[table]
    unit = np.gcd.reduce([widths["user"], 5])
    longest = [words.max(), floats.max() // unit]
    words_sent, units_sent = (
        int(bucket_of(tf.constant(int(n), tf.int64))[0]) for n in longest
    )
    found = engine.traffic()
    for traffic in found:
        assert traffic.collectives == 5
        assert traffic.bytes == (world - 1) * (
            4 * words_sent + 2 * 4 * unit * units_sent
        )


@on("mirrored:2", tier="more")
def test_traffic_of_several_engines_is_added_up(strategy):
    places = {"a": "table", "b": "row", "c": "replicated"}
    features = {
        name: tfrs_embed.FeatureConfig(
            name, tfrs_embed.TableConfig(name, ROWS, 4, placement=place)
        )
        for name, place in places.items()
    }
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(features, optimizer="sgd")
    rng = np.random.default_rng(0)
    trained_by(layer, strategy)(
        [
            {name: rng.integers(0, ROWS, 6) for name in places}
            for _ in range(strategy.num_replicas_in_sync)
        ]
    )
    # One consensus, which finds the sizes of tables by row; 3 exchanges of
    # these; the sizes and 3 of tables by column; the sizes, keys and gradients
    # of copies.
    for traffic in engine_of(layer).traffic():
        assert traffic.collectives == 1 + 3 + 4 + 3


@on("mirrored:2", tier="more", when=lambda place: place in ("table", "column"))
@pytest.mark.parametrize("place", PLACES)
def test_checkpoints_move_between_all_places(strategy, place):
    layer = make_layer(strategy, place)
    trained_by(layer, strategy)(batches_of(strategy, 3))
    expected = values(layer)
    path = tf.train.Checkpoint(layer=layer).save(f"{tempfile.mkdtemp()}/0")
    path = of_chief(strategy, path)
    for other in PLACES:
        fresh = make_layer(strategy, other)
        fresh.build(None)
        tf.train.Checkpoint(layer=fresh).restore(path).assert_consumed()
        assert_equal(values(fresh), expected)


@on("mirrored:2", tier="more")
@nightly(lambda place: place == "table")
@pytest.mark.parametrize("place", ["table", "column"])
def test_exported_models_have_the_whole_table(strategy, place):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("test_serving_export exports several workers' tables")

    class Model(tf.keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.embedding = layer

        def call(self, inputs):
            return self.embedding(inputs)["item"]

    layer = make_layer(strategy, place)
    with strategy.scope():
        model = Model(layer)
    trained_by(layer, strategy)(batches_of(strategy, 4))
    folder = tempfile.mkdtemp()
    inputs = {
        "user": tf.constant([1, 2]),
        "friends": tf.ragged.constant([[3], [4, 5]]),
        "item": tf.constant([0, 7]),
    }
    rows = values(layer)["item/parameters"]
    np.testing.assert_array_equal(model(inputs), rows[[0, 7]])
    serving.export(model, folder)
    loaded = tf.saved_model.load(folder)
    np.testing.assert_array_equal(loaded.serve(inputs), rows[[0, 7]])


@on("mirrored:2", tier="more")
def test_two_layers_in_one_step(strategy):
    """What waits for the wrong thing waits forever."""
    layers = [make_layer(strategy, "column", dim=d) for d in (16, DIM)]
    alone = make_layer(strategy, "table")

    def step(ids):
        with tf.GradientTape() as tape:
            found = [layer(ids)["item"] for layer in [*layers, alone]]
            loss = tf.add_n([tf.reduce_sum(v) for v in found])
        variables = [
            v for layer in [*layers, alone] for v in layer.trainable_variables
        ]
        differentiate(tape, loss, variables)

    function = tf.function(lambda ids: strategy.run(step, (ids,)))
    for seed in range(2):
        function(distribute(strategy, batches_of(strategy, seed)))
    assert [layer.step.numpy() for layer in layers] == [2, 2]


@on("mirrored:2", tier="more")
def test_weights_of_one_replica_only_are_an_error(strategy):
    layer = make_layer(strategy, "table")
    layer.build(None)
    before = state(layer)

    def step(ids):
        weights = dict.fromkeys(ids)
        weights["item"] = next(given)
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights)
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)

    # Each replica traces the function.
    given = iter([tf.ones([5]), *[None] * strategy.num_replicas_in_sync])
    if strategy.cluster_resolver and strategy.cluster_resolver.task_id:
        next(given)
    function = tf.function(
        lambda ids: strategy.run(step, (ids,)), autograph=False
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="replica of rank 0 has weights, that of rank 1 has no weights",
    ):
        function(distribute(strategy, batches_of(strategy, 5)))
    assert_unchanged(layer, before)
