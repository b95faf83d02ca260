"""Files of the first release restore, with the numbers that they hold."""

import zipfile

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import NUMBER, keras
from old_checkpoints.make import (
    FILES,
    LAST,
    LAYERS,
    STEPS,
    inputs,
    model_of,
    train,
    values,
    written,
)
from process_tiers import on
from training_helpers import assert_same

pytestmark = on("keras:3")

KINDS = pytest.mark.parametrize("kind", sorted(LAYERS))


def assert_holds(layer, kind):
    """Asserts that a layer has what the files hold, by its keys."""
    wanted = written(kind)
    assert_same(values(layer, kind), wanted)
    keys = np.resize(wanted.get("keys", np.arange(6)), 12)
    vectors = layer(inputs(kind, keys), training=False)
    vectors = vectors if kind == "all2all" else vectors["item"]
    np.testing.assert_array_equal(
        tf.reshape(vectors, [12, -1]), np.resize(wanted["parameters"], [12, 2])
    )


@KINDS
@pytest.mark.parametrize("built", [False, True])
def test_a_checkpoint_of_tensorflow(kind, built):
    layer = LAYERS[kind]()
    if built:
        train(layer, kind, STEPS[0])
    checkpoint = tf.train.Checkpoint(layer=layer)
    status = checkpoint.read(str(FILES / kind / LAST[kind]))
    layer.build(None)
    status.assert_existing_objects_matched()
    assert_holds(layer, kind)


@KINDS
def test_a_keras_file(kind):
    path = FILES / kind / f"keras{NUMBER}.keras"
    model = keras.models.load_model(path)
    assert_holds(model.layers[1], kind)


@KINDS
def test_the_weights_of_a_keras_file(kind, tmp_path):
    with zipfile.ZipFile(FILES / kind / f"keras{NUMBER}.keras") as file:
        file.extract("model.weights.h5", tmp_path)
    model, layer = model_of(kind)
    train(layer, kind, STEPS[0])
    model.load_weights(str(tmp_path / "model.weights.h5"))
    assert_holds(layer, kind)
