"""Hashed features on several replicas, and on slices of TPUs."""

import numpy as np
import pytest
import tensorflow as tf

from hashing_reference import (
    BATCH,
    DIM,
    HASHINGS,
    expected,
    feature_of,
    make_batch,
)
from process_tiers import on
from strategies.replicas import distribute, local, local_ids
from tfrs_embed import DistributedEmbedding
from tfrs_embed.compat.strategies import is_tpu

pytestmark = on("mirrored:2", "workers:2", "tpu:2x2", tier="nightly")

#: Of the tables, where ids are ragged or strings; else by row.
PLACES = {
    "hash": "column",
    "multiplex": "column",
    "mult": "table",
    "add": "replicated",
    "concat": "table",
    "prefixes": "column",
    "prefixes_concat": "replicated",
}
TPU_KINDS = ("mult", "multiplex", "prefixes")
NUMBERS = ("mult", "concat", "prefixes", "prefixes_concat")
SGD = tf.tpu.experimental.embedding.SGD


def train(strategy, layer, batches):
    """Each replica's vectors, after a step of training on its batch."""

    def step(ids, weights, slopes):
        with tf.GradientTape() as tape:
            outputs = layer({"f": ids}, weights={"f": weights})["f"]
            loss = tf.reduce_sum(tf.reshape(outputs, slopes.shape) * slopes)
        gradients = tape.gradient(loss, layer.trainable_variables)
        return outputs, [tf.identity(g) for g in gradients]

    given = [[b.ids, b.slopes] for b in batches]
    if batches[0].weights is not None:
        given = [[*g, b.weights] for g, b in zip(given, batches, strict=True)]
    spread = distribute(strategy, given)

    @tf.function
    def run(ids, slopes, weights=None):
        return strategy.run(step, (ids, weights, slopes))[0]

    return local(strategy, run(*spread))


@on(
    "mirrored:2",
    tier="more",
    when=lambda kind, form: (
        (kind, form) in (("add", "strings"), ("prefixes", "combined"))
    ),
)
@on(
    "workers:2",
    tier="more",
    when=lambda kind, form: (
        (kind, form) in (("mult", "combined"), ("multiplex", "ragged"))
    ),
)
@on("tpu:2x2", tier="more", when=lambda kind: kind in TPU_KINDS)
@pytest.mark.parametrize("form", ["combined", "ragged", "strings"])
@pytest.mark.parametrize("kind", HASHINGS)
def test_vectors_and_gradients(strategy, kind, form):
    hashing, world = HASHINGS[kind], strategy.num_replicas_in_sync
    strings = form == "strings"
    if strings and kind in NUMBERS:
        pytest.skip("their ids are numbers")
    rng = np.random.default_rng(2)
    kind_of_ids = "dense" if strings else form
    batches = [
        make_batch(hashing, kind_of_ids, rng, strings) for _ in range(world)
    ]
    place = "auto"
    if form != "combined" and not is_tpu(strategy):
        place = PLACES[kind]
    with strategy.scope():
        layer = DistributedEmbedding(
            {
                "f": feature_of(
                    hashing, kind_of_ids, "mean", BATCH * world, place
                )
            },
            optimizer=SGD(0.1),
            size_threshold=0,
        )
    if is_tpu(strategy) and (kind, form) == ("mult", "ragged"):
        with pytest.raises(ValueError, match=r"Feature 'f'.*multiplies.*dense"):
            train(strategy, layer, batches)
        return
    if is_tpu(strategy) and strings:
        tf.config.set_soft_device_placement(False)
        with pytest.raises(ValueError, match=r"Feature 'f'.*no strings.*soft"):
            train(strategy, layer, batches)
        tf.config.set_soft_device_placement(True)
    table = feature_of(hashing, form).table
    before = table.initializer([table.vocabulary_size, DIM]).numpy()
    vectors, gradient = expected(before, hashing, batches, "mean")
    found = train(strategy, layer, batches)
    for replica in local_ids(strategy):
        wanted = vectors[replica]
        np.testing.assert_allclose(
            np.reshape(found[replica], wanted.shape),
            wanted,
            rtol=1e-5,
            atol=1e-6,
        )
    np.testing.assert_allclose(
        layer.embedding_tables["t"].numpy(),
        before - 0.1 * gradient,
        rtol=1e-5,
        atol=1e-6,
    )
