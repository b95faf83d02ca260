import os
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

import damaged_index
import tfrs_embed
from helpers import assert_same, change_byte, state
from processes import environment
from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, merge
from tfrs_embed.checkpoint.index import Index
from tfrs_embed.checkpoint.stored import masked_crc32c, read_rows, verify

VALUE = "v/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def large_from_1000_bytes(monkeypatch):
    monkeypatch.setattr(bundle, "LARGE_BYTES", 1000)


@pytest.fixture
def saved(tmp_path):
    values = np.random.default_rng(0).random((300, 5), np.float32)
    path = tf.train.Checkpoint(v=tf.Variable(values)).write(str(tmp_path / "c"))
    return path, values


def read_in_blocks(reader, name, rows, size):
    return np.concatenate(
        [
            reader.read_rows(name, start, min(size, rows - start))
            for start in range(0, rows, size)
        ]
    )


def test_an_entry_has_the_checksum_of_its_bytes(saved):
    path, values = saved
    [entry] = Index(path).pieces(VALUE)
    assert (entry.start, entry.shape, entry.dtype) == (0, (300, 5), tf.float32)
    assert entry.masked_crc == masked_crc32c(google_crc32c.value(values))


def test_rows_of_large_tensors_are_read_from_the_file(
    saved, large_from_1000_bytes
):
    path, values = saved
    reader = BundleReader(path)
    np.testing.assert_array_equal(
        read_in_blocks(reader, VALUE, 300, 70), values
    )
    # In any order.
    np.testing.assert_array_equal(reader.read_rows(VALUE, 7, 3), values[7:10])
    np.testing.assert_array_equal(reader.read_rows(VALUE, 0, 2), values[:2])


@pytest.mark.parametrize("step", [300, 7, 1])
@pytest.mark.parametrize("first", [300, 20_000, 3_000_000])
def test_slices_of_rows_are_found(tmp_path, step, first):
    # The numbers' length in the index depends on their size.
    values = np.random.default_rng(0).random((300, 5), np.float32)
    shape = [first + 300, 5]
    name = "a\0\xff/é"
    writer = BundleWriter(str(tmp_path / "part"))
    for start in [*range(0, 300, step)]:
        rows = tf.constant(values[start : start + step])
        writer.add_rows(name, shape, first + start, rows)
    merge(writer.finish(), str(tmp_path / "c"))
    pieces = BundleReader(str(tmp_path / "c")).pieces(name)
    np.testing.assert_array_equal(read_rows(pieces, first, 300), values)
    np.testing.assert_array_equal(read_rows(pieces, first + 6, 3), values[6:9])
    verify(pieces)


def test_a_table_of_large_slices_is_read_from_the_files(
    tmp_path, large_from_1000_bytes
):
    values = np.random.default_rng(0).random((300, 5), np.float32)
    writer = BundleWriter(str(tmp_path / "part"))
    for start in range(0, 300, 100):
        rows = tf.constant(values[start : start + 100])
        writer.add_rows(VALUE, [300, 5], start, rows)
        writer.flush()
    merge(writer.finish(), str(tmp_path / "c"))
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(
        read_in_blocks(reader, VALUE, 300, 70), values
    )
    file = tmp_path / "c.data-00002-of-00003"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(tf.errors.DataLossError, match="00002-of-00003' is cut"):
        read_in_blocks(reader, VALUE, 300, 70)


def test_slices_may_name_all_columns(tmp_path):
    # As the variables of TPUs do.
    values = np.random.default_rng(0).random((6, 4), np.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "c"),
        tensor_names=["v", "v"],
        shape_and_slices=["6 4 0,2:0,4", "6 4 2,4:0,4"],
        tensors=[values[:2], values[2:]],
    )
    pieces = BundleReader(str(tmp_path / "c")).pieces("v")
    np.testing.assert_array_equal(read_rows(pieces, 1, 4), values[1:5])


def test_a_tensor_cut_along_its_columns_is_refused(tmp_path):
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "c"),
        tensor_names=["v", "v"],
        shape_and_slices=["3 4 -:0,2", "3 4 -:2,2"],
        tensors=[tf.zeros([3, 2]), tf.ones([3, 2])],
    )
    reader = BundleReader(str(tmp_path / "c"))
    with pytest.raises(ValueError, match="'v' was saved in slices of its col"):
        reader.pieces("v")


def data_file(path):
    return f"{path}.data-00000-of-00001"


def test_a_changed_byte_is_found(saved, large_from_1000_bytes):
    path, _ = saved
    [entry] = Index(path).pieces(VALUE)
    change_byte(entry.file, entry.offset + 5000)
    with pytest.raises(
        tf.errors.DataLossError, match=r"00000-of-00001' is dam"
    ):
        read_in_blocks(BundleReader(path), VALUE, 300, 70)
    with pytest.raises(tf.errors.DataLossError, match=f"checksum of '{VALUE}'"):
        verify(BundleReader(path).pieces(VALUE))


def test_a_file_that_is_cut_off_is_named(saved, large_from_1000_bytes):
    path, _ = saved
    reader = BundleReader(path)
    with open(data_file(path), "r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        tf.errors.DataLossError, match=r"00000-of-00001' is cut"
    ):
        read_in_blocks(reader, VALUE, 300, 70)


def test_a_damaged_index_is_named(saved):
    path, _ = saved
    with open(f"{path}.index", "rb") as file:
        whole = file.read()
    for damaged, why in [
        (whole[:-10], "not end as an index"),
        (b"", "not end as an index"),
        (bytes([whole[0] ^ 1]) + whole[1:], "a checksum is wrong"),
        (whole[30:], "is damaged"),
    ]:
        with open(f"{path}.index", "wb") as file:
            file.write(damaged)
        with pytest.raises(tf.errors.DataLossError, match=rf"c\.index.*{why}"):
            Index(path)


def changed(entries, name, change):
    """Entries with one of them changed."""
    proto = tensor_bundle_pb2.BundleEntryProto.FromString(entries[name])
    change(proto)
    return [*{**entries, name: proto.SerializeToString()}.items()]


def negative_size(proto):
    proto.shape.dim[0].size = -3


def huge_size(proto):
    proto.shape.dim[0].size = 2**62


def other_size(proto):
    proto.shape.dim[0].size = 299


def unknown_dtype(proto):
    proto.dtype = 99


def unknown_file(proto):
    proto.shard_id = 1


def slice_outside(proto):
    extent = proto.slices.add().extent
    extent.add().length = 301
    extent.add()


@pytest.mark.parametrize(
    "change",
    [
        negative_size,
        huge_size,
        other_size,
        unknown_dtype,
        unknown_file,
        slice_outside,
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(saved, change):
    path, _ = saved
    entries = damaged_index.read(path)
    damaged_index.write(f"{path}.index", [*entries.items()])
    assert BundleReader(path).shapes[VALUE] == [300, 5]
    entries = changed(entries, VALUE.encode(), change)
    damaged_index.write(f"{path}.index", entries)
    with pytest.raises(tf.errors.DataLossError, match=r"c\.index' is damaged"):
        BundleReader(path)


def cut_off(proto):
    proto.offset = 2**20


def other_bytes(proto):
    proto.size = 7


@pytest.mark.parametrize("name", ["dense", "by_id/step", "by_key/table/keys"])
@pytest.mark.parametrize("change", [cut_off, other_bytes])
def test_restoring_tables_says_which_checkpoint_is_damaged(
    name, change, tmp_path
):
    def make(value):
        by_id = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("x", tfrs_embed.TableConfig("t", 9, 4)),
            "adagrad",
            size_threshold=0,
        )
        by_key = tfrs_embed.All2AllDenseEmbedding(10, 4, 1, 1)
        by_id(tf.constant([1]))
        by_key(tf.constant([[[7]]], tf.int64), training=True)
        dense = tf.Variable([value, value])
        return by_id, by_key, dense

    by_id, by_key, dense = make(1.0)
    path = tf.train.Checkpoint(by_id=by_id, by_key=by_key, dense=dense).write(
        str(tmp_path / "c")
    )
    key = f"{name}/.ATTRIBUTES/VARIABLE_VALUE".encode()
    entries = damaged_index.read(path)
    proto = tensor_bundle_pb2.BundleEntryProto.FromString(entries[key])
    if proto.slices:  # Its values are under other keys.
        key = next(k for k in entries if k[:1] == b"\0" and key in k)
    damaged_index.write(f"{path}.index", changed(entries, key, change))
    by_id, by_key, dense = make(2.0)
    before = [state(by_id), state(by_key)]
    with pytest.raises(tf.errors.DataLossError) as error:
        tf.train.Checkpoint(by_id=by_id, by_key=by_key, dense=dense).restore(
            path
        )
    assert f"'{path}" in error.value.message
    assert name in error.value.message
    assert "Use an earlier checkpoint" in error.value.message
    assert "{{" not in error.value.message
    # Nothing has been restored.
    np.testing.assert_array_equal(dense, [2.0, 2.0])
    for layer, expected in zip((by_id, by_key), before, strict=True):
        assert_same(state(layer), expected)


def test_no_damage_to_an_index_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 100)
    by_key = tfrs_embed.All2AllDenseEmbedding(10, 4, 1, 1)
    by_key(tf.constant([[[7]], [[9]]], tf.int64), training=True)
    by_id = tfrs_embed.All2AllDenseEmbedding(40, 4, 1, 1, use_hashtable=False)
    by_id(tf.constant([[[7]]], tf.int64))
    tpu = tf.train.Checkpoint(t=tf.Variable(tf.ones([9, 3])))
    path = tf.train.Checkpoint(
        by_key=by_key, by_id=by_id, old=tf.train.Checkpoint(_tpu_embedding=tpu)
    ).write(str(tmp_path / "c"))
    done = subprocess.run(
        [sys.executable, damaged_index.__file__, path, "0", "100"],
        env={**os.environ, **environment("one")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout[-99:], done.stderr[-5000:])
    assert "is damaged: " in done.stderr
