"""Rows and gradients that are sent in fewer bits than they have.

Tables and gradients are multiples of 2^-10 that float32 adds up exactly, in any
order: what is left is the rounding, where the documentation says that it is.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import on
from strategies.replicas import distribute, local
from tfrs_embed.distribution import row_exchange
from training_helpers import differentiate

pytestmark = on("mirrored:2", "mirrored:4", "workers:2", tier="nightly")

ROWS, BATCH, HOTNESS = 60, 6, 48  # Bags large enough to be sent as vectors.
#: Each feature's table, and ids of a bag.
FEATURES = {
    "single": ("row", None),
    "bags": ("row", HOTNESS),
    "columns": ("column", 3),
    "whole": ("table", 3),
    "copies": ("replicated", 3),
}
WIDTHS = {"row": 32, "column": 16, "table": 5, "replicated": 16}


def rounded(values, dtype):
    cast = tf.cast(tf.constant(values, tf.float32), dtype)
    return tf.cast(cast, tf.float32).numpy()


def multiples(rng, shape):
    """Numbers of 12 bits, most of which neither dtype has."""
    return (rng.integers(-4095, 4096, shape) / 1024).astype(np.float32)


def make_layer(strategy, dtype):
    tables = {
        place: tfrs_embed.TableConfig(
            place, ROWS, dim, combiner="sum", placement=place
        )
        for place, dim in WIDTHS.items()
    }
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            {
                name: tfrs_embed.FeatureConfig(name, tables[table])
                for name, (table, _) in FEATURES.items()
            },
            optimizer=tf.tpu.experimental.embedding.SGD(1.0),
            communication_dtype=dtype,
        )
    rng = np.random.default_rng(5)
    values = {t: multiples(rng, (ROWS, dim)) for t, dim in WIDTHS.items()}
    layer.load_tables(values)
    return layer, values


def draw(strategy):
    """For each replica the ids, and the activations' gradients."""
    rng = np.random.default_rng(6)
    batches = []
    for _ in range(strategy.num_replicas_in_sync):
        ids, gradients = {}, {}
        for name, (table, size) in FEATURES.items():
            shape = (BATCH,) if size is None else (BATCH, size)
            # An id that all replicas look up, among others.
            ids[name] = rng.integers(0, ROWS, shape)
            ids[name][0] = 7
            gradients[name] = multiples(rng, (BATCH, WIDTHS[table]))
        batches.append((ids, gradients))
    return batches


def trainer(strategy, layer):
    def step(ids, gradients):
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=True)
            loss = tf.add_n(
                [tf.reduce_sum(outputs[k] * gradients[k]) for k in outputs]
            )
        differentiate(tape, loss, layer.trainable_variables)
        return outputs

    function = tf.function(lambda *batch: strategy.run(step, batch))
    return lambda batches: local(
        strategy, function(*distribute(strategy, batches))
    )


def expected_outputs(tables, ids, world, dtype):
    """A replica's activations."""
    found = {}
    for name, (table, size) in FEATURES.items():
        rows = tables[table][ids[name]]
        if table == "replicated":
            found[name] = rows.sum(1)
        elif size is None:
            found[name] = rounded(rows, dtype)
        elif table == "row":  # The sum of each shard is rounded.
            owner = ids[name] % world
            parts = [
                np.where((owner == shard)[..., None], rows, 0).sum(1)
                for shard in range(world)
            ]
            found[name] = sum(rounded(part, dtype) for part in parts)
        else:
            found[name] = rounded(rows.sum(1), dtype)
    return found


def spread(ids, gradients):
    """Sums bags' gradients by row."""
    total = np.zeros((ROWS, gradients.shape[1]), np.float32)
    bags = ids.reshape(len(ids), -1)
    for i in range(bags.shape[1]):
        np.add.at(total, bags[:, i], gradients)
    return total


def expected_gradients(batches, dtype, group):
    """The tables' gradients; group: the replicas of a first stage."""
    total = {t: np.zeros((ROWS, d), np.float32) for t, d in WIDTHS.items()}
    in_group = np.zeros((ROWS, WIDTHS["row"]), np.float32)
    for replica, (ids, gradients) in enumerate(batches):
        for name, (table, size) in FEATURES.items():
            mine = gradients[name]
            if table == "replicated":
                total[table] += rounded(spread(ids[name], mine), dtype)
            elif size is None:
                in_group += rounded(spread(ids[name], mine), dtype)
                if replica % group == group - 1:
                    total[table] += rounded(in_group, dtype)
                    in_group[:] = 0
            else:
                total[table] += spread(ids[name], rounded(mine, dtype))
    return total


@on("mirrored:2", tier="more", when=lambda dtype: dtype == "float16")
@on("mirrored:4", tier="more", when=lambda group: group == 2)
@on("workers:2", tier="more", when=lambda dtype: dtype == "float16")
@pytest.mark.parametrize(
    ("dtype", "group"),
    [("bfloat16", 1), ("float16", 1), ("bfloat16", 2)],
    ids=["bfloat16", "half", "two_stages"],
)
def test_a_step_is_the_references_but_for_rounding(
    strategy, monkeypatch, dtype, group
):
    world = strategy.num_replicas_in_sync
    if group == world:
        pytest.skip("one group")
    monkeypatch.setattr(row_exchange, "first_stage", lambda *_: group)
    layer, tables = make_layer(strategy, dtype)
    assert layer.placement.communication_dtype == dtype
    assert f"sent as {dtype}" in str(layer.placement)
    batches = draw(strategy)
    found = trainer(strategy, layer)(batches)
    for replica, outputs in found.items():
        expected = expected_outputs(tables, batches[replica][0], world, dtype)
        for name in FEATURES:
            np.testing.assert_array_equal(outputs[name], expected[name])
    gradients = expected_gradients(batches, dtype, group)
    for name, table in layer.embedding_tables.items():
        now = tables[name] - gradients[name]
        assert np.any(now != tables[name])
        np.testing.assert_array_equal(table.numpy(), now)
        if name == "replicated":
            for copy in table._variables:
                np.testing.assert_array_equal(copy.numpy(), now)


@on("mirrored:2", tier="more")
def test_evaluation_reads_exact_rows_outside_of_replicas(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("no worker has all rows")
    layer, tables = make_layer(strategy, "bfloat16")
    ids = draw(strategy)[0][0]
    outside = layer(ids, training=False)
    for name, (table, size) in FEATURES.items():
        rows = tables[table][ids[name]]
        exact = rows if size is None else rows.sum(1)
        np.testing.assert_array_equal(outside[name], exact)
    inside = strategy.run(
        tf.function(lambda: layer(ids, training=False)["single"])
    )
    for each in strategy.experimental_local_results(inside):
        rows = tables["row"][ids["single"]]
        np.testing.assert_array_equal(each, rounded(rows, "bfloat16"))


@on("mirrored:2", tier="more", when=lambda dtype: dtype == "float16")
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16"], ids=["bfloat16", "half"]
)
def test_what_is_not_finite_is_not_hidden(strategy, dtype):
    layer, tables = make_layer(strategy, dtype)
    special = np.array([np.nan, np.inf, -np.inf, 70_000, 3e-6], np.float32)
    for table in tables.values():
        table[7, :5] = special
    layer.load_tables(tables)
    batches = draw(strategy)
    for _, gradients in batches:
        for each in gradients.values():
            each[0, :5] = special
    outputs = trainer(strategy, layer)(batches)
    expected = rounded(special, dtype)
    assert np.isinf(expected[3]) == (dtype == "float16")
    for found in outputs.values():
        np.testing.assert_array_equal(found["single"][0, :5], expected)
    for name, table in layer.embedding_tables.items():
        row = table.numpy()[7, :4]
        assert not np.isfinite(row[:3]).any(), name
        assert np.isfinite(row[3]) == (dtype == "bfloat16"), name


@pytest.mark.parametrize("kind", ["hashed", "rows", "dynamic"])
def test_layers_of_keys(strategy, kind):
    """Rows are within 2^-8, sums of gradients within 2^-8 of their terms."""

    def make(dtype):
        with strategy.scope():
            if kind == "dynamic":
                return tfrs_embed.DynamicEmbedding(
                    8,
                    input_dim=200,
                    optimizer=tf.tpu.experimental.embedding.SGD(1.0),
                    embedding_initializer=tf.keras.initializers.RandomUniform(
                        seed=1
                    ),
                    communication_dtype=dtype,
                )
            return tfrs_embed.All2AllDenseEmbedding(
                200,
                8,
                1,
                1,
                dynamic_input=True,
                use_hashtable=kind == "hashed",
                embedding_initializer=tf.keras.initializers.RandomUniform(
                    seed=1
                ),
                optimizer=tf.tpu.experimental.embedding.SGD(1.0),
                communication_dtype=dtype,
            )

    rng = np.random.default_rng(3)
    world = strategy.num_replicas_in_sync
    batches = [
        (rng.integers(0, 30, 40), rng.normal(size=(40, 8)).astype(np.float32))
        for _ in range(world)
    ]
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        layer = make(dtype)

        def step(keys, gradients, layer=layer):
            with tf.GradientTape() as tape:
                vectors = layer(keys, training=True)
                loss = tf.reduce_sum(vectors * gradients)
            differentiate(tape, loss, layer.trainable_variables)
            return vectors

        function = tf.function(lambda *b, step=step: strategy.run(step, b))
        outputs[dtype] = [
            local(strategy, function(*distribute(strategy, batches)))
            for _ in range(2)
        ]
        config = layer.get_config()
        assert config["communication_dtype"] == dtype
        assert type(layer).from_config(config).get_config() == config
    size = np.zeros((30, 8))
    for keys, gradients in batches:
        np.add.at(size, keys, np.abs(gradients))
    for replica in outputs["float32"][0]:
        exact, sent = (
            [step[replica] for step in outputs[dtype]]
            for dtype in ("float32", "bfloat16")
        )
        assert np.any(exact[0] != sent[0])
        np.testing.assert_array_equal(sent[0], rounded(exact[0], "bfloat16"))
        error = np.abs(exact[1] - sent[1])
        bound = size[batches[replica][0]] + np.abs(exact[1])
        assert np.all(error <= 2.0**-8 * bound * 1.01)
        assert np.any(error > 0)
