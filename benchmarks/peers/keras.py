"""Keras's own layer, with a new optimizer."""

from peers import tf_steps
from peers.keras_of_process import keras


def make(case, form):
    layers = []
    for table in case.tables:
        layer = keras.layers.Embedding(
            table.rows,
            table.dim,
            embeddings_initializer=tf_steps.RowValues(),
        )
        layer.build(None)
        layers.append(layer)

    def embed(ids):
        return tf_steps.sum_bags(
            layers[f.table](i) for f, i in zip(case.features, ids, strict=True)
        )

    return tf_steps.make_runner(
        case,
        embed,
        [layer.embeddings for layer in layers],
        keras,
        tf_steps.make_optimizer(case, keras.optimizers),
        form,
    )
