"""Chains of deltas in `tfrs-embed checkpoint`: inspect, convert, compact."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from delta_checkpoints import Job, restored
from tfrs_embed.checkpoint import DeltaManager, bundle, chain
from training_helpers import assert_same, change_byte, files_in, save_tensors
from training_helpers import checkpoint_command as main

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module", params=["one", "keys"])
def chains(request, tmp_path_factory):
    """A folder with two chains of three, the placement, and the last state.

    A thread has written the first file of the second chain.
    """
    folder = tmp_path_factory.mktemp("chains")
    job = Job(tf.distribute.get_strategy(), request.param)
    manager = DeltaManager(job.checkpoint, folder, full_every=3)
    for _ in range(5):
        job.train(2)
        manager.save()
        manager.wait()
    return folder, request.param, job.state()


def inspect(path, capsys):
    assert main(["inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def run(*arguments):
    return main([str(argument) for argument in arguments])


def values(tables):
    """What inspect tells of tables, without digits that sums may differ in."""
    return [
        {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in column.items()
        }
        for table in tables
        for column in [*table["columns"].values(), *table["parts"].values()]
    ]


def test_inspect_shows_chains_and_what_they_stand_for(chains, capsys, tmp_path):
    folder, placement, _ = chains
    of_folder = inspect(folder, capsys)
    first, second = of_folder["chains"]
    assert [os.path.basename(f["path"]) for f in first + second] == [
        *("ckpt-1", "ckpt-2", "ckpt-3"),
        *("ckpt-3-base", "ckpt-4", "ckpt-5"),
    ]
    assert [f["kind"] for f in first] == ["full", "delta", "delta"]
    assert [f["kind"] for f in second] == ["tables", "delta", "delta"]
    assert [f["number"] for f in second] == [0, 1, 2]
    for file in first + second:
        assert file["bytes"] == sum(
            each.stat().st_size
            for each in folder.glob(f"{os.path.basename(file['path'])}.*")
        )
        delta = file["kind"] == "delta"
        reader = tf.train.load_checkpoint(file["path"])
        shapes = reader.get_variable_to_shape_map()
        end = "/.ATTRIBUTES/VARIABLE_VALUE"
        part = "keys" if placement == "keys" else "rows"
        assert file["rows"] == {
            name.removesuffix(f"/delta/{part}{end}"): shape[0]
            for name, shape in shapes.items()
            if name.endswith(f"/delta/{part}{end}")
        }
        assert bool(file["rows"]) == delta
        assert bool(file["removed"]) == (delta and placement == "keys")
    # Of one delta: its own chain, and the same tables.
    of_delta = inspect(folder / "ckpt-5", capsys)
    assert of_delta["chains"] == [second]
    assert of_delta["tables"] == of_folder["tables"]
    assert not any("delta" in other["name"] for other in of_delta["others"])
    assert inspect(folder / "ckpt-1", capsys)["chains"] == []
    [note] = inspect(folder / "ckpt-3-base", capsys)["notes"]
    assert "a thread has written it" in note
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "ckpt-3-base" in text and "layer/tables/adam_float32" in text


def test_compact_writes_the_full_checkpoint(
    chains, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 64)
    monkeypatch.setattr(bundle, "PART_BYTES", 512)
    folder, placement, state = chains
    one = tf.distribute.get_strategy()
    for source, out in ((folder / "ckpt-5", "a"), (folder, "new/b")):
        path = tmp_path / out
        path.parent.mkdir(exist_ok=True)
        assert run("compact", source, path) == 0
        assert f"written to '{path}'" in capsys.readouterr().out
        assert {p.name for p in path.parent.iterdir()} - {"new"} == {
            p.name for p in path.parent.glob(f"{path.name}.*")
        }
        assert_same(restored(one, placement, path).state(), state)
    merged, delta = (inspect(p, capsys) for p in (path, folder / "ckpt-5"))
    assert values(merged["tables"]) == values(delta["tables"])
    assert merged["others"] == delta["others"]
    assert merged["chains"] == []
    # All but the deltas, as TensorFlow reads a full checkpoint.
    reader = tf.train.load_checkpoint(str(path))
    names = reader.get_variable_to_shape_map()
    assert not any("/delta/" in name for name in names)
    whole = chain.read(str(folder / "ckpt-5"))
    assert names == whole.shapes
    for name in names.keys() - {chain.HEADER}:
        np.testing.assert_array_equal(
            bundle.BundleReader(str(path)).read(name), whole.read(name)
        )


def test_a_manager_continues_a_compacted_checkpoint(chains, tmp_path):
    folder, placement, _ = chains
    one = tf.distribute.get_strategy()
    assert run("compact", folder, tmp_path / "ckpt-5") == 0
    tf.compat.v1.train.update_checkpoint_state(
        str(tmp_path), str(tmp_path / "ckpt-5"), [str(tmp_path / "ckpt-5")]
    )
    job = Job(one, placement)
    manager = DeltaManager(job.checkpoint, tmp_path)
    manager.restore_or_initialize()
    job.train(2)
    path = manager.save()
    assert len(chain.files_of(path)) == 2
    assert_same(restored(one, placement, path).state(), job.state())


def test_convert_reads_a_delta_as_a_full_checkpoint(chains, capsys, tmp_path):
    folder, placement, state = chains
    assert run("convert", folder / "ckpt-5", tmp_path / "new") == 0
    job = Job(tf.distribute.get_strategy(), placement)
    job.layer.build(None)
    tf.train.Checkpoint(layer=job.layer).restore(
        str(tmp_path / "new")
    ).expect_partial()
    found = job.state()
    for name in state.keys() - {"iterations"}:
        np.testing.assert_array_equal(found[name], state[name], err_msg=name)


def test_what_compact_refuses(chains, capsys, tmp_path):
    folder = chains[0]

    def error(*arguments, status):
        assert run("compact", *arguments) == status
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "ckpt-1' is no delta" in error(folder / "ckpt-1", out, status=2)
    assert "is no checkpoint" in error(folder / "none", out, status=2)
    text = error(folder / "ckpt-2", folder / "ckpt-1", status=2)
    assert "There is a checkpoint" in text
    assert "is a folder" in error(folder / "ckpt-2", tmp_path, status=2)
    shutil.copytree(folder, tmp_path / "broken")
    [file] = (tmp_path / "broken").glob("ckpt-3-base.data-*")
    change_byte(file, file.stat().st_size // 2)
    assert "ckpt-3-base" in error(tmp_path / "broken", out, status=1)
    file.unlink()
    assert "ckpt-3-base" in error(tmp_path / "broken", out, status=1)
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def header(chain="1", number="1", id="2", since="1", previous="ckpt-0"):
    return [chain, number, id, since, previous]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (header(previous="a" * 5000), "its header has more than 4096 bytes"),
        (header(number="x"), "its header has the numbers ['1', 'x',"),
        (header(number=b"\xff"), "its header has the numbers"),
        (header(number="-1"), "its header has the numbers"),
        (header(id=str(1 << 63)), "its header has the numbers"),
        (header(number="0"), "number 0 continues 'ckpt-0'"),
        (header(previous=""), "number 1 continues ''"),
        (header(previous=".."), "continues '..'"),
        (header(previous="/a/b"), "continues '/a/b'"),
        (header(previous="a\0b"), r"continues 'a\x00b'"),
        (header(id="1", previous="ckpt-1"), "is number 1"),
        (header(chain="3", id="1", previous="ckpt-1"), "is number 1"),
        (header(previous="ckpt-1"), "has been replaced"),
        (header(), "ckpt-0', which is missing"),
        (3, "is no vector of five strings"),
        ("{}", "is no vector of five strings"),
        (header()[:4], "is no vector of five strings"),
    ],
)
def test_a_header_that_is_no_header_is_one_line_of_an_error(
    header, said, tmp_path, capsys
):
    path = save_tensors(tmp_path / "ckpt-1", {chain.HEADER: header})
    before = files_in(tmp_path)
    for command in (["inspect", path], ["compact", path, tmp_path / "out"]):
        assert run(*command) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line, line
        assert "ckpt-1" in line
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("listed", ["../other/ckpt-5", "{}/other/ckpt-5"])
def test_a_folder_lists_no_checkpoints_of_others(
    chains, listed, tmp_path, capsys
):
    shutil.copytree(chains[0], tmp_path / "other")
    (tmp_path / "given").mkdir()
    path = json.dumps(listed.format(tmp_path))
    state = tmp_path / "given" / "checkpoint"
    state.write_text(f"model_checkpoint_path: {path}\n")
    before = files_in(tmp_path)
    for command, *more in (
        ["inspect"],
        ["convert", tmp_path / "out"],
        ["compact", tmp_path / "out"],
    ):
        assert run(command, tmp_path / "given", *more) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert f"'{state}' names the checkpoint" in line
        assert "other/ckpt-5', which is in another folder" in line
    assert files_in(tmp_path) == before


def test_what_a_killed_compact_left_is_removed_without_following_links(
    chains, tmp_path
):
    left, victim = tmp_path / "out_temp", tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    for link in (left / "link", left):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(victim)
        assert run("compact", chains[0], tmp_path / "out") == 0
        assert not os.path.lexists(left)
        assert (victim / "file").read_text() == "mine"
        for file in tmp_path.glob("out.*"):
            file.unlink()
