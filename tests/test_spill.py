"""Rows of evicted keys in files: what the conformance suite doesn't show.

A table that spills holds what a table holds that has rows in memory for all
keys, to the last bit.
"""

import json
import os
import resource
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from delta_checkpoints import check_chain
from keras_under_test import keras, layers
from process_tiers import nightly, on
from reference import best_ids
from strategies.replicas import distribute
from tfrs_embed import (
    DecayingFrequency,
    DynamicKeys,
    FeatureConfig,
    FileStorage,
    FrequencyAdmission,
    TableConfig,
    TimeToLive,
    kernels,
)
from tfrs_embed.checkpoint import bundle
from tfrs_embed.storage.key_rules import ABSENT
from training_helpers import differentiate

pytestmark = [pytest.mark.usefixtures("needs_kernels")]

#: Rows in memory, of so many keys.
ROWS, KEYS, DIM = 64, 400, 8
OPTIMIZERS = {
    "sgd": lambda: tf.tpu.experimental.embedding.SGD(0.3),
    "adam": lambda: tf.tpu.experimental.embedding.Adam(0.1),
    "row_wise": lambda: tfrs_embed.optimizers.RowWiseAdagrad(0.3),
    "row_wise_adam": lambda: tfrs_embed.optimizers.RowWiseAdam(0.1),
}


def spilling(folder, **options):
    options.setdefault("eviction", "lru")
    return DynamicKeys(spill=FileStorage(folder), **options)


def make_layer(keys=None, rows=ROWS, dim=DIM, optimizer="adam", tables=1):
    """A layer of a feature a table; without `keys`, no key is evicted."""
    if keys is None:
        keys, rows = DynamicKeys(eviction=None), 4 * KEYS
    features = {
        f"f{i}": FeatureConfig(
            f"f{i}",
            TableConfig(
                f"t{i}",
                rows,
                dim,
                keras.initializers.TruncatedNormal(seed=i),
                keys=keys,
            ),
        )
        for i in range(tables)
    }
    return layers.PartialTPUEmbedding(features, OPTIMIZERS[optimizer]())


def batches(steps, seed=0, size=48):
    rng = np.random.default_rng(seed)
    return rng.integers(0, KEYS, [steps, size])


def train(layer, steps=20, seed=0, size=48):
    """Trains; returns the losses."""

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            vectors = layer({name: ids + i for i, name in enumerate(names)})
            loss = tf.add_n([tf.reduce_sum(v**2) for v in vectors.values()])
        differentiate(tape, loss, layer.trainable_variables)
        return loss

    names = [feature.name for feature in layer._spec.features]
    return [float(step(tf.constant(i))) for i in batches(steps, seed, size)]


def values(layer):
    return {
        (t, name): variable.numpy()
        for t, state in layer.tables.items()
        for name, variable in state.variables.items()
    }


def assert_equal(layer, other):
    here, there = values(layer), values(other)
    assert here.keys() == there.keys()
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name], str(name))


def look_up(layer):
    """Vectors of all keys, and of some that there are not."""
    ids = tf.constant(np.arange(KEYS + 50))
    names = [feature.name for feature in layer._spec.features]
    found = layer(dict.fromkeys(names, ids), training=False)
    return np.stack([found[name] for name in names])


@nightly(
    lambda rules, optimizer: (
        optimizer != "adam" and rules != {"eviction": "lru"}
    )
)
@pytest.mark.parametrize(
    "rules",
    [
        {"eviction": "lru"},
        {"eviction": "lfu"},
        {"eviction": TimeToLive(3)},
        {"eviction": (TimeToLive(4), DecayingFrequency(2)), "floor": 0.8},
        {"when_full": "grow", "max_rows": 100},
        {"admission": FrequencyAdmission(2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_holds_what_memory_would(tmp_path, rules, optimizer):
    layer = make_layer(spilling(tmp_path, **rules), optimizer=optimizer)
    admission = rules.get("admission")
    kept = DynamicKeys(
        eviction=rules.get("eviction", "lru"),
        admission=admission,
        candidates=admission and 10 * KEYS,
    )
    other = make_layer(kept, rows=4 * KEYS, optimizer=optimizer)
    assert train(layer) == train(other)
    here, there = values(layer), values(other)
    for name, value in here.items():
        if name[1] != "candidates" or admission is None:
            np.testing.assert_array_equal(value, there[name], str(name))
    np.testing.assert_array_equal(look_up(layer), look_up(other))
    table = layer.tables["t0"]
    assert table.size == len(table.keys()) > 2 * ROWS
    assert table.capacity <= 100
    found = table.statistics()
    spill = found["spill"]
    assert found["in_all"]["evicted"] == spill["written"]
    assert spill["written"] - spill["returned"] == spill["keys"] > ROWS
    assert layer.statistics()["t0"].keys.spill == spill
    # A file without a name.
    assert os.listdir(tmp_path) == []


def test_several_tables(tmp_path):
    """Some spill, in one operation with others of their width."""
    layer = make_layer(spilling(tmp_path), tables=3)
    other = make_layer(tables=3)
    assert train(layer) == train(other)
    assert_equal(layer, other)
    np.testing.assert_array_equal(look_up(layer), look_up(other))
    features = [
        FeatureConfig(
            f"f{i}",
            TableConfig(
                f"t{i}",
                ROWS if i == 1 else 4 * KEYS,
                DIM,
                keras.initializers.TruncatedNormal(seed=i),
                keys=spilling(tmp_path) if i == 1 else DynamicKeys(),
            ),
        )
        for i in range(3)
    ]
    mixed = layers.PartialTPUEmbedding(
        {f.name: f for f in features}, OPTIMIZERS["adam"]()
    )
    train(mixed)
    assert_equal(mixed, other)
    np.testing.assert_array_equal(look_up(mixed), look_up(other))


def test_bags_and_text(tmp_path):
    def make(keys, rows):
        table = TableConfig("t", rows, DIM, combiner="mean", keys=keys)
        return layers.PartialTPUEmbedding(FeatureConfig("f", table), "adagrad")

    layer = make(spilling(tmp_path, dtype=tf.string), 40)
    other = make(DynamicKeys(dtype=tf.string), 1000)
    rng = np.random.default_rng(0)
    for _ in range(12):
        words = tf.strings.as_string(rng.integers(0, 300, 20))
        bags = tf.RaggedTensor.from_row_lengths(words, [0, 7, 1, 12])
        for each in (layer, other):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(each(bags) ** 2)
            differentiate(tape, loss, each.trainable_variables)
    assert_equal(layer, other)
    words = tf.strings.as_string(tf.range(320))
    bags = tf.RaggedTensor.from_row_lengths(words, [300, 0, 20])
    # Its bags are summed in another order.
    np.testing.assert_allclose(layer(bags), other(bags), 1e-5, 1e-7)


def test_the_file_is_used_again(tmp_path):
    """Rows that are left of a nearly empty part of it move together."""
    layer = make_layer(spilling(tmp_path), dim=512, optimizer="sgd")
    other = make_layer(dim=512, optimizer="sgd")
    assert train(layer, 120) == train(other, 120)
    assert_equal(layer, other)
    spill = layer.tables["t0"].statistics()["spill"]
    row = 512 * 4
    assert spill["written"] * row > 4 * spill["bytes"]
    assert spill["bytes"] <= KEYS * row * 3 / 2 + 3 * 2**18


def test_a_limit_is_an_error_before_anything_changes(tmp_path):
    keys = DynamicKeys(spill=FileStorage(tmp_path, max_bytes=2**18))
    layer = make_layer(keys, dim=512, optimizer="sgd")
    other = make_layer(dim=512, optimizer="sgd")
    ids = iter(range(0, 10_000, 32))

    def train_both(*trained):
        start = next(ids)
        for each in trained:
            with tf.GradientTape() as tape:
                found = each({"f0": tf.range(start, start + 32)})
                loss = tf.reduce_sum(found["f0"])
            differentiate(tape, loss, each.trainable_variables)

    error = (
        "table 't0': its spill .* has no room for rows of .* keys, .* "
        "max_bytes is 262144"
    )
    for _ in range((ROWS + 128) // 32):
        train_both(layer, other)
    for _ in range(2):
        with pytest.raises(tf.errors.ResourceExhaustedError, match=error):
            train_both(layer)
        assert_equal(layer, other)
    # Others find room when some have gone.
    layer.tables["t0"].remove(tf.range(40, dtype=tf.int64))
    other.tables["t0"].remove(tf.range(40, dtype=tf.int64))
    train_both(layer, other)
    assert_equal(layer, other)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=error):
        layer.tables["t0"].give_rows(tf.range(5000, dtype=tf.int64))
    assert_equal(layer, other)


def test_a_full_disk_is_an_error(tmp_path):
    layer, other = make_layer(spilling(tmp_path)), make_layer()
    train(layer, 1), train(other, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(
            tf.errors.ResourceExhaustedError, match=r"table 't0': .*too large"
        ):
            train(layer, 20, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    train(other, int(layer.step) - 1, seed=1)
    assert_equal(layer, other)
    assert train(layer) == train(other)


def test_checkpoints(tmp_path):
    """They are those of a table in memory, and restore into any."""
    layer, other = make_layer(spilling(tmp_path)), make_layer()
    assert train(layer) == train(other)
    saved = tf.train.Checkpoint(layer=layer).write(f"{tmp_path}/saved")
    for keys, rows in (
        (None, None),
        (spilling(tmp_path), ROWS),
        (spilling(tmp_path, eviction="lfu"), 3 * ROWS),
    ):
        again = make_layer(keys, rows)
        again.build(None)
        if keys is not None:
            train(again, 7, seed=5)  # Which is forgotten.
        tf.train.Checkpoint(layer=again).read(saved).assert_consumed()
        assert_equal(again, layer)
        if keys is not None:
            used = again.tables["t0"]._rows.shards[0].live()
            assert np.sum(used.rows < 2**40) == rows
        twin = make_layer()
        tf.train.Checkpoint(layer=twin).read(saved)
        assert train(again, seed=2) == train(twin, seed=2)
        assert_equal(again, twin)


def test_what_users_write(tmp_path):
    layer, other = make_layer(spilling(tmp_path)), make_layer()
    train(layer), train(other)
    for each in (layer, other):
        table = each.tables["t0"]
        for name, variable in table.variables.items():
            if name not in ("keys", "candidates"):
                variable.assign(variable.numpy() * 2)
        assert table.remove(tf.range(KEYS // 2, dtype=tf.int64)) > ROWS
    assert_equal(layer, other)
    assert train(layer, seed=3) == train(other, seed=3)
    for each in (layer, other):
        each.tables["t0"].give_rows(tf.range(KEYS, dtype=tf.int64))
    assert_equal(layer, other)
    assert train(layer, seed=4) == train(other, seed=4)
    assert layer.tables["t0"].evict(200) == 200
    assert layer.tables["t0"].size == KEYS - 200
    train(layer, seed=5)


def test_scores_go_to_the_file_and_come_back(tmp_path):
    layer = make_layer(spilling(tmp_path, eviction="score"))
    layer.build(None)
    table = layer.tables["t0"]
    table.track_changes()
    train(layer, 4)
    moment, keys = table.moment(), table.keys()
    scores = (keys * 7 % 13 - 6) / np.float32(4)
    table.score(keys[::2], scores[::2])
    assert np.sum(table.lookup(keys[::2]) >= 2**40) > 10
    assert sorted(table.changed(moment).rows) == keys[::2].tolist()
    given = dict(zip(keys[::2].tolist(), scores[::2].tolist(), strict=True))
    # Those in the file come back, and others go there.
    train(layer, 10, seed=1)
    assert table.statistics()["spill"]["returned"] > 50
    np.testing.assert_array_equal(
        table.variables["score"].numpy(),
        [given.get(key, 0) for key in table.keys().tolist()],
    )
    saved = tf.train.Checkpoint(layer=layer).write(f"{tmp_path}/saved")
    again = make_layer(spilling(tmp_path, eviction="score"), 2 * ROWS)
    again.build(None)
    tf.train.Checkpoint(layer=again).read(saved).assert_consumed()
    assert_equal(again, layer)
    # The rows in memory are of the best keys.
    here = again.tables["t0"].lookup(again.tables["t0"].keys()) < 2**40
    found = again.tables["t0"].variables["score"].numpy()
    assert np.sum(here) == 2 * ROWS and found[here].min() >= found[~here].max()


def test_changes_of_spilled_rows_are_known(tmp_path):
    layer = make_layer(spilling(tmp_path))
    layer.build(None)
    table = layer.tables["t0"]
    table.track_changes()
    train(layer)
    first = dict(zip(table.keys(), table.table.numpy(), strict=True))
    moment = table.moment()
    train(layer, 3, seed=1)
    second = dict(zip(table.keys(), table.table.numpy(), strict=True))
    different = {
        key
        for key, row in second.items()
        if key not in first or (first[key] != row).any()
    }
    changed = table.changed(moment)
    assert different <= {*changed.rows}
    # And few more, which have moved to the file.
    assert len(changed.rows) < len(different) + 3 * 48
    table.remove(tf.constant([*second][:5]))
    gone = table.changed(moment)
    assert gone.removed.tolist() == [*second][:5]
    assert not {*gone.removed} & {*gone.rows}


@nightly(lambda background: not background)
@pytest.mark.parametrize("background", [False, True], ids=["now", "threads"])
def test_deltas(tmp_path, background, monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 64)
    one = tf.distribute.get_strategy()
    check_chain(one, "spill", tmp_path, [(one, "spill")], background)


@on("mirrored:2", tier="nightly")
@on("workers:2", tier="more")
def test_on_replicas(strategy):
    """Each shard spills; exports and checkpoints have all keys."""
    with strategy.scope():
        layer = make_layer(spilling(tempfile.gettempdir()), 2 * ROWS)
        other = make_layer()
    replicas = strategy.num_replicas_in_sync
    losses = []
    for each in (layer, other):

        @tf.function
        def step(ids, each=each):
            def of_replica(ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(each({"f0": ids})["f0"] ** 2)
                differentiate(tape, loss, each.trainable_variables)
                return loss

            found = strategy.run(of_replica, (ids,))
            return strategy.reduce("SUM", found, None)

        losses.append(
            [
                float(step(distribute(strategy, np.split(ids, replicas))))
                for ids in batches(20, size=24 * replicas)
            ]
        )
    assert losses[0] == losses[1]
    assert_equal(layer, other)
    found = layer.tables["t0"].statistics()["spill"]
    assert found["keys"] > ROWS and found["returned"] > ROWS / 2
    ids = tf.range(KEYS + 50)
    of_all = distribute(strategy, [ids] * replicas)

    def vectors(each):
        run = tf.function(lambda i: each({"f0": i}, training=False)["f0"])
        local = strategy.run(run, (of_all,))
        return strategy.experimental_local_results(local)[0].numpy()

    np.testing.assert_array_equal(vectors(layer), vectors(other))


@pytest.mark.parametrize("rows", ["float32", "int8"])
def test_exports_have_all_keys(tmp_path, rows):
    layer, other = make_layer(spilling(tmp_path)), make_layer()
    train(layer), train(other)
    found = []
    for i, each in enumerate((layer, other)):
        ids = keras.Input([], dtype=tf.int64, name="f0")
        model = keras.Model({"f0": ids}, each({"f0": ids}))
        to = f"{tmp_path}/exported{i}"
        tfrs_embed.serving.export(model, to, rows=rows)
        loaded = tf.saved_model.load(to)
        given = tf.range(KEYS + 50, dtype=tf.int64)
        [served] = loaded.signatures["serving_default"](f0=given).values()
        found.append(served.numpy())
    np.testing.assert_array_equal(*found)


def test_prefetch(tmp_path):
    layer, other = make_layer(spilling(tmp_path)), make_layer()
    data = tf.data.Dataset.from_tensor_slices({"f0": batches(20)})
    for each, given in ((layer, layer.prefetch(data)), (other, data)):
        for ids in given:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(each(ids)["f0"] ** 2)
            differentiate(tape, loss, each.trainable_variables)
    assert_equal(layer, other)


def test_others_find_all_rows_meanwhile(tmp_path):
    """A key is always in memory or in the file, for threads that look it up."""
    layer = make_layer(spilling(tmp_path))
    layer.build(None)
    layer.tables["t0"].give_rows(tf.range(KEYS, dtype=tf.int64))
    expected = look_up(layer)[0][:KEYS]

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(layer({"f0": ids})["f0"])
        differentiate(tape, loss, layer.trainable_variables)

    read = tf.function(lambda ids: layer({"f0": ids}, training=False)["f0"])
    trained, wrong = threading.Event(), []

    def check(seed):
        rng = np.random.default_rng(seed)
        while not trained.is_set():
            ids = rng.integers(0, KEYS, 50)
            if (read(tf.constant(ids)).numpy() != expected[ids]).any():
                wrong.append(ids)

    threads = [threading.Thread(target=check, args=[i]) for i in range(2)]
    for thread in threads:
        thread.start()
    for ids in batches(1000):
        step(tf.constant(ids))
    trained.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_key_moves_twice_while_it_is_read(tmp_path):
    layer = make_layer(spilling(tmp_path))
    layer.build(None)
    table = layer.tables["t0"]
    table.give_rows(tf.range(KEYS, dtype=tf.int64))
    shard = table._rows.shards[0]
    key_table = shard.key_table
    keys = tf.range(KEYS, dtype=tf.int64)
    found = key_table.lookup(keys)
    here = np.flatnonzero(found.rows != ABSENT)
    expected = look_up(layer)[0][:KEYS]
    read = shard.store.read("t0", "parameters", found.rows)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(layer({"f0": tf.constant(ids)})["f0"])
        differentiate(tape, loss, layer.trainable_variables)

    # Others take all rows; then half of those that lost them come back.
    others = np.setdiff1d(np.arange(KEYS), here)
    for part in np.split(others[: len(others) // 32 * 32], len(others) // 32):
        step(part)
    back = here[: ROWS // 2]
    step(back)
    again = key_table.lookup(keys).rows.numpy()[back]
    assert np.all(again != ABSENT)
    checked = key_table.check_vectors(
        found, read, lambda _: tf.zeros_like(read)
    )
    np.testing.assert_array_equal(checked, expected)


def test_a_fork_is_an_error(tmp_path):
    layer = make_layer(spilling(tmp_path))
    train(layer)
    spill = layer.tables["t0"]._rows.shards[0].spill
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            live = layer.tables["t0"]._rows.shards[0].live()
            spill.read("parameters", live.rows[live.rows > 2**40])
            os.write(write, b"no error")
        except tf.errors.ResourceExhaustedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"not of a fork" in os.read(read, 10_000)


def test_without_kernels_it_is_an_error(tmp_path):
    with (
        kernels.disabled(),
        pytest.raises(
            RuntimeError, match="table 't0' has a spill, which needs a CPU"
        ),
    ):
        make_layer(spilling(tmp_path)).build(None)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_layer(spilling(tmp_path / "file")).build(None)


def test_a_config_has_it(tmp_path):
    layer = make_layer(spilling(tmp_path))
    config = json.loads(json.dumps(layer.get_config()))
    [table] = type(layer).from_config(config)._spec.tables
    assert table.keys.spill == FileStorage(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"spill": "folder"}, "must be a FileStorage or None"),
        ({"eviction": None}, "evicts none"),
        ({"eviction": None, "when_full": "grow"}, "evicts none"),
        ({"when_full": "grow"}, "evicts none"),
        ({"eviction": TimeToLive(3), "when_full": "error"}, "evicts none"),
    ],
)
def test_what_spills_nothing_is_an_error(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        DynamicKeys(**{"spill": FileStorage("x"), **options})


def test_max_bytes_is_a_number(tmp_path):
    with pytest.raises(ValueError, match="FileStorage: max_bytes"):
        FileStorage(tmp_path, max_bytes=0)
    storage = FileStorage(tmp_path, max_bytes=1000)
    table = TableConfig("t", 100, 8, storage=storage)
    layer = layers.PartialTPUEmbedding(FeatureConfig("f", table), "sgd")
    with pytest.raises(ValueError, match=r"Table 't': .* max_bytes=1000"):
        layer.build(None)


def test_the_best_rows_are_also_those_in_the_file(tmp_path):
    layer = make_layer(spilling(str(tmp_path)))
    train(layer)
    table = layer.tables["t0"]
    assert table.statistics()["spill"]["keys"] > 0
    keys, rows = table.keys(), np.asarray(table.variables["parameters"])
    queries = np.random.default_rng(0).normal(size=[3, DIM]).astype(np.float32)
    expected = best_ids(queries @ rows.T, len(keys), ids=keys)
    find = tf.function(lambda: table.top_k(queries, len(keys)))
    for scores, ids in table.top_k(queries, len(keys)), find():
        np.testing.assert_allclose(scores, expected[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(ids, expected[1])
