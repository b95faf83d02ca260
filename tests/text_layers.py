"""Layers of a table that keeps the text of its keys, and their steps."""

import tensorflow as tf

import tfrs_embed
from dynamic_layers import fingerprint
from keras_under_test import keras, layers
from tfrs_embed import DynamicKeys
from training_helpers import differentiate


def make(rows=6, padding=None, keep_text=True, **keys):
    """A layer of one table, with the feature "word" and bags of "words"."""
    declared = DynamicKeys(tf.string, keep_text=keep_text, **keys)
    initializer = keras.initializers.RandomNormal(seed=3)
    table = tfrs_embed.TableConfig("items", rows, 2, initializer, keys=declared)
    features = {
        "word": tfrs_embed.FeatureConfig("word", table),
        "words": tfrs_embed.FeatureConfig(
            "words", table, combiner="table", padding_value=padding
        ),
    }
    layer = layers.PartialTPUEmbedding(features, "adagrad", size_threshold=0)
    layer.build(None)
    return layer


def inputs_of(word, words):
    if not tf.is_tensor(words) and not hasattr(words, "values"):
        words = tf.ragged.constant(words, dtype=tf.string)
    return {"word": tf.constant(word, tf.string), "words": words}


def step_of(layer, graph=False):
    def step(inputs):
        with tf.GradientTape() as tape:
            vectors = layer(inputs, training=True)
            loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
        differentiate(tape, loss, layer.trainable_variables)

    return tf.function(step, reduce_retracing=True) if graph else step


def require_texts(table, known):
    """Requires the texts of all keys of a table to be those of `known`."""
    texts = {fingerprint(text): text for text in known}
    expected = [
        texts.get(key, b"") for key in table.variables["keys"].numpy().tolist()
    ]
    assert table.keys().tolist() == expected
    kept = [text for text in expected if text]
    assert table.statistics()["text"] == {
        "keys": len(kept),
        "unknown": len(expected) - len(kept),
        "bytes": sum(map(len, kept)),
    }
