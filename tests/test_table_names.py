"""Tables of any name, in every format that layers are saved in."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import export, keras, layers, of_keras_2
from process_tiers import nightly, on
from tfrs_embed.checkpoint.names import escape, in_folder, in_graphs, is_plain
from training_helpers import assert_same, state

pytestmark = on("keras:3", tier="nightly")

# What is stored beside tables, or in them; paths; what paths are made of.
NAMES = [
    "two words",
    "電影",
    "a.b",
    "parameters",
    "tables",
    "step",
    "a.b/c",
    "a.b/c/parameters",
    ".",
]
FORMATS = [
    "keras",
    "weights.h5",
    *of_keras_2("h5", "tf"),
    "saved_model",
    "ckpt",
]


def partial_tpu_embedding(names):
    # Tables of both kinds.
    return layers.PartialTPUEmbedding(
        {
            str(i): tfrs_embed.FeatureConfig(
                str(i), tfrs_embed.TableConfig(name, 10 + i, 2)
            )
            for i, name in enumerate(names)
        },
        "adagrad",
        size_threshold=14,
    )


def distributed_embedding(names):
    return layers.DistributedEmbedding(
        {
            str(i): tfrs_embed.FeatureConfig(
                str(i),
                tfrs_embed.TableConfig(name, 10 + i, 2, optimizer="adagrad"),
                (4,),
                (4, 2),
            )
            for i, name in enumerate(names)
        }
    )


LAYERS = [partial_tpu_embedding, distributed_embedding]


def make(make_layer, names):
    layer = make_layer(names)
    inputs = {
        str(i): keras.Input([], dtype=tf.int64, name=str(i))
        for i in range(len(names))
    }
    outputs = keras.layers.Add()(list(layer(inputs).values()))
    model = keras.Model(inputs, outputs)
    # Tracing takes longer than all that is tested here.
    model.compile("sgd", "mse", run_eagerly=True)
    ids = {str(i): np.array([1, 2, 3, i]) for i in range(len(names))}
    model.fit(ids, np.ones([4, 2]), verbose=0)
    return model, layer, ids


def state_of(model):
    [layer] = [
        layer for layer in model.layers if hasattr(layer, "table_optimizers")
    ]
    return state(layer)


@on("keras:3", when=lambda make_layer: make_layer is partial_tpu_embedding)
@nightly(
    lambda form, make_layer: (
        (make_layer is distributed_embedding)
        == (form in ("keras", "tf", "ckpt"))
    )
)
@pytest.mark.parametrize("make_layer", LAYERS)
@pytest.mark.parametrize("form", FORMATS)
def test_tables_of_any_name_are_saved(make_layer, form, tmp_path):
    model, _, ids = make(make_layer, NAMES)
    expected = model(ids)
    path = str(tmp_path / f"model.{form}")
    if form == "saved_model":
        found = export(model, path)({k: tf.constant(v) for k, v in ids.items()})
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        return
    if form in ("keras", "h5", "tf"):
        model.save(path, save_format=form)
        loaded = keras.models.load_model(path)
    else:
        loaded, _, _ = make(make_layer, NAMES)
        if form == "ckpt":
            written = tf.train.Checkpoint(model=model).write(path)
            checkpoint = tf.train.Checkpoint(model=loaded)
            checkpoint.read(written).assert_consumed()
        else:
            model.save_weights(path)
            loaded.load_weights(path)
    np.testing.assert_allclose(loaded(ids), expected, rtol=1e-5)
    saved = state_of(model)
    assert len(saved) > len(NAMES) + 1
    assert_same(state_of(loaded), saved)


def test_escaped_names_differ():
    names = ["a.b", "a%2Eb", "a%252Eb", "a%b", "a%2.b", "%.", "%2E", ".", "%25"]
    escaped = [escape(name, ".") for name in names]
    assert len(set(escaped)) == len(names)
    assert not any("." in name for name in escaped)
    assert escape("50% / é", ".") == "50% / é"
    names += ["a b", "a>20b", "a>b", "é", "€", " AC", ">E9"]
    assert len({in_graphs(name) for name in names}) == len(names)
    assert all(re.fullmatch("[ -~]+", in_graphs(name)) for name in names)


def test_names_of_files_are_names_in_one_folder():
    ordinary = ["two words", "電影", "a.b", "...", ".hidden", "50%", "Lock"]
    assert [in_folder(name) for name in ordinary] == ordinary
    assert in_folder("a/b") == "a%2Fb"
    others = [".", "..", "%2E", "%2E.", "/", "\\", "\0", "a/../b", "lock"]
    found = [in_folder(name, ["lock"]) for name in [*ordinary, *others]]
    assert len({*found}) == len(found)
    assert all(map(is_plain, found)) and "lock" not in found
    for refused in ("", "a" * 256, "é" * 128, "/" * 86):
        with pytest.raises(ValueError, match=r"bytes, and a file's name has 1"):
            in_folder(refused)
    assert in_folder("é" * 127) == "é" * 127


def test_names_that_lead_elsewhere_are_not_plain():
    for name in ("", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0", "gs://a"):
        assert not is_plain(name), name
    assert is_plain("ckpt-3-base") and is_plain("..a") and is_plain("a b")
