"""Tables in files: what the conformance suite doesn't show."""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import on
from tfrs_embed import FeatureConfig, FileStorage, TableConfig, kernels
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.placement import assign
from tfrs_embed.storage.mapped_files import TableFiles, pages_in_memory
from training_helpers import files_in

pytestmark = [pytest.mark.usefixtures("needs_kernels")]

ROWS, DIM = 3000, 8


def make_layer(storage, name="t", rows=ROWS, **options):
    """A layer of one table, which starts with the same rows each time."""
    table = TableConfig(
        name,
        rows,
        DIM,
        keras.initializers.RandomNormal(seed=1),
        storage=storage,
        **options,
    )
    optimizer = tfrs_embed.optimizers.rules.Adagrad.tpu(0.1)
    return layers.PartialTPUEmbedding(
        FeatureConfig("f", table), optimizer, size_threshold=0
    )


def train(layer, steps=3, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = tf.constant(rng.integers(0, ROWS, 64))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        tape.gradient(loss, layer.trainable_variables)


def values(layer):
    state = layer.tables["t"]
    return {n: v.numpy() for n, v in state.variables.items()}


def assert_equal(layer, other):
    here, there = values(layer), values(other)
    assert here.keys() == there.keys()
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name], name)


def folder_of(tmp_path, table="t"):
    return tmp_path / table / "worker-0-device-0"


def mapped(folder):
    """The sizes of this process's mappings of files in a folder."""
    with open("/proc/self/maps") as file:
        lines = [line for line in file if str(folder) in line]
    assert all(line.split()[1] == "rw-s" for line in lines)  # Shared.
    return len(lines)


def test_the_files_are_the_tables(tmp_path):
    layer, other = make_layer(FileStorage(tmp_path)), make_layer(None)
    train(layer), train(other)
    assert_equal(layer, other)
    for name, value in values(layer).items():
        found = np.fromfile(folder_of(tmp_path) / name, np.float32)
        np.testing.assert_array_equal(found.reshape(value.shape), value)


def test_all_that_writes_a_table_writes_its_file(tmp_path):
    """No way to set rows takes the table to memory."""
    layer, other = make_layer(FileStorage(tmp_path)), make_layer(None)
    train(layer), train(other)
    checkpoint = tf.train.Checkpoint(layer=other).write(f"{tmp_path}/saved")
    rows = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    for each in (layer, other):
        each.load_tables({"t": rows})
    assert_equal(layer, other)
    for each in (layer, other):
        each.tables["t"].table.assign(2 * rows)
        train(each, seed=1)
        each.tables["t"].table.assign_add(rows)
        each.tables["t"].table.assign_sub(rows / 2)
        each.tables["t"].table.scatter_add(
            tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([5]))
        )
        train(each, seed=2)
    assert_equal(layer, other)
    tf.train.Checkpoint(layer=layer).read(checkpoint).assert_consumed()
    tf.train.Checkpoint(layer=other).read(checkpoint)
    train(layer), train(other)
    assert_equal(layer, other)
    assert mapped(tmp_path) == 2
    found = np.fromfile(folder_of(tmp_path) / "parameters", np.float32)
    np.testing.assert_array_equal(
        found.reshape(ROWS, DIM), values(layer)["parameters"]
    )


def test_a_table_is_assigned_values_of_its_shape_alone(tmp_path):
    layer = make_layer(FileStorage(tmp_path))
    train(layer, 1)
    before = values(layer)
    with pytest.raises(ValueError, match="incompatible"):
        layer.tables["t"].table.assign(tf.zeros([ROWS + 1, DIM]))
    np.testing.assert_array_equal(
        values(layer)["parameters"], before["parameters"]
    )


KILLED = """
import sys, os, pathlib
sys.path.insert(0, sys.argv[1])
import test_file_storage as test
import tensorflow as tf
layer = test.make_layer(test.FileStorage(sys.argv[2]))
test.train(layer)
tf.train.Checkpoint(layer=layer).write(sys.argv[3])
test.train(layer, 2, seed=9)
print("trained", flush=True)
if sys.argv[4] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[4] == "cut":
    file = test.folder_of(pathlib.Path(sys.argv[2])) / "parameters"
    os.truncate(file, 4096)
    test.train(layer)
sys.stdin.read()
"""


def start(tmp_path, how):
    tests = os.path.dirname(__file__)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLED,
            tests,
            tmp_path / "files",
            tmp_path / "saved",
            how,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "trained\n"
    return process


@pytest.mark.more
def test_a_killed_process_is_restored_from_its_checkpoint(tmp_path, caplog):
    start(tmp_path, "kill").wait()
    layer, other = make_layer(FileStorage(tmp_path / "files")), make_layer(None)
    layer.build(None), train(other)
    assert "rows that an earlier process left" in caplog.text
    tf.train.Checkpoint(layer=layer).read(f"{tmp_path}/saved").assert_consumed()
    assert_equal(layer, other)


@pytest.mark.more
def test_a_file_that_is_cut_short_ends_the_process(tmp_path):
    """Missing rows are no zeros."""
    assert start(tmp_path, "cut").wait() == -signal.SIGBUS


@pytest.mark.more
def test_two_processes_dont_share_files(tmp_path):
    process = start(tmp_path, "wait")
    try:
        with pytest.raises(
            RuntimeError, match=r"Table 't': .*in use by another"
        ):
            make_layer(FileStorage(tmp_path / "files")).build(None)
    finally:
        process.communicate()


def test_two_layers_dont_share_files(tmp_path):
    layer = make_layer(FileStorage(tmp_path))
    layer.build(None)
    with pytest.raises(RuntimeError, match="in use by another"):
        make_layer(FileStorage(tmp_path)).build(None)
    other = make_layer(FileStorage(tmp_path), "two words/é")
    other.build(None)
    del layer
    gc.collect()
    make_layer(FileStorage(tmp_path)).build(None)


def test_a_variable_outlives_its_layer(tmp_path):
    """Another layer's files are new ones: cutting these off would kill it."""
    layer = make_layer(FileStorage(tmp_path))
    train(layer)
    expected, handle = (
        values(layer)["parameters"],
        layer.tables["t"].table.handle,
    )
    del layer
    gc.collect()
    make_layer(FileStorage(tmp_path), rows=2 * ROWS).build(None)
    found = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    np.testing.assert_array_equal(found, expected)


def test_files_of_another_table_are_an_error(tmp_path):
    make_layer(FileStorage(tmp_path)).build(None)
    gc.collect()
    with pytest.raises(
        ValueError, match=r"another table: .*'float32'.*bfloat16"
    ):
        make_layer(FileStorage(tmp_path), dtype="bfloat16").build(None)
    found = np.fromfile(folder_of(tmp_path) / "parameters", np.float32)
    assert found.size == ROWS * DIM
    other = folder_of(tmp_path, "u")
    other.mkdir(parents=True)
    (other / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"other files: \['mine.txt'\]"):
        make_layer(FileStorage(tmp_path), "u").build(None)


def test_a_disk_without_room_is_an_error(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(
            OSError,
            match=r"Table 't': '.*parameters' can't be made, .* 93.8 KiB",
        ):
            make_layer(FileStorage(tmp_path)).build(None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_layer(FileStorage(tmp_path / "file")).build(None)


def test_a_folder_that_cant_be_written_is_an_error():
    with pytest.raises(
        PermissionError, match=r"Table 't': '/sys/files/t/.*' can't have"
    ):
        make_layer(FileStorage("/sys/files")).build(None)


def test_a_file_that_cant_be_mapped_is_an_error(tmp_path):
    """Addresses lack here, as a network file system may lack mmap."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * 4096
    before = resource.getrlimit(resource.RLIMIT_AS)
    layer = make_layer(FileStorage(tmp_path), rows=2**26)  # 2 GiB.
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"'t': '.*' can't be mapped .*memory"
        ):
            layer.build(None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not (folder_of(tmp_path) / "parameters").exists()


def test_a_killed_process_may_leave_no_more_than_a_folder(tmp_path):
    folder_of(tmp_path).mkdir(parents=True)
    for name in ("lock", "table.json.new"):
        (folder_of(tmp_path) / name).touch()
    make_layer(FileStorage(tmp_path)).build(None)
    gc.collect()
    (folder_of(tmp_path) / "table.json").write_text("mine")
    with pytest.raises(ValueError, match="of another table: 'mine', not"):
        make_layer(FileStorage(tmp_path)).build(None)


@pytest.mark.parametrize("name", ["..", "."])
def test_a_tables_name_leads_to_no_other_folder(tmp_path, name):
    """Two layers' tables would have one file, and one of them be lost."""
    storage = FileStorage(tmp_path / "tables")
    layer, other = make_layer(storage, name), make_layer(storage, "t")
    layer.build(None), other.build(None)
    assert [p.name for p in tmp_path.iterdir()] == ["tables"]
    assert {p.name for p in (tmp_path / "tables").iterdir()} == {
        *("t", f"%2E{name[1:]}")
    }
    gc.collect()
    with pytest.raises(ValueError, match=r"has 300 bytes, and a file's name"):
        make_layer(storage, "a" * 300).build(None)


def table_files(folder, name="t"):
    table = TableConfig(name, ROWS, DIM, storage=FileStorage(folder))
    [spec] = parse(FeatureConfig("f", table)).tables
    return TableFiles(spec, None)


@pytest.mark.parametrize("name", ["lock", "table.json", "table.json.new"])
def test_a_slot_takes_no_name_of_the_folders_own_files(tmp_path, name):
    files = table_files(tmp_path)
    about = (folder_of(tmp_path) / "table.json").read_bytes()
    files.make(name, [ROWS, DIM], tf.float32, 0.5, "t/slot")
    assert (folder_of(tmp_path) / "table.json").read_bytes() == about
    assert (folder_of(tmp_path) / "lock").read_bytes() == b""
    [own] = folder_of(tmp_path).glob("%*")
    assert own.name == f"%{ord(name[0]):02X}{name[1:]}"
    assert set(np.fromfile(own, np.float32)) == {0.5}


@pytest.fixture
def victim(tmp_path):
    """A folder of the user's, which nothing may change."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("precious")
    yield folder
    assert files_in(folder) == {"file": b"precious"}


@pytest.mark.parametrize("name", ["table.json.new", "parameters", "lock"])
@pytest.mark.parametrize("to", ["file", "none"])
def test_a_link_at_a_files_name_is_not_followed(tmp_path, victim, name, to):
    storage = FileStorage(tmp_path / "tables")
    folder = folder_of(tmp_path / "tables")
    if name == "parameters":  # Of a table that is there.
        make_layer(storage).build(None)
        gc.collect()
        (folder / name).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(victim / to)
    layer, other = make_layer(storage), make_layer(None)
    if name == "lock":
        with pytest.raises(OSError, match=r"'t': .*lock' is a symbolic link"):
            layer.build(None)
        return
    train(layer), train(other)
    assert_equal(layer, other)
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_link_that_comes_while_files_are_made_is_not_followed(
    tmp_path, victim, monkeypatch
):
    files, remove = table_files(tmp_path / "tables"), os.remove

    def plant(path):
        with contextlib.suppress(FileNotFoundError):
            remove(path)
        os.symlink(victim / "file", path)

    monkeypatch.setattr(os, "remove", plant)
    with pytest.raises(FileExistsError, match="parameters"):
        files.make("parameters", [ROWS, DIM], tf.float32, 0.0, "t/parameters")


def test_a_description_that_is_a_link_is_not_read(tmp_path, victim):
    folder = folder_of(tmp_path / "tables")
    folder.mkdir(parents=True)
    (folder / "table.json").symlink_to(victim / "file")
    with pytest.raises(OSError, match=r"'t': .*json' is a symbolic") as error:
        make_layer(FileStorage(tmp_path / "tables")).build(None)
    assert "precious" not in str(error.value)


def test_folders_below_the_users_are_no_links(tmp_path, victim):
    table = folder_of(tmp_path / "tables").parent
    for link in (table, table / "worker-0-device-0"):
        link.parent.mkdir(exist_ok=True, parents=True)
        link.symlink_to(victim)
        with pytest.raises(OSError, match=rf"'t': .*'{link}' is a symbolic"):
            make_layer(FileStorage(tmp_path / "tables")).build(None)
        link.unlink()
    # The user's own folder may be one.
    (tmp_path / "link").symlink_to(tmp_path / "tables")
    make_layer(FileStorage(tmp_path / "link")).build(None)
    assert (folder_of(tmp_path / "tables") / "parameters").exists()


def test_folders_below_the_users_are_of_no_other_user(tmp_path, monkeypatch):
    folder_of(tmp_path).mkdir(parents=True)
    lstat = os.lstat

    def of_another(path):
        found = lstat(path)
        return os.stat_result([*found[:4], 54321, *found[5:]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", of_another)
        with pytest.raises(PermissionError, match=r"'t': .* another user, 543"):
            make_layer(FileStorage(tmp_path)).build(None)
    assert files_in(tmp_path) == {}
    make_layer(FileStorage(tmp_path)).build(None)


def test_without_kernels_it_is_an_error(tmp_path):
    with (
        kernels.disabled(),
        pytest.raises(
            RuntimeError, match="Table 't' has a FileStorage, which needs a CPU"
        ),
    ):
        make_layer(FileStorage(tmp_path)).build(None)


def test_a_config_has_it(tmp_path):
    layer = make_layer(FileStorage(tmp_path / "x"), placement="row")
    assert layer.placement.tables[0].engine == "one device"
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config)
    [table] = again._spec.tables
    assert table.storage == FileStorage(str(tmp_path / "x"))
    for wrong, error in (("x", TypeError), (None, TypeError), ("", TypeError)):
        with pytest.raises(error):
            make_layer(wrong if wrong else FileStorage(wrong))
    with pytest.raises(ValueError, match="with keys"):
        make_layer(FileStorage("x"), keys=tfrs_embed.DynamicKeys())


def test_statistics_tell_what_is_in_memory(tmp_path):
    layer, other = make_layer(FileStorage(tmp_path)), make_layer(None)
    layer.build(None), other.build(None)
    files = layer.statistics()["t"].files
    most = 2 * ROWS * DIM * 4 + 8192
    assert 0 < files.dirty_bytes <= files.resident_bytes <= most
    assert layer.statistics()["t"].bytes == 2 * ROWS * DIM * 4
    assert other.statistics()["t"].files is None


def drop_pages(folder):
    """Takes a table's pages out of memory, as if it were short."""
    with open("/proc/self/maps") as maps:
        mappings = [line.split() for line in maps if str(folder) in line]
    for addresses, *_, path in mappings:
        begin, end = (int(address, 16) for address in addresses.split("-"))
        size = end - begin
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), 4)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@on("mirrored:2")
def test_statistics_tell_which_pages_are_in_memory(tmp_path, strategy):
    with strategy.scope():
        layer = make_layer(FileStorage(tmp_path))
    layer.build(None)
    # A page of parameters or slots has 128 rows of a device.
    per_page = 128 * strategy.num_replicas_in_sync
    ids = np.array([0, per_page, ROWS - 1])
    batches = [tf.constant(ids[[0, 0, 1]]), tf.constant(ids[[0, 2]])]
    state = layer.tables["t"]
    assert pages_in_memory(state, ids) == (6, 6)
    assert pages_in_memory(state, ids[:0]) == (0, 0)
    lookups = layer.statistics(batches=batches)["t"].lookups
    assert lookups.in_memory_share == 1
    drop_pages(tmp_path)
    pages, here = pages_in_memory(state, ids)
    if here:
        pytest.skip("The file system keeps pages in memory.")
    assert pages == 6
    layer(tf.constant(ids[:1]))  # Without slots.
    assert pages_in_memory(state, ids) == (6, 1)
    lookups = layer.statistics(batches=batches)["t"].lookups
    assert lookups.in_memory_share == 2 / 8
    assert pages_in_memory(state, ids)[1] > 1  # Statistics read rows.
    plain = make_layer(None).statistics(batches=batches)["t"].lookups
    assert plain.in_memory_share is None


@on("mirrored:2")
def test_statistics_tell_what_disks_do(tmp_path, strategy):
    with strategy.scope():
        layer = make_layer(FileStorage(tmp_path))
    layer.build(None)
    monitor = tfrs_embed.monitoring.TableMonitor(layer)
    assert monitor.measure(step=5).disk.steps == 5
    drop_pages(tmp_path)
    _, here = pages_in_memory(layer.tables["t"], np.arange(ROWS))
    if here:
        pytest.skip("The file system keeps pages in memory.")
    monitor.measure(step=6)  # Its own reading is not counted.
    report = monitor.measure(step=6)
    assert (report.disk.steps, report.disk.read_bytes) == (0, 0)
    drop_pages(tmp_path)
    layer(tf.constant([0, ROWS - 1]))
    report = monitor.measure(step=8)
    assert report.disk.steps == 2
    assert report.disk.read_bytes >= 2 * 4096
    assert report.disk.page_faults >= 2
    assert "This process, a step: " in str(report)
    assert report.to_dict()["disk"] == dataclasses.asdict(report.disk)
    assert make_layer(None).statistics().disk is None
    keys = tfrs_embed.DynamicKeys(spill=FileStorage(tmp_path / "spill"))
    layer = make_layer(None, keys=keys)
    train(layer)
    assert layer.statistics().disk is not None


def test_small_tables_are_in_files_too(tmp_path):
    table = TableConfig("small", 5, 2, storage=FileStorage(tmp_path))
    spec = parse(FeatureConfig("f", table))
    [assigned] = assign(spec, 1000, tf.distribute.get_strategy()).values()
    assert assigned.sharding.value == "one device"
    assert assigned.reason == "it has a FileStorage, one replica"


@pytest.mark.more
@on("mirrored:2", tier="more")
def test_prefetch(tmp_path, strategy):
    """Batches stay the same, and so do the tables."""
    with strategy.scope():
        layer = make_layer(FileStorage(tmp_path))
        other = make_layer(None)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, [4, 6]).astype(np.int32)
    labels = np.arange(24.0).reshape(4, 6)
    ragged = tf.RaggedTensor.from_row_lengths(ids.ravel(), [0, 9, 5, 10])
    plain = tf.data.Dataset.from_tensor_slices((ids, labels))
    bags = tf.data.Dataset.from_tensors(({"ids": ragged}, labels))
    found = [*layer.prefetch(plain)]
    assert len(found) == 4
    for (here, label), row, expected in zip(found, ids, labels, strict=True):
        np.testing.assert_array_equal(here, row)
        np.testing.assert_array_equal(label, expected)
    [(here, _)] = layer.prefetch(bags, lambda x, _: x["ids"], 1)
    assert here["ids"].to_list() == ragged.to_list()
    [alone] = layer.prefetch(tf.data.Dataset.from_tensors(ids[0]))
    np.testing.assert_array_equal(alone, ids[0])
    with pytest.raises(ValueError, match="no table with a FileStorage"):
        other.prefetch(plain)
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 3000 is out"):
        list(layer.prefetch(tf.data.Dataset.from_tensors([3000])))
