"""Runs one program, and writes what its models' fits and evaluations gave.

    python child.py PROGRAM RESULTS --epochs N

Initial values of embeddings, by whatever layer, come from the row alone; all
else is drawn from one seed. TF_USE_LEGACY_KERAS says which Keras it is about.
"""

import argparse
import functools
import inspect
import json
import os
import pathlib
import sys
from unittest import mock

import matplotlib
import numpy as np
import tensorflow as tf
from matplotlib import style

matplotlib.use("agg")
# A tutorial has the name from before matplotlib 3.6.
style.library["seaborn-whitegrid"] = style.library["seaborn-v0_8-whitegrid"]


def initial_values(keras):
    """Returns an initializer whose values depend on rows and columns alone."""

    @keras.utils.register_keras_serializable("tutorials")
    class ByRow(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None, partition_offset=None, **_):
            first = partition_offset or [0] * len(shape)
            axes = [tf.range(n) + f for n, f in zip(shape, first, strict=True)]
            rows, columns = (tf.cast(axis, tf.float32) for axis in axes)
            phase = rows[:, None] * 1.37 + columns * 2.91
            return tf.cast(0.05 * tf.sin(phase), dtype or tf.float32)

        def get_config(self):
            return {}

    return ByRow


def set_default(layer, initializer, made):
    """Makes `initializer` what `layer` takes where none is given."""
    init = layer.__init__

    @functools.wraps(init)
    def with_default(self, *args, **kwargs):
        if len(args) < 3:
            kwargs.setdefault("embeddings_initializer", initializer())
        # Keras 3.15 takes no size of numpy; a program written before has some.
        args = [int(a) if isinstance(a, np.integer) else a for a in args]
        made.append(type(self).__module__.partition(".")[0])
        init(self, *args, **kwargs)

    # Keras 3 reads the names of arguments, not through `wraps`.
    with_default.__signature__ = inspect.signature(init)
    layer.__init__ = with_default


def sum_rows_first(keras):
    """Makes Keras 3's optimizers sum the gradients of an id that occurs twice.

    Its own Adagrad and Adam square each of them by itself, where Keras 2, and
    the formula, square their sum.
    """
    apply = keras.optimizers.Optimizer.apply

    def summed(gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        rows, places = tf.unique(gradient.indices)
        sums = tf.math.unsorted_segment_sum(
            gradient.values, places, tf.size(rows)
        )
        return tf.IndexedSlices(sums, rows, gradient.dense_shape)

    def apply_sums(self, grads, trainable_variables=None):
        return apply(self, [summed(g) for g in grads], trainable_variables)

    keras.optimizers.Optimizer.apply = apply_sums


def record(model, results, epochs):
    """Keeps what `fit` and `evaluate` of all models return; fits are short."""
    fit, evaluate = model.fit, model.evaluate

    @functools.wraps(fit)
    def short_fit(self, *args, **kwargs):
        # At least one validation.
        least = max(epochs, kwargs.get("validation_freq", 1))
        kwargs["epochs"] = min(kwargs.get("epochs", 1), least)
        history = fit(self, *args, **kwargs)
        results.append({"fit": history.history})
        return history

    @functools.wraps(evaluate)
    def kept_evaluate(self, *args, **kwargs):
        values = evaluate(self, *args, **kwargs)
        named = values if isinstance(values, dict) else {"values": values}
        results.append({"evaluate": named})
        return values

    model.fit, model.evaluate = short_fit, kept_evaluate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, required=True)
    flags = parser.parse_args()
    if os.environ["TF_USE_LEGACY_KERAS"] == "1":
        import tf_keras as keras

        import tfrs_embed as ours
    else:
        import keras
        import tfrs_embed.keras3 as ours

        sum_rows_first(keras)
    initializer = initial_values(keras)
    made, results = [], []
    set_default(keras.layers.Embedding, initializer, made)
    set_default(ours.Embedding, initializer, made)
    record(keras.Model, results, flags.epochs)
    # TensorFlow 2.16 lost Estimators, which tensorflow_ranking imports.
    if not hasattr(tf, "estimator"):
        tf.estimator = tf.compat.v1.estimator = mock.MagicMock()
    keras.utils.set_random_seed(1)
    code = compile(flags.program.read_text(), flags.program.name, "exec")
    sys.argv = [flags.program.name]
    exec(code, {"__name__": "__main__"})
    found = {"made": made, "results": results}
    text = json.dumps(found, default=lambda value: np.asarray(value).tolist())
    flags.results.write_text(text)


if __name__ == "__main__":
    main()
