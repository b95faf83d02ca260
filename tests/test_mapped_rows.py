"""Tables whose memory is a file."""

import mmap

import numpy as np
import pytest
import tensorflow as tf

import random_kernel_calls as cases
from random_kernel_calls import Feature
from tfrs_embed import kernels
from tfrs_embed.compat.private_tensorflow import context
from training_helpers import mappings_of

pytestmark = pytest.mark.usefixtures("needs_kernels")

ROWS, DIM = 100_000, 64  # 25 MB of float32.


def mapped(path, dtype=tf.float32, shape=(ROWS, DIM), shared=False):
    module = kernels.operations("CPU")
    return module.tfrs_embed_mapped_rows(
        path=str(path), T=dtype, shape=shape, shared=shared
    )


def variable(value):
    """A variable that keeps a tensor's memory, and dies with its handle."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=value.dtype,
        shape=value.shape,
        shared_name=context.anonymous_name(),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


@pytest.fixture
def table(tmp_path):
    rows = np.random.default_rng(0).normal(size=[ROWS, DIM])
    rows = rows.astype(np.float32)
    rows.tofile(tmp_path / "rows")
    return tmp_path / "rows", rows


def gather(handle, ids):
    return tf.raw_ops.ResourceGather(
        resource=handle, indices=ids, dtype=tf.float32
    )


def scatter(handle, ids, values):
    tf.raw_ops.ResourceScatterUpdate(
        resource=handle, indices=ids, updates=values
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_variables_memory_is_the_file(table, shared):
    path, rows = table
    handle = variable(mapped(path, shared=shared))
    ids = np.array([0, 99_999, 5, 77_777])
    np.testing.assert_array_equal(gather(handle, ids), rows[ids])
    # The kernels ask for huge pages of other tables, which would be all of it.
    module = kernels.operations("CPU")
    bags = Feature(0, ids, 4).bags()
    [found] = module.tfrs_embed_lookup(
        tables=[handle],
        dims=[DIM],
        T=tf.float32,
        **cases.compiled.describe([bags.ids], [bags], [0]),
    )
    np.testing.assert_array_equal(found, rows[ids])
    scatter(handle, [7], tf.fill([1, DIM], 3.0))
    [memory] = mappings_of(path)
    assert "hg" not in memory["VmFlags"]
    assert memory["Size"] == rows.nbytes // 1024
    assert memory["Rss"] < memory["Size"] / 4  # Linux maps pages around.
    assert memory["Anonymous"] == (0 if shared else 4)
    rows[7] = 3
    np.testing.assert_array_equal(gather(handle, range(10)), rows[:10])
    stored = np.fromfile(path, np.float32).reshape(rows.shape)
    assert (stored[7] == 3).all() == shared
    del handle, found
    assert not mappings_of(path)


def test_private_changes_are_of_one_mapping(table):
    path, rows = table
    handles = [variable(mapped(path)) for _ in range(2)]
    scatter(handles[0], [7], tf.zeros([1, DIM]))
    np.testing.assert_array_equal(gather(handles[1], [7])[0], rows[7])
    path.unlink()  # Replaced, perhaps. Its pages stay.
    np.testing.assert_array_equal(gather(handles[1], [9])[0], rows[9])


@pytest.mark.parametrize(
    "dtype", [tf.float32, tf.float16, tf.bfloat16, tf.int8, tf.uint8]
)
def test_all_dtypes_of_rows(tmp_path, dtype):
    values = tf.cast(tf.reshape(tf.range(21), [7, 3]), dtype)
    (tmp_path / "rows").write_bytes(values.numpy().tobytes())
    found = mapped(tmp_path / "rows", dtype, [7, 3])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)
    uri = mapped(f"file://{tmp_path}/rows", dtype, [7, 3])
    np.testing.assert_array_equal(uri, values)


def test_links_to_files_that_are_only_read_are_followed(table):
    # Caches of downloaded models have links as files.
    path, rows = table
    link = path.with_name("link")
    link.symlink_to(path)
    np.testing.assert_array_equal(mapped(link)[:3], rows[:3])
    with pytest.raises(tf.errors.OpError, match="link"):
        mapped(link, shared=True)


def test_pages_are_counted_once_however_often_rows_are_asked_for(tmp_path):
    path, row, page = tmp_path / "rows", 16 << 20, mmap.PAGESIZE
    with open(path, "wb") as file:
        file.truncate(3 * row)
    handle = variable(mapped(path, tf.int8, [3, row]))
    module = kernels.operations("CPU")
    # A list of the pages of all of them would have 1 GB.
    ids = np.resize([2, 0, 0, 7, -1], 100_000)
    found = module.tfrs_embed_pages_in_memory([handle], ids)
    assert found.numpy().tolist() == [2 * row // page, 0]
    module.tfrs_embed_read_ahead([handle], ids[3:5])
    scatter(handle, [1], tf.ones([1, row], tf.int8))
    found = module.tfrs_embed_pages_in_memory([handle], [1, 2])
    assert found.numpy().tolist() == [2 * row // page, row // page]


def test_a_scalar_of_a_files_memory_has_no_pages(tmp_path):
    (tmp_path / "rows").write_bytes(bytes(4))
    handle = variable(tf.reshape(mapped(tmp_path / "rows", shape=[1, 1]), []))
    module = kernels.operations("CPU")
    found = module.tfrs_embed_pages_in_memory([handle], [0])
    assert found.numpy().tolist() == [0, 0]


def test_a_table_without_rows(tmp_path):
    (tmp_path / "rows").touch()
    assert mapped(tmp_path / "rows", shape=[0, 3]).shape == [0, 3]


@pytest.mark.parametrize("shared", [False, True])
def test_files_that_do_not_fit_are_errors(tmp_path, shared):
    path = tmp_path / "two words"

    def refuse(match, kind=tf.errors.InvalidArgumentError):
        with pytest.raises(kind, match=match):
            mapped(path, shape=[7, 3], shared=shared)

    refuse(f"table's file {path}; No such file", tf.errors.NotFoundError)
    for size in (0, 83, 85):
        path.write_bytes(bytes(size))
        refuse(rf"{path} has {size} bytes, not the 84 of float \[7,3\]")
    path.unlink()
    path.mkdir()
    refuse(f"{path}", tf.errors.OpError)
