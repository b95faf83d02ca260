"""Tables whose keys come and go, spread over replicas."""

import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from dynamic_reference import ReferenceKeys, keys_on, shard_of
from process_tiers import on
from strategies.replicas import distribute, local, of_chief
from tfrs_embed.storage import initial_key_values
from tfrs_embed.storage.key_rules import key_rules
from training_helpers import assert_same, differentiate, state

pytestmark = on("mirrored:2", "mirrored:4", "workers:2", tier="nightly")

DIM, RATE = 3, 0.5
BATCH, WIDTH = 4, 2  # Of a replica.

KEYS = {
    "open": dict(eviction=None),
    "lru": dict(eviction="lru"),
    "lfu": dict(eviction="lfu", admission=tfrs_embed.FrequencyAdmission(2)),
    "ttl": dict(
        eviction=tfrs_embed.TimeToLive(2), when_full="grow", max_rows=400
    ),
    "shared": dict(
        eviction="lru",
        admission=tfrs_embed.FrequencyAdmission(2),
        fallback_rows=8,
    ),
    "days": dict(
        eviction=(
            tfrs_embed.TimeToLive(days=3),
            tfrs_embed.DecayingFrequency(days=1),
        ),
        floor=0.9,
    ),
    "chance": dict(admission=tfrs_embed.ProbabilisticAdmission(0.5)),
}


def workers(strategy):
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def make(strategy, rows, dtype=tf.int64, **keys):
    """A layer of one table, for single keys and for bags of them."""
    with strategy.scope():
        table = tfrs_embed.TableConfig(
            "items",
            rows,
            DIM,
            initializer=tf_keras.initializers.RandomUniform(-1, 1, seed=7),
            combiner="sum",
            keys=tfrs_embed.DynamicKeys(dtype=dtype, **keys),
        )
        features = {
            "one": tfrs_embed.FeatureConfig("one", table),
            "bag": tfrs_embed.FeatureConfig("bag", table),
        }
        return tfrs_embed.PartialTPUEmbedding(
            features, tf_keras.optimizers.SGD(RATE), name="layer"
        )


def trainer(strategy, layer):
    """A function that trains on all replicas' keys and gradients at once."""

    def of_replica(one, bag, gradients):
        inputs = {"one": one, "bag": tf.RaggedTensor.from_tensor(bag)}
        with tf.GradientTape() as tape:
            vectors = layer(inputs, training=True)
            loss = tf.reduce_sum(vectors["one"] * gradients[0])
            loss += tf.reduce_sum(vectors["bag"] * gradients[1])
        differentiate(tape, loss, layer.trainable_variables)
        return vectors

    run = tf.function(lambda *args: strategy.run(of_replica, args))

    def step(batches):
        given = [
            distribute(strategy, [b[i] for b in batches]) for i in range(3)
        ]
        return local(strategy, run(*given))

    return step


class Reference:
    """Shards of keys, and each key's row as SGD trains it."""

    def __init__(self, layer, world):
        [self.table] = layer._spec.tables
        self.world = world
        self.shards = [
            ReferenceKeys(key_rules(self.table, world)) for _ in range(world)
        ]
        by_time = self.shards[0].rules.by_time
        self.last_used = "last_used_time" if by_time else "last_used"
        self.rows = {}
        # By their numbers, which don't depend on the number of shards.
        self.fallback = {
            number: self.initial(number)
            for number in range(self.table.keys.fallback_rows or 0)
        }
        self.steps = 0

    def step(self, batches, time=0):
        """Returns each replica's vectors, and trains."""
        self.steps += 1
        everything = [k for b in batches for k in (*b[0], *b[1].ravel())]
        for shard, keys in enumerate(self.shards):
            mine = [
                int(k)
                for k in everything
                if shard_of(int(k), self.world) == shard
            ]
            outcome = keys.commit(mine, None, self.steps, time)
            assert not outcome.lacking
            for key in outcome.evicted:
                del self.rows[key]
            for key in outcome.admitted:
                if self.fallback:
                    self.rows[key] = self.fallback[self.shared(key)]
                else:
                    self.rows[key] = self.initial(key)
        vectors = {
            r: {
                "one": np.stack([self.row(k) for k in one]),
                "bag": np.stack([sum(map(self.row, b)) for b in bag]),
            }
            for r, (one, bag, _) in enumerate(batches)
        }
        sums = {}
        for one, bag, (of_one, of_bag) in batches:
            pairs = [*zip(one, of_one, strict=True)]
            pairs += [
                (k, g) for b, g in zip(bag, of_bag, strict=True) for k in b
            ]
            for key, gradient in pairs:
                sums[int(key)] = sums.get(int(key), 0) + gradient
        for key, gradient in sums.items():
            if key in self.rows:
                self.rows[key] = self.rows[key] - RATE * gradient
            elif self.fallback:
                place = self.shared(key)
                self.fallback[place] = self.fallback[place] - RATE * gradient
        return vectors

    def shared(self, key):
        return shard_of(key, len(self.fallback))

    def row(self, key):
        if self.fallback and int(key) not in self.rows:
            return self.fallback[self.shared(int(key))]
        return self.rows.get(int(key), np.zeros(DIM, np.float32))

    def initial(self, key):
        make = initial_key_values.maker(self.table)
        return make(tf.constant([key], tf.int64))[0].numpy()

    def state(self):
        """The table as checkpoints hold it."""
        live = {k: s for shard in self.shards for k, s in shard.live.items()}
        others = {
            k: s for shard in self.shards for k, s in shard.candidates.items()
        }
        keys = sorted(live)
        return {
            "keys": np.array(keys, np.int64),
            "parameters": np.stack([self.rows[k] for k in keys]),
            "frequency": np.array([live[k].frequency for k in keys]),
            self.last_used: np.array([live[k].last for k in keys]),
            "candidates": np.array(
                [
                    (k, others[k].frequency, others[k].last)
                    for k in sorted(others)
                ]
            ).reshape(-1, 3),
            **(
                {"fallback_parameters": np.stack([*self.fallback.values()])}
                if self.fallback
                else {}
            ),
        }


def make_batches(rng, pool, world):
    shape = (BATCH, DIM)
    return [
        (
            rng.choice(pool, BATCH),
            rng.choice(pool, (BATCH, WIDTH)),
            [rng.normal(size=shape).astype(np.float32) for _ in range(2)],
        )
        for _ in range(world)
    ]


def assert_state(layer, reference):
    held, expected = state_of(layer), reference.state()
    for name, value in expected.items():
        close = 1e-5 * name.endswith("parameters")
        np.testing.assert_allclose(
            held[name], value, rtol=close, atol=close, err_msg=name
        )


def state_of(layer):
    table = layer.tables["items"]
    return {name: v.numpy() for name, v in table.variables.items()}


@on("mirrored:2", tier="more", when=lambda keys: keys == "lru")
@on("mirrored:4", tier="more", when=lambda keys: keys == "ttl")
@on("workers:2", tier="more", when=lambda keys: keys in ("lfu", "shared"))
@pytest.mark.parametrize("keys", list(KEYS))
def test_shards_equal_the_reference(strategy, keys):
    world = strategy.num_replicas_in_sync
    # A step has at most 12 keys a replica, of which a shard may own all.
    rows = 300 if keys in ("open", "chance") else 14 * world * world
    layer = make(strategy, rows, **KEYS[keys])
    reference = Reference(layer, world)
    step = trainer(strategy, layer)
    rng = np.random.default_rng(3)
    pool = rng.integers(-(2**63), 2**63 - 1, 200 * world)
    hours = 0.0
    with tfrs_embed.testing.simulated_clock(lambda: 3600 * hours):
        # Until keys are evicted on four replicas, too.
        for i in range(5 * world):
            # What is of interest drifts, and the clock jumps.
            hours += rng.choice([8, 20, -9])
            part = pool[6 * world * i :][: 20 * world]
            batches = make_batches(rng, part, world)
            expected = reference.step(batches, int(3_600_000_000 * hours))
            for replica, vectors in step(batches).items():
                for name, vector in vectors.items():
                    np.testing.assert_allclose(
                        vector, expected[replica][name], rtol=1e-4, atol=1e-5
                    )
    assert_state(layer, reference)
    table = layer.tables["items"]
    assert table.size == sum(len(s.live) for s in reference.shards)
    assert table.capacity == sum(s.capacity for s in reference.shards)
    numbers = np.sum([s.statistics() for s in reference.shards], 0)
    found = table.statistics()
    assert [*found["last_step"].values()] == numbers[:4].tolist()
    assert [*found["in_all"].values()] == numbers[4:].tolist()
    if KEYS[keys].get("eviction"):
        assert found["in_all"]["evicted"] > 0 or table.capacity > rows
    known = table.keys()
    rows_of = table.lookup([*known, 12345])
    assert (rows_of[:-1] >= 0).all()
    assert rows_of[-1] == -1


@on("mirrored:2", tier="more")
def test_a_shard_without_room_fails_on_all_and_changes_nothing(strategy):
    world = strategy.num_replicas_in_sync
    layer = make(strategy, 8 * world, eviction="lru")
    step = trainer(strategy, layer)
    ones = [np.ones([BATCH, DIM], np.float32)] * 2
    small = [(np.arange(4), np.arange(8).reshape(4, 2), ones)] * world
    step(small)
    before = state_of(layer)
    keys = np.array(keys_on(0, world, 12))
    large = [(keys[:4], keys[4:].reshape(4, 2), ones)] * world
    held = sum(shard_of(key, world) == 0 for key in range(8))
    text = rf"no room for the keys.* 8 keys, and holds {held}\. It needs 4 rows"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        step(large)
    assert_same(state_of(layer), before)
    step(small)
    np.testing.assert_array_equal(
        state_of(layer)["frequency"], 2 * before["frequency"]
    )


@on("mirrored:2", tier="more")
def test_a_table_without_room_leaves_the_others_as_they_are(strategy):
    world = strategy.num_replicas_in_sync
    with strategy.scope():
        features = {
            name: tfrs_embed.FeatureConfig(
                name,
                tfrs_embed.TableConfig(
                    name, 4 * world if keys else 100, DIM, keys=keys
                ),
            )
            for name, keys in {
                "large": tfrs_embed.DynamicKeys(when_full="grow"),
                "small": tfrs_embed.DynamicKeys(),
                "static": None,
            }.items()
        }
        layer = tfrs_embed.PartialTPUEmbedding(
            features, "adagrad", size_threshold=0
        )

    @tf.function
    def of_replica(ids):
        with tf.GradientTape() as tape:
            vectors = layer(dict.fromkeys(features, ids), training=True)
            # Its gradient needs no vector.
            loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
        differentiate(tape, loss, layer.trainable_variables)

    def step(ids):
        given = [tf.constant(ids, tf.int64)] * world
        strategy.run(of_replica, (distribute(strategy, given),))

    with strategy.scope():
        layer.build(None)
    step([0, 1, 2])
    before = state(layer)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"small.*no room"):
        step(keys_on(0, world, 5))
    assert_same(state(layer), before)
    step([0, 1, 2])


def many_tables(strategy, dims, trained):
    """A layer of a table of each width, and a function that trains it."""
    with strategy.scope():
        features = {
            str(i): tfrs_embed.FeatureConfig(
                str(i),
                tfrs_embed.TableConfig(
                    f"table {i}",
                    64,
                    dim,
                    initializer=tf_keras.initializers.RandomUniform(
                        -1, 1, seed=i
                    ),
                    keys=tfrs_embed.DynamicKeys(),
                    optimizer="sgd" if i in trained else None,
                ),
            )
            for i, dim in dims.items()
        }
        layer = tfrs_embed.PartialTPUEmbedding(
            features, None, name="many" if len(dims) > 1 else "alone"
        )

    def of_replica(ids):
        with tf.GradientTape() as tape:
            vectors = layer(
                dict(zip(features, ids, strict=True)), training=True
            )
            loss = tf.add_n([tf.reduce_sum(v * v) for v in vectors.values()])
        differentiate(tape, loss, layer.trainable_variables)
        return vectors

    return tf.function(lambda *ids: strategy.run(of_replica, (ids,)))


@on("mirrored:2", tier="more")
def test_tables_of_a_width_travel_together_as_if_alone(strategy):
    dims, trained = {0: 3, 1: 3, 2: 5, 3: 3}, (0, 2, 3)
    world = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    # Of different sizes; one of them has none on one replica.
    batches = [
        [
            distribute(
                strategy,
                [
                    rng.integers(
                        0, 40, 0 if (i, r) == (1, 0) else 3 * i + r + 2
                    )
                    for r in range(world)
                ],
            )
            for i in dims
        ]
        for _ in range(3)
    ]
    step = many_tables(strategy, dims, trained)
    alone = {i: many_tables(strategy, {i: dims[i]}, trained) for i in trained}
    for ids in batches:
        found = local(strategy, step(*ids))
        for i, of_table in alone.items():
            expected = local(strategy, of_table(ids[i]))
            for rank, vectors in found.items():
                np.testing.assert_array_equal(
                    vectors[str(i)], expected[rank][str(i)]
                )
    graph = step.get_concrete_function(*batches[0]).graph
    kinds = [op.type for op in graph.get_operations()]
    # Keys, rows and gradients of each width, and of the table without an
    # optimizer; and the counts of the others' keys.
    here = len(local(strategy, step(*batches[0])))
    assert kinds.count("CollectiveAllToAllV2") == (3 * 3 + 2) * here


@on("mirrored:2", tier="more")
def test_shared_rows_are_divided_evenly_among_replicas(strategy):
    world = strategy.num_replicas_in_sync
    count = world + 1
    layer = make(strategy, 8 * world, fallback_rows=count)
    text = rf"Table 'items': fallback_rows={count} .* among {world} replicas"
    with pytest.raises(ValueError, match=text):
        layer.build(None)


@on("mirrored:2", tier="more", when=lambda keys: keys == "score")
@on("workers:2", tier="more", when=lambda keys: keys == "shared")
@pytest.mark.parametrize("keys", ["score", "shared"])
def test_checkpoints_move_between_numbers_of_replicas(strategy, tmp_path, keys):
    world = strategy.num_replicas_in_sync
    rows = 14 * world * world
    rules = {**KEYS["lfu"], "eviction": "score"}
    if keys != "score":
        rules = KEYS[keys]
    layer = make(strategy, rows, **rules)
    step = trainer(strategy, layer)
    rng = np.random.default_rng(5)
    pool = np.arange(-20, 20) * 1001
    for _ in range(4):
        step(make_batches(rng, pool, world))
    if keys == "score":
        found = layer.tables["items"].keys()
        layer.tables["items"].score(
            found[::2], rng.normal(size=len(found[::2]))
        )
    before = state_of(layer)
    assert len(before["keys"]) and len(before["candidates"])
    saved = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "saved"))
    chief = of_chief(strategy, type(tmp_path)(saved))
    again = make(strategy, rows, **rules)
    # Before it has tables.
    restored = tf.train.Checkpoint(layer=again).restore(str(chief))
    again.build(None)
    restored.assert_existing_objects_matched()
    assert_same(state_of(again), before)
    if workers(strategy):
        return
    alone = make(tf.distribute.get_strategy(), rows, **rules)
    alone.build(None)
    tf.train.Checkpoint(layer=alone).restore(str(chief)).assert_consumed()
    assert_same(state_of(alone), before)
    back = tf.train.Checkpoint(layer=alone).save(str(tmp_path / "alone"))
    third = make(strategy, rows, **rules)
    third.build(None)
    tf.train.Checkpoint(layer=third).restore(back)
    assert_same(state_of(third), before)


def batches_of(keys, world):
    """A step's batches of 12 keys, on all replicas alike."""
    ones = [np.ones([BATCH, DIM], np.float32)] * 2
    keys = np.array(keys, np.int64)
    return [(keys[:4], keys[4:].reshape(4, 2), ones)] * world


@on("mirrored:2", tier="more", when=lambda key: key(1, 1) == 1 << 40)
@pytest.mark.parametrize(
    "key",
    [
        lambda i, world: 1000 * world * i,
        lambda i, world: i * world << 40,
        lambda i, world: -world * i * (2**32 + 1),
    ],
    ids=["multiples", "high_bits", "pairs"],
)
def test_keys_in_steps_are_spread_and_keep_their_rows(strategy, key):
    world = strategy.num_replicas_in_sync
    layer = make(strategy, 32 * world, eviction="lru")
    step = trainer(strategy, layer)
    keys = [key(i, world) for i in range(24)]
    for part in (keys[:12], keys[12:]):
        step(batches_of(part, world))
    table = layer.tables["items"]
    np.testing.assert_array_equal(table.keys(), sorted(keys))
    sizes = np.bincount([shard_of(k, world) for k in keys], minlength=world)
    assert table.counts() == sizes.tolist()
    assert table.statistics()["in_all"]["evicted"] == 0
    assert min(sizes) > 0


@on("mirrored:2", tier="more")
@pytest.mark.parametrize("when_full", ["error", "grow"])
def test_as_many_keys_as_rows_find_room_without_a_rule(strategy, when_full):
    options = {"max_rows": 100} if when_full == "grow" else {}
    layer = make(strategy, 100, eviction=None, when_full=when_full, **options)
    layer.build(None)
    table = layer.tables["items"]
    for first in (0, 5000, 2**40):
        table.give_rows(np.arange(first, first + 100))
        assert table.size == 100


@on("mirrored:2", tier="more")
@pytest.mark.parametrize("keys", [range(0, 4000, 100), "abcdefghij"])
def test_an_initial_vocabulary_has_rows_on_all_replicas(strategy, keys):
    with strategy.scope():
        with pytest.raises(ValueError, match="give it an input_dim"):
            tfrs_embed.DynamicEmbedding(2, list(keys), "lru")
        layer = tfrs_embed.DynamicEmbedding(
            2, list(keys), "lru", input_dim=40 * strategy.num_replicas_in_sync
        )
        layer.build(None)
    assert layer.table.size == len(keys)


def said_by(strategy, caught):
    """The texts of this library's warnings; only the chief gives any."""
    texts = [
        str(w.message) for w in caught if "Table 'items'" in str(w.message)
    ]
    if workers(strategy) and strategy.cluster_resolver.task_id:
        assert not texts
        return None
    return texts


@on("mirrored:2", tier="more", when=lambda rule: rule == "lru")
@on("workers:2", when=lambda rule: rule == "lfu")
@pytest.mark.parametrize("rule", ["lru", "lfu"])
def test_a_full_tables_evicted_keys_are_those_of_least_value(
    strategy, tmp_path, rule
):
    world = strategy.num_replicas_in_sync
    # On one replica, or by a version that had key k on shard k % n, they had
    # room.
    keys = np.array(
        keys_on(0, world, 13)
        + [k for s in range(1, world) for k in keys_on(s, world, 7)]
    )
    rng = np.random.default_rng(7)
    keys = keys[np.lexsort((keys, keys % world))]
    n = len(keys)
    stored = {
        "keys": keys,
        "parameters": rng.normal(size=(n, DIM)).astype(np.float32),
        "frequency": rng.integers(1, 5, n),
        "last_used": rng.permutation(n),
        "candidates": np.zeros([0, 3], np.int64),
    }
    mine = [i for i, k in enumerate(keys) if shard_of(int(k), world) == 0]
    value = {"lru": ["last_used"], "lfu": ["frequency", "last_used"]}[rule]
    mine.sort(key=lambda i: [stored[v][i] for v in value])
    kept = sorted(set(range(n)) - set(mine[:3]), key=lambda i: keys[i])
    layer = make(strategy, 10 * world, eviction=rule)
    layer.build(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = tf.train.Checkpoint(
            **{name: tf.Variable(v) for name, v in stored.items()}
        )
        written = tf.train.Checkpoint(
            layer=tf.train.Checkpoint(
                tables=tf.train.Checkpoint(items=table),
                step=tf.Variable(n, dtype=tf.int64),
            )
        ).save(str(tmp_path / "saved"))
        tf.train.Checkpoint(layer=layer).restore(written)
    found = state_of(layer)
    for name in ("keys", "parameters", "frequency", "last_used"):
        np.testing.assert_array_equal(found[name], stored[name][kept], name)
    texts = said_by(strategy, caught)
    assert texts is None or len(texts) == 1
    for text in texts or []:
        assert f"leaves out 3 of {n} keys" in text
        assert f"shard 0 of {world} would hold 13" in text
        assert f"eviction='{rule}'" in text
    # Rows that are assigned belong to the restored keys, in their order.
    stored["parameters"] += 1
    assigned = stored["parameters"][kept]
    layer.tables["items"].variables["parameters"].assign(assigned)
    # All rows there are have their own keys' vectors.
    step = trainer(strategy, layer)
    asked = stored["keys"][kept][:12]
    for vectors in step(batches_of(asked, world)).values():
        np.testing.assert_array_equal(
            vectors["one"], stored["parameters"][kept][:4]
        )


@on("mirrored:2", tier="more", when=lambda rule: rule == "score")
@on("workers:2", tier="more", when=lambda rule: rule == "lfu")
@pytest.mark.parametrize("rule", ["lfu", "score"])
def test_keys_are_removed_and_evicted_on_their_shards(strategy, rule):
    world = strategy.num_replicas_in_sync
    layer = make(strategy, 20 * world, eviction=rule)
    step = trainer(strategy, layer)
    ones = [np.ones([BATCH, DIM], np.float32)] * 2
    keys = np.arange(12)
    for batch in (keys, np.concatenate([keys[6:], keys[6:]])):
        one = (batch[:4], batch[4:].reshape(4, 2), ones)
        step([one] * world)
    table = layer.tables["items"]
    if rule == "score":
        with pytest.raises(ValueError, match=r"2 of the keys .* have no row"):
            table.score([5, 100, 7, 101], [1, 2, 3, 4])
        table.score(keys[5:], keys[5:] / 4 - 1)
        table.score([4], [0])
        np.testing.assert_array_equal(
            table.variables["score"].numpy(), [*[0] * 5, *(keys[5:] / 4 - 1)]
        )
        table.score(keys[:4], [-1] * 4)
    table.remove([11, 100])
    table.evict(4)
    np.testing.assert_array_equal(table.keys(), [4, 5, 6, 7, 8, 9, 10])
    assert state(layer)


@on("mirrored:2", tier="more", when=lambda shared: shared)
@pytest.mark.parametrize("shared", [0, 8])
def test_another_thread_finds_a_keys_vector_or_zeros(strategy, shared):
    if workers(strategy):
        pytest.skip("Several workers look up in strategy.run alone.")

    def own_key(shape, dtype=None, keys=None):
        return tf.repeat(
            tf.cast(keys[:, None], tf.float32) + 1, shape[1], axis=1
        )

    with strategy.scope():
        table = tfrs_embed.TableConfig(
            "items",
            64,
            DIM,
            own_key,
            keys=tfrs_embed.DynamicKeys(fallback_rows=shared or None),
        )
        layer = tfrs_embed.PartialTPUEmbedding(
            {"x": tfrs_embed.FeatureConfig("x", table)},
            tf_keras.optimizers.SGD(0.0),
            size_threshold=0,
        )

    def of_replica(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"x": keys}, training=True)["x"])
        return differentiate(tape, loss, layer.trainable_variables)

    keys, rng = np.arange(300), np.random.default_rng(5)
    # Of shared rows nothing but copies, as the rate is 0: no key has zeros.
    own = keys
    if shared:
        own = np.array([shard_of(int(key), shared) for key in keys])
    step = tf.function(lambda keys: strategy.run(of_replica, [keys]))
    look = tf.function(lambda: layer({"x": keys}, training=False)["x"])
    wrong, found, stop = [], [0], threading.Event()

    def read():
        try:
            while not stop.is_set():
                vectors = look().numpy()[:, 0]
                bad = vectors != own + 1.0
                bad &= (vectors != 0) | (shared > 0)
                wrong.extend(zip(keys[bad], vectors[bad] - 1, strict=True))
                found[0] += np.sum(vectors != 0)
        except BaseException as error:
            wrong.append(error)

    step(tf.constant(rng.integers(0, 300, 24)))
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(150):
        step(tf.constant(rng.integers(0, 300, 24)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and found[0] > 0
