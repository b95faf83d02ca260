"""Training steps of the contenders that run on TensorFlow."""

import cases
import numpy as np
import tensorflow as tf

from peers import Runner


class RowValues(tf.keras.initializers.Initializer):
    """Fills tables, or blocks of their rows, with `cases.row_values`."""

    def __call__(
        self, shape, dtype=None, partition_shape=None, partition_offset=(0, 0)
    ):
        rows, dim = partition_shape or shape
        first = partition_offset[0]
        values = cases.row_values(np.arange(first, first + rows))
        values = tf.constant(values[:, None], dtype or tf.float32)
        return tf.tile(values, [1, dim])


def prepare(case, form):
    """Makes a function that turns a batch into tensors."""

    def convert(ids):
        if ids.shape[1] == 1:
            return tf.constant(ids[:, 0])
        if form != "ragged":
            return tf.constant(ids)
        return tf.RaggedTensor.from_row_splits(
            ids.reshape(-1), range(0, ids.size + 1, ids.shape[1])
        )

    def convert_all(batch):
        inputs = [convert(ids) for ids in batch]
        if not case.stacked:
            return inputs
        if not isinstance(inputs[0], tf.RaggedTensor):
            return tf.stack(inputs)
        return (
            tf.stack([i.values for i in inputs]),
            tf.stack([i.row_splits for i in inputs]),
        )

    return convert_all


def unstack(inputs):
    """Makes each feature's ids of a stacked case's inputs."""
    if isinstance(inputs, tf.Tensor):
        return tf.unstack(inputs)
    return [
        tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        for values, splits in zip(*map(tf.unstack, inputs), strict=True)
    ]


def sum_bags(activations):
    """Sums dense ids' vectors where they come one by one."""
    return [
        tf.reduce_sum(a, 1) if a.shape.rank == 3 else a for a in activations
    ]


def make_head(case, keras):
    """The loss of activations side by side, and what it trains."""
    if not case.mlp:
        return (lambda x: tf.reduce_sum(x * x)), []
    numerical, labels = map(tf.constant, case.dense_inputs())
    top = []
    for kernel, bias in case.mlp_weights():
        last = len(top) == len(case.mlp) - 1
        top.append(make_dense(keras, kernel, bias, None if last else "relu"))
    bottom = []
    for kernel, bias in case.bottom_weights():
        bottom.append(make_dense(keras, kernel, bias, "relu"))
        bottom.append(keras.layers.BatchNormalization())
        bottom[-1].build((None, kernel.shape[1]))
    layers = [*bottom, *top]

    def loss(x):
        beside = numerical
        for layer in bottom:
            beside = layer(beside, **_training(keras, layer))
        x = tf.concat([x, beside], 1)
        for layer in top:
            x = layer(x)
        return tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(labels, x)
        )

    return loss, [v for layer in layers for v in layer.trainable_variables]


def make_dense(keras, kernel, bias, activation):
    """A layer with these weights."""
    layer = keras.layers.Dense(kernel.shape[1], activation=activation)
    layer.build((None, kernel.shape[0]))
    layer.set_weights([kernel, bias])
    return layer


def _training(keras, layer):
    if isinstance(layer, keras.layers.BatchNormalization):
        return {"training": True}
    return {}


def make_runner(
    case,
    embed,
    table_variables,
    keras,
    optimizer,
    form,
    info="",
    xla=False,
    embed_to_train=None,
):
    """Makes a runner.

    Args:
        case: the case.
        embed: gives a list of [batch, dim] for a list of ids.
        table_variables: what the optimizer trains for `embed`.
        keras: the module that layers are taken from.
        optimizer: of that Keras.
        form: of the ids.
        info: for the report.
        xla: whether to compile with it.
        embed_to_train: what training calls, if not `embed`.
    """
    embed_to_train = embed_to_train or embed
    head, variables = make_head(case, keras)
    variables = [*table_variables, *variables]
    # Keras 3 wraps TensorFlow's variables.
    tensors = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    if case.kind != "forward" and hasattr(optimizer, "build"):
        optimizer.build(variables)
    unpack = unstack if case.stacked else list

    @tf.function(jit_compile=xla)
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = head(tf.concat(embed_to_train(unpack(inputs)), 1))
        gradients = tape.gradient(loss, tensors)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function(jit_compile=xla)
    def forward(inputs):
        return embed(unpack(inputs))

    return Runner(
        prepare(case, form),
        lambda inputs: float(step(inputs)),
        forward,
        info,
    )


def adagrad_arguments(case):
    """Keras's own defaults, given lest they change."""
    if not case.optimizer.endswith("Adagrad"):
        return {}
    return {
        "initial_accumulator_value": cases.INITIAL_ACCUMULATOR,
        "epsilon": cases.EPSILON,
    }


def make_optimizer(case, module):
    """The case's optimizer, of a module of Keras's; or the one like it."""
    return getattr(module, case.optimizer.removeprefix("RowWise"))(
        learning_rate=case.learning_rate, **adagrad_arguments(case)
    )
