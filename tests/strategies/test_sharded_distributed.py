"""DistributedEmbedding on several replicas: sharded and mirrored tables."""

import os

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import on
from strategies.keras_models import (
    ITEMS,
    PER_REPLICA,
    USERS,
    as_batches,
    assert_equal_tables,
    compile_model,
    distribute,
    make_model,
    make_samples,
)
from strategies.replicas import distribute as distribute_each
from training_helpers import differentiate

pytestmark = on("mirrored:2", tier="nightly")

TABLES = {"user": USERS, "item": ITEMS, "hour": 5}


def make(**kwargs):
    """A model of which two tables are sharded and one is mirrored."""
    return make_model("adam", make=tfrs_embed.DistributedEmbedding, **kwargs)


@pytest.fixture
def trained(strategy):
    with strategy.scope():
        model, layer = make()
        compile_model(model)
    samples = make_samples(3 * PER_REPLICA * strategy.num_replicas_in_sync)
    model.fit(distribute(strategy, samples), steps_per_epoch=3, verbose=0)
    return model, layer


def assert_same_state(layer, expected):
    assert_equal_tables(layer, expected, rtol=0, atol=0)
    for name in TABLES:
        for slot, value in expected.tables[name].slots.items():
            np.testing.assert_array_equal(
                layer.tables[name].slots[slot].numpy(), value.numpy()
            )
    assert layer.step.numpy() == expected.step.numpy() == 3


def predict(model, samples):
    inputs = {
        k: tf.convert_to_tensor(v) if isinstance(v, np.ndarray) else v
        for k, v in samples[0].items()
    }
    return model(inputs).numpy()


@on("mirrored:2", tier="more")
def test_replicas_share_large_tables_and_copy_small_ones(strategy):
    with strategy.scope():
        _, layer = make()
    tables, world = layer.embedding_tables, strategy.num_replicas_in_sync
    for name in ("user", "item"):
        assert {s.shape[0] for s in tables[name]._variables} == {
            -(-TABLES[name] // world)
        }
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines == {"user": "row", "item": "row", "hour": "replicated"}
    values = layer.get_embedding_tables()
    assert {n: v.shape[0] for n, v in values.items()} == TABLES
    _, expected = make()
    assert_equal_tables(layer, expected, rtol=0, atol=0)


@on("mirrored:2", tier="more")
def test_a_demanded_place_wins_over_the_size(strategy):
    tables = [
        tfrs_embed.TableConfig("small", 5, 3, placement="sharded"),
        tfrs_embed.TableConfig("large", 20_000, 3, placement="default_device"),
    ]
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            [tfrs_embed.FeatureConfig(t.name, t) for t in tables]
        )
    assert [t.engine for t in layer.placement.tables] == ["row", "replicated"]


@on("mirrored:2", tier="more")
def test_tables_are_set_on_all_replicas(strategy):
    with strategy.scope():
        _, layer = make()
    values = {n: np.full((rows, 3), rows, "f4") for n, rows in TABLES.items()}
    layer.set_embedding_tables(values)
    for name, value in layer.get_embedding_tables().items():
        np.testing.assert_array_equal(value, values[name])


@pytest.mark.parametrize(
    "other", [tfrs_embed.DistributedEmbedding, tfrs_embed.PartialTPUEmbedding]
)
def test_checkpoints_move_to_one_device_and_back(
    strategy, trained, tmp_path, other
):
    model, layer = trained
    path = tf.train.Checkpoint(model).write(str(tmp_path / "many"))
    single, alone = make_model("adam", make=other)
    tf.train.Checkpoint(single).restore(path).expect_partial()
    samples = make_samples(8)
    np.testing.assert_allclose(
        predict(single, samples), predict(model, samples), rtol=1e-5, atol=1e-6
    )
    if other is tfrs_embed.PartialTPUEmbedding:
        return  # Its small table has no slots.
    assert_same_state(alone, layer)
    path = tf.train.Checkpoint(single).write(str(tmp_path / "one"))
    with strategy.scope():
        again, spread = make()
    tf.train.Checkpoint(again).restore(path).expect_partial()
    assert_same_state(spread, layer)


@on("mirrored:2", tier="more", when=lambda form: form == "keras")
@pytest.mark.parametrize("form", ["keras", "weights.h5"])
def test_models_are_saved_and_loaded(strategy, trained, tmp_path, form):
    model, layer = trained
    path = os.fspath(tmp_path / f"model.{form}")
    if form == "weights.h5":
        model.save_weights(path)
        with strategy.scope():
            loaded, again = make()
        loaded.load_weights(path)
    else:
        model.save(path)
        with strategy.scope():
            loaded = tf_keras.models.load_model(path)
        [again] = [
            each
            for each in loaded.layers
            if isinstance(each, tfrs_embed.DistributedEmbedding)
        ]
    assert_same_state(again, layer)
    # It goes on as if it had not been saved.
    samples = make_samples(PER_REPLICA * strategy.num_replicas_in_sync, 1)
    for each in (model, loaded):
        with strategy.scope():
            compile_model(each)
        each.fit(distribute(strategy, samples), steps_per_epoch=1, verbose=0)
    assert_equal_tables(again, layer, rtol=0, atol=0)


@on("mirrored:2", tier="more")
def test_a_larger_batch_than_declared_is_an_error_on_every_replica(strategy):
    replicas = strategy.num_replicas_in_sync
    table = tfrs_embed.TableConfig("t", 30, 3)
    batch = PER_REPLICA * replicas
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            tfrs_embed.FeatureConfig("f", table, (batch,), (batch, 3))
        )
    run = tf.function(lambda ids: strategy.run(layer, (ids,)))
    for size in (PER_REPLICA - 1, PER_REPLICA):
        run(tf.zeros([size], tf.int64))
    with pytest.raises(ValueError, match=r"ids of shape \[5\].*\[4\]"):
        run(tf.zeros([PER_REPLICA + 1], tf.int64))


@on("mirrored:2", tier="more")
def test_batches_are_divided_by_keras(strategy):
    with strategy.scope():
        model, _ = make()
        compile_model(model)
    samples = make_samples(PER_REPLICA * strategy.num_replicas_in_sync)
    batches = as_batches(samples, len(samples[1]))
    model.fit(batches, epochs=2, verbose=0)
    assert np.isfinite(model.evaluate(batches, verbose=0))


@on("mirrored:2", tier="more", when=lambda small: not small)
@pytest.mark.parametrize("small", [True, False])
def test_a_call_with_a_part_of_the_features_trains_their_tables(
    strategy, small
):
    """Sharded and mirrored tables, in DistributedEmbedding and the other."""

    def make_parts():
        tables = {
            name: tfrs_embed.TableConfig(
                name, rows, 4, tf_keras.initializers.RandomUniform(seed=rows)
            )
            for name, rows in (("user", 60), ("item", 90), ("hour", 5))
        }
        features = {
            name: tfrs_embed.FeatureConfig(name, table)
            for name, table in tables.items()
        }
        kind = (
            tfrs_embed.PartialTPUEmbedding
            if small
            else tfrs_embed.DistributedEmbedding
        )
        return kind(features, optimizer="sgd", size_threshold=50)

    with strategy.scope():
        layer = make_parts()
        layer.build(None)
    expected = make_parts()
    ids = [
        {"user": tf.constant([i, i + 1]), "hour": tf.constant([i % 5, 0])}
        for i in range(strategy.num_replicas_in_sync)
    ]
    items = [tf.constant([7, i]) for i in range(strategy.num_replicas_in_sync)]

    def step(layer, ids, items):
        with tf.GradientTape() as tape:
            user = layer(ids, training=True, partial=True)
            item = layer({"item": items}, training=True, partial=True)
            loss = tf.reduce_sum(user["user"] * item["item"])
            loss += tf.reduce_sum(user["hour"])
        differentiate(tape, loss, layer.trainable_variables)

    tf.function(
        lambda *args: strategy.run(lambda *args: step(layer, *args), args)
    )(distribute_each(strategy, ids), distribute_each(strategy, items))
    everywhere = {k: tf.concat([i[k] for i in ids], 0) for k in ids[0]}
    step(expected, everywhere, tf.concat(items, 0))
    assert layer.step.numpy() == expected.step.numpy() == 2
    assert_equal_tables(layer, expected, rtol=1e-5, atol=1e-6)
    # Sharded, mirrored and Keras's: all are loaded whole.
    for each in (layer, expected):
        each.load_tables(
            {
                name: np.arange(rows * 4).reshape(rows, 4)
                for name, rows in (("user", 60), ("item", 90), ("hour", 5))
            }
        )
    assert_equal_tables(layer, expected, rtol=0, atol=0)
