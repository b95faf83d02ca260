import os

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from helpers import assert_same, change_byte, state
from tfrs_embed.checkpoint import stored
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, merge
from tfrs_embed.checkpoint.index import Index
from tfrs_embed.checkpoint.stored import masked_crc32c

VALUE = "v/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def large_from_1000_bytes(monkeypatch):
    monkeypatch.setattr(stored, "LARGE_BYTES", 1000)


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
    [entry] = Index(path).pieces[VALUE]
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
    reader = BundleReader(str(tmp_path / "c"))
    for start, size in [(6, 3), (0, 300)]:
        found = reader.read_array(name, first + start, size)
        np.testing.assert_array_equal(found, values[start : start + size])
    with pytest.raises(tf.errors.DataLossError, match=r"slices of .* missing"):
        reader.read_array(name, first - 1, 2)


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
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(reader.read_array("v", 1, 4), values[1:5])


def test_slices_may_be_of_columns(tmp_path):
    values = np.random.default_rng(0).random((3, 5), np.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "c"),
        tensor_names=["v", "v"],
        shape_and_slices=["3 5 -:0,3", "3 5 -:3,2"],
        tensors=[values[:, :3], values[:, 3:]],
    )
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(reader.read_array("v", 1, 2), values[1:])


def data_file(path):
    return f"{path}.data-00000-of-00001"


def test_a_changed_byte_is_found(saved, large_from_1000_bytes):
    path, _ = saved
    [entry] = Index(path).pieces[VALUE]
    change_byte(entry.file, entry.offset + 5000)
    with pytest.raises(
        tf.errors.DataLossError, match=r"00000-of-00001' is dam"
    ):
        read_in_blocks(BundleReader(path), VALUE, 300, 70)
    with pytest.raises(tf.errors.DataLossError, match=f"checksum of '{VALUE}'"):
        BundleReader(path).read_array(VALUE, 7, 3)


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


def test_restoring_tables_says_which_checkpoint_is_damaged(tmp_path):
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
    name = "by_id/tables/t/parameters"
    [piece] = Index(path).pieces[f"{name}/.ATTRIBUTES/VARIABLE_VALUE"]
    os.truncate(piece.file, piece.offset + 30)
    by_id, by_key, dense = make(2.0)
    before = [state(by_id), state(by_key)]
    with pytest.raises(tf.errors.DataLossError) as error:
        tf.train.Checkpoint(by_id=by_id, by_key=by_key, dense=dense).restore(
            path
        )
    assert f"'{path}" in error.value.message
    assert f"'{piece.file}' is missing or cut off" in error.value.message
    assert "Use an earlier checkpoint" in error.value.message
    assert "{{" not in error.value.message
    # Nothing has been restored.
    np.testing.assert_array_equal(dense, [2.0, 2.0])
    for layer, expected in zip((by_id, by_key), before, strict=True):
        assert_same(state(layer), expected)
