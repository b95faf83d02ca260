"""Calls of operations on keys, spills and mapped files that must be errors.

    python tests/wrong_calls.py OPERATION

makes the wrong calls of `CASES` of an operation, and fails unless each raises
its error, changes nothing, and a right call succeeds afterwards.
"""

import os
import re
import resource
import signal
import sys
import tempfile

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.storage.key_rules import SPILLED

INVALID = tf.errors.InvalidArgumentError
EXHAUSTED = tf.errors.ResourceExhaustedError
MIN, MAX = -(2**63), 2**63 - 1
#: A call that takes longer hangs, and one that takes more memory has believed a
#: number.
SECONDS, BYTES = 120, 8 << 30
ROWS, DIM = 4, 4  # Of variables; the first two rows are no key's.


def int64(*values):
    return np.array(values, np.int64)


def int32(*values):
    return np.array(values, np.int32)


def module():
    return kernels._load()[1]


def run(operation, arguments):
    return getattr(module(), f"tfrs_embed_{operation}")(**arguments)


def table(**changes):
    arguments = {
        "probability": np.float64(1),
        "capacity": 2,
        "max_capacity": 2,
        "candidates": 4,
        "threshold": 0,
        "seed": 1,
        "policy": "lru",
        "ttl": 0,
        "evicts": True,
    }
    return {**arguments, **changes}


class Made:
    """A table of two rows: keys 3 and 4 have them, 1 and 2 are in the spill."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        self.path = f"{self.folder}/rows"
        self.memory = variable()
        self.slot = variable([ROWS])
        self.spill = {
            "spill_owner": "the table",
            "spill_folder": self.folder,
            "spill_parts": [4 * DIM, 4],
            "spill_bytes": 1 << 20,
        }
        np.arange(12, dtype=np.float32).tofile(self.path)
        os.mkfifo(f"{self.folder}/pipe")
        os.symlink("pipe", f"{self.folder}/link")
        self.table = run("key_table", table(**self.spill))
        self.other = run("key_table", table(threshold=2))
        for step, keys in enumerate(([1, 2], [3, 4])):
            found = run("key_tables_commit", self.commit(int64(*keys), step))
            run(
                "key_tables_publish",
                {"tables": [self.table], "versions": found.versions},
            )

    def commit(self, keys, step):
        return {
            "tables": [self.table],
            "keys": keys,
            "table_of": int32(),
            "counts": int64(),
            "rows": np.zeros_like(keys),
            "step": int64(step),
            "memory": [self.memory.handle, self.slot.handle],
        }

    def right(self, operation):
        """The arguments of a right call; of None, those that all have."""
        one, keys = {"tables": [self.table]}, int64(1, 3)
        spilled = {**one, "rows": int64(SPILLED + 1, SPILLED + 2)}
        part = {"part": 0, "row": [DIM]}
        mapped = {"path": self.path, "T": tf.float32, "shape": [3, 4]}
        pages = {"tables": [self.memory.handle], "ids": int64(0, 3)}
        records = {
            **{"keys": keys, "frequency": keys, "last_used": keys},
            "candidate_keys": int64(5, 6),
            "candidate_frequency": int64(1, 1),
            "candidate_last_seen": int64(1, 1),
            "in_memory": int64(1),
        }
        step = {"keys": keys, "counts": int64(), "step": np.int64(2)}
        return {
            "key_table": table(**self.spill),
            "key_tables_find": {**one, "keys": keys, "table_of": int32()},
            "key_tables_check": {
                **{**one, "rows": int64(2, 3), "table_of": int32()},
                "versions": int64(1),
            },
            "key_tables_publish": {**one, "versions": int64(0)},
            "key_tables_plan": {**one, **step, "table_of": int32()},
            "key_tables_commit": self.commit(keys, 2),
            "key_tables_export": {**one, "candidates": False},
            "key_tables_replace": {**one, **records},
            "key_tables_remove": {**one, "keys": keys, "evicted": False},
            "key_tables_take_removed": one,
            "key_tables_info": one,
            "key_tables_find_spilled": {**one, "keys": keys},
            "key_tables_read_ahead_spilled": {**one, "keys": keys},
            "key_tables_look_up_spilled": {
                **{**one, "keys": keys, "table_of": int32()},
                "parameters": [self.memory.handle],
                **{"dim": DIM, "T": tf.float32},
            },
            "key_tables_fetch_spilled": {
                **{**one, "keys": int64(1, 2), "rows": int64(2, 3)},
                "memory": [self.memory.handle, self.slot.handle],
            },
            "key_tables_read_spilled": {**spilled, **part, "T": tf.float32},
            "key_tables_write_spilled": {
                **{**spilled, **part},
                "values": np.ones([2, DIM], np.float32),
            },
            "write_keys": {
                "keys": int64(5, 6, 7),
                "counts": int64([1, 1], [0, 1]),
                "capacity": np.int32(3),
            },
            "read_keys": {
                "message": int64([1, 1, 5, 6, 0], [0, 1, 7, 0, 0]),
                "tables": 2,
            },
            "mapped_rows": mapped,
            "read_ahead": pages,
            "pages_in_memory": pages,
            "fill": {"dims": int64(2, 3), "value": np.float32(1)},
        }[operation]

    def state(self):
        """All that calls may change."""
        found = [
            run(f"key_tables_{operation}", {"tables": [each], **options})
            for each in (self.table, self.other)
            for operation, options in [
                ("info", {}),
                ("export", {"candidates": False}),
                ("export", {"candidates": True}),
            ]
        ]
        found += [
            run(
                "key_tables_read_spilled",
                {**self.right("key_tables_read_spilled"), **part},
            )
            for part in ({}, {"part": 1, "row": []})
        ]
        found += [self.memory.read_value(), self.slot.read_value()]
        return [value.numpy() for value in tf.nest.flatten(found)]


def variable(shape=(ROWS, DIM), dtype=tf.float32):
    values = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    return tf.Variable(tf.cast(values, dtype))


def handles(shape=(ROWS, DIM), dtype=tf.float32, slot=True):
    """A function that makes the handles of such variables."""

    def make(made):
        made.kept = variable(shape, dtype)
        return [made.kept.handle] + [made.slot.handle] * slot

    return make


def uninitialized(made):
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.float32,
        shape=[ROWS, DIM],
        shared_name=context.anonymous_name(),
    )
    return [handle, made.slot.handle]


def destroyed(made):
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[ROWS, DIM], shared_name="nothing"
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([ROWS, DIM]))
    tf.raw_ops.DestroyResourceOp(resource=handle)
    return [handle, made.slot.handle]


def together(made):
    return [tf.stack([made.memory.handle, made.slot.handle])]


def both(made):
    return [made.table, made.other]


def no_spill(made):
    return [made.other]


CASES = []


def wrong(operation, message, error=INVALID, /, **changes):
    """Adds a case; a change may be a function of a `Made`."""
    CASES.append((operation, changes, message, error))


def of_table(message, error=INVALID, **changes):
    wrong("key_table", message, error, **changes)


for _value in ([1.0, 2.0], []):
    of_table("probability must be a scalar", probability=np.array(_value))
for _value in (-0.5, 1.5, np.nan):
    of_table("is not from 0 to 1", probability=np.float64(_value))
for _value in (2**47, 2**60, 2**62, MAX):
    of_table("no room for", capacity=_value, max_capacity=MAX)
    of_table("no room for", candidates=_value, threshold=2)
of_table("max_capacity 1 is less", max_capacity=1)
for _name in ("capacity", "candidates", "max_capacity"):
    of_table("minimum", **{_name: 0})
    of_table("minimum", **{_name: MIN})
for _name in ("threshold", "ttl"):
    of_table("minimum", **{_name: -1})
of_table("mru", policy="mru")
for _value in ([0], [-8], [16, 0], [2**30 + 1], [2**30, 1], [MAX, MAX], [MIN]):
    of_table("spill_parts must be positive", spill_parts=_value)
for _value in (0, -1, MIN):
    of_table("must have a folder and bytes", spill_bytes=_value)
of_table("must have a folder and bytes", spill_folder="")
for _value in ("nowhere", "rows", "x" * 300):
    of_table(
        "the table: its spill in .* no file can be made",
        EXHAUSTED,
        spill_folder=lambda made, name=_value: f"{made.folder}/{name}",
    )

ON_TABLES = [
    *("find", "check", "publish", "plan", "commit", "export", "replace"),
    *("remove", "take_removed", "info", "find_spilled", "read_ahead_spilled"),
    *("look_up_spilled", "fetch_spilled", "read_spilled", "write_spilled"),
]
for _name in ON_TABLES:
    _name = f"key_tables_{_name}"
    wrong(_name, "type", tables=lambda made: [made.memory.handle])
    wrong(_name, "must be a scalar", tables=lambda made: [tf.stack(both(made))])
    wrong(
        _name,
        "must be a scalar|Empty resource",
        tables=lambda made: [tf.stack([made.table])[:0]],
    )
for _name in ("export", "replace", "remove", "take_removed", "read_spilled"):
    wrong(f"key_tables_{_name}", "It takes one table", tables=both)
for _name in ON_TABLES[10:]:
    _message = "The table has no spill|1 parameters, but 0"
    wrong(f"key_tables_{_name}", _message, tables=no_spill)
wrong("key_tables_commit", "the spills have 0", tables=no_spill)
for _name in ("find", "plan", "commit", "replace", "remove", "find_spilled"):
    for _value in (np.int64(1), int64([1], [3])):
        wrong(f"key_tables_{_name}", "keys must be a vector", keys=_value)
for _name in ("find", "plan", "look_up_spilled"):
    _name = f"key_tables_{_name}"
    wrong(_name, "2 keys, but tables of 1", table_of=int32(0))
    for _value in (int32(), int32(0)):
        wrong(_name, "2 keys, but tables of", tables=both, table_of=_value)
    for _value in (2, -1, 2**31 - 1, -(2**31)):
        wrong(_name, f"Table {_value}", tables=both, table_of=int32(0, _value))
wrong("key_tables_check", "rows must be a vector", rows=int64([2, 3]))
wrong("key_tables_check", "Row -1 < 0", rows=int64(2, -1))
for _name in ("check", "publish"):
    for _value in (int64(), int64(1, 2)):
        wrong(f"key_tables_{_name}", "one of each table", versions=_value)
for _name in ("plan", "commit"):
    _name = f"key_tables_{_name}"
    wrong(_name, "2 keys, but counts of 1", counts=int64(1))
    wrong(_name, "counts must be a vector", counts=int64([1, 1]))
    for _value in (int64(), int64(1, 2)):
        wrong(_name, "step must be a scalar", step=_value)
wrong("key_tables_commit", "a row for each of 2 keys", rows=int64(1))
for _name in ("commit", "fetch_spilled"):
    _name = f"key_tables_{_name}"
    wrong(_name, "rows of 4 bytes, not 16", memory=handles([ROWS, 1]))
    wrong(_name, "rows of 8 bytes, not 16", memory=handles(dtype=tf.bfloat16))
    wrong(_name, "A table must be", memory=handles(dtype=tf.int32))
    wrong(_name, "A table must be", memory=handles([]))
    wrong(_name, "rows of 1 bytes", memory=handles([ROWS], tf.uint8))
    wrong(_name, "type", memory=lambda made: both(made))
    wrong(
        _name,
        "not initialized",
        tf.errors.FailedPreconditionError,
        memory=uninitialized,
    )
    wrong(_name, "nothing", tf.errors.NotFoundError, memory=destroyed)
    wrong(
        _name,
        "variables",
        memory=lambda made: [made.memory.handle, *[made.slot.handle] * 2],
    )
    wrong(_name, "lacks|No row 3", memory=handles([3, DIM]))
    wrong(_name, "variables|missing", memory=lambda made: together(made) * 2)
wrong("key_tables_commit", "is missing", memory=[])
wrong("key_tables_commit", "is missing", memory=handles(slot=False))

for _value in (int64(), int64(1, 1)):
    wrong("key_tables_replace", "in_memory must be", in_memory=_value)
for _value in (-1, 3, MIN, MAX):
    wrong("key_tables_replace", "of 2 keys", in_memory=int64(_value))
for _name in ("keys", "last_used", "candidate_keys", "candidate_last_seen"):
    wrong("key_tables_replace", "elements", **{_name: int64(1)})
for _name in ("frequency", "candidate_frequency"):
    for _value in (-1, MIN):
        _values = {_name: int64(1, _value)}
        wrong("key_tables_replace", f"was used {_value} times", **_values)
for _value in (0, 1, 2):
    # In the spill, in both, in memory.
    wrong(
        "key_tables_replace",
        "Key 7 is among the keys twice",
        keys=int64(7, 7),
        in_memory=int64(_value),
    )
# One of them is in the spill already.
wrong(
    "key_tables_replace",
    "Key 1 is among the keys twice",
    keys=int64(1, 1),
    in_memory=int64(0),
)
wrong(
    "key_tables_replace",
    "Key 5 is among the keys twice",
    tables=no_spill,
    candidate_keys=int64(5, 5),
    in_memory=int64(2),
)
wrong("key_tables_replace", "no room for 2 keys", tables=no_spill)
wrong(
    "key_tables_replace",
    "no room for 3 keys",
    **dict.fromkeys(("keys", "frequency", "last_used"), int64(1, 2, 3)),
    in_memory=int64(3),
)

for _value in (1, 2, 3, 8, 2**28):
    _message = "A row of a spill has 16 bytes"
    wrong("key_tables_look_up_spilled", _message, dim=_value, parameters=[])
for _value in (2**29, 2**61, 2**62, MAX):
    wrong("key_tables_look_up_spilled", "dim is", dim=_value, parameters=[])
wrong("key_tables_look_up_spilled", "minimum", dim=0)
_message = "parameters have rows of|A table must be"
for _value in (
    handles([ROWS, 2], slot=False),
    handles(dtype=tf.bfloat16, slot=False),
    handles([ROWS, 16], tf.int8, slot=False),
    handles([ROWS, DIM], tf.uint8, slot=False),
    handles([ROWS], slot=False),
):
    wrong("key_tables_look_up_spilled", _message, parameters=_value)
wrong("key_tables_look_up_spilled", _message, T=tf.bfloat16, dim=8)
wrong(
    "key_tables_look_up_spilled",
    "2 parameters, but",
    parameters=lambda made: [made.memory.handle] * 2,
)
wrong("key_tables_fetch_spilled", "must have a row", rows=int64(2))
for _value in (4, -1, 2**40, MIN, MAX):
    _rows = int64(2, _value)
    wrong("key_tables_fetch_spilled", f"No row {_value}", rows=_rows)
for _name in ("key_tables_read_spilled", "key_tables_write_spilled"):
    wrong(_name, "rows must be a vector", rows=int64([SPILLED + 1]))
    for _value in (0, SPILLED, SPILLED - 1, SPILLED + 2**40, MIN, MAX):
        _rows = int64(SPILLED + 1, _value)
        wrong(_name, f"has no row {_value}", rows=_rows)
    for _value in (1, 2, MAX):
        wrong(_name, "no such part", part=_value)
    # The last two have as many bytes, but for an overflow or too many axes.
    for _value in ([], [3], [0], [2**62], [2**62 + DIM], [2**31, 2**31]):
        wrong(_name, "no such part", row=_value)
    wrong(_name, "dimensions", row=[1] * 253 + [DIM])
    wrong(_name, "not fully defined", row=[None])
for _value in ([1, DIM], [2, 2], [2 * DIM], [DIM, 2], [2, 2, 2]):
    wrong(
        "key_tables_write_spilled",
        "values of shape",
        values=np.ones(_value, np.float32),
    )

wrong("write_keys", "keys must be a vector", keys=int64([5, 6, 7]))
for _value in (int64(3), np.zeros([2**40, 0], np.int64), int64([])):
    wrong("write_keys", "counts of shape", counts=_value)
for _value in (-1, 2**40, MIN, MAX):
    wrong("write_keys", "keys for shard 1", counts=int64([1, 1], [1, _value]))
for _value in (int32(), int32(1, 1)):
    wrong("write_keys", "capacity must be a scalar", capacity=_value)
wrong("write_keys", "capacity < 0", capacity=np.int32(-1))
_value = np.int32(2**31 - 1)
wrong("write_keys", "more than 2147483647", capacity=_value)
wrong("read_keys", "messages of shape", message=int64(1, 2))
wrong("read_keys", "minimum", tables=0)
for _value in (6, MAX):
    wrong("read_keys", "messages of shape", tables=_value)
for _value in (-1, 4, 2**62, MIN, MAX):
    wrong(
        "read_keys", "too many keys", message=int64([_value, _value, 1, 2, 3])
    )

for _value in ([], [2**40, 2**22], [2**61 + 12]):
    wrong("mapped_rows", "No file has rows|invalid|[Oo]verflow", shape=_value)
wrong("mapped_rows", "not fully defined", shape=[None, 4])
for _value in ([], ["a", "b"]):
    wrong("mapped_rows", "path must be a scalar", path=np.array(_value, "S"))
wrong("mapped_rows", "character 0", path=lambda made: f"{made.path}\0")
for _shared in (False, True):
    wrong("mapped_rows", "not the 64", shape=[4, 4], shared=_shared)
    # A link to what is written to is another error, of no argument.
    for _value in ("pipe", "/dev/null", *([] if _shared else ["link"])):
        wrong(
            "mapped_rows",
            "is no regular file",
            path=lambda made, name=_value: os.path.join(made.folder, name),
            shape=[0, 4],
            shared=_shared,
        )
wrong("mapped_rows", "no regular file", path=lambda made: made.folder)
for _value in ("rows", "pipe"):
    wrong(
        "mapped_rows",
        "not the 64",
        path=lambda made, name=_value: f"file://{made.folder}/{name}",
        shape=[4, 4],
    )
for _name in ("read_ahead", "pages_in_memory"):
    wrong(_name, "ids must be a vector", ids=int64([1]))
    wrong(_name, "must be a scalar", tables=together)
    wrong(
        _name,
        "must be a scalar|Empty resource",
        tables=lambda made: [together(made)[0][:0]],
    )
    wrong(_name, "type", tables=both)
    wrong(_name, "nothing", tf.errors.NotFoundError, tables=destroyed)
for _value in (int64(-1), int64(2**40, 2**40), int64(2, MIN)):
    wrong("fill", "", dims=_value)
wrong("fill", "", dims=np.int64(2))
wrong("fill", "value must be a scalar", value=np.ones(1, np.float32))


def check(case):
    operation, changes, message, error = case
    made = Made()
    right = made.right(operation)
    changes = {
        name: value(made) if callable(value) else value
        for name, value in changes.items()
    }
    before = made.state()
    try:
        run(operation, {**right, **changes})
    except tf.errors.OpError as found:
        assert type(found) is error, found
        assert re.search(message, found.message), found
    else:
        raise AssertionError("no error")
    for value, old in zip(made.state(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    run(operation, right)


def main():
    signal.alarm(SECONDS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, now + BYTES))
    for case in CASES:
        if case[0] == sys.argv[1]:
            print(case, flush=True)
            check(case)


if __name__ == "__main__":
    main()
