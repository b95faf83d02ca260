"""Tables that are frozen one by one."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import on
from strategies.replicas import distribute
from tfrs_embed import FeatureConfig, TableConfig
from training_helpers import differentiate, small_model, state

pytestmark = on("keras:3", tier="more")


def make(strategy, place="auto", hot_rows=(), **options):
    tables = [
        TableConfig("a", 50, 4, "uniform", placement=place, hot_rows=hot_rows),
        TableConfig("b", 50, 4, "uniform"),
    ]
    kind = layers.PartialTPUEmbedding
    if place == "replicated":  # Else a Keras layer would hold it.
        kind = layers.DistributedEmbedding
    with strategy.scope():
        layer = kind(
            {t.name: FeatureConfig(t.name, t) for t in tables},
            optimizer=options.pop("optimizer", "adagrad"),
            size_threshold=options.pop("size_threshold", 0),
            **options,
        )
        layer.build(None)
    return layer


def train(strategy, layer):
    """Trains a layer once, in a function of its own."""

    def replica_step(ids):
        with tf.GradientTape() as tape:
            vectors = layer({"a": ids, "b": ids}, training=True)
            loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
        differentiate(tape, loss, layer.trainable_variables)

    ids = [tf.constant([3, 7, 3])] * strategy.num_replicas_in_sync
    step = tf.function(lambda ids: strategy.run(replica_step, (ids,)))
    step(distribute(strategy, ids))


def changed(before, after):
    return {
        name.split("/")[0]
        for name, value in before.items()
        if name != "step" and not np.array_equal(value, after[name])
    }


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", tier="more", when=lambda place: place == "hot")
@on("workers:2", tier="more", when=lambda place: place == "replicated")
@pytest.mark.parametrize(
    "place", ["auto", "column", "table", "replicated", "hot"]
)
def test_the_others_train_on(strategy, place):
    options = {"place": place}
    if place == "hot":
        options = {"hot_rows": [3, 20]}
    layer = make(strategy, **options)
    table = layer.tables["a"]
    assert table.trainable
    table.trainable = False
    for expected in ({"b"}, {"b"}):
        before = state(layer)
        train(strategy, layer)
        assert changed(before, state(layer)) == expected
    with pytest.warns(UserWarning, match=r"'a': functions that were traced"):
        table.trainable = True
    before = state(layer)
    train(strategy, layer)
    assert changed(before, state(layer)) == {"a", "b"}
    assert layer.step.numpy() == 3


@on("workers:2", tier="nightly")
@on("mirrored:2", tier="more")
def test_a_frozen_table_is_no_part_of_a_global_norm(strategy):
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    updates = []
    for frozen in (True, False):
        layer = make(strategy, optimizer=optimizer)
        layer.tables["a"].trainable = not frozen
        before = state(layer)["b/parameters"]
        train(strategy, layer)
        moved = state(layer)["b/parameters"] - before
        updates.append(np.linalg.norm(moved))
    np.testing.assert_allclose(updates, [1.0, np.sqrt(0.5)], rtol=1e-4)


def test_a_small_table_is_frozen_in_its_keras_layer():
    layer = make(tf.distribute.get_strategy(), size_threshold=None)
    assert len(layer.trainable_variables) == 2
    layer.tables["a"].trainable = False
    assert not layer.tables["a"].trainable
    assert len(layer.trainable_variables) == 1


@pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
def test_configs_keep_it(threshold):
    layer = make(tf.distribute.get_strategy(), size_threshold=threshold)
    assert "frozen_tables" not in layer.get_config()
    layer.tables["a"].trainable = False
    config = json.loads(json.dumps(layer.get_config()))
    again = layer.from_config(config)
    assert [t.trainable for t in again.tables.values()] == [False, True]
    config["frozen_tables"] = ["c"]
    with pytest.raises(ValueError, match=r"freezes \['c'\].*\['a', 'b'\]"):
        layer.from_config(config)


def test_fit_after_another_compile_keeps_it():
    layer = make(tf.distribute.get_strategy())
    model, data = small_model(keras, layer, ("a", "b"))
    model.compile("sgd", "mse")
    model.fit(data, verbose=0)
    with pytest.warns(UserWarning, match="model.compile again"):
        layer.tables["a"].trainable = False
    model.compile("sgd", "mse")
    before = state(layer)
    model.fit(data, verbose=0)
    assert changed(before, state(layer)) == {"b"}


def test_what_can_not_be_frozen_by_itself():
    keyed = TableConfig("k", 50, 4, keys=tfrs_embed.DynamicKeys())
    layer = layers.PartialTPUEmbedding(FeatureConfig("f", keyed), "sgd")
    with pytest.raises(NotImplementedError, match=r"'k'.*layer.trainable"):
        layer.tables["k"].trainable = False
    layer = make(tf.distribute.get_strategy())
    with pytest.raises(TypeError, match="'a': trainable"):
        layer.tables["a"].trainable = 0
