"""Activations side by side: the kernels write and read them in the matrix."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import nightly
from tfrs_embed import kernels
from training_helpers import differentiate, operations_run

pytestmark = pytest.mark.usefixtures("needs_kernels")

DIM, ROWS, BATCH = 4, 20, 6


def make_layer(features):
    rng = np.random.default_rng(0)
    tables = [
        tfrs_embed.TableConfig(
            f"table_{i}",
            ROWS,
            DIM,
            initializer=tf_keras.initializers.Constant(
                rng.normal(size=(ROWS, DIM)).astype(np.float32)
            ),
        )
        for i in range((features + 1) // 2)  # Some are shared.
    ]
    return tfrs_embed.PartialTPUEmbedding(
        [
            tfrs_embed.FeatureConfig(f"feature_{i}", tables[i // 2])
            for i in range(features)
        ],
        tf_keras.optimizers.Adagrad(0.5),
        size_threshold=0,
    )


def concat(outputs, others):
    return tf.concat(outputs, 1)


def concat_last(outputs, others):
    return tf_keras.layers.Concatenate()(outputs)


def concat_among_others(outputs, others):
    inner = tf.concat([others, *outputs[1:]], 1)
    return tf.concat([others, inner, outputs[0]], 1)


def concat_of_two_among_many(outputs, others):
    inner = tf.concat([others, *outputs[:2]], 1)
    return tf.concat([others, inner, *outputs[2:]], 1)


def stack(outputs, others):
    return tf.stack(outputs, 1)


def rows_on_rows(outputs, others):
    return tf.concat(outputs, 0)


def twice(outputs, others):
    return tf.concat([*outputs, outputs[0]], 1)


def some_apart(outputs, others):
    return tf.concat([tf.concat(outputs[1:], 1), tf.tanh(outputs[0])], 1)


def parts(outputs, others):
    # What is cut is not always what was put together.
    return tf.concat([o[1:] for o in outputs] + [o[:1] for o in outputs], 0)


#: What models do with activations, and how many tensors the update then gets;
#: None: as many as there are features.
WAYS = {
    concat: 1,
    concat_last: 1,
    concat_among_others: 1,
    concat_of_two_among_many: 1,
    stack: 1,
    rows_on_rows: None,
    twice: 2,
    some_apart: 2,
    parts: None,
}
#: Those that the vectors are written for.
WRITTEN = (
    concat,
    concat_last,
    concat_among_others,
    concat_of_two_among_many,
)


def train(way, features, batch, width=3):
    """The layer's variables after two steps, the step, and what it ran."""
    layer = make_layer(features)
    layer.build()

    @tf.function(
        input_signature=[
            [tf.TensorSpec([batch], tf.int64)] * features,
            tf.TensorSpec([batch, width]),
        ]
    )
    def step(ids, others):
        with tf.GradientTape() as tape:
            matrix = way(layer(ids, training=True), others)
            weights = tf.range(tf.cast(tf.size(matrix), tf.float32))
            # Each value has a gradient of its own.
            weights = tf.reshape(tf.cos(weights), tf.shape(matrix))
            loss = tf.reduce_sum(tf.sin(matrix) * weights)
        differentiate(tape, loss, layer.trainable_variables)

    rng = np.random.default_rng(1)
    ids = [
        [tf.constant(rng.integers(0, ROWS, BATCH)) for _ in range(features)]
        for _ in range(2)
    ]
    others = tf.reshape(tf.range(3.0 * BATCH), [BATCH, 3])
    ran = operations_run(step, ids[0], others)
    step(ids[1], others)
    variables = {
        f"{name}/{key}": variable.numpy()
        for name in layer.embedding_tables
        for key, variable in layer.tables[name].variables.items()
    }
    return variables, step.get_concrete_function().graph, ran


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], 1e-5, 1e-6, name)


# TensorFlow cuts up to 16 parts with an operation each, more with one, and
# asks for their shapes where the batch's size isn't known.
@nightly(lambda way, features: features > 4 and way is not concat_among_others)
@pytest.mark.parametrize(
    ("way", "features", "batch"),
    [(way, *sizes) for way in WAYS for sizes in [(4, None), (20, BATCH)]]
    + [(concat_among_others, 4, BATCH), (concat_among_others, 20, None)],
)
def test_what_models_do_with_activations(way, features, batch):
    found, graph, ran = train(way, features, batch)
    assert [
        op.get_attr("G")
        for op in graph.get_operations()
        if op.type == "TfrsEmbedUpdate"
    ] == [WAYS[way] or features]
    assert ("TfrsEmbedLookupConcat" in ran) == (way in WRITTEN)
    assert ("TfrsEmbedLookup" in ran) == (way not in WRITTEN)
    with kernels.disabled():
        expected, _, _ = train(way, features, batch)
    assert_close(found, expected)


# Then where columns begin shows only when the step runs: behind them, gradients
# are copied.
@pytest.mark.parametrize("features", [4, 20])
@pytest.mark.parametrize("batch", [None, BATCH])
def test_activations_among_others_of_unknown_width(features, batch):
    way = concat_among_others
    found, graph, _ = train(way, features, batch, width=None)
    assert [
        op.get_attr("G")
        for op in graph.get_operations()
        if op.type == "TfrsEmbedUpdate"
    ] == [features]
    expected, _, _ = train(way, features, batch)
    assert_close(found, expected)


def test_activations_that_a_control_dependency_parts_are_not_fused():
    layer = make_layer(2)
    layer.build()
    counter = tf.Variable(0.0)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            first, second = layer(ids, training=True)
            with tf.control_dependencies([first]):
                counter.assign_add(1.0)
                read = counter.read_value()
            others = tf.fill([BATCH, 1], read)
            matrix = tf.concat([first, others, second], 1)
            loss = tf.reduce_sum(matrix)
        differentiate(tape, loss, layer.trainable_variables)
        return matrix

    ids = [tf.range(BATCH), tf.range(BATCH)]
    assert "TfrsEmbedLookup" in operations_run(step, ids)
    np.testing.assert_array_equal(step(ids)[:, DIM], [2.0] * BATCH)


@pytest.mark.parametrize(
    ("dtypes", "read"),
    [
        (["bfloat16", "bfloat16"], "bfloat16"),
        (["float16", "float16"], "float16"),
        # An operation reads gradients of one type.
        (["bfloat16", "float16"], "float32"),
        (["float32", "bfloat16"], "float32"),
    ],
)
def test_gradients_are_read_before_they_are_cast_to_float32(dtypes, read):
    factors = [tf.constant(0.1, dtype) for dtype in dtypes]
    ids = [tf.constant([3, 5, 3])] * len(dtypes)

    def step(layer):
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=True)
            parts = [
                tf.cast(output, factor.dtype) * factor
                for output, factor in zip(outputs, factors, strict=True)
            ]
            loss = tf.add_n(
                [tf.reduce_sum(tf.cast(part, tf.float32)) for part in parts]
            )
        differentiate(tape, loss, layer.trainable_variables)

    layer, other = make_layer(len(dtypes)), make_layer(len(dtypes))
    function = tf.function(lambda: step(layer))
    function()
    graph = function.get_concrete_function().graph
    [update] = [
        op for op in graph.get_operations() if op.type == "TfrsEmbedUpdate"
    ]
    assert update.get_attr("T") == tf.as_dtype(read)
    step(other)
    for table, values in layer.embedding_tables.items():
        np.testing.assert_array_equal(values, other.embedding_tables[table])
