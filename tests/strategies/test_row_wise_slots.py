"""Slots of one number for each row, on several replicas.

That they are the reference's numbers is what the conformance tests say. Here
they go through checkpoints: those of tables in all places, and by key.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import on
from strategies.replicas import distribute, of_chief
from tfrs_embed.optimizers import RowWiseAdagrad, RowWiseAdam
from training_helpers import assert_same, differentiate, state

pytestmark = on("mirrored:2", tier="nightly")

ROWS, DIM = 37, 16
PLACES = ("row", "table", "replicated", "keys")


def make_partial(strategy, places=PLACES, optimizer=None):
    """A layer with a table in each place."""
    features = []
    for seed, place in enumerate(places):
        table = tfrs_embed.TableConfig(
            place,
            ROWS,
            DIM,
            initializer=tf_keras.initializers.RandomNormal(seed=seed),
            placement="auto" if place == "keys" else place,
            keys=tfrs_embed.DynamicKeys() if place == "keys" else None,
        )
        features.append(tfrs_embed.FeatureConfig(place, table))
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            features, optimizer=optimizer or RowWiseAdagrad(0.1, 0.25)
        )
        layer.build(None)
    return layer


def make_hashed(strategy):
    """A layer of one table by key."""
    with strategy.scope():
        layer = tfrs_embed.All2AllDenseEmbedding(
            ROWS, DIM, 1, 1, optimizer=RowWiseAdagrad(0.1, 0.25)
        )
        layer.build((None, 1, 1))
    return layer


def trainer(strategy, layer):
    """A function of a seed: a step, each replica with other ids."""
    hashed = isinstance(layer, tfrs_embed.All2AllDenseEmbedding)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.square(v))
                    for v in tf.nest.flatten(layer(ids, training=True))
                ]
            )
        differentiate(tape, loss, layer.trainable_variables)

    function = tf.function(lambda ids: strategy.run(step, (ids,)))

    def train(seed):
        rng = np.random.default_rng(seed)
        batches = [
            tf.constant(rng.integers(0, ROWS, (5, 1, 1)))
            if hashed
            else [tf.constant(rng.integers(0, ROWS, 5)) for _ in PLACES]
            for _ in range(strategy.num_replicas_in_sync)
        ]
        function(distribute(strategy, batches))

    return train


@on("mirrored:2", tier="more", when=lambda make: make is make_hashed)
@on("workers:3", tier="more", when=lambda make: make is make_partial)
@on("workers:3", tier="nightly")
@pytest.mark.parametrize("make", [make_partial, make_hashed])
def test_a_checkpoint_has_them(strategy, make, tmp_path):
    layer = make(strategy)
    train = trainer(strategy, layer)
    for seed in range(3):
        train(seed)
    before = state(layer)
    slots = {k: v for k, v in before.items() if "accumulators" in k}
    assert [v.ndim for v in slots.values()] == [1] * len(slots)
    for value in slots.values():
        assert value.max() > 0.25
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "checkpoint"))
    path = str(of_chief(strategy, tmp_path) / "checkpoint")
    again = make(strategy)
    train_again = trainer(strategy, again)
    train_again(7)  # Of which nothing is left.
    tf.train.Checkpoint(layer=again).read(path).assert_consumed()
    assert_same(state(again), before)
    for step in (train, train_again):
        step(0)  # Ids that it has seen.
    assert_same(state(again), state(layer))
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return  # Keys would have to be written before.
    # What Keras does with a layer's weights.
    whole = {k: v for k, v in state(layer).items() if "accumulators" in k}
    variables = (
        [layer.table.variables]
        if make is make_hashed
        else [layer.tables[name].variables for name in PLACES]
    )
    for variable, value in zip(
        (v["accumulators"] for v in variables), whole.values(), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(variable), value)
        variable.assign(value + 1.0)
        np.testing.assert_array_equal(np.asarray(variable), value + 1.0)


def test_a_checkpoint_has_slots_of_both_shapes(strategy, tmp_path):
    layer = make_partial(strategy, optimizer=RowWiseAdam(0.1))
    train = trainer(strategy, layer)
    for seed in range(2):
        train(seed)
    before = state(layer)
    for place in PLACES:
        assert before[f"{place}/velocities"].ndim == 1
        assert before[f"{place}/momenta"].ndim == 2
        assert before[f"{place}/velocities"].max() > 0
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "checkpoint"))
    again = make_partial(strategy, optimizer=RowWiseAdam(0.1))
    train_again = trainer(strategy, again)
    tf.train.Checkpoint(layer=again).read(
        str(tmp_path / "checkpoint")
    ).assert_consumed()
    assert_same(state(again), before)
    for step in (train, train_again):
        step(0)  # Ids that it has seen.
    assert_same(state(again), state(layer))


@on("mirrored:2", tier="more")
def test_another_rules_slots_are_an_error_that_names_both_shapes(
    strategy, tmp_path
):
    for place, (there, here) in itertools.product(
        ("row", "table"), itertools.permutations(["adagrad", None])
    ):
        saved = make_partial(strategy, [place], there)
        path = str(tmp_path / f"{place}_{there}")
        tf.train.Checkpoint(layer=saved).write(path)
        layer = make_partial(strategy, [place], here)
        before = state(layer)
        with pytest.raises(ValueError, match=f"'{place}/accumulators") as e:
            tf.train.Checkpoint(layer=layer).read(path)
        assert f"[{ROWS}, {DIM}]" in str(e.value)
        assert f"[{ROWS}]" in str(e.value)
        assert_same(state(layer), before)


@on("mirrored:2", tier="more")
def test_columns_are_an_error_that_says_what_else(strategy):
    with pytest.raises(ValueError, match=r"Table 'column': .* 2 slices") as e:
        make_partial(strategy, ["column"])
    assert "RowWiseAdagrad needs all columns" in str(e.value)
    assert "placement='table' or 'row'" in str(e.value)
