"""What the kernels check by themselves: ids first, and all that may be given.

A saved model may have operations with any inputs and attributes.
"""

import numpy as np
import pytest
import tensorflow as tf

import random_kernel_calls as cases
import tfrs_embed
from random_kernel_calls import Feature
from tfrs_embed import kernels
from tfrs_embed.ops import compiled
from tfrs_embed.storage.key_rules import KeyRules
from tfrs_embed.storage.key_table import KeyTable
from training_helpers import differentiate, operations_run

pytestmark = pytest.mark.usefixtures("needs_kernels")


def large_feature(kind, n):
    """A feature of so many ids that several threads look it up."""
    ids = np.random.default_rng(0).integers(0, 50, n)
    if kind == "dense":
        return Feature(0, ids, n // 10, bag_size=10)
    lengths = np.random.default_rng(1).integers(0, 9, n)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), n)]
    lengths[-1] += n - lengths.sum()
    bag = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Feature(0, ids, len(lengths), bag, splits=kind == "ragged")


@pytest.mark.parametrize("place", [0, 17_777, 40_000, 79_999])
@pytest.mark.parametrize("kind", ["dense", "ragged", "bags"])
def test_each_thread_checks_what_it_looks_up(kind, place):
    table = np.random.default_rng(2).normal(size=(50, 8)).astype(np.float32)
    feature = large_feature(kind, 80_000)
    [vectors] = cases.lookup([table], [feature])
    sums = np.zeros(vectors.shape, np.float32)
    np.add.at(sums, feature.bag_of_id(), table[feature.ids])
    np.testing.assert_allclose(vectors, sums, rtol=1e-4, atol=1e-5)
    feature.ids[place] = 50
    message = "feature 0: id 50 is out of range; the table has 50 rows"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.lookup([table], [feature])
    count = feature.count
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.lookup_concat([table], [feature], [0, 1], [np.ones((count, 3))])


def test_the_first_of_several_bad_ids_is_named():
    table = np.ones((50, 8), np.float32)
    features = [large_feature("dense", 80_000) for _ in range(3)]
    features[1].ids[[30_000, 70_000]] = [-7, 99]
    features[2].ids[0] = 1_000
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="feature 1: id -7 is"
    ):
        cases.lookup([table], features)


@pytest.mark.parametrize(
    ("rows", "bad", "has"), [([3, 4], 3, 3), ([900, 4], 50, 50)]
)
def test_limits_are_for_features_not_beyond_their_tables(rows, bad, has):
    variable = tf.Variable(tf.ones([50, 8]))
    limits = {"rows": rows, "names": ["the first", "the second"]}
    ids = np.array([0, has - 1])
    features = [Feature(0, ids, 2), Feature(0, np.array([3, 0]), 2)]
    cases.lookup_handles([variable], features, **limits)
    features[0].ids[1] = bad
    message = f"the first: id {bad} is out of range; the table has {has} rows"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.lookup_handles([variable], features, **limits)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"rows": [3], "names": ["one"]}, "1 rows for 2 features"),
        ({"rows": [3, 4], "names": ["one"]}, "2 rows for 1 features"),
    ],
)
def test_limits_that_are_not_one_for_each_feature(limits, message):
    variable = tf.Variable(tf.ones([50, 8]))
    features = [Feature(0, np.array([0, 1]), 2) for _ in range(2)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.lookup_handles([variable], features, **limits)


INT8 = np.ones([50, 8], np.int8)
INT4 = np.ones([50, 4], np.uint8)
SCALES = np.ones([50, 1], np.float32)


@pytest.mark.parametrize(
    ("rows", "scales", "scale_of", "dim", "message"),
    [
        (INT8, SCALES, [], 8, "without a factor for each row"),
        (INT8, SCALES, [-1], 8, "without a factor for each row"),
        (INT8, SCALES, [2], 8, "without a factor for each row"),
        (INT8, SCALES[1:], [1], 8, "without a factor for each row"),
        (INT8, np.ones([50, 2], np.float32), [1], 8, "without a factor"),
        (INT8, INT8[:, :1], [1], 8, "without a factor for each row"),
        (INT4, SCALES, [1], 6, "rows of 4 bytes, which isn't half of dim"),
        (INT4, SCALES, [1], 9, "rows of 4 bytes, which isn't half of dim"),
        (INT4, SCALES, [1], -1, "rows of 4 bytes, which isn't half of dim"),
        (np.ones([50, 4], np.int16), SCALES, [1], 4, "A table must be float32"),
    ],
)
def test_rows_of_integers_without_their_factors(
    rows, scales, scale_of, dim, message
):
    def look_up(scale_of, dim):
        return cases.module().tfrs_embed_lookup(
            tables=[tf.Variable(rows).handle, tf.Variable(scales).handle],
            dims=[dim],
            scale_of=scale_of,
            **compiled.describe(
                [tf.constant(feature.ids)], [feature.bags()], [0]
            ),
        )

    feature = Feature(0, np.array([0, 49]), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        look_up(scale_of, dim)


def test_a_matrix_of_none_of_the_features():
    feature = Feature(0, np.array([0, 1]), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="none of the"):
        cases.lookup_concat(
            [np.ones((50, 8), np.float32)], [feature], [1], [np.ones((2, 3))]
        )


BATCH = 6


def make_layer():
    """Three features of two tables, of 50 and 40 rows."""
    users = tfrs_embed.TableConfig("users", 50, 8, combiner="mean")
    movies = tfrs_embed.TableConfig("movies", 40, 16)
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            "user": tfrs_embed.FeatureConfig("user", users),
            "seen": tfrs_embed.FeatureConfig("seen", movies),
            "movie": tfrs_embed.FeatureConfig("movie", movies),
        },
        "sgd",
        size_threshold=0,
    )
    layer.build()
    return layer


def make_inputs(bad=None):
    """Ragged, dense and sparse ids; `bad` names a feature with a wrong one."""
    rng = np.random.default_rng(0)
    ids = {
        name: rng.integers(0, 40, BATCH) for name in ("user", "seen", "movie")
    }
    if bad is not None:
        ids[bad][2] = 1_000
    return {
        "user": tf.RaggedTensor.from_row_splits(
            ids["user"], [0, 2, 2, 3, 4, 4, BATCH]
        ),
        "seen": tf.constant(ids["seen"]),
        "movie": tf.SparseTensor(
            [[i, 0] for i in range(BATCH)], ids["movie"], [BATCH, 1]
        ),
    }


def apart(activations):
    return [activations[name] for name in ("user", "seen", "movie")]


def side_by_side(activations):
    return [tf.concat(apart(activations), 1)]


@pytest.mark.parametrize("use", [apart, side_by_side])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_lookup_checks_its_ids_where_nothing_is_trained(use, dynamic):
    layer = make_layer()

    def make():
        return tf.function(
            lambda inputs: use(layer(inputs)),
            autograph=False,
            reduce_retracing=dynamic,
        )

    forward = make()
    if dynamic:
        small = {"user": tf.RaggedTensor.from_row_splits([1], [0, 1])}
        small["seen"] = tf.constant([1])
        small["movie"] = tf.SparseTensor([[0, 0]], [1], [1, 1])
        small = tf.nest.map_structure(
            lambda t: tf.cast(t, tf.int64), small, expand_composites=True
        )
        forward(small)
    ran = operations_run(forward, make_inputs())
    found = {name for name in ran if name.startswith("TfrsEmbed")}
    lookup = {apart: "TfrsEmbedLookup", side_by_side: "TfrsEmbedLookupConcat"}
    assert found == {lookup[use]}
    with kernels.disabled():
        stock = make()
        expected = stock(make_inputs())
    for mine, other in zip(forward(make_inputs()), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    for name, rows in [("user", 50), ("seen", 40), ("movie", 40)]:
        message = (
            f"'{name}.*: id 1000 is out of range; the table has {rows} rows"
        )
        for function in (forward, stock):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                function(make_inputs(bad=name))


def test_training_checks_ids_before_anything_takes_them():
    layer = make_layer()

    @tf.function(autograph=False)
    def step(inputs):
        with tf.GradientTape() as tape:
            activations = apart(layer(inputs, training=True))
            loss = tf.add_n([tf.reduce_sum(a * a) for a in activations])
        differentiate(tape, loss, layer.trainable_variables)

    ran = operations_run(step, make_inputs())
    assert {"TfrsEmbedRequire", "TfrsEmbedLookup", "TfrsEmbedUpdate"} < ran
    before = [v.numpy() for v in layer.weights]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"movie.*1000"):
        step(make_inputs(bad="movie"))
    for variable, value in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("rule", ["lru", "lfu", "ttl", "decay"])
def test_counts_and_steps_may_be_any(rule):
    most, least = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    rules = KeyRules(
        *(2, 2, 4),
        threshold=2,
        policy="lru" if rule == "ttl" else rule,
        ttl=most if rule == "ttl" else 0,
        half_life=most if rule == "decay" else 0,
        evicts=True,
    )
    table = KeyTable(rules)

    def commit(keys, counts, step):
        rows = tf.zeros([len(keys)], tf.int64)
        given = table.commit(
            *(tf.constant(v, tf.int64) for v in (keys, counts)), rows, step
        )
        table.publish(given.versions)

    def frequencies():
        live = table.export()
        keys, frequency = live.keys.numpy(), live.frequency.numpy()
        return dict(zip(keys, frequency, strict=True))

    # The second is no occurrence, and the third one is a candidate.
    commit([1, 1, 2, 3], [most, most, least, 1], most)
    assert frequencies() == {1: most}
    commit([1, 3, 3], [most, most, most], least)
    assert frequencies() == {1: most, 3: most}
    assert [counts[3] for counts in table.numbers()[3:5]] == [most, most]
    commit([1, 4], [1, 2], least)
    assert frequencies() == {1: most, 4: 2}
