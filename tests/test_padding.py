"""An id that stands for none, in padded batches of rows and of keys."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import normal
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed import DynamicKeys, FeatureConfig, Hash, TableConfig
from training_helpers import assert_unchanged, state

pytestmark = on("keras:3", tier="nightly")

DIM = 2
PADDED = np.array([[7, 3, 0, 0], [0, 9, 0, 0], [0, 0, 0, 0], [3, 5, 0, 6]])
WEIGHTS = np.arange(1, 17, dtype="float32").reshape(4, 4) / 8
# How often an id is among those of the batch, 0 left out.
COUNTS = {3: 2, 5: 1, 6: 1, 7: 1, 9: 1}
HOW = {
    "sequence": {"max_sequence_length": 4},
    "mean": {"output_shape": [None, DIM]},
    "each": {"combiner": None},
}


def make_layer(options, keys=None, threshold=0, **settings):
    start = keras.initializers.RandomNormal(seed=3)
    table = TableConfig("ids", 20, DIM, start, keys=keys)
    return layers.PartialTPUEmbedding(
        FeatureConfig("f", table, **options),
        "sgd",
        size_threshold=threshold,
        **settings,
    )


def as_kind(kind, values):
    if kind == "ragged":
        return tf.RaggedTensor.from_tensor(values)
    if kind == "sparse":
        places = [[i, j] for i in range(4) for j in range(4)]
        return tf.SparseTensor(places, tf.reshape(values, [-1]), [4, 4])
    return values


def without_padding(rows, how, weighted):
    """The batch's vectors, by numpy; `rows` has those of the ids."""
    rows = {**rows, 0: np.zeros(DIM, "float32")}
    found = np.array([[rows[i] for i in row] for row in PADDED])
    scales = np.where(PADDED > 0, WEIGHTS if weighted else 1.0, 0.0)
    found = found * scales[..., None]
    if how == "mean":
        total = scales.sum(1, keepdims=True)
        found = found.sum(1) / np.where(total > 0, total, 1.0)
    return found


def check(layer, ids, rows, how, kind="dense", weighted=False):
    """Compares a call's vectors and mask, and trains the table by them."""
    weights = as_kind(kind, tf.constant(WEIGHTS)) if weighted else None
    with tf.GradientTape() as tape:
        vectors = layer(as_kind(kind, ids), weights, training=True)
        loss = tf.reduce_sum(vectors)
    if how == "sequence" or (how == "each" and kind == "dense"):
        np.testing.assert_array_equal(vectors._keras_mask, PADDED > 0)
    if isinstance(vectors, tf.RaggedTensor):
        vectors = vectors.to_tensor()
    expected = without_padding(rows, how, weighted)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6, atol=1e-7)
    return tape.gradient(loss, layer.trainable_variables)


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_padding_has_no_row_no_counter_and_no_share(kind, how, weighted, text):
    ids, padding, dtype = PADDED, 0, tf.int64
    if text:
        ids, padding, dtype = PADDED.astype(str), "", tf.string
        ids = np.where(PADDED == 0, "", ids)
    keys = DynamicKeys(dtype, eviction="lfu")
    layer = make_layer({**HOW[how], "padding_value": padding}, keys)
    rows = {}
    for key in COUNTS:
        bits = tf.fingerprint([str(key)])
        number = tf.bitcast(bits, tf.int64).numpy()[0] if text else key
        rows[key] = normal(3, int(number), DIM)
    check(layer, tf.constant(ids, dtype), rows, how, kind, weighted)
    table = layer.tables["ids"]
    assert len(table.keys()) == 5
    frequency = np.sort(table.variables["frequency"].numpy())
    assert frequency[frequency > 0].tolist() == sorted(COUNTS.values())


# By day either the padding or the place is another one.
@nightly(lambda padding, threshold: (padding == 0) == (threshold is None))
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
@pytest.mark.parametrize("padding", [0, 2**40])
def test_padding_reads_and_changes_no_row(
    kind, how, weighted, threshold, padding
):
    layer = make_layer({**HOW[how], "padding_value": padding}, None, threshold)
    layer.build(None)
    before = layer.embedding_tables["ids"].numpy()
    ids = tf.constant(np.where(PADDED == 0, padding, PADDED))
    rows = dict(enumerate(before))
    gradients = check(layer, ids, rows, how, kind, weighted)
    if threshold is None:
        [gradient] = gradients
        changed = tf.convert_to_tensor(gradient).numpy().any(1)
    else:
        after = layer.embedding_tables["ids"].numpy()
        changed = (after != before).any(1)
    assert np.flatnonzero(changed).tolist() == [*COUNTS]


@on("keras:3")
def test_layers_behind_padded_ids_see_what_they_see_behind_keras():
    """What DeepCTR's models build of `Embedding(mask_zero=True)`."""
    values = np.random.default_rng(0).normal(size=[20, DIM]).astype("float32")
    values[0] = 0  # A padding's vector is zeros.
    ours = make_layer({"padding_value": 0})
    theirs = keras.layers.Embedding(20, DIM, mask_zero=True)
    found = []
    for layer in (ours, theirs):
        ids = keras.Input((4,), dtype="int64")
        mean = keras.layers.GlobalAveragePooling1D()(layer(ids))
        model = keras.Model(ids, mean)
        if layer is ours:
            layer.load_tables({"ids": values})
        else:
            layer.set_weights([values])
        found.append(model.predict(PADDED[[0, 1, 3]], verbose=0))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert not np.allclose(found[0], ours(PADDED[[0, 1, 3]]).numpy().mean(1))


class Even(layers.PartialTPUEmbedding):
    """Masks odd ids."""

    def compute_mask(self, inputs, mask=None):
        return tf.equal(inputs % 2, 0)


class Late(layers.PartialTPUEmbedding):
    """Masks the last position, beside the padding."""

    def compute_mask(self, inputs, mask=None):
        there = super().compute_mask(inputs, mask)
        return there & (tf.range(4) < 3)


@on("keras:3")
@pytest.mark.parametrize(
    ("kind", "padding", "there"),
    [
        (Even, None, lambda ids: ids % 2 == 0),
        (Late, 0, lambda ids: (ids != 0) & (np.arange(4) < 3)),
    ],
)
def test_masks_are_those_of_a_subclass(kind, padding, there):
    ids = np.array([[7, 3, 2, 0], [0, 9, 8, 4], [3, 6, 5, 6]])
    feature = FeatureConfig(
        "f", TableConfig("ids", 20, DIM), padding_value=padding
    )
    layer = kind(feature, "sgd", size_threshold=0)
    start = keras.Input((4,), dtype="int64")
    mean = keras.layers.GlobalAveragePooling1D()(layer(start))
    model = keras.Model(start, mean)
    vectors = layer(ids)
    np.testing.assert_array_equal(vectors._keras_mask, there(ids))
    expected = [
        v[m].mean(0) for v, m in zip(vectors.numpy(), there(ids), strict=True)
    ]
    found = model.predict(ids, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "float32"])
def test_padding_is_known_in_ids_of_every_dtype(dtype):
    options = {**HOW["mean"], "padding_value": 0}
    layer = make_layer(options)
    layer.build(None)
    rows = dict(enumerate(layer.embedding_tables["ids"].numpy()))
    check(layer, tf.constant(PADDED, dtype), rows, "mean")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_other_ids_outside_of_the_table_are_as_without_padding(graph):
    options = {**HOW["mean"], "padding_value": -1}
    layer = make_layer(options)
    layer.build(None)
    before = state(layer)
    function = tf.function(layer) if graph else layer
    message = (
        r"'f\\?' \(table \\?'ids\\?'\): id 20 is out of range; .*0 to 19 "
        "and padding_value=-1"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        function(tf.constant([[3, -1], [20, 5]]), training=True)
    assert_unchanged(layer, before)
    absent = make_layer(options, invalid_ids="zero")
    found = absent(tf.constant([[3, -1], [20, 5], [-7, 20]]))
    expected = layer(tf.constant([[3, -1], [-1, 5], [-1, -1]]))
    np.testing.assert_array_equal(found, expected)


def test_padding_in_xla_is_absent():
    layer = make_layer({**HOW["mean"], "padding_value": 0})
    layer.build(None)
    rows = dict(enumerate(layer.embedding_tables["ids"].numpy()))
    found = tf.function(layer, jit_compile=True)(tf.constant(PADDED))
    expected = without_padding(rows, "mean", False)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_config_keeps_the_padding():
    layer = make_layer({"padding_value": np.int32(0)}, DynamicKeys())
    stored = json.loads(json.dumps(layer.get_config()))
    other = type(layer).from_config(stored)
    assert other.get_config() == layer.get_config()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other(tf.constant([[5, 0]], tf.int64)))
    tape.gradient(loss, other.trainable_variables)
    assert other.tables["ids"].keys().tolist() == [5]


@pytest.mark.parametrize(
    ("keys", "padding", "error", "text"),
    [
        (None, "", ValueError, "'f'.*'ids'.*padding_value='' is no id of int6"),
        (None, 2**63, ValueError, "padding_value=9223372036854775808 is no id"),
        (None, 0.5, TypeError, "'f': padding_value must be an integer.* 0.5"),
        (None, True, TypeError, "'f': padding_value must be .* True"),
        (DynamicKeys(), "", ValueError, "padding_value='' is no id of int64"),
        (DynamicKeys("uint8"), -1, ValueError, "=-1 is no id of uint8"),
        (DynamicKeys("string"), 0, ValueError, "=0 is no id of string"),
    ],
)
def test_padding_that_cannot_be_an_id_is_an_error(keys, padding, error, text):
    with pytest.raises(error, match=text):
        make_layer({"padding_value": padding}, keys)


def test_the_padding_of_hashed_ids_is_the_hashings():
    with pytest.raises(ValueError, match=r"'f'.*=0 is to be given to its hash"):
        make_layer({"padding_value": 0, "hashing": Hash()})


def test_batches_for_a_plan_have_no_padding():
    ids = np.tile(PADDED, [4, 1])
    reports = []
    for padding, batch in (
        (0, ids),
        (None, tf.RaggedTensor.from_tensor(ids, padding=0)),
    ):
        # Zeros are last in each row, so that no other id is lost.
        batch = np.sort(ids)[:, ::-1] if padding == 0 else batch
        if padding is None:
            batch = tf.RaggedTensor.from_tensor(
                tf.constant(np.sort(ids)[:, ::-1].copy()), padding=0
            )
        options = {"padding_value": padding}
        table = TableConfig("ids", 20, DIM)
        feature = FeatureConfig("f", table, **options)
        plan = tfrs_embed.plan(
            feature, [batch], replicas=2, optimizer="sgd", progress=False
        )
        reports.append((plan.tables[0].hotness, plan.tables[0].unique_share))
    assert reports[0] == reports[1]
