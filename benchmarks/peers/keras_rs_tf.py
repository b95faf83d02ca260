"""keras_rs's layer on TensorFlow."""

import dataclasses

import keras
import tensorflow as tf

from peers import keras_rs_layer, tf_steps


def make(case, form):
    layer = keras_rs_layer.make_layer(case)
    runner = tf_steps.make_runner(
        case,
        layer,
        layer.trainable_variables,
        keras,
        tf_steps.make_optimizer(case, keras.optimizers),
        form,
        xla=form == "XLA",
    )
    # It takes no vectors of ids, so these get one column.
    return dataclasses.replace(
        runner, prepare=lambda batch: [tf.constant(ids) for ids in batch]
    )
