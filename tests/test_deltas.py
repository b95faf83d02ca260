"""Which rows change; full checkpoints with deltas between, on one device."""

import dataclasses
import gc
import json
import os
import re
import resource
import shutil
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from delta_checkpoints import Job, check_chain, restored
from keras_under_test import layers
from process_tiers import nightly, on
from tfrs_embed import serving
from tfrs_embed.checkpoint import DeltaManager, bundle, chain
from training_helpers import (
    assert_same,
    change_byte,
    files_in,
    save_tensors,
    train,
)

pytestmark = on("keras:3", tier="nightly")


@pytest.fixture(params=[False, True], ids=["at once", "in threads"])
def background(request, monkeypatch):
    """Whether threads write full checkpoints, in blocks of some rows."""
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 64)
    return request.param


@nightly(
    lambda placement, background, both_implementations: (
        background
        == ((placement == "one") == (both_implementations == "kernels"))
    )
)
@pytest.mark.parametrize("placement", ["one", "keys"])
def test_a_delta_restores_what_a_full_checkpoint_would(
    placement, tmp_path, background, both_implementations
):
    one = tf.distribute.get_strategy()
    check_chain(one, placement, tmp_path, [], background)


def make(rows=50, track=True, **options):
    """A layer with one table; tracked, it is built."""
    table = tfrs_embed.TableConfig("movie", rows, 4, **options)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table), "adagrad", size_threshold=20
    )
    if track:
        layer.tables["movie"].track_changes()
        layer.build(None)
    return layer, layer.tables["movie"]


def evicting():
    return tfrs_embed.DynamicKeys(eviction="lru", when_full="evict")


def update(layer, ids):
    train(layer, tf.constant([*ids], tf.int64), tf.ones([len(ids), 4]))


def test_changed_rows_are_those_of_updates(both_implementations):
    layer, table = make()
    update(layer, [1, 2, 1])
    first = table.moment()
    update(layer, [7, 3, 7])
    second = table.moment()
    update(layer, [3])
    layer(tf.constant([9]))  # A lookup changes nothing.
    assert table.changed(0).rows.tolist() == [1, 2, 3, 7]
    assert table.changed(first).rows.tolist() == [3, 7]
    assert table.changed(second).rows.tolist() == [3]
    assert table.changed(table.moment()).rows.tolist() == []


def test_what_users_assign_has_changed():
    layer, table = make()
    before = table.moment()
    variable = layer.embedding_tables["movie"]
    variable.scatter_update(tf.IndexedSlices(tf.ones([2, 4]), [4, 8]))
    table.slots["accumulators"].scatter_add(
        tf.IndexedSlices(tf.ones([1, 4]), [5])
    )
    assert table.changed(before).rows.tolist() == [4, 5, 8]
    before = table.moment()
    variable.assign(tf.zeros([50, 4]))
    assert table.changed(before).rows.tolist() == [*range(50)]


def test_keys_that_come_and_go_have_changed(both_implementations):
    layer, table = make(24, keys=evicting())
    update(layer, range(24))
    before = table.moment()
    update(layer, [100, 12])  # In the place of the key used longest ago.
    changed = table.changed(before)
    assert sorted(changed.rows) == [12, 100]
    [gone] = changed.removed
    table.remove(tf.constant([13], tf.int64))
    update(layer, [gone])  # It is back.
    changed = table.changed(before)
    assert sorted(changed.rows) == [*sorted([gone, 12]), 100]
    assert changed.removed.tolist() == [13]
    after = table.moment()
    table.remove(tf.constant([100], tf.int64))
    update(layer, [13])
    changed = table.changed(after)
    assert changed.rows.tolist() == [13]
    assert changed.removed.tolist() == [100]


def test_scored_keys_have_changed(both_implementations):
    layer, table = make(24, keys=tfrs_embed.DynamicKeys(eviction="score"))
    update(layer, range(24))
    before = table.moment()
    table.score([7, 3], [1, 2])
    assert sorted(table.changed(before).rows) == [3, 7]


def test_more_removed_keys_than_are_noted(both_implementations):
    layer, table = make(24, keys=evicting())
    before = table.moment()
    for start in range(0, 240, 24):
        update(layer, range(start, start + 24))
    with pytest.raises(ValueError, match=r"'movie' .* lost sight of"):
        table.changed(before)
    after = table.moment()
    update(layer, [1])
    assert table.changed(after).rows.tolist() == [1]


@pytest.mark.more
def test_moments_beyond_the_marks_find_a_few_rows_more():
    layer, table = make(700)
    ended = []
    for row in range(600):
        update(layer, [row])
        ended.append(table.moment())
    for row in range(0, 600, 13):
        found = table.changed(ended[row]).rows
        # All that changed afterwards, and few that changed before.
        assert found.tolist() == [*range(600 - len(found), 600)]
        assert 599 - row <= len(found) <= 599 - row + (600 - row) // 8 + 4
    assert table.changed(ended[-2]).rows.tolist() == [599]


def test_a_restore_begins_anew(tmp_path):
    layer, table = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    before = table.moment()
    update(layer, [1])
    path = checkpoint.write(str(tmp_path / "saved"))
    checkpoint.restore(path)
    with pytest.raises(ValueError, match="'movie' was restored"):
        table.changed(before)
    assert table.changed(table.moment()).rows.tolist() == []


def test_changes_that_are_not_known():
    with pytest.raises(NotImplementedError, match="'movie' is held by a Keras"):
        make(rows=5, track=False)[1].track_changes()
    _, table = make()
    for since in (-1, 5):
        with pytest.raises(ValueError, match=f"below 1, got {since}"):
            table.changed(since)
    layer, table = make(track=False)
    with pytest.raises(RuntimeError, match="'movie' aren't tracked"):
        table.moment()
    tf.function(lambda: update(layer, [1]))()
    with pytest.raises(RuntimeError, match="a training step was traced before"):
        table.track_changes()


@pytest.fixture(scope="module")
def chain_of_four(tmp_path_factory):
    """A folder of a full checkpoint and three deltas, and the state of each."""
    folder = tmp_path_factory.mktemp("chain")
    job = Job(tf.distribute.get_strategy(), "one")
    manager = DeltaManager(job.checkpoint, folder)
    states = []
    for _ in range(4):
        job.train()
        manager.save()
        states.append(job.state())
    return folder, states


def _missing(folder):
    for file in folder.glob("ckpt-2.*"):
        file.unlink()


def _move(folder, name, to):
    for file in folder.glob(f"{name}.*"):
        file.rename(folder / file.name.replace(name, to))


def _reordered(folder):
    _move(folder, "ckpt-3", "third")
    _move(folder, "ckpt-2", "ckpt-3")
    _move(folder, "third", "ckpt-2")


def _foreign(folder):
    job = Job(tf.distribute.get_strategy(), "one")
    other = DeltaManager(job.checkpoint, folder / "other")
    for _ in range(2):
        job.train()
        other.save()
    _missing(folder)
    for file in (folder / "other").glob("ckpt-2.*"):
        shutil.copy(file, folder)


def _largest(folder):
    files = folder.glob("ckpt-3.data-*")
    return max(files, key=lambda file: file.stat().st_size)


def _cut_off(folder):
    file = _largest(folder)
    os.truncate(file, file.stat().st_size - 1)


def _damaged(folder):
    file = _largest(folder)
    change_byte(file, file.stat().st_size // 2)


def _rewrite(folder, name, **changes):
    """Replaces a delta by one of its header alone, changed, and of tensors."""
    tensors = changes.pop("tensors", {})
    reader = bundle.BundleReader(str(folder / name))
    link = dataclasses.replace(chain.link_of(reader), **changes)
    for file in folder.glob(f"{name}.*"):
        file.unlink()
    save_tensors(folder / name, {chain.HEADER: link.header(), **tensors})
    return link


def _of_itself(folder):
    _rewrite(folder, "ckpt-4", previous="ckpt-4", id=4, since=4)


def _in_a_circle(folder):
    last = _rewrite(folder, "ckpt-4", since=3)
    _rewrite(
        *(folder, "ckpt-3"),
        **{"id": 3, "number": 4, "previous": "ckpt-4"},
        since=last.id,
    )


def _outside(folder):
    _rewrite(folder, "ckpt-4", previous="../victim/a-base")


def _key(table, part):
    return f"layer/tables/{table}/{part}/.ATTRIBUTES/VARIABLE_VALUE"


def _with_fewer_rows(folder):
    rows = {
        _key("adam_float32", "delta/rows"): tf.range(9, dtype=tf.int64),
        _key("adam_float32", "delta/parameters"): tf.zeros([8, 4]),
    }
    _rewrite(folder, "ckpt-4", tensors=rows)


def _without_a_table(folder):
    rows = {_key("none", "delta/rows"): tf.range(9, dtype=tf.int64)}
    _rewrite(folder, "ckpt-4", tensors=rows)


def _listed_elsewhere(folder):
    file = folder / "checkpoint"
    there = json.dumps(str(folder.parent / "victim/ckpt-1"))
    file.write_text(f"{file.read_text()}all_model_checkpoint_paths: {there}\n")


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (_missing, r"ckpt-3' .* continues '.*ckpt-2', which is missing"),
        (_reordered, r"ckpt-4' .* another file than '.*ckpt-3'"),
        (_foreign, r"ckpt-3' .* another file than '.*ckpt-2'"),
        (_cut_off, r"ckpt-3.*is missing or cut off"),
        (_damaged, r"ckpt-3"),
        (_of_itself, r"ckpt-4' is number 3 .*ckpt-4', which is number 3"),
        (_in_a_circle, r"ckpt-4' is number 3 .*ckpt-3', which is number 4"),
        (_outside, r"ckpt-4' does not say .*continues '../victim/a-base'"),
        (_with_fewer_rows, r"ckpt-4' has no '.*/delta/parameters/.* of 9 rows"),
        (_without_a_table, r"ckpt-4' has changed rows of 'layer/tables/none'"),
        (_listed_elsewhere, r"checkpoint' names .*/victim/ckpt-1', .* another"),
    ],
)
def test_a_broken_chain_restores_nothing(
    chain_of_four, tmp_path, monkeypatch, harm, named
):
    folder, victim = tmp_path / "chain", tmp_path / "victim"
    shutil.copytree(chain_of_four[0], folder)
    shutil.copytree(chain_of_four[0], victim)
    harm(folder)
    monkeypatch.chdir(folder)
    job = Job(tf.distribute.get_strategy(), "one")
    manager = DeltaManager(job.checkpoint, ".", full_every=1, max_to_keep=1)
    job.build()
    before, files = job.state(), files_in(tmp_path)
    for action in (manager.restore_or_initialize, manager.save):
        with pytest.raises((tf.errors.OpError, RuntimeError)) as error:
            action()
        if action == manager.restore_or_initialize:
            assert isinstance(error.value, tf.errors.OpError)
            assert re.search(named, str(error.value))
    assert_same(job.state(), before)
    files["chain/.delta_manager.lock"] = b""
    assert files_in(tmp_path) == files


def test_training_goes_on_with_the_chain(chain_of_four, tmp_path):
    shutil.copytree(chain_of_four[0], tmp_path, dirs_exist_ok=True)
    one = tf.distribute.get_strategy()
    job = Job(one, "one")
    # Before the tables are built.
    manager = DeltaManager(job.checkpoint, tmp_path)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-4")
    job.train()
    path = manager.save()
    assert path == str(tmp_path / "ckpt-5")
    reader = tf.train.load_checkpoint(path)
    rows = [
        shape
        for name, shape in reader.get_variable_to_shape_map().items()
        if name.endswith("/delta/rows/.ATTRIBUTES/VARIABLE_VALUE")
    ]
    assert rows and max(rows) < [20]
    assert_same(restored(one, "one", path).state(), job.state())


def test_a_table_that_was_restored_from_elsewhere_is_saved_whole(
    chain_of_four, tmp_path
):
    folder, states = chain_of_four
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    one = tf.distribute.get_strategy()
    job = Job(one, "one")
    manager = DeltaManager(job.checkpoint, tmp_path)
    manager.restore_or_initialize()
    job.train()
    manager.save()
    job.checkpoint.restore(str(tmp_path / "ckpt-2"))
    assert_same(job.state(), states[1])
    path = manager.save()
    assert_same(restored(one, "one", path).state(), states[1])


def test_the_first_save_after_another_manager_is_full(tmp_path):
    layer, table = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    tf.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=2).save()
    manager = DeltaManager(checkpoint, tmp_path)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    update(layer, [3])
    expected = table.table.numpy()
    path = manager.save()
    assert len(chain.files_of(path)) == 1
    table.table.assign(tf.zeros([50, 4]))
    checkpoint.restore(path)
    np.testing.assert_array_equal(table.table.numpy(), expected)


def test_two_trainers_of_one_folder(tmp_path):
    checkpoint = tf.train.Checkpoint(layer=make()[0])
    first = DeltaManager(checkpoint, tmp_path)
    first.save()
    second = DeltaManager(checkpoint, tmp_path)
    for action in (second.save, second.restore_or_initialize):
        with pytest.raises(RuntimeError, match="Another DeltaManager saves to"):
            action()
    del first
    with pytest.raises(RuntimeError, match="restore_or_initialize was not"):
        second.save()
    second.restore_or_initialize()
    assert second.save() == str(tmp_path / "ckpt-2")


def test_a_full_disk_keeps_the_last_save(tmp_path):
    layer, _ = make()
    manager = DeltaManager(tf.train.Checkpoint(layer=layer), tmp_path)
    manager.save()
    update(layer, [3])
    before = {path.name for path in tmp_path.iterdir()}
    # No file may be longer, which fails as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(
            tf.errors.OpError, match=r"ckpt-2.* be wr"
        ) as caught:
            manager.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "__wrapped__" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    assert not [*tmp_path.glob("ckpt-2.*")]
    update(layer, [5])
    path = manager.save()
    key = "layer/tables/movie/delta/rows/.ATTRIBUTES/VARIABLE_VALUE"
    rows = tf.train.load_checkpoint(path).get_tensor(key)
    assert rows.tolist() == [3, 5]


def test_a_managers_settings_are_not_set_later(tmp_path):
    manager = DeltaManager(tf.train.Checkpoint(layer=make()), tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'max_to_keep'"):
        manager.max_to_keep = 5


def test_old_chains_are_removed(tmp_path):
    layer, _ = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    manager = DeltaManager(checkpoint, tmp_path, full_every=2, max_to_keep=1)
    for row in range(9):
        update(layer, [row])
        manager.save()
        manager.wait()
    saved = manager.checkpoints
    there = {f.name.partition(".")[0] for f in tmp_path.glob("ckpt-*.index")}
    # A chain is a thread's file and deltas; another may have begun.
    assert {os.path.basename(path) for path in saved} <= there
    assert len(saved) <= 2 and len(there) <= len(saved) + 2
    # What a trainer leaves that is killed.
    (tmp_path / "ckpt-7-base_temp").mkdir()
    del manager
    again = DeltaManager(checkpoint, tmp_path)
    assert again.restore_or_initialize() == saved[-1]
    assert not [*tmp_path.glob("ckpt-7-base_temp")]


@pytest.mark.parametrize("listed", ["header", "absolute", "relative"])
def test_no_file_tells_which_files_of_others_are_removed(tmp_path, listed):
    """An earlier chain is removed, whose files somebody else has made."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    layer, _ = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    tf.train.CheckpointManager(checkpoint, folder, 2).save(2)
    name = "model-base" if listed == "header" else "model"
    save_tensors(victim / name, {"mine": "precious"})
    link = chain.Link(0, 1, 1, 0, previous="../victim/model-base")
    save_tensors(folder / "ckpt-1", {chain.HEADER: link.header()})
    first = {
        "header": "ckpt-1",
        "absolute": str(victim / "model"),
        "relative": "../victim/model",
    }[listed]
    (folder / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-2"\n'
        f'all_model_checkpoint_paths: "{first}"\n'
        'all_model_checkpoint_paths: "ckpt-2"\n'
    )
    before = files_in(tmp_path)
    manager = DeltaManager(checkpoint, folder, full_every=1, max_to_keep=1)
    with pytest.raises(tf.errors.DataLossError, match=r"\.\./victim|another"):
        manager.restore_or_initialize()
    with pytest.raises((tf.errors.DataLossError, RuntimeError)):
        manager.save()
    before["run/.delta_manager.lock"] = b""
    assert files_in(tmp_path) == before


def test_old_chains_are_removed_without_what_only_begins_like_them(tmp_path):
    layer, _ = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    manager = DeltaManager(checkpoint, tmp_path, full_every=1, max_to_keep=1)
    manager.save()
    (tmp_path / "ckpt-1.notes").write_text("mine")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    # As in a folder that somebody else has packed.
    (tmp_path / "ckpt-9-base_temp").symlink_to(tmp_path / "victim")
    manager.save()
    del manager
    DeltaManager(checkpoint, tmp_path).restore_or_initialize()
    assert not [*tmp_path.glob("ckpt-1.index"), *tmp_path.glob("ckpt-9*")]
    assert (tmp_path / "ckpt-1.notes").read_text() == "mine"
    assert (tmp_path / "victim" / "file").read_text() == "mine"


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".delta_manager.lock").symlink_to(tmp_path / "new")
    manager = DeltaManager(
        tf.train.Checkpoint(layer=make()[0]), tmp_path / "run"
    )
    with pytest.raises(OSError, match=r"manager.lock' is a symbolic link"):
        manager.save()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("given", ["absolute", "relative", "a link"])
def test_a_folder_that_another_manager_lists_is_read(
    tmp_path, monkeypatch, given
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" if given == "absolute" else "run"
    layer, _ = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    saved = tf.train.CheckpointManager(checkpoint, folder, 2).save()
    if given == "a link":
        os.symlink("run", "link")
        folder, saved = "link", "link/ckpt-1"
    manager = DeltaManager(checkpoint, folder)
    assert manager.restore_or_initialize() == os.path.abspath(saved)
    monkeypatch.chdir("/")
    assert manager.save() == os.path.abspath(tmp_path / folder / "ckpt-2")


def test_weights_that_keras_saved_to_the_folder_are_kept(tmp_path):
    layer, _ = make()
    checkpoint = tf.train.Checkpoint(layer=layer)
    # As tf_keras's save_weights writes and lists them.
    checkpoint.write(str(tmp_path / "weights"))
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "weights"\n'
        'all_model_checkpoint_paths: "weights"\n'
    )
    manager = DeltaManager(checkpoint, tmp_path, full_every=1, max_to_keep=1)
    assert manager.restore_or_initialize() == str(tmp_path / "weights")
    saved = [manager.save() for _ in range(2)]
    assert saved == [str(tmp_path / f"ckpt-{i}") for i in (1, 2)]
    there = {path.name for path in tmp_path.glob("*.index")}
    assert there == {"weights.index", "ckpt-2.index"}


@pytest.mark.parametrize("character", "[*?\\")
def test_a_folder_that_tensorflow_takes_for_a_pattern(tmp_path, character):
    folder = str(tmp_path / f"run{character}lr=0.1]")
    made = make()[0]
    model = tf.Module()
    model.layer = made
    for write in (
        lambda: DeltaManager(tf.train.Checkpoint(layer=made), folder),
        lambda: serving.export(model, folder),
        lambda: serving.export_delta(model, folder, since=str(tmp_path)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"'{folder}' has one")):
            write()
    assert not [*tmp_path.iterdir()]


def test_a_manager_that_is_dropped_while_its_thread_writes(
    tmp_path, monkeypatch
):
    unraisable, goes_on = [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    merge = bundle.merge

    def wait_and_merge(parts, prefix):
        goes_on.wait(60)
        merge(parts, prefix)

    monkeypatch.setattr(bundle, "merge", wait_and_merge)
    layer, _ = make()
    manager = DeltaManager(
        tf.train.Checkpoint(layer=layer), tmp_path, full_every=2
    )
    for row in range(2):
        update(layer, [row])
        manager.save()
    thread = manager._next._thread
    del manager
    gc.collect()
    goes_on.set()
    thread.join(60)
    assert not thread.is_alive() and not unraisable
    assert (tmp_path / "ckpt-2-base.index").exists()


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("checkpoint", 3, TypeError),
        ("full_every", 0, ValueError),
        ("max_to_keep", 1.5, ValueError),
        ("background", "yes", TypeError),
        ("name", "a/b", ValueError),
    ],
)
def test_wrong_arguments(tmp_path, argument, value, error):
    arguments = {"checkpoint": tf.train.Checkpoint(), "directory": tmp_path}
    with pytest.raises(error, match=argument):
        DeltaManager(**{**arguments, argument: value})
