"""Layers inside tf.function(jit_compile=True), where no operation can raise."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import NUMBER, keras, layer_of_one_table, layers
from process_tiers import nightly, on
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.compat import strategies
from training_helpers import assert_unchanged, differentiate, state, tables_of

pytestmark = on("keras:3", tier="nightly")

IDS = {
    "a": np.array([0, 1, 2, 49, 3]),
    "b": np.array([[1, 2], [1, 1], [7, 8], [9, 3], [4, 5]]),
    "c": np.array([0, 0, 8, 1, 2], np.uint8),
}
WEIGHTS = {k: (v % 5 + 0.5).astype(np.float32) for k, v in IDS.items()}


def make_layer(threshold=0, optimizer="adagrad", table=None, **kwargs):
    """A layer for IDS; "a" and "b" share a table."""
    start = keras.initializers.RandomNormal(seed=3)
    table = table or {}
    shared = TableConfig(
        "shared", 50, 4, start, **{"combiner": "mean", **table}
    )
    own = TableConfig("own", 9, 3, start, **table)
    return layers.PartialTPUEmbedding(
        {
            "a": FeatureConfig("a", shared),
            "b": FeatureConfig("b", shared, output_shape=(5, 4)),
            "c": FeatureConfig("c", own),
        },
        optimizer,
        size_threshold=threshold,
        **kwargs,
    )


def square_step(layer, optimizer=None):
    """A step that makes all activations smaller."""

    def step(ids, weights=None):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights, training=True)
            loss = tf.add_n(
                [tf.reduce_sum(x * x) for x in tf.nest.flatten(outputs)]
            )
        if optimizer is None:
            differentiate(tape, loss, layer.trainable_variables)
        else:
            gradients = tape.gradient(loss, layer.trainable_variables)
            pairs = zip(gradients, layer.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
        return outputs

    return step


def tensors(values):
    return tf.nest.map_structure(tf.constant, values)


def assert_alike(found, expected):
    for one, other in zip(
        tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def assert_trains_alike(make, ids, weights=None, steps=2):
    """Requires layers to be trained by XLA as they are without it."""
    compiled, plain = make(), make()
    run = tf.function(square_step(compiled), jit_compile=True)
    for _ in range(steps):
        assert_alike(run(ids, weights), square_step(plain)(ids, weights))
    assert_alike(state(compiled), state(plain))


OPTIONS = {
    "Adagrad": ({}, False),
    "Adam": ({"optimizer": keras.optimizers.Adam(0.1)}, True),
    "a norm of many rows": (
        {"optimizer": keras.optimizers.SGD(0.1, global_clipnorm=0.1)},
        False,
    ),
    "rows of two bytes": ({"table": {"dtype": "bfloat16"}}, True),
    "absent ids": ({"invalid_ids": "zero"}, False),
    "absent, weighted ids": ({"invalid_ids": "zero"}, True),
}


@nightly(lambda options: options not in ("Adam", "absent, weighted ids"))
@pytest.mark.parametrize("options", OPTIONS)
def test_xla_trains_tables_as_tensorflow_does(options):
    options, weighted = OPTIONS[options]
    ids = dict(IDS)
    if options.get("invalid_ids"):
        ids["b"] = np.array([[1, 2], [-1, 1], [50, 99], [9, 3], [4, 5]])
        ids["c"] = np.array([9, 9, 8, 1, 255], np.uint8)
    weights = tensors(WEIGHTS) if weighted else None
    assert_trains_alike(lambda: make_layer(**options), tensors(ids), weights)


def test_xla_combines_ids_of_all_kinds():
    rows = tf.ragged.constant([[1, 2], [7], [8, 3, 1]], tf.int64)
    ids, features = {}, {}
    for combiner in ("sum", "mean"):
        start = keras.initializers.RandomNormal(seed=len(features))
        table = TableConfig(combiner, 9, 3, start, combiner=combiner)
        for kind, each in {
            "ragged": rows,
            "sparse": rows.to_sparse(),
            "dense": tf.constant([[1, 2], [7, 1], [8, 3]]),
        }.items():
            ids[f"{combiner} {kind}"] = each
            features[f"{combiner} {kind}"] = FeatureConfig(kind, table)
    weights = {
        name: tf.cast(each, tf.float32) if name.startswith("sum") else None
        for name, each in ids.items()
    }
    assert_trains_alike(
        lambda: layers.DistributedEmbedding(features, optimizer="adagrad"),
        ids,
        weights,
        steps=1,
    )


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_xla_looks_up_ids_that_are_not_combined(kind):
    ids = tf.ragged.constant([[1, 2], [3]], tf.int64)
    if kind != "ragged":
        ids = tf.constant([[1, 2]]) if kind == "dense" else ids.to_sparse()
    table = TableConfig("t", 9, 3)
    feature = FeatureConfig("f", table, combiner=None)
    layer = layers.PartialTPUEmbedding(feature, "adagrad", size_threshold=0)
    found = tf.function(layer, jit_compile=True)(ids)
    rows = tables_of(layer)["t"]
    flat = ids if kind == "dense" else ids.values
    found = found if kind == "dense" else found.values
    np.testing.assert_array_equal(found, rows[flat.numpy()])


def test_xla_multiplies_rows_of_hashed_ids():
    hashing = tfrs_embed.QuotientRemainder(40, operation="mult")

    def make():
        start = keras.initializers.RandomNormal(seed=1)
        table = TableConfig("t", 14, 4, start, combiner="sum")
        feature = FeatureConfig("f", table, hashing=hashing)
        return layers.PartialTPUEmbedding(feature, "adagrad", size_threshold=0)

    ids = tf.ragged.constant([[1, 39], [7, 1, 3]])
    assert_trains_alike(make, ids, steps=1)


def test_xla_trains_a_table_of_numbered_keys():
    keys = tf.constant([[[1]], [[8]], [[1]]], tf.int64)
    layer = layers.All2AllDenseEmbedding(
        9, 3, 1, 1, use_hashtable=False, optimizer=keras.optimizers.SGD(0.5)
    )

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys, training=True))
        differentiate(tape, loss, layer.trainable_variables)

    layer(keys)
    expected = layer.table.table.numpy()
    expected[1] -= 1.0
    expected[8] -= 0.5
    step()
    np.testing.assert_allclose(layer.table.table, expected, rtol=1e-6)


BAD = {
    "above, below and far above": ("a", [0, 50, -1, 49, 2**40], [1, 2, 4]),
    "in one bag": ("b", [[1, 2], [1, 1], [7, 50], [9, 3], [4, 5]], [2]),
    "of a narrow type": ("c", [0, 9, 8, 255, 2], [1, 3]),
}


@nightly(lambda threshold: threshold == 20)
@pytest.mark.parametrize("threshold", [0, 20, None], ids=str)
def test_an_invalid_id_gives_nan_and_updates_nothing(threshold):
    layer = make_layer(threshold)
    dense = keras.optimizers.Adagrad(0.1) if threshold is None else None
    if dense is not None:
        layer(tensors(IDS))
        dense.build(layer.trainable_variables)
    run = tf.function(square_step(layer, dense), jit_compile=True)
    run(tensors(IDS))
    before, good = state(layer), layer(tensors(IDS))
    for where, values, rows in BAD.values():
        bad = {**IDS, where: np.array(values, IDS[where].dtype)}
        outputs = run(tensors(bad))
        assert_unchanged(layer, before)
        for name, output in outputs.items():
            expected = good[name].numpy()
            if name == where:
                expected[rows] = np.nan
            np.testing.assert_allclose(output, expected, rtol=1e-6)
    run(tensors(IDS))
    after = state(layer)
    assert any(np.any(after[name] != before[name]) for name in before)


def test_shapes_that_differ_give_nan_and_update_nothing():
    layer = make_layer()
    unknown = {
        k: tf.TensorSpec([None] * v.ndim, v.dtype) for k, v in IDS.items()
    }
    run = tf.function(
        square_step(layer),
        jit_compile=True,
        input_signature=[
            unknown,
            {k: tf.TensorSpec(v.shape, tf.float32) for k, v in unknown.items()},
        ],
    )
    run(tensors(IDS), tensors(WEIGHTS))
    before = state(layer)
    # As many weights as ids, but in another shape.
    turned = {**WEIGHTS, "b": WEIGHTS["b"].T}
    outputs = run(tensors(IDS), tensors(turned))
    assert all(np.isnan(output).all() for output in outputs.values())
    assert_unchanged(layer, before)


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_xla_trains_a_plain_layer(combiner):
    layer = layers.Embedding(10, 3, combiner=combiner)
    layer.build(None)
    table = layer.trainable_variables[0]
    table = getattr(table, "value", table) if NUMBER == 3 else table

    @tf.function(jit_compile=True)
    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids)
            loss = tf.reduce_sum(outputs)
        return outputs, tf.convert_to_tensor(tape.gradient(loss, table))

    ids = np.array([[1, 2], [3, 3]])
    outputs, gradient = step(tf.constant(ids))
    rows = table.numpy()[ids]
    np.testing.assert_allclose(
        outputs, rows if combiner is None else rows.mean(1), rtol=1e-6
    )
    share = 1.0 if combiner is None else 0.5
    expected = np.bincount(ids.ravel(), minlength=10) * share
    np.testing.assert_allclose(gradient, np.tile(expected[:, None], 3))
    outputs, gradient = step(tf.constant([[1, 2], [10, 3]]))
    assert np.isnan(outputs[1]).any() and not np.isnan(outputs[0]).any()
    assert not np.any(gradient)


@on("keras:3", tier="more")
@nightly(lambda threshold: threshold is None)
@pytest.mark.parametrize("threshold", [0, None], ids=str)
def test_compiled_models_are_trained_as_others(threshold):
    def fit(jit_compile):
        keras.utils.set_random_seed(1)
        layer = make_layer(threshold, keras.optimizers.Adam(0.05))
        inputs = {
            k: keras.Input(v.shape[1:], 5, dtype=v.dtype.name)
            for k, v in IDS.items()
        }
        joined = keras.layers.Concatenate()([*layer(inputs).values()])
        model = keras.Model(inputs, keras.layers.Dense(1)(joined))
        adam = keras.optimizers.Adam(0.05)
        model.compile(adam, "mse", jit_compile=jit_compile)
        labels = np.arange(5.0, dtype=np.float32)[:, None]
        fitted = model.fit(IDS, labels, 5, epochs=2, verbose=0)
        return fitted.history["loss"], state(layer)

    expected = fit(False)
    if NUMBER == 2:
        found = fit(True)
    else:
        with pytest.warns(UserWarning, match="Proceeding with `jit_compile=Fa"):
            found = fit(True)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-3, atol=1e-5)


def test_functions_traced_inside_may_be_called_outside():
    layer, plain = make_layer(), make_layer()
    layer(tensors(IDS))
    inner = tf.function(square_step(layer))
    tf.function(lambda ids: inner(ids), jit_compile=True)(tensors(IDS))
    inner(tensors(IDS))
    assert inner.experimental_get_tracing_count() == 1
    for _ in range(2):
        square_step(plain)(tensors(IDS))
    assert_alike(state(layer), state(plain))


def hashed_layer(**options):
    table = TableConfig("t", 9, 3)
    feature = FeatureConfig("f", table, **options)
    return layers.PartialTPUEmbedding(feature, "adagrad", size_threshold=0)


REFUSED = {
    "keys": (
        lambda _: layers.DynamicEmbedding(3, input_dim=9, optimizer="sgd"),
        tf.TensorSpec([2], tf.int64),
        "tables with DynamicKeys",
    ),
    "hashes": (
        lambda _: hashed_layer(hashing=tfrs_embed.Hash()),
        tf.TensorSpec([2], tf.int64),
        "Hashed features",
    ),
    "files": (
        lambda folder: layer_of_one_table(
            "sgd", 9, 3, {"storage": tfrs_embed.FileStorage(folder)}
        ),
        tf.TensorSpec([2], tf.int64),
        "'f'.*tables in files",
    ),
    "sequences": (
        lambda _: hashed_layer(max_sequence_length=2),
        tf.RaggedTensorSpec([2, None], tf.int64),
        "'f'.*sequences of ragged",
    ),
    "sparse ids": (
        lambda _: hashed_layer(),
        tf.SparseTensorSpec([None, None], tf.int64),
        "'f'.*sparse ids of an unknown number of rows",
    ),
}


@pytest.mark.parametrize(("make", "ids", "text"), REFUSED.values(), ids=REFUSED)
def test_what_xla_can_not_have_is_an_error(make, ids, text, tmp_path):
    layer = make(str(tmp_path))
    run = tf.function(layer, jit_compile=True)
    with pytest.raises(
        NotImplementedError, match=rf"(?s){text}.*jit_compile.*Leave"
    ):
        run.get_concrete_function(ids)


def test_only_compiled_functions_do_without_kernels(needs_kernels):
    assert not strategies.in_xla()
    layer = make_layer()
    for jit in (False, True):
        run = tf.function(square_step(layer), jit_compile=jit)
        graph = run.get_concrete_function(tensors(IDS)).graph
        kinds = {operation.type for operation in graph.get_operations()}
        assert any(kind.startswith("TfrsEmbed") for kind in kinds) != jit
