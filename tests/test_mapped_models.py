"""Exported models whose tables are mapped files."""

import gc
import resource

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import layers
from process_tiers import nightly, on
from served_delta_models import SPECS, Trainer, answers, apply, load
from tfrs_embed.serving import export, export_delta
from tfrs_embed.tools.conversion import reading
from training_helpers import mappings_of

pytestmark = [
    pytest.mark.tools,
    pytest.mark.xdist_group("mapped"),
    on("keras:3", tier="nightly"),
]

#: 10 MB of float32.
ROWS, DIM = 40_000, 64


def make_layer(*names, rows=ROWS, dim=DIM):
    tables = {name: tfrs_embed.TableConfig(name, rows, dim) for name in names}
    layer = layers.PartialTPUEmbedding(
        {n: tfrs_embed.FeatureConfig(n, t) for n, t in tables.items()},
        "adagrad",
        size_threshold=0,
    )
    layer.build(None)
    return layer


def export_layers(path, *several, **kwargs):
    """Exports layers for ids of all their tables; returns what they answer."""

    def serve(ids):
        vectors = [v for layer in several for v in look_up(layer, ids)]
        return {f"vectors_{i}": v for i, v in enumerate(vectors)}

    def look_up(layer, ids):
        return layer(dict.fromkeys(layer.tables, ids)).values()

    spec = tf.TensorSpec([None], tf.int64, "ids")
    signatures = {"serving_default": (serve, [spec])}
    export(several[0], path, signatures=signatures, mapped=True, **kwargs)
    return serve


def ask(served, ids=(0, 3, 7)):
    ids = tf.constant(ids, tf.int64)
    return served.signatures["serving_default"](ids=ids)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.usefixtures("needs_kernels")
def test_a_loaded_table_is_the_file(tmp_path):
    layer = make_layer("movie")
    path = tmp_path / "model"
    serve = export_layers(path, layer)
    [file] = (path / "assets").iterdir()
    table = layer.tables["movie"].variables["parameters"].numpy()
    assert file.read_bytes() == table.tobytes()
    # Of two models, two versions say, each has its variables.
    models = [load(path), load(path)]
    for model in models:
        expected = serve(tf.constant([0, 3, 7], tf.int64))
        assert_equal(ask(model), expected)
    found = mappings_of(path)
    assert [m["Size"] for m in found] == [table.nbytes // 1024] * 2
    for each in found:
        assert each["Anonymous"] == 0
        assert each["Rss"] < each["Size"] / 2
    del model, models
    gc.collect()
    assert not mappings_of(path)


@nightly(lambda rows: rows in ("bfloat16", "float16", "int8"))
@pytest.mark.parametrize(
    "rows", ["float32", "bfloat16", "float16", "int8", "int4"]
)
@pytest.mark.usefixtures("needs_kernels")
def test_deltas_of_a_mapped_model(tmp_path, strategy, rows):
    trainer = Trainer(strategy)
    trainer.train(range(10))
    model, base = trainer.model, tmp_path / "base"
    export(model, base, SPECS, rows=rows, updatable=True, mapped=True)
    files = {f: f.read_bytes() for f in (base / "assets").iterdir()}
    assert len(files) == (6 if rows in ("int8", "int4") else 3)
    served, other, since = load(base), load(base), base
    before = answers(other)
    # Keys that go, and more than are free: that table becomes another tensor.
    for number, users in enumerate([range(5, 12), range(12, 50)], 1):
        trainer.train(users, steps=10)
        delta = tmp_path / f"delta-{number}"
        export_delta(model, delta, since=since)
        assert apply(served, delta) == number
        since = delta
    export(model, tmp_path / "fresh", SPECS, rows=rows)
    np.testing.assert_array_equal(
        answers(served), answers(load(tmp_path / "fresh"))
    )
    np.testing.assert_array_equal(answers(other), before)
    assert {f: f.read_bytes() for f in files} == files


@pytest.mark.usefixtures("both_implementations")
def test_a_file_that_does_not_fit_is_an_error(tmp_path):
    path = tmp_path / "model"
    serve = export_layers(path, make_layer("movie", rows=7, dim=3))
    [file] = (path / "assets").iterdir()
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:-4], whole + b"0000"):
        file.write_bytes(content)
        size = f"has {len(content)} bytes, not the 84 of float"
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            load(path)
        assert f"{file} {size}" in str(raised.value)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{file}; No such file"):
        load(path)
    file.write_bytes(whole)
    assert_equal(ask(load(path), [6]), serve(tf.constant([6], tf.int64)))


@pytest.mark.usefixtures("both_implementations")
def test_names_of_files_are_safe_and_differ(tmp_path):
    names = ["two words/é", "two words_è", "../up", "a" * 200]
    several = [make_layer(*names, rows=9), make_layer(*names, rows=5)]
    for layer in several:
        layer._name = "same"
    serve = export_layers(tmp_path / "model", *several)
    files = list((tmp_path / "model" / "assets").iterdir())
    assert len(files) == 8
    assert all(f.name.isascii() and len(f.name) < 100 for f in files)
    ids = tf.constant([4, 0], tf.int64)
    assert_equal(ask(load(tmp_path / "model"), ids), serve(ids))


@pytest.mark.usefixtures("needs_kernels")
def test_a_mapped_model_answers_when_it_was_replaced(tmp_path):
    layer, path = make_layer("movie"), tmp_path / "model"
    serve = export_layers(path, layer)
    ids = np.arange(ROWS)
    expected = serve(tf.constant(ids))
    served = load(path)
    table = layer.tables["movie"].variables["parameters"]
    table.assign(tf.ones(table.shape))
    export_layers(path, layer, overwrite=True)
    assert_equal(ask(served, ids), expected)
    assert_equal(ask(load(path), ids), serve(tf.constant(ids)))


def test_a_file_that_cannot_be_written_fails_the_export(tmp_path):
    layer, path = make_layer("movie"), tmp_path / "model"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, limits[1]))
    try:
        with pytest.raises(tf.errors.OpError, match="File too large"):
            export_layers(path, layer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_tables_of_keys_and_without_rows(tmp_path):
    keys = tf.constant([[[3, 11]], [[3, 5]]], tf.int64)
    for name in ("some", "empty"):
        layer = layers.All2AllDenseEmbedding(20, 3, 1, 2)
        layer.build()
        if name == "some":
            layer(keys, training=True)
        spec = tf.TensorSpec([None, 1, 2], tf.int64)
        export(layer, tmp_path / name, spec, mapped=True)
        served = load(tmp_path / name)
        np.testing.assert_array_equal(served.serve(keys), layer(keys))


def test_commands_cannot_read_mapped_tables(tmp_path):
    export_layers(tmp_path / "model", make_layer("movie", rows=7))
    with pytest.raises(ValueError, match="table 'movie' in a mapped file"):
        reading.read(str(tmp_path / "model"))
