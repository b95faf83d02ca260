"""The layers inside Keras: models, loops, precision, saving."""

import copy
import gc
import pickle
import re
import resource
import warnings
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_under_test
import tfrs_embed
from keras_under_test import (
    keras,
    layers,
    of_keras_2,
    only_keras_2,
    only_keras_3,
)
from process_tiers import nightly, on
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig
from training_helpers import tables_of

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding


def make_layer(optimizer="adagrad", threshold=50, **kwargs):
    """Two features share a large table, two have small ones."""
    big = TableConfig("big", 100, 8, keras.initializers.RandomUniform(seed=1))
    small = TableConfig(
        "small", 10, 4, keras.initializers.RandomUniform(seed=2)
    )
    tiny = TableConfig("tiny", 5, 2, keras.initializers.RandomUniform(seed=3))
    return layers.PartialTPUEmbedding(
        {
            "user": FeatureConfig("user", big),
            "history": FeatureConfig("history", big),
            "genre": FeatureConfig("genre", small),
            "age": FeatureConfig("age", tiny),
        },
        optimizer=optimizer,
        size_threshold=threshold,
        **kwargs,
    )


def make_data(n=64, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, n)
    genre_lengths = rng.integers(0, 3, n)
    inputs = {
        "user": tf.constant(rng.integers(0, 100, n)),
        "history": tf.RaggedTensor.from_row_lengths(
            rng.integers(0, 100, lengths.sum()), lengths
        ),
        "genre": tf.RaggedTensor.from_row_lengths(
            rng.integers(0, 10, genre_lengths.sum()), genre_lengths
        ),
        "age": tf.constant(rng.integers(0, 5, n), tf.int32),
    }
    return inputs, tf.constant(rng.normal(size=n), tf.float32)


def functional(layer):
    inputs = {
        "user": keras.Input((), dtype=tf.int64, name="user"),
        "history": keras.Input(
            (None,), dtype=tf.int64, ragged=True, name="history"
        ),
        "genre": keras.Input(
            (None,), dtype=tf.int64, ragged=True, name="genre"
        ),
        "age": keras.Input((), dtype=tf.int32, name="age"),
    }
    outputs = layer(inputs)
    x = keras.layers.Concatenate()(list(outputs.values()))
    x = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=4)
    )(x)
    return keras.Model(inputs, x)


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embeddings = layer
        self.dense = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=4)
        )

    def call(self, inputs):
        outputs = self.embeddings(inputs)
        return self.dense(tf.concat(list(outputs.values()), -1))


MODELS = pytest.mark.parametrize("model_of", [functional, Subclassed])


def build_head(model):
    """Builds Keras 3's layer, which a function can't: it has no gradients."""
    if keras_under_test.NUMBER == 3:
        model.dense.build((None, 8 + 8 + 4 + 2))


def assert_equal(a, b, **kwargs):
    assert list(a) == list(b)
    for key in a:
        np.testing.assert_allclose(a[key], b[key], err_msg=key, **kwargs)


def train_by_hand(layer, model, inputs, labels, steps):
    """Plain eager steps: the behaviour that all other loops must have."""
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.mean_squared_error(labels[:, None], model(inputs))
            )
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return tables_of(layer)


@nightly(
    lambda model_of, steps_per_execution: (
        (model_of is functional) == (steps_per_execution == 1)
    )
)
@on("keras:3", tier="more")
@MODELS
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_fit_trains_as_plain_steps_do(model_of, steps_per_execution):
    inputs, labels = make_data()
    layer = make_layer()
    expected = train_by_hand(layer, model_of(layer), inputs, labels, steps=6)

    layer = make_layer()
    before = tables_of(layer)
    model = model_of(layer)
    model.compile(
        keras.optimizers.SGD(0.1),
        "mse",
        steps_per_execution=steps_per_execution,
    )
    dataset = tf.data.Dataset.from_tensors((inputs, labels)).repeat(6)
    model.fit(dataset, verbose=0)
    after = tables_of(layer)
    assert_equal(after, expected, rtol=1e-4, atol=1e-6)
    for name in before:
        assert np.abs(after[name] - before[name]).max() > 1e-4, name
    assert int(layer.step) == 6


@on("keras:3", tier="more")
@MODELS
def test_evaluate_and_predict_change_nothing(model_of):
    inputs, labels = make_data()
    layer = make_layer()
    model = model_of(layer)
    model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensors((inputs, labels))
    before = tables_of(layer)
    model.evaluate(dataset, verbose=0)
    model.predict(dataset, verbose=0)
    model(inputs, training=True)
    assert_equal(tables_of(layer), before, rtol=0)
    assert int(layer.step) == 0


@on("keras:3", tier="more")
def test_uneven_last_batch_is_trained():
    inputs, labels = make_data(n=10)
    layer = make_layer()
    model = functional(layer)
    model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(4)
    model.fit(dataset, verbose=0)
    assert int(layer.step) == 3


@on("keras:3", tier="more")
def test_frozen_layer_is_not_trained():
    inputs, labels = make_data()
    layer = make_layer()
    layer.trainable = False
    model = functional(layer)
    model.compile("sgd", "mse")
    before = tables_of(layer)
    model.fit(inputs, labels, verbose=0)
    assert layer.trainable_weights == []
    assert_equal(tables_of(layer), before, rtol=0)


@on("keras:3", tier="more")
@pytest.mark.parametrize("kind", ["cond", "while"])
def test_control_flow_that_the_tape_is_outside_of_is_an_error(kind):
    inputs, _ = make_data()
    layer = make_layer()
    layer.build(None)

    def user():
        return layer(inputs)["user"]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            if kind == "cond":
                some = tf.reduce_sum(inputs["user"]) > 0
                vectors = tf.cond(some, user, lambda: tf.zeros([64, 8]))
            else:
                _, vectors = tf.while_loop(
                    lambda i, _: i < 2,
                    lambda i, _: (i + 1, user()),
                    [tf.constant(0), tf.zeros([64, 8])],
                )
            loss = tf.reduce_sum(vectors)
        return tape.gradient(loss, layer.trainable_variables[0])

    with pytest.raises(NotImplementedError, match="open the tape inside"):
        step()
    assert int(layer.step) == 0


@on("keras:3", tier="more")
def test_tables_are_weights_but_not_trainable_ones():
    layer = make_layer()
    layer.build(None)
    trainable = [keras_under_test.name_of(w) for w in layer.trainable_weights]
    assert [n.split("/")[-1] for n in trainable] == [
        "gradient_trigger",
        "embeddings",
        "embeddings",
    ]
    names = [keras_under_test.name_of(w) for w in layer.weights]
    assert len(set(names)) == len(names)
    # Those of Keras 3 have no slash.
    assert any(re.search("big[/_]parameters$", n) for n in names)
    assert any(re.search("big[/_]accumulators$", n) for n in names)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_loss_scale_does_not_reach_the_tables(legacy):
    """A scaled loss trains as the same loss unscaled."""
    optimizers = keras.optimizers.legacy if legacy else keras.optimizers
    inputs, labels = make_data()
    results = {}
    for scaled in (False, True):
        layer = make_layer("sgd")
        model = functional(layer)
        optimizer = optimizers.SGD(0.1)
        if scaled:
            optimizer = keras.mixed_precision.LossScaleOptimizer(
                optimizer, initial_scale=1024
            )
        model.compile(optimizer, "mse")
        model.fit(inputs, labels, epochs=3, verbose=0, batch_size=64)
        results[scaled] = tables_of(layer)
    assert_equal(results[True], results[False], rtol=1e-4, atol=1e-6)


@on("keras:3", tier="more")
def test_overflowing_step_is_skipped_and_lowers_the_scale():
    inputs, labels = make_data()
    layer = make_layer("sgd")
    model = functional(layer)
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**120
    )
    model.compile(optimizer, "mse")
    before = tables_of(layer)
    kernel = model.trainable_variables[-2].numpy()
    # The loss, scaled, is far above float32's largest number.
    model.fit(inputs, labels * 1e10, verbose=0, batch_size=64)
    assert_equal(tables_of(layer), before, rtol=0)
    assert int(layer.step) == 0
    assert float(keras_under_test.loss_scale(optimizer)) == 2.0**119
    np.testing.assert_array_equal(model.trainable_variables[-2], kernel)


@on("keras:3", tier="more")
def test_tables_are_trained_if_only_another_gradient_overflows():
    """Documented in docs/gradients.md."""
    tables = []
    for feature in (0.0, 3e38):
        table = tfrs_embed.TableConfig("table", 20, 4, "ones")
        layer = layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("ids", table), "sgd", size_threshold=0
        )
        inputs = [keras.Input((), dtype="int32"), keras.Input((1,))]
        joined = keras.layers.Concatenate()([layer(inputs[0]), inputs[1]])
        model = keras.Model(inputs, keras.layers.Dense(1)(joined))
        weights = [np.array([[0.5]] * 4 + [[0.0]]), np.zeros(1)]
        model.layers[-1].set_weights(weights)
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=16.0
        )
        model.compile(optimizer, "mse")
        data = [np.arange(8), np.full([8, 1], feature)]
        # The kernel's gradient has the feature as a factor, the table's hasn't.
        model.fit(data, np.ones([8, 1]), verbose=0)
        skipped = feature > 0
        kernel, _ = model.layers[-1].get_weights()
        assert np.array_equal(kernel, weights[0]) == skipped
        assert float(keras_under_test.loss_scale(optimizer)) == (
            8 if skipped else 16
        )
        assert int(layer.step) == 1
        tables.append(layer.embedding_tables["table"].numpy())
    np.testing.assert_array_equal(*tables)
    assert np.all(tables[0][:8] != 1)


def test_custom_loop_with_loss_scale_in_a_function():
    inputs, labels = make_data()
    layer = make_layer("sgd")
    model = Subclassed(layer)
    expected_layer = make_layer("sgd")
    expected = train_by_hand(
        expected_layer, Subclassed(expected_layer), inputs, labels, steps=2
    )
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=256
    )

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.mean_squared_error(labels[:, None], model(inputs))
            )
            scaled = keras_under_test.scale_loss(optimizer, loss)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        keras_under_test.apply_scaled(optimizer, gradients, variables)

    step()
    step()
    assert_equal(tables_of(layer), expected, rtol=1e-4, atol=1e-6)


@pytest.fixture
def float64_by_default():
    keras.backend.set_floatx("float64")
    if (
        keras_under_test.NUMBER == 3
    ):  # It has made its default policy of float32.
        keras.config.set_dtype_policy("float64")
    yield
    keras.backend.set_floatx("float32")
    if keras_under_test.NUMBER == 3:
        keras.config.set_dtype_policy("float32")


@nightly(lambda dtype: dtype == "float64")
@pytest.mark.parametrize("threshold", [50, None])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_small_tables_are_of_the_layers_dtype(tmp_path, dtype, threshold):
    layer = make_layer("sgd", threshold, dtype=dtype)
    layer.build(None)
    tables = layer.embedding_tables
    original = keras.layers.Embedding(10, 4, dtype=dtype)
    original.build(None)
    original.embeddings.assign(tables["small"])
    assert tables["small"].dtype == original.embeddings.dtype == dtype
    assert tables["big"].dtype == (dtype if threshold is None else tf.float32)

    inputs, _ = make_data()
    inputs["genre"] = tf.ragged.constant([[3], [4], [9]], tf.int64)
    vectors = layer(inputs)
    assert {v.dtype for v in vectors.values()} == {tf.as_dtype(dtype)}
    expected = original(tf.constant([3, 4, 9]))
    np.testing.assert_array_equal(vectors["genre"], expected)
    # A step of both.
    for variable, look_up in (
        (tables["small"], lambda: layer(inputs)["genre"]),
        (original.embeddings, lambda: original(tf.constant([3, 4, 9]))),
    ):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up() ** 2)
        gradient = tape.gradient(loss, variable)
        keras.optimizers.SGD(0.5).apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(tables["small"], original.embeddings)

    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "ckpt"))
    for other in (
        make_layer("sgd", threshold, dtype=dtype),
        make_layer("sgd", threshold),
        make_layer("sgd", 0, dtype=dtype),
    ):
        tf.train.Checkpoint(layer=other).restore(path).expect_partial()
        for name, table in other.embedding_tables.items():
            # An older numpy doesn't know by how much bfloat16s differ.
            found, expected = (
                tf.cast(tf.cast(each, dtype), tf.float64)
                for each in (table, tables[name])
            )
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert_layers_agree(other, layer, inputs)

    model = functional(layer)
    tfrs_embed.serving.export(model, str(tmp_path / "served"))
    if dtype == "bfloat16":
        return  # Keras's own layers can't be loaded either.
    inputs, _ = make_data()
    model.save(str(tmp_path / "model.keras"))
    again = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_array_equal(again(inputs), model(inputs))


def assert_layers_agree(one, other, inputs):
    for key, vectors in one(inputs).items():
        np.testing.assert_allclose(
            tf.cast(vectors, tf.float32),
            tf.cast(other(inputs)[key], tf.float32),
            rtol=1e-2,
            atol=1e-6,
        )


@nightly(lambda threshold: threshold == 0)
@pytest.mark.parametrize("threshold", [0, 50, None])
def test_a_default_of_float64(float64_by_default, threshold):
    inputs, labels = make_data()
    layer = make_layer("sgd", threshold)
    model = functional(layer)
    before = tables_of(layer)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(inputs, labels, verbose=0)
    assert model.compute_dtype == "float64"
    assert {v.dtype for v in layer(inputs).values()} == {tf.float64}
    for name, table in tables_of(layer).items():
        assert np.abs(table - before[name]).max() > 1e-4


@on("keras:3", tier="more")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    """Outputs are in the compute dtype on both routes, tables in float32."""
    half = policy.removeprefix("mixed_")
    inputs, labels = make_data()
    layer = make_layer("sgd", dtype=policy)
    outputs = layer(inputs)
    assert {k: v.dtype.name for k, v in outputs.items()} == dict.fromkeys(
        outputs, half
    )
    assert {v.dtype for v in layer.embedding_tables.values()} == {tf.float32}
    full = make_layer("sgd")
    for name, output in full(inputs).items():
        np.testing.assert_allclose(
            tf.cast(outputs[name], tf.float32), output, atol=1e-3, rtol=1e-2
        )
    keras.mixed_precision.set_global_policy(policy)
    try:
        layer = make_layer("sgd")
        model = functional(layer)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(inputs, labels, epochs=2, verbose=0, batch_size=64)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    expected = train_by_hand(full, functional(full), inputs, labels, steps=2)
    assert_equal(tables_of(layer), expected, rtol=0.05, atol=2e-3)


@on("keras:3", tier="more")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("threshold", [0, None])
def test_inputs_of_floats_are_ids_and_are_not_rounded(policy, threshold):
    start = np.random.default_rng(0).normal(size=[600, 2]).round(1)
    ids = np.array([[257, 3], [599, 257]])
    table = TableConfig("t", 600, 2, keras.initializers.Constant(start))
    keras.mixed_precision.set_global_policy(policy)
    try:
        layer = layers.PartialTPUEmbedding(
            FeatureConfig("f", table), "sgd", size_threshold=threshold
        )
        inputs = keras.Input([2])  # Of floats.
        model = keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(1.0), "mse")
        found = model.predict(ids, verbose=0)
        model.fit(ids, np.zeros([2, 2, 2]), verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    np.testing.assert_allclose(found, start[ids], rtol=1e-2, atol=1e-2)
    changed = np.flatnonzero(
        (tables_of(layer)["t"] != np.float32(start)).any(1)
    )
    np.testing.assert_array_equal(changed, [3, 257, 599])


def predictions_and_next_steps(model, inputs, labels):
    """What a reloaded model must reproduce."""
    before = model.predict(inputs, verbose=0)
    model.fit(inputs, labels, epochs=2, verbose=0, batch_size=64)
    return before, model.predict(inputs, verbose=0)


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    "format", ["keras", "weights.h5", *of_keras_2("h5", "tf", "ckpt")]
)
def test_saved_model_continues_training_equally(tmp_path, format):
    inputs, labels = make_data()

    def make():
        layer = make_layer(keras.optimizers.Adam(0.1))
        model = functional(layer)
        # Without state: not every format holds that of Keras's optimizers.
        # One in a function, which takes long to trace.
        model.compile(
            keras.optimizers.SGD(0.1), "mse", run_eagerly=format != "keras"
        )
        return model

    model = make()
    model.fit(inputs, labels, epochs=3, verbose=0, batch_size=64)
    path = str(tmp_path / f"model.{format}")
    if format in ("keras", "h5", "tf"):
        model.save(path, save_format=format)
        reloaded = keras.models.load_model(path)
        if format != "tf":  # A SavedModel's layers list untrained variables.
            names = [
                keras_under_test.name_of(weight) for weight in reloaded.weights
            ]
            assert names == [keras_under_test.name_of(w) for w in model.weights]
    else:
        model.save_weights(path)
        reloaded = make()
        if format == "weights.h5":
            # That format expects the metrics' variables, made by training.
            reloaded.fit(inputs, labels, epochs=3, verbose=0, batch_size=64)
        reloaded.load_weights(path)
    for found, expected in zip(
        predictions_and_next_steps(reloaded, inputs, labels),
        predictions_and_next_steps(model, inputs, labels),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@on("keras:3", tier="more")
def test_exported_model_serves(tmp_path):
    inputs, labels = make_data()
    layer = make_layer()
    model = functional(layer)
    model.compile("sgd", "mse")
    model.fit(inputs, labels, verbose=0, batch_size=64)
    expected = model(inputs)
    signature = {
        name: (
            tf.RaggedTensorSpec([None, None], ids.dtype)
            if isinstance(ids, tf.RaggedTensor)
            else tf.TensorSpec([None], ids.dtype)
        )
        for name, ids in inputs.items()
    }
    module = tf.Module()
    # With ragged inputs Keras 3 gives a functional model in a SavedModel a
    # function of dense ones, which fails here.
    module.model = model if keras_under_test.NUMBER == 2 else model.layers
    module.serve = tf.function(model, input_signature=[signature])
    tf.saved_model.save(module, str(tmp_path))
    served = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(served.serve(inputs), expected, rtol=1e-5)


@nightly(lambda threshold, built: built == (threshold == 50))
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("threshold", [0, 50, None])
def test_checkpoint_restores_whatever_the_threshold(tmp_path, built, threshold):
    inputs, labels = make_data()
    layer = make_layer()
    train_by_hand(layer, functional(layer), inputs, labels, steps=2)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "ckpt"))
    names = {name for name, _ in tf.train.list_variables(path)}
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert {n for n in names if n.startswith("layer/")} == {
        f"layer/{n}{suffix}"
        for n in (
            "step",
            "tables/big/parameters",
            "tables/big/accumulators",
            "tables/big/learning_rate",
            "tables/small/parameters",
            "tables/tiny/parameters",
        )
    }

    other = make_layer(threshold=threshold)
    if built:
        other.build(None)
    status = tf.train.Checkpoint(layer=other).restore(path)
    assert_equal(tables_of(other), tables_of(layer), rtol=0)
    status.expect_partial()
    if threshold == 50:
        status.assert_existing_objects_matched()
        slots = other.tables["big"].slots["accumulators"]
        np.testing.assert_array_equal(
            slots, layer.tables["big"].slots["accumulators"]
        )
        assert int(other.step) == 2


@on("keras:3", tier="more")
@pytest.mark.parametrize("as_config", ["own", "tpu"])
def test_config_round_trip(as_config):
    if as_config == "own":
        layer = make_layer(keras.optimizers.Adam(0.1), name="embeddings")
    else:
        table = tpu.TableConfig(
            100, 8, optimizer=tpu.FTRL(0.2, beta=0.1), combiner="sum"
        )
        layer = layers.PartialTPUEmbedding(
            [
                tpu.FeatureConfig(table, output_shape=[4]),
                (tpu.FeatureConfig(table, max_sequence_length=3),),
            ],
            tpu.Adagrad(
                keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
            ),
            size_threshold=10,
            invalid_ids="zero",
            pipeline_execution_with_tensor_core=True,
            batch_size=4,
            dtype="mixed_bfloat16",
        )
    config = layer.get_config()
    kept = str(config)
    other = layers.PartialTPUEmbedding.from_config(config)
    assert str(config) == kept
    assert str(other.get_config()) == kept
    assert str(other.placement) == str(layer.placement)
    if as_config == "own":
        inputs, _ = make_data()
        assert_equal(other(inputs), layer(inputs), rtol=1e-6)
    else:
        inputs = [
            tf.constant([1, 2, 3, -4]),
            (tf.ragged.constant([[1], [2, 3, 4, 5]]),),
        ]
        a, (b,) = other(inputs)
        assert a.shape == (4, 8) and b.shape == (2, 3, 8)
        assert a.dtype == tf.bfloat16


@on("keras:3", tier="more")
def test_shared_objects_are_shared_after_a_round_trip():
    shared = keras.optimizers.SGD(0.1)
    a = TableConfig("a", 20, 2, optimizer=shared)
    b = TableConfig("b", 30, 2, optimizer=shared)
    layer = layers.PartialTPUEmbedding(
        [FeatureConfig("x", a), FeatureConfig("y", a), FeatureConfig("z", b)],
        "adam",
        size_threshold=0,
    )
    other = layers.PartialTPUEmbedding.from_config(layer.get_config())
    assert [t.features for t in other.placement.tables] == [("0", "1"), ("2",)]
    rates = other.table_optimizers
    assert rates["a"] is rates["b"]
    assert str(rates["a"]) == "SGD"


@only_keras_2("under a strategy it traces models with dense inputs")
@pytest.mark.parametrize(
    "make_strategy",
    [
        pytest.param(
            lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
            marks=pytest.mark.nightly,
            id="one_device",
        ),
        pytest.param(
            lambda: tf.distribute.MirroredStrategy(["/cpu:0"]), id="mirrored"
        ),
    ],
)
@MODELS
def test_one_replica_strategies_train_alike(make_strategy, model_of):
    inputs, labels = make_data()
    layer = make_layer()
    expected = train_by_hand(layer, model_of(layer), inputs, labels, steps=3)
    with make_strategy().scope():
        layer = make_layer()
        model = model_of(layer)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(inputs, labels, epochs=3, verbose=0, batch_size=64)
    assert_equal(tables_of(layer), expected, rtol=1e-4, atol=1e-6)


@on("keras:3", tier="more")
@only_keras_2("tensorflow_recommenders is for tf_keras")
def test_tfrs_ranking_with_composite_optimizer():
    tfrs = pytest.importorskip("tensorflow_recommenders")
    big = TableConfig("big", 100, 16)
    small = TableConfig("small", 10, 16)
    layer = layers.PartialTPUEmbedding(
        {
            "big": FeatureConfig("big", big),
            "small": FeatureConfig("small", small),
        },
        keras.optimizers.legacy.Adagrad(0.1),
        size_threshold=50,
    )
    model = tfrs.experimental.models.Ranking(
        layer,
        bottom_stack=tfrs.layers.blocks.MLP([16]),
        top_stack=tfrs.layers.blocks.MLP([8, 1], final_activation="sigmoid"),
    )
    optimizer = tfrs.experimental.optimizers.CompositeOptimizer(
        [
            (
                keras.optimizers.legacy.Adagrad(0.1),
                lambda: model.embedding_trainable_variables,
            ),
            (
                keras.optimizers.legacy.Adam(),
                lambda: model.dense_trainable_variables,
            ),
        ]
    )
    model.compile(optimizer, steps_per_execution=2)
    rng = np.random.default_rng(0)
    features = {
        "dense_features": rng.normal(size=(64, 4)).astype(np.float32),
        "sparse_features": {
            "big": rng.integers(0, 100, 64),
            "small": rng.integers(0, 10, 64),
        },
    }
    labels = rng.integers(0, 2, 64)
    before = tables_of(layer)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)
    model.fit(dataset, epochs=1, verbose=0)
    after = tables_of(layer)
    assert int(layer.step) == 4
    assert int(optimizer.iterations) == 4
    for name in before:
        assert np.abs(after[name] - before[name]).max() > 1e-3, name


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"clipnorm": 0.05}, marks=only_keras_3("it clips before it adds up")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "RMSprop"])
def test_a_small_table_is_trained_by_the_sum_of_a_rows_gradients(
    kind, settings
):
    """Of ids that are there twice, in two features, in two calls."""
    ones = TableConfig("t", 5, 2, "ones")
    layer = layers.PartialTPUEmbedding(
        [FeatureConfig("a", ones), FeatureConfig("b", ones)], None
    )
    embedding = layers.Embedding(5, 2, "ones", combiner="sum")
    ids = tf.constant([1, 1, 3, 4])
    layer([ids, ids]), embedding(ids[:, None])
    [table] = layer.embedding_tables.values()
    dense = tf.Variable(tf.ones([5, 2]))

    def of_layer():
        return [*layer([ids, ids]), *layer([ids, ids])]

    def of_embedding():
        return [embedding(ids[:, None]) for _ in range(4)]

    def of_dense():
        return [tf.matmul(tf.one_hot(ids, 5), dense)] * 4

    for look_up, weights in (
        (of_layer, layer.trainable_weights),
        (of_embedding, embedding.trainable_weights),
        (of_dense, [dense]),
    ):
        optimizer = getattr(keras.optimizers, kind)(0.1, **settings)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(x**3) for x in look_up()])
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
    assert np.abs(dense.numpy()[1] - 1).min() > 0.005
    np.testing.assert_allclose(table, dense, rtol=1e-5)
    np.testing.assert_allclose(embedding.get_weights()[0], dense, rtol=1e-5)


@on("keras:3", tier="more")
def test_empty_dict_looks_nothing_up():
    layer = make_layer()
    assert layer({}) == {}
    assert layer.trainable_variables == []
    assert sorted(layer(make_data()[0])) == ["age", "genre", "history", "user"]


@on("keras:3", tier="more")
def test_activity_regularizer_sees_the_activations_and_is_stored():
    inputs, _ = make_data()
    layer = make_layer(activity_regularizer=keras.regularizers.L2(0.5))
    layer = layers.PartialTPUEmbedding.from_config(layer.get_config())
    outputs = layer(inputs)
    expected = sum(
        0.5 * np.sum(np.square(output)) / len(output)
        for output in outputs.values()
    )
    np.testing.assert_allclose(sum(layer.losses), expected, rtol=1e-5)


@on("keras:3", tier="more")
def test_errors_do_not_print_the_inputs():
    inputs, _ = make_data(n=2000)
    model = functional(make_layer())
    bad = {**inputs, "user": inputs["user"] + 1000}
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="Feature 'user'"
    ) as caught:
        model(bad)
    assert len(str(caught.value)) < 500


@on("keras:3", tier="more")
def test_placement_report():
    layer = make_layer("adam")
    report = layer.placement
    assert [t.table for t in report.tables] == ["big", "small", "tiny"]
    big, small, _ = report.tables
    assert (big.engine, small.engine) == ("one device", "Keras")
    assert big.features == ("user", "history")
    assert big.bytes == 100 * 8 * 4 * 3  # The table, two slots.
    assert big.optimizer == "Adam" and small.optimizer == "the model's"
    assert report.total_rows == 115
    assert report.total_bytes == big.bytes + (10 * 4 + 5 * 2) * 4
    text = str(report)
    assert "rows > size_threshold 50" in text
    assert "3 tables" in text.splitlines()[-1]
    assert "4 features" in text.splitlines()[-1]


@on("keras:3", tier="more")
def test_keras_layers_and_engine_are_reachable():
    layer = make_layer()
    assert sorted(layer.keras_embedding_layers) == ["age", "genre"]
    genre = layer.keras_embedding_layers["genre"]
    assert isinstance(genre, layers.Embedding)
    assert (genre.input_dim, genre.output_dim) == (10, 4)
    [(config, table)] = layer.tpu_embedding.embedding_tables.items()
    assert config.name == "big" and table.shape == (100, 8)
    assert make_layer(threshold=None).tpu_embedding is None


def sequences(kind, **kwargs):
    """Two sequence features and one that is none."""
    tables = [
        TableConfig(name, rows, 4, keras.initializers.RandomUniform(seed=rows))
        for name, rows in (("big", 100), ("small", 10))
    ]
    features = {
        "history": FeatureConfig("history", tables[0], max_sequence_length=3),
        "genres": FeatureConfig("genres", tables[1], max_sequence_length=3),
        "user": FeatureConfig("user", tables[0]),
    }
    if kind == "distributed":
        return layers.DistributedEmbedding(features, optimizer="sgd", **kwargs)
    threshold = {"large": 0, "small": None, "both": 50}[kind]
    return layers.PartialTPUEmbedding(
        features, "sgd", size_threshold=threshold, **kwargs
    )


ROUTES = ("large", "small", "distributed")
RAGGED = tf.ragged.constant([[1, 2], [7], [3, 4, 5, 6]], dtype=tf.int64)
SPARSE = tf.SparseTensor([[0, 0], [0, 2], [1, 1], [2, 4]], [1, 2, 3, 4], [3, 5])
IN_RAGGED = [[True, True, False], [True, False, False], [True] * 3]
IN_SPARSE = [[True, False, True], [False, True, False], [False] * 3]


@nightly(lambda graph, kind: graph == (kind != "large"))
@pytest.mark.parametrize("kind", ROUTES)
@pytest.mark.parametrize("graph", [False, True])
def test_a_sequences_mask_is_true_where_it_has_ids(kind, graph):
    layer = sequences(kind)
    inputs = {
        "history": RAGGED,
        "genres": SPARSE,
        "user": tf.constant([1, 2, 3]),
    }

    def masks():
        outputs = layer(inputs)
        assert getattr(outputs["user"], "_keras_mask", None) is None
        computed = layer.compute_mask(inputs)
        assert computed.pop("user") is None
        given = {k: outputs[k]._keras_mask for k in computed}
        return given, computed

    for found in (tf.function(masks) if graph else masks)():
        assert found["history"].numpy().tolist() == IN_RAGGED
        assert found["genres"].numpy().tolist() == IN_SPARSE


@nightly(lambda kind: kind != "large")
@pytest.mark.parametrize("kind", ROUTES)
def test_layers_behind_a_sequence_get_its_mask(kind, tmp_path):
    layer = sequences(kind)
    inputs = {
        "history": keras.Input((None,), dtype=tf.int64, ragged=True),
        "genres": keras.Input((None,), dtype=tf.int64, ragged=True),
        "user": keras.Input((), dtype=tf.int64),
    }
    found = layer(inputs)
    mean = keras.layers.GlobalAveragePooling1D()(found["history"])
    lstm = keras.layers.LSTM(2)
    model = keras.Model(inputs, [mean, lstm(found["genres"])])
    ids = {
        "history": RAGGED,
        "genres": RAGGED,
        "user": tf.constant([1, 2, 3], tf.int64),
    }
    vectors = layer(ids)
    expected_mean = [
        vectors["history"][i, :n].numpy().mean(0)
        for i, n in enumerate([2, 1, 3])
    ]
    # Each row by itself, as long as it is, needs no mask.
    expected_lstm = [
        lstm(tf.identity(vectors["genres"][i : i + 1, :n]))[0].numpy()
        for i, n in enumerate([2, 1, 3])
    ]
    path = str(tmp_path / "model.keras")
    model.save(path)
    tfrs_embed.serving.export(model, str(tmp_path / "exported"))
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    for of_model in (
        model(ids),
        model.predict(ids, verbose=0),
        keras.models.load_model(path)(ids),
    ):
        assert_close(of_model[0], expected_mean)
        assert_close(of_model[1], expected_lstm)
    served = exported.signatures["serving_default"]
    feeds = {
        name: part
        for key in ("history", "genres")
        for name, part in (
            (f"{key}_values", RAGGED.values),
            (f"{key}_row_splits", RAGGED.row_splits),
        )
    }
    of_server = {
        v.shape[1]: v for v in served(**feeds, user=ids["user"]).values()
    }
    assert_close(of_server[4], expected_mean)
    assert_close(of_server[2], expected_lstm)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@nightly(lambda width, kind: (width == 3) == (kind == "both"))
@pytest.mark.parametrize("kind", ["both", "distributed"])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_dense_ids_of_a_sequence_are_cut_and_padded_as_ragged_ones(kind, width):
    layer = sequences(kind)
    ids = tf.constant([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], tf.int64)[:, :width]
    weights = tf.constant([[1.0, 0.5, -1, 2, 4], [3, 0.25, 1, 1, 1]])[:, :width]
    user = tf.constant([1, 2], tf.int64)

    def look_up(each, weight):
        names = ("history", "genres")
        return layer(
            {**dict.fromkeys(names, each), "user": user},
            weights={**dict.fromkeys(names, weight), "user": None},
        )

    dense = tf.function(
        look_up,
        input_signature=[
            tf.TensorSpec([None, None], tf.int64),
            tf.TensorSpec([None, None], tf.float32),
        ],
    )(ids, weights)
    ragged = look_up(
        tf.RaggedTensor.from_tensor(ids), tf.RaggedTensor.from_tensor(weights)
    )
    for name in ("history", "genres"):
        assert dense[name].shape == (2, 3, 4)
        assert_close(dense[name], ragged[name])
        held = [[True] * min(width, 3) + [False] * max(0, 3 - width)] * 2
        eager = look_up(ids, weights)[name]
        assert_close(eager, ragged[name])
        assert eager._keras_mask.numpy().tolist() == held
        assert ragged[name]._keras_mask.numpy().tolist() == held


@only_keras_2("has no SavedModel that calls layers' saved functions")
@pytest.mark.parametrize("ragged", [False, True])
def test_a_loaded_saved_model_masks_sequences(ragged, tmp_path):
    layer = sequences("both", invalid_ids="zero")
    inputs = {
        "history": keras.Input((None,), dtype=tf.int64, ragged=ragged),
        "genres": keras.Input((3,), dtype=tf.int64),
        "user": keras.Input((), dtype=tf.int64),
    }
    found = layer(inputs)
    mean = keras.layers.GlobalAveragePooling1D()
    model = keras.Model(
        inputs,
        [mean(found["history"]), mean(found["genres"]), found["user"]],
    )
    dense = RAGGED.to_tensor(-1)[:, :3]
    ids = {
        "history": RAGGED if ragged else dense,
        "genres": dense,
        "user": tf.constant([1, 2, 3], tf.int64),
    }
    vectors = layer(ids)
    tf.saved_model.save(model, str(tmp_path))
    outputs = tf.saved_model.load(str(tmp_path))(ids)
    for output, name in zip(outputs[:2], ("history", "genres"), strict=True):
        expected = [
            vectors[name][i, :n].numpy().mean(0)
            for i, n in enumerate([2, 1, 3])
        ]
        assert_close(output, expected)


@on("keras:3")
@pytest.mark.parametrize("kind", ROUTES)
def test_shapes_without_tables_are_those_of_a_call(kind):
    layer = sequences(kind)
    inputs = {
        "history": tf.constant([[1, 2, 3, 4, 5]] * 2),
        "genres": tf.constant([[1, 2]] * 2),
        "user": tf.constant([[1, 2, 3]] * 2),
    }
    found = layer.compute_output_shape({k: v.shape for k, v in inputs.items()})
    assert not layer.weights
    expected = {k: tuple(v.shape) for k, v in layer(inputs).items()}
    assert {k: tuple(v) for k, v in found.items()} == expected
    unknown = layer.compute_output_shape(
        {"history": (None, 5), "genres": (None, 2), "user": (None, 3)}
    )
    assert {k: tuple(v) for k, v in unknown.items()} == {
        k: (None, *shape[1:]) for k, shape in expected.items()
    }


#: Features by what their ids are, with the ids of two examples.
OF_INPUTS = {
    "one": ({}, [1, 2]),
    "user id": ({}, [3, 4]),
    "bag": ({}, [[1, 2], []]),
    "sequence": ({"max_sequence_length": 3}, [[1, 2, 3, 4], [5]]),
    "alone": ({"combiner": None}, [[1, 2], [3]]),
    "given": ({"input_shape": (2, 2)}, [[1, 2], [3, 4]]),
    "padded": (
        {"input_shape": (2, 2), "max_sequence_length": 2},
        [[1, 2], [3, 4]],
    ),
    "laid out": ({"output_shape": (None, 3, 4)}, [[1, 2, 3], [4, 5, 6]]),
    "hashed": ({"hashing": tfrs_embed.Hash()}, [2**40, -1]),
    "text": ({"hashing": tfrs_embed.Hash()}, ["a", "b"]),
    "text bag": (
        {"hashing": tfrs_embed.Hash(padding_value="")},
        [["a", ""], ["b"]],
    ),
}


@on("keras:3")
@pytest.mark.parametrize("kind", ["PartialTPU", "Distributed"])
def test_inputs_are_made_of_the_features(kind):
    table = TableConfig("t", 10, 4)
    words = TableConfig("words", 10, 4, keys=DynamicKeys(dtype="string"))
    features = {
        n: FeatureConfig(None, table, **s) for n, (s, _) in OF_INPUTS.items()
    }
    layer = getattr(layers, f"{kind}Embedding")(
        {**features, "word": words, "words": words}, optimizer="sgd"
    )
    inputs = layer.keras_inputs(
        ragged=["bag", "text bag", "words"], strings=["text", "word"]
    )
    assert {name: each.name for name, each in inputs.items()} == {
        name: name for name in inputs
    }
    model = keras.Model(inputs, layer(inputs))
    ids = {name: each for name, (_, each) in OF_INPUTS.items()}
    ids |= {"word": ["a", "b"], "words": [["a"], []]}
    ragged = ("bag", "sequence", "alone", "text bag", "words")
    batch = {
        name: tf.ragged.constant(each) if name in ragged else tf.constant(each)
        for name, each in ids.items()
    }
    batch = {
        name: each if each.dtype == tf.string else tf.cast(each, tf.int64)
        for name, each in batch.items()
    }
    expected = layer(batch)
    data = tf.data.Dataset.from_tensors((batch, expected))
    found = model.predict(data, verbose=0)
    for name, each in expected.items():
        values = (found[name], each)
        if isinstance(each, tf.RaggedTensor):
            values = [getattr(v, "flat_values", v) for v in values]
        assert_close(*values)
    for name, each in inputs.items():
        assert each.dtype == batch[name].dtype.name


def test_inputs_of_nested_features_are_nested():
    table = TableConfig("t", 10, 4)
    layer = layers.PartialTPUEmbedding(
        {"user": {"id": table}, "x": [table]}, "sgd"
    )
    inputs = layer.keras_inputs(ragged=["x/0"])
    assert inputs["user"]["id"].name == "user_id"
    assert list(inputs["x"][0].shape) == [None, None]


def test_an_input_that_no_feature_has_is_an_error():
    table = TableConfig("t", 10, 4)
    layer = layers.PartialTPUEmbedding({"seen": table}, "sgd")
    for given in ({"ragged": ["saw"]}, {"strings": ["saw"]}):
        with pytest.raises(ValueError, match=r"'saw' is none .*\['seen'\]"):
            layer.keras_inputs(**given)
    with pytest.raises(TypeError, match=r"'seen' \(table 't'\).*got string"):
        layer(layer.keras_inputs(strings=["seen"]))


ONE_FEATURE = {
    "Embedding": lambda: layers.Embedding(9, 4),
    "large": lambda: keras_under_test.layer_of_one_table("sgd", 9, 4),
    "small": lambda: layers.PartialTPUEmbedding(
        FeatureConfig("f", TableConfig("t", 9, 4)), "sgd"
    ),
    "distributed": lambda: keras_under_test.layer_of_one_table(
        "sgd", 9, 4, kind=layers.DistributedEmbedding
    ),
    "dynamic": lambda: layers.DynamicEmbedding(4, input_dim=9),
}


@on("keras:3")
@pytest.mark.parametrize("kind", ONE_FEATURE)
def test_time_distributed_layers_have_the_vectors_of_the_layer(kind):
    layer = ONE_FEATURE[kind]()
    outer = keras.layers.TimeDistributed(layer)
    shape = tuple(outer.compute_output_shape((None, 2, 3)))
    inputs = keras.Input((2, 3), dtype="int64")
    model = keras.Model(inputs, outer(inputs))
    ids = np.arange(12).reshape(2, 2, 3) % 9
    expected = np.stack([layer(ids[:, i]) for i in range(2)], 1)
    assert shape == tuple(model.output_shape) == (None, *expected.shape[1:])
    np.testing.assert_array_equal(model(ids), expected)


@only_keras_3("stateless_call is Keras 3's")
@on("keras:3")
def test_stateless_call_looks_up_the_given_values_or_says_that_it_cannot():
    layer = ONE_FEATURE["small"]()
    layer(tf.constant([0]))
    values = np.arange(36, dtype="float32").reshape(9, 4)
    given = [tf.constant(values) for _ in layer.trainable_variables]
    [vectors, _] = [*layer.stateless_call(given, [], tf.constant([2, 5]))]
    np.testing.assert_array_equal(vectors, values[[2, 5]])
    layer = ONE_FEATURE["large"]()
    layer(tf.constant([0]))
    weights = [
        [tf.convert_to_tensor(each.value) for each in variables]
        for variables in (
            layer.trainable_variables,
            layer.non_trainable_variables,
        )
    ]
    with pytest.raises(NotImplementedError, match=r"'t'.*stateless_call can't"):
        layer.stateless_call(*weights, tf.constant([2, 5]))


SIX_ROWS = [[1, 2], [3], [], [4, 0], [5, 5, 6], [7]]


def shaped(shape):
    table = tpu.TableConfig(20, 4, combiner="sum", name="t")
    feature = tpu.FeatureConfig(table, output_shape=shape, name="f")
    return layers.PartialTPUEmbedding(feature, "sgd", size_threshold=0)


@pytest.mark.parametrize("form", ["ragged", "sparse", "graph"])
@pytest.mark.parametrize(
    ("shape", "count", "sequences"),
    [
        # As many rows as it has vectors: each is one of them.
        ([2, 3], 6, False),
        ([2, 1, 3], 6, False),
        ([None, 2, 3], 6, False),
        ([3, None], 6, False),
        # As many as it has samples: each is a sequence.
        ([6, 1], 6, True),
        ([None, 2], 6, True),
        ([2, 3], 2, True),
    ],
    ids=str,
)
def test_rows_fill_an_output_shape_or_are_its_sequences(
    shape, count, sequences, form
):
    layer = shaped(shape)
    bags = rows = SIX_ROWS[-count:]
    ids, call = tf.ragged.constant(rows, dtype=tf.int64), layer
    if form == "sparse":
        ids = ids.to_sparse()
    elif form == "graph":
        spec = tf.RaggedTensorSpec([count, None], tf.int64)
        call = tf.function(layer, input_signature=[spec])
    if sequences:
        padded = [[[i] for i in row] + [[]] * 3 for row in rows]
        bags = [bag for row in padded for bag in row[: shape[-1]]]
    values = tables_of(layer)["t"]
    expected = np.stack([values[np.array(bag, int)].sum(0) for bag in bags])
    assert_close(call(ids), expected.reshape([d or -1 for d in [*shape, 4]]))


def rows_of_ids(kind, count):
    """Ids below 9 for a batch, of 2 in a ragged or sparse row."""
    if isinstance(kind, tuple):
        return tf.cast(tf.fill([count, *kind], count), tf.int64)
    ids = tf.RaggedTensor.from_uniform_row_length(
        tf.range(2 * count, dtype=tf.int64) % 9, 2
    )
    ids = tf.RaggedTensor.from_row_splits(ids.flat_values, ids.row_splits)
    return ids if kind == "ragged" else ids.to_sparse()


def map_values(function, ids):
    if isinstance(ids, tf.SparseTensor):
        return ids.with_values(function(ids.values))
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(function(ids.flat_values))
    return function(ids)


ROWS = ("ragged", "sparse")
# Each way to lay ids out, and the kinds of ids that it is for: dense ids by
# their shapes behind the batch.
LAYOUTS = {
    "plain": ({}, [(), (4,), (2, 3), (0,), *ROWS]),
    "sequence": ({"max_sequence_length": 3}, [(4,), (3,), (0,), *ROWS]),
    "combined": ({"output_shape": (None, 4)}, [(), (4,), (0,), *ROWS]),
    "matrix": ({"output_shape": (None, 1, 4)}, [(1,), (1, 3), *ROWS]),
}


def spec_of_rows(each):
    if isinstance(each, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], each.dtype)
    if isinstance(each, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], each.dtype)
    return tf.TensorSpec([None, *each.shape[1:]], each.dtype)


@nightly(lambda threshold, call: threshold is None and call == "graph")
@pytest.mark.parametrize("call", ["eager", "weighted", "graph"])
@pytest.mark.parametrize("threshold", [0, None])
def test_an_empty_batch_is_looked_up_and_trains_nothing(threshold, call):
    table = TableConfig("t", 9, 4)
    kinds = {
        f"{name} {kind}": (options, kind)
        for name, (options, of_layout) in LAYOUTS.items()
        for kind in of_layout
    }
    layer = layers.PartialTPUEmbedding(
        {k: FeatureConfig(k, table, **o) for k, (o, _) in kinds.items()},
        "adagrad",
        size_threshold=threshold,
    )

    def batch(count):
        ids = {k: rows_of_ids(kind, count) for k, (_, kind) in kinds.items()}
        if call == "eager":
            return ids, None
        return ids, {
            k: map_values(lambda v: tf.cast(v, tf.float32), each)
            for k, each in ids.items()
        }

    def lookup(ids, of_ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids, of_ids)
            loss = tf.add_n([tf.reduce_sum(o) for o in outputs.values()])
        return outputs, tape.gradient(loss, layer.trainable_variables)

    expected, _ = lookup(*batch(2))
    before = tables_of(layer)["t"]
    empty = batch(0)
    if call == "graph":
        specs = [
            {k: spec_of_rows(v) for k, v in each.items()} for each in empty
        ]
        lookup = tf.function(lookup, input_signature=specs)
    outputs, gradients = lookup(*empty)
    for name, like in expected.items():
        assert outputs[name].shape == [0, *like.shape[1:]], name
    assert all(np.isfinite(tf.convert_to_tensor(g)).all() for g in gradients)
    np.testing.assert_array_equal(tables_of(layer)["t"], before)


@on("keras:3", tier="more")
def test_rows_of_unknown_number_are_sequences():
    layer = shaped([2, 3])
    spec = tf.RaggedTensorSpec([None, None], tf.int64)
    call = tf.function(layer, input_signature=[spec])
    two, six = (
        tf.ragged.constant(rows, dtype=tf.int64)
        for rows in (SIX_ROWS[-2:], SIX_ROWS)
    )
    assert_close(call(two), layer(two))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"output_shape is \[2, 3\]"
    ):
        call(six)


@on("keras:3", tier="more")
def test_rows_do_not_decide_two_unknown_dimensions():
    with pytest.raises(ValueError, match=r"'f'.*more than one unknown"):
        shaped([None, None])(tf.ragged.constant(SIX_ROWS))


@pytest.mark.parametrize("kind", ROUTES)
def test_ids_that_count_as_absent_are_masked(kind):
    layer = sequences(kind, invalid_ids="zero")
    ids = tf.constant([[1, -1], [-1, 2]])
    outputs = layer({"history": ids, "genres": ids, "user": tf.range(2)})
    for name in ("history", "genres"):
        mask = outputs[name]._keras_mask.numpy()
        assert mask.tolist() == [[True, False, False], [False, True, False]]
        assert (np.any(outputs[name].numpy() != 0, axis=-1) == mask).all()


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 4)])
def test_dense_ids_that_are_no_rows_are_no_sequence(shape):
    layer = sequences("both")
    ids = tf.zeros(shape, tf.int64)
    with pytest.raises(
        ValueError, match=r"'genres'.*max_sequence_length=3.*\[batch, k\]"
    ):
        layer({"history": RAGGED, "genres": ids, "user": tf.range(3)})


@pytest.mark.parametrize("kind", ["both", "distributed"])
def test_tables_are_loaded_by_name_from_whatever_has_them(kind):
    layer = sequences(kind)
    embedding = keras.layers.Embedding(100, 4)
    with pytest.raises(ValueError, match=r"'big'.*has no embeddings"):
        layer.load_tables({"big": embedding})
    embedding.build(None)
    small = np.arange(40).reshape(10, 4)
    layer.load_tables({"big": embedding, "small": small})
    tables = tables_of(layer)
    np.testing.assert_array_equal(tables["big"], embedding.embeddings.numpy())
    np.testing.assert_array_equal(tables["small"], small)
    layer.load_tables({"small": tf.Variable(tf.ones([10, 4], tf.float64))})
    assert (tables_of(layer)["small"] == 1).all()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_tables_of_another_dtype_are_loaded_as_they_are(dtype):
    layer = make_layer("sgd", dtype=dtype)
    values = np.random.default_rng(0).random([10, 4])
    layer.load_tables({"small": values, "big": np.ones([100, 8])})
    tables = layer.embedding_tables
    np.testing.assert_array_equal(tables["small"], values.astype(dtype))
    assert (tables["big"].numpy() == 1).all()


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("value", "error", "problem"),
    [
        (np.zeros([9, 4]), ValueError, r"shape \(10, 4\).*\(9, 4\)"),
        (keras.layers.Dense(3), ValueError, "no embeddings"),
        ([["a"] * 4] * 10, TypeError, "numbers, got string"),
        ([[1.0], [1.0, 2.0]], TypeError, "no array of numbers"),
    ],
)
def test_tables_are_all_loaded_or_none(value, error, problem):
    layer = sequences("both")
    before = tables_of(layer)
    with pytest.raises(error, match=f"'small'.*{problem}"):
        layer.load_tables({"big": np.ones([100, 4]), "small": value})
    with pytest.raises(ValueError, match=r"no table 'smal'.*'small'"):
        layer.load_tables({"big": np.ones([100, 4]), "smal": value})
    for name, rows in tables_of(layer).items():
        np.testing.assert_array_equal(rows, before[name])


@on("keras:3", tier="more")
def test_parameters_are_those_of_the_tables():
    layer = make_layer("adam")
    assert layer.count_params() == 100 * 8 + 10 * 4 + 5 * 2
    lines = []
    functional(layer).summary(print_fn=lines.append)
    assert any(layer.name[:10] in line and " 850 " in line for line in lines)


def step(layer, inputs):
    with tf.GradientTape() as tape:
        # Embedding has no training.
        outputs = tf.nest.flatten(layer(inputs))
        loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs])
    variables = layer.trainable_variables
    gradients = tape.gradient(loss, variables)
    keras.optimizers.SGD(0.1).apply_gradients(
        zip(gradients, variables, strict=True)
    )


def weights(layer):
    return [np.array(w) for w in layer.get_weights()]


@on("keras:3", tier="more")
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_layer_of_tables_is_not_copied_by_itself(how):
    with pytest.raises(TypeError, match="'x' can't be pickled or copied"):
        how(make_layer(name="x"))


def features(**kwargs):
    return {
        name: FeatureConfig(name, TableConfig(name, 20, 4, **kwargs))
        for name in ("a", "b")
    }


DENSE = tf.constant([3, 5, 7], tf.int64)
KEYS = tf.constant([[[1, 2]], [[3, 4]], [[5, 6]]], tf.int64)


def partial(**kwargs):
    return layers.PartialTPUEmbedding(
        features(**kwargs), "adagrad", size_threshold=0
    )


# A layer, and inputs that a model is called with.
OF_SHAPES = {
    "embedding": lambda: (layers.Embedding(20, 4), DENSE),
    "combined": lambda: (layers.Embedding(20, 4, combiner="sum"), RAGGED),
    "dense": lambda: (partial(), {"a": DENSE, "b": DENSE}),
    "ragged": lambda: (partial(), {"a": DENSE, "b": RAGGED}),
    "sparse": lambda: (partial(), {"a": DENSE, "b": RAGGED.to_sparse()}),
    "small": lambda: (
        layers.PartialTPUEmbedding(features(), "adagrad"),
        {"a": RAGGED, "b": DENSE},
    ),
    "distributed": lambda: (
        layers.DistributedEmbedding(features()),
        {"a": DENSE, "b": RAGGED},
    ),
    "int32 keys": lambda: (
        partial(keys=DynamicKeys(tf.int32)),
        {"a": tf.cast(DENSE, tf.int32), "b": tf.cast(RAGGED, tf.int32)},
    ),
    "strings": lambda: (
        layers.DynamicEmbedding(4, input_dim=20, key_dtype=tf.string),
        tf.constant(["x", "y", "x"]),
    ),
    "keys": lambda: (
        layers.All2AllDenseEmbedding(20, 4, 1, 2, key_dtype=tf.uint64),
        tf.cast(KEYS, tf.uint64),
    ),
}


@keras.saving.register_keras_serializable("test_keras")
class Given(keras.Model):
    """A model that is given its layer."""

    def __init__(self, layer):
        super().__init__()
        self.embeddings = layer
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        outputs = tf.nest.flatten(self.embeddings(inputs))
        return self.dense(tf.concat(outputs, -1))

    def get_config(self):
        layer = keras.saving.serialize_keras_object(self.embeddings)
        return {"layer": layer}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


@keras.saving.register_keras_serializable("test_keras")
class Own(Given):
    """A model that makes its layer."""

    def __init__(self, kind="ragged"):
        super().__init__(OF_SHAPES[kind]()[0])
        self.kind = kind

    def get_config(self):
        return {"kind": self.kind}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def require_loaded(model, inputs, path):
    """Requires that a model is loaded as it was saved."""
    step(model.embeddings, inputs)
    expected = model(inputs)
    model.save(path)
    with warnings.catch_warnings():
        # Keras 3 only warns of what it can't build or load.
        warnings.simplefilter("error")
        loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded(inputs), expected)
    for mine, others in zip(
        weights(model.embeddings), weights(loaded.embeddings), strict=True
    ):
        np.testing.assert_array_equal(others, mine)


@keras.saving.register_keras_serializable("test_keras")
class Weighted(Given):
    """A model that is given ids and weights."""

    def call(self, inputs):
        ids, of_ids = inputs["ids"], inputs["weights"]
        outputs = self.embeddings(
            {"a": ids, "b": ids}, {"a": of_ids, "b": None}
        )
        return self.dense(tf.concat([outputs["a"], outputs["b"]], -1))


@on("keras:3", tier="more")
@pytest.mark.parametrize("ids", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_a_models_own_class_with_weights_is_loaded(ids, tmp_path):
    model = Weighted(partial())
    inputs = {"ids": ids, "weights": tf.cast(ids, tf.float32) / 2}
    expected = model(inputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs), expected)


@on(
    "keras:3",
    tier="more",
    when=lambda kind: kind in ("ragged", "distributed"),
)
@pytest.mark.parametrize("kind", OF_SHAPES)
def test_a_models_own_class_is_loaded(kind, tmp_path):
    layer, inputs = OF_SHAPES[kind]()
    require_loaded(Given(layer), inputs, tmp_path / "model.keras")


@on("keras:3", tier="more")
@pytest.mark.parametrize("kind", ["dense", "ragged", "distributed", "strings"])
def test_a_model_that_makes_its_layer_is_loaded(kind, tmp_path):
    _, inputs = OF_SHAPES[kind]()
    require_loaded(Own(kind), inputs, tmp_path / "model.keras")


@on("keras:3", tier="more")
def test_what_a_models_shapes_do_not_tell_is_loaded_by_a_call(tmp_path):
    # A layer that its model makes isn't told that ids were sparse.
    _, inputs = OF_SHAPES["sparse"]()
    model, path = Own("sparse"), str(tmp_path / "model.keras")
    expected = model(inputs)
    model.save(path)
    if keras_under_test.NUMBER == 2:
        with pytest.raises(
            ValueError,
            match=r"ranks of all inputs should match|Shape must be rank",
        ):
            keras.models.load_model(path)
    else:
        with pytest.warns(UserWarning, match="cannot be built automatically"):
            keras.models.load_model(path)
    loaded = Own("sparse")
    loaded(inputs)
    loaded.load_weights(path)
    np.testing.assert_array_equal(loaded(inputs), expected)


@pytest.mark.more
@on("keras:3", tier="more")
def test_models_that_are_gone_keep_no_memory():
    ids, labels = np.arange(8) % 4, np.zeros([8, 1], np.float32)
    layers_of, used = [], []
    for _ in range(5):  # As a tuner does.
        keras.backend.clear_session()
        # The table and its slot have 205 MB: a process that ran other tests
        # varies by 30.
        table = TableConfig("t", 400_000, 64, "zeros")
        layer = layers.PartialTPUEmbedding(
            FeatureConfig("t", table), "adagrad", size_threshold=0
        )
        start = keras.Input([], dtype="int64")
        model = keras.Model(start, keras.layers.Dense(1)(layer(start)))
        model.compile("sgd", "mse")
        model.fit(ids, labels, verbose=0)
        layers_of.append(weakref.ref(layer))
        del layer, model, start
        gc.collect()
        with open("/proc/self/statm") as file:
            used.append(int(file.read().split()[1]) * resource.getpagesize())
    assert not any(layer() for layer in layers_of)
    assert used[-1] < used[2] + 100e6


@on("keras:3", tier="more")
def test_a_model_with_a_layer_is_pickled():
    layer, inputs = OF_SHAPES["ragged"]()
    model = Given(layer)
    step(layer, inputs)
    expected = model(inputs)
    restored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(restored(inputs), expected)
