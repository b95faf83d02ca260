"""The Keras whose layers this process tests, and these layers.

The environment variable TFRS_EMBED_TEST_KERAS says which: 2, tf_keras, unless
it is set to 3. What tests say of layers holds for those of both.
"""

import importlib
import os

import pytest
import tensorflow as tf

from tfrs_embed import FeatureConfig, TableConfig

#: The Keras's number.
NUMBER = int(os.environ.get("TFRS_EMBED_TEST_KERAS", "2"))

keras = importlib.import_module({2: "tf_keras", 3: "keras"}[NUMBER])
#: The module with the layers.
layers = importlib.import_module(
    {2: "tfrs_embed", 3: "tfrs_embed.keras3"}[NUMBER]
)


def layer_of_one_table(
    optimizer, rows, dim, table=None, kind=layers.PartialTPUEmbedding, **options
):
    """A layer of a feature "f" and its table "t", which an engine holds.

    Args:
        optimizer: the layer's.
        rows: the table's.
        dim: the table's width.
        table: further arguments of the table; None: none.
        kind: the layer's class.
        **options: further arguments of the layer.
    """
    start = keras.initializers.RandomNormal(seed=1)
    config = TableConfig(
        "t", rows, dim, **{"initializer": start, **(table or {})}
    )
    if kind is layers.PartialTPUEmbedding:
        options["size_threshold"] = 0
    return kind(FeatureConfig("f", config), optimizer=optimizer, **options)


def only_keras_2(reason):
    """Marks a test, or a test's parameter, of what Keras 3 doesn't have."""
    return pytest.mark.skipif(NUMBER != 2, reason=f"Keras 3: {reason}")


def only_keras_3(reason):
    """Marks a test, or a test's parameter, of what tf_keras doesn't have."""
    return pytest.mark.skipif(NUMBER != 3, reason=f"tf_keras: {reason}")


def of_keras_2(*formats):
    """Parameters of a test: formats that Keras 3 doesn't save in.

    Args:
        *formats: their names, or tuples of a name and other parameters.
    """
    mark = only_keras_2("it has no such format")
    return [
        pytest.param(*(each if isinstance(each, tuple) else [each]), marks=mark)
        for each in formats
    ]


def name_of(weight):
    """A weight's name, those of its layers before it."""
    return weight.name.removesuffix(":0") if NUMBER == 2 else weight.path


def export(model, path):
    """Exports a model as Keras does; returns what a server would call."""
    if NUMBER == 2:
        tf.saved_model.save(model, path)
        return tf.saved_model.load(path)
    model.export(path, verbose=False)
    loaded = tf.saved_model.load(path)
    # It has the variables of its functions.
    return lambda inputs: loaded.serve(inputs)


def signature_of(inputs):
    """What a subclassed model must be told to be exported for serving.

    tf_keras remembers what it was called with.
    """
    if NUMBER == 2:
        return None
    return tf.nest.map_structure(
        lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), inputs
    )


# The loss scale goes by other names in each.


def scale_loss(optimizer, loss):
    """The loss as a LossScaleOptimizer scales it."""
    if NUMBER == 2:
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss)


def with_fixed_scale(kind, rate, scale):
    """An optimizer that multiplies its loss by a fixed scale."""
    if NUMBER == 2:
        return keras.mixed_precision.LossScaleOptimizer(
            kind(rate), dynamic=False, initial_scale=scale
        )
    return kind(rate, loss_scale_factor=scale)


def unscale(optimizer, gradients):
    """The gradients of such a loss, as of the loss itself."""
    if NUMBER == 2:
        return optimizer.get_unscaled_gradients(gradients)
    factor = 1 / loss_scale(optimizer)
    return [tf.convert_to_tensor(each) * factor for each in gradients]


def apply_scaled(optimizer, gradients, variables):
    """Applies the gradients of such a loss."""
    if NUMBER == 2:
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def loss_scale(optimizer):
    """The scale."""
    if NUMBER == 2:
        return optimizer.loss_scale
    if optimizer.built:
        return optimizer.dynamic_scale.value
    return optimizer.initial_scale
