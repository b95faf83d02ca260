"""Bad input is a clear error, on both routes, and changes nothing."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed.configs import tables as configs
from tfrs_embed.configs.parsing import parse
from tfrs_embed.ops.inputs import CallInputs, to_bags
from tfrs_embed.optimizers import rules
from tfrs_embed.optimizers.rules import Slot
from training_helpers import ON_GPU, assert_unchanged, state

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding
InvalidArgument = tf.errors.InvalidArgumentError

BOTH_ROUTES = pytest.mark.parametrize(
    "threshold", [0, None], ids=["engine", "keras"]
)
BOTH_MODES = pytest.mark.parametrize(
    "graph", [False, True], ids=["eager", "graph"]
)


def ragged(rows, dtype=tf.int64, **kwargs):
    return tf.ragged.constant(rows, dtype, **kwargs)


def sparse(indices, values, shape, dtype=tf.int64):
    return tf.SparseTensor(
        np.reshape(indices, [-1, len(shape)]), tf.constant(values, dtype), shape
    )


@functools.cache
def make_trainer(threshold):
    """A layer that shares its tables among features of all kinds."""
    user = tpu.TableConfig(10, 2, name="user", combiner="sum")
    movie = tpu.TableConfig(6, 2, name="movie")
    layer = layers.PartialTPUEmbedding(
        {
            "dense": tpu.FeatureConfig(user),
            "grid": tpu.FeatureConfig(user, output_shape=[3]),
            "bag": tpu.FeatureConfig(movie),
            "rows": tpu.FeatureConfig(movie, output_shape=[3]),
            "sequence": tpu.FeatureConfig(movie, max_sequence_length=2),
        },
        tpu.Adam(0.1),
        size_threshold=threshold,
    )
    layer.build(None)
    return Trainer(layer)


GOOD = {
    "dense": tf.constant([0, 9, 9]),
    "grid": tf.constant([[0, 9], [1, 1], [2, 3]]),
    "bag": ragged([[5, 0], [], [1]]),
    "rows": ragged([[5, 0], [], [1]]),
    "sequence": ragged([[5, 0, 3], [], [1]]),
}


class Trainer:
    """Trains a layer's tables, on whichever route each of them is."""

    def __init__(self, layer):
        self.layer = layer
        self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(layer.trainable_variables)
        self._traced = {}

    def train(self, inputs, weights=None):
        with tf.GradientTape() as tape:
            outputs = self.layer(inputs, weights=weights, training=True)
            loss = tf.add_n([tf.reduce_sum(o) for o in outputs.values()])
        variables = self.layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def train_in_function(self, inputs, weights=None):
        """Trains in a function that knows no more than its inputs' ranks."""
        given = {"inputs": inputs, "weights": weights or {}}
        tensors = {
            (kind, name): value
            for kind, values in given.items()
            for name, value in values.items()
            if tf.is_tensor(value)
        }
        signature = [unknown(tensor) for tensor in tensors.values()]
        others = {
            (kind, name): repr(value)
            for kind, values in given.items()
            for name, value in values.items()
            if not tf.is_tensor(value)
        }
        known = (*tensors, *signature, *others.items())
        if known not in self._traced:

            @tf.function(input_signature=[signature])
            def train(traced):
                values = {kind: dict(v) for kind, v in given.items()}
                for (kind, name), tensor in zip(tensors, traced, strict=True):
                    values[kind][name] = tensor
                self.train(values["inputs"], values["weights"] or None)

            self._traced[known] = train
        self._traced[known](list(tensors.values()))

    def run(self, graph, inputs, weights=None):
        train = self.train_in_function if graph else self.train
        train(inputs, weights)


def unknown(tensor):
    """What a function may know of a tensor: its rank and its dtype."""
    shape = [None] * tensor.shape.rank
    if isinstance(tensor, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            shape,
            tensor.dtype,
            tensor.ragged_rank,
            tensor.row_splits.dtype,
        )
    if isinstance(tensor, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, tensor.dtype)
    return tf.TensorSpec(shape, tensor.dtype)


@dataclasses.dataclass
class Bad:
    """Bad ids or weights of one feature, and what the error says of them."""

    feature: str
    ids: Any
    error: type[Exception]
    says: tuple[str, ...]
    weights: Any = None


DENSE, GRID, BAG = GOOD["dense"], GOOD["grid"], GOOD["bag"]
COO = sparse([[0, 0], [0, 1], [2, 0]], [5, 0, 1], [3, 2])
USER_RANGE = ("10 rows", "valid ids are 0 to 9")
MOVIE_RANGE = ("6 rows", "valid ids are 0 to 5")

BAD = {
    # Ids outside the table.
    "id_too_large": Bad(
        "dense",
        tf.constant([1, 10, 12]),
        InvalidArgument,
        ("id 10 is out of range", *USER_RANGE),
    ),
    "id_negative": Bad(
        "dense",
        tf.constant([1, -1, 12]),
        InvalidArgument,
        ("id -1 is out of range", *USER_RANGE),
    ),
    "id_of_a_scalar": Bad(
        "dense",
        tf.constant(10),
        InvalidArgument,
        ("id 10 is out of range", *USER_RANGE),
    ),
    "id_of_a_combined_row": Bad(
        "grid",
        tf.constant([[0, 9], [1, 10], [2, 3]]),
        InvalidArgument,
        ("id 10 is out of range", *USER_RANGE),
    ),
    "id_of_a_ragged_row": Bad(
        "bag",
        ragged([[5], [], [0, 6]]),
        InvalidArgument,
        ("id 6 is out of range", *MOVIE_RANGE),
    ),
    "id_of_a_sparse_row": Bad(
        "bag",
        sparse([[0, 0], [2, 1]], [5, -7], [3, 2]),
        InvalidArgument,
        ("id -7 is out of range", *MOVIE_RANGE),
    ),
    "id_of_a_ragged_sequence": Bad(
        "sequence",
        ragged([[5], [], [0, 6]]),
        InvalidArgument,
        ("id 6 is out of range", *MOVIE_RANGE),
    ),
    "id_of_a_sparse_sequence": Bad(
        "sequence",
        sparse([[0, 0], [2, 1]], [5, 6], [3, 2]),
        InvalidArgument,
        ("id 6 is out of range", *MOVIE_RANGE),
    ),
    "id_of_weight_zero": Bad(
        "dense",
        tf.constant([1, 10, 2]),
        InvalidArgument,
        ("id 10 is out of range", *USER_RANGE),
        weights=tf.constant([1.0, 0.0, 1.0]),
    ),
    # Ids of a wrong dtype.
    "float_ids": Bad(
        "dense",
        tf.constant([1.0, 2.5, 3.0]),
        InvalidArgument,
        ("id 2.5 is not an integer",),
    ),
    "float_ragged_ids": Bad(
        "bag",
        ragged([[1.0], [], [np.nan]], tf.float64),
        InvalidArgument,
        ("id nan is not an integer. NaN stands for a missing value",),
    ),
    "half_sparse_ids": Bad(
        "bag",
        sparse([[0, 0]], [-np.inf], [3, 2], tf.float16),
        InvalidArgument,
        ("id -inf is not an integer",),
    ),
    "float_id_too_large": Bad(
        "dense",
        tf.constant([1.0, 1e30, 3.0]),
        InvalidArgument,
        ("is out of range", *USER_RANGE),
    ),
    "bool_ids": Bad(
        "dense",
        tf.constant([True, False, True]),
        TypeError,
        ("ids must be integers, got bool",),
    ),
    "string_ids": Bad(
        "bag",
        ragged([["a"], [], ["b"]], tf.string),
        TypeError,
        ("ids must be integers, got string",),
    ),
    # Ids that are no tensor.
    "no_ids": Bad("dense", None, TypeError, ("ids must be", "NoneType")),
    "ids_of_no_shape": Bad(
        "dense", [[1], 2], TypeError, ("ids must be", "list")
    ),
    # Ids of a wrong rank or shape.
    "ragged_ids_of_rank_3": Bad(
        "bag",
        ragged([[[1]], [], [[2, 3], [4]]]),
        ValueError,
        ("ragged ids must have rank 2", "got shape ("),
    ),
    "sparse_ids_of_rank_3": Bad(
        "bag",
        sparse([[0, 0, 0]], [1], [3, 2, 2]),
        ValueError,
        ("sparse ids must have rank 2", "got shape ("),
    ),
    "sparse_ids_of_rank_1": Bad(
        "bag",
        sparse([[0]], [1], [3]),
        ValueError,
        ("sparse ids must have rank 2", "got shape (", "the shape [None]."),
    ),
    "dense_ids_of_too_low_a_rank": Bad(
        "grid",
        tf.constant(1),
        ValueError,
        ("must have output_shape [3]", "got ()"),
    ),
    "dense_ids_of_too_high_a_rank": Bad(
        "grid",
        tf.ones([3, 2, 2], tf.int32),
        ValueError,
        ("must have output_shape [3]", "got ("),
    ),
    "dense_ids_of_another_batch": Bad(
        "grid", GRID[:2], ValueError, ("output_shape is [3]", "2")
    ),
    "dense_ids_of_another_batch_not_combined": Bad(
        "grid", DENSE[:2], ValueError, ("output_shape is [3]", "2")
    ),
    "ragged_ids_of_another_batch": Bad(
        "rows",
        ragged([[1], [2]]),
        InvalidArgument,
        ("output_shape=[3] needs 3 rows", "got 2"),
    ),
    "sparse_ids_of_another_batch": Bad(
        "rows",
        sparse([[3, 0]], [1], [4, 2]),
        InvalidArgument,
        ("output_shape=[3] needs 3 rows", "got 4"),
    ),
    # Sparse ids whose indices are not as they should be.
    "unsorted_rows": Bad(
        "bag",
        sparse([[0, 0], [2, 0], [1, 0]], [1, 2, 3], [3, 2]),
        InvalidArgument,
        ("row-major order", "[1 0] follows [2 0]", "tf.sparse.reorder"),
    ),
    "unsorted_columns": Bad(
        "sequence",
        sparse([[0, 0], [2, 1], [2, 0]], [1, 2, 3], [3, 2]),
        InvalidArgument,
        ("row-major order", "[2 0] follows [2 1]"),
    ),
    "duplicate_indices": Bad(
        "bag",
        sparse([[0, 0], [2, 1], [2, 1]], [1, 2, 3], [3, 2]),
        InvalidArgument,
        ("unique indices", "[2 1] follows [2 1]"),
    ),
    "row_outside_dense_shape": Bad(
        "bag",
        sparse([[0, 0], [3, 1]], [1, 2], [3, 2]),
        InvalidArgument,
        ("index [3 1] outside their dense shape [3 2]",),
    ),
    "column_outside_dense_shape": Bad(
        "bag",
        sparse([[0, 0], [1, 2]], [1, 2], [3, 2]),
        InvalidArgument,
        ("index [1 2] outside their dense shape [3 2]",),
    ),
    "negative_row": Bad(
        "sequence",
        sparse([[-1, 0], [1, 1]], [1, 2], [3, 2]),
        InvalidArgument,
        ("index [-1 0] outside their dense shape [3 2]",),
    ),
    # Weights of another kind.
    "ragged_weights_of_dense_ids": Bad(
        "dense",
        DENSE,
        TypeError,
        ("weights must be a Tensor like the ids, got RaggedTensor",),
        ragged([[1.0], [1.0], [1.0]], tf.float32),
    ),
    "dense_weights_of_ragged_ids": Bad(
        "bag",
        BAG,
        TypeError,
        ("weights must be a RaggedTensor like the ids, got",),
        tf.ones([3]),
    ),
    "sparse_weights_of_ragged_ids": Bad(
        "bag",
        BAG,
        TypeError,
        ("weights must be a RaggedTensor like the ids, got SparseTensor",),
        sparse([[0, 0]], [1.0], [3, 2], tf.float32),
    ),
    "ragged_weights_of_sparse_ids": Bad(
        "bag",
        COO,
        TypeError,
        ("weights must be a SparseTensor like the ids, got RaggedTensor",),
        ragged([[1.0, 1.0], [], [1.0]], tf.float32),
    ),
    "string_weights": Bad(
        "dense",
        DENSE,
        TypeError,
        ("weights must be numbers, got string",),
        tf.constant(["a", "b", "c"]),
    ),
    "bool_weights": Bad(
        "bag",
        BAG,
        TypeError,
        ("weights must be numbers, got bool",),
        BAG.with_values(tf.constant([True, False, True])),
    ),
    "complex_weights": Bad(
        "dense",
        DENSE,
        TypeError,
        ("weights must be numbers, got complex64",),
        tf.constant([1, 2, 3], tf.complex64),
    ),
    # Weights of another shape, row splits or indices.
    "too_few_weights": Bad(
        "dense",
        DENSE,
        ValueError,
        ("weights", "shape", "2", "3"),
        tf.ones([2]),
    ),
    "weights_that_would_broadcast": Bad(
        "grid", GRID, ValueError, ("weights", "1", "2"), tf.ones([3, 1])
    ),
    "weights_of_another_rank": Bad(
        "grid", GRID, ValueError, ("weights have the shape (",), tf.ones([6])
    ),
    "other_row_splits": Bad(
        "bag",
        BAG,
        InvalidArgument,
        ("row splits of the weights [0 1 2 3]", "ids [0 2 2 3]"),
        ragged([[1.0], [1.0], [1.0]], tf.float32),
    ),
    "other_number_of_rows": Bad(
        "bag",
        BAG,
        InvalidArgument,
        ("row splits of the weights [0 2 3]", "ids [0 2 2 3]"),
        ragged([[1.0, 1.0], [1.0]], tf.float32),
    ),
    "fewer_ragged_weights_in_a_sequence": Bad(
        "sequence",
        ragged([[5, 0], [1], [2, 3]]),
        InvalidArgument,
        ("row splits of the weights [0 1 2 3]", "ids [0 2 3 5]"),
        ragged([[1.0], [1.0], [1.0]], tf.float32),
    ),
    "no_ragged_weights_in_a_sequence": Bad(
        "sequence",
        ragged([[5, 0], [1], [2, 3]]),
        InvalidArgument,
        ("row splits of the weights [0 0 0 0]", "ids [0 2 3 5]"),
        ragged([[], [], []], tf.float32),
    ),
    "ragged_weights_of_rank_3": Bad(
        "bag",
        BAG,
        ValueError,
        ("ragged weights must have rank 2", "got shape ("),
        ragged([[[1.0], [1.0]], [], [[1.0]]], tf.float32),
    ),
    "other_indices": Bad(
        "bag",
        COO,
        InvalidArgument,
        ("indices of the weights", "[2 1]", "indices of the ids", "[2 0]"),
        sparse([[0, 0], [0, 1], [2, 1]], [1.0, 1.0, 1.0], [3, 2], tf.float32),
    ),
    "fewer_indices": Bad(
        "bag",
        COO,
        InvalidArgument,
        ("indices of the weights", "indices of the ids", "[2 0]"),
        sparse([[0, 0], [0, 1]], [1.0, 1.0], [3, 2], tf.float32),
    ),
    "fewer_indices_in_a_sequence": Bad(
        "sequence",
        COO,
        InvalidArgument,
        ("indices of the weights", "indices of the ids", "[2 0]"),
        sparse([[0, 0]], [1.0], [3, 2], tf.float32),
    ),
    "other_dense_shape": Bad(
        "bag",
        COO,
        InvalidArgument,
        ("dense shape", "[4 2]", "[3 2]"),
        tf.SparseTensor(COO.indices, tf.ones([3]), [4, 2]),
    ),
}
TABLES = {
    "dense": "user",
    "grid": "user",
    "bag": "movie",
    "rows": "movie",
    "sequence": "movie",
}


@BOTH_ROUTES
@BOTH_MODES
def test_a_good_step_changes_all_that_a_bad_one_must_not(threshold, graph):
    trainer = make_trainer(threshold)
    before = state(trainer.layer)
    trainer.run(graph, GOOD)
    after = state(trainer.layer)
    assert len(after) == (2 if threshold is None else 7)
    for name, value in before.items():
        assert not np.array_equal(after[name], value), name


def out_of_turn(name, threshold, graph):
    """Whether a feature's turn is on this route in the other mode.

    By day each is eager on one route, and in a function on the other one.
    """
    on_engine = threshold == 0
    return (list(BAD).index(name) % 2 == 0) != (on_engine == graph)


@on(
    "keras:3",
    tier="more",
    when=lambda threshold, graph: threshold is None and graph,
)
@nightly(out_of_turn)
@BOTH_ROUTES
@BOTH_MODES
@pytest.mark.parametrize("name", BAD)
def test_one_bad_feature_is_an_error_and_changes_nothing(
    name, threshold, graph
):
    bad, trainer = BAD[name], make_trainer(threshold)
    before = state(trainer.layer)
    # A shape that tracing doesn't know is checked by the running graph.
    errors = (bad.error, InvalidArgument) if graph else bad.error
    with pytest.raises(errors) as caught:
        trainer.run(
            graph,
            {**GOOD, bad.feature: bad.ids},
            bad.weights if bad.weights is None else weights_with(bad),
        )
    message = str(caught.value).replace("\\", "")
    where = f"Feature '{bad.feature}' (table '{TABLES[bad.feature]}')"
    for part in (where, *bad.says):
        assert part in message
    assert_unchanged(trainer.layer, before)


def weights_with(bad):
    """Weights that are bad for one feature, and left out for the others."""
    return {**dict.fromkeys(GOOD), bad.feature: bad.weights}


@BOTH_ROUTES
@BOTH_MODES
@pytest.mark.parametrize(
    "ids",
    [
        tf.ones([2], tf.int32),
        tf.ones([2, 2], tf.int32),
        ragged([[1], [2, 3]]),
        sparse([[1, 0]], [1], [2, 2]),
    ],
    ids=["dense", "matrix", "ragged", "sparse"],
)
@pytest.mark.parametrize("length", [0, 2], ids=["combined", "sequence"])
def test_the_batch_that_an_output_shape_demands_is_not_taken_for_granted(
    length, ids, threshold, graph
):
    # What comes after a lookup may need that shape; its being there must not
    # let TensorFlow optimise the check away.
    table = tpu.TableConfig(10, 2, name="user")
    shape = [3, length] if length else [3]
    layer = layers.PartialTPUEmbedding(
        tpu.FeatureConfig(table, output_shape=shape, name="id"),
        "sgd",
        size_threshold=threshold,
    )
    layer.build(None)

    def call(ids):
        return tf.ensure_shape(layer(ids), [*shape, 2])

    if graph:
        call = tf.function(call, input_signature=[unknown(ids)])
    where = r"Feature .{1,2}id.{1,2} \(table .{1,2}user.{1,2}\): "
    with pytest.raises((ValueError, InvalidArgument), match=where):
        call(ids)


@BOTH_MODES
@pytest.mark.parametrize("feature", ["dense", "bag"])
def test_a_bad_feature_of_one_route_changes_nothing_on_the_other(
    feature, graph
):
    # The table "user" is large, "movie" is not.
    trainer = make_trainer(8)
    assert trainer.layer.placement.tables[0].engine == "one device"
    assert trainer.layer.placement.tables[1].engine == "Keras"
    before = state(trainer.layer)
    bad = tf.fill([3], 10) if feature == "dense" else ragged([[10], [], []])
    with pytest.raises(InvalidArgument, match=rf"'{feature}\\?'.* id 10 "):
        trainer.run(graph, {**GOOD, feature: bad})
    assert_unchanged(trainer.layer, before)


@BOTH_MODES
def test_training_goes_on_after_a_bad_step(graph):
    table = tpu.TableConfig(3, 1, tf.zeros_initializer(), name="t")
    layer = layers.PartialTPUEmbedding(
        {"f": tpu.FeatureConfig(table)}, tpu.SGD(1.0), size_threshold=0
    )
    layer.build(None)
    step = Trainer(layer).train
    step = tf.function(step, reduce_retracing=True) if graph else step
    step({"f": tf.constant([0, 1])})
    with pytest.raises(InvalidArgument, match="id 3 "):
        step({"f": tf.constant([0, 3])})
    step({"f": tf.constant([0, 2])})
    np.testing.assert_array_equal(
        layer.embedding_tables["t"], [[-2.0], [-1.0], [-1.0]]
    )


# Dtypes of ids.

#: The rows whose numbers a dtype holds, all of them.
FLOATS = {
    tf.bfloat16: 2**8,
    tf.float16: 2**11,
    tf.float32: 2**24,
    tf.float64: 2**53,
}

INTEGERS = {
    d.name: d
    for d in (
        tf.int8,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.uint8,
        tf.uint16,
        tf.uint32,
        tf.uint64,
    )
}


@functools.cache
def counting_lookup(threshold, graph, rows):
    """A function of ids to the activations of a table whose row i is [i]."""
    values = keras.initializers.Constant(np.arange(rows)[:, None])
    table = tfrs_embed.TableConfig("user", rows, 1, values)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("id", table), "sgd", size_threshold=threshold
    )
    layer.build(None)
    return tf.function(layer) if graph else layer


@BOTH_ROUTES
@BOTH_MODES
@pytest.mark.parametrize("dtype", [*INTEGERS, "half", "float32", "float64"])
def test_ids_of_any_dtype_that_holds_them_are_looked_up(
    dtype, threshold, graph
):
    dtype = tf.as_dtype(dtype)
    # More rows than an 8-bit id can name.
    lookup = counting_lookup(threshold, graph, 300)
    ids = [0, 127, int(min(299, dtype.max))]
    outputs = lookup(tf.constant(ids, dtype))
    np.testing.assert_array_equal(outputs[:, 0], ids)
    bags = lookup(tf.ragged.constant([ids, []], dtype))
    np.testing.assert_allclose(bags[:, 0], [np.mean(ids), 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_ids_of_tables_whose_every_row_they_hold(dtype):
    def parse(rows, hashing=None):
        table = configs.TableSpec("t", rows, 1)
        feature = configs.FeatureSpec("f", table, hashing=hashing)
        ids = tf.constant([255], dtype)
        return to_bags(CallInputs([feature], [ids], [None]))[0].ids

    rows = FLOATS[dtype]
    np.testing.assert_array_equal(parse(rows), [255])
    text = (
        f"^Feature 'f' .*got {dtype.name}.*up to {rows} rows.* has {rows + 1}"
    )
    with pytest.raises(TypeError, match=text + ".*dtype='int64'"):
        parse(rows + 1)
    with pytest.raises(TypeError, match=f"strings, got {dtype.name}"):
        parse(rows, tfrs_embed.Hash())


@pytest.mark.parametrize("value", [0.5, np.nan])
def test_a_float_that_is_no_integer_is_not_absent(value):
    table = tfrs_embed.TableConfig("t", 9, 2)
    feature = tfrs_embed.FeatureConfig("f", table)
    layer = layers.PartialTPUEmbedding(feature, "sgd", invalid_ids="zero")
    absent = layer(tf.constant([-1.0, 9.0]))
    np.testing.assert_array_equal(absent, np.zeros([2, 2]))
    with pytest.raises(InvalidArgument, match=f"id {value} is not an integer"):
        layer(tf.constant([value]))


@BOTH_ROUTES
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("weight", [1e-36, 1e-23, 1e26, 1e36])
def test_small_and_large_weights_are_as_good_as_others(
    weight, combiner, threshold
):
    start = keras.initializers.Constant(np.arange(20.0).reshape(10, 2))
    table = tfrs_embed.TableConfig("t", 10, 2, start, combiner=combiner)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table), "sgd", size_threshold=threshold
    )
    weights = np.array([1.0, 3.0])
    norm = weights.sum() if combiner == "mean" else np.linalg.norm(weights)
    expected = weights @ np.arange(20.0).reshape(10, 2)[[2, 7]] / norm
    given = tf.RaggedTensor.from_row_lengths(weight * weights, [2])
    found = layer(ragged([[2, 7]]), given)
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


def rows_of(keys=None):
    """Layers of the feature "id", whose table's row i is [i] without keys."""
    values = keras.initializers.Constant(np.arange(50)[:, None])
    given = {} if keys is None else {"keys": tfrs_embed.DynamicKeys(dtype=keys)}
    start = values if keys is None else "uniform"
    table = tfrs_embed.TableConfig("user", 50, 1, start, **given)
    features = {"id": tfrs_embed.FeatureConfig("id", table)}
    yield layers.PartialTPUEmbedding(features, "sgd")
    yield layers.PartialTPUEmbedding(features, "sgd", size_threshold=0)
    yield layers.DistributedEmbedding(features)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pd.Series([5, 1], dtype="Int64"), [5, 1]),
        (pd.Series([5, 1], dtype="category"), [5, 1]),
        (pd.Series([[5, 2], [1]]), [3.5, 1]),
        (np.array([5, 1], object), [5, 1]),
        ([[5, 2], [1]], [3.5, 1]),
        ([np.array([5, 2], object), [1]], [3.5, 1]),
    ],
    ids=["series", "categories", "of lists", "objects", "lists", "arrays"],
)
def test_ids_of_pandas_and_of_lists_are_looked_up(ids, expected):
    for layer in rows_of():
        found = layer({"id": ids})["id"]
        np.testing.assert_allclose(found, np.array(expected)[:, None])
        found = layer(layer.to_tensors({"id": ids}))["id"]
        np.testing.assert_allclose(found, np.array(expected)[:, None])
    weights = {"id": pd.Series([2.0, 0.5])}
    if isinstance(ids, pd.Series) and expected[0] == 5:
        found = layer({"id": [[5], [1]]}, {"id": [[2.0], [0.5]]})["id"]
        weighted = layer({"id": ids}, weights=weights)["id"]
        np.testing.assert_array_equal(weighted, found)


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        (tf.string, pd.Series(["a", "b"])),
        (tf.string, pd.Series(["a", "b"], dtype="category")),
        (tf.uint64, [2**63, 1]),
        (tf.int32, pd.Series([5, 1], dtype="int32")),
    ],
    ids=["strings", "categories", "uint64", "int32"],
)
def test_keys_of_pandas_and_of_lists_have_their_tables_dtype(keys, ids):
    values = list(ids)
    for layer in [*rows_of(keys)][1:]:
        expected = layer({"id": tf.constant(values, keys)})["id"]
        np.testing.assert_array_equal(layer({"id": ids})["id"], expected)


def test_numbers_in_place_of_strings_are_an_error_with_the_conversion():
    for layer in rows_of(tf.string):
        with pytest.raises(TypeError, match=r"'id'.*got int64.*astype\(str\)"):
            layer({"id": pd.Series([5, 1])})


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (pd.Series([5, None]), r"1 missing values.*position \[1\].*fillna"),
        (pd.Series(["a", None]), r"1 missing values.*fillna\(''\)"),
        (pd.Series([[5], None]), r"1 missing values.*\[\] for a list"),
        (pd.Series([[5, None]]), "neither all numbers.*NoneType, int"),
        (pd.DataFrame({"a": [5, 1], "b": [2, None]}), r"position \[1, 1\]"),
        (pd.to_datetime(pd.Series(["2026-11-29"])), "dates.*dt.day_of_week"),
        (np.array(["2026-11-29"], "datetime64[D]"), "dates.*dt.day_of_week"),
        (pd.Series(["a"]), r"got string.*hashing=.*DynamicKeys\(dtype='str"),
        (pd.Series([True]), r"got bool. Cast them"),
        (np.array([np.nan, 1.0]), r"1 missing values.*position \[0\].*fillna"),
        (np.array([5, "a"], object), "neither all numbers nor all strings"),
        ([5, None], "neither all numbers nor all strings"),
        ([[[5]], [[1], [2, 3]]], "must be a Tensor.*list of rows"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ids_that_have_no_meaning_are_errors_of_their_feature(ids, text):
    for layer in rows_of():
        with pytest.raises(TypeError, match=f"(?s)Feature 'id'.*{text}"):
            layer({"id": ids})


def test_a_frame_in_place_of_a_dict_is_an_error_with_the_dict():
    [layer, *_] = rows_of()
    frame = pd.DataFrame({"id": [5, 1], "rating": [1.0, 2.0]})
    with pytest.raises(TypeError, match=r"keys \['id'\].* DataFrame: dict\("):
        layer(frame)
    with pytest.raises(ValueError, match=r"unknown keys \['rating'\]"):
        layer.to_tensors(dict(frame))
    np.testing.assert_array_equal(layer(dict(frame[["id"]]))["id"], [[5], [1]])


def test_fit_takes_columns_that_are_converted():
    frame = pd.DataFrame({"id": [[5, 2], [1], []], "rating": [1.0, 2.0, 3.0]})
    [layer, *_] = rows_of()
    inputs = layer.keras_inputs(ragged=["id"])
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["id"]))
    model.compile("sgd", "mse")
    ids = layer.to_tensors(dict(frame[["id"]]))
    with pytest.raises(ValueError, match=r"list|object"):
        model.fit(dict(frame[["id"]]), frame["rating"])
    data = tf.data.Dataset.from_tensors((ids, frame["rating"].to_numpy()))
    model.fit(data, verbose=0)


@BOTH_ROUTES
@BOTH_MODES
@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_largest_id_of_any_dtype_is_an_error_that_shows_it(
    dtype, threshold, graph
):
    dtype = INTEGERS[dtype]
    lookup = counting_lookup(threshold, graph, 10)
    with pytest.raises(InvalidArgument, match=f" id {dtype.max} .*0 to 9"):
        lookup(tf.constant([1, dtype.max], dtype))


@BOTH_ROUTES
@BOTH_MODES
@pytest.mark.parametrize("rows", [10, 300])
@pytest.mark.parametrize(
    "dtype", [name for name, dtype in INTEGERS.items() if dtype.min < 0]
)
def test_the_smallest_id_of_any_signed_dtype_is_an_error_that_shows_it(
    dtype, rows, threshold, graph
):
    dtype = INTEGERS[dtype]
    lookup = counting_lookup(threshold, graph, rows)
    with pytest.raises(InvalidArgument, match=f" id {dtype.min} .*{rows - 1}"):
        lookup(tf.constant([1, dtype.min], dtype))


@pytest.mark.parametrize("value", [2**63, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("rows", [10, 2**40])
def test_an_unsigned_id_of_64_bits_never_wraps_around(value, rows):
    with pytest.raises(InvalidArgument, match=f" id {value} .* {rows - 1}"):
        bags_of(rows, tf.constant([1, value], tf.uint64))


def bags_of(rows, ids, invalid_ids="error"):
    """The bags of a feature whose table would be too large to make."""
    table = tfrs_embed.TableConfig("user", rows, 1)
    spec = parse(tfrs_embed.FeatureConfig("id", table))
    [bags] = to_bags(CallInputs(spec.features, [ids], [None], invalid_ids))
    return bags


def test_rows_beyond_32_bits_have_ids_of_64():
    ids = tf.constant([0, 2**31, 2**40 - 1], tf.int64)
    bags = bags_of(2**40, ids)
    np.testing.assert_array_equal(bags.ids, ids)
    with pytest.raises(InvalidArgument, match=f" id {2**40} "):
        bags_of(2**40, tf.constant([0, 2**40], tf.int64))


@pytest.mark.parametrize("dtype", [tf.int32, tf.uint32])
def test_a_table_may_have_more_rows_than_the_ids_dtype_can_name(dtype):
    bags = bags_of(2**40, tf.constant([0, dtype.max], dtype))
    assert bags.ids.dtype == tf.int64
    np.testing.assert_array_equal(bags.ids, [0, dtype.max])


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_a_table_of_as_many_rows_as_the_ids_dtypes_largest_has_no_such_row(
    dtype,
):
    ids = tf.constant([0, dtype.max - 1, dtype.max], dtype)
    np.testing.assert_array_equal(bags_of(dtype.max, ids[:2]).ids, ids[:2])
    with pytest.raises(InvalidArgument, match=f" id {dtype.max} "):
        bags_of(dtype.max, ids)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_invalid_ids_of_any_dtype_can_count_as_absent(dtype):
    dtype = INTEGERS[dtype]
    ids = tf.constant([1, dtype.max, dtype.min, 9], dtype)
    bags = bags_of(10, ids, invalid_ids="zero")
    valid = [i for i in (1, dtype.max, dtype.min, 9) if 0 <= i < 10]
    np.testing.assert_array_equal(bags.ids, valid)


# Strategies.


def one_device():
    return tf.distribute.OneDeviceStrategy("/cpu:0")


def simple_layer(threshold):
    table = tpu.TableConfig(10, 2, name="user")
    return layers.PartialTPUEmbedding(
        {"id": tpu.FeatureConfig(table)},
        "adam",
        size_threshold=threshold,
        name="embeddings",
    )


@BOTH_ROUTES
@pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize("run", [False, True], ids=["scope", "run"])
def test_a_layer_is_not_called_under_a_strategy_it_was_not_made_under(
    threshold, built, run
):
    layer, strategy = simple_layer(threshold), one_device()
    if built:
        layer.build(None)
    inputs = {"id": tf.constant([1])}
    message = "'embeddings' was made under .*Default.* OneDeviceStrategy"
    with strategy.scope(), pytest.raises(RuntimeError, match=message):
        if run:
            strategy.run(layer, args=(inputs,))
        else:
            layer(inputs)


@BOTH_ROUTES
def test_a_layer_is_not_called_under_another_strategy_of_the_same_kind(
    threshold,
):
    first, second = one_device(), one_device()
    with first.scope():
        layer = simple_layer(threshold)
        layer.build(None)
        # With the optimizer's variables on the strategy's device.
        trainer = Trainer(layer)
    before = state(layer)
    inputs = {"id": tf.constant([1])}
    with (
        second.scope(),
        pytest.raises(RuntimeError, match="'embeddings' was made under"),
    ):
        second.run(trainer.train, args=(inputs,))
    assert_unchanged(layer, before)
    with first.scope():
        first.run(trainer.train, args=(inputs,))
    assert not np.array_equal(
        before["user/parameters"], layer.embedding_tables["user"]
    )


@BOTH_ROUTES
def test_a_vectorized_map_is_told_to_call_the_layer_once(threshold):
    table = tfrs_embed.TableConfig("table", 10, 2)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("feature", table),
        "sgd",
        size_threshold=threshold,
    )
    ids = tf.constant([[1, 2], [3, 4]])
    expected = layer(ids)
    with pytest.raises(NotImplementedError, match="once with all ids"):
        tf.vectorized_map(layer, ids)
    mapped = tf.map_fn(layer, ids, fn_output_signature=tf.float32)
    np.testing.assert_array_equal(mapped, expected)


# More bytes than an allocator can be asked for: it refuses them at once.
HUGE = 2**60


def huge(kind):
    good, bad = (
        tfrs_embed.TableConfig(name, rows, 4)
        for name, rows in (("good", 10), ("bad", HUGE))
    )
    features = [tfrs_embed.FeatureConfig(t.name, t) for t in (good, bad)]
    return {
        "partial": lambda: layers.PartialTPUEmbedding(
            features, "adagrad", size_threshold=0
        ),
        "keyed": lambda: layers.All2AllDenseEmbedding(HUGE, 4, 1, 1),
        "plain": lambda: layers.Embedding(HUGE, 4, name="bad"),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "owner", "rows", "slots"),
    [
        (
            "partial",
            "Table 'bad'",
            HUGE,
            ", and 16777216.0 TiB for the optimizer's slots",
        ),
        (
            "keyed",
            "Table 'table'",
            # A part of 32 is spare, and two rows are no key's.
            HUGE + HUGE // 32 + 2,
            ", and 17301504.0 TiB for the optimizer's slots",
        ),
        ("plain", "Layer 'bad'", HUGE, ""),
    ],
)
def test_a_table_that_memory_lacks_for_is_named(kind, owner, rows, slots):
    layer = huge(kind)
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        layer.build(None)
    device = "GPU" if ON_GPU else "CPU"
    assert str(caught.value).startswith(
        f"{owner} can't be built: /job:localhost/replica:0/task:0/device:"
        f"{device}:0 lacks memory. {rows:,} rows of 4 float32 take "
        f"{rows / 2**36:.1f} TiB{slots}. "
    )
    assert "OOM when allocating" in str(caught.value.__cause__)
    assert not layer.built


def test_a_keras_table_larger_than_all_memory_is_refused_at_once():
    # Its rows would be made, and kept, block by block before they are joined.
    table = tfrs_embed.TableConfig("bad", 2**56, 4)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("bad", table), "adagrad", size_threshold=None
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match="lacks memory"):
        layer.build(None)


def test_a_layer_that_memory_lacked_for_can_be_built_again():
    tries = []

    def initializer(shape, dtype=None):
        tries.append(shape)
        if len(tries) == 1:
            raise MemoryError("no memory now")
        return tf.ones(shape, dtype)

    table = tfrs_embed.TableConfig("t", 10, 4, initializer=initializer)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("t", table), "adagrad", size_threshold=0
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match="Table 't'"):
        layer.build(None)
    layer.build(None)
    np.testing.assert_array_equal(layer(tf.constant([3])), np.ones([1, 4]))


@pytest.mark.parametrize(
    "slot", ["text", "score", "last_used", "fallback_sums", "learning_rate"]
)
def test_a_slot_with_the_name_of_another_part_is_refused(monkeypatch, slot):
    monkeypatch.setattr(rules.SGD, "slots", lambda self: {slot: Slot(0.0)})
    keys = tfrs_embed.DynamicKeys()
    table = tfrs_embed.TableConfig("bad", 8, 4, keys=keys)
    feature = tfrs_embed.FeatureConfig("f", table)
    with pytest.raises(ValueError, match=f"'bad': .* has a slot '{slot}', and"):
        layers.PartialTPUEmbedding(feature, "sgd").build(None)


@pytest.mark.parametrize("argument", ["batch_size", "implementation", "rows"])
def test_a_layer_takes_no_unknown_argument(argument):
    feature = tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 8, 4))
    made = {
        layers.All2AllDenseEmbedding: (8, 4, 1, 1),
        layers.DistributedEmbedding: (feature,),
        layers.DynamicEmbedding: (4,),
        layers.Embedding: (8, 4),
        layers.PartialTPUEmbedding: (feature, "sgd"),
    }
    if argument == "batch_size":  # PartialTPUEmbedding has one.
        del made[layers.PartialTPUEmbedding]
    for kind, arguments in made.items():
        # tf_keras raises a TypeError, Keras 3 a ValueError.
        with pytest.raises((TypeError, ValueError), match=argument):
            kind(*arguments, **{argument: 3})
