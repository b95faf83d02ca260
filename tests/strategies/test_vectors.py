"""Tables by row whose bags are exchanged by vectors, beside those by rows."""

import numpy as np
import tensorflow as tf

import tfrs_embed
from process_tiers import on
from strategies.replicas import distribute, local
from training_helpers import differentiate

pytestmark = on("mirrored:2", "mirrored:4", "workers:3", tier="nightly")

ROWS, SIZE = 40, 48  # Enough ids in a bag for four replicas.


def make_layer(strategy, **options):
    """Two tables of different widths; one has features of both kinds."""
    tables = [
        tfrs_embed.TableConfig(
            name,
            ROWS,
            dim,
            tf.keras.initializers.RandomUniform(seed=dim),
            combiner=combiner,
            placement="row",
        )
        for name, dim, combiner in (("a", 32, "mean"), ("b", 12, "sum"))
    ]
    features = {
        "bags": tfrs_embed.FeatureConfig("bags", tables[0]),
        "single": tfrs_embed.FeatureConfig("single", tables[0]),
        "others": tfrs_embed.FeatureConfig("others", tables[1]),
    }
    with strategy.scope():
        return tfrs_embed.DistributedEmbedding(
            features, optimizer="adagrad", **options
        )


def draw(strategy, seed, sizes):
    rng = np.random.default_rng(seed)
    return [
        {
            "bags": rng.integers(0, ROWS, (n, SIZE)),
            "single": rng.integers(0, ROWS, n),
            "others": rng.integers(0, ROWS, (n, SIZE)),
        }
        for n in (
            sizes[r % len(sizes)] for r in range(strategy.num_replicas_in_sync)
        )
    ]


def trained_by(layer, strategy, weighted=False):
    @tf.function(reduce_retracing=True)
    def function(ids):
        def step(ids):
            weights = None
            if weighted:
                weights = {
                    k: tf.cast(v % 7, tf.float32) for k, v in ids.items()
                }
                weights["single"] = None
            with tf.GradientTape() as tape:
                outputs = layer(ids, weights, training=True)
                loss = tf.add_n(
                    [tf.reduce_sum((v + 1.0) ** 2) for v in outputs.values()]
                )
            differentiate(tape, loss, layer.trainable_variables)
            return outputs

        return strategy.run(step, (ids,))

    return lambda batches: local(
        strategy, function(distribute(strategy, batches))
    )


@on("mirrored:2", "mirrored:4", tier="more")
def test_bytes_are_those_of_the_formula(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_layer(strategy)
    batches = draw(strategy, 1, (5, 2))
    for batch in batches:
        batch["single"][:] = 0  # One key, of one shard.
    trained_by(layer, strategy)(batches)
    # The ids of two features, and the columns of both tables.
    bags, vectors = 5 * 2 * SIZE, 5 * (32 + 12)
    assert (bags, vectors) == (480, 220)
    bags, vectors = 480, 224  # Rounded up to eighths of powers of two.
    rows = (world - 1) * (8 * (1 + 8) + 2 * 4 * 32 * 8)
    expected = 4 * bags + 4 * vectors * world + rows
    for traffic in layer._engine_layer.engine.traffic():
        assert traffic.bytes == expected


@on("mirrored:2", tier="more")
def test_evaluation_and_the_whole_table_outside(strategy):
    layer = make_layer(strategy)
    batches = draw(strategy, 3, (3, 1))
    step = trained_by(layer, strategy)
    step(batches)
    tables = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    look_up = tf.function(
        lambda ids: strategy.run(lambda ids: layer(ids, training=False), (ids,))
    )
    for replica, found in local(
        strategy, look_up(distribute(strategy, batches))
    ).items():
        ids = batches[replica]
        np.testing.assert_allclose(
            found["bags"],
            tables["a"][ids["bags"]].mean(1),
            rtol=1e-5,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            found["others"],
            tables["b"][ids["others"]].sum(1),
            rtol=1e-4,
            atol=1e-5,
        )
        np.testing.assert_array_equal(
            found["single"], tables["a"][ids["single"]]
        )
