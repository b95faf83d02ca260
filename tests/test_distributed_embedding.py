"""DistributedEmbedding: keras_rs's contract, and none of its defects.

That it computes what the numpy reference does is tested in test_conformance.py
and in tests/strategies.
"""

import copy
import json

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import export, keras, layers, name_of, of_keras_2
from process_tiers import nightly, on
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.configs.parsing import parse
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.inputs import CallInputs, to_bags
from tfrs_embed.ops.sample_matrix import SampleMatrix
from training_helpers import assert_unchanged, state, train

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding
BATCH, WIDTH, ROWS, DIM = 4, 3, 20, 5


def make_table(name="t", rows=ROWS, dim=DIM, **options):
    return TableConfig(name, rows, dim, **options)


def make_feature(table, name="f", ids=(BATCH, WIDTH), **options):
    output = (ids[0], table.embedding_dim)
    return FeatureConfig(name, table, ids, output, **options)


def make_layer(table=None, ids=(BATCH, WIDTH), **options):
    """A layer of one feature."""
    return layers.DistributedEmbedding(
        make_feature(table or make_table(), "f", ids), **options
    )


def dense(seed=0, shape=(BATCH, WIDTH)):
    return np.random.default_rng(seed).integers(0, ROWS, shape)


def row(layer, i, table="t"):
    return layer.get_embedding_tables()[table].numpy()[i]


def ones(layer, ids):
    return tf.ones_like(layer(ids))


# Inputs.


def rows_of(ids):
    """The mean of each list's rows, as numpy has it."""

    def expected(layer):
        table = layer.get_embedding_tables()["t"].numpy()
        return [table[i].mean(0) if len(i) else np.zeros(DIM) for i in ids]

    return expected


LISTS = [[1, 2], [3], [], [4, 5, 5]]


@pytest.mark.parametrize(
    "ids",
    [
        LISTS,
        tuple(tuple(row) for row in LISTS),
        np.array([np.array(row, np.int32) for row in LISTS], object),
        tf.ragged.constant(LISTS, dtype=tf.int64),
        tf.ragged.constant(LISTS, dtype=tf.int64).to_sparse(),
    ],
    ids=["lists", "tuples", "array of arrays", "ragged", "sparse"],
)
def test_rows_of_several_lengths_come_in_any_form(ids):
    layer = make_layer()
    np.testing.assert_allclose(layer(ids), rows_of(LISTS)(layer), rtol=1e-6)


@pytest.mark.parametrize("kind", [np.array, tf.constant, lambda ids: ids])
def test_dense_rows_are_combined(kind):
    ids = [[1, 2, 3], [4, 4, 5], [0, 0, 0], [7, 8, 9]]
    layer = make_layer()
    np.testing.assert_allclose(layer(kind(ids)), rows_of(ids)(layer), rtol=1e-6)


@on("keras:3", tier="more")
def test_weights_come_in_any_form():
    layer = make_layer(make_table(combiner="sum"))
    weights = [[0.5, 2.0], [3.0], [], [1.0, 1.0, -1.0]]
    table = layer.get_embedding_tables()["t"].numpy()
    expected = [
        sum((w * table[i] for i, w in zip(*pair, strict=True)), np.zeros(DIM))
        for pair in zip(LISTS, weights, strict=True)
    ]
    ragged = tf.ragged.constant(LISTS, dtype=tf.int64)
    for given in (weights, np.array([np.array(w) for w in weights], object)):
        for ids in (LISTS, ragged):
            np.testing.assert_allclose(
                layer(ids, weights=given), expected, rtol=1e-5, atol=1e-6
            )


def test_features_of_all_kinds_in_any_nesting():
    table = make_table()
    features = {
        "a": [make_feature(table, "one", (BATCH,)), make_feature(table)],
        "b": (make_feature(table), {"c": make_feature(table)}),
    }
    layer = layers.DistributedEmbedding(features)
    sparse = tf.ragged.constant(LISTS, dtype=tf.int64).to_sparse()
    outputs = layer({"a": [[1, 2, 3, 4], dense()], "b": (LISTS, {"c": sparse})})
    tf.nest.assert_same_structure(outputs, features)
    assert all(o.shape == (BATCH, DIM) for o in tf.nest.flatten(outputs))
    np.testing.assert_array_equal(outputs["b"][0], outputs["b"][1]["c"])
    np.testing.assert_array_equal(outputs["a"][0][1], row(layer, 2))


def test_tensorflows_configs_are_combined_too():
    table = tpu.TableConfig(ROWS, DIM, name="t", combiner="mean")
    layer = layers.DistributedEmbedding(tpu.FeatureConfig(table))
    ids = dense()
    np.testing.assert_allclose(layer(ids), rows_of(ids)(layer), rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ({"f": [["a", "b", "c"]]}, "must be integers, got string"),
        ({"f": [[1, 2], 3, 4, 5]}, "row 1 isn't a list of numbers"),
        ({"f": [[1, [2]], [3], [4], [5]]}, "list of rows"),
        ({"f": [[1, "a", 2]] * 4}, "neither all numbers nor all strings"),
        ({"f": {"g": 1}}, "must be one feature's tensor"),
        ({"f": [[True, False, True]]}, "must be integers, got bool"),
    ],
)
def test_what_is_no_ids_is_an_error_that_names_the_feature(ids, problem):
    layer = layers.DistributedEmbedding({"f": make_feature(make_table())})
    with pytest.raises(TypeError, match="f.*" + problem):
        layer(ids)


@on("keras:3", tier="more")
def test_a_model_of_symbolic_inputs():
    table = make_table()
    layer = layers.DistributedEmbedding(
        {
            "one": make_feature(table, "one", (BATCH,)),
            "many": make_feature(table),
        }
    )
    inputs = {
        "one": keras.Input((), dtype="int64"),
        "many": keras.Input((None,), dtype="int64", ragged=True),
    }
    outputs = layer(inputs)
    assert tuple(outputs["many"].shape) == (None, DIM)
    model = keras.Model(inputs, outputs)
    found = model(
        {
            "one": tf.constant([1, 2, 3, 4]),
            "many": tf.ragged.constant(LISTS, dtype=tf.int64),
        }
    )
    np.testing.assert_allclose(found["many"], rows_of(LISTS)(layer), rtol=1e-6)


# Preprocessing.


@on("keras:3", tier="more")
@pytest.mark.parametrize("weighted", [False, True])
def test_preprocessed_inputs_stand_for_inputs_and_weights(weighted):
    layer = layers.DistributedEmbedding({"f": make_feature(make_table())})
    inputs = {"f": LISTS}
    weights = {"f": [[0.5, 2.0], [3.0], [], [1.0, 1.0, 2.0]]}
    weights = weights if weighted else None
    expected = layer(inputs, weights=weights)["f"]
    prepared = layer.preprocess(inputs, weights)
    np.testing.assert_array_equal(layer(prepared)["f"], expected)
    # As tf.data takes it.
    dataset = tf.data.Dataset.from_tensors(prepared)
    np.testing.assert_array_equal(
        layer(next(iter(dataset)), training=True)["f"], expected
    )


def test_preprocess_in_a_dataset():
    layer = make_layer()
    dataset = tf.data.Dataset.from_tensor_slices(dense()).batch(BATCH)
    [prepared] = dataset.map(layer.preprocess)
    np.testing.assert_array_equal(layer(prepared), layer(dense()))


def test_preprocess_reports_bad_input():
    layer = make_layer()
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 20 is out of"):
        layer.preprocess(np.full((BATCH, WIDTH), ROWS))
    with pytest.raises(ValueError, match=r"ids of shape \[4, 2\]"):
        layer.preprocess(np.zeros((BATCH, 2), int))
    dataset = tf.data.Dataset.from_tensors(np.full((BATCH, WIDTH), ROWS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 20 is out of"):
        list(dataset.map(layer.preprocess))


@on("keras:3", tier="more")
def test_preprocessed_inputs_have_their_own_weights():
    layer = make_layer()
    with pytest.raises(ValueError, match="has weights already"):
        layer(layer.preprocess(dense()), weights=np.ones((BATCH, WIDTH)))


def test_no_feature_has_the_name_of_what_preprocess_returns():
    with pytest.raises(ValueError, match="preprocessed_inputs"):
        layers.DistributedEmbedding(
            {"preprocessed_inputs": make_feature(make_table())}
        )


# Tables.


def test_tables_are_read_and_set_by_name():
    one, two = make_table("one"), make_table("two", 7, 2)
    layer = layers.DistributedEmbedding([make_feature(one), make_feature(two)])
    train(layer, [dense(), dense() % 7], [1.0, 1.0])
    before = state(layer)
    values = np.arange(14.0).reshape(7, 2)
    layer.set_embedding_tables({"two": values})
    tables = layer.get_embedding_tables()
    assert list(tables) == ["one", "two"]
    np.testing.assert_array_equal(tables["two"], values)
    after = state(layer)
    assert {k for k in after if not np.array_equal(after[k], before[k])} == {
        "two/parameters"
    }


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"one": np.zeros((ROWS, DIM)), "other": 0}, "no table 'other'"),
        ({"one": np.zeros((ROWS, DIM)), "two": np.zeros((2, 7))}, "'two' has"),
    ],
)
def test_tables_are_all_set_or_none(tables, problem):
    one, two = make_table("one"), make_table("two", 7, 2)
    layer = layers.DistributedEmbedding([make_feature(one), make_feature(two)])
    before = state(layer)
    with pytest.raises(ValueError, match=problem):
        layer.set_embedding_tables(tables)
    assert_unchanged(layer, before)


@on("keras:3", tier="more")
def test_weights_are_tables_in_feature_order_and_one_scalar():
    one, two = make_table("one"), make_table("two", optimizer="sgd")
    layer = layers.DistributedEmbedding([make_feature(two), make_feature(one)])
    layer.build([(BATCH, WIDTH), (BATCH, WIDTH)])
    [trigger] = layer.trainable_weights
    assert trigger.shape == ()
    names = [name_of(w) for w in layer.non_trainable_weights]
    tables = [name for name in names if name.endswith("parameters")]
    assert ["two" in name for name in tables] == [True, False]
    assert names[0] == tables[0]


# Shapes.


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros((BATCH - 1, WIDTH), int),
        tf.ragged.constant([[1], [2, 3]], dtype=tf.int64),
        tf.sparse.from_dense(tf.constant([[1, 0], [2, 3]])),
        LISTS,
    ],
    ids=["dense", "ragged", "sparse", "lists"],
)
@pytest.mark.parametrize("graph", [False, True])
def test_a_batch_and_its_rows_may_be_less(ids, graph):
    layer = make_layer()
    if isinstance(ids, list):
        ids = tf.ragged.constant(ids, dtype=tf.int64)
    found = (tf.function(layer) if graph else layer)(ids)
    if isinstance(ids, tf.SparseTensor):
        rows = [[1], [2, 3]]  # Zeros, which it leaves out, are no ids.
    else:
        rows = ids.tolist() if isinstance(ids, np.ndarray) else ids.to_list()
    np.testing.assert_allclose(found, rows_of(rows)(layer), rtol=1e-6)


def test_all_kinds_of_ids_may_have_the_declared_shape():
    layer = make_layer()
    ids = dense()
    expected = layer(ids)
    ragged = tf.RaggedTensor.from_tensor(ids)
    for given in (ragged, ragged.to_sparse(), ids.tolist()):
        np.testing.assert_allclose(layer(given), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("declared", "given"),
    [((BATCH, 1), (BATCH,)), ((BATCH,), (BATCH, 1)), ((BATCH,), (BATCH,))],
)
def test_a_column_stands_for_a_vector(declared, given):
    ids = dense(shape=given)
    layer = make_layer(ids=declared)
    np.testing.assert_allclose(
        layer(ids), rows_of(ids.reshape(-1, 1))(layer), rtol=1e-6
    )


def test_outputs_of_more_dimensions():
    table = make_table()
    feature = FeatureConfig("f", table, (BATCH, 2, 3), (BATCH, 2, DIM))
    layer = layers.DistributedEmbedding(feature)
    ids = dense(shape=(BATCH, 2, 3))
    expected = rows_of(ids.reshape(-1, 3))(layer)
    np.testing.assert_allclose(
        layer(ids), np.reshape(expected, (BATCH, 2, DIM)), rtol=1e-6
    )
    ragged = tf.RaggedTensor.from_tensor(ids.reshape(-1, 3))
    np.testing.assert_allclose(layer(ragged), layer(ids), rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"\[9, 3\]"):
        layer(tf.RaggedTensor.from_tensor(np.zeros((9, 3), np.int64)))


def test_a_row_of_ids_each_by_itself_is_a_sequence():
    layer = layers.DistributedEmbedding(
        FeatureConfig("f", make_table(), (BATCH, 3), (BATCH, 3, DIM))
    )
    table = layer.get_embedding_tables()["t"].numpy()
    found = layer(LISTS).numpy()
    for i, ids in enumerate(LISTS):
        np.testing.assert_array_equal(found[i, : len(ids)], table[ids])
        np.testing.assert_array_equal(found[i, len(ids) :], 0)


# Placement and stacking.


@pytest.mark.parametrize(
    "place", ["auto", "default_device", "replicated", "row", "column", "table"]
)
def test_one_device_holds_every_table(place):
    layer = layers.DistributedEmbedding(
        [
            make_feature(make_table("small", placement=place)),
            make_feature(make_table("large", 20_000, placement=place)),
        ]
    )
    assert [t.engine for t in layer.placement.tables] == ["one device"] * 2
    reasons = [t.reason for t in layer.placement.tables]
    assert all("one replica" in reason for reason in reasons)
    assert (f"placement='{place}'" in reasons[0]) == (place != "auto")


def test_a_place_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"'t'.*'sparsecore'"):
        make_layer(make_table(placement="sparsecore"))


@pytest.mark.parametrize(
    "stacking", ["auto", None, ["a", "b"], [["a", "b"], ["c", "d"]], []]
)
def test_table_stacking_changes_nothing_off_sparse_cores(stacking):
    features = [
        make_feature(make_table(name, initializer="ones", dim=3 + 8 * (i > 1)))
        for i, name in enumerate("abcd")
    ]
    layer = layers.DistributedEmbedding(features, table_stacking=stacking)
    np.testing.assert_array_equal(layer([dense()] * 4)[0], 1)


@pytest.mark.parametrize(
    ("stacking", "error", "problem"),
    [
        ("none", ValueError, "'none'"),
        (["a", "x"], ValueError, r"\['x'\]"),
        ([["a"], ["b", "a"]], ValueError, "'a' twice"),
        (["a", ["b"]], TypeError, "table names"),
        (3, TypeError, "table names"),
        ([[]], TypeError, "table names"),
        (["a", "wide"], ValueError, "'a' and 'wide'.*8 and 16"),
        (["a", "adam"], ValueError, "'a' and 'adam'.*SGD and Adam"),
        (["a", "here"], ValueError, "'here'.*default_device"),
    ],
)
def test_table_stacking_is_checked_everywhere(stacking, error, problem):
    tables = [
        make_table("a"),
        make_table("b"),
        make_table("wide", dim=9),
        make_table("adam", optimizer="adam"),
        make_table("here", placement="default_device"),
    ]
    with pytest.raises(error, match=problem):
        layers.DistributedEmbedding(
            [make_feature(t) for t in tables],
            optimizer="sgd",
            table_stacking=stacking,
        )


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: "adam",
        lambda: tf.tpu.experimental.embedding.Adagrad(0.5),
    ],
    ids=["name", "tf.tpu"],
)
def test_tables_with_equal_optimizers_may_be_stacked(make_optimizer):
    tables = [make_table(n, optimizer=make_optimizer()) for n in "ab"]
    features = [make_feature(t) for t in tables]
    layer = layers.DistributedEmbedding(features, table_stacking=["a", "b"])
    first, second = (layer.table_optimizers[n] for n in "ab")
    assert first is second
    first.learning_rate = 0.25
    again = layers.DistributedEmbedding.from_config(layer.get_config())
    assert again.table_optimizers["b"].learning_rate == 0.25
    # Unstacked they are as before: each has a rate of its own.
    apart = layers.DistributedEmbedding(features, table_stacking=None)
    apart.table_optimizers["a"].learning_rate = 0.25
    assert apart.table_optimizers["b"].learning_rate != 0.25


@pytest.mark.parametrize(
    "optimizers",
    [
        [tf.tpu.experimental.embedding.SGD(rate) for rate in (0.5, 0.25)],
        # Whoever has one may assign its rate.
        [keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.5)],
        ["adam", None],
    ],
    ids=["rates", "objects", "none"],
)
def test_tables_with_other_optimizers_may_not(optimizers):
    features = [
        make_feature(make_table(name, optimizer=optimizer))
        for name, optimizer in zip("ab", optimizers, strict=True)
    ]
    with pytest.raises(ValueError, match="'a' and 'b' can't be stacked"):
        layers.DistributedEmbedding(
            features, optimizer=None, table_stacking=["a", "b"]
        )


# Saving.


def make_model(seed=None):
    """A compiled model of two tables that share an optimizer."""
    shared = keras.optimizers.Adam(0.05)
    initializer = keras.initializers.RandomNormal(seed=seed)
    tables = [
        make_table(name, optimizer=shared, initializer=initializer)
        for name in ("one", "two")
    ]
    features = {
        "a": make_feature(tables[0], "a"),
        "b": (make_feature(tables[1], "b"), make_feature(tables[0], "c")),
    }
    layer = layers.DistributedEmbedding(features, table_stacking=["one", "two"])
    ids = lambda: keras.Input((WIDTH,), dtype="int64")  # noqa: E731
    inputs = {"a": ids(), "b": (ids(), ids())}
    outputs = tf.nest.flatten(layer(inputs))
    vectors = keras.layers.Concatenate()(outputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(vectors))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def data(seed):
    ids = {"a": dense(seed), "b": (dense(seed + 1), dense(seed + 2))}
    return ids, np.random.default_rng(seed).normal(size=(BATCH, 1))


def train_model(model, seed):
    ids, labels = data(seed)
    return model.train_on_batch(ids, labels)


@on("keras:3", tier="more")
@nightly(lambda how: how == "weights")
@pytest.mark.parametrize(
    "how", ["keras", *of_keras_2("tf"), "weights", "checkpoint"]
)
def test_a_model_that_was_saved_goes_on_as_if_it_had_not_been(tmp_path, how):
    model = make_model(seed=0)
    # Tracing takes longer than what is tested here; files' models are traced.
    model.run_eagerly = True
    for seed in range(3):
        train_model(model, seed)
    if how in ("keras", "tf"):
        model.save(tmp_path / f"model.{how}", save_format=how)
        restored = keras.models.load_model(tmp_path / f"model.{how}")
    elif how == "weights":
        restored = make_model()
        train_model(restored, 5)
        model.save_weights(tmp_path / "model.weights.h5")
        restored.load_weights(tmp_path / "model.weights.h5")
    else:
        restored = make_model()
        restored.run_eagerly = True
        train_model(restored, 5)
        of = lambda m: tf.train.Checkpoint(m, optimizer=m.optimizer)  # noqa: E731
        path = of(model).save(str(tmp_path / "checkpoint"))
        of(restored).restore(path).assert_consumed()
    if how in ("tf", "weights"):
        # Keras keeps no state of the model's optimizer there.
        for each in (model, restored):
            each.compile(keras.optimizers.Adagrad(0.1), "mse")
    ids, _ = data(7)
    np.testing.assert_array_equal(model(ids), restored(ids))
    for seed in range(10, 13):
        train_model(model, seed)
        train_model(restored, seed)
    np.testing.assert_allclose(model(ids), restored(ids), rtol=1e-6)


@on("keras:3", tier="more")
def test_an_exported_model_predicts_the_same(tmp_path):
    model = make_model()
    train_model(model, 0)
    served = export(model, str(tmp_path))
    ids, _ = data(1)
    inputs = tf.nest.map_structure(tf.constant, ids)
    np.testing.assert_allclose(served(inputs), model(ids), rtol=1e-6)


# What keras_rs's layer of this name gets wrong.


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros((BATCH + 1, WIDTH), int),
        np.zeros((BATCH, WIDTH + 1), int),
        np.zeros((BATCH, WIDTH - 1), int),
        np.zeros((BATCH, WIDTH, 1), int),
        np.zeros((BATCH,), int),
        tf.ragged.constant([[1] * (WIDTH + 1)], dtype=tf.int64),
        tf.sparse.from_dense(np.ones((BATCH, WIDTH + 1), int)),
        tf.ragged.constant([[1]] * (BATCH + 1), dtype=tf.int64),
    ],
    ids=str,
)
@pytest.mark.parametrize("graph", [False, True])
def test_ids_of_another_shape_are_an_error(ids, graph):
    layer = make_layer()

    def known(x):
        return layer(x)

    unknown = tf.function(
        known,
        input_signature=None
        if not graph or not isinstance(ids, np.ndarray)
        else [tf.TensorSpec([None] * ids.ndim, tf.int64)],
    )
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError),
        match=r"Feature \\*'f.*: ids of shape .*input_shape is \[4, 3\]",
    ):
        (unknown if graph else known)(ids)


@pytest.mark.parametrize("graph", [False, True])
def test_a_shape_of_a_batch_alone_is_one_id_per_sample(graph):
    layer = make_layer(ids=(BATCH,))
    run = tf.function(layer, reduce_retracing=True) if graph else layer
    ids = [[1], [2], [], [3]]
    expected = rows_of(ids)(layer)
    for given in (tf.ragged.constant(ids), tf.ragged.constant(ids).to_sparse()):
        np.testing.assert_allclose(run(given), expected, rtol=1e-6)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"input_shape is \[4\]"
    ):
        run(tf.ragged.constant([[1], [2, 5], [], [3]]))


@pytest.mark.parametrize(
    ("shape", "width"),
    [((BATCH,), 1), ((BATCH, WIDTH), WIDTH), ((BATCH, None), None)],
)
def test_a_declared_width_is_known_when_tracing(shape, width):
    # A TPU's program is compiled anew for each width that isn't.
    [feature] = parse(make_feature(make_table(), "f", shape)).features
    ids = tf.RaggedTensorSpec([None, None], tf.int64)

    @tf.function(input_signature=[ids], autograph=False)
    def as_matrix(ids):
        shapes = [InputShape(shape)]
        inputs = CallInputs([feature], [ids], [None], shapes=shapes)
        [bags] = to_bags(inputs)
        return SampleMatrix.of_bags(bags, BATCH).ids

    traced = as_matrix.get_concrete_function().output_shapes
    assert traced.as_list() == [BATCH, width]
    found = as_matrix(tf.ragged.constant([[1], [2], [], [3]], dtype=tf.int64))
    assert found.shape == [BATCH, width or 1]
    np.testing.assert_array_equal(found[:, 0], [1, 2, 0, 3])


@pytest.mark.parametrize(
    ("ids", "output"),
    [
        ((BATCH, WIDTH), (BATCH + 1, DIM)),
        ((BATCH, WIDTH), (BATCH, 2, DIM)),
        ((BATCH, 2, WIDTH), (BATCH, 4, DIM)),
        ((BATCH,), (BATCH, WIDTH, DIM)),
    ],
)
def test_an_output_shape_that_ids_cannot_have_is_an_error(ids, output):
    with pytest.raises(ValueError, match=r"'f'.*input_shape .*can't become"):
        layers.DistributedEmbedding(
            FeatureConfig("f", make_table(), ids, output)
        )


def test_each_table_is_trained_by_its_own_optimizer():
    frozen = make_table("frozen", optimizer=keras.optimizers.SGD(0.0))
    sgd = make_table("sgd", optimizer=keras.optimizers.SGD(0.5))
    layer = layers.DistributedEmbedding(
        [make_feature(frozen), make_feature(sgd)]
    )
    ids = np.zeros((BATCH, WIDTH), int)
    before = layer.get_embedding_tables()
    train(layer, [ids, ids], [1.0, 1.0])
    after = layer.get_embedding_tables()
    np.testing.assert_array_equal(after["frozen"], before["frozen"])
    np.testing.assert_allclose(
        before["sgd"][0] - after["sgd"][0], 0.5 * BATCH, rtol=1e-5
    )
    np.testing.assert_array_equal(after["sgd"][1:], before["sgd"][1:])


def test_an_unknown_optimizer_is_an_error():
    with pytest.raises(ValueError, match=r"'t'.*zzz"):
        make_layer(make_table(optimizer="zzz"))


@pytest.mark.parametrize(
    "setting",
    [
        {"use_ema": True},
        {"use_ema": True, "momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
def test_an_optimizers_setting_that_no_rule_has_is_an_error(setting):
    optimizer = keras.optimizers.SGD(0.1, **setting)
    with pytest.raises(ValueError, match=rf"'t'.*{next(iter(setting))}"):
        make_layer(make_table(optimizer=optimizer))


def test_tables_without_an_optimizer_have_adam():
    layer = make_layer()
    [placed] = layer.placement.tables
    assert placed.optimizer == "Adam"
    assert layer.table_optimizers["t"].learning_rate == pytest.approx(1e-3)


def test_a_shared_optimizer_has_slots_for_each_table():
    shared = keras.optimizers.Adagrad(0.1)
    tables = [make_table(name, optimizer=shared) for name in "ab"]
    layer = layers.DistributedEmbedding([make_feature(t) for t in tables])
    optimizers = layer.table_optimizers
    assert optimizers["a"] is optimizers["b"]
    train(layer, [np.zeros((BATCH, WIDTH), int), dense(1) % 9 + 1], [1.0, 1.0])
    slots = [layer.tables[n].slots["accumulators"].numpy() for n in "ab"]
    assert not np.array_equal(*slots)
    shared.learning_rate = 0.025
    assert optimizers["a"].learning_rate == pytest.approx(0.025)


def test_tables_of_one_shape_start_different():
    layer = layers.DistributedEmbedding(
        [make_feature(make_table(n)) for n in "ab"]
    )
    a, b = layer.get_embedding_tables().values()
    assert not np.array_equal(a, b)


def test_tables_of_one_seed_start_equal():
    initializer = keras.initializers.RandomNormal(seed=3)
    layer = layers.DistributedEmbedding(
        [make_feature(make_table(n, initializer=initializer)) for n in "ab"]
    )
    a, b = layer.get_embedding_tables().values()
    np.testing.assert_array_equal(a, b)


def test_a_schedule_advances():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.5, 0.0]
    )
    ids = np.zeros((1, 1), int)
    layer = make_layer(
        make_table(optimizer=keras.optimizers.SGD(schedule)), (1, 1)
    )
    moved = []
    for _ in range(3):
        before = row(layer, 0)
        train(layer, ids, 1.0)
        moved.append(float((before - row(layer, 0))[0]))
    np.testing.assert_allclose(moved, [1.0, 0.5, 0.0], atol=1e-6)


def test_from_config_leaves_its_argument_alone():
    config = make_config()
    before = copy.deepcopy(config)
    layers.DistributedEmbedding.from_config(config)
    assert config == before
    # And again, from what JSON made of it.
    layers.DistributedEmbedding.from_config(json.loads(json.dumps(config)))


def make_config(**options):
    shared = keras.optimizers.Adam(0.1)
    tables = [make_table(n, optimizer=shared) for n in "ab"]
    layer = layers.DistributedEmbedding(
        {
            "x": make_feature(tables[0], "x"),
            "y": [make_feature(tables[1], "y"), make_feature(tables[0], "z")],
        },
        **options,
    )
    return layer.get_config()


def test_what_was_shared_is_shared_again():
    layer = layers.DistributedEmbedding.from_config(make_config())
    assert [t.table for t in layer.placement.tables] == ["a", "b"]
    assert layer.placement.tables[0].features == ("x", "y/1")
    optimizers = layer.table_optimizers
    assert optimizers["a"] is optimizers["b"]
    assert optimizers["a"].learning_rate == pytest.approx(0.1)


def test_two_tables_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="named 't'"):
        layers.DistributedEmbedding(
            [make_feature(make_table()), make_feature(make_table())]
        )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("mixed_float16", "float16"),
        ("mixed_bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float64", "float64"),
    ],
)
def test_the_layers_dtype_reaches_its_outputs(dtype, expected):
    layer = make_layer(dtype=dtype)
    assert layer(dense()).dtype == expected
    assert layer.get_embedding_tables()["t"].dtype == tf.float32


def test_holes_in_sparse_ids_are_no_row():
    layer = make_layer(make_table(combiner="sum"))
    sparse = tf.SparseTensor([[0, 2], [3, 0]], [5, 6], [BATCH, WIDTH])
    expected = layer(sparse).numpy()
    np.testing.assert_array_equal(expected[1:3], 0)
    values = layer.get_embedding_tables()["t"].numpy()
    values[0] = np.nan
    layer.set_embedding_tables({"t": values})
    np.testing.assert_array_equal(layer(sparse), expected)


@on("keras:3", tier="more")
def test_sparse_weights_have_the_indices_of_their_ids():
    layer = make_layer()
    ids = tf.SparseTensor([[0, 0], [1, 1]], [5, 6], [BATCH, WIDTH])
    weights = tf.SparseTensor([[0, 0], [2, 1]], [1.0, 1.0], [BATCH, WIDTH])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"'f'.*indices of the weights"
    ):
        layer(ids, weights=weights)


@pytest.mark.parametrize("bad", [-1, ROWS])
@pytest.mark.parametrize("graph", [False, True])
def test_an_id_outside_the_table_is_an_error_and_changes_nothing(bad, graph):
    layer = make_layer()
    layer(dense())
    before = state(layer)
    ids = dense()
    ids[2, 1] = bad
    step = lambda x: train(layer, x, 1.0)  # noqa: E731
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"'f.*id {bad} is out of range.*20 rows",
    ):
        (tf.function(step) if graph else step)(tf.constant(ids))
    assert_unchanged(layer, before)


def test_features_share_operations_and_no_matrix_of_rows(needs_kernels):
    tables = [make_table(n) for n in "abc"]
    layer = layers.DistributedEmbedding([make_feature(t) for t in tables])
    lookup = tf.function(lambda ids: layer(ids))
    graph = lookup.get_concrete_function(
        [tf.TensorSpec([BATCH, WIDTH], tf.int64)] * 3
    ).graph
    every = [op for g in graphs_of(graph) for op in g.get_operations()]
    assert [op.type for op in every].count("TfrsEmbedLookup") <= 1
    for op in every:
        for output in op.outputs:
            assert output.shape != (BATCH, WIDTH, DIM), op
            assert output.shape != (BATCH * WIDTH, DIM), op


def graphs_of(graph):
    return (
        [graph, *(f.graph for f in graph._functions.values())]
        if hasattr(graph, "_functions")
        else [graph]
    )


def test_the_config_has_every_argument():
    given = {
        "table_stacking": [["a", "b"]],
        "update_stats": True,
        "size_threshold": None,
        "invalid_ids": "zero",
        "pipeline_execution_with_tensor_core": True,
    }
    config = make_config(**given)
    again = layers.DistributedEmbedding.from_config(config).get_config()
    assert again == config
    assert {k: config[k] for k in given} == given


# In a model.


@on("keras:3", tier="more")
def test_fit_trains_tables_by_their_own_optimizers():
    model = make_model(seed=1)
    ids, labels = data(0)
    losses = model.fit(ids, labels, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]


def test_the_package_has_the_layer():
    assert "DistributedEmbedding" in layers.__all__
    assert issubclass(layers.DistributedEmbedding, keras.layers.Layer)
