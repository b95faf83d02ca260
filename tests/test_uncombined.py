"""Features whose ids are not combined: ragged ids give ragged vectors."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from hashing_reference import HASHINGS
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed import DynamicKeys, FeatureConfig, FileStorage, TableConfig
from training_helpers import (
    assert_unchanged,
    differentiate,
    state,
    tables_of,
    train,
)

pytestmark = on("keras:3", tier="nightly")

ROWS, DIM = 40, 4
HISTORY = [[3, 7, 3], [], [0], [39, 3]]
FLAT = [3, 7, 3, 0, 39, 3]
LENGTHS = [3, 0, 1, 2]


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype, ragged_rank=1)


def make_table(name="movies", **options):
    start = keras.initializers.RandomUniform(seed=1)
    return TableConfig(name, ROWS, DIM, start, **options)


def make_layer(kind="engine", table=None, invalid_ids="error", **options):
    """A layer of the feature "history", whose ids are not combined."""
    table = table or make_table()
    feature = FeatureConfig("history", table, combiner=None, **options)
    features = {"history": feature}
    settings = {"optimizer": "sgd", "invalid_ids": invalid_ids}
    if kind == "distributed":
        return layers.DistributedEmbedding(features, **settings)
    threshold = 0 if kind == "engine" else None
    return layers.PartialTPUEmbedding(
        features, size_threshold=threshold, **settings
    )


KINDS = pytest.mark.parametrize("kind", ["engine", "keras", "distributed"])
BOTH_MODES = pytest.mark.parametrize("graph", [False, True])


def look_up(layer, ids, graph=False, **options):
    function = tf.function(layer) if graph else layer
    if "weights" in options:
        options["weights"] = {"history": options["weights"]}
    return function({"history": ids}, **options)["history"]


# Lookups.


@KINDS
@BOTH_MODES
@pytest.mark.parametrize("form", ["ragged", "int32", "sparse"])
def test_each_id_of_a_row_has_its_vector(kind, graph, form):
    layer, ids = make_layer(kind), ragged(HISTORY)
    if form == "int32":
        ids = ids.with_row_splits_dtype(tf.int32)
    given = ids.to_sparse() if form == "sparse" else ids
    found = look_up(layer, given, graph)
    assert isinstance(found, tf.RaggedTensor)
    assert found.shape.as_list() == [4, None, DIM]
    assert found.row_splits.dtype == ids.row_splits.dtype
    np.testing.assert_array_equal(found.row_lengths(), LENGTHS)
    np.testing.assert_array_equal(
        found.values, tables_of(layer)["movies"][FLAT]
    )


@KINDS
def test_sparse_rows_have_no_gaps(kind):
    layer = make_layer(kind)
    ids = tf.SparseTensor([[0, 2], [0, 5], [2, 1]], [3, 7, 9], [4, 6])
    found = look_up(layer, ids, graph=True)
    np.testing.assert_array_equal(found.row_lengths(), [2, 0, 1, 0])
    np.testing.assert_array_equal(
        found.values, tables_of(layer)["movies"][[3, 7, 9]]
    )


@KINDS
@BOTH_MODES
def test_dense_ids_give_dense_vectors(kind, graph):
    layer = make_layer(kind)
    for ids in (np.array([[3, 7], [0, 3]]), np.array([3, 7])):
        found = look_up(layer, tf.constant(ids), graph)
        np.testing.assert_array_equal(found, tables_of(layer)["movies"][ids])


@pytest.mark.parametrize("dtype", [tf.int64, tf.string])
def test_a_layer_of_keys(dtype):
    def as_keys(rows):
        if dtype == tf.string:
            rows = [[str(key) for key in row] for row in rows]
        return ragged(rows, dtype)

    made = layers.DynamicEmbedding(
        DIM, input_dim=10, key_dtype=dtype, combiner=None, optimizer="sgd"
    )
    layer = type(made).from_config(made.get_config())
    ids = as_keys(HISTORY)
    with tf.GradientTape() as tape:
        before = layer(ids, training=True)
        loss = tf.reduce_sum(before.values)
    differentiate(tape, loss, layer.trainable_variables)
    assert before.shape.as_list() == [4, None, DIM]
    np.testing.assert_array_equal(before.row_lengths(), LENGTHS)
    counts = np.array([FLAT.count(key) for key in FLAT])[:, None]
    np.testing.assert_allclose(
        layer(ids).values, before.values - 0.01 * counts, rtol=1e-5
    )


@nightly(lambda graph, rows: graph and not rows)
@KINDS
@BOTH_MODES
@pytest.mark.parametrize("rows", [[], [[], []]])
def test_batches_without_ids(kind, graph, rows):
    layer = make_layer(kind)
    ids = tf.RaggedTensor.from_row_lengths(
        tf.zeros([0], tf.int64), tf.zeros([len(rows)], tf.int64)
    )
    for given in (ids, ids.to_sparse()):
        found = look_up(layer, given, graph)
        assert found.nrows() == len(rows)
        assert found.values.shape == (0, DIM)
        train(
            layer, {"history": ids}, {"history": ids.with_values(found.values)}
        )


@KINDS
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_weights_multiply_vectors_whatever_the_combiner(kind, combiner):
    layer = make_layer(kind, make_table(combiner=combiner))
    ids, weights = ragged(HISTORY), [0.5, 2.0, -1.0, 0.0, 3.0, 1.0]
    found = look_up(layer, ids, weights=ids.with_values(weights))
    expected = tables_of(layer)["movies"][FLAT] * np.array(weights)[:, None]
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)


@nightly(
    lambda threshold, combiner, graph: (
        graph and (threshold is None) == (combiner == "mean")
    )
)
@pytest.mark.parametrize("threshold", [0, None])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("graph", [False, True])
def test_weights_multiply_vectors_of_dense_ids_and_sequences(
    threshold, combiner, graph
):
    table = TableConfig("t", 4, 2, combiner=combiner)
    wide = {"max_sequence_length": 4}
    options = {"a": {}, "b": wide, "c": wide, "d": {"output_shape": (1, 3, 2)}}
    layer = layers.PartialTPUEmbedding(
        {name: FeatureConfig(name, table, **o) for name, o in options.items()},
        "sgd",
        size_threshold=threshold,
    )
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    layer.load_tables({"t": rows})
    ids, weights = [[1, 2, 0]], [[10.0, 100.0, 0.5]]
    expected = rows[ids] * np.array(weights)[..., None]
    call = tf.function(layer) if graph else layer
    found = call(
        {
            name: tf.ragged.constant(ids) if name == "c" else tf.constant(ids)
            for name in options
        },
        {
            name: tf.ragged.constant(weights)
            if name == "c"
            else tf.constant(weights)
            for name in options
        },
    )
    for name, vectors in found.items():
        np.testing.assert_allclose(vectors[:, :3], expected, err_msg=name)


@pytest.mark.parametrize("width", [None, 1])
def test_a_mean_of_one_id_has_no_weight_where_samples_are_combined(width):
    # As in keras_rs.
    table = TableConfig("t", 4, 2)
    layer = layers.DistributedEmbedding(FeatureConfig("f", table))
    ids, weights = tf.constant([1, 2]), tf.constant([10.0, -3.0])
    if width:
        ids, weights = ids[:, None], weights[:, None]
    rows = tables_of(layer)["t"]
    np.testing.assert_allclose(layer(ids, weights), rows[[1, 2]], rtol=1e-6)


@KINDS
def test_absent_ids_have_zeros(kind):
    layer = make_layer(kind, invalid_ids="zero")
    found = look_up(layer, ragged([[3, -1], [40]]), graph=True)
    expected = tables_of(layer)["movies"][[3, 0, 0]] * [[1], [0], [0]]
    np.testing.assert_array_equal(found.row_lengths(), [2, 1])
    np.testing.assert_array_equal(found.values, expected)


def test_lists_of_rows_are_ragged_even_of_one_length():
    layer = make_layer("distributed")
    for rows in ([[3, 7], [0, 3]], [[3, 7], [0]], [np.array([3]), [7]], []):
        found = layer({"history": rows})["history"]
        assert isinstance(found, tf.RaggedTensor)
        np.testing.assert_array_equal(found.row_lengths(), [*map(len, rows)])
    assert layer({"history": [3, 7]})["history"].shape == (2, DIM)


def test_preprocessed_and_partial_inputs():
    table = make_table()
    layer = layers.DistributedEmbedding(
        {
            "history": FeatureConfig(
                "history", table, input_shape=(4, 3), combiner=None
            ),
            "movie": FeatureConfig("movie", table),
        }
    )
    given = {"history": HISTORY}
    inputs = layer.preprocess(given, partial=True)
    found = layer(inputs, partial=True)
    assert list(found) == ["history"]
    np.testing.assert_array_equal(found["history"].row_lengths(), LENGTHS)
    with pytest.raises(ValueError, match=r"'history'.*input_shape"):
        layer({"history": np.zeros([4, 9], int)}, partial=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="input_shape"):
        layer({"history": [[1, 2, 3, 4]]}, partial=True)


# Other tables.


@pytest.mark.parametrize("kind", ["engine", "distributed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_two_bytes(kind, dtype):
    layer = make_layer(kind, make_table(dtype=dtype))
    found = look_up(layer, ragged(HISTORY), graph=True)
    rows = tf.cast(layer.embedding_tables["movies"], tf.float32)
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found.values, tf.gather(rows, FLAT))


def test_rows_in_files(tmp_path, needs_kernels):
    layer = make_layer(table=make_table(storage=FileStorage(tmp_path)))
    before = tables_of(layer)["movies"]
    ids = ragged(HISTORY)
    train(
        layer, {"history": ids}, {"history": ids.with_values(tf.ones([6, 4]))}
    )
    counts = np.bincount(FLAT, minlength=ROWS)[:, None]
    np.testing.assert_allclose(
        tables_of(layer)["movies"], before - 0.01 * counts, rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("kind", ["engine", "distributed"])
def test_keys_of_strings(kind):
    keys = DynamicKeys(tf.string, eviction=None)
    layer = make_layer(kind, make_table(keys=keys))
    ids = ragged([["a", "b", "a"], [], ["c"]], tf.string)
    with tf.GradientTape() as tape:
        found = look_up(layer, ids, training=True)
        loss = tf.reduce_sum(found)
    differentiate(tape, loss, layer.trainable_variables)
    np.testing.assert_array_equal(found.row_lengths(), [3, 0, 1])
    a, b, again, _ = look_up(layer, ids, graph=True).values
    np.testing.assert_array_equal(a, again)
    np.testing.assert_allclose(found.values[0] - a, [0.02] * DIM, rtol=1e-4)
    np.testing.assert_allclose(found.values[1] - b, [0.01] * DIM, rtol=1e-4)
    assert layer.tables["movies"].size == 3
    unknown = look_up(layer, ragged([["d"]], tf.string), training=False)
    np.testing.assert_array_equal(unknown.values, np.zeros([1, DIM]))


@pytest.mark.parametrize("name", HASHINGS)
@pytest.mark.parametrize("weighted", [False, True])
def test_hashed_ids_have_the_vectors_of_dense_ones(name, weighted):
    hashing = HASHINGS[name]
    layer = make_layer(hashing=hashing)
    flat = tf.constant([3, 7, 3, 0, 12], tf.int64)
    ids = tf.RaggedTensor.from_row_lengths(flat, [3, 0, 2])
    weights = tf.constant([1.0, 2.0, -1.0, 0.5, 3.0]) if weighted else None
    spread = None if weights is None else ids.with_values(weights)
    found = look_up(layer, ids, graph=True, weights=spread)
    np.testing.assert_array_equal(found.row_lengths(), [3, 0, 2])
    expected = look_up(layer, flat)
    if weighted:
        expected *= weights[:, None]
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)


# Gradients.


def attend(vectors):
    """Weighs the vectors of each row by a softmax over the row."""
    rows = vectors.value_rowids()
    scores = tf.reduce_sum(vectors.values, 1)
    count = vectors.nrows()
    highest = tf.gather(tf.math.unsorted_segment_max(scores, rows, count), rows)
    parts = tf.exp(scores - highest)
    total = tf.math.unsorted_segment_sum(parts, rows, count)
    parts /= tf.gather(total, rows)
    return tf.reduce_sum(vectors * vectors.with_values(parts[:, None]), 1)


def attend_padded(vectors, mask):
    scores = tf.where(mask, tf.reduce_sum(vectors, 2), -1e9)
    parts = tf.where(mask, tf.nn.softmax(scores, 1), 0.0)
    return tf.reduce_sum(vectors * parts[:, :, None], 1)


@pytest.mark.parametrize("kind", ["engine", "distributed"])
@BOTH_MODES
def test_attention_trains_as_over_padded_sequences(kind, graph):
    layer = make_layer(kind)
    padded = layers.PartialTPUEmbedding(
        FeatureConfig("history", make_table(), max_sequence_length=3),
        "sgd",
        size_threshold=0,
    )
    ids = ragged(HISTORY)
    start = tables_of(layer)["movies"]
    np.testing.assert_array_equal(start, tables_of(padded)["movies"])
    mask = tf.sequence_mask(LENGTHS, 3)
    slopes = tf.reshape(tf.range(4.0 * DIM), [4, DIM])

    def of_ragged():
        return attend(layer({"history": ids}, training=True)["history"])

    def of_padded():
        return attend_padded(padded(ids, training=True), mask)

    for each, output in ((layer, of_ragged), (padded, of_padded)):

        def step(each=each, output=output):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(output() * slopes)
            differentiate(tape, loss, each.trainable_variables)

        for _ in range(2):
            (tf.function(step) if graph else step)()
    found = tables_of(layer)["movies"]
    assert (found != start).any(1).nonzero()[0].tolist() == [0, 3, 7, 39]
    np.testing.assert_allclose(found, tables_of(padded)["movies"], rtol=1e-5)


@KINDS
@BOTH_MODES
def test_sums_of_rows_train_as_a_combiner(kind, graph):
    tables = []
    for combiner in (None, "table"):
        table = make_table(combiner="sum")
        features = {"history": FeatureConfig("f", table, combiner=combiner)}
        made = layers.PartialTPUEmbedding
        options = {"size_threshold": None if kind == "keras" else 0}
        if kind == "distributed":
            made, options = layers.DistributedEmbedding, {}
        layer = made(features, optimizer="sgd", **options)
        layer.build(None)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(layer.trainable_variables)

        def step(layer=layer, optimizer=optimizer):
            with tf.GradientTape() as tape:
                found = layer({"history": ragged(HISTORY)})["history"]
                if isinstance(found, tf.RaggedTensor):
                    found = tf.reduce_sum(found, 1)
                loss = tf.reduce_sum(found**2)
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        (tf.function(step) if graph else step)()
        tables.append(tables_of(layer)["movies"])
    np.testing.assert_allclose(*tables, rtol=1e-6)


def test_several_tapes():
    layer = make_layer("keras")
    ids = ragged(HISTORY)
    with tf.GradientTape() as first, tf.GradientTape() as second:
        found = look_up(layer, ids)
        sums, square = tf.reduce_sum(found), tf.reduce_sum(found.values**2)
    rows = tables_of(layer)["movies"]
    counts = np.bincount(FLAT, minlength=ROWS)[:, None]
    for tape, loss, expected in (
        (first, sums, counts * np.ones([1, DIM])),
        (second, square, 2 * counts * rows),
    ):
        [gradient] = tape.gradient(loss, layer.trainable_variables)
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient), expected, rtol=1e-6
        )
    layer = make_layer()
    before = tables_of(layer)["movies"]
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            found = look_up(layer, ids, training=True)
            inner.watch(found.values)
            loss = tf.reduce_sum(found.values**2)
        # A gradient of vectors alone updates nothing.
        slopes = inner.gradient(loss, found.values)
    np.testing.assert_allclose(slopes, 2 * found.values, rtol=1e-6)
    np.testing.assert_array_equal(tables_of(layer)["movies"], before)
    outer.gradient(loss, layer.trainable_variables)
    np.testing.assert_allclose(
        tables_of(layer)["movies"], before * (1 - 0.02 * counts), rtol=1e-5
    )


# Models.


@keras.saving.register_keras_serializable("test_uncombined")
class Mean(keras.layers.Layer):
    """The mean of each row; zeros for a row without ids."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._supports_ragged_inputs = True

    def call(self, rows):
        return tf.math.divide_no_nan(
            tf.reduce_sum(rows, 1),
            tf.cast(rows.row_lengths()[:, None], rows.dtype),
        )

    def compute_output_spec(self, rows):
        return keras.KerasTensor((rows.shape[0], rows.shape[2]), rows.dtype)


@keras.saving.register_keras_serializable("test_uncombined")
class Own(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.embedding = make_layer(kind)
        self.mean, self.dense = Mean(), keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.mean(self.embedding(inputs)["history"]))


def make_model(kind, form):
    if form == "own":
        return Own(kind)
    history = keras.Input([None], dtype="int64", ragged=True, name="history")
    vectors = make_layer(kind)({"history": history})["history"]
    assert vectors.shape[-1] == DIM
    return keras.Model(
        {"history": history}, keras.layers.Dense(1)(Mean()(vectors))
    )


def batches(*labels):
    inputs = {"history": ragged(HISTORY)}
    return tf.data.Dataset.from_tensors((inputs, *labels))


@on("keras:3", tier="more")
@nightly(lambda kind, form: form == "own" and kind != "engine")
@KINDS
@pytest.mark.parametrize("form", ["functional", "own"])
def test_fit_predict_save_and_serve(kind, form, tmp_path):
    model = make_model(kind, form)
    model.compile("sgd", "mse")
    data = batches(tf.ones([4, 1])).repeat(3)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    inputs = {"history": ragged(HISTORY)}
    expected = model.predict(batches(), verbose=0)
    signature = {"history": tf.RaggedTensorSpec([None, None], tf.int64, 1)}
    path = str(tmp_path / "served")
    tfrs_embed.serving.export(model, path, signature, progress=False)
    served = tf.saved_model.load(path)
    np.testing.assert_allclose(served.serve(inputs), expected, rtol=1e-5)
    if form == "functional":
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(
            loaded.predict(batches(), verbose=0), expected, rtol=1e-5
        )


@KINDS
@pytest.mark.parametrize("how", ["export", "saved_model"])
def test_ragged_vectors_are_served(kind, how, tmp_path):
    history = keras.Input([None], dtype="int64", ragged=True, name="history")
    layer = make_layer(kind)
    model = keras.Model({"history": history}, layer({"history": history}))
    inputs = {"history": ragged(HISTORY)}
    expected = model(inputs)["history"]
    path, rows = str(tmp_path / "served"), tables_of(layer)["movies"]
    np.testing.assert_array_equal(expected.values, rows[FLAT])
    if how == "export":
        tfrs_embed.serving.export(model, path, progress=False)
        loaded = tf.saved_model.load(path)
        found = loaded.serve(inputs)["history"]
        parts = loaded.signatures["serving_default"](
            history_values=inputs["history"].values,
            history_row_splits=inputs["history"].row_splits,
        )
        assert sorted(parts) == ["history_row_splits", "history_values"]
        np.testing.assert_array_equal(parts["history_values"], rows[FLAT])
    else:
        spec = {"history": tf.RaggedTensorSpec([None, None], tf.int64, 1)}
        module = tf.Module()
        module.model = model
        module.serve = tf.function(
            lambda x: model(x, training=False), input_signature=[spec]
        )
        tf.saved_model.save(module, path)
        loaded = tf.saved_model.load(path)
        found = loaded.serve(inputs)["history"]
    np.testing.assert_array_equal(found.values, rows[FLAT])
    np.testing.assert_array_equal(found.row_lengths(), LENGTHS)


@KINDS
def test_mixed_precision(kind):
    feature = FeatureConfig("history", make_table(), combiner=None)
    layer = {
        "engine": lambda: layers.PartialTPUEmbedding(
            feature, "sgd", size_threshold=0, dtype="mixed_bfloat16"
        ),
        "keras": lambda: layers.PartialTPUEmbedding(
            feature, "sgd", dtype="mixed_bfloat16"
        ),
        "distributed": lambda: layers.DistributedEmbedding(
            feature, dtype="mixed_bfloat16"
        ),
    }[kind]()
    found = layer(ragged(HISTORY))
    assert found.dtype == tf.bfloat16
    rows = tables_of(layer)["movies"][FLAT]
    np.testing.assert_allclose(
        tf.cast(found.values, tf.float32), rows, rtol=0.01
    )


def test_kerases_regularize_no_ragged_activations():
    feature = FeatureConfig("history", make_table(), combiner=None)
    regularizer = keras.regularizers.L2(0.5)
    with pytest.raises(ValueError, match=r"'history'.*activity_regularizer"):
        layers.PartialTPUEmbedding(
            feature, "sgd", activity_regularizer=regularizer
        )


# Configurations.


@KINDS
def test_a_configuration_is_stored(kind):
    layer = make_layer(kind)
    again = type(layer).from_config(layer.get_config())
    assert isinstance(look_up(again, ragged(HISTORY)), tf.RaggedTensor)
    [feature] = again._spec.features
    assert feature.source.combiner is None


@pytest.mark.parametrize("combiner", ["sum", "mean", "", 0])
def test_a_features_combiner_is_its_tables_or_none(combiner):
    message = rf"'history': combiner must be one of.*'table', None.*{combiner}"
    with pytest.raises(ValueError, match=message):
        FeatureConfig("history", make_table(), combiner=combiner)


@pytest.mark.parametrize(
    "options", [{"max_sequence_length": 3}, {"output_shape": (None, DIM)}]
)
def test_what_has_one_shape_is_refused(options):
    [name] = options
    message = rf"'history': combiner=None .*excludes {name}="
    with pytest.raises(ValueError, match=message):
        FeatureConfig("history", make_table(), combiner=None, **options)


def test_a_plan_knows_that_each_id_has_a_vector():
    table = make_table()
    feature = FeatureConfig("history", table, combiner=None)
    for given in ({"history": 3.5}, [{"history": HISTORY}] * 2):
        plan = tfrs_embed.plan(
            {"history": feature},
            given,
            batch_size=4 if isinstance(given, dict) else None,
            replicas=2,
            optimizer="sgd",
            progress=False,
        )
        assert [each.table for each in plan.tables] == ["movies"]


# Bad input.


def unsorted():
    return tf.SparseTensor(
        [[1, 0], [0, 0]], tf.constant([1, 2], tf.int64), [2, 1]
    )


BAD = {
    "descending splits": (
        lambda: tf.RaggedTensor.from_row_splits(
            tf.constant([1, 2, 3], tf.int64), [0, 2, 1, 3], validate=False
        ),
        r"history.* \(table .*movies.*\): the row splits \[0 2 1 3\]",
    ),
    "splits beyond the values": (
        lambda: tf.RaggedTensor.from_row_splits(
            tf.constant([1, 2, 3], tf.int64), [0, 2, 4], validate=False
        ),
        r"history.* .*row splits \[0 2 4\] .*number of ids, 3",
    ),
    "splits from 1 on": (
        lambda: tf.RaggedTensor.from_row_splits(
            tf.constant([1, 2, 3], tf.int64), [1, 3], validate=False
        ),
        r"history.* .*row splits \[1 3\] .*ascend from 0",
    ),
    "an id out of range": (
        lambda: ragged([[1], [40]]),
        r"history.* \(table .*movies.*\): id 40 is out of range.* 40 rows",
    ),
    "unsorted indices": (unsorted, r"history.* .*row-major order"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", ["engine", "distributed"])
@BOTH_MODES
def test_bad_ids_change_nothing(name, kind, graph):
    make, message = BAD[name]
    layer = make_layer(kind)
    good, bad = ragged([[1], [2, 3]]), make()
    spec = (
        tf.SparseTensorSpec([None, None], tf.int64)
        if isinstance(bad, tf.SparseTensor)
        else tf.RaggedTensorSpec([None, None], tf.int64, 1)
    )

    def step(ids):
        with tf.GradientTape() as tape:
            found = layer({"history": ids}, training=True)["history"]
            loss = tf.reduce_sum(found.values)
        differentiate(tape, loss, layer.trainable_variables)

    if graph:
        step = tf.function(step, input_signature=[spec])
    elif isinstance(bad, tf.RaggedTensor):
        step(good)
    layer.build(None)
    before = state(layer)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        step(bad)
    assert_unchanged(layer, before)


@KINDS
def test_wrong_kinds_of_inputs(kind):
    layer, ids = make_layer(kind), ragged(HISTORY)
    for given, weights, message in (
        (tf.ragged.constant([[[1, 2], [3]], [[4]]]), None, "must have rank 2"),
        (ids, tf.ones([4, 3]), "weights must be a RaggedTensor"),
        (ids, ids.values[:, None], "weights must be a RaggedTensor"),
        (tf.cast(ids, tf.bool), None, "ids must be integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            look_up(layer, given, weights=weights)
        assert "'history'" in str(caught.value)
    other = tf.RaggedTensor.from_row_lengths(tf.ones([6]), [3, 1, 0, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="row splits"):
        look_up(layer, ids, weights=other)
