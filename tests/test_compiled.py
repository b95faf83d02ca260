"""What is special inside tf.function(jit_compile=True).

tests/conformance compares what it computes with the reference.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from conformance.harness import tensors
from helpers import assert_unchanged, differentiate, state
from plans import nightly
from tfrs_embed.compat import strategies
from tfrs_embed.ops import xla
from tfrs_embed.ops.bags import BaggedIds, Validity

tpu = tf.tpu.experimental.embedding


def test_a_larger_batch_than_declared_is_nan():
    table = tfrs_embed.TableConfig("t", 9, 3)
    layer = tfrs_embed.DistributedEmbedding(
        tfrs_embed.FeatureConfig("f", table, (4, 2), (4, 3))
    )
    layer.build((4, 2))
    with pytest.raises(ValueError, match=r"ids of shape \[5, 2\]"):
        tf.function(layer, jit_compile=True)(tf.zeros([5, 2], tf.int64))
    lookup = tf.function(
        layer,
        input_signature=[tf.TensorSpec([None, 2], tf.int64)],
        jit_compile=True,
    )
    assert np.isfinite(lookup(tf.zeros([3, 2], tf.int64))).all()
    assert np.isnan(lookup(tf.zeros([5, 2], tf.int64))).all()


IDS = {
    "a": np.array([0, 1, 2, 49, 3]),
    "b": np.array([[1, 2], [1, 1], [7, 8], [9, 3], [4, 5]]),
    "c": np.array([0, 0, 8, 1, 2], np.uint8),
}


def make_layer(threshold=0, optimizer=None, **kwargs):
    """A layer for IDS; "a" and "b" share a table."""
    start = tf.random_normal_initializer(seed=3)
    shared = tpu.TableConfig(50, 4, start, combiner="mean", name="shared")
    own = tpu.TableConfig(9, 3, start, name="own")
    return tfrs_embed.PartialTPUEmbedding(
        {
            "a": tpu.FeatureConfig(shared),
            "b": tpu.FeatureConfig(shared, output_shape=[5]),
            "c": tpu.FeatureConfig(own),
        },
        tpu.Adagrad(0.1) if optimizer is None else optimizer,
        size_threshold=threshold,
        **kwargs,
    )


def square_step(layer, optimizer=None):
    """A step that makes all activations smaller."""

    def step(ids, weights=None):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights, training=True)
            loss = tf.add_n([tf.reduce_sum(x * x) for x in outputs.values()])
        if optimizer is None:
            differentiate(tape, loss, layer.trainable_variables)
        else:
            gradients = tape.gradient(loss, layer.trainable_variables)
            pairs = zip(gradients, layer.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
        return outputs

    return step


def assert_same_state(layer, other):
    found, expected = state(layer), state(other)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )


BAD = {
    "above, below and far above": ("a", [0, 50, -1, 49, 2**40], [1, 2, 4]),
    "in one bag": ("b", [[1, 2], [1, 1], [7, 50], [9, 3], [4, 5]], [2]),
    "of a narrow type": ("c", [0, 9, 8, 255, 2], [1, 3]),
}


@pytest.mark.parametrize("threshold", [0, None], ids=str)
def test_invalid_ids_are_nan_and_change_nothing(threshold):
    layer = make_layer(threshold)
    dense = tf_keras.optimizers.Adagrad(0.1) if threshold is None else None
    step = tf.function(square_step(layer, dense), jit_compile=True)
    step(tensors(IDS))
    before, good = state(layer), layer(tensors(IDS))
    for where, values, rows in BAD.values():
        bad = {**IDS, where: np.array(values, IDS[where].dtype)}
        outputs = step(tensors(bad))
        assert_unchanged(layer, before)
        for name, output in outputs.items():
            expected = good[name].numpy()
            if name == where:
                expected[rows] = np.nan
            np.testing.assert_allclose(
                output, expected, rtol=1e-6, err_msg=f"{where}: {name}"
            )
    # A good step trains again.
    step(tensors(IDS))
    assert not np.array_equal(
        state(layer)["shared/parameters"], before["shared/parameters"]
    )


def test_a_bad_small_tables_id_stops_the_large_tables():
    layer = make_layer(threshold=20)
    step = tf.function(square_step(layer), jit_compile=True)
    step(tensors(IDS))
    before = state(layer)
    outputs = step(tensors({**IDS, "c": np.array([0, 9, 1, 2, 3], np.uint8)}))
    assert np.isnan(outputs["c"]).any(1).tolist() == [0, 1, 0, 0, 0]
    assert not np.isnan(outputs["a"]).any()
    assert_unchanged(layer, before)


def test_shapes_that_differ_make_all_nan():
    layer = make_layer()
    unknown = {
        k: tf.TensorSpec([None] * v.ndim, v.dtype) for k, v in IDS.items()
    }
    weights = {k: np.ones(v.shape, np.float32) for k, v in IDS.items()}
    step = tf.function(
        square_step(layer),
        jit_compile=True,
        input_signature=[
            unknown,
            {k: tf.TensorSpec(v.shape, tf.float32) for k, v in unknown.items()},
        ],
    )
    step(tensors(IDS), tensors(weights))
    before = state(layer)
    # As many weights as ids, but in another shape.
    turned = {**weights, "b": weights["b"].T}
    outputs = step(tensors(IDS), tensors(turned))
    assert all(np.isnan(output).all() for output in outputs.values())
    # Another batch than output_shape has.
    short = {k: v[:4] for k, v in IDS.items()}
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tensors(short), tensors({k: v[:4] for k, v in weights.items()}))
    assert_unchanged(layer, before)


def test_kernels_are_not_used(needs_kernels):
    layer = make_layer()
    for jit, used in ((False, True), (True, False)):
        step = tf.function(square_step(layer), jit_compile=jit)
        graph = step.get_concrete_function(tensors(IDS)).graph
        kinds = {operation.type for operation in graph.get_operations()}
        assert any(kind.startswith("TfrsEmbed") for kind in kinds) == used


def test_learning_rates_are_read_at_each_step():
    rate = tf.Variable(0.1)
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    rates = [rate, lambda: rate * 2.0, schedule]
    layers = [
        tfrs_embed.PartialTPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        50,
                        2,
                        tf.ones_initializer(),
                        optimizer=tpu.SGD(of_table),
                        name=name,
                    )
                )
                for name, of_table in zip("abc", rates, strict=True)
            },
            None,
            size_threshold=0,
        )
        for _ in range(2)
    ]
    steps = [
        tf.function(square_step(layer), jit_compile=jit)
        for layer, jit in zip(layers, (True, False), strict=True)
    ]
    ids = {name: tf.constant([1, 2, 1]) for name in "abc"}
    for value in (0.1, 0.3):
        rate.assign(value)
        for step in steps:
            step(ids)
    assert_same_state(*layers)


@pytest.mark.parametrize("invalid_ids", ["error", "zero"])
def test_empty_batches(invalid_ids):
    table = tpu.TableConfig(50, 4, combiner="mean", name="table")
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            "x": tpu.FeatureConfig(table),
            "y": tpu.FeatureConfig(table, output_shape=[None]),
        },
        "adagrad",
        size_threshold=0,
        invalid_ids=invalid_ids,
    )
    step = tf.function(square_step(layer), jit_compile=True)
    for batch, length in ((0, 3), (2, 0)):
        before = state(layer)
        outputs = step(
            {
                "x": tf.zeros([batch], tf.int64),
                "y": tf.ones([batch, length], tf.int64),
            }
        )
        assert outputs["x"].shape == outputs["y"].shape == [batch, 4]
        if not length:
            assert not np.any(outputs["y"])
        if not batch:
            before["step"] += 1
            assert_unchanged(layer, before)


def test_rows_beyond_int32():
    size, n = 2**40, 4
    yes = tf.constant(True)

    @tf.function(jit_compile=True)
    def sums(ids, gradient):
        bags = BaggedIds.of_rows(ids, None, tf.size(ids))
        bags = bags._replace(validity=Validity(ids < size, yes))
        return xla.row_gradients([bags], [gradient], size)

    ids = tf.constant([2**39, 7, size, 2**39], tf.int64)
    rows, found, made = sums(ids, tf.reshape(tf.range(1.0, n + 1), [n, 1]))
    assert made
    assert rows.numpy().tolist() == [7, 2**39, 7, 7]
    assert found.numpy()[:, 0].tolist() == [2.0, 5.0, 2.0, 2.0]


def test_what_xla_can_not_have():
    layer = make_layer()
    ragged = tf.RaggedTensor.from_tensor(IDS["b"])
    for ids in (ragged, ragged.to_sparse()):
        with pytest.raises(
            NotImplementedError, match=r"'b'.*ragged and sparse"
        ):
            tf.function(layer, jit_compile=True)({**tensors(IDS), "b": ids})
    layer = make_layer(pipeline_execution_with_tensor_core=True)
    for training in (False, True):
        with pytest.raises(NotImplementedError, match="Pipelined"):
            tf.function(layer, jit_compile=True)(
                tensors(IDS), training=training
            )
    layer = tfrs_embed.All2AllDenseEmbedding(10, 2, 1, 1, optimizer="sgd")
    with pytest.raises(NotImplementedError, match="jit_compile"):
        tf.function(layer, jit_compile=True)(tf.zeros([2, 1, 1], tf.int64))


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_a_plain_layer(combiner):
    layer = tfrs_embed.Embedding(10, 3, combiner=combiner)

    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids)
            loss = tf.reduce_sum(tf.square(outputs))
        return outputs, tf.convert_to_tensor(
            tape.gradient(loss, layer.embeddings)
        )

    ids = tf.constant([[1, 2], [3, 3]])
    expected = step(ids)
    compiled_step = tf.function(step, jit_compile=True)
    for found, value in zip(compiled_step(ids), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5)
    outputs, gradient = compiled_step(tf.constant([[1, 2], [10, 3]]))
    assert np.isnan(outputs[1]).any() and not np.isnan(outputs[0]).any()
    assert not np.any(gradient)


def fit(jit_compile, optimizer, policy):
    """Losses and variables of a Keras model after three epochs."""
    tf_keras.utils.set_random_seed(1)
    start = tf.random_normal_initializer(seed=3)
    large = tpu.TableConfig(50, 4, start, name="large")
    small = tpu.TableConfig(10, 4, start, combiner="mean", name="small")
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            "a": tpu.FeatureConfig(large),
            "b": tpu.FeatureConfig(small, output_shape=[None]),
            "c": tpu.FeatureConfig(large),
        },
        tf_keras.optimizers.Adam(0.05),
        size_threshold=20,
        dtype=policy,
    )
    inputs = {
        name: tf_keras.Input(shape, dtype=tf.int64)
        for name, shape in (("a", []), ("b", [3]), ("c", []))
    }
    vectors = layer(inputs)
    x = tf_keras.layers.Concatenate()([*vectors.values()])
    outputs = tf_keras.layers.Dense(1, dtype=policy)(x)
    outputs = tf_keras.layers.Activation("linear", dtype="float32")(outputs)
    model = tf_keras.Model(inputs, outputs)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    rng = np.random.default_rng(0)
    ids = {
        "a": rng.integers(0, 50, 32),
        "b": rng.integers(0, 10, (32, 3)),
        "c": rng.integers(0, 50, 32),
    }
    labels = (ids["a"] % 5).astype(np.float32)
    history = model.fit(ids, labels, 16, epochs=3, shuffle=False, verbose=0)
    return {
        "losses": history.history["loss"],
        "dense": model.layers[-2].kernel.numpy(),
        **state(layer),
    }


@nightly(lambda policy: policy == "mixed_float16")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_keras_models(policy):
    def optimizer():
        if policy == "float32":
            return tf_keras.optimizers.Adam(0.05)
        # So large a scale that the first steps are skipped.
        return tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.05), initial_scale=2.0**18
        )

    found, expected = (fit(jit, optimizer(), policy) for jit in (True, False))
    assert found["step"] == expected["step"]
    assert (found["step"] == 6) == (policy == "float32")
    tolerance = 1e-4 if policy == "float32" else 1e-2
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )


def test_functions_traced_inside_may_be_called_outside():
    layer, plain = make_layer(), make_layer()
    layer(tensors(IDS))
    inner = tf.function(square_step(layer))
    tf.function(lambda ids: inner(ids), jit_compile=True)(tensors(IDS))
    inner(tensors(IDS))
    assert inner.experimental_get_tracing_count() == 1
    for _ in range(2):
        square_step(plain)(tensors(IDS))
    assert_same_state(layer, plain)


def test_nothing_is_compiled_elsewhere():
    assert not strategies.in_xla()
    found = []
    tf.function(lambda: found.append(strategies.in_xla()))()
    tf.function(lambda: found.append(strategies.in_xla()), jit_compile=True)()
    assert found == [False, True]
