"""Layers inside models of Keras 3: an error that says what to do instead."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import tfrs_embed

pytestmark = pytest.mark.xdist_group("keras_3")

# What tf.keras is, is decided as tensorflow is imported: so in a process that
# is told nothing. Each function is tried, and what it raises printed.
SCRIPT = '''
import json

import numpy as np
import tensorflow as tf

import tfrs_embed

assert tf.keras.Model.__module__.startswith("keras.src"), tf.keras.Model
config = tfrs_embed.FeatureConfig
big, small = (tfrs_embed.TableConfig(f"t{n}", n, 4) for n in (100, 5))
ids = {"a": np.arange(4), "b": np.arange(4)}
targets = np.zeros([4, 4])


def make():
    return tfrs_embed.PartialTPUEmbedding(
        {"a": config("a", big), "b": config("b", small)},
        "sgd",
        size_threshold=9,
    )


def symbolic(shape=()):
    return tf.keras.Input(shape, dtype=tf.int64)


def a_step_of_its_own():
    class Towers(tf.keras.Model):
        """Trains as models of tfrs do."""

        def __init__(self):
            super().__init__()
            self.embedding = make()
            self.dense = tf.keras.layers.Dense(1)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                vectors = self.embedding(data[0])["a"]
                loss = tf.reduce_sum(self.dense(vectors))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables)
            )
            return {"loss": loss}

    model = Towers()
    model.compile("sgd")
    model.fit(ids, targets, verbose=0)


def an_item_of_an_attribute():
    class Listed(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.embeddings = [make()]

        def call(self, inputs):
            return self.embeddings[0](inputs)["b"]

    model = Listed()
    model.compile("sgd", "mse")
    model.fit(ids, targets, verbose=0)


def inside_a_tf_keras_model():
    class Outer(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, inputs):
            return self.inner(inputs)

    Outer()(ids)


def a_lambda():
    layer = tfrs_embed.Embedding(5, 2)
    tf.keras.layers.Lambda(lambda x: layer(x))(np.zeros([2, 2], np.int64))


def symbolic_inputs():
    make()({"a": symbolic(), "b": symbolic()})


def symbolic_inputs_of_distributed():
    tfrs_embed.DistributedEmbedding(config("a", big))(symbolic())


def symbolic_inputs_of_all2all():
    tfrs_embed.All2AllDenseEmbedding(4, 2, 1, 1)(symbolic((1, 1)))


def symbolic_inputs_of_embedding():
    tfrs_embed.Embedding(4, 2)(symbolic((3,)))


def fine_in_tf_keras():
    tf.keras.layers.Dense(2)(np.zeros([2, 2]))
    model = Inner()
    model.compile("sgd", "mse")
    model.fit(ids, targets, verbose=0)
    model.layer(ids)
    inputs = {k: tf_keras.Input((), dtype=tf.int64) for k in ids}
    tf_keras.Model(inputs, make()(inputs))(ids)
    # Side by side, each in its own.
    both = tf.keras.layers.Dense(2)(model.layer(ids)["a"])
    assert both.shape == (4, 2)


import tf_keras


class Inner(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.layer, self.layers_ = make(), [make()]

    def call(self, inputs):
        return self.layer(inputs)["a"] + self.layers_[0](inputs)["b"]


raised = {}
for name, case in list(globals().items()):
    if callable(case) and getattr(case, "__module__", "") == "__main__":
        if name in ("make", "symbolic", "Inner"):
            continue
        try:
            case()
            raised[name] = None
        except Exception as error:
            raised[name] = [type(error).__name__, str(error)]
print("RAISED", json.dumps(raised))
'''

CASES = {
    "a_step_of_its_own": "taken for variables of Keras 3 alone",
    "an_item_of_an_attribute": "called by Listed 'listed'",
    "inside_a_tf_keras_model": "called by Outer 'outer'",
    "a_lambda": "called by Lambda 'lambda'",
    "symbolic_inputs": "called with a KerasTensor",
    "symbolic_inputs_of_distributed": "called with a KerasTensor",
    "symbolic_inputs_of_all2all": "called with a KerasTensor",
    "symbolic_inputs_of_embedding": "called with a KerasTensor",
}


@pytest.fixture(scope="module")
def raised():
    root = str(pathlib.Path(tfrs_embed.__file__).parents[1])
    kept = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**kept, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [s for s in done.stdout.splitlines() if s.startswith("RAISED ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RAISED "))


@pytest.mark.parametrize("case", CASES)
def test_keras_3_around_a_layer_is_an_error_that_says_what_to_do(raised, case):
    assert raised[case] is not None
    kind, text = raised[case]
    assert kind == "TypeError"
    for words in (
        CASES[case],
        "tfrs_embed.keras3",
        "TF_USE_LEGACY_KERAS=1",
        "tf_keras.Model",
    ):
        assert words in text


def test_keras_3_beside_a_layer_is_none(raised):
    assert raised.pop("fine_in_tf_keras") is None
    assert set(raised) == set(CASES)
