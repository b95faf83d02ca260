"""What a configuration may be, and what is refused when it is made."""

import collections
import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed import FeatureConfig, PartialTPUEmbedding, TableConfig
from tfrs_embed.configs.parsing import parse
from tfrs_embed.sparsecore.topology import Topology
from training_helpers import tables_of

new = tf_keras.optimizers
tpu = tf.tpu.experimental.embedding
initializers = tf_keras.initializers
Pair = collections.namedtuple("Pair", "first second")

BOTH_ROUTES = pytest.mark.parametrize(
    "threshold", [0, None], ids=["engine", "keras"]
)
TABLE = TableConfig("user", 10, 4)
IDS = tf.constant([1, 2])


def table(**changes):
    arguments = {"name": "user", "vocabulary_size": 10, "embedding_dim": 4}
    return TableConfig(**{**arguments, **changes})


def feature(**changes):
    return FeatureConfig(**{"name": "id", "table": TABLE, **changes})


def make_layer(feature_config, threshold=0):
    return PartialTPUEmbedding(feature_config, "sgd", size_threshold=threshold)


# A table.


@pytest.mark.parametrize("value", ["", "12", b"ab".decode()])
def test_hot_rows_are_no_text(value):
    with pytest.raises(TypeError, match="'user': hot_rows must be integers"):
        table(hot_rows=value)


@pytest.mark.parametrize("value", [1, "no", None, object()])
def test_flags_of_layers_are_bools(value):
    name = "pipeline_execution_with_tensor_core"
    for kind in (PartialTPUEmbedding, tfrs_embed.DistributedEmbedding):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            kind(feature(), optimizer="sgd", **{name: value})
    with pytest.raises(TypeError, match="update_stats must be True or False"):
        tfrs_embed.DistributedEmbedding(feature(), update_stats=value)
    with pytest.raises(TypeError, match="mask_zero must be True or False"):
        tfrs_embed.Embedding(3, 2, mask_zero=value)
    distributed = tfrs_embed.DistributedEmbedding(feature())
    for layer in make_layer(feature()), distributed:
        with pytest.raises(TypeError, match="partial must be True or False"):
            layer(tf.constant([1]), partial=value)


@pytest.mark.parametrize("place", ["auto", "row", "replicated"])
def test_the_optimizer_of_a_table_trains_it_in_every_placement(place):
    config = table(initializer="ones", placement=place, optimizer=new.SGD(1.0))
    layer = PartialTPUEmbedding(feature(table=config), None)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(tables_of(layer)["user"][:3, 0], [1, 0, 1])


def test_a_layer_without_an_optimizer_warns_that_the_model_trains_tables():
    with pytest.warns(UserWarning, match=r"optimizer trains .*\['user'\]"):
        PartialTPUEmbedding(feature(), None)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_table_needs_a_name(name):
    with pytest.raises(TypeError, match=rf"table's name .*{name!r}"):
        table(name=name)


@pytest.mark.parametrize("size", [0, -1, 1.5, 10.0, True, "10", None])
@pytest.mark.parametrize(
    "field",
    [
        "vocabulary_size",
        "embedding_dim",
        "max_ids_per_partition",
        "max_unique_ids_per_partition",
    ],
)
def test_a_tables_sizes_are_positive_integers(field, size):
    with pytest.raises(ValueError, match=f"'user': {field} .*>= 1.*{size!r}"):
        table(**{field: size})


def test_a_table_has_no_more_numbers_than_an_int64_counts():
    most = (2**63 - 1) // 8
    assert table(vocabulary_size=most, embedding_dim=8).embedding_dim == 8
    message = f"'user': vocabulary_size .* from 1 to {most}, got {most + 1}"
    with pytest.raises(ValueError, match=message):
        table(vocabulary_size=most + 1, embedding_dim=8)


@pytest.mark.parametrize("dtype", [True, 1, "int32", object])
def test_a_table_has_a_floating_dtype(dtype):
    with pytest.raises(ValueError, match="'user': dtype must be one of"):
        table(dtype=dtype)


def test_a_tables_sizes_may_be_numpy_integers():
    config = table(vocabulary_size=np.int64(7), embedding_dim=np.uint8(3))
    assert (config.vocabulary_size, config.embedding_dim) == (7, 3)
    assert type(config.vocabulary_size) is int


def test_integers_may_be_numpys_and_are_stored_as_pythons():
    layer = PartialTPUEmbedding(
        [
            feature(table=table(name="first", vocabulary_size=np.int32(10))),
            tpu.FeatureConfig(
                tpu.TableConfig(8, 2, name="other"),
                max_sequence_length=3,
            ),
            feature(max_sequence_length=np.int8(2)),
        ],
        "sgd",
        batch_size=np.int64(4),
        size_threshold=np.int32(9),
    )
    engines = [t.engine for t in layer.placement.tables]
    assert engines == ["one device", "Keras", "one device"]
    config = json.loads(json.dumps(layer.get_config()))
    assert config["size_threshold"] == 9
    assert config["batch_size"] == 4
    other = PartialTPUEmbedding.from_config(config)
    assert other.get_config() == layer.get_config()
    embedding = tfrs_embed.Embedding(np.int64(3), np.uint8(2))
    json.dumps(embedding.get_config())
    assert Topology.of((np.int64(2), np.int32(4))) == Topology.of((2, 4))


@pytest.mark.parametrize("optimizer", ["zzz", new.Adamax(), {"a": 1}, 0.1])
def test_a_tables_optimizer_is_checked_at_once(optimizer):
    with pytest.raises((TypeError, ValueError), match="Table 'user'"):
        table(optimizer=optimizer)


@pytest.mark.parametrize("combiner", ["max", "SUM", "", None, 1])
def test_an_unknown_combiner_is_an_error_that_lists_the_known_ones(combiner):
    with pytest.raises(ValueError, match="'user': combiner") as e:
        table(combiner=combiner)
    assert "['sum', 'mean', 'sqrtn']" in str(e.value)
    assert repr(combiner) in str(e.value)


def test_an_unknown_placement_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'user': placement .*'auto'.*'tpu'"):
        table(placement="tpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_rows": [3, 10]}, r"the id 10, not in \[0, 10\)"),
        ({"hot_rows": [-1]}, "the id -1, not in"),
        ({"hot_rows": range(10)}, "all 10 rows; use placement='replicated'"),
        ({"hot_rows": 10}, "their number, from 1 to below .*=10, got 10"),
        ({"hot_rows": 0}, "from 1 to below .*, got 0"),
        ({"hot_rows": [0.5]}, "must be integers, .* got"),
        ({"hot_rows": True}, "must be integers, .* got True"),
        ({"hot_rows": None}, "must be integers, .* got None"),
        ({"hot_rows": "12"}, "must be integers, .* got '12'"),
        ({"hot_rows": [1], "placement": "table"}, "not placement='table'"),
        ({"hot_rows": 1, "placement": "replicated"}, "='replicated'"),
        ({"hot_rows": 1, "keys": tfrs_embed.DynamicKeys()}, "with keys"),
    ],
)
def test_hot_rows_are_ids_or_their_number(changes, message):
    with pytest.raises((ValueError, TypeError), match=rf"'user': .*{message}"):
        table(**changes)


@pytest.mark.parametrize("ids", [(7, 2), np.array([7, 2], np.uint8), {2, 7}])
def test_hot_rows_are_kept_in_a_config(ids):
    config = table(hot_rows=ids)
    assert config.hot_rows == (2, 7)
    layer = make_layer(feature(table=config))
    stored = json.loads(json.dumps(layer.get_config()))
    again = PartialTPUEmbedding.from_config(stored)
    assert again.get_config() == layer.get_config()
    [found] = again._spec.tables
    assert found.hot_rows == (2, 7)
    # On one replica they say nothing, and a number can't be made ids.
    assert [t.engine for t in layer.placement.tables] == ["one device"]
    with pytest.raises(ValueError, match=r"hot_rows=2 .* tfrs_embed.hot_rows"):
        make_layer(feature(table=table(hot_rows=2)))


@pytest.mark.parametrize(
    "kind", [initializers.RandomNormal, tf.random_normal_initializer]
)
def test_an_initializer_class_is_an_error_that_asks_for_an_instance(kind):
    message = rf"'user': initializer must be an instance.*{kind.__name__}"
    with pytest.raises(TypeError, match=message):
        table(initializer=kind)
    config = tpu.TableConfig(10, 4, kind, name="user")
    with pytest.raises(TypeError, match=message):
        make_layer(tpu.FeatureConfig(config))


def test_an_initializer_that_cannot_be_called_is_an_error():
    with pytest.raises(TypeError, match=r"'user': initializer .*\[0\.0\]"):
        table(initializer=[0.0])


def test_an_unknown_initializer_name_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="nonesuch"):
        table(initializer="nonesuch")


def test_a_table_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        table().combiner = "max"


def test_tables_are_equal_only_to_themselves():
    first, second = table(), table()
    assert first == first
    assert first != second
    assert len({first, second}) == 2


# A feature.


@pytest.mark.parametrize("name", ["", 3, TABLE])
def test_a_features_name_is_text(name):
    with pytest.raises(TypeError, match="feature's name must be a non-empty"):
        feature(name=name)


@pytest.mark.parametrize(
    "kind", [PartialTPUEmbedding, tfrs_embed.DistributedEmbedding]
)
def test_the_name_of_a_feature_is_its_place(kind):
    """The layer's config, and so all files, are those of typed names."""
    user, movie = table(), table(name="movie", vocabulary_size=20_000)
    given = {
        "person": {"id": user},
        "id": FeatureConfig(table=movie, max_sequence_length=2),
        "rest": [movie, FeatureConfig("typed", user)],
        3: tpu.TableConfig(10, 4, name="theirs"),
    }
    typed = {
        "person": {"id": FeatureConfig("person/id", user)},
        "id": FeatureConfig("id", movie, max_sequence_length=2),
        "rest": [FeatureConfig("rest/0", movie), FeatureConfig("typed", user)],
        3: FeatureConfig("3", given[3]),
    }
    layers = [kind(each, optimizer="sgd", name="x") for each in (given, typed)]
    short, long = [json.dumps(layer.get_config()) for layer in layers]
    assert short == long
    assert str(layers[0].placement) == str(layers[1].placement)
    other = kind.from_config(json.loads(short))
    assert json.dumps(other.get_config()) == long
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"'person/id' \(table 'user'.*10"
    ):
        layers[0]({"person": {"id": [10]}}, partial=True)


def test_one_config_may_be_several_features():
    shared = FeatureConfig(table=TABLE)
    layer = make_layer({"first": shared, "second": shared})
    features = layer.get_config()["feature_config"]["features"]
    assert [each["name"] for each in features] == ["first", "second"]
    assert shared.name is None


def test_a_table_alone_is_a_feature():
    layer = make_layer(TABLE)
    assert layer(IDS).shape == [2, 4]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Feature 'user' \(table 'user'"
    ):
        layer([10])


def test_errors_of_a_feature_without_a_name_name_its_table():
    with pytest.raises(ValueError, match="of table 'user': max_sequence"):
        FeatureConfig(table=TABLE, max_sequence_length=-1)
    with pytest.raises(TypeError, match="A feature: table must be a Table"):
        FeatureConfig()


@pytest.mark.parametrize("other", ["user", None, TableConfig, (10, 4)])
def test_a_features_table_is_a_table_config(other):
    with pytest.raises(TypeError, match="'id': table must be a TableConfig"):
        feature(table=other)


@pytest.mark.parametrize("length", [-1, 1.5, True, "3", None])
def test_a_sequences_length_is_an_integer_that_is_not_negative(length):
    message = rf"'id': max_sequence_length .*>= 0.*{length!r}"
    with pytest.raises(ValueError, match=message):
        feature(max_sequence_length=length)


@pytest.mark.parametrize("field", ["input_shape", "output_shape"])
@pytest.mark.parametrize("shape", [[0, 4], [-1, 4], [1.5, 4], ["a", 4]])
def test_a_features_shapes_hold_positive_integers(field, shape):
    with pytest.raises(ValueError, match=f"'id': {field} ") as e:
        feature(**{field: shape})
    assert repr(shape) in str(e.value)


@pytest.mark.parametrize("shape", [[4], [8, 5], [8, None], [4, 8]])
def test_an_output_shape_ends_in_the_tables_dim(shape):
    with pytest.raises(ValueError, match=r"'id': output_shape .*\.\.\., 4\]"):
        feature(output_shape=shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: feature(output_shape=[8, 2, 4], max_sequence_length=3),
        lambda: feature(output_shape=[8, 4], max_sequence_length=3),
        lambda: tpu.FeatureConfig(
            tpu.TableConfig(10, 4, name="user"),
            output_shape=[8, 2],
            max_sequence_length=3,
            name="id",
        ),
    ],
)
def test_a_sequence_that_contradicts_its_output_shape_is_an_error(make):
    message = r"'id' \(table 'user'\).*max_sequence_length=3 .*output_shape"
    with pytest.raises(ValueError, match=message):
        make_layer(make())


# TensorFlow's own configs.


def test_tf_and_own_configs_give_the_same_activations():
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    initializer = initializers.Constant(rows)
    own = TableConfig("own", 10, 4, initializer, combiner="sqrtn")
    theirs = tpu.TableConfig(10, 4, initializer, None, "sqrtn", "theirs")
    layer = make_layer(
        [
            FeatureConfig("bag", own),
            tpu.FeatureConfig(theirs),
            FeatureConfig("sequence", own, max_sequence_length=2),
            tpu.FeatureConfig(theirs, max_sequence_length=2),
            FeatureConfig("shaped", own, output_shape=[2, 4]),
            tpu.FeatureConfig(theirs, output_shape=[2]),
        ]
    )
    bag = tf.ragged.constant([[1, 2, 3], []])
    dense = tf.constant([[1, 2, 3], [4, 5, 6]])
    outputs = layer([bag, bag, bag, bag, dense, dense])
    for ours, tfs in zip(outputs[::2], outputs[1::2], strict=True):
        np.testing.assert_array_equal(ours, tfs)
    assert [o.shape.as_list() for o in outputs[::2]] == [
        [2, 4],
        [2, 2, 4],
        [2, 4],
    ]


def test_an_own_feature_may_name_a_tf_table():
    theirs = tpu.TableConfig(10, 4, name="theirs")
    layer = make_layer(FeatureConfig("id", theirs, output_shape=[2, 4]))
    assert layer(IDS).shape == [2, 4]


def test_tf_tables_without_a_name_are_numbered():
    unnamed = [tpu.TableConfig(10, 4) for _ in range(2)]
    layer = make_layer([tpu.FeatureConfig(t) for t in (*unnamed, unnamed[0])])
    assert sorted(layer.embedding_tables) == ["table_0", "table_1"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dtype", tf.int32),
        ("quantization_config", tpu.QuantizationConfig(8, -1.0, 1.0)),
        ("layout", object()),
    ],
)
def test_a_tf_tables_setting_that_is_unsupported_is_an_error(setting, value):
    config = tpu.TableConfig(10, 4, name="user")
    setattr(config, setting, value)  # TF 2.16's takes no dtype.
    with pytest.raises(ValueError, match=rf"'user': {setting} "):
        make_layer(tpu.FeatureConfig(config))


@pytest.mark.skipif(not hasattr(tpu, "CustomCombiner"), reason="not in TF 2.16")
def test_a_tf_custom_combiner_is_an_error():
    combiner = tpu.CustomCombiner(tf.function(lambda n, v: v[0]), 4)
    config = tpu.TableConfig(10, 4, combiner=combiner, name="user")
    with pytest.raises(ValueError, match="'user': combiner"):
        make_layer(tpu.FeatureConfig(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocabulary_size", 0), ("dim", -1), ("combiner", "max")],
)
def test_a_tf_tables_field_that_was_assigned_is_checked(field, value):
    config = tpu.TableConfig(10, 4, name="user")
    setattr(config, field, value)
    with pytest.raises(ValueError, match=rf"'user': {field} .*{value!r}"):
        make_layer(tpu.FeatureConfig(config))


def test_a_tf_features_output_shape_has_a_batch():
    theirs = tpu.TableConfig(10, 4, name="user")
    config = tpu.FeatureConfig(theirs, output_shape=[], name="id")
    with pytest.raises(ValueError, match=r"'id': output_shape .*batch"):
        make_layer(config)


# Nestings.

NESTINGS = {
    "single": lambda leaf: leaf(0),
    "dict": lambda leaf: {"b": leaf(0), "a": leaf(1), "c": leaf(2)},
    "dict_of_integers": lambda leaf: {2: leaf(0), 1: leaf(1)},
    "list": lambda leaf: [leaf(0), leaf(1)],
    "tuple": lambda leaf: (leaf(0), leaf(1)),
    "tuple_of_one": lambda leaf: (leaf(0),),
    "namedtuple": lambda leaf: Pair(leaf(0), leaf(1)),
    "mixed": lambda leaf: {
        "user": [leaf(0), (leaf(1), leaf(2))],
        "movie": Pair(leaf(3), {"z": leaf(4), "a": leaf(5)}),
    },
    "deep": lambda leaf: [{"a": ({"b": [[leaf(0)], leaf(1)]}, leaf(2))}],
}


def assert_same_nesting(actual, expected):
    """Same containers, keys in the same order, equal arrays."""
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
        return
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = actual.values(), expected.values()
    for a, e in zip(actual, expected, strict=True):
        assert_same_nesting(a, e)


def numbered_feature(i):
    """A feature whose rows are all `i`; every second one has a large table."""
    rows = 100 if i % 2 else 10
    config = TableConfig(f"t{i}", rows, 1, initializers.Constant(i))
    return FeatureConfig(f"f{i}", config)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_outputs_are_nested_as_the_config_is(nesting):
    nest = NESTINGS[nesting]
    layer = make_layer(nest(numbered_feature), threshold=50)
    outputs = layer(nest(lambda i: IDS))
    assert_same_nesting(outputs, nest(lambda i: np.full([2, 1], i, np.float32)))


@pytest.mark.parametrize("nesting", NESTINGS)
def test_weights_are_nested_as_the_config_is(nesting):
    nest = NESTINGS[nesting]
    config = TableConfig("t", 10, 1, initializers.Ones(), combiner="sum")
    layer = make_layer(nest(lambda i: FeatureConfig(f"f{i}", config)))
    outputs = layer(
        nest(lambda i: IDS),
        weights=nest(lambda i: tf.fill([2], float(i)) if i else None),
    )
    assert_same_nesting(
        outputs, nest(lambda i: np.full([2, 1], i or 1, np.float32))
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_a_nesting_is_the_same_after_a_round_trip(as_json):
    layer = make_layer(
        {
            ("pair", 0): (feature(), feature()),
            ("list", 0): [[(feature(),), feature()]],
        }
    )
    config = layer.get_config()
    if as_json:
        config = json.loads(json.dumps(config))
    other = PartialTPUEmbedding.from_config(config)
    outputs = other(layer._spec.structure.pack(dict.fromkeys(range(4), IDS)))
    assert list(outputs) == [("pair", 0), ("list", 0)]
    assert type(outputs["pair", 0]) is tuple
    [[[single], _]] = outputs["list", 0]
    assert single.shape == [2, 4]


def test_a_config_stores_no_named_tuple():
    layer = make_layer({"a": Pair(feature(), feature())})
    with pytest.raises(NotImplementedError, match="named tuple Pair"):
        layer.get_config()


def test_keys_of_the_inputs_may_come_in_any_order():
    layer = make_layer({"a": numbered_feature(1), "b": numbered_feature(2)})
    outputs = layer({"b": IDS, "a": IDS})
    assert list(outputs) == ["a", "b"]
    assert float(outputs["b"][0, 0]) == 2.0


def test_lists_and_tuples_of_inputs_stand_for_each_other():
    layer = make_layer([numbered_feature(0), numbered_feature(1)])
    assert isinstance(layer((IDS, IDS)), list)


def test_a_config_that_is_changed_later_does_not_change_the_layer():
    nested = {"a": numbered_feature(0), "b": [numbered_feature(1)]}
    layer = make_layer(nested)
    nested["b"].clear()
    nested["c"] = numbered_feature(2)
    assert list(layer({"a": IDS, "b": [IDS]})) == ["a", "b"]


@pytest.mark.parametrize("empty", [{}, [], (), {"a": [], "b": {}}])
def test_a_config_without_features_is_an_error(empty):
    with pytest.raises(ValueError, match="no features"):
        make_layer(empty)


@pytest.mark.parametrize("leaf", [TableConfig, None, "id", 3, FeatureConfig])
def test_a_config_of_something_else_is_an_error_that_says_where(leaf):
    with pytest.raises(TypeError, match=r"FeatureConfig or .* at 'a/1/b'"):
        make_layer({"a": [feature(), {"b": leaf}]})


# The structure of inputs and weights.

STRUCTURE = {
    "a": feature(),
    "b": [feature(), {"x": feature(), "y": feature()}],
}
WRONG_STRUCTURES = {
    "missing key": (
        {"a": IDS},
        ValueError,
        r"missing keys \['b'\].*must be \['a', 'b'\]",
    ),
    "unknown key": (
        {"a": IDS, "b": [IDS, {"x": IDS, "y": IDS}], "c": IDS},
        ValueError,
        r"unknown keys \['c'\]",
    ),
    "misspelt key": (
        {"a": IDS, "b": [IDS, {"x": IDS, "Y": IDS}]},
        ValueError,
        r"\['b/1'\] has unknown keys \['Y'\] and missing keys \['y'\]",
    ),
    "too short": (
        {"a": IDS, "b": [IDS]},
        ValueError,
        r"\['b'\] must have 2 entries, got 1",
    ),
    "too long": (
        {"a": IDS, "b": [IDS, {"x": IDS, "y": IDS}, IDS]},
        ValueError,
        r"\['b'\] must have 2 entries, got 3",
    ),
    "dict for a leaf": (
        {"a": {"z": IDS}, "b": [IDS, {"x": IDS, "y": IDS}]},
        TypeError,
        r"\['a'\] must be one feature's tensor, .* keys \['z'\]",
    ),
    "list for a dict": (
        {"a": IDS, "b": [IDS, [IDS, IDS]]},
        TypeError,
        r"\['b/1'\] must be a dict with the keys \['x', 'y'\], got list",
    ),
    "dict for a list": (
        {"a": IDS, "b": {"0": IDS, "1": IDS}},
        TypeError,
        r"\['b'\] must be a list or tuple of 2 entries, got dict",
    ),
    "tensor for a list": (
        {"a": IDS, "b": IDS},
        TypeError,
        r"\['b'\] must be a list or tuple of 2 entries, got",
    ),
    "tensor for the whole": (IDS, TypeError, "must be a dict with the keys"),
}


@pytest.fixture(scope="module")
def structured():
    return make_layer(STRUCTURE)


@pytest.mark.parametrize("name", WRONG_STRUCTURES)
def test_inputs_of_another_structure_are_an_error_that_says_where(
    structured, name
):
    inputs, error, message = WRONG_STRUCTURES[name]
    with pytest.raises(error, match=f"inputs.*{message}"):
        structured(inputs)


@pytest.mark.parametrize("name", WRONG_STRUCTURES)
def test_weights_of_another_structure_are_an_error_that_says_where(
    structured, name
):
    weights, error, message = WRONG_STRUCTURES[name]
    with pytest.raises(error, match=f"weights.*{message}"):
        structured(
            {"a": IDS, "b": [IDS, {"x": IDS, "y": IDS}]}, weights=weights
        )


def test_a_dict_for_a_single_feature_is_an_error():
    with pytest.raises(TypeError, match="inputs must be one feature's tensor"):
        make_layer(feature())({"id": IDS})


# Tables of a layer.


@pytest.mark.parametrize(
    "second",
    [lambda: table(), lambda: tpu.TableConfig(10, 4, name="user")],
    ids=["own", "tf"],
)
def test_two_tables_of_one_name_are_an_error_that_names_it(second):
    with pytest.raises(ValueError, match="named 'user'"):
        make_layer([FeatureConfig("a", table()), FeatureConfig("b", second())])


@BOTH_ROUTES
def test_features_that_name_one_config_share_one_table(threshold):
    config = table()
    layer = make_layer(
        {name: FeatureConfig(name, config) for name in "ab"}, threshold
    )
    outputs = layer({"a": IDS, "b": IDS})
    np.testing.assert_array_equal(outputs["a"], outputs["b"])
    assert list(layer.embedding_tables) == ["user"]


@pytest.mark.parametrize(
    ("threshold", "large"),
    [(9, True), (10, False), (0, True), (None, False)],
)
def test_a_table_is_large_above_the_threshold(threshold, large):
    layer = make_layer(feature(), threshold)
    assert (layer.tpu_embedding is not None) == large


@pytest.mark.parametrize("place", ["default_device", "replicated"])
def test_default_device_keeps_a_large_table_in_keras(place):
    config = table(placement=place)
    assert make_layer(FeatureConfig("id", config)).tpu_embedding is None


@BOTH_ROUTES
def test_a_place_that_is_not_there_is_an_error(threshold):
    config = FeatureConfig("id", table(placement="sparsecore"))
    with pytest.raises(ValueError, match="'user': placement='sparsecore'"):
        make_layer(config, threshold)


@pytest.mark.parametrize("place", ["row", "sharded", "column", "table"])
@BOTH_ROUTES
def test_a_configuration_of_a_cluster_is_for_one_device_too(place, threshold):
    config = FeatureConfig("id", table(placement=place))
    [placed] = make_layer(config, threshold).placement.tables
    assert placed.engine == "one device"
    assert placed.reason == f"placement='{place}', one replica"


@pytest.mark.parametrize("threshold", [0, -1])
def test_a_threshold_of_0_or_less_makes_all_tables_large(threshold):
    """TFRS's own programs say -1."""
    [placed] = make_layer(feature(), threshold).placement.tables
    assert placed.engine == "one device"


@pytest.mark.parametrize("threshold", [1.5, "0", True, -2])
def test_a_threshold_that_is_no_integer_is_an_error(threshold):
    with pytest.raises(ValueError, match=f"size_threshold .*{threshold!r}"):
        make_layer(feature(), threshold)


@pytest.mark.parametrize("batch_size", [0, -8, 8.0])
def test_a_batch_size_is_a_positive_integer(batch_size):
    with pytest.raises(ValueError, match=f"batch_size .*{batch_size!r}"):
        PartialTPUEmbedding(feature(), "sgd", batch_size=batch_size)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", tf.bfloat16, tf.bfloat16.as_numpy_dtype],
    ids=["name", "tensorflow", "numpy"],
)
def test_a_communication_dtype_is_stored_by_name(dtype):
    layer = PartialTPUEmbedding(feature(), "sgd", communication_dtype=dtype)
    config = layer.get_config()
    assert config["communication_dtype"] == "bfloat16"
    assert PartialTPUEmbedding.from_config(config).get_config() == config
    # Nothing is sent on one replica, and nothing is rounded.
    assert layer.placement.communication_dtype is None
    rows = np.full(layer.embedding_tables["user"].shape, 1.001, np.float32)
    layer.load_tables({"user": rows})
    assert np.all(layer(tf.constant([1, 2])).numpy() == rows[0, 0])


@pytest.mark.parametrize(
    "dtype", ["int8", tf.float64, "bfloat", 16, True, object()]
)
def test_another_communication_dtype_is_an_error(dtype):
    with pytest.raises(ValueError, match=r"communication_dtype .*'float16'\]"):
        PartialTPUEmbedding(feature(), "sgd", communication_dtype=dtype)


def test_a_communication_dtype_and_a_plan_have_to_agree():
    plan = tfrs_embed.plan(
        feature(), 1, replicas=2, batch_size=4, communication_dtype="float16"
    )
    layer = PartialTPUEmbedding(feature(), "sgd", plan=plan)
    assert layer._arguments.sent_as == "float16"
    config = layer.get_config()
    assert PartialTPUEmbedding.from_config(config).get_config() == config
    with pytest.raises(ValueError, match=r"='bfloat16', but .* as float16"):
        PartialTPUEmbedding(
            feature(), "sgd", plan=plan, communication_dtype=tf.bfloat16
        )


def test_an_unknown_treatment_of_invalid_ids_is_an_error():
    with pytest.raises(ValueError, match=r"invalid_ids .*'zero'.*'clip'"):
        PartialTPUEmbedding(feature(), "sgd", invalid_ids="clip")


# Initial values.


def features_of(tables):
    return [FeatureConfig(t.name, t) for t in tables]


@BOTH_ROUTES
def test_tables_without_an_initializer_start_different(threshold):
    tables = [TableConfig(name, 10, 4) for name in "ab"]
    found = tables_of(make_layer(features_of(tables), threshold))
    assert not np.allclose(found["a"], found["b"])


@BOTH_ROUTES
@pytest.mark.parametrize(
    "make",
    [initializers.RandomNormal, tf.random_normal_initializer],
    ids=["keras", "tf"],
)
def test_tables_that_share_an_unseeded_initializer_start_different(
    make, threshold
):
    shared = make()
    tables = [TableConfig(name, 10, 4, shared) for name in "ab"]
    found = tables_of(make_layer(features_of(tables), threshold))
    assert not np.allclose(found["a"], found["b"])


def test_a_shared_unseeded_initializer_gives_different_values_on_two_routes():
    shared = initializers.RandomNormal()
    tables = [
        TableConfig("a", 10, 4, shared),
        TableConfig("b", 10, 4, shared, placement="default_device"),
    ]
    found = tables_of(make_layer(features_of(tables)))
    assert not np.allclose(found["a"], found["b"])


@BOTH_ROUTES
def test_tables_that_share_a_seeded_initializer_start_equal(threshold):
    shared = initializers.RandomNormal(seed=1)
    tables = [TableConfig(name, 10, 4, shared) for name in "ab"]
    found = tables_of(make_layer(features_of(tables), threshold))
    np.testing.assert_array_equal(found["a"], found["b"])
    assert found["a"].std() > 0


def test_initial_values_do_not_depend_on_the_route():
    config = table(initializer=initializers.RandomNormal(seed=1))
    by_route = [
        tables_of(make_layer(FeatureConfig("id", config), threshold))["user"]
        for threshold in (0, None)
    ]
    np.testing.assert_array_equal(*by_route)


@BOTH_ROUTES
@pytest.mark.parametrize(
    "initializer",
    [
        lambda shape: tf.fill(shape, 3.0),
        lambda shape, dtype: tf.fill(shape, tf.cast(3, dtype)),
        lambda shape, dtype=None, **kwargs: np.full(shape, 3.0, np.float32),
        initializers.Constant(3.0),
        tf.constant_initializer(3.0),
    ],
    ids=["shape", "shape_dtype", "optional_dtype", "keras", "tf"],
)
def test_any_function_of_a_shape_initializes_a_table(initializer, threshold):
    config = FeatureConfig("id", table(initializer=initializer))
    np.testing.assert_array_equal(
        tables_of(make_layer(config, threshold))["user"], np.full([10, 4], 3.0)
    )


def test_an_initializer_may_be_a_name():
    config = FeatureConfig("id", table(initializer="ones"))
    np.testing.assert_array_equal(
        tables_of(make_layer(config))["user"], np.ones([10, 4])
    )


@BOTH_ROUTES
@pytest.mark.parametrize(
    "initializer",
    [
        lambda shape, dtype=None, **kwargs: tf.zeros([4, 10]),
        lambda shape, dtype=None, **kwargs: tf.zeros([10]),
        lambda shape, dtype=None, **kwargs: tf.zeros(shape, tf.int32),
    ],
    ids=["transposed", "rank", "dtype"],
)
def test_an_initializer_of_a_wrong_shape_is_an_error_that_names_the_table(
    initializer, threshold
):
    layer = make_layer(
        FeatureConfig("id", table(initializer=initializer)), threshold
    )
    for _ in range(2):  # A second attempt finds nothing half built.
        with pytest.raises(ValueError, match=r"'user'.*\(10, 4\)"):
            layer.build(None)


def test_parsing_keeps_the_order_of_features_and_tables():
    first, second = table(name="z"), table(name="a")
    spec = parse(
        {
            "b": FeatureConfig("1", first),
            "a": FeatureConfig("2", second),
            "c": FeatureConfig("3", first),
        }
    )
    assert [f.name for f in spec.features] == ["b", "a", "c"]
    assert [t.name for t in spec.tables] == ["z", "a"]


def test_features_of_one_path_are_an_error():
    feature = FeatureConfig("f", TableConfig("t", 5, 2))
    with pytest.raises(ValueError, match="one path"):
        parse({"a/b": feature, "a": {"b": feature}})


def test_an_initializer_of_ones_own_is_used_as_it_is():
    class Filled(tf_keras.initializers.Initializer):
        def __init__(self, value):
            self.value = value

        def __call__(self, shape, dtype=None, **kwargs):
            return tf.fill(shape, tf.cast(self.value, dtype))

    table = TableConfig("t", 5, 2, Filled(3.0))
    for threshold in (0, None):
        layer = PartialTPUEmbedding(
            FeatureConfig("f", table), "sgd", size_threshold=threshold
        )
        np.testing.assert_array_equal(
            layer.embedding_tables["t"], np.full((5, 2), 3.0)
        )
