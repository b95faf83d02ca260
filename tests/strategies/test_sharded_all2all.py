"""The layer for keys of any value, its keys spread over replicas."""

import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from all2all_reference import (
    BOTH,
    DIM,
    NNZ,
    ROWS,
    SLOTS,
    Keyed,
    check_checkpoints,
    checkpoint_layer,
    initial,
    make,
    make_model,
    train,
    write_checkpoint,
)
from process_tiers import on
from strategies.replicas import distribute, local, local_ids, of_chief
from tfrs_embed import All2AllDenseEmbedding
from training_helpers import (
    assert_same,
    assert_trained_alike,
    differentiate,
    state,
)

pytestmark = on("mirrored:2", "workers:3", tier="nightly")


def workers(strategy):
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def make_layer(strategy, *args, **kwargs):
    with strategy.scope():
        return make(*args, **kwargs)


def trainer(strategy, layer, training=True):
    """A function that trains on all replicas' keys and gradients at once."""

    def replica_step(keys, gradients):
        return train(layer, keys, gradients, training)

    run = tf.function(
        lambda *args: strategy.run(replica_step, args), reduce_retracing=True
    )

    def step(batches):
        given = [distribute(strategy, [b[i] for b in batches]) for i in (0, 1)]
        return local(strategy, run(*given))

    return step


def looker(strategy, layer, training=False):
    """A function that looks all replicas' keys up."""
    run = tf.function(
        lambda keys: strategy.run(layer, (keys,), {"training": training}),
        reduce_retracing=True,
    )
    return lambda keys: local(strategy, run(distribute(strategy, keys)))


def make_batches(rng, pool, sizes):
    batches = []
    for size in sizes:
        keys = rng.choice(pool, (size, SLOTS, NNZ))
        gradients = rng.normal(size=(*keys.shape, DIM)).astype(np.float32)
        batches.append((keys, gradients))
    return batches


@on("workers:3", tier="more")
@BOTH
def test_training(strategy, hashed):
    world = strategy.num_replicas_in_sync
    keyed = Keyed("adam", hashed, ROWS)
    layer = make_layer(
        strategy,
        hashed,
        # Keys needn't fall on the shards evenly; rows do.
        ROWS if hashed else ROWS // world,
        keyed.optimizer,
    )
    rng = np.random.default_rng(1)
    pool = np.arange(ROWS)
    if hashed:
        pool[3:] = rng.integers(-(2**63), 2**63 - 1, ROWS - 3)
        pool[:3] = [-(2**63), 2**63 - 1, -1]
    step = trainer(strategy, layer)
    # Partial batches, also of nothing, as the last ones of an epoch are.
    for sizes in ([3] * world, [3] + [1] * (world - 2) + [0]):
        batches = make_batches(rng, pool, sizes)
        for keys, _ in batches:
            keyed.add(keys)
        for replica, output in step(batches).items():
            keyed.assert_output(batches[replica][0], output)
        keyed.update(batches)
    keyed.assert_table(layer)
    if hashed:
        assert layer.size == len(keyed.row)
        assert (
            layer.load
            == max(np.bincount([key % world for key in keyed.row])) / ROWS
        )
        assert len(layer.sizes) == len(local_ids(strategy))
    # Outside of the replicas, whole.
    keys = batches[0][0]
    if workers(strategy):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"inside strategy\.run"
        ):
            layer(tf.constant(keys))
    else:
        keyed.assert_output(keys, layer(tf.constant(keys)))


@on("workers:3", tier="more")
def test_a_lookup_for_training_gives_initial_rows(strategy):
    world = strategy.num_replicas_in_sync
    keyed = Keyed("sgd", rows=20 * world)
    layer = make_layer(strategy, capacity=20)
    keys = [np.arange(8).reshape(1, SLOTS, NNZ) * 7 - r for r in range(world)]
    found = looker(strategy, layer, training=True)(keys)
    keyed.add(np.stack(keys))
    for replica, output in found.items():
        keyed.assert_output(keys[replica], output)
    # They are the keys' where a step updates the table.
    assert layer.size == 0


@on("workers:3", tier="more")
def test_unknown_keys_are_zero_and_stay_unknown(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_layer(strategy)
    look = trainer(strategy, layer, training=False)
    keys = [np.zeros([1, SLOTS, NNZ], np.int64) for _ in range(world)]
    batches = [(k, np.float32(1)) for k in keys]
    for output in look(batches).values():
        assert not output.any()
    assert layer.size == 0
    trainer(strategy, layer)(batches)
    before = state(layer)
    np.testing.assert_array_equal(before["keys"], [0])
    # A key unknown beside a known one. Neither is trained.
    keys[0][0, 0] = 2 * world
    for replica, output in look(batches).items():
        known = keys[replica] == 0
        assert output[known].all() and not output[~known].any()
    after = state(layer)
    np.testing.assert_array_equal(after["keys"], [0])
    np.testing.assert_array_equal(after["parameters"], before["parameters"])


@on("workers:3", tier="more")
def test_full_shard_is_an_error_on_all_replicas(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_layer(
        strategy, capacity=5, optimizer="adagrad", name="full_shard"
    )
    step = trainer(strategy, layer)

    full, other, another = [world * i for i in range(6)], 1, 1 + world

    def batches(keys):
        # Only the last replica has them; the others have one of shard 1.
        given = [np.full([1, SLOTS, NNZ], other) for _ in range(world)]
        given[-1] = np.resize(keys, [1, SLOTS, NNZ]).astype(np.int64)
        return [(k, np.float32(1)) for k in given]

    step(batches(full[:3]))
    before = state(layer)
    # Shard 0 has room for two of three. There is room on shard 1, too.
    bad = [*full[3:], another]
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            step(batches(bad))
        text = str(caught.value).replace("\\'", "'")
        assert re.search(
            "replica of rank 0: Layer 'full_shard', table 'table': .* a shard "
            "has rows for 5 keys, and holds 3. It needs 1 rows more .*; "
            f"({full[3]}|{full[4]}|{full[5]}) is a key without one. A "
            "larger max_vocabulary_size_per_gpu makes room",
            text,
        )
    assert_same(state(layer), before)
    step(batches([*bad[:2], bad[3]]))
    assert layer.size == before["keys"].size + 3
    assert layer.load == 1.0


@on("mirrored:2", tier="more")
def test_key_out_of_range_is_an_error_on_all_replicas(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_layer(strategy, False, 5, "adagrad", key_dtype="uint64")
    step = trainer(strategy, layer)
    keys = [np.zeros([1, SLOTS, NNZ], np.uint64) for _ in range(world)]
    step([(k, np.float32(1)) for k in keys])
    before = state(layer)
    for bad in (5 * world, 2**64 - 1):
        keys[-1][0, 0, 0] = bad
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=f"id {bad} is out of range; .* 0 to {5 * world - 1}",
        ):
            step([(k, np.float32(1)) for k in keys])
    assert_same(state(layer), before)


@on("mirrored:2", tier="more")
def test_layers_share_nothing(strategy):
    world = strategy.num_replicas_in_sync
    layers = [make_layer(strategy) for _ in range(2)]

    by_shard = [*range(world)]
    turned = [*by_shard[1:], by_shard[0]]

    def replica_step(*keys):
        # Both exchanges are under way at once.
        with tf.GradientTape() as tape:
            outputs = [
                layer(k, training=True)
                for layer, k in zip(layers, keys, strict=True)
            ]
            loss = tf.add_n([tf.reduce_sum(o) for o in outputs])
        differentiate(
            tape, loss, [layer.trainable_variables for layer in layers]
        )
        return tf.stack(outputs)

    run = tf.function(lambda *keys: strategy.run(replica_step, keys))
    keys = [
        distribute(strategy, [np.full([1, SLOTS, NNZ], k) for k in of_layer])
        for of_layer in (by_shard, turned)
    ]
    outputs = local(strategy, run(*keys))
    for replica, output in outputs.items():
        for i in range(2):
            expected = initial([by_shard, turned][i][replica])
            np.testing.assert_allclose(output[i][0, 0, 0], expected, rtol=2e-5)
    for layer in layers:
        np.testing.assert_array_equal(
            layer.table.variables["keys"].numpy(), sorted(by_shard)
        )


@on("mirrored:2", tier="more")
def test_keras_loops_and_saving(strategy):
    world = strategy.num_replicas_in_sync
    rng = np.random.default_rng(3)
    # The last batch is a partial one.
    keys = rng.integers(0, 11, (5 * world + 1, SLOTS, NNZ))
    samples = keys, keys.sum((1, 2)).astype(np.float32)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )

    def dataset(keys, labels):
        return (
            tf.data.Dataset.from_tensor_slices((keys, labels))
            .batch(3 * world)
            .with_options(options)
        )

    def compiled():
        with strategy.scope():
            model, layer = make_model(optimizer="adagrad")
            model.compile(
                tf_keras.optimizers.SGD(0.05),
                tf_keras.losses.MeanSquaredError(
                    reduction=tf_keras.losses.Reduction.SUM
                ),
            )
        return model, layer

    model, layer = compiled()
    model.fit(dataset(*samples), epochs=2, verbose=0)
    before = state(layer)
    np.testing.assert_array_equal(before["keys"], np.unique(keys))
    model.evaluate(dataset(samples[0] + 1, samples[1]), verbose=0)
    found = model.predict(dataset(*samples), verbose=0)
    assert found.shape == (len(keys), 1)
    assert_same(state(layer), before)

    folder = pathlib.Path(tempfile.mkdtemp())
    model.save_weights(str(folder / "ckpt"))
    other, again = compiled()
    other.load_weights(of_chief(strategy, str(folder / "ckpt")))
    model.save(str(folder / "model.keras"))
    # On one replica.
    loaded = tf_keras.models.load_model(str(folder / "model.keras"))
    assert_same(state(loaded.layers[1]), before)
    # It goes on as it would have; keys that are new come in one order.
    for each in (model, other):
        each.fit(dataset(*samples), verbose=0)
    assert_trained_alike(state(again), state(layer))
    weights = other.get_weights()
    other.fit(dataset(samples[0] + 1, samples[1]), verbose=0)
    other.set_weights(weights)
    assert_trained_alike(state(again), state(layer))


@on("mirrored:2", tier="more")
def test_each_replica_has_room_for_the_keys_that_key_modulo_gives_it(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_layer(strategy, capacity=3, optimizer="sgd")
    keys = np.resize(np.arange(3 * world), [world, 1, SLOTS, NNZ])
    trainer(strategy, layer)([(k, np.float32(1)) for k in keys])
    np.testing.assert_array_equal(
        layer.table.variables["keys"].numpy(), np.arange(3 * world)
    )
    assert set(layer.sizes.values()) == {3}
    assert layer.load == 1.0


@on("mirrored:2", tier="more", when=lambda hashed: hashed)
@BOTH
def test_checkpoints_of_other_worlds(strategy, hashed):
    world = strategy.num_replicas_in_sync
    # A test that runs several strategies has their checkpoints there.
    given = os.environ.get("TFRS_EMBED_TEST_CHECKPOINTS")
    folder = pathlib.Path(given or tempfile.mkdtemp())
    if given:
        assert check_checkpoints(folder, hashed, world, strategy.scope)
        if workers(strategy):
            return
    with strategy.scope():
        layer = checkpoint_layer(world, hashed)
    keys = np.random.default_rng(world).integers(0, ROWS, (1, SLOTS, NNZ))
    batches = [(keys + r if hashed else keys) for r in range(world)]
    trainer(strategy, layer)([(k, np.float32(1)) for k in batches])
    path = of_chief(strategy, write_checkpoint(layer, folder, world))
    if given:
        return
    folder = of_chief(strategy, folder)
    assert check_checkpoints(folder, hashed, world, strategy.scope)
    if hashed:
        with strategy.scope():
            small = All2AllDenseEmbedding(1, DIM, SLOTS, NNZ)
            small.build(None)
            with pytest.raises(
                (ValueError, tf.errors.InvalidArgumentError),
                match=r"has no room for .* 1 rows. .*max_vocabulary_size_per",
            ):
                tf.train.Checkpoint(layer=small).read(str(path / "ckpt"))
        assert small.size == 0
