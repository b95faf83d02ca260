"""The texts of string keys, of tables spread over replicas."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from process_tiers import on
from strategies.replicas import distribute, of_chief
from text_layers import inputs_of, make, require_texts, step_of
from tfrs_embed import FileStorage, kernels
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


@on("mirrored:2", "mirrored:4", "workers:2", tier="more")
@on("workers:3", tier="nightly")
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


@on("mirrored:2", tier="more")
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
