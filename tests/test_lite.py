"""Models that TensorFlow Lite converts."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed import FeatureConfig, TableConfig

IDS = np.array([[3, 7, 3], [0, 9, 1]], np.int64)


def run(converter, inputs, select=False):
    """Converts a model, and runs it in TensorFlow Lite's interpreter."""
    if select:
        converter.target_spec.supported_ops = [
            tf.lite.OpsSet.TFLITE_BUILTINS,
            tf.lite.OpsSet.SELECT_TF_OPS,
        ]
    lite = tf.lite.Interpreter(model_content=converter.convert())
    lite.allocate_tensors()
    [given], [output] = lite.get_input_details(), lite.get_output_details()
    lite.set_tensor(given["index"], inputs)
    lite.invoke()
    return lite.get_tensor(output["index"])


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_a_plain_layer_needs_no_operations_of_tensorflow(combiner):
    ids = tf_keras.Input([3], 2, dtype=tf.int64)
    vectors = tfrs_embed.Embedding(10, 4, combiner=combiner)(ids)
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1)(vectors))
    found = run(tf.lite.TFLiteConverter.from_keras_model(model), IDS)
    np.testing.assert_allclose(found, model(IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threshold", [0, None])
def test_an_exported_model(threshold, tmp_path):
    ids = tf_keras.Input([3], 2, dtype=tf.int64)
    feature = FeatureConfig("movie", TableConfig("movies", 10, 4))
    layer = tfrs_embed.PartialTPUEmbedding(
        feature, "sgd", size_threshold=threshold
    )
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1)(layer(ids)))
    path = str(tmp_path / "model")
    with tfrs_embed.kernels.disabled():
        tfrs_embed.serving.export(model, path, progress=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(path)
    found = run(converter, IDS, select=True)
    np.testing.assert_allclose(found, model(IDS), rtol=1e-5, atol=1e-6)
