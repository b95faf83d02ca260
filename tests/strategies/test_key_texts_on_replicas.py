"""The texts of string keys, of tables spread over replicas."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from process_tiers import on, with_kernels
from strategies.replicas import distribute, of_chief
from text_layers import inputs_of, make, require_texts, step_of
from tfrs_embed import FileStorage, kernels
from tfrs_embed.checkpoint import DeltaManager
from tfrs_embed.serving import export, export_delta, export_rows, import_rows
from training_helpers import differentiate


def make_spread(strategy, **keys):
    with strategy.scope():
        return make(**keys)


def trainer(strategy, layer, graph=True):
    """A function that trains on replicas' words."""

    def of_replica(one, two):
        with tf.GradientTape() as tape:
            # Two lookups, the gradients of which depend on no value.
            loss = tf.add_n(
                tf.reduce_sum(layer({"word": ids}, partial=True)["word"])
                for ids in (one, two)
            )
        differentiate(tape, loss, layer.trainable_variables)

    def run(one, two):
        strategy.run(of_replica, (one, two))

    run = tf.function(run) if graph else run

    def step(batches):
        run(*(distribute(strategy, [b[i] for b in batches]) for i in (0, 1)))

    return step


def several(strategy):
    """Whether there are several workers."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def saved(strategy, layer, path):
    """Writes a checkpoint; returns the one that has all tables."""
    tf.train.Checkpoint(layer=layer).write(str(path))
    return str(of_chief(strategy, path))


def words_of(rng, first, world):
    """Two batches for each replica; each has a word that no other one has."""
    return [
        [
            np.array(
                [b"w%d-\xff" % n for n in rng.integers(first, first + 20, 5)]
                + [b"%d of replica %d" % (2 * first + i, rank)],
                object,
            )
            for i in range(2)
        ]
        for rank in range(world)
    ]


def evicts_by_kernels(both_implementations, spills):
    return with_kernels(both_implementations) and not spills


@on("workers:2", tier="more", when=evicts_by_kernels)
@on("mirrored:2", "mirrored:4", "workers:2", "workers:3", tier="nightly")
@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.usefixtures("both_implementations")
def test_texts_of_all_replicas_keys(strategy, tmp_path, spills):
    keys = {}
    if spills:
        if kernels.operations("CPU:0") is None:
            pytest.skip("A spill needs kernels.")
        keys["spill"] = FileStorage(of_chief(strategy, tmp_path))
    world, rng = strategy.num_replicas_in_sync, np.random.default_rng(1)
    layer = make_spread(strategy, rows=120, **keys)
    table, step, seen = layer.tables["items"], trainer(strategy, layer), set()
    for i in range(12):
        batches = words_of(rng, 10 * i, world)
        seen.update(w for b in batches for ids in b for w in ids.tolist())
        step(batches)
        require_texts(table, seen)
        assert table.statistics()["text"]["unknown"] == 0
    assert table.statistics()["in_all"]["evicted"] > 0
    texts = table.key_texts
    assert not texts._reserved and not texts.wanted.few
    found = table.top_k(tf.ones([1, 2]), 5)[1].numpy()[0].tolist()
    assert len({*found} & seen) == 5
    best = tf.function(lambda: strategy.run(table.top_k, ([[1.0, 1.0]], 5)))
    for texts in strategy.experimental_local_results(best()[1]):
        assert texts.numpy()[0].tolist() == found

    path = saved(strategy, layer, tmp_path / "saved")
    alone = make(rows=120)
    tf.train.Checkpoint(layer=alone).restore(path)
    if not spills:
        require_texts(alone.tables["items"], seen)
    step_of(alone)(inputs_of(["x"], [["y"]]))
    path = tf.train.Checkpoint(layer=alone).write(str(tmp_path / "alone"))
    back = make_spread(strategy, rows=300)
    tf.train.Checkpoint(layer=back).restore(path)
    require_texts(back.tables["items"], {*seen, b"x", b"y"})
    assert back.tables["items"].statistics()["text"]["unknown"] == 0


@on("mirrored:2", tier="nightly")
@on("workers:2", tier="more")
def test_texts_in_fit(strategy):
    layer = make_spread(strategy, rows=60)
    with strategy.scope():
        word = tf_keras.Input([], dtype=tf.string)
        output = layer({"word": word}, partial=True)["word"]
        model = tf_keras.Model(word, output)
        model.compile("sgd", "mse", steps_per_execution=4)
    words = [b"w%d" % (i // 2) for i in range(96)]
    data = tf.data.Dataset.from_tensor_slices((words, np.ones([96, 2])))
    model.fit(data.batch(8), epochs=1, verbose=0)
    require_texts(layer.tables["items"], words)
    assert layer.tables["items"].statistics()["text"]["unknown"] == 0


@on("mirrored:2", "workers:2", tier="more")
def test_unknown_texts_are_learned_from_any_replica(strategy, tmp_path):
    world = strategy.num_replicas_in_sync
    names = [b"name %d" % i for i in range(40 * world)]
    plain = make(rows=200 * world, keep_text=False)
    plain.tables["items"].give_rows(names)
    path = saved(strategy, plain, tmp_path / "plain")
    layer = make_spread(strategy, rows=200 * world)
    tf.train.Checkpoint(layer=layer).restore(path)
    table = layer.tables["items"]
    # Replicas of one process must run in a graph.
    step = trainer(strategy, layer, graph=not several(strategy))
    require_texts(table, [])
    seen = []
    # Replicas see parts of the keys, whichever of them holds these.
    for first in (0, 10, 30):
        mine = [names[40 * i + first :][:10] for i in range(world)]
        seen += itertools.chain(*mine)
        step([[np.array(m), np.array([*m[:9], b"new"])] for m in mine])
        require_texts(table, [*seen, b"new"])
    table.assign([*names[:3], b"x", b"y"], np.ones([5, 2]))
    table.remove([names[1], b"y"])
    seen += [b"new", b"x", *names[:3]]
    require_texts(table, seen)
    # What replica 0 lacks altogether, others have.
    none = [tf.constant([], tf.string)] * 2
    more = [[np.array([b"y", names[1]], object)] * 2] * (world - 1)
    step([none, *more])
    require_texts(table, [*seen, b"y"])
    assert table.statistics()["text"]["unknown"] == 10 * world


@on("mirrored:2", tier="nightly")
@on("workers:2", tier="more")
def test_files_have_the_texts_of_all_replicas_keys(strategy, tmp_path):
    world, rng = strategy.num_replicas_in_sync, np.random.default_rng(1)
    shared = of_chief(strategy, tmp_path)
    layer = make_spread(strategy, rows=300 * world)
    with strategy.scope():
        word = tf_keras.Input([], dtype=tf.string, name="word")
        model = tf_keras.Model(word, layer({"word": word}, partial=True))
    table, step, seen = layer.tables["items"], trainer(strategy, layer), []
    table.track_changes()
    signature = [tf.TensorSpec([None, 2], tf.float32, "queries")]

    def best(queries):
        return table.top_k(queries, 3)[1]

    manager = DeltaManager(tf.train.Checkpoint(layer=layer), tmp_path / "chain")
    copies = [make(rows=300 * world), make_spread(strategy, rows=300 * world)]
    since = served = None
    for i in range(3):
        batches = words_of(rng, 10 * i, world)
        seen += [w for b in batches for ids in b for w in ids.tolist()]
        step(batches)
        if i:
            table.remove(seen[:2])
        delta = of_chief(strategy, type(tmp_path)(manager.save()))
        restored = make(rows=300 * world)
        tf.train.Checkpoint(layer=restored).restore(str(delta))
        require_texts(restored.tables["items"], seen)
        rows, exported = shared / f"rows {i}", shared / f"model {i}"
        since = export_rows(layer, rows, since)
        for copy in copies:
            import_rows(copy.tables["items"], rows / layer.name / "items")
            require_texts(copy.tables["items"], seen)
            assert copy.tables["items"].size == table.size
        if i:
            export_delta(model, exported, since=shared / f"model {i - 1}")
            served.apply_delta(str(exported))
        else:
            export(
                model,
                exported,
                signatures={"best": (best, signature)},
                updatable=True,
            )
            served = tf.saved_model.load(str(exported))
        queries = tf.constant([[1.0, 0.0], [-1.0, 1.0]])
        [found] = served.signatures["best"](queries=queries).values()
        expected = best(queries).numpy()
        assert {*expected.ravel()} <= {*seen}
        np.testing.assert_array_equal(found, expected)


@on("workers:2", tier="more")
def test_a_step_that_fails_on_all_workers_leaves_no_text(strategy):
    world = strategy.num_replicas_in_sync
    layer = make_spread(strategy, rows=12 * world, eviction=None)
    table, step = layer.tables["items"], trainer(strategy, layer, graph=False)

    def batches(count):
        words = [
            [b"%d, %d" % (r, i) for i in range(count)] for r in range(world)
        ]
        return [[np.array(each)] * 2 for each in words]

    with pytest.raises(tf.errors.InvalidArgumentError, match="no room"):
        step(batches(40))
    require_texts(table, [])
    step(batches(3))
    require_texts(table, [w for b in batches(3) for w in b[0].tolist()])
    texts = table.key_texts
    assert table.size == 3 * world == table.statistics()["text"]["keys"]
    assert not texts._reserved and not texts.wanted.few
