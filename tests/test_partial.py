"""Calls with a part of a layer's features, as each tower of a model makes."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed import FeatureConfig, TableConfig
from training_helpers import assert_same, assert_unchanged, differentiate, state

pytestmark = on("keras:3", tier="nightly")

IDS = {
    "user": tf.constant([1, 2, 2], tf.int64),
    "age": tf.constant([0, 1, 2], tf.int64),
    "item": tf.constant([3, 4, 5], tf.int64),
    "genres": tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64),
    "history": tf.ragged.constant([[7], [8, 9], []], dtype=tf.int64),
}
USER = ("user", "age", "history")
ITEM = ("item", "genres")


def make_layer(kind="partial", nest=lambda features: features, **kwargs):
    """History is looked up in the items' table; ages and genres are small."""
    tables = {
        name: TableConfig(
            name, rows, 4, keras.initializers.RandomUniform(seed=rows)
        )
        for name, rows in (
            ("user", 60),
            ("age", 7),
            ("item", 80),
            ("genres", 9),
        )
    }
    tables["history"] = tables["item"]
    features = {n: FeatureConfig(n, tables[n]) for n in IDS}
    kwargs = {"optimizer": keras.optimizers.Adam(0.1), **kwargs}
    if kind == "distributed":
        return layers.DistributedEmbedding(nest(features), **kwargs)
    return layers.PartialTPUEmbedding(
        nest(features), size_threshold=50, **kwargs
    )


@on("keras:3")
@pytest.mark.parametrize(
    ("argument", "value", "way"),
    [
        ("mask_zero", True, r"FeatureConfig\(padding_value=0\)"),
        ("input_length", 4, "max_sequence_length="),
        ("weights", [np.ones([60, 4])], "layer.load_tables"),
        ("weights", np.ones([60, 4]), "layer.load_tables"),
    ],
)
@pytest.mark.parametrize("kind", ["partial", "distributed"])
def test_arguments_of_keras_embedding_are_errors_with_the_way(
    kind, argument, value, way
):
    with pytest.raises(TypeError, match=f"no argument '{argument}': .*{way}"):
        make_layer(kind, **{argument: value})
    make_layer(kind, **{argument: None})


@on("keras:3")
def test_the_serving_config_of_tfrs_is_none_or_an_error_with_the_way():
    layer = make_layer()
    expected = layer(IDS)
    assert_same(layer(IDS, serving_config=None), expected)
    config = {"user": FeatureConfig("user", TableConfig("user", 60, 4))}
    with pytest.raises(
        NotImplementedError,
        match=f"'{layer.name}': serving_config .* tfrs_embed.serving.export",
    ):
        layer(IDS, serving_config=config)


def test_what_tables_do_not_have_cannot_be_set():
    keyed = TableConfig("keyed", 60, 4, keys=tfrs_embed.DynamicKeys())
    layer = layers.PartialTPUEmbedding(
        {
            "keyed": FeatureConfig("keyed", keyed),
            "item": FeatureConfig("item", TableConfig("item", 80, 4)),
            "few": FeatureConfig("few", TableConfig("few", 8, 4)),
        },
        "sgd",
        size_threshold=50,
    )
    layer.build(None)
    for name, table in layer.tables.items():
        with pytest.raises(
            AttributeError, match=rf"'optimizer' of table '{name}'.*frozen by"
        ):
            table.optimizer = "sgd"
        with pytest.raises(
            AttributeError, match=rf"'{name}' .*rates .*table_optimizers"
        ):
            table.learning_rate = 0.5
        with pytest.raises(AttributeError, match="no attribute 'size'"):
            tfrs_embed.TopK(table).size = 3
    with pytest.raises(AttributeError, match="no attribute 'lr'"):
        layer.table_optimizers["item"].lr = 0.5
    with pytest.raises(AttributeError, match="trainable"):
        layer.embedding_tables["keyed"].trainable = True
    layer.trainable = False
    assert not layer.trainable_variables
    layer.trainable = True
    assert layer.trainable_variables


@pytest.mark.parametrize("kind", ["partial", "distributed"])
def test_tables_are_a_mapping_by_name(kind):
    layer = make_layer(kind)
    names = ["user", "age", "item", "genres"]
    for _ in range(2):
        assert sorted(layer.tables) == sorted(names)
        assert len(layer.tables) == 4
        assert "age" in layer.tables and "history" not in layer.tables
        assert 0 not in layer.tables and layer.tables.get("no") is None
        for name, table in layer.tables.items():
            assert table is layer.tables[name] and table.spec.name == name
        with pytest.raises(KeyError, match="no"):
            layer.tables["no"]
        layer.build(None)
    assert len({layer.tables, layer.tables}) == 1
    report = layer.statistics()
    assert sorted(report) == sorted(names) and "age" in report
    assert dict(report)["age"] is report["age"]


def part(names):
    return {name: IDS[name] for name in names}


def train(layer, names, weights=None, graph=False, training=True):
    def step():
        with tf.GradientTape() as tape:
            outputs = layer(
                part(names), weights=weights, training=training, partial=True
            )
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        # What no feature was looked up in has no gradient.
        return [
            g
            for g in tape.gradient(loss, layer.trainable_variables)
            if g is not None
        ]

    (tf.function(step) if graph else step)()


KINDS = ("partial", "distributed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [USER, ITEM, ("age",), ("user",)])
def test_a_part_is_looked_up_as_in_a_call_with_all(kind, names):
    layer = make_layer(kind)
    whole = layer(IDS)
    for outputs in (
        layer(part(names), partial=True),
        tf.function(lambda ids: layer(ids, partial=True))(part(names)),
    ):
        assert list(outputs) == [n for n in IDS if n in names]
        for name in names:
            np.testing.assert_array_equal(outputs[name], whole[name])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_tables_of_a_part_are_trained(kind, graph):
    layer = make_layer(kind)
    train(layer, tuple(IDS), graph=graph)  # Slots now have values.
    before = state(layer)
    train(layer, ITEM, graph=graph)
    after = state(layer)
    assert after.pop("step") == before.pop("step") + 1
    touched = {name for name in after if (after[name] != before[name]).any()}
    own = {"item", "genres"} if kind == "distributed" else {"item"}
    assert {name.split("/")[0] for name in touched} == own
    rows = (after["item/parameters"] != before["item/parameters"]).any(1)
    assert np.flatnonzero(rows).tolist() == [3, 4, 5]


@pytest.mark.parametrize("training", [None, True])
def test_pipelining_has_no_effect_off_tpus(training):
    @tf.function
    def loop(layer):
        for _ in tf.range(3):
            train(layer, tuple(IDS), training=training)

    found = []
    for pipelined in (False, True):
        layer = make_layer(pipeline_execution_with_tensor_core=pipelined)
        layer(IDS)
        loop(layer)
        found.append(state(layer))
    assert_same(*found)
    assert found[0]["step"] == 3


@pytest.mark.parametrize("kernels", [False, True])
def test_two_parts_in_a_step_train_as_two_layers_would(kernels):
    layer, alone = (
        make_layer("distributed", optimizer="sgd") for _ in range(2)
    )

    @tf.function
    def step(layer):
        with tf.GradientTape() as tape:
            # Both towers use the items' table.
            user = layer(part(USER), training=True, partial=True)
            item = layer(part(ITEM), training=True, partial=True)
            score = (user["user"] + user["history"] + user["age"]) * (
                item["item"] + item["genres"]
            )
            loss = tf.reduce_sum(score)
        differentiate(tape, loss, layer.trainable_variables)

    @tf.function
    def whole(layer):
        with tf.GradientTape() as tape:
            out = layer(IDS, training=True)
            score = (out["user"] + out["history"] + out["age"]) * (
                out["item"] + out["genres"]
            )
            loss = tf.reduce_sum(score)
        differentiate(tape, loss, layer.trainable_variables)

    def run():
        step(layer)
        whole(alone)

    if kernels:
        run()
    else:
        with tfrs_embed.kernels.disabled():
            run()
    assert layer.step == 2
    for name, table in layer.embedding_tables.items():
        # SGD: the sum of two updates is the update of the sum.
        np.testing.assert_allclose(
            table.numpy(), alone.embedding_tables[name].numpy(), atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_weights(kind):
    layer = make_layer(kind)
    weights = {"genres": IDS["genres"].with_values([0.5, 2.0, 1.0])}
    everywhere = {**dict.fromkeys(IDS), **weights}
    whole = layer(IDS, weights=everywhere)
    outputs = layer(part(ITEM), weights=weights, partial=True)
    np.testing.assert_array_equal(outputs["genres"], whole["genres"])
    with pytest.raises(ValueError, match=r"'genres'.*weights without ids"):
        layer(part(USER), weights=weights, partial=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_an_error_unless_it_is_said(kind):
    layer = make_layer(kind)
    layer(IDS)
    before = state(layer)
    with pytest.raises(ValueError, match=r"missing keys .*partial=True"):
        layer(part(ITEM))
    with pytest.raises(ValueError, match=r"unknown keys \['itme'\]"):
        layer({"itme": IDS["item"]}, partial=True)
    with pytest.raises(ValueError, match=r"at least one of \['user', 'age'"):
        layer({}, partial=True)
    assert_unchanged(layer, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_nesting(kind):
    layer = make_layer(
        kind,
        lambda f: {
            "user": {n: f[n] for n in USER},
            "item": [f["item"], (f["genres"],)],
        },
    )
    outputs = layer({"user": {"age": IDS["age"]}}, partial=True)
    assert list(outputs) == ["user"] and list(outputs["user"]) == ["age"]
    ids = {"item": [None, (IDS["genres"],)]}
    outputs = layer(ids, partial=True)
    assert list(outputs) == ["item"]
    absent, (genres,) = outputs["item"]
    assert absent is None and genres.shape == (3, 4)


class Towers(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embedding = layer
        self.dense = [keras.layers.Dense(3) for _ in range(2)]

    def tower(self, i, inputs):
        found = self.embedding(inputs, partial=True)
        return self.dense[i](tf.concat(list(found.values()), -1))

    def call(self, inputs):
        towers = [
            self.tower(i, {n: inputs[n] for n in names})
            for i, names in enumerate([USER, ITEM])
        ]
        return tf.reduce_sum(towers[0] * towers[1], -1)


def functional(layer):
    inputs = {
        name: keras.Input(
            ids.shape[1:], dtype=tf.int64, ragged=ids.shape.rank > 1, name=name
        )
        for name, ids in IDS.items()
    }
    towers = []
    for names in (USER, ITEM):
        found = layer({n: inputs[n] for n in names}, partial=True)
        vectors = keras.layers.Concatenate()(list(found.values()))
        towers.append(keras.layers.Dense(3)(vectors))
    return keras.Model(inputs, keras.layers.Dot(-1)(towers))


@on(
    "keras:3",
    tier="more",
    when=lambda kind, make_model: (
        kind == "partial" and make_model is functional
    ),
)
@nightly(lambda kind, make_model: kind != "partial" and make_model is Towers)
@pytest.mark.parametrize("make_model", [Towers, functional])
@pytest.mark.parametrize("kind", KINDS)
def test_two_towers_in_keras(kind, make_model, tmp_path):
    layer = make_layer(kind)
    model = make_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    labels = tf.ones([3])
    losses = model.fit(IDS, labels, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert layer.step == 40
    if make_model is functional:
        model.save(str(tmp_path / "model.keras"))
        loaded = keras.models.load_model(str(tmp_path / "model.keras"))
        np.testing.assert_allclose(loaded(IDS), model(IDS), rtol=1e-5)
        folder = str(tmp_path / "exported")
        tfrs_embed.serving.export(model, folder)
        assert tf.saved_model.contains_saved_model(folder)


def test_a_part_of_preprocessed_ids():
    layer = make_layer("distributed")
    whole = layer(IDS)
    weights = {"genres": IDS["genres"].with_values([1.0, 1.0, 1.0])}
    batch = layer.preprocess(part(ITEM), weights, partial=True)
    outputs = layer(batch, partial=True)
    for name in ITEM:
        np.testing.assert_array_equal(outputs[name], whole[name])
