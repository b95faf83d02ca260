"""The best rows of a table, on one device.

Numbers are small integers, whose dot products are exact in all dtypes, so that
many scores are equal.
"""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers, only_keras_2
from process_tiers import nightly
from reference import best_ids
from tfrs_embed import DynamicKeys, FeatureConfig, FileStorage, TableConfig
from tfrs_embed.ops import top_k
from training_helpers import train

ROWS, DIM, BATCH = 5000, 8, 3


def numbers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def make_layer(values, threshold=0, **options):
    """A layer of one table, "t", that has the values."""
    table = TableConfig("t", *values.shape, **options)
    layer = layers.PartialTPUEmbedding(
        FeatureConfig("f", table), "sgd", size_threshold=threshold
    )
    layer.load_tables({"t": values})
    return layer


def make_queries(batch=BATCH, dim=DIM):
    return numbers(np.random.default_rng(1), batch, dim)


@pytest.fixture(params=["one block", "blocks"])
def blocks(request, monkeypatch):
    """Of 1,024 rows, the fewest of a block."""
    if request.param == "blocks":
        monkeypatch.setattr(top_k, "_BLOCK_ELEMENTS", 1)


def check(table, queries, k, values, excluded=None, ids=None):
    """Compares with numpy; eagerly and in a function of any batch."""
    spec = tf.TensorSpec([None, queries.shape[1]])
    in_function = tf.function(
        lambda queries: table.top_k(queries, k, excluded),
        input_signature=[spec],
    )
    expected = best_ids(queries @ values.T, k, excluded, ids)
    for found in table.top_k(queries, k, excluded), in_function(queries):
        assert found[0].dtype == tf.float32 and found[1].dtype == tf.int64
        assert found[0].shape == found[1].shape == (len(queries), k)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("k", [1, 40, 2000, ROWS])
def test_the_best_rows(k):
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    layer = make_layer(values)
    check(layer.tables["t"], make_queries(), k, values)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("threshold", "dtype"),
    [(0, "bfloat16"), (0, "float16"), (None, "float32")],
    ids=["bfloat16", "float16", "a small table"],
)
def test_tables_of_each_kind(threshold, dtype):
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    layer = make_layer(values, threshold, dtype=dtype)
    check(layer.tables["t"], make_queries(), 7, values)


@pytest.mark.usefixtures("needs_kernels", "blocks")
def test_a_table_in_files(tmp_path):
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    layer = make_layer(values, storage=FileStorage(str(tmp_path)))
    check(layer.tables["t"], make_queries(), 7, values)


@pytest.mark.parametrize("batch", [0, 1, 300])
def test_batches_of_any_size(batch):
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    layer = make_layer(values)
    check(layer.tables["t"], make_queries(batch), 7, values)


def test_queries_of_other_dtypes():
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    table = make_layer(values).tables["t"]
    scores, ids = table.top_k(make_queries(), 7)
    for dtype in tf.float16, tf.bfloat16, tf.float64:
        found = table.top_k(tf.cast(make_queries(), dtype), 7)
        np.testing.assert_array_equal(found[0], scores)
        np.testing.assert_array_equal(found[1], ids)


def test_rows_are_those_of_the_last_step():
    table = TableConfig("t", 50, DIM, keras.initializers.Zeros())
    layer = layers.PartialTPUEmbedding(
        FeatureConfig("f", table), "sgd", size_threshold=0
    )
    queries = tf.ones([1, DIM])

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(layer(ids))
        tf.identity(tape.gradient(loss, layer.trainable_variables)[0])
        return layer.tables["t"].top_k(queries, 1)[1]

    for i in (7, 3, 3):
        found = step(tf.constant([i]))
    assert found.numpy().tolist() == [[3]]


def test_excluded_ids():
    rng = np.random.default_rng(0)
    values = numbers(rng, 200, DIM)
    table = make_layer(values).tables["t"]
    queries = make_queries()
    best = best_ids(queries @ values.T, 60)[1]
    for excluded in (
        best[:, :50:3],
        np.concatenate([best[:, 10:5:-1], best[:, 5:9]], 1),
        np.full([BATCH, 2], -1),
        np.zeros([BATCH, 0], np.int32),
        # 150 rows are left, and then 3.
        rng.permuted(np.tile(np.arange(200), [BATCH, 1]), axis=1)[:, :50],
        rng.permuted(np.tile(np.arange(200), [BATCH, 1]), axis=1)[:, :197],
    ):
        check(table, queries, 20, values, excluded)


def test_a_function_takes_any_number_of_excluded_ids():
    values = numbers(np.random.default_rng(0), 200, DIM)
    table = make_layer(values).tables["t"]
    queries = make_queries()

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def find(excluded):
        return table.top_k(queries, 20, excluded)

    for size in (0, 1, 30):
        excluded = best_ids(queries @ values.T, 60)[1][:, :size]
        expected = best_ids(queries @ values.T, 20, excluded)
        for found, wanted in zip(
            find(excluded.astype(np.int32)), expected, strict=True
        ):
            np.testing.assert_array_equal(found, wanted)


def make_dynamic(rows=50, optimizer="sgd", **options):
    start = keras.initializers.RandomUniform(-1, 1, seed=1)
    keys = DynamicKeys(**options)
    table = TableConfig("t", rows, DIM, start, keys=keys)
    layer = layers.PartialTPUEmbedding(
        FeatureConfig("f", table), tf.tpu.experimental.embedding.SGD(0.5)
    )
    return layer, layer.tables["t"]


def look_up(layer, keys):
    """A step on keys."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys) ** 2)
    tape.gradient(loss, layer.trainable_variables)


def check_keys(table, k):
    """Compares with the table as it is read by key."""
    keys = table.keys()
    values = np.asarray(table.variables["parameters"])
    queries = make_queries()
    scores, ids = table.top_k(queries, k)
    expected = best_ids(queries @ values.T, k, ids=keys)
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(ids, expected[1])
    excluded = tf.constant(expected[1][:, :2])
    if table.spec.keys.dtype == tf.int64:
        found = tf.function(lambda: table.top_k(queries, k - 2, excluded))()[1]
        np.testing.assert_array_equal(found, expected[1][:, 2:])


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("dtype", [tf.int64, tf.uint64, tf.string])
def test_keys(dtype):
    layer, table = make_dynamic(dtype=dtype, eviction="lru")
    rng = np.random.default_rng(0)
    for _ in range(3):
        keys = rng.integers(0, 2**62, 30)
        if dtype == tf.string:
            keys = keys.astype("S")
        look_up(layer, tf.cast(keys, dtype) if dtype != tf.string else keys)
    assert table.size == 50
    check_keys(table, 12)
    check_keys(table, 50)


@pytest.mark.usefixtures("both_implementations")
def test_equal_scores_of_keys_are_in_their_order():
    layer, table = make_dynamic()
    look_up(layer, tf.constant([7, -3, 900, 5]))
    _, ids = table.top_k(tf.zeros([1, DIM]), 3)
    assert ids.numpy().tolist() == [[-3, 5, 7]]
    assert table.remove([5]) == 1
    _, ids = table.top_k(tf.zeros([1, DIM]), 3)
    assert ids.numpy().tolist() == [[-3, 7, 900]]


def test_more_than_there_are():
    table = make_layer(np.zeros([20, DIM], np.float32)).tables["t"]
    with pytest.raises(ValueError, match=r"Table 't' has 20 rows: k .* 21"):
        table.top_k(make_queries(), 21)
    for k in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="Table 't': k must be an integer"):
            table.top_k(make_queries(), k)
    layer, table = make_dynamic()
    look_up(layer, tf.constant([7, 5]))
    wanted = r"Table .*t.* has rows for 2 keys: k is 3"
    with pytest.raises(tf.errors.InvalidArgumentError, match=wanted):
        table.top_k(make_queries(), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=wanted):
        tf.function(lambda: table.top_k(make_queries(), 3))()


def test_bad_arguments():
    layer = make_layer(np.zeros([20, DIM], np.float32))
    table, queries = layer.tables["t"], make_queries()
    for bad in (
        make_queries(dim=DIM + 1),
        queries[0],
        queries[None],
        tf.RaggedTensor.from_tensor(queries),
    ):
        with pytest.raises(ValueError, match=r"'t': queries .*\[batch, 8\]"):
            table.top_k(bad, 3)
    for other in 5, "t", layer, tfrs_embed.TableConfig("t", 5, 2):
        with pytest.raises(TypeError, match=r"TopK's table .* of a layer"):
            tfrs_embed.TopK(other)
    with pytest.raises(TypeError, match="'t': queries must be floating"):
        table.top_k(queries.astype(np.int32), 3)
    for bad in ([1, 2, 3], [[1]] * 4, tf.ragged.constant([[1], [2, 3], []])):
        with pytest.raises(ValueError, match=r"'t': ids to exclude .*\[3, N"):
            table.top_k(queries, 3, bad)
    with pytest.raises(TypeError, match="'t': ids to exclude must be integers"):
        table.top_k(queries, 3, [[1.0]] * 3)
    layer, table = make_dynamic()
    look_up(layer, tf.constant([7]))
    with pytest.raises(TypeError, match=r"'t': ids to exclude.*must be int64"):
        table.top_k(queries, 1, [["a"]] * 3)
    spec = tf.TensorSpec(None)
    find = tf.function(lambda q: table.top_k(q, 1), input_signature=[spec])
    assert find(queries)[1].numpy().tolist() == [[7]] * 3
    with pytest.raises(tf.errors.InvalidArgumentError):
        find(queries[:, 1:])


def test_tables_whose_rows_are_no_ids():
    config = FeatureConfig(
        "f", TableConfig("t", 20, DIM), hashing=tfrs_embed.Hash()
    )
    layer = layers.PartialTPUEmbedding(config, "sgd")
    layer.build()
    with pytest.raises(ValueError, match=r"Table 't'.*hashing of Feature 'f'"):
        layer.tables["t"].top_k(make_queries(), 3)


def test_a_table_that_is_not_made():
    layer = layers.PartialTPUEmbedding(
        FeatureConfig("f", TableConfig("t", 20, DIM)), "sgd"
    )
    with pytest.raises(ValueError, match=r"Table 't'.*build the layer first"):
        layer.tables["t"].top_k(make_queries(), 3)


def export(layer, folder, dtype=tf.int64, **options):
    """Exports the best rows of queries; returns the signature's function."""
    ids = keras.Input([], dtype=dtype, name="f")
    model = keras.Model(ids, layer(ids))

    def best(queries, excluded):
        scores, ids = layer.tables["t"].top_k(queries, 7, excluded)
        return {"scores": scores, "ids": ids}

    specs = [tf.TensorSpec([None, DIM]), tf.TensorSpec([None, 2], dtype)]
    tfrs_embed.serving.export(
        model, folder, signatures={"best": (best, specs)}, **options
    )
    return model, tf.saved_model.load(folder)


@nightly(lambda threshold, blocks: (threshold is None) == (blocks == "blocks"))
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "options", [{}, {"rows": "int8"}, {"mapped": True}], ids=str
)
@pytest.mark.parametrize("threshold", [0, None])
def test_an_export_retrieves_from_its_rows(tmp_path, threshold, options):
    values = numbers(np.random.default_rng(0), ROWS, DIM)
    layer = make_layer(values, threshold)
    _, loaded = export(layer, str(tmp_path / "model"), **options)
    layer.load_tables({"t": 0 * values})  # It has rows of its own.
    queries, excluded = make_queries(), np.array([[1, -1]] * 3)
    found = loaded.signatures["best"](
        queries=tf.constant(queries), excluded=tf.constant(excluded)
    )
    scores, ids = best_ids(queries @ values.T, 7, excluded)
    if "rows" in options:
        near = np.take_along_axis(queries @ values.T, found["ids"].numpy(), 1)
        np.testing.assert_allclose(found["scores"], near, atol=1)
        np.testing.assert_allclose(found["scores"], scores, atol=1)
    else:
        np.testing.assert_array_equal(found["ids"], ids)
        np.testing.assert_array_equal(found["scores"], scores)


@pytest.mark.parametrize("updatable", [False, True])
def test_an_export_retrieves_keys(tmp_path, updatable):
    keys = np.arange(50) * 7 - 100
    table = TableConfig("t", 100, DIM, keys=DynamicKeys())
    layer = layers.PartialTPUEmbedding(FeatureConfig("f", table), "sgd")
    layer.build(None)
    state = layer.tables["t"]
    state.give_rows(keys)
    if updatable:
        state.track_changes()
    base, delta = str(tmp_path / "base"), str(tmp_path / "delta")
    model, loaded = export(layer, base, updatable=updatable)
    queries, excluded = make_queries(), np.array([[keys[0], 5]] * BATCH)

    def check_keys():
        there = np.sort(state.keys())
        rows = layer(tf.constant(there), training=False).numpy()
        found = loaded.signatures["best"](
            queries=tf.constant(queries), excluded=tf.constant(excluded)
        )
        expected = best_ids(queries @ rows.T, 7, excluded, there)
        np.testing.assert_allclose(found["scores"], expected[0], rtol=1e-5)
        np.testing.assert_array_equal(found["ids"], expected[1])

    check_keys()
    if updatable:
        new = tf.range(10, dtype=tf.int64) + 1000
        train(layer, new, numbers(np.random.default_rng(2), 10, DIM))
        tfrs_embed.serving.export_delta(model, delta, since=base)
        loaded.apply_delta(delta)
        check_keys()


def test_an_export_needs_the_tables_layer(tmp_path):
    table = make_layer(np.zeros([20, DIM], np.float32)).tables["t"]
    gc.collect()
    inputs = keras.Input([DIM])
    model = keras.Model(inputs, keras.layers.Dense(DIM)(inputs))
    best = lambda q: {"ids": table.top_k(q, 3)[1]}  # noqa: E731
    with pytest.raises(RuntimeError, match=r"Table 't'.* its layer is gone"):
        tfrs_embed.serving.export(
            model,
            str(tmp_path / "model"),
            signatures={"best": (best, [tf.TensorSpec([None, DIM])])},
        )


def test_no_gradient_goes_through():
    for threshold in (0, None):
        layer = make_layer(
            numbers(np.random.default_rng(0), 50, DIM), threshold
        )
        queries = tf.Variable(make_queries())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer.tables["t"].top_k(queries, 3)[0])
        watched = [queries, *layer.trainable_variables]
        assert tape.gradient(loss, watched) == [None] * len(watched)


@only_keras_2("tensorflow_recommenders is for tf_keras")
@pytest.mark.parametrize("by_id", [True, False])
def test_metrics_of_tfrs_are_those_of_its_own_layer(by_id):
    import tensorflow_recommenders as tfrs

    rng = np.random.default_rng(0)
    values = rng.normal(size=[ROWS, DIM]).astype(np.float32)
    table = make_layer(values).tables["t"]
    theirs = tfrs.layers.factorized_top_k.BruteForce().index(
        tf.constant(values), tf.range(ROWS, dtype=tf.int64)
    )
    true = rng.integers(0, ROWS, 64)
    queries = values[true] + rng.normal(size=[64, DIM]).astype(np.float32)
    found = []
    for candidates in tfrs_embed.TopK(table), theirs:
        metric = tfrs.metrics.FactorizedTopK(candidates, ks=(1, 5, 20))
        metric.update_state(queries, values[true], true if by_id else None)
        found.append([float(each) for each in metric.result()])
    assert found[0] == found[1]
    assert 0 < found[0][0] < found[0][2] < 1
    excluded = true[:, None]
    ours = tfrs_embed.TopK(table, k=5).query_with_exclusions(queries, excluded)
    wanted = theirs.query_with_exclusions(tf.constant(queries), excluded, k=5)
    np.testing.assert_array_equal(ours[1], wanted[1])
    np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-5)


@only_keras_2("tensorflow_recommenders is for tf_keras")
def test_a_task_of_tfrs_fits_and_evaluates_with_it():
    import tensorflow_recommenders as tfrs

    class Model(tfrs.Model):
        def __init__(self):
            super().__init__()
            tables = [TableConfig(n, 60, DIM) for n in ("user", "movie")]
            self.layer = layers.PartialTPUEmbedding(
                {t.name: FeatureConfig(t.name, t) for t in tables},
                tfrs_embed.optimizers.RowWiseAdagrad(0.5),
                size_threshold=0,
            )
            movies = tfrs_embed.TopK(self.layer.tables["movie"])
            self.task = tfrs.tasks.Retrieval(
                metrics=tfrs.metrics.FactorizedTopK(movies, ks=(1, 10))
            )

        def compute_loss(self, features, training=False):
            found = self.layer(features)
            return self.task(
                found["user"],
                found["movie"],
                candidate_ids=features["movie"],
                compute_metrics=not training,
            )

    ids = np.tile(np.arange(60), 4)
    data = tf.data.Dataset.from_tensor_slices({"user": ids, "movie": ids})
    model = Model()
    model.compile("sgd")
    model.fit(data.batch(60), epochs=20, verbose=0)
    metrics = model.evaluate(data.batch(60), return_dict=True, verbose=0)
    assert metrics["factorized_top_k/top_1_categorical_accuracy"] > 0.9


@only_keras_2("one check is enough")
def test_it_is_checked_when_it_is_made():
    table = make_layer(np.zeros([20, DIM], np.float32)).tables["t"]
    with pytest.raises(ValueError, match="Table 't': k must be an integer"):
        tfrs_embed.TopK(table, k=0)


def test_a_query_with_a_nan_finds_nothing():
    table = TableConfig("movies", 300, 4)
    feature = FeatureConfig("movie", table)
    layer = layers.PartialTPUEmbedding(feature, "adagrad")
    layer.build()
    queries = np.ones([2, 4], np.float32)
    queries[0, 1] = np.nan
    scores, ids = layer.tables["movies"].top_k(queries, 3)
    assert np.all(np.isneginf(scores[0])) and np.all(ids[0] == -1)
    assert np.all(np.isfinite(scores[1])) and np.all(ids[1] >= 0)
