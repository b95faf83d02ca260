"""A table that variables hold in parts is read, written and held as one."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfrs_embed.storage.sharded import Part, ShardedVariable

ROWS, DIM = 23, 4
TABLE = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)

#: Parts by the way that a table is cut.
CUTS = {
    "rows": [Part(range(i, ROWS, 3)) for i in (1, 2, 0)],
    "more shards than rows": [Part(range(i, ROWS, 30)) for i in range(30)],
    "columns": [Part(range(ROWS), (0, 2)), Part(range(ROWS), (2, 4))],
    "hosts": [Part(range(10)), Part(range(10, 20)), Part(range(20, ROWS))],
    "stacks": [Part(range(i, ROWS, 2), offset=5) for i in range(2)],
}


def make(cut, dtype=tf.float32):
    shape = [30, 8] if cut == "stacks" else [ROWS, DIM]
    held = []
    for part in CUTS[cut]:
        width = shape[1]
        if part.columns:
            width = part.columns[1] - part.columns[0]
        held.append((part, tf.Variable(tf.zeros([shape[0], width], dtype))))
    strategy = tf.distribute.get_strategy()
    parts = dict(enumerate(CUTS[cut]))
    return ShardedVariable(
        "t/parameters", (ROWS, DIM), held, strategy, dtype, parts=parts
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
def test_it_is_what_was_written(cut, dtype):
    table = make(cut, dtype)
    table.assign(TABLE)
    np.testing.assert_array_equal(table.numpy(), TABLE)
    for start, size in [(0, 1), (4, 7), (9, 12), (22, 1)]:
        np.testing.assert_array_equal(
            table.read_rows(start, size), TABLE[start : start + size]
        )
    table.write_rows(range(9, 12), tf.zeros([3, DIM], dtype))
    expected = np.where((np.arange(ROWS)[:, None] // 3) == 3, 0, TABLE)
    np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("cut", CUTS)
def test_each_row_is_held_once(cut):
    table = make(cut)
    table.assign(TABLE)
    held = table.held()
    found = np.concatenate([h.gather(np.arange(h.rows)) for h in held])
    assert sum(each.bytes for each in held) == TABLE.nbytes
    np.testing.assert_array_equal(found[np.argsort(found[:, 0])], TABLE)


def test_what_others_have_in_a_stack_stays():
    table = make("stacks")
    for variable in table._variables:
        variable.assign(tf.fill(variable.shape, 7.0))
    table.assign(TABLE)
    for part, variable in zip(CUTS["stacks"], table._variables, strict=True):
        mine = slice(part.offset, part.offset + len(part.rows))
        np.testing.assert_array_equal(
            variable[mine, :DIM], TABLE[list(part.rows)]
        )
        others = np.delete(variable.numpy(), mine, 0)
        assert (others == 7.0).all()


def test_copies_are_written_all_and_one_is_read():
    copies = [tf.Variable(tf.zeros([ROWS, DIM])) for _ in range(2)]
    table = ShardedVariable(
        "t/parameters",
        (ROWS, DIM),
        [(Part(range(ROWS)), copy) for copy in copies],
        tf.distribute.get_strategy(),
        copied=True,
    )
    table.assign(TABLE)
    for copy in copies:
        np.testing.assert_array_equal(copy, TABLE)
    assert len(table.held()) == 1


@pytest.mark.more
def test_hosts_of_a_slice_read_and_write_their_shares(tmp_path):
    script = pathlib.Path(__file__).with_name("two_host_slice.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = 200_000 * 64 * 4
    for coordinator, *hosts in json.loads(done.stdout.splitlines()[-1]):
        assert coordinator < 0.02 * table
        for of_host in hosts:
            assert 0.3 * table < of_host < 0.7 * table
