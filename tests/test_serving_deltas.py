"""Deltas of exported models: base and deltas equal an export of that moment."""

import os
import pathlib
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfrs_embed
from keras_under_test import layers
from process_tiers import nightly, on
from served_delta_models import (
    ROWS,
    SPECS,
    Model,
    Trainer,
    answers,
    apply,
    load,
)
from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.chain import HEADER
from tfrs_embed.serving import export, export_delta
from tfrs_embed.serving.applying import IDS
from training_helpers import change_byte, save_tensors

pytestmark = [
    pytest.mark.tools,
    pytest.mark.xdist_group("serving_deltas"),
    on("keras:3", tier="nightly"),
]

SMALLEST, LARGEST = tf.int64.min, tf.int64.max


@pytest.fixture
def trainer(strategy):
    return Trainer(strategy)


# Bytes by the day: strategies/test_serving_deltas.py.
@nightly(lambda rows: rows in ("float16", "int8"))
@pytest.mark.parametrize(
    "rows", ["float32", "bfloat16", "float16", "int8", "int4"]
)
def test_base_and_deltas_equal_an_export(trainer, tmp_path, rows):
    model, base = trainer.model, tmp_path / "base"
    trainer.train(range(10))
    export(model, base, SPECS, rows=rows, updatable=True)
    served, since = load(base), base
    steps = [
        # Keys that come, more than are free; that go; that come back.
        (range(5, ROWS), []),
        (range(5), range(20, ROWS)),
        ([SMALLEST, LARGEST, *range(15, 25)], [2]),
        ([2, 3, LARGEST], [SMALLEST]),
    ]
    for number, (users, removed) in enumerate(steps, 1):
        trainer.train(users, steps=10)
        model.users.remove(tf.constant(removed, tf.int64))
        delta = tmp_path / f"delta-{number}"
        assert export_delta(model, delta, since=since) == number
        assert apply(served, delta) == number
        since = delta
        if rows == "float32" or number == len(steps):
            fresh = tmp_path / f"fresh-{number}"
            export(model, fresh, SPECS, rows=rows)
            fresh = load(fresh)
            np.testing.assert_array_equal(answers(served), answers(fresh))
    # From the beginning, by the signature.
    late = load(base)
    for number in range(1, len(steps) + 1):
        delta = tf.constant(str(tmp_path / f"delta-{number}"))
        found = late.signatures["apply_delta"](path=delta)
        assert {k: int(v) for k, v in found.items()} == {"number": number}
    np.testing.assert_array_equal(answers(late), answers(fresh))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A trainer, and a folder with an export and two deltas of its model."""
    folder = tmp_path_factory.mktemp("chain")
    trainer = Trainer(tf.distribute.get_strategy())
    trainer.train(range(10))
    export(trainer.model, folder / "base", SPECS, updatable=True)
    trainer.train(range(5, 20))
    export_delta(trainer.model, folder / "1", since=folder / "base")
    trainer.train(range(15, 30))
    export_delta(trainer.model, folder / "2", since=folder / "1")
    return trainer, folder


@pytest.mark.parametrize("mapped", [False, True])
def test_a_loaded_model_that_is_saved_again_keeps_its_deltas(tmp_path, mapped):
    trainer = Trainer(tf.distribute.get_strategy())
    model, base = trainer.model, tmp_path / "base"
    trainer.train(range(10))
    export(model, base, SPECS, updatable=True, mapped=mapped)
    trainer.train(range(ROWS))  # More keys than there is room for.
    delta = tmp_path / "delta"
    export_delta(model, delta, since=base)
    served, after = load(base), tmp_path / "after"
    served.apply_delta(delta)
    wrapping = tf.Module()
    wrapping.served = served
    signatures = dict(served.signatures)
    tf.saved_model.save(served, str(tmp_path / "again"), signatures)
    tf.saved_model.save(wrapping, str(tmp_path / "within"), signatures)
    base.rename(tmp_path / "gone")
    both = [load(tmp_path / "again"), load(tmp_path / "within").served]
    for again in both:
        np.testing.assert_array_equal(answers(again), answers(served))
        assert apply(again, delta) == 1
    trainer.train(range(20, 40))
    export_delta(model, after, since=tmp_path / "again")
    export(model, tmp_path / "fresh", SPECS)
    fresh = load(tmp_path / "fresh")
    for again in both:
        assert apply(again, after) == 2
        np.testing.assert_array_equal(answers(again), answers(fresh))


def assert_refused(served, path, match, kind=tf.errors.InvalidArgumentError):
    """A delta that a served model refuses, and doesn't apply by halves."""
    before = answers(served)
    with pytest.raises(kind, match=match):
        served.apply_delta(str(path))
    np.testing.assert_array_equal(answers(served), before)


def test_a_delta_that_was_applied_has_no_effect(chain):
    _, folder = chain
    served = load(folder / "base")
    assert apply(served, folder / "1") == 1
    assert apply(served, folder / "1") == 1
    assert apply(served, folder / "2") == 2
    after = answers(served)
    assert apply(served, folder / "1") == 2
    np.testing.assert_array_equal(answers(served), after)


def test_a_delta_out_of_order_is_refused(chain):
    _, folder = chain
    served = load(folder / "base")
    assert_refused(
        served,
        folder / "2",
        "2 is delta number 2, which builds on number 1. The last that was "
        "applied is number 0",
    )
    assert apply(served, folder / "1") == 1


def test_a_delta_of_another_chain_is_refused(chain, tmp_path):
    trainer, folder = chain
    for number in (1, 2):
        base = folder / "base" if number == 1 else tmp_path / "1"
        export_delta(trainer.model, tmp_path / f"{number}", since=base)
    served = load(folder / "base")
    assert apply(served, folder / "1") == 1
    for number in (1, 2):
        assert_refused(
            served,
            tmp_path / f"{number}",
            f"{number} is delta number {number} of another chain: the number 1 "
            "that was applied",
        )
    assert apply(served, folder / "2") == 2


def test_a_delta_of_another_export_is_refused(chain, tmp_path):
    trainer, folder = chain
    for rows in ("int8", "float32"):
        base, delta = tmp_path / rows, tmp_path / f"{rows}-delta"
        export(trainer.model, base, SPECS, rows=rows, updatable=True)
        export_delta(trainer.model, delta, since=base)
        assert_refused(
            load(folder / "base"), delta, "is a delta of another model"
        )


def test_two_loaded_models_have_their_own_deltas(chain):
    _, folder = chain
    first, second = load(folder / "base"), load(folder / "base")
    before = answers(second)
    assert apply(first, folder / "1") == 1
    np.testing.assert_array_equal(answers(second), before)
    assert apply(second, folder / "1") == 1


def test_two_threads_apply_a_delta_once(chain):
    _, folder = chain
    served, found = load(folder / "base"), []
    threads = [
        threading.Thread(
            target=lambda: found.append(apply(served, folder / "1"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
    assert apply(served, folder / "2") == 2


@pytest.fixture
def copy(chain, tmp_path):
    """A copy of the first delta: its prefix, its index, its data."""
    _, folder = chain
    for file in folder.glob("1.*"):
        shutil.copy(file, tmp_path)
    [data] = tmp_path.glob("1.data-*")
    return tmp_path / "1", tmp_path / "1.index", data


def test_damaged_deltas_are_refused(chain, copy):
    _, folder = chain
    served = load(folder / "base")
    prefix, index, data = copy
    whole = {file: file.read_bytes() for file in (index, data)}

    def refuse(match=None):
        assert_refused(served, prefix, match, tf.errors.OpError)
        for file, content in whole.items():
            file.write_bytes(content)

    for file, content in whole.items():
        file.unlink()
        refuse()
        file.write_bytes(content[: len(content) // 2])
        refuse()
        file.write_bytes(b"")
        refuse()
    for at in range(0, len(whole[data]), 97):
        change_byte(data, at)
        refuse("hecksum")
    assert_refused(
        served,
        folder / "base" / "variables" / "variables",
        f"{HEADER} not found",
        tf.errors.NotFoundError,
    )
    assert apply(served, prefix) == 1


def rewritten(prefix, path, **changes):
    """A delta with some tensors that are others."""
    reader = tf.train.load_checkpoint(str(prefix))
    writer = bundle.BundleWriter(f"{path}.parts/part")
    for name in reader.get_variable_to_shape_map():
        value = reader.get_tensor(name)
        change = changes.get(name.replace("/", "_"), lambda value: value)
        writer.add(name, change(value))
    bundle.merge(writer.finish(), str(path))


def put(value, at, number):
    value[at] = number
    return value


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("movie_rows", lambda v: put(v, -1, ROWS), "movie: it has 60 rows"),
        ("movie_rows", lambda v: put(v, 0, -1), "movie: it has 60 rows"),
        ("movie_rows", lambda v: v[1:], "movie: .* not as many values"),
        ("movie_parameters", lambda v: v[:, 1:], "[Ss]hape"),
        ("user_keys", lambda v: v[::-1], "user: .* keys are not ascending"),
        ("user_keys", lambda v: v[1:], "user: .* not as many values"),
        ("user_parameters", lambda v: v.astype(np.float16), "float"),
    ],
)
def test_deltas_that_do_not_fit_are_refused(
    chain, tmp_path, part, change, match
):
    trainer, folder = chain
    served = load(folder / "base")
    part = f"tables_{trainer.model.layer.name}_{part}"
    rewritten(folder / "1", tmp_path / "delta", **{part: change})
    assert_refused(served, tmp_path / "delta", match)
    rewritten(folder / "1", tmp_path / "same")
    assert apply(served, tmp_path / "same") == 1


def test_a_delta_that_fails_is_in_the_next_one(tmp_path):
    trainer = Trainer(tf.distribute.get_strategy())
    trainer.train(range(10))
    model, base = trainer.model, tmp_path / "base"
    export(model, base, SPECS, rows="float16", updatable=True)
    movies = model.layer.embedding_tables["movie"]
    rows = movies.numpy()
    movies.assign(np.where(np.arange(ROWS)[:, None] == 7, 1e5, rows))
    trainer.train(range(20), steps=1)
    with pytest.raises(ValueError, match=r"'movie' .* magnitude 100000"):
        export_delta(model, tmp_path / "1", since=base)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    movies.assign(rows + 1)
    export_delta(model, tmp_path / "1", since=base)
    served = load(base)
    assert apply(served, tmp_path / "1") == 1
    export(model, tmp_path / "fresh", SPECS, rows="float16")
    fresh = load(tmp_path / "fresh")
    np.testing.assert_array_equal(answers(served), answers(fresh))


def test_a_killed_write_leaves_no_delta(chain, tmp_path, monkeypatch):
    trainer, folder = chain
    path = tmp_path / "delta"

    def write():
        export_delta(trainer.model, path, since=folder / "2")

    rename = tf.io.gfile.rename
    for killed_at in range(3):
        calls = []

        def killed(*args, calls=calls, killed_at=killed_at, **kwargs):
            if len(calls) == killed_at:
                # No cleaning up, as by a process that is gone.
                monkeypatch.setattr(shutil, "rmtree", lambda _: None)
                raise KeyboardInterrupt
            calls.append(args)
            rename(*args, **kwargs)

        monkeypatch.setattr(tf.io.gfile, "rename", killed)
        if killed_at == 2:  # There is data, and an index.
            write()
            assert path.with_suffix(".index").exists()
            break
        with pytest.raises(KeyboardInterrupt):
            write()
        monkeypatch.undo()
        assert not path.with_suffix(".index").exists()
        with pytest.raises(ValueError, match=r"neither a model .* nor a"):
            export_delta(trainer.model, tmp_path / "next", since=path)
    served = load(folder / "base")
    for each in (folder / "1", folder / "2", path):
        served.apply_delta(str(each))
    assert apply(served, path) == 3
    assert not pathlib.Path(f"{path}.incomplete").exists()


def test_what_deltas_cannot_build_on_is_refused(chain, tmp_path):
    trainer, folder = chain
    model = trainer.model
    plain = tmp_path / "plain"
    export(model, plain, SPECS)
    assert not hasattr(load(plain), "apply_delta")
    for since in (plain, tmp_path / "none"):
        with pytest.raises(ValueError, match="neither a model that was"):
            export_delta(model, tmp_path / "delta", since=since)
    for value in (3, [3, 4], 3.5, float("inf"), "text", [b"a", b"b"]):
        tensors = {HEADER: value}
        broken = save_tensors(tmp_path / "broken", tensors)
        os.makedirs(tmp_path / "model" / "variables", exist_ok=True)
        save_tensors(tmp_path / "model/variables/variables", {IDS: value})
        for since in (broken, tmp_path / "model"):
            with pytest.raises(
                (ValueError, tf.errors.DataLossError),
                match=r"neither a model|of another model|no vector of five",
            ):
                export_delta(model, tmp_path / "delta", since=since)
    other = Model()
    other({name: tf.zeros([1], tf.int64) for name in SPECS})
    with pytest.raises(ValueError, match="of another model than 'model"):
        export_delta(other, tmp_path / "delta", since=folder / "2")
    # Of the model, but of a chain that this process doesn't know.
    far = {HEADER: lambda v: put(v, 2, b"3")}
    rewritten(folder / "1", tmp_path / "far", **far)
    with pytest.raises(ValueError, match="or of another process"):
        export_delta(model, tmp_path / "delta", since=tmp_path / "far")
    with pytest.raises(ValueError, match="2' is there already"):
        export_delta(model, folder / "2", since=folder / "1")
    assert not list(tmp_path.glob("delta*"))


def test_what_cannot_be_updatable_is_refused(tmp_path):
    table = tfrs_embed.TableConfig("movie", 30, 3)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table), "sgd", size_threshold=0
    )
    spec = tf.TensorSpec([None], tf.int64)
    signatures = {"serving_default": (layer, [spec])}
    path = tmp_path / "model"
    layer(tf.constant([1], tf.int64))
    with pytest.raises(RuntimeError, match="'movie' aren't tracked"):
        export(layer, path, signatures=signatures, updatable=True)
    signatures["apply_delta"] = (layer, [spec])
    with pytest.raises(ValueError, match="makes the signature 'apply_delta'"):
        export(layer, path, signatures=signatures, updatable=True)
    assert list(tmp_path.iterdir()) == []


def test_operations_are_tensorflows_own(chain):
    _, folder = chain
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "base" / "saved_model.pb").read_bytes())
    [meta_graph] = saved.meta_graphs
    functions = meta_graph.graph_def.library.function
    used = {node.op for f in functions for node in f.node_def}
    assert {"RestoreV2", "ResourceScatterUpdate"} <= used
    assert not {op for op in used if "Tfrs" in op or "PyFunc" in op}


def test_a_delta_has_changed_rows_alone(chain):
    trainer, folder = chain
    reader = tf.train.load_checkpoint(str(folder / "1"))
    shapes = reader.get_variable_to_shape_map()
    layer = trainer.model.layer.name
    count = shapes[f"tables/{layer}/movie/rows"][0]
    assert 0 < count <= 8
    assert shapes[f"tables/{layer}/movie/parameters"] == [count, 4]
    # Keras trains it: all of its rows.
    assert shapes[f"tables/{layer}/hour/parameters"] == [5, 4]
    assert reader.get_tensor(HEADER)[1] == b"1"
