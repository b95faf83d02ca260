"""A model of MovieLens's ratings, for one device and for many, in either Keras.

It is the factorisation machine of movielens_machine.py. One
`PartialTPUEmbedding` holds all tables. The large ones are trained row by row
with Adagrad, the others by the model's Adam.

The model is one of what `tf.keras` is: of tf_keras, by way of TFRS, if
TF_USE_LEGACY_KERAS=1 was set before TensorFlow was imported; else of Keras 3.
"""

from __future__ import annotations

from typing import Any

import movielens
import tensorflow as tf

if tf.keras.Model.__module__.startswith("tf_keras"):
    from movielens_machine_tfrs import RankingModel
else:
    from movielens_machine_keras3 import RankingModel


def make(
    data: movielens.MovieLens,
    batch_size: int,
    steps: int,
    size_threshold: int | None,
    steps_per_execution: int = 1,
    **layer_options: Any,
) -> tf.keras.Model:
    """Returns a model, compiled.

    Args:
        data: what to train on.
        batch_size: ratings per step, of all replicas.
        steps: the steps of the whole training.
        size_threshold: rows above which a table is large; None: none is.
        steps_per_execution: steps that Keras runs at once.
        **layer_options: `table_dtype`, and arguments of its
            `PartialTPUEmbedding`.
    """

    optimizers = tf.keras.optimizers

    def decay(learning_rate: float) -> Any:
        """Falls linearly, to zero at the end of training."""
        return optimizers.schedules.PolynomialDecay(learning_rate, steps, 0.0)

    model = RankingModel(
        data,
        batch_size,
        # A row's gradient is a mean over the batch, so that of a rare row is
        # tiny: next to Keras's initial accumulator of 0.1 it would do nothing.
        optimizers.Adagrad(decay(0.03), initial_accumulator_value=1e-5),
        size_threshold,
        **layer_options,
    )
    model.compile(
        optimizers.Adam(decay(0.002)),
        steps_per_execution=steps_per_execution,
    )
    return model
