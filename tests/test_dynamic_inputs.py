"""What tables with `DynamicKeys` are made of and are given, good and bad."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import normal, train
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed import (
    DecayingFrequency,
    DynamicKeys,
    FrequencyAdmission,
    ProbabilisticAdmission,
    TimeToLive,
)
from tfrs_embed.configs import serialization
from training_helpers import assert_same, state

pytestmark = on("keras:3", tier="nightly")

InvalidArgument = tf.errors.InvalidArgumentError
GRAPH = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def make(rows=4, optimizer="sgd", initializer=None, name="users", **keys):
    table = tfrs_embed.TableConfig(
        "ids",
        rows,
        2,
        initializer or keras.initializers.RandomNormal(seed=3),
        keys=DynamicKeys(**keys),
    )
    return layers.PartialTPUEmbedding(
        {"f": tfrs_embed.FeatureConfig("f", table)}, optimizer, name=name
    )


def trained(keys, **kwargs):
    layer = make(**kwargs)
    train_on(layer, keys)
    return layer


def train_on(layer, keys):
    dtype = layer.tables["ids"].spec.keys.dtype
    ids = {"f": tf.constant(keys, dtype)}
    return train(layer, ids, {"f": tf.ones([len(keys), 2])})["f"]


BAD_RULES = [
    (lambda: FrequencyAdmission(0), ValueError, "threshold must .* got 0"),
    (lambda: FrequencyAdmission(-3), ValueError, "threshold must .* got -3"),
    (lambda: FrequencyAdmission(2.5), ValueError, "threshold .* got 2.5"),
    (lambda: FrequencyAdmission(True), ValueError, "threshold .* got True"),
    (lambda: ProbabilisticAdmission(0), ValueError, "probability .* got 0"),
    (lambda: ProbabilisticAdmission(1.5), ValueError, "at most 1, got 1.5"),
    (
        lambda: ProbabilisticAdmission(float("nan")),
        ValueError,
        "probability .* got nan",
    ),
    (lambda: ProbabilisticAdmission("x"), TypeError, "probability .* 'x'"),
    (lambda: TimeToLive(0), ValueError, "steps must be an integer >= 1, got 0"),
    (lambda: TimeToLive(), ValueError, "one of steps, days.* got none"),
    (lambda: TimeToLive(3, days=1), ValueError, "one of steps, days.*days"),
    (lambda: TimeToLive(days=-1), ValueError, "days must be above 0, got -1"),
    (lambda: TimeToLive(hours=np.inf), ValueError, "hours must be finite"),
    (lambda: TimeToLive(seconds="1"), TypeError, "seconds must be a number"),
    (lambda: TimeToLive(seconds=1e-4), ValueError, "from 0.001 seconds"),
    (lambda: TimeToLive(days=1e300), ValueError, "to 100,000 days, got 1e"),
    (
        lambda: DecayingFrequency(-5),
        ValueError,
        "DecayingFrequency: steps must be an integer >= 1, got -5",
    ),
    (lambda: DecayingFrequency(days=0), ValueError, "days must be above 0"),
    (
        lambda: DynamicKeys(
            eviction=(TimeToLive(days=3), DecayingFrequency(steps=5))
        ),
        ValueError,
        "counts in steps or in time",
    ),
    (
        lambda: DynamicKeys(eviction=DecayingFrequency(3), when_full="error"),
        ValueError,
        "would never evict",
    ),
    (lambda: DynamicKeys(floor=1.5), ValueError, "floor must be at most 1"),
    (lambda: DynamicKeys(floor=0), ValueError, "floor must be above 0"),
    (lambda: DynamicKeys(floor=-0.5), ValueError, "floor must be above 0"),
    (lambda: DynamicKeys(floor=np.nan), ValueError, "floor must be finite"),
    (lambda: DynamicKeys(floor="1"), TypeError, "floor must be a number"),
    (
        lambda: DynamicKeys(floor=0.9, eviction=None),
        ValueError,
        "a floor is for steps that evict, and eviction=None.* evicts none",
    ),
    (
        lambda: DynamicKeys(floor=0.9, when_full="grow"),
        ValueError,
        "max_rows=None evicts none",
    ),
    (lambda: DynamicKeys(eviction=()), ValueError, "two rules if the first"),
    (
        lambda: DynamicKeys(eviction=("lfu", TimeToLive(3))),
        ValueError,
        "two rules if the first is a TimeToLive",
    ),
    (
        lambda: DynamicKeys(eviction=(TimeToLive(3), TimeToLive(4))),
        ValueError,
        "and the second isn't, got",
    ),
    (
        lambda: DynamicKeys(eviction=(TimeToLive(3), None)),
        TypeError,
        "eviction must be .* got None",
    ),
    (
        lambda: DynamicKeys(eviction=(TimeToLive(3), "lfu"), when_full="error"),
        ValueError,
        "eviction='lfu' would never evict",
    ),
    (
        lambda: DynamicKeys(eviction="score", when_full="error"),
        ValueError,
        "eviction='score' would never evict",
    ),
    (lambda: DynamicKeys(eviction="fifo"), ValueError, "'lru', 'lfu'.*'fifo'"),
    (lambda: DynamicKeys(eviction=5), TypeError, "'lru', 'lfu'.* got 5"),
    (lambda: DynamicKeys(eviction=TimeToLive), TypeError, "eviction must be"),
    (
        lambda: DynamicKeys(eviction=lambda keys, *_: keys),
        TypeError,
        r"a rule of its own takes 'score' and calls the table's score\(keys",
    ),
    (lambda: DynamicKeys(admission=3), TypeError, "admission must .* got 3"),
    (
        lambda: DynamicKeys(admission=FrequencyAdmission),
        TypeError,
        "admission must be",
    ),
    (
        lambda: DynamicKeys(admission=FrequencyAdmission(2), candidates=0),
        ValueError,
        "candidates must be an integer >= 1, got 0",
    ),
    (
        lambda: DynamicKeys(candidates=5),
        ValueError,
        "candidates=5 is for admission=FrequencyAdmission.*not None",
    ),
    (lambda: DynamicKeys(dtype=tf.float32), ValueError, "dtype .*float32"),
    (lambda: DynamicKeys(dtype=tf.bool), ValueError, "dtype .*bool"),
    (lambda: DynamicKeys(dtype="text"), ValueError, "dtype .*'text'"),
    (lambda: DynamicKeys(when_full="x"), ValueError, r"\['evict'.* got 'x'"),
    (
        lambda: DynamicKeys(eviction=None, when_full="evict"),
        ValueError,
        "when_full='evict' needs .* got None",
    ),
    (
        lambda: DynamicKeys(eviction="lfu", when_full="error"),
        ValueError,
        "eviction='lfu' would never evict",
    ),
    (
        lambda: DynamicKeys(max_rows=5),
        ValueError,
        "max_rows=5 is for when_full='grow', not 'evict'",
    ),
    (
        lambda: DynamicKeys(when_full="grow", max_rows=0),
        ValueError,
        "max_rows must be an integer >= 1, got 0",
    ),
]


@pytest.mark.parametrize(("make_rule", "error", "text"), BAD_RULES)
def test_rules_that_make_no_sense(make_rule, error, text):
    with pytest.raises(error, match=text):
        make_rule()


@pytest.mark.parametrize(
    ("keys", "when_full"),
    [
        (DynamicKeys(), "evict"),
        (DynamicKeys(eviction=TimeToLive(3)), "evict"),
        (DynamicKeys(eviction=None), "error"),
        (DynamicKeys(eviction="LFU", when_full="grow"), "grow"),
    ],
)
def test_what_is_left_out_follows_from_the_rest(keys, when_full):
    assert keys.when_full == when_full
    assert keys == DynamicKeys(
        keys.dtype, keys.admission, keys.eviction, keys.when_full
    )


def config(**arguments):
    return tfrs_embed.TableConfig("ids", 10, 2, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"keys": {"dtype": "int64"}}, TypeError, "keys must be a DynamicKeys"),
        ({"keys": True}, TypeError, "keys must be a DynamicKeys .* True"),
        (
            {"keys": DynamicKeys(when_full="grow", max_rows=9)},
            ValueError,
            "max_rows=9 is below vocabulary_size=10",
        ),
        (
            {"keys": DynamicKeys(), "placement": "default_device"},
            ValueError,
            "placement='default_device' is not available",
        ),
        (
            {"keys": DynamicKeys(), "placement": "sparsecore"},
            ValueError,
            "placement='sparsecore' is not available",
        ),
    ],
)
def test_tables_that_cannot_have_keys(arguments, error, text):
    with pytest.raises(error, match=f"Table 'ids': {text}"):
        config(**arguments)


@pytest.mark.parametrize(
    ("initializer", "kind"),
    [
        (keras.initializers.Orthogonal(), "Orthogonal"),
        (tf.constant_initializer(np.ones([4, 2])), "Constant"),
        (lambda shape, dtype=None: tf.zeros(shape), "function"),
    ],
)
def test_initializers_that_make_no_row_alone(initializer, kind):
    with pytest.raises(
        ValueError, match=f"Table 'ids': .* kind {kind} can't make that"
    ):
        make(initializer=initializer)


def test_rows_of_an_initializer_of_keys():
    def of_keys(shape, keys):
        return tf.cast(keys[:, None], tf.float32) + tf.zeros(shape)

    layer = trained([5, 7], initializer=of_keys, optimizer=None)
    assert layer.tables["ids"].size == 0  # It is not trained.
    found = train_on(make(initializer=of_keys), [5, 7, 5])
    np.testing.assert_array_equal(found, [[5, 5], [7, 7], [5, 5]])
    wrong = make(initializer=lambda shape, keys: tf.zeros([1, 3]))
    with pytest.raises(
        ValueError,
        match=r"Table 'ids'.* shape \(1, 3\), not float32 .*\[None, 2\]",
    ):
        train_on(wrong, [5, 7])


WRONG_KEYS = [
    ("int64", tf.constant([1.0]), "int64, .* got float"),
    ("int64", tf.constant(["a"]), "int64, .* got string"),
    ("int64", tf.constant([True]), "int64, .* got bool"),
    ("int64", tf.constant([1], tf.uint64), "int64, .* got uint64.* width"),
    ("int32", tf.constant([1], tf.int64), "int32, .* got int64.* width"),
    ("int8", tf.constant([1], tf.uint8), "int8, .* got uint8.* width"),
    ("uint64", tf.constant([1], tf.int64), "uint64, .* got int64.* width"),
    ("string", tf.constant([1]), "string, .* got int32"),
    ("int32", tf.ragged.constant([[2**40]]), "int32, .* got int64"),
    ("string", tf.sparse.from_dense([[1]]), "string, .* got int32"),
]


@pytest.mark.parametrize(("dtype", "ids", "text"), WRONG_KEYS)
def test_keys_of_another_dtype(dtype, ids, text):
    layer = make(dtype=dtype)
    layer.build(None)
    with pytest.raises(
        TypeError, match=f"Feature 'f' .table 'ids'.: keys must be {text}"
    ):
        layer({"f": ids}, training=True)
    assert layer.tables["ids"].size == 0


@pytest.mark.parametrize(
    "keys",
    [
        np.array([-(2**7), 2**7 - 1, -1, 0], np.int8),
        np.array([-(2**31), 2**31 - 1, -1, 0], np.int32),
        np.array([-(2**63), 2**63 - 1, -1, 0], np.int64),
        np.array([2**8 - 1, 2**7, 1, 0], np.uint8),
        np.array([2**32 - 1, 2**31, 1, 0], np.uint32),
        np.array([2**64 - 1, 2**63, 2**63 - 1, 0], np.uint64),
    ],
    ids=lambda keys: keys.dtype.name,
)
def test_keys_of_every_value(keys):
    layer = trained(keys, dtype=keys.dtype)
    table = layer.tables["ids"]
    held = table.keys()
    np.testing.assert_array_equal(
        held.view(np.uint64), np.sort(keys.astype(np.int64)).view(np.uint64)
    )
    assert sorted(table.lookup(keys)) == [0, 1, 2, 3]
    assert table.remove(keys[:1]) == 1
    assert table.lookup(keys).min() == -1
    # It begins anew.
    np.testing.assert_allclose(
        train_on(layer, keys)[0],
        normal(3, int(keys[0]), 2),
        rtol=1e-4,
        atol=1e-6,
    )


def test_keys_of_a_narrower_dtype_are_the_same_keys():
    layer = trained([-3, 7], rows=8, dtype="int64")
    table = layer.tables["ids"]
    for dtype in (np.int8, np.int32):
        ids = tf.constant(np.array([-3, 7], dtype))
        train(layer, {"f": ids}, {"f": tf.ones([2, 2])})
        assert sorted(table.lookup(ids)) == [0, 1]
    np.testing.assert_array_equal(table.keys(), [-3, 7])
    np.testing.assert_array_equal(table.variables["frequency"].numpy(), [3, 3])


@GRAPH
def test_strings(graph):
    words = ["a", "é/\0", "a" * 500]
    layer = make(dtype="string", rows=5)
    step = tf.function(train) if graph else train
    ids = {"f": tf.constant([*words, "a"])}
    step(layer, ids, {"f": tf.ones([4, 2])})
    table = layer.tables["ids"]
    prints = tf.fingerprint(words).numpy().view(np.int64)[:, 0]
    np.testing.assert_array_equal(table.keys(), np.sort(prints))
    assert (table.lookup(words) >= 0).all()
    assert table.lookup(["b"]) == [-1]
    before = state(layer)
    with pytest.raises(
        InvalidArgument,
        match=r"table .{0,2}ids.{0,3}: key number 2 is an empty string",
    ):
        step(
            layer, {"f": tf.constant(["b", "c", "", "d"])}, {"f": tf.ones([1])}
        )
    assert_same(state(layer), before)
    with pytest.raises(InvalidArgument, match="Table 'ids': key number 0 is"):
        table.remove([""])


@nightly(lambda graph, eviction: graph and eviction not in ("lru", None))
@GRAPH
@pytest.mark.parametrize("eviction", ["lru", "lfu", TimeToLive(1), None])
def test_more_keys_than_rows(graph, eviction):
    layer = trained([1, 2], eviction=eviction, optimizer="adagrad")
    before = state(layer)
    step = tf.function(train_on) if graph else train_on
    # Two of the step's own have rows, and stay.
    with pytest.raises(
        InvalidArgument,
        match=r"'users.{0,2}, table .{0,2}ids.{0,3}: no room for the keys of "
        r"this step: a shard has rows for 4 keys, and holds 2. It needs 1 rows "
        r"more than it can make room for; -9 is a key without one",
    ):
        step(layer, [-9, 2, 9, 1, 7, -9])
    assert_same(state(layer), before)
    step(layer, [-9, 2, 9, 1, -9])
    np.testing.assert_array_equal(layer.tables["ids"].keys(), [-9, 1, 2, 9])


def test_a_table_grows_up_to_its_limit():
    layer = trained([1], when_full="grow", eviction=None, max_rows=9)
    table = layer.tables["ids"]
    assert (table.size, table.capacity) == (1, 4)
    train_on(layer, range(6))
    assert (table.size, table.capacity) == (6, 8)
    before = state(layer)
    with pytest.raises(InvalidArgument, match=r"for 8 keys, .* needs 1 rows"):
        train_on(layer, range(10, 14))
    assert_same(state(layer), before)
    assert table.capacity == 8
    train_on(layer, range(10, 13))
    assert (table.size, table.capacity) == (9, 9)
    unlimited = trained(range(1000), when_full="grow", rows=1)
    assert unlimited.tables["ids"].capacity == 1024


def test_a_table_of_one_row():
    layer = make(rows=1, optimizer="adagrad")
    for key in (5, 5, 7, 5):
        vector = train_on(layer, [key])[0]
    np.testing.assert_allclose(vector, normal(3, 5, 2), rtol=1e-4, atol=1e-6)
    assert layer.tables["ids"].statistics() == {
        "last_step": {"admitted": 1, "evicted": 1, "rejected": 0, "hits": 0},
        "in_all": {"admitted": 3, "evicted": 2, "rejected": 0, "hits": 1},
    }


def test_no_keys_at_all():
    layer = make()
    assert train_on(layer, np.zeros([0], np.int64)).shape == (0, 2)
    assert layer.step.numpy() == 1
    table = layer.tables["ids"]
    assert table.size == 0 and table.keys().shape == (0,)
    assert table.evict(3) == 0 and table.remove([]) == 0
    assert table.lookup([]).shape == (0,)


METHODS = {
    "size": lambda table: table.size,
    "capacity": lambda table: table.capacity,
    "keys": lambda table: table.keys(),
    "lookup": lambda table: table.lookup([1]),
    "remove": lambda table: table.remove([1]),
    "evict": lambda table: table.evict(1),
    "score": lambda table: table.score([1], [2]),
    "statistics": lambda table: table.statistics(),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_for_built_tables_between_steps(name):
    table = make().tables["ids"]
    with pytest.raises(ValueError, match=r"Table 'ids': .* call or build it"):
        METHODS[name](table)
    layer = trained([1])
    table, before = layer.tables["ids"], state(layer)

    @tf.function
    def step():
        METHODS[name](table)

    with pytest.raises(
        RuntimeError, match=f"Table 'ids': {name} can't be asked for"
    ):
        step()
    assert_same(state(layer), before)


@pytest.mark.parametrize("name", ["lookup", "remove"])
@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([[1]], ValueError, r"shape \[n\], got .* of shape \(1, 1\)"),
        (3, ValueError, r"shape \[n\], got .* of shape \(\)"),
        (tf.ragged.constant([[1]]), ValueError, r"shape \[n\], got Ragged"),
        (["a"], TypeError, "int64, .* got string"),
        ([1.5], TypeError, "int64, .* got float"),
        ([2**63], TypeError, f"int64, got {2**63}"),
        (None, TypeError, "NoneType"),
    ],
)
def test_keys_for_methods(name, keys, error, text):
    layer = trained([1])
    before = state(layer)
    with pytest.raises(error, match=f"Table 'ids'.*{text}"):
        getattr(layer.tables["ids"], name)(keys)
    assert_same(state(layer), before)


@pytest.mark.parametrize("count", [-1, 1.5, True, "all"])
def test_counts_of_keys_to_evict(count):
    layer = trained([1, 2])
    with pytest.raises(ValueError, match=f"Table 'ids': .* got {count!r}"):
        layer.tables["ids"].evict(count)
    with pytest.raises(ValueError, match="Table 'ids': say how many"):
        layer.tables["ids"].evict()
    assert layer.tables["ids"].evict(np.int64(5)) == 2


@pytest.mark.parametrize(
    ("keys", "scores", "error", "text"),
    [
        ([1, 9, 8], [1, 2, 3], ValueError, "2 of the keys .* no row, .* as 8"),
        ([1, 4], [1, 2], ValueError, "1 of the keys .* no row, .* as 4"),
        ([2, 1], [0, np.nan], ValueError, "finite float32 .* nan for key .* 1"),
        ([1], [-np.inf], ValueError, "finite float32 .* got -inf"),
        ([1], [1e39], ValueError, r"finite .* most 3.4e\+38 .* got 1e\+39"),
        ([1, 2], [1], ValueError, r"scores .* shape \[2\], .* got \[1\]"),
        ([1], [[1]], ValueError, r"scores .* shape \[1\], .* got \[1, 1\]"),
        ([1, 2, 1], [1, 2, 3], ValueError, "key 1 has the scores 1.0 and 3.0"),
        ([1], ["a"], TypeError, "scores must be numbers"),
        ([1], [True], TypeError, "scores must be numbers, got bool"),
        (["a"], [1], TypeError, "int64, .* got string"),
    ],
)
def test_scores_that_no_key_can_have(keys, scores, error, text):
    layer = trained(
        [1, 1, 2, 2, 4], eviction="score", admission=FrequencyAdmission(2)
    )
    layer.tables["ids"].score([1, 2, 1], [3, 4, 3])
    before = state(layer)
    np.testing.assert_array_equal(before["ids/score"], np.float32([3, 4]))
    with pytest.raises(error, match=f"Table 'ids'.*{text}"):
        layer.tables["ids"].score(keys, scores)
    with pytest.raises(ValueError, match=r"Table 'ids'.* scores .* got nan"):
        layer.tables["ids"].variables["score"].assign([1, np.nan])
    assert_same(state(layer), before)


def test_scores_are_for_the_rule_that_needs_them():
    layer = trained([1], eviction=(TimeToLive(3), "lfu"))
    with pytest.raises(ValueError, match=r"Table 'ids' has .*'lfu'.* no score"):
        layer.tables["ids"].score([1], [2])


def test_what_never_evicts_never_does():
    layer = trained([1], eviction=None)
    with pytest.raises(ValueError, match="Table 'ids' has eviction=None"):
        layer.tables["ids"].evict(1)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("keys", [3, 3], "ascending, each of them once"),
        ("keys", [[3]], r"int64 of shape \[n\]"),
        ("keys", [0.5], "got float64"),
        ("keys", range(5), "no room for 5 keys.* 4 rows"),
        ("parameters", np.zeros([1, 2]), r"can't be given .* \[1, 2\]"),
        ("frequency", [1, 2, 3], r"frequency must .* \[2\].* got .* \[3\]"),
        ("last_used", [1.0, 2.0], "last_used must be integers.* float64"),
        ("candidates", [[1, 2]], r"candidates .* \[c, 3\], .* \[1, 2\]"),
        ("candidates", [[1, 1, 1], [1, 2, 2]], "candidates must all differ"),
    ],
)
def test_assigning_what_does_not_fit(name, value, text):
    layer = trained([1, 2], admission=FrequencyAdmission(1), eviction=None)
    before = state(layer)
    with pytest.raises(ValueError, match=f"Table 'ids'.*{text}"):
        layer.tables["ids"].variables[name].assign(np.array(value))
    assert_same(state(layer), before)


def test_tables_with_keys_are_not_loaded_as_arrays():
    layer = trained([1])
    with pytest.raises(ValueError, match="Table 'ids' has DynamicKeys"):
        layer.load_tables({"ids": np.ones([4, 2])})


class TestDynamicEmbedding:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({}, ValueError, "give it an input_dim; without one"),
            (
                {"initial_vocabulary": ["a", "b"], "input_dim": 1},
                ValueError,
                "vocabulary of 2 keys needs as many rows, and input_dim is 1",
            ),
            ({"initial_vocabulary": ["a", b"a"]}, ValueError, "a key twice"),
            ({"initial_vocabulary": ["a", ""]}, ValueError, "an empty string"),
            ({"initial_vocabulary": [["a"]]}, TypeError, r"\[n\]"),
            (
                {"initial_vocabulary": [1.5]},
                TypeError,
                "be int64, .* got float",
            ),
            ({"initial_vocabulary": 5}, TypeError, "strings, got 5"),
            ({"initial_vocabulary": "ab"}, TypeError, "strings, got 'ab'"),
            (
                {"initial_vocabulary": [True]},
                TypeError,
                "be int64, .* got bool",
            ),
            ({"initial_vocabulary": ["a", 1]}, TypeError, "vocabulary"),
            ({"initial_vocabulary": ["a", None]}, TypeError, "None"),
            (
                {"initial_vocabulary": ["a"], "key_dtype": "int64"},
                TypeError,
                "be int64, .* got string",
            ),
            (
                {"initial_vocabulary": [3, 300], "key_dtype": "int8"},
                TypeError,
                "must be int8, got 300",
            ),
            (
                {"initial_vocabulary": [2**64 - 1]},
                TypeError,
                f"must be int64, got {2**64 - 1}",
            ),
            (
                {"input_dim": 3, "eviction_policy": "x"},
                ValueError,
                "eviction must be .* got 'x'",
            ),
            (
                {"input_dim": 3, "admission": 2},
                TypeError,
                "admission must be",
            ),
            ({"input_dim": 0}, ValueError, "input_dim must be .* got 0"),
        ],
    )
    def test_bad_arguments(self, arguments, error, text):
        with pytest.raises(error, match=f"'words'.*{text}"):
            layers.DynamicEmbedding(2, name="words", **arguments)

    @pytest.mark.parametrize(
        ("keys", "dtype"),
        [
            ([3, -5], "int32"),
            ([3, -5], None),
            ([2**64 - 1, 0], "uint64"),
            (np.array([3, 200], np.uint8), None),
            (["a", "ä"], None),
            ([b"a", b"\xe4"], "string"),
            (tf.constant(["a", "b"]), None),
        ],
    )
    def test_vocabularies(self, keys, dtype):
        layer = layers.DynamicEmbedding(2, keys, key_dtype=dtype)
        dtype = dtype or getattr(keys, "dtype", None)
        dtype = dtype or ("int64" if isinstance(keys[0], int) else "string")
        given = tf.constant(keys, dtype)
        assert layer(given).shape == (2, 2)
        assert (layer.table.lookup(given) >= 0).all()
        assert (layer.table.size, layer.table.capacity) == (2, 2)

    def test_config_round_trip(self):
        layer = layers.DynamicEmbedding(
            3,
            [1, 2],
            TimeToLive(5),
            input_dim=7,
            key_dtype="int32",
            embedding_initializer=keras.initializers.RandomNormal(seed=4),
            optimizer=keras.optimizers.Adam(0.5),
            combiner="sqrtn",
            admission=FrequencyAdmission(2),
            when_full="grow",
            candidates=9,
            max_rows=20,
            name="words",
        )
        stored = json.loads(json.dumps(layer.get_config()))
        other = layers.DynamicEmbedding.from_config(stored)
        assert other.get_config() == layer.get_config()
        ids = tf.constant([1, 2, 1, 2, 9])
        for _ in range(2):
            vectors = []
            for each in (layer, other):
                with tf.GradientTape() as tape:
                    vectors.append(each(ids, training=True))
                    loss = tf.reduce_sum(vectors[-1] ** 2)
                tape.gradient(loss, each.trainable_variables)
            np.testing.assert_array_equal(*vectors)
        np.testing.assert_array_equal(other.table.keys(), [1, 2, 9])


class TestAll2All:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            (
                {"use_hashtable": False, "eviction": "lru"},
                ValueError,
                "use_hashtable=False .* eviction must be left out",
            ),
            ({"eviction": "x"}, ValueError, "eviction must be .* 'x'"),
            ({"admission": 3}, TypeError, "admission must be .* got 3"),
            ({"when_full": "evict"}, ValueError, "when_full='evict' needs"),
        ],
    )
    def test_bad_arguments(self, arguments, error, text):
        with pytest.raises(error, match=f"Layer 'ads': .*{text}"):
            layers.All2AllDenseEmbedding(4, 2, 1, 1, name="ads", **arguments)

    def test_config_round_trip(self):
        layer = layers.All2AllDenseEmbedding(
            4,
            2,
            1,
            1,
            admission=ProbabilisticAdmission(0.5),
            eviction=TimeToLive(3),
            when_full="grow",
        )
        stored = json.loads(json.dumps(layer.get_config()))
        other = layers.All2AllDenseEmbedding.from_config(stored)
        assert other.get_config() == layer.get_config()
        assert other.table.spec.keys == layer.table.spec.keys


def test_a_layers_config_keeps_its_keys():
    tables = [
        DynamicKeys(),
        DynamicKeys("string", FrequencyAdmission(3), "lfu", candidates=7),
        DynamicKeys("uint8", ProbabilisticAdmission(0.25), TimeToLive(9)),
        DynamicKeys(when_full="grow", max_rows=50),
        DynamicKeys(eviction=TimeToLive(days=30)),
        DynamicKeys(eviction=(TimeToLive(hours=0.5), "LFU")),
        DynamicKeys(eviction=[TimeToLive(9), DecayingFrequency(3)]),
        DynamicKeys(eviction=DecayingFrequency(days=7), floor=0.95),
        DynamicKeys(eviction=(TimeToLive(9), "Score")),
    ]
    layer = layers.PartialTPUEmbedding(
        [
            tfrs_embed.FeatureConfig(
                f"f{i}", tfrs_embed.TableConfig(f"t{i}", 5, 2, keys=keys)
            )
            for i, keys in enumerate(tables)
        ],
        "sgd",
    )
    stored = json.loads(json.dumps(layer.get_config()))
    other = type(layer).from_config(stored)
    assert other.get_config() == layer.get_config()
    assert [
        t.spec.keys for t in (other.tables[f"t{i}"] for i in range(len(tables)))
    ] == (tables)


def test_a_clock_is_a_function():
    with (
        pytest.raises(TypeError, match="seconds must be a function, got 5"),
        tfrs_embed.testing.simulated_clock(5),
    ):
        pass


def test_a_config_of_a_time_to_live_in_steps_alone_is_read():
    config = {"class": "TimeToLive", "steps": 7}
    assert serialization.from_config(config) == TimeToLive(7)
    assert repr(TimeToLive(7)) == "TimeToLive(steps=7)"
    assert repr(TimeToLive(hours=2)) == "TimeToLive(hours=2.0)"
    assert TimeToLive(days=2).length == 2 * 86_400_000_000


def test_invalid_ids_of_keys_alone_name_padding():
    table = tfrs_embed.TableConfig("t", 8, 2, keys=DynamicKeys())
    features = {"f": tfrs_embed.FeatureConfig("f", table)}
    with pytest.raises(ValueError, match=r"'f'.*'t'.*padding_value"):
        layers.PartialTPUEmbedding(features, "sgd", invalid_ids="zero")
