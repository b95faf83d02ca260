"""NVIDIA's `Embedding` and `embedding_lookup`, without their defects."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import NUMBER, keras, layers, only_keras_2
from process_tiers import nightly, on
from tfrs_embed import embedding_lookup

pytestmark = on("keras:3", tier="nightly")

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2) + 1
RAGGED = [[1, 2, 2], [], [7]]


def param():
    return tf.Variable(TABLE)


def combined(rows, combiner, weights=None):
    """The vectors of rows of ids, in numpy."""
    out = np.zeros((len(rows), 2))
    for i, row in enumerate(rows):
        w = np.ones(len(row)) if weights is None else np.array(weights[i])
        total = {
            "sum": 1.0,
            "mean": w.sum(),
            "sqrtn": np.sqrt((w**2).sum()),
        }[combiner]
        for j, x in zip(row, w, strict=True):
            out[i] += x / total * TABLE[j] if total else 0
    return out


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 4)], ids=str)
def test_dense_ids_without_combiner(shape):
    ids = np.random.default_rng(0).integers(0, 10, shape)
    output = embedding_lookup(param(), tf.constant(ids))
    assert output.shape == (*shape, 2)
    np.testing.assert_array_equal(output, TABLE[ids])


def test_ragged_ids_without_combiner_stay_ragged():
    output = embedding_lookup(param(), tf.ragged.constant(RAGGED))
    assert isinstance(output, tf.RaggedTensor)
    assert output.to_list() == [TABLE[row].tolist() for row in RAGGED]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combiner_reduces_the_last_dimension(combiner, weighted):
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 10, (2, 3, 4))
    w = rng.uniform(size=dense.shape).astype(np.float32) if weighted else None
    output = embedding_lookup(param(), tf.constant(dense), combiner, w)
    expected = combined(
        dense.reshape(6, 4),
        combiner,
        None if w is None else w.reshape(6, 4),
    )
    np.testing.assert_allclose(output, expected.reshape(2, 3, 2), rtol=1e-5)

    w = [[0.5, 1.0, -2.0], [], [3.0]] if weighted else None
    ragged = tf.ragged.constant(RAGGED)
    weights = None if w is None else tf.ragged.constant(w)
    expected = combined(RAGGED, combiner, w)
    output = embedding_lookup(param(), ragged, combiner, weights)
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    if weights is None:
        output = embedding_lookup(param(), ragged.to_sparse(), combiner)
    else:
        # to_sparse would make new indices, equal but not the same.
        output = embedding_lookup(
            param(), ragged.to_sparse(), combiner, weights.to_sparse()
        )
    np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_one_id_a_row_by_chance_is_not_taken_for_one_hot():
    """As many ids as rows, but not one a row."""
    ids = tf.ragged.constant([[1, 2], [], [3]])
    np.testing.assert_array_equal(
        embedding_lookup(param(), ids, "sum"),
        [TABLE[1] + TABLE[2], [0, 0], TABLE[3]],
    )


@pytest.mark.parametrize("kind", ["variable", "tensor"])
@pytest.mark.parametrize("combiner", [None, "mean"])
def test_gradient_is_over_sorted_unique_ids(kind, combiner):
    table = param() if kind == "variable" else tf.constant(TABLE)
    ids = tf.constant([[7, 2], [2, 9], [7, 7]])
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = tf.reduce_sum(embedding_lookup(table, ids, combiner))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [2, 7, 9]
    times = np.array([2, 3, 1]) * (1.0 if combiner is None else 0.5)
    np.testing.assert_allclose(gradient.values, np.stack([times, times], 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_param_dtype_is_kept(dtype):
    table = tf.Variable(tf.cast(TABLE, dtype))
    ids = tf.ragged.constant(RAGGED)
    with tf.GradientTape() as tape:
        output = embedding_lookup(table, ids, "mean")
        loss = tf.reduce_sum(output)
    assert output.dtype == table.dtype
    assert tape.gradient(loss, table).dtype == table.dtype
    np.testing.assert_allclose(
        tf.cast(output, tf.float32), combined(RAGGED, "mean"), rtol=1e-2
    )


def test_ids_outside_the_table_are_an_error():
    for ids in ([3, 10], [-1, 2]):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"id (10|-1) is out of range"
        ):
            embedding_lookup(param(), tf.constant(ids))


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "param must be Tensor", ([[1.0]], [0])),
        (ValueError, "combiner must be", (None, [[1]], "max")),
        (ValueError, "1D input with combiner is ambiguous", (None, [1], "sum")),
        (ValueError, "weights need a combiner", (None, [1], None, [1.0])),
        (TypeError, "ids must be integers", (None, [True])),
        (
            ValueError,
            "Only support 2D input",
            (None, tf.ragged.constant([[[1]]]), "sum"),
        ),
        (
            ValueError,
            "Sparse ids need a combiner",
            (None, tf.sparse.from_dense([[1]])),
        ),
        (
            ValueError,
            "weights have the shape",
            (None, [[1, 2]], "sum", [[1.0, 2.0, 3.0]]),
        ),
    ],
)
def test_bad_arguments(error, match, arguments):
    table = param() if arguments[0] is None else arguments[0]
    with pytest.raises(error, match=match):
        embedding_lookup(table, *arguments[1:])


@on("keras:3")
def test_layer_trains_as_keras_does():
    ids = np.random.default_rng(0).integers(0, 10, (32, 4))
    tables = []
    for layer in (
        layers.Embedding(10, 2, "ones", combiner="sum"),
        keras.Sequential(
            [
                keras.layers.Embedding(10, 2, "ones"),
                keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1)),
            ]
            if NUMBER == 2
            else [
                # Its own Embedding doesn't add up what a row gets twice.
                keras.layers.Lambda(lambda x: tf.one_hot(x, 10)),
                keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1)),
                keras.layers.Dense(2, None, False, "ones"),
            ]
        ),
    ):
        # Keras 3 takes ids for floats else.
        first = [] if NUMBER == 2 else [keras.Input((4,), dtype="int64")]
        model = keras.Sequential([*first, layer])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(ids, np.ones((32, 2)), epochs=3, shuffle=False, verbose=0)
        tables.append(model.weights[0].numpy())
    np.testing.assert_allclose(*tables, rtol=1e-4)


@on("keras:3")
def test_layer_in_a_functional_model_with_weights():
    ids = keras.Input((None,), dtype=tf.int32, ragged=True)
    weights = keras.Input((None,), dtype=tf.float32, ragged=True)
    layer = layers.Embedding(10, 2, combiner="mean")
    model = keras.Model([ids, weights], layer(ids, weights=weights))
    w = [[0.5, 1.0, -2.0], [], [3.0]]
    layer.set_weights([TABLE])
    output = model([tf.ragged.constant(RAGGED), tf.ragged.constant(w)])
    np.testing.assert_allclose(output, combined(RAGGED, "mean", w), rtol=1e-5)


@on("keras:3")
def test_layer_of_a_keras_config():
    config = keras.layers.Embedding(
        10, 2, input_length=4, mask_zero=True, name="words"
    ).get_config()
    kept = str(config)
    layer = layers.Embedding.from_config(config)
    assert str(config) == kept
    assert (layer.name, layer.input_dim, layer.output_dim) == ("words", 10, 2)
    mask = layer.compute_mask(tf.constant([[0, 3]]))
    assert mask.numpy().tolist() == [[False, True]]
    assert layers.Embedding.from_config(layer.get_config()).mask_zero


@on("keras:3")
def test_layer_round_trip(tmp_path):
    layer = layers.Embedding(
        10,
        2,
        keras.initializers.RandomNormal(seed=1),
        embeddings_regularizer="l2",
        combiner="sqrtn",
        dtype="mixed_bfloat16",
    )
    model = keras.Sequential([keras.Input((3,), dtype=tf.int32), layer])
    path = str(tmp_path / "model.keras")
    model.save(path)
    other = keras.models.load_model(path, {"Embedding": layers.Embedding})
    ids = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(
        tf.cast(model(ids), tf.float32), tf.cast(other(ids), tf.float32)
    )
    assert other(ids).dtype == tf.bfloat16
    assert other.layers[-1].get_config() == layer.get_config()
    assert tuple(layer.compute_output_shape((None, 3))) == (None, 2)


@on("keras:3")
@pytest.mark.parametrize("dims", [(0, 2), (3, -1)])
def test_layer_needs_positive_dimensions(dims):
    with pytest.raises(ValueError, match="put_dim must be an integer >= 1"):
        layers.Embedding(*dims)


@on("keras:3")
@pytest.mark.parametrize("wrap", [lambda w: w, lambda w: [w]])
def test_weights_are_the_tables_first_values_as_in_keras(wrap):
    layer = layers.Embedding(10, 2, weights=wrap(TABLE), name="words")
    np.testing.assert_array_equal(layer(np.array([3, 5])), TABLE[[3, 5]])
    assert "weights" not in layer.get_config()
    with pytest.raises(ValueError, match=r"words.*\(10, 2\).*\(3, 2\)"):
        layers.Embedding(10, 2, weights=wrap(TABLE[:3]), name="words")


@only_keras_2("its Sequential takes shapes from an Input only")
def test_input_length_makes_a_sequential_model_as_in_tf_keras():
    outputs = []
    for kind in (layers.Embedding, keras.layers.Embedding):
        first = kind(10, 2, input_length=4, weights=[TABLE])
        model = keras.Sequential([first, keras.layers.Flatten()])
        assert model.built and model.input_shape == (None, 4)
        outputs.append(model(np.array([[1, 2, 3, 4]])))
        with pytest.raises(ValueError, match="expected shape"):
            model.predict(np.array([[1, 2, 3]]), verbose=0)
    np.testing.assert_array_equal(*outputs)
    again = keras.Sequential.from_config(model.get_config())
    assert again.input_shape == (None, 4)
    of_matrices = layers.Embedding(10, 2, input_length=(None, 4))
    assert keras.Sequential([of_matrices]).input_shape == (None, None, 4)
    with pytest.raises(ValueError, match="input_length must be an integer"):
        layers.Embedding(10, 2, input_length="4")


@on("keras:3")
@pytest.mark.parametrize("kind", ["Embedding", "PartialTPUEmbedding"])
def test_a_sequential_model_needs_no_input(kind):
    if kind == "Embedding":
        layer = layers.Embedding(10, 2, input_length=None)
    else:
        table = tfrs_embed.TableConfig("table", 10, 2)
        feature = tfrs_embed.FeatureConfig("id", table)
        layer = layers.PartialTPUEmbedding(feature, "sgd", size_threshold=0)
    model = keras.Sequential(
        [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    ids = np.array([[1, 2, 3], [4, 5, 9]])
    if kind == "Embedding":
        layer.set_weights([TABLE])
        np.testing.assert_array_equal(layer(ids), TABLE[ids])
    model.fit(ids, np.ones([2, 1]), verbose=0)
    assert model.predict(ids, verbose=0).shape == (2, 1)
    assert model.output_shape == (None, 1)


def test_mask_zero_and_combiner_exclude_each_other():
    with pytest.raises(ValueError, match="mask_zero"):
        layers.Embedding(3, 2, mask_zero=True, combiner="sum")


def masked_model(make, kind):
    """A model of one kind that takes the mean of ids other than 0."""
    layer = make(10, 2, mask_zero=True)
    mean = keras.layers.GlobalAveragePooling1D()
    if kind == "sequential":
        model = keras.Sequential(
            [keras.Input((3,), dtype="int32"), layer, mean]
        )
    elif kind == "functional":
        ids = keras.Input((3,), dtype="int32")
        model = keras.Model(ids, mean(layer(ids)))
    else:

        class Model(keras.Model):
            def call(self, ids):
                return mean(layer(ids))

        model = Model()
        model.layer = layer
    model(np.zeros([1, 3], "int32"))
    layer.set_weights([TABLE])
    return model


@on("keras:3")
@pytest.mark.parametrize("kind", ["sequential", "functional", "subclass"])
def test_layers_behind_mask_zero_leave_out_id_0_as_with_keras(kind):
    ids = np.array([[3, 0, 0], [1, 2, 0], [0, 5, 4]], "int32")
    ours = masked_model(layers.Embedding, kind)
    expected = masked_model(keras.layers.Embedding, kind).predict(
        ids, verbose=0
    )
    np.testing.assert_allclose(expected[0], TABLE[3], rtol=1e-6)
    np.testing.assert_allclose(ours(ids), expected, rtol=1e-6)
    np.testing.assert_allclose(
        ours.predict(ids, verbose=0), expected, rtol=1e-6
    )


def lstm():
    return keras.layers.LSTM(
        2, kernel_initializer="ones", recurrent_initializer="ones"
    )


@on("keras:3")
@nightly(lambda behind: behind == "lstm")
@pytest.mark.parametrize("behind", ["loss", "lstm", "bidirectional"])
def test_masks_weigh_losses_and_steps_as_with_keras(behind):
    ids = np.array([[3, 0, 0], [1, 2, 0], [0, 5, 4]], "int32")
    results = []
    for kind in (layers.Embedding, keras.layers.Embedding):
        start = keras.Input((3,), dtype="int32")
        layer = kind(10, 2, mask_zero=True)
        output = layer(start)
        if behind == "lstm":
            output = lstm()(output)
        elif behind == "bidirectional":
            output = keras.layers.Bidirectional(lstm())(output)
        model = keras.Model(start, output)
        layer.set_weights([TABLE / 20])
        model.compile("sgd", "mse", weighted_metrics=["mae"], run_eagerly=True)
        targets = np.zeros([3, *output.shape[1:]], "float32")
        logs = model.train_on_batch(ids, targets, return_dict=True)
        results.append([*logs.values(), layer.get_weights()[0]])
        if behind == "loss":
            squares = (TABLE[[3, 1, 2, 5, 4]] / 20) ** 2
            np.testing.assert_allclose(logs["loss"], squares.mean(), 1e-5)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert not np.array_equal(results[0][-1], TABLE / 20)


@on("keras:3")
@pytest.mark.parametrize("combiner", [None, "mean"])
def test_an_empty_batch_has_no_vectors_and_no_gradient(combiner):
    layer = layers.Embedding(10, 2, combiner=combiner)
    with tf.GradientTape() as tape:
        vectors = layer(tf.zeros([0, 3], tf.int64))
        loss = tf.reduce_sum(vectors)
    assert vectors.shape == ((0, 3, 2) if combiner is None else (0, 2))
    [gradient] = tape.gradient(loss, layer.trainable_variables)
    assert not np.any(tf.convert_to_tensor(gradient))


# Imports the package, restores a table into a plain variable, which must fail,
# and asks for all public names.
IMPORT = """
import sys, tensorflow as tf, tfrs_embed
assert "tensorflow_recommenders" not in sys.modules
ours = [m for m in sys.modules if m.startswith("tfrs_embed")]
assert len(ours) <= 80, ours
assert not [m for m in ours if m.startswith("tfrs_embed.tools")], ours
checkpoint = tf.train.Checkpoint
tables = checkpoint(table=checkpoint(parameters=tf.Variable(tf.zeros([10, 2]))))
checkpoint = checkpoint(layer=checkpoint(tables=tables))
try:
    checkpoint.restore(sys.argv[1])
except ValueError as error:
    print(error)
else:
    raise AssertionError("A table was restored into a variable.")
assert dir(tfrs_embed) == sorted([*tfrs_embed.__all__, "keras3"])
assert dir(tfrs_embed.serving) == sorted(tfrs_embed.serving.__all__)
assert all(hasattr(tfrs_embed, name) for name in dir(tfrs_embed))
print(sorted(tfrs_embed.__all__))
"""


# Public modules are found under their short paths, wherever their files are.
PATHS = """
import sys, tf_keras, tfrs_embed
ours = [m for m in sys.modules if m.startswith("tfrs_embed")]
assert len(ours) <= 120, (len(ours), ours)
assert not [m for m in ours if m.startswith("tfrs_embed.tools")], ours
import tfrs_embed.report, tfrs_embed.tools.report
from tfrs_embed.tools import testing
from tfrs_embed.testing import LocalCluster
from tfrs_embed.planner import traffic
from tfrs_embed.types import Combiner
import tfrs_embed.keras2, tfrs_embed.keras3, tfrs_embed.monitoring
import tfrs_embed.progress, tfrs_embed.tpu_check
assert tfrs_embed.report is tfrs_embed.tools.report
assert sys.modules["tfrs_embed.report"] is tfrs_embed.tools.report
assert testing.LocalCluster is LocalCluster
assert tfrs_embed.keras2.Embedding is tfrs_embed.Embedding
assert traffic.__name__ == "tfrs_embed.tools.planner.traffic"
"""


@pytest.mark.more
def test_public_modules_keep_their_import_paths():
    result = subprocess.run(
        [sys.executable, "-c", PATHS],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_import_needs_nothing_but_tensorflow(tmp_path):
    """No environment variable, no tensorflow_recommenders, and no tools."""
    layer = layers.DistributedEmbedding(
        tfrs_embed.FeatureConfig("id", tfrs_embed.TableConfig("table", 10, 2)),
        optimizer="adagrad",
    )
    layer(tf.constant([1]))
    path = tf.train.Checkpoint(layer=layer).save(tmp_path / "tables")
    result = subprocess.run(
        [sys.executable, "-c", IMPORT, path],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "PartialTPUEmbedding" in result.stdout
