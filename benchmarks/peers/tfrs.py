"""TFRS's layer, whose tables the model's optimizer trains off-TPU."""

import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

from peers import tf_steps

tpu = tf.tpu.experimental.embedding


def make(case, form):
    tables = [
        tpu.TableConfig(
            table.rows,
            table.dim,
            combiner="sum",
            name=f"table_{i}",
            initializer=tf_steps.RowValues(),
        )
        for i, table in enumerate(case.tables)
    ]
    # Without an optimizer: its slots would be for exporting only.
    layer = tfrs.layers.embedding.TPUEmbedding(
        [tpu.FeatureConfig(tables[f.table]) for f in case.features], None
    )
    layer.build([])
    return tf_steps.make_runner(
        case,
        lambda ids: tf_steps.sum_bags(layer(ids)),
        layer.trainable_variables,
        tf_keras,
        # On tables, the legacy ones are faster than the new.
        tf_steps.make_optimizer(case, tf_keras.optimizers.legacy),
        form,
    )
