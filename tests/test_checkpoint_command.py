"""`tfrs-embed checkpoint`: what it shows, and how it fails."""

import json
import logging
import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
import tfrs_embed_command
from run_in_processes import environment
from tfrs_embed import progress
from tfrs_embed.checkpoint import bundle, stored_pieces
from tfrs_embed.checkpoint.index import Index
from training_helpers import change_byte, differentiate
from training_helpers import checkpoint_command as main

pytestmark = pytest.mark.tools

tpu = tf.tpu.experimental.embedding


def save(path, values, optimizer="adagrad", **objects):
    """A checkpoint of a layer with a large table and a small one."""
    rows, dim = values.shape
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            "x": tpu.FeatureConfig(tpu.TableConfig(rows, dim, name="large")),
            "y": tpu.FeatureConfig(tpu.TableConfig(5, 2, name="small")),
        },
        optimizer,
        size_threshold=5,
    )
    ids = {"x": tf.constant([1, 2]), "y": tf.constant([1, 2])}
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in layer(ids).values()])
    differentiate(tape, loss, layer.trainable_variables)
    layer.embedding_tables["large"].assign(values)
    return tf.train.Checkpoint(layer=layer, **objects).save(str(path))


@pytest.fixture
def values():
    return np.random.default_rng(0).random((300, 4)).astype(np.float32)


def inspect(path, capsys, *options):
    assert main(["inspect", str(path), *options]) == 0
    return capsys.readouterr().out


def inspect_json(path, capsys):
    return json.loads(inspect(path, capsys, "--json"))


def test_it_shows_tables_slots_and_the_rest(tmp_path, values, capsys):
    values[7] = 0
    dense = tf.Variable(tf.zeros([3, 2], tf.float16))
    path = save(tmp_path / "c", values, dense=dense)
    found = inspect_json(path, capsys)
    assert found["path"] == path
    assert found["format"] == "tfrs_embed"
    assert found["steps"] == {"layer": 1}
    tables = {table["name"]: table for table in found["tables"]}
    large = tables["large"]
    assert (large["layer"], large["rows"], large["dim"]) == ("layer", 300, 4)
    assert not large["keys"]
    assert list(large["columns"]) == ["parameters", "accumulators"]
    parameters = large["columns"]["parameters"]
    assert parameters["bytes"] == values.nbytes
    norms = np.linalg.norm(values.astype(np.float64), axis=1)
    for name, expected in [
        ("norm", np.linalg.norm(norms)),
        ("mean_row_norm", norms.mean()),
        ("max_row_norm", norms.max()),
    ]:
        assert parameters[name] == pytest.approx(expected, rel=1e-9), name
    assert (parameters["zero_rows"], parameters["nan"]) == (1, 0)
    assert list(tables["small"]["columns"]) == ["parameters"]
    others = {other["name"]: other for other in found["others"]}
    assert others["dense"]["shape"] == [3, 2]
    assert others["dense"]["dtype"] == "float16"
    assert others["dense"]["nbytes"] == 12

    text = inspect(path, capsys)
    assert re.search(
        r"layer/large +parameters +\[300, 4\] +float32 +4\.7 KiB", text
    )
    assert re.search(r"\nlayer/large +accumulators +\[300, 4\] ", text)
    assert "Step of 'layer': 1" in text
    assert re.search(r"dense +\[3, 2\] +float16 +12 B", text)


def test_it_counts_what_is_not_finite(tmp_path, values, capsys):
    values[0] = [np.nan, 3.0, np.inf, -np.inf]
    values[1] = [np.nan, 0.0, 4.0, 0.0]
    values[2:] = 0
    path = save(tmp_path / "c", values)
    [column] = [
        table["columns"]["parameters"]
        for table in inspect_json(path, capsys)["tables"]
        if table["name"] == "large"
    ]
    assert (column["nan"], column["inf"], column["zero_rows"]) == (2, 2, 298)
    assert column["norm"] == 5
    assert column["max_row_norm"] == 4
    assert column["mean_row_norm"] == pytest.approx(7 / 300)


def test_blocks_make_no_difference(tmp_path, values, capsys, monkeypatch):
    path = save(tmp_path / "c", values)
    whole = inspect_json(path, capsys)
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 16 * 7)
    in_blocks = inspect_json(path, capsys)
    for one, other in zip(whole["tables"], in_blocks["tables"], strict=True):
        for name, column in one["columns"].items():
            in_blocks = other["columns"][name]
            assert in_blocks.pop("shape") == column.pop("shape")
            assert in_blocks.pop("dtype") == column.pop("dtype")
            assert in_blocks == pytest.approx(column), name


def train_keys(layer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([[[7]], [[9]]], tf.int64)))
    differentiate(tape, loss, layer.trainable_variables)


def test_it_shows_tables_of_keys(tmp_path, capsys):
    layer = tfrs_embed.All2AllDenseEmbedding(10, 4, 1, 1, optimizer="adam")
    train_keys(layer)
    tf.train.Checkpoint(layer).save(str(tmp_path / "c"))
    # The folder's latest.
    [table] = inspect_json(tmp_path, capsys)["tables"]
    assert table["keys"]
    assert (table["layer"], table["name"]) == ("", "")
    assert list(table["columns"]) == ["parameters", "momenta", "velocities"]
    assert table["rows"] == 2


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_layer_may_be_called_as_its_parts_are(
    use_hashtable, tmp_path, capsys
):
    by_key = tfrs_embed.All2AllDenseEmbedding(
        10, 4, 1, 1, use_hashtable=use_hashtable
    )
    train_keys(by_key)
    by_name = tfrs_embed.PartialTPUEmbedding(
        tpu.FeatureConfig(tpu.TableConfig(5, 2, name="table")),
        "sgd",
        size_threshold=0,
    )
    by_name(tf.constant([1]))
    objects = {
        "tables": by_key,
        "user/tables": by_key,
        "item/tables": by_name,
        "user/table": by_name,
        "model": by_name,
    }
    for name, layer in objects.items():
        owner, _, attribute = name.rpartition("/")
        root = tf.train.Checkpoint(**{attribute: layer})
        if owner:
            root = tf.train.Checkpoint(**{owner: root})
        path = root.write(str(tmp_path / name.replace("/", "-")))
        contents = inspect_json(path, capsys)
        [table] = contents["tables"]
        assert table["layer"] == name
        assert table["name"] == ("" if layer is by_key else "table")
        assert table["keys"] == (layer is by_key and use_hashtable)
        if layer is by_key:
            assert table["rows"] == (2 if use_hashtable else 10)
        assert contents["steps"] == {name: 1 if layer is by_key else 0}
        assert contents["others"] == []


def test_the_input_of_fit_is_no_table(tmp_path, capsys):
    position = tfrs_embed.checkpoint.FitPosition()
    position._follow(iter(tf.data.Dataset.range(9)), resumes=False)
    a = tf.train.Checkpoint(position=position).save(f"{tmp_path}/a")
    names = [other["name"] for other in inspect_json(a, capsys)["others"]]
    assert "position/numbers" in names


def test_it_shows_a_checkpoint_without_tables(tmp_path, capsys):
    path = tf.train.Checkpoint(v=tf.Variable([1.0])).write(str(tmp_path / "c"))
    assert "no tables" in inspect(path, capsys)
    assert "no tables" in inspect(f"{path}.index", capsys)
    assert main(["convert", path, str(tmp_path / "d")]) == 2
    assert f"'{path}' has no tables of this" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["file://{}", "ram:/{}"])
def test_other_file_systems_are_read_and_written(
    scheme, tmp_path, values, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "c", values)
    there = scheme.format(tmp_path / "to" / "new")
    assert main(["convert", path, there]) == 0
    assert main(["convert", there, str(tmp_path / "back")]) == 0
    capsys.readouterr()
    files = sorted(os.listdir(tmp_path / "to") if "file" in scheme else [])
    found, expected = (
        inspect_json(p, capsys)["tables"] for p in (tmp_path / "back", path)
    )
    assert found == expected
    # Nothing temporary, nor a folder that is called as the scheme.
    names = os.listdir(tmp_path)
    assert not [n for n in names if n.startswith(".") or ":" in n]
    assert not [n for n in files if not n.startswith("new.")]
    if "file" in scheme:
        assert os.path.exists(tmp_path / "to" / "new.index")


@pytest.mark.parametrize(
    "to, message",
    [
        ("", "The destination is empty"),
        ("s9://bucket/new", "'s9://bucket/new': .* no file system 's9'"),
        ("ram://bucket", "'ram://bucket' is a folder: .*ram://bucket/ckpt'"),
        (".", "'.' is a folder: give the checkpoint a name in it"),
        ("new/", "'new/' is a folder: .* 'new/ckpt'"),
    ],
)
def test_a_wrong_destination_is_refused_before_anything_is_read(
    to, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # There is no such source, which would be the error else.
    assert main(["convert", "nothing", to]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert os.listdir(tmp_path) == []


def test_a_wrong_source_is_named(tmp_path, capsys):
    def error(path, status=2):
        assert main(["inspect", str(path)]) == status
        return capsys.readouterr().err

    assert "The source is empty" in error("")
    assert "no file system 's9'" in error("s9://bucket/c")
    tf.io.gfile.makedirs("ram://sok")
    with tf.io.gfile.GFile("ram://sok/v-key", "wb") as file:
        file.write(b"0")
    assert "'ram://sok': SOK's files are read" in error("ram://sok")
    (tmp_path / "c.index").write_bytes(b"")
    assert f"'{tmp_path}/c.index' is damaged" in error(tmp_path / "c", 1)
    for content in [b"", b"\xff"]:
        (tmp_path / "checkpoint").write_bytes(content)
        message = error(tmp_path, 1)
        assert f"'{tmp_path}/checkpoint' does not say" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a", "b", "--step", "-1"],
        ["convert", "a", "b", "--step", "four"],
        ["convert", "a", "b", "--step", str(2**63)],
    ],
)
def test_wrong_numbers_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    *_, option, value = arguments
    err = capsys.readouterr().err
    assert re.search(f"{option}: must be an integer .*, got '{value}'", err)


@pytest.mark.parametrize(
    "raised, code, message",
    [
        (KeyboardInterrupt(), 130, "error: interrupted."),
        (MemoryError("no room"), 1, "error: not enough memory: no room"),
    ],
)
def test_what_ends_it_early_is_said_in_a_line(
    raised, code, message, tmp_path, values, capsys, monkeypatch
):
    path = save(tmp_path / "c", values)

    def fail(*_):
        raise raised

    monkeypatch.setattr(bundle.BundleReader, "read_rows", fail)
    to = tmp_path / "out"
    assert main(["convert", path, str(to / "new")]) == code
    err = capsys.readouterr().err
    assert message.format(path=path) in err
    assert "Traceback" not in err
    assert os.listdir(to) == []


def test_a_terminal_sees_progress(tmp_path, values, capsys, monkeypatch):
    path = save(tmp_path / "c", values)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    inspect(path, capsys)
    assert not capsys.readouterr().err
    monkeypatch.setattr(progress, "_AFTER_S", 0)
    assert main(["inspect", path]) == 0
    err = capsys.readouterr().err
    assert "Reading 'c-1': |####      | 50% of" in err
    assert "Reading 'c-1': done, 9.4 KiB" in err
    assert err.endswith("\n")
    with progress.off():
        inspect(path, capsys)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["show"],
        ["inspect"],
        ["convert", "a"],
        ["convert", "a", "b", "--to", "sok"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: tfrs-embed" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_named(tmp_path, values, capsys):
    def error(path, *options):
        assert main(["inspect", str(path), *options]) == 2
        return capsys.readouterr().err

    assert f"There is no checkpoint '{tmp_path}/a'" in error(tmp_path / "a")
    save(tmp_path / "c", values)
    os.remove(tmp_path / "checkpoint")
    assert f"'{tmp_path}' doesn't say which" in error(tmp_path)


#: It colours, is a control of one byte, turns text around, and ends a line.
HIDDEN = "\x1b[31m\x9b2J\u202egnp\n\x00"
SHOWN = r"\x1b[31m\x9b2J\u202egnp"


def test_terminals_get_no_controls_of_names_in_files(tmp_path, capsys):
    def save(path, end, rows):
        with h5py.File(path, "w") as file:
            values = np.ones([rows, 2], "f4")
            file["embedding/vars/0"] = values
            name = f"Bücher 本 {HIDDEN[:-1]}{end}"
            file["embedding/vars"].attrs["name"] = name
            file[f"other{HIDDEN[:-1]}{end}"] = values
        return str(path)

    a = save(tmp_path / f"a{HIDDEN[:-1]}.weights.h5", "", 3)
    c = save(tmp_path / "c.weights.h5", "c", 4)
    progress.set_mode("log")
    try:
        for arguments, status in [
            (["inspect", a], 0),
            (["inspect", c], 0),
            (["convert", a, str(tmp_path / "new")], 0),
            (["convert", a, str(tmp_path / "x"), "--layer", "a=b"], 2),
            (["inspect", a + "x"], 2),
        ]:
            assert main(arguments) == status
            printed = capsys.readouterr()
            text = printed.out + printed.err
            assert SHOWN in text
            assert all(c.isprintable() or c == "\n" for c in text)
            assert status or "Bücher 本" in text
    finally:
        progress.set_mode("auto")


@pytest.mark.parametrize(
    "text", [f'model_checkpoint_path: "{HIDDEN[:-2]}"', f"{HIDDEN[:-2]}: 1"]
)
def test_tensorflows_log_has_no_controls_of_files(text, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").write_text(text)
    records, logger = [], tf.get_logger()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "handle", records.append)
    logger.addHandler(handler)
    try:
        for arguments in (["checkpoint", "inspect"], ["report"]):
            assert tfrs_embed_command.main([*arguments, str(tmp_path)]) > 0
    finally:
        logger.removeHandler(handler)
    assert records
    for record in records:
        shown = record.getMessage().replace("\n", "")
        assert shown.isprintable()
    assert any(r"\x1b[31m" in record.getMessage() for record in records)
    assert not logger.filters


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_damaged_files_are_named(
    command, large, how, tmp_path, values, capsys, monkeypatch
):
    # Saved in one piece, as TensorFlow does.
    objects = tf.Variable(values)
    for attribute in ("parameters", "t", "_variables"):
        objects = tf.train.Checkpoint(**{attribute: objects})
    path = objects.write(str(tmp_path / "c"))
    if large:
        monkeypatch.setattr(stored_pieces, "LARGE_BYTES", 100)
    name = "_variables/t/parameters/.ATTRIBUTES/VARIABLE_VALUE"
    [entry] = Index(path).pieces[name]
    if how == "changed":
        change_byte(entry.file, entry.offset + 99)
    elif how == "cut":
        os.truncate(entry.file, entry.offset + 99)
    else:
        os.remove(entry.file)
    to = tmp_path / "out"
    arguments = [command, path] + [str(to / "new")] * (command == "convert")
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "Traceback" not in err
    assert f"{path}.data-00000-of-00001" in err
    assert "{{" not in err and "[Op" not in err
    # Nothing is left half written.
    assert not to.exists() or not os.listdir(to)


def test_a_failed_write_leaves_nothing(tmp_path, values, capsys, monkeypatch):
    path = save(tmp_path / "c", values)
    read = bundle.BundleReader.read_rows
    calls = []

    def fail_later(self, name, start, size):
        calls.append(name)
        if len(calls) == 2:
            raise OSError("the disk is on fire")
        return read(self, name, start, size)

    monkeypatch.setattr(bundle.BundleReader, "read_rows", fail_later)
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 1000)
    to = tmp_path / "out"
    assert main(["convert", path, str(to / "new")]) == 1
    assert "error: the disk is on fire" in capsys.readouterr().err
    assert not os.listdir(to)


def test_tables_are_renamed_without_being_changed(tmp_path, values, capsys):
    path = save(tmp_path / "c", values)
    new = str(tmp_path / "new")
    arguments = ["--layer", "layer=model/emb", "--table", "large=huge"]
    assert main(["convert", path, new, *arguments]) == 0
    assert "step of 'model/emb': 1" in capsys.readouterr().out
    reader = tf.train.load_checkpoint(new)
    found = reader.get_tensor(
        "model/emb/tables/huge/parameters/.ATTRIBUTES/VARIABLE_VALUE"
    )
    np.testing.assert_array_equal(found, values)
    assert main(["convert", path, new + "2", "--step", "3"]) == 2
    assert "has the layers' steps: {'layer': 1}" in capsys.readouterr().err
    assert main(["convert", path, new + "2", "--ids"]) == 2
    assert "no tables of keys" in capsys.readouterr().err


MEASURE = """
import resource, sys
import tensorflow as tf
import tfrs_embed_command

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = used()
def main(*arguments):
    return tfrs_embed_command.main(["checkpoint", *arguments])

assert main("inspect", sys.argv[1], "--json") == 0
inspecting = used()
assert main("convert", *sys.argv[1:]) == 0
print(inspecting - before, used() - before, file=sys.stderr)
"""


def test_it_needs_little_memory(tmp_path):
    """A checkpoint's largest tensor never is in memory."""
    rows = 4 << 20
    objects = tf.Variable(tf.ones([rows, 16]))
    for attribute in ("parameters", "t", "_variables"):
        objects = tf.train.Checkpoint(**{attribute: objects})
    objects.write(str(tmp_path / "c"))
    file = tmp_path / "c.data-00000-of-00001"
    assert os.path.getsize(file) >= 256 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "c", tmp_path / "d"],
        env={**os.environ, **environment("one")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    inspecting, converting = map(int, done.stderr.splitlines()[-1].split())
    assert inspecting < 150
    # What TensorFlow is handed at a time, too.
    assert converting < 150 + 64
    found, _ = json.JSONDecoder().raw_decode(done.stdout)
    norm = found["tables"][0]["columns"]["parameters"]["norm"]
    assert norm == pytest.approx((16 * rows) ** 0.5)
