"""A second strategy in one process, as a notebook's cell makes when run again.

In a process of its own: TensorFlow's own all-reduces would mix the two up.
"""

import numpy as np
import tensorflow as tf

import tfrs_embed
from strategies.replicas import distribute
from training_helpers import differentiate

WIDTHS = (4, 7)


def again(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy(strategy.extended.worker_devices)


def make(strategy, width):
    table = tfrs_embed.TableConfig("t", 50, width, "ones", combiner="sum")
    feature = tfrs_embed.FeatureConfig("f", table)
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            feature, tf.tpu.experimental.embedding.SGD(0.5), size_threshold=0
        )

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        differentiate(tape, loss, layer.trainable_variables)
        return loss

    return layer, tf.function(lambda ids: strategy.run(step, (ids,)))


def test_two_strategies_do_not_mix_their_exchanges(strategy):
    ids = np.arange(3 * strategy.num_replicas_in_sync)
    made = []
    for each, width in zip((strategy, again(strategy)), WIDTHS, strict=True):
        layer, train = make(each, width)
        made.append(
            (layer, train, distribute(each, np.split(ids, len(ids) // 3)))
        )
    for _ in range(2):
        for _, train, batch in made:
            train(batch)
    for (layer, _, _), width in zip(made, WIDTHS, strict=True):
        expected = np.ones([50, width])
        expected[ids] -= 2 * 0.5
        table = layer.embedding_tables["t"].numpy()
        np.testing.assert_array_equal(table, expected)
