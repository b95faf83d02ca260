"""Files of earlier versions restore, with the numbers that they hold."""

import zipfile

import numpy as np
import pytest
import tensorflow as tf

from fronts import keras, only_keras_2
from helpers import assert_same
from old_checkpoints.make import (
    FILES,
    LAYERS,
    STEPS,
    inputs,
    model_of,
    train,
    values,
    written,
)
from plans import on

pytestmark = on("keras:3")

KINDS = pytest.mark.parametrize("kind", sorted(LAYERS))


def assert_holds(layer, kind, name):
    """Asserts that a layer has what a file holds, by its keys."""
    wanted = written(kind, name)
    found = values(layer, kind)
    assert_same(
        {k: found[k] for k in wanted if k in found},
        wanted,
    )
    vectors = layer(inputs(kind, np.resize(wanted["keys"], 12)), training=False)
    vectors = vectors if kind == "all2all" else vectors["item"]
    np.testing.assert_array_equal(
        tf.reshape(vectors, [12, -1]), np.resize(wanted["parameters"], [12, 2])
    )


@KINDS
@pytest.mark.parametrize(
    "name",
    ["one", pytest.param("two", marks=only_keras_2("written by one replica"))],
)
@pytest.mark.parametrize("built", [False, True])
def test_a_checkpoint_of_tensorflow(kind, name, built):
    layer = LAYERS[kind]()
    if built:
        train(layer, kind, STEPS[0])
    checkpoint = tf.train.Checkpoint(layer=layer)
    status = checkpoint.read(str(FILES / kind / name))
    layer.build(None)
    status.assert_existing_objects_matched()
    assert_holds(layer, kind, name)


@KINDS
def test_a_keras_file(kind):
    model = keras.models.load_model(FILES / kind / "one.keras")
    assert_holds(model.layers[1], kind, "one")


@KINDS
def test_the_weights_of_a_keras_file(kind, tmp_path):
    with zipfile.ZipFile(FILES / kind / "one.keras") as file:
        file.extract("model.weights.h5", tmp_path)
    model, layer = model_of(kind)
    train(layer, kind, STEPS[0])
    model.load_weights(str(tmp_path / "model.weights.h5"))
    assert_holds(layer, kind, "one")


@KINDS
def test_training_goes_on(kind):
    layer = LAYERS[kind]()
    tf.train.Checkpoint(layer=layer).read(str(FILES / kind / "one"))
    before = written(kind, "one")
    places = np.resize(np.arange(len(before["keys"])), 12)
    train(layer, kind, before["keys"][places])
    times = np.bincount(places)[:, None]
    slots = before["accumulators"] + times**2
    rate = float(rate_of(layer, kind))
    after = values(layer, kind)
    np.testing.assert_array_equal(after["keys"], before["keys"])
    np.testing.assert_allclose(after["accumulators"], slots, rtol=1e-6)
    np.testing.assert_allclose(
        after["parameters"],
        before["parameters"] - rate * times / np.sqrt(slots),
        rtol=1e-5,
    )
    assert after["step"] == before["step"] + 1


def rate_of(layer, kind):
    if kind == "all2all":
        return layer.table_optimizer.learning_rate
    return layer.table_optimizers["items"].learning_rate
