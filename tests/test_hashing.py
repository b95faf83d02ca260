"""Hashed features: rows, vectors, gradients, storage, and bad input."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from hashing_reference import (
    CODES,
    DIM,
    HASHINGS,
    ROWS,
    expected,
    feature_of,
    make_batch,
)
from keras_under_test import keras, layers, only_keras_2
from process_tiers import nightly, on, without_kernels
from tfrs_embed import (
    FeatureConfig,
    Hash,
    Multiplex,
    PrefixNGrams,
    QuotientRemainder,
    TableConfig,
)
from tfrs_embed.compat import keras_configs
from tfrs_embed.configs import descriptions
from tfrs_embed.configs.parsing import parse
from tfrs_embed.ops import hashed_rows
from training_helpers import train

pytestmark = on("keras:3", tier="nightly")

SGD = tf.tpu.experimental.embedding.SGD


def rows_in(hashing, ids, rows=ROWS):
    feature = FeatureConfig("f", TableConfig("t", rows, 4), hashing=hashing)
    [spec] = parse(feature).features
    return [r.numpy() for r in hashed_rows.rows(spec, tf.constant(ids))]


@pytest.mark.parametrize("salt", [None, 5, (3, 2**60)])
@pytest.mark.parametrize(
    "ids",
    [
        np.array([0, 7, 255], np.uint8),
        np.array([-(2**63), -1, 2**63 - 1]),
        np.array(["", "a", "日本", "7"]),
    ],
    ids=["uint8", "int64", "string"],
)
@pytest.mark.usefixtures("both_implementations")
def test_rows_are_those_of_kerass_hashing(ids, salt):
    other = keras.layers.Hashing(1000, salt=salt)(tf.constant(ids))
    [rows] = rows_in(Hash(1000, salt), ids, 2000)
    np.testing.assert_array_equal(rows, other)


def test_an_integer_has_one_row_in_all_dtypes():
    rows = rows_in(Multiplex(3), ["7", "255"])
    for dtype in ("uint8", "int16", "uint32", "uint64"):
        again = rows_in(Multiplex(3), np.array([7, 255], dtype))
        np.testing.assert_array_equal(again, rows)
    [row] = rows_in(Hash(), np.array([2**64 - 1], np.uint64))
    np.testing.assert_array_equal(row, rows_in(Hash(), [str(2**64 - 1)])[0])


@only_keras_2("tensorflow_recommenders is for tf_keras")
def test_vectors_are_those_of_tfrss_unified_embedding():
    from tensorflow_recommenders.layers.feature_multiplexing import (
        unified_embedding,
    )

    config = unified_embedding.UnifiedEmbeddingConfig(
        50, 4, 1, "t", combiner="sum"
    )
    config.add_feature("user", 2)
    config.add_feature("tags", 3)
    theirs = unified_embedding.UnifiedEmbedding(config, SGD(0.1))
    shared = TableConfig("t_0", 50, 4, combiner="sum")
    ours = layers.PartialTPUEmbedding(
        {
            "user": FeatureConfig("user", shared, hashing=Multiplex(2, 0)),
            "tags": FeatureConfig("tags", shared, hashing=Multiplex(3, 1)),
        },
        SGD(0.1),
    )
    inputs = {
        "user": tf.constant([[5, -3], [2**40, 0]]),
        "tags": tf.ragged.constant([["new", "日本"], [], ["", "a", "b"]]),
    }
    expected = theirs(inputs)
    [table] = theirs._embedding_layer.embedding_tables.values()
    ours.load_tables({"t_0": table})
    for found, other in zip(ours(inputs).values(), expected, strict=True):
        np.testing.assert_array_equal(found, other)


@nightly(
    lambda kind, form: (
        (kind in ("add", "mult") and form in ("dense", "sequence"))
        or (kind in ("hash", "concat") and form in ("combined", "sparse"))
    )
)
@nightly(without_kernels)
@pytest.mark.parametrize(
    ("form", "combiner", "table"),
    [
        ("dense", "mean", "large"),
        ("combined", "sqrtn", "large"),
        ("ragged", "mean", "large"),
        ("sparse", "sum", "large"),
        ("sequence", "sum", "large"),
        ("ragged", "sqrtn", "small"),
    ],
)
@pytest.mark.parametrize("kind", HASHINGS)
@pytest.mark.usefixtures("both_implementations")
def test_vectors_and_gradients(kind, form, combiner, table):
    hashing = HASHINGS[kind]
    layer = layers.PartialTPUEmbedding(
        {"f": feature_of(hashing, form, combiner)},
        SGD(0.1),
        size_threshold=0 if table == "large" else None,
    )
    rng = np.random.default_rng(0)
    strings = kind in ("hash", "add")
    batch = make_batch(hashing, form, rng, strings)
    before = layer.embedding_tables["t"].numpy()
    [wanted], gradient = expected(before, hashing, [batch], combiner)

    @tf.function
    def step(ids, weights, slopes):
        with tf.GradientTape() as tape:
            outputs = layer({"f": ids}, {"f": weights})["f"]
            loss = tf.reduce_sum(tf.reshape(outputs, slopes.shape) * slopes)
        return outputs, tape.gradient(loss, layer.trainable_variables)

    outputs, [given] = step(batch.ids, batch.weights, batch.slopes)
    np.testing.assert_allclose(
        np.reshape(outputs, wanted.shape), wanted, rtol=1e-5, atol=1e-6
    )
    if table == "small":
        layer.embedding_tables["t"].assign_sub(
            0.1 * tf.convert_to_tensor(given)
        )
    np.testing.assert_allclose(
        layer.embedding_tables["t"],
        before - 0.1 * gradient,
        rtol=1e-5,
        atol=1e-6,
    )


def padded(kind):
    return dataclasses.replace(HASHINGS[kind], padding_value=-1)


@nightly(without_kernels)
@on("keras:3", tier="nightly", when=lambda kind: kind in ("mult", "multiplex"))
@pytest.mark.parametrize("kind", HASHINGS)
@pytest.mark.usefixtures("both_implementations")
def test_padding_is_as_if_it_were_not_there(kind):
    hashing = padded(kind)
    table = feature_of(hashing, "ragged", "sqrtn").table
    made = [
        layers.DistributedEmbedding(
            {
                "bag": FeatureConfig("bag", table, hashing=hashing),
                "list": FeatureConfig(
                    "list", table, max_sequence_length=3, hashing=hashing
                ),
            },
            optimizer=tf.tpu.experimental.embedding.Adam(0.1),
            size_threshold=0,
        )
        for _ in range(2)
    ]
    ids = np.array([[7, 5, -1], [-1, -1, -1], [7, -1, -1]])
    there = tf.RaggedTensor.from_tensor(ids, padding=-1)
    rng = np.random.default_rng(1)
    found = []
    for layer, given in zip(made, (tf.constant(ids), there), strict=True):
        inputs = {"bag": given, "list": given}
        outputs = layer(inputs)
        mask = layer.compute_mask(inputs)["list"]
        np.testing.assert_array_equal(mask, ids >= 0)
        slopes = {k: rng.normal(size=v.shape) for k, v in outputs.items()}
        rng = np.random.default_rng(1)
        for _ in range(2):
            train(layer, inputs, slopes)
        found.append((outputs, layer.embedding_tables["t"].numpy()))
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *found,
    )
    assert not np.any(found[0][0]["bag"][1])


def make_layer():
    shared, items = TableConfig("shared", 40, DIM), TableConfig("items", 23, 4)
    kinds = TableConfig("kinds", 31, DIM)
    return layers.PartialTPUEmbedding(
        {
            "query": FeatureConfig(
                "query", shared, hashing=Multiplex(2, padding_value="")
            ),
            "city": FeatureConfig("city", shared, hashing=Hash(30, (1, 2))),
            "item": FeatureConfig("item", items, hashing=HASHINGS["mult"]),
            "kind": FeatureConfig("kind", kinds, hashing=HASHINGS["prefixes"]),
        },
        optimizer="adagrad",
        size_threshold=30,
    )


LOAD = """
import sys, numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
[output] = model.signatures["serving_default"](
    query=tf.constant(["red shoes", "", "日本"]),
    city=tf.constant([-5, 0, 2**40]),
    item=tf.constant([1, 59, 17], tf.int64),
    kind=tf.constant([0, 59, 31], tf.int64),
).values()
assert "tfrs_embed" not in sys.modules
np.save(sys.argv[2], output)
"""


@pytest.mark.more
@on("keras:3", tier="more")
def test_a_model_is_fit_stored_and_exported(tmp_path):
    inputs = {
        "query": keras.Input((), dtype="string", name="query"),
        "city": keras.Input((), dtype="int64", name="city"),
        "item": keras.Input((), dtype="int64", name="item"),
        "kind": keras.Input((), dtype="int64", name="kind"),
    }
    found = make_layer()(inputs)
    assert [v.shape[-1] for v in found.values()] == [2 * DIM, DIM, DIM, DIM]
    vectors = keras.layers.Concatenate()(list(found.values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(vectors))
    values = {
        "query": tf.constant(["red shoes", "", "日本"]),
        "city": tf.constant([-5, 0, 2**40]),
        "item": tf.constant([1, 59, 17], tf.int64),
        "kind": tf.constant([0, 59, 31], tf.int64),
    }
    model.compile("adam", "mse")
    before = model.predict(values, verbose=0)
    model.fit(values, np.ones([3, 1]), epochs=2, verbose=0)
    expected = model.predict(values, verbose=0)
    # Not the least of three: one alone may happen to move by next to nothing.
    assert np.abs(expected - before).max() > 1e-3
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(values, verbose=0), expected)

    tfrs_embed.serving.export(
        model,
        str(tmp_path / "served"),
        input_signature={
            name: tf.TensorSpec([None], value.dtype, name)
            for name, value in values.items()
        },
    )
    answer = tmp_path / "answer.npy"
    command = [sys.executable, "-c", LOAD, tmp_path / "served", answer]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    np.testing.assert_allclose(np.load(answer), expected, rtol=1e-4)


def test_a_layer_is_what_its_config_says():
    layer = make_layer()
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config)
    for one, other in zip(
        layer._spec.features, again._spec.features, strict=True
    ):
        described = descriptions.describe(one.hashing)
        assert described == descriptions.describe(other.hashing)
    # Workers with other hashes would train other rows.
    [described, *_] = descriptions.of_features(layer._spec.features).values()
    assert described["hashing"]["salts"] == [[0, 0], [0, 1]]
    of_codes = descriptions.of_features(layer._spec.features)["Feature 'kind'"]
    other = PrefixNGrams([*CODES[:-1], [9, 9, 9]])
    assert descriptions.describe(other) != of_codes["hashing"]
    assert descriptions.describe(HASHINGS["prefixes"]) == of_codes["hashing"]


@pytest.mark.parametrize("kind", [Hash, lambda **a: Multiplex(2, **a)])
def test_a_padding_value_of_numpy_is_a_number_of_json(kind):
    feature = feature_with(kind(padding_value=np.int64(-3)))
    layer = layers.DistributedEmbedding(feature)
    config = json.loads(json.dumps(layer.get_config()))
    [again] = type(layer).from_config(config)._spec.features
    assert again.hashing == feature.hashing


def test_lists_of_numbers_and_of_strings():
    feature = feature_with(Hash())
    for cls in (layers.PartialTPUEmbedding, layers.DistributedEmbedding):
        layer = cls(feature, optimizer="adagrad")
        table = layer.embedding_tables["t"].numpy()
        for ids in ([1, -(2**40)], ["1", str(-(2**40))]):
            [rows] = rows_in(Hash(), [str(i) for i in ids])
            given = [np.array(ids, object)] if isinstance(ids[0], str) else []
            for each in (ids, np.array(ids), *given):
                np.testing.assert_array_equal(layer(each), table[rows])


def test_a_call_may_leave_hashed_features_out():
    layer = make_layer()
    both = layer({"city": [7], "item": [5]}, partial=True)
    [city] = layer({"city": [7]}, partial=True).values()
    np.testing.assert_array_equal(both["city"], city)


def test_the_fewest_collisions_that_fit():
    for rows in (7, 20, 64):
        for count in range(1, 110):
            fitting = [
                m for m in range(1, count + 1) if m - (-count // m) <= rows
            ]
            hashing = QuotientRemainder(count)
            if fitting:
                quotients, _ = rows_in(hashing, [count - 1], rows)[::-1]
                assert quotients == [fitting[0] + (count - 1) // fitting[0]]
            else:
                with pytest.raises(ValueError, match="at least"):
                    feature_with(hashing, rows)


def feature_with(hashing, rows=ROWS, **options):
    table = TableConfig("t", rows, DIM, **options)
    return FeatureConfig("f", table, hashing=hashing)


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Hash(0), ValueError, "Hash: buckets .* >= 1, got 0"),
        (lambda: Hash(salt=(1, 2, 3)), ValueError, "salt must be .* got 3"),
        (lambda: Hash(salt=-1), ValueError, "Hash: salt .* got -1"),
        (lambda: Hash(salt="a"), TypeError, "Hash: salt .* got 'a'"),
        (lambda: Hash(padding_value=0.5), TypeError, "padding_value .* 0.5"),
        (lambda: Multiplex(2, [1]), ValueError, "chunks=2, but .* 1 salts"),
        (lambda: Multiplex(2, [1, 1]), ValueError, "two chunks .* one salt"),
        (lambda: Multiplex(2, [1, None]), TypeError, "must have a salt"),
        (lambda: Multiplex(True), ValueError, "chunks .* got True"),
        (lambda: QuotientRemainder(9, 10), ValueError, "=10 is above .*=9"),
        (lambda: QuotientRemainder(9, salt=1), ValueError, "hashed=True"),
        (
            lambda: QuotientRemainder(9, operation="max"),
            ValueError,
            "operation must be one of .* got 'max'",
        ),
        (
            lambda: QuotientRemainder(9, padding_value=""),
            TypeError,
            "padding_value='' is a string",
        ),
        (
            lambda: feature_with(Hash(ROWS + 1)),
            ValueError,
            r"Feature 'f' \(table 't'\): Hash needs at least 24 .* has 23",
        ),
        (
            lambda: feature_with(QuotientRemainder(100, 10), 19),
            ValueError,
            r"Feature 'f' \(table 't'\): .* needs at least 20 rows.* has 19",
        ),
        (
            lambda: feature_with(Hash(), keys=tfrs_embed.DynamicKeys()),
            ValueError,
            "Feature 'f' .* DynamicKeys.* leave hashing out",
        ),
        (lambda: feature_with("hash"), TypeError, "Feature 'f' .* got 'hash'"),
        (
            lambda: PrefixNGrams([[0, 1], [2, -1]]),
            ValueError,
            "PrefixNGrams: codes .* got -1 for item 1 at level 1",
        ),
        (
            lambda: PrefixNGrams(np.array([[2**63]], np.uint64)),
            ValueError,
            "codes must be from 0 to .* got 9223372036854775808 for item 0",
        ),
        (
            lambda: PrefixNGrams([[0.0, 1.0]]),
            TypeError,
            "PrefixNGrams: codes must be integers, got float64",
        ),
        (
            lambda: PrefixNGrams([[True]]),
            TypeError,
            "codes must be integers, got bool",
        ),
        (
            lambda: PrefixNGrams([1, 2]),
            ValueError,
            r"codes must be \[items, levels\] .* got the shape \[2\]",
        ),
        (
            lambda: PrefixNGrams(np.zeros([0, 3], int)),
            ValueError,
            r"at least one of each, got the shape \[0, 3\]",
        ),
        (
            lambda: PrefixNGrams([[1, 2], [3]]),
            ValueError,
            "codes must be of one length",
        ),
        (
            lambda: PrefixNGrams(CODES, "mult"),
            ValueError,
            "PrefixNGrams: operation must be one of .* got 'mult'",
        ),
        (
            lambda: PrefixNGrams(CODES, padding_value=""),
            TypeError,
            "padding_value='' is a string, but ids are integers",
        ),
        (
            lambda: feature_with(HASHINGS["prefixes"], 19),
            ValueError,
            r"Feature 'f' .*: PrefixNGrams needs at least 20 rows.* has 19",
        ),
        (
            lambda: FeatureConfig(
                "f",
                TableConfig("t", ROWS, DIM),
                output_shape=[None, DIM],
                hashing=Multiplex(2),
            ),
            ValueError,
            r"\[batch, ..., 8\].*by its hashing",
        ),
    ],
)
def test_bad_declarations(make, error, text):
    with pytest.raises(error, match=text):
        make()


@on("keras:3", tier="nightly")
@pytest.mark.parametrize(
    ("hashing", "ids", "error", "text"),
    [
        (None, ["a"], TypeError, "got string. FeatureConfig.hashing=..."),
        (HASHINGS["mult"], ["a"], TypeError, "got string. hashed=True"),
        (Hash(), [0.5], TypeError, "integers or strings, got float64"),
        (Hash(padding_value=0), ["a"], TypeError, "string .* padding_value=0"),
        (
            HASHINGS["mult"],
            [-1],
            tf.errors.InvalidArgumentError,
            r"Feature 'f' \(table 't'\): id -1 .* 0 to 59. With hashed",
        ),
        (
            HASHINGS["prefixes"],
            [60],
            tf.errors.InvalidArgumentError,
            r"Feature 'f' \(table 't'\): id 60 .* codes of 60 items, .*0 to 59",
        ),
        (HASHINGS["prefixes"], ["a"], TypeError, "places of items in its code"),
    ],
)
def test_bad_ids(hashing, ids, error, text):
    layer = layers.DistributedEmbedding(feature_with(hashing))
    with pytest.raises(error, match=text):
        layer(np.array(ids))


def test_prefixes_are_numbered_as_they_come():
    codes = np.array([[5, 0], [5, 2], [1, 2], [5, 0]], np.uint8)
    hashing = PrefixNGrams(codes)
    rows = [[0, 1], [0, 2], [3, 4], [0, 1]]
    np.testing.assert_array_equal(hashing.rows, rows)
    assert hashing.num_rows == 5
    more = PrefixNGrams([*codes, [5, 1], [0, 0]])
    np.testing.assert_array_equal(more.rows, [*rows, [0, 5], [6, 7]])
    codes[:] = 0  # It has a copy of its own.
    np.testing.assert_array_equal(hashing.codes[:3], [[5, 0], [5, 2], [1, 2]])
    with pytest.raises(ValueError, match="read-only"):
        hashing.codes[0, 0] = 3


def test_prefixes_of_large_codes_are_those_of_a_dict():
    rng = np.random.default_rng(0)
    codes = rng.choice([0, 1, 2**31, 2**63 - 1], [300, 5])
    found: dict[tuple, int] = {}
    expected = [
        [found.setdefault(tuple(c[: n + 1]), len(found)) for n in range(5)]
        for c in codes.tolist()
    ]
    np.testing.assert_array_equal(PrefixNGrams(codes).rows, expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ids_without_a_code_may_be_zeros(mode):
    layer = layers.DistributedEmbedding(
        feature_with(HASHINGS["prefixes"]), invalid_ids="zero"
    )
    call = tf.function(layer) if mode == "graph" else layer
    found = call(tf.constant([59, 60, -1, -(2**63), 2**63 - 1], tf.int64))
    assert np.any(found[0])
    np.testing.assert_array_equal(found[1:], np.zeros([4, DIM]))


def test_more_codes_than_a_config_holds_are_an_error_that_says_so(monkeypatch):
    layer = layers.DistributedEmbedding(feature_with(HASHINGS["prefixes"]))
    layer.get_config()
    monkeypatch.setattr(keras_configs, "_MOST_NUMBERS", 179)
    with pytest.raises(NotImplementedError) as e:
        layer.get_config()
    assert "Feature 'f' (table 't'): a layer's config holds at most 179" in str(
        e.value
    )
    assert "numbers of a PrefixNGrams, and this one has 180" in str(e.value)


def test_an_item_without_examples_learns_by_its_prefixes():
    codes = [[0, 0], [0, 1], [1, 0]]
    layer = layers.DistributedEmbedding(
        FeatureConfig(
            "f",
            TableConfig("t", 5, DIM, "zeros"),
            hashing=PrefixNGrams(codes),
        ),
        optimizer=SGD(0.5),
    )
    train(layer, tf.constant([0]), -np.ones([1, DIM]))
    # Item 0 has two rows, each of which moves by 0.5; item 1 has one of them.
    expected = np.outer([1.0, 0.5, 0.0], np.ones(DIM))
    np.testing.assert_array_equal(layer(tf.constant([0, 1, 2])), expected)


def test_plans_count_rows():
    features = {
        "a": feature_with(Multiplex(2, padding_value=-1)),
        "b": FeatureConfig("b", TableConfig("u", 9, 4), hashing=Hash()),
    }
    batch = {"a": [[5, -1], [5, 7]], "b": ["x", "x"]}
    plan = tfrs_embed.plan(features, batch, replicas=2)
    shares = {t.table: t for t in plan.tables}
    assert shares["t"].hotness == 3.0
    assert shares["u"].hotness == 1.0
    hot = tfrs_embed.plan(features, 2, replicas=2, batch_size=4)
    assert hot.tables[0].hotness == 4.0


def test_plans_count_the_rows_of_prefixes():
    feature = feature_with(HASHINGS["prefixes"])

    def table_of(ids):
        return tfrs_embed.plan({"f": feature}, {"f": ids}, replicas=2).tables[0]

    # An item has three rows.
    found = table_of([0, 2])
    assert found.hotness == 3.0
    with pytest.raises(ValueError, match=r"'f'.*id 60 is not in \[0, 60\)"):
        table_of([0, 60])


def test_limits_of_sparse_cores_count_rows():
    hashing = Multiplex(2, padding_value=-1)
    features = {"a": feature_with(hashing), "b": feature_with(HASHINGS["mult"])}
    ids = tf.constant([5, -1, 5, 7])
    a, b = (
        tfrs_embed.sparsecore.compute_limits(
            [{"f": given}],
            {"f": feature},
            "v5p-8",
            "adagrad",
            progress=False,
        )[1].tables[0]
        for feature, given in (
            (features["a"], ids),
            (features["b"], tf.ragged.constant([[1, 2, 4], [], [1], [5]])),
        )
    )
    rows = np.concatenate(rows_in(hashing, [5, 7]))
    assert (a.ids, a.unique_ids) == (6, len(set(rows)))
    # The remainders 1 and 2, and the quotients 0 and 1.
    assert (b.ids, b.unique_ids) == (10, 4)
