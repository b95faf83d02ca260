"""The layer for keys of any value, on one replica."""

import json

import numpy as np
import pytest
import tensorflow as tf

from all2all_reference import (
    BOTH,
    CAPACITY,
    DIM,
    GRAPH,
    NNZ,
    SLOTS,
    Keyed,
    check_checkpoints,
    checkpoint_layer,
    draw,
    initial,
    make,
    make_data,
    make_model,
    train,
    trained,
    write_checkpoint,
)
from keras_under_test import NUMBER, keras, layers, of_keras_2
from process_tiers import on
from run_in_processes import run
from training_helpers import assert_same, assert_trained_alike, state

pytestmark = on("keras:3", tier="nightly")


@BOTH
@GRAPH
@pytest.mark.parametrize("name", ["sgd", "adam", "ftrl"])
def test_training(hashed, graph, name):
    keyed = Keyed(name, hashed)
    layer = make(hashed, optimizer=keyed.optimizer)
    rng = np.random.default_rng(1)
    step = tf.function(train, reduce_retracing=True) if graph else train
    for batch in (4, 1, 0, 5):
        # The keys themselves don't matter to a hash table: spread them.
        keys = draw(rng, batch) * (2**59 + 1 if hashed else 1)
        gradients = rng.normal(size=(*keys.shape, DIM)).astype(np.float32)
        output = step(layer, tf.constant(keys), tf.constant(gradients))
        keyed.add(keys)
        keyed.assert_output(keys, output)
        keyed.update([(keys, gradients)])
    keyed.assert_table(layer)
    keyed.assert_output(keys, layer(tf.constant(keys)))


@BOTH
def test_dynamic_input(hashed):
    keyed = Keyed("sgd", hashed)
    layer = make(hashed, optimizer=keyed.optimizer, dynamic_input=True)
    for number in (5, 0, 7):
        keys = np.arange(number) % 4
        output = train(layer, tf.constant(keys))
        keyed.add(keys)
        keyed.assert_output(keys, output)
        keyed.update([(keys, np.ones([number, DIM], np.float32))])
    keyed.assert_table(layer)


@pytest.mark.parametrize(
    "keys",
    [
        np.array([-(2**31), 2**31 - 1, -1, 0], np.int32),
        np.array([-(2**63), 2**63 - 1, -1, 0], np.int64),
        np.array([2**32 - 1, 2**31, 1, 0], np.uint32),
        np.array([2**64 - 1, 2**63, 2**63 - 1, 0], np.uint64),
    ],
    ids=lambda keys: keys.dtype.name,
)
def test_keys_of_every_value(keys):
    layer = make(key_dtype=keys.dtype, dynamic_input=True)
    first = train(layer, tf.constant(keys))
    assert len(np.unique(first, axis=0)) == len(keys)
    again = layer(tf.constant(keys[::-1]))
    np.testing.assert_allclose(again, first[::-1] - 0.01, atol=1e-7)
    held = layer.table.variables["keys"].numpy()
    np.testing.assert_array_equal(
        held.view(np.uint64), np.sort(keys.astype(np.int64)).view(np.uint64)
    )
    # The same bits of another key.
    other = tf.constant(keys ^ np.array(2, keys.dtype))
    np.testing.assert_array_equal(layer(other), np.zeros([4, DIM]))


def test_unknown_keys_are_zero_and_stay_unknown():
    layer = trained(optimizer="adagrad")
    before = state(layer)
    keys = np.full((1, SLOTS, NNZ), 99)
    keys[0, 0] = before["keys"][:NNZ]
    expected = np.zeros([1, SLOTS, NNZ, DIM])
    expected[0, 0] = before["parameters"][:NNZ]
    for training in (False, None):
        output = layer(tf.constant(keys), training=training)
        np.testing.assert_array_equal(output, expected)
    layer.trainable = False
    np.testing.assert_array_equal(train(layer, tf.constant(keys)), expected)
    assert_same(state(layer), before)
    layer.trainable = True
    train(layer, tf.constant(keys), training=False)
    assert_same(state(layer), before)


def test_untrained_layer_gives_no_rows():
    layer = make(optimizer=None)
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    assert not np.any(layer(keys, training=True))
    assert layer.size == 0
    assert layer.table_optimizer is None
    assert not layer.trainable_variables


def test_call_on_a_tape_is_a_training_step_unless_told_otherwise():
    layer = make()
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    layer(keys)
    assert layer.size == 0
    train(layer, keys, training=False)
    assert layer.size == 0
    train(layer, keys, training=None)
    assert layer.size == 1


@GRAPH
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_full_shard_is_an_error_that_changes_nothing(graph, dtype):
    layer = make(optimizer="adagrad", name="ads", key_dtype=dtype)
    keys = np.arange(SLOTS * NNZ).reshape(1, SLOTS, NNZ).astype(dtype)
    step = tf.function(train) if graph else train
    step(layer, tf.constant(keys))
    before = state(layer)
    high = 2**63 if dtype == "uint64" else -(2**63)
    keys = np.array([high + k for k in range(8)]).astype(dtype)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"ads.{1,2}, table.* a shard has rows for 12 keys, and holds 8. "
        rf"It needs 4 rows more .*; {high} is a key without one. A larger "
        "max_vocabulary_size_per_gpu makes room",
    ):
        step(layer, tf.constant(keys.reshape(1, SLOTS, NNZ)))
    assert_same(state(layer), before)
    assert (layer.size, layer.sizes, layer.load) == (8, {0: 8}, 8 / 12)
    # There is room for as many as there are rows.
    step(layer, tf.constant(keys[:4].repeat(2).reshape(1, SLOTS, NNZ)))
    assert layer.load == 1.0


@GRAPH
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        ("int32", -1),
        ("int64", 12),
        ("int64", 2**40),
        ("uint32", 2**32 - 1),
        ("uint64", 2**64 - 1),
        ("uint64", 2**63),
    ],
)
def test_key_out_of_range(graph, dtype, bad):
    layer = make(False, name="ads", key_dtype=dtype)
    keys = np.zeros([2, SLOTS, NNZ], dtype)
    train(layer, tf.constant(keys))
    before = state(layer)
    keys[1, 0, 2] = bad
    step = tf.function(train) if graph else train
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"Feature .*ads.*: id {bad} is out of range; .* 0 to 11",
    ):
        step(layer, tf.constant(keys))
    assert_same(state(layer), before)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (
            np.zeros([2, SLOTS, NNZ], np.int32),
            TypeError,
            "of key_dtype=int64, got a .*Tensor of int32",
        ),
        (
            np.zeros([2, SLOTS, NNZ]),
            TypeError,
            "of key_dtype=int64, got a .*Tensor of float64",
        ),
        (np.zeros([2, SLOTS, 3], np.int64), ValueError, r"\[None, 2, 4\]"),
        (np.zeros([2, 8], np.int64), ValueError, r"shape \[2, 8\]"),
        (
            np.zeros([2, SLOTS, NNZ, 1], np.int64),
            ValueError,
            r"shape \[2, 2, 4, 1\]",
        ),
        (
            tf.RaggedTensor.from_row_lengths([1, 2], [2, 0]),
            TypeError,
            "be a Tensor .* got a RaggedTensor",
        ),
    ],
)
def test_wrong_inputs(keys, error, text):
    layer = make(name="ads")
    with pytest.raises(error, match=f"'ads.*{text}"):
        layer(keys)
    with pytest.raises(ValueError, match=r"ads.* shape \[2, 3\]"):
        layer.compute_output_shape([2, 3])


def test_wrong_rank_of_dynamic_input():
    layer = make(name="ads", dynamic_input=True)
    with pytest.raises(ValueError, match=r"ads.* shape \[2, 3\]"):
        layer(np.zeros([2, 3], np.int64))


def test_wrong_shape_that_only_the_graph_knows():
    layer = make(name="ads")
    step = tf.function(
        lambda keys: train(layer, keys),
        input_signature=[tf.TensorSpec([None, None, None], tf.int64)],
    )
    assert step(tf.zeros([2, SLOTS, NNZ], tf.int64)).shape[0] == 2
    before = state(layer)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"ads.*\[2 4 2\], but .*\[None, 2, 4\]",
    ):
        step(tf.ones([2, NNZ, SLOTS], tf.int64))
    assert_same(state(layer), before)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"capacity": 0}, ValueError, "max_vocabulary_size_per_gpu must .* 0"),
        ({"capacity": 2.5}, ValueError, "max_vocabulary_size_per_gpu .* 2.5"),
        ({"key_dtype": "int16"}, ValueError, "key_dtype must .* 'int16'"),
        ({"key_dtype": "text"}, ValueError, "key_dtype must .* 'text'"),
        ({"dynamic_input": 1}, TypeError, "dynamic_input must be True or"),
        ({"hashed": None}, TypeError, "use_hashtable must be True or"),
        (
            {"embedding_initializer": "unifrom"},
            ValueError,
            ".*unifrom",
        ),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=f"Layer 'ads': {text}"):
        make(name="ads", **arguments)


def test_wrong_optimizer():
    with pytest.raises(
        ValueError,
        match=r"All2AllDenseEmbedding's optimizer: unknown .* 'lamb'",
    ):
        make(optimizer="lamb")


def test_sizes_need_a_hash_table():
    layer = make(False, name="ads")
    for name in ("size", "sizes", "load"):
        with pytest.raises(AttributeError, match=f"'ads' has no {name}:"):
            getattr(layer, name)


def test_layers_share_nothing():
    first, second = make(), make()
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    train(first, keys)
    assert (first.size, second.size) == (1, 0)
    output = second(keys, training=True)
    np.testing.assert_allclose(output[0, 0, 0], initial(0), rtol=2e-5)


def test_rows_begin_uniform():
    layer = make(False, 5000, embedding_initializer=None)
    other = make(False, 5000, embedding_initializer=None)
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    assert np.any(layer(keys) != other(keys))
    rows = layer.table.table.numpy()
    assert rows.min() < -0.049 and rows.max() > 0.049
    assert np.abs(rows).max() <= 0.05


def test_learning_rate_can_be_set():
    layer = make()
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    before = train(layer, keys)[0, 0, 0]
    layer.table_optimizer.learning_rate = 0.0
    after = train(layer, keys)[0, 0, 0]
    np.testing.assert_allclose(after, before - 0.01 * SLOTS * NNZ, rtol=1e-5)
    np.testing.assert_array_equal(layer(keys)[0, 0, 0], after)


def test_an_assigned_rate_is_part_of_the_config():
    layer = make(optimizer="adagrad")
    assert layer.get_config()["optimizer"] == "adagrad"
    layer.table_optimizer.learning_rate = 0.0625
    config = json.loads(json.dumps(layer.get_config()))
    other = layers.All2AllDenseEmbedding.from_config(config)
    assert other.table_optimizer.learning_rate == 0.0625
    assert other.get_config() == layer.get_config()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    layer = make(dtype=policy)
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    output = train(layer, keys)
    assert output.dtype == layer.compute_dtype == policy.split("_")[1]
    exact = layer.table.variables["parameters"].numpy()
    assert exact.dtype == np.float32
    np.testing.assert_array_equal(
        layer(keys)[0, 0, 0], tf.cast(exact[0], output.dtype)
    )


def test_made_outside_the_strategy_that_runs_it():
    layer = make(name="ads")
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(RuntimeError, match="Layer 'ads' was made under"),
    ):
        layer(tf.zeros([1, SLOTS, NNZ], tf.int64))


def test_one_device_strategy():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        layer = make()
        train(layer, tf.zeros([1, SLOTS, NNZ], tf.int64))
    assert layer.size == 1


@BOTH
def test_config_round_trip(hashed):
    layer = make(
        hashed,
        optimizer=keras.optimizers.Adam(0.1),
        key_dtype="uint32",
        name="ads",
        dtype="mixed_float16",
        activity_regularizer="l2",
    )
    config = json.loads(json.dumps(layer.get_config()))
    other = layers.All2AllDenseEmbedding.from_config(config)
    assert json.loads(json.dumps(other.get_config())) == config
    keys = tf.ones([1, SLOTS, NNZ], tf.uint32)
    for _ in range(2):
        np.testing.assert_array_equal(train(other, keys), train(layer, keys))
    default = layers.All2AllDenseEmbedding(5, DIM, SLOTS, NNZ)
    config = default.get_config()
    assert config["embedding_initializer"] is None
    assert (
        layers.All2AllDenseEmbedding.from_config(config).get_config() == config
    )


@on("keras:3", tier="more")
@BOTH
def test_keras_loops(hashed):
    model, layer = make_model(hashed)
    keys, labels = make_data()
    # The last batch of three is a partial one.
    first = model.fit(keys, labels, batch_size=4, verbose=0).history["loss"]
    last = model.fit(keys, labels, batch_size=4, epochs=9, verbose=0)
    assert last.history["loss"][-1] < first[0]
    before = state(layer)
    model.evaluate(keys + 2, labels, batch_size=4, verbose=0)
    unknown = tf.concat([keys, tf.fill([1, SLOTS, NNZ], keys[0, 0, 0])], 0)
    assert model.predict(unknown, batch_size=4, verbose=0).shape == (11, 1)
    assert_same(state(layer), before)


# Without a hash table the formats have nothing of their own.
FORMATS = [
    ("keras", False),
    *((form, True) for form in ("keras", "weights.h5")),
    *of_keras_2(*((f, True) for f in ("h5", "ckpt", "old.h5"))),
]


@on("keras:3", tier="more")
@pytest.mark.parametrize(("form", "hashed"), FORMATS)
def test_saved_model_continues_training_equally(tmp_path, form, hashed):
    keys, labels = make_data()
    model, layer = make_model(hashed, optimizer="adam")
    # Tracing takes longer than all that is tested here.
    model.run_eagerly = True
    model.fit(keys, labels, epochs=2, verbose=0)
    path = str(tmp_path / f"model.{form}")
    if form in ("keras", "h5"):
        model.save(path, save_format=form)
        other = keras.models.load_model(path)
        other.run_eagerly = True
        again = other.layers[1]
    else:
        model.save_weights(path)
        other, again = make_model(hashed, optimizer="adam")
        other.run_eagerly = True
        # Other keys, to be replaced; and the metrics' variables.
        other.fit((keys + 3) % CAPACITY, labels, verbose=0)
        other.load_weights(path)
    assert isinstance(again, layers.All2AllDenseEmbedding)
    assert_same(state(again), state(layer))
    for each in (model, other):
        each.fit((keys + 2) % CAPACITY, labels, verbose=0, shuffle=False)
    assert_trained_alike(state(again), state(layer))
    # What was loaded can be saved, too.
    again_path = tmp_path / ("again" if NUMBER == 2 else "again.weights.h5")
    other.save_weights(str(again_path))
    model.load_weights(str(again_path))
    assert_same(state(layer), state(again))


@on("keras:3", tier="more")
@BOTH
def test_weights_can_be_read_and_set(hashed):
    # As EarlyStopping does, which keeps those of the best epoch.
    keys, labels = make_data()
    model, layer = make_model(hashed, optimizer="adagrad")
    model.fit(keys, labels, verbose=0)
    best, weights = state(layer), model.get_weights()
    model.fit((keys + 3) % CAPACITY, labels, verbose=0)
    model.set_weights(weights)
    assert_same(state(layer), best)


def test_numpy_takes_keys_and_rows_as_they_are():
    layer = make()
    # A float64 has no room for it.
    train(layer, tf.fill([1, SLOTS, NNZ], tf.constant(2**53 + 1, tf.int64)))
    variables = layer.table.variables
    keys, rows = (np.asarray(variables[k]) for k in ("keys", "parameters"))
    assert (keys.dtype, rows.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(keys, [2**53 + 1])


def test_only_the_library_exports_keys(tmp_path):
    layer = trained()
    module = tf.Module()
    module.layer = layer
    module.serve = tf.function(
        layer, input_signature=[tf.TensorSpec([None, SLOTS, NNZ], tf.int64)]
    )
    with pytest.raises(RuntimeError, match=r"only tfrs_embed\.serving\.export"):
        tf.saved_model.save(module, str(tmp_path))


def checkpoint(layer, folder):
    return tf.train.Checkpoint(layer=layer).save(str(folder / "ckpt"))


@pytest.mark.parametrize("built", [False, True])
@BOTH
def test_checkpoint(tmp_path, built, hashed):
    layer = trained(hashed=hashed, optimizer="adagrad")
    path = checkpoint(layer, tmp_path)
    reader = tf.train.load_checkpoint(path)
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    stored = {
        name[len("layer/") : -len(suffix)]: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.startswith("layer/")
    }
    rate = stored.pop("table/learning_rate")
    assert rate == np.float32(layer.table_optimizer.learning_rate)
    if hashed:  # In the order of the rows, of one shard after the other.
        order = np.argsort(stored["table/keys"])
        for name in set(stored) - {"step"}:
            stored[name] = stored[name][order]
    expected = {
        name if name == "step" else f"table/{name}": value
        for name, value in state(layer).items()
    }
    assert_same(dict(sorted(stored.items())), dict(sorted(expected.items())))

    other = make(hashed, optimizer="adagrad")
    if built:
        train(other, tf.constant(draw(np.random.default_rng(2))))
    status = tf.train.Checkpoint(layer=other).restore(path)
    other.build(None)
    assert_same(state(other), state(layer))
    status.expect_partial()
    status.assert_existing_objects_matched()


def test_a_checkpoint_without_keys(tmp_path):
    layer = make(optimizer="adagrad")
    layer.build(None)
    path = checkpoint(layer, tmp_path)
    other = trained(optimizer="adagrad")
    tf.train.Checkpoint(layer=other).restore(path)
    assert other.size == 0
    assert_same(state(other), state(layer))


def test_variables_are_restored_whatever_their_names_order(tmp_path):
    layer = trained(optimizer="adagrad")
    # By name a slot, "accumulators", comes before the keys of its rows.
    path = tf.train.Checkpoint(**layer.table.variables).write(
        str(tmp_path / "ckpt")
    )
    other = make(optimizer="adagrad")
    train(other, tf.constant(draw(np.random.default_rng(2))))
    tf.train.Checkpoint(**other.table.variables).read(path).assert_consumed()
    found, expected = state(other), state(layer)
    for name in layer.table.variables:
        np.testing.assert_array_equal(found[name], expected[name])


def test_new_keys_after_restoring_begin_with_initial_rows(tmp_path):
    layer = make(optimizer="adagrad")
    keys = tf.zeros([1, SLOTS, NNZ], tf.int64)
    train(layer, keys)
    path = checkpoint(layer, tmp_path)
    train(layer, tf.constant(draw(np.random.default_rng(0))))
    tf.train.Checkpoint(layer=layer).restore(path)
    assert layer.size == 1
    vectors = train(layer, keys + 77)
    np.testing.assert_allclose(vectors[0, 0, 0], initial(77), rtol=2e-5)
    slots = layer.table.slots["accumulators"].numpy()
    np.testing.assert_allclose(slots[1], 0.1 + (SLOTS * NNZ) ** 2)
    np.testing.assert_array_equal(slots[0], slots[1])


def test_restoring_for_another_optimizer(tmp_path):
    layer = trained()
    path = checkpoint(layer, tmp_path)
    other = trained(optimizer="adam")
    tf.train.Checkpoint(layer=other).restore(path).expect_partial()
    after = state(other)
    np.testing.assert_array_equal(after["keys"], state(layer)["keys"])
    assert not after["momenta"].any() and not after["velocities"].any()
    assert after["momenta"].shape == after["parameters"].shape


def test_restoring_more_keys_than_fit(tmp_path):
    layer = trained()
    path = checkpoint(layer, tmp_path)
    other = make(capacity=layer.size - 1, name="ads")
    train(other, tf.zeros([1, SLOTS, NNZ], tf.int64))
    before = state(other)
    with pytest.raises(
        ValueError,
        match=f"'ads' has no room for {layer.size} keys: shard 0 of 1 would "
        f"hold {layer.size} .* {layer.size - 1} rows. .*max_vocabulary_size",
    ):
        tf.train.Checkpoint(layer=other).restore(path)
    assert_same(state(other), before)


def test_rows_without_keys_are_those_of_their_numbers(tmp_path):
    rows = trained(hashed=False)
    path = checkpoint(rows, tmp_path)
    layer = trained()
    tf.train.Checkpoint(layer=layer).restore(path)
    after = state(layer)
    np.testing.assert_array_equal(after.pop("keys"), np.arange(CAPACITY))
    assert_same(after, state(rows))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("keys", [3, 3], "ascending, each of them once"),
        ("keys", [[3]], r"int64 of shape \[n\], got int64 of shape \[1, 1\]"),
        ("keys", [0.5], "got float64"),
        ("parameters", np.zeros([1, DIM]), r"can't be given .* \[1, 3\]"),
    ],
)
def test_assigning_what_does_not_fit(name, value, text):
    layer = trained(name="ads")
    before = state(layer)
    with pytest.raises(ValueError, match=f"'ads'.*{text}"):
        layer.table.variables[name].assign(np.array(value))
    assert_same(state(layer), before)


# Processes of two and four replicas, and of two workers.
@pytest.mark.more
@pytest.mark.nightly
def test_checkpoints_do_not_depend_on_the_number_of_replicas(tmp_path):
    for hashed in (True, False):
        layer = checkpoint_layer(1, hashed)
        train(layer, tf.constant(draw(np.random.default_rng(0))))
        write_checkpoint(layer, tmp_path, 1)
    # Each reads what is there, and adds its own.
    workers = ["workers:2"] if NUMBER == 2 else []  # Not for Keras 3.
    for strategy in ("mirrored:2", "mirrored:4", *workers):
        run(
            [
                "strategies/test_sharded_all2all.py"
                "::test_checkpoints_of_other_worlds"
            ],
            strategy,
            TFRS_EMBED_TEST_CHECKPOINTS=str(tmp_path),
        )
    for hashed in (True, False):
        assert check_checkpoints(tmp_path, hashed, 1) == 3
