"""Calls of the kernels' operations that must fail, and their errors.

A call is a right one of `right_calls.py` with other arguments.
"""

import collections
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from right_calls import (
    DIM,
    KEYS,
    ROWS,
    TABLE,
    Keys,
    f32,
    i32,
    i64,
)
from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.storage.key_rules import SPILLED

INVALID = "InvalidArgumentError"
EXHAUSTED = "ResourceExhaustedError"
NOT_FOUND = "NotFoundError"
MIN, MAX = -(2**63), 2**63 - 1
MAX_32 = 2**31 - 1


class Wrong(NamedTuple):
    """A wrong call.

    Attributes:
        call: the name of the right one.
        changes: its other arguments, or functions that make them of the `Call`.
        message: a regular expression of what the error says.
        error: the error's name.
    """

    call: str
    changes: dict[str, Any]
    message: str
    error: str

    def arguments(self, right):
        return {
            name: value(right) if callable(value) else value
            for name, value in self.changes.items()
        }


CASES: dict[str, Wrong] = {}
_numbers = collections.Counter[str]()


def wrong(call, message, error=INVALID, /, **changes):
    CASES[f"{call}[{_numbers[call]}]"] = Wrong(call, changes, message, error)
    _numbers[call] += 1


# Functions that make arguments.


def variable(shape=TABLE.shape, dtype=tf.float32):
    """The handle of a variable that no other call has."""
    return lambda _: [tf.Variable(tf.zeros(shape, dtype)).handle]


def uninitialized(_):
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.float32,
        shape=TABLE.shape,
        shared_name=context.anonymous_name(),
    )
    return [handle]


def destroyed(_):
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=TABLE.shape, shared_name="nothing"
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(TABLE.shape))
    tf.raw_ops.DestroyResourceOp(resource=handle)
    return [handle]


def key_table(_):
    return [Keys(False).handle]


def both(right):
    return [right.keys.handle, right.keys.empty]


def no_spill(right):
    return [right.keys.empty]


def stacked(count):
    """Several handles, or none, where one belongs."""
    return lambda right: [tf.stack(right.arguments["tables"] * 2)[:count]]


def with_slot(make):
    """Another variable for rows in memory, beside the right one of slots."""
    return lambda right: [*make(right), right.arguments["memory"][1]]


def beside(name, prefix=""):
    """The path of a file in the folder of the rows."""

    def path(right):
        folder = os.path.dirname(right.arguments["path"])
        return prefix + os.path.join(folder, name)

    return path


def zeros(*shape, dtype=tf.float32):
    return lambda _: tf.zeros(shape, dtype)


NO_IDS = {
    "ids": [i64([]), i64([])],
    "bags": [[0]],
    "weights": [f32([])],
    "scales": [f32([])],
    "counts": [0, 0],
}
PER_BAG = "splits and per_bag must have an entry for each feature"
FIT = "The inputs don't fit table_of, has_bag, has_weights and has_scale"

for name in (
    "lookup",
    "lookup_concat",
    "combine",
    "sum_gradients_by_row",
    "update",
):
    wrong(name, "feature 1: table 1 of", table_of=[0, 1])
    wrong(name, "table -1 of|must be ascending", table_of=[0, -1])
    wrong(name, "has_bag must have an entry", table_of=[0])
    wrong(name, "has_bag must have an entry", has_bag=[True])
    wrong(name, FIT, has_bag=[False, False])
    wrong(name, FIT, has_weights=[True, True])
    wrong(name, "has_scale must have an entry", has_scale=[])
    wrong(name, PER_BAG, splits=[True])
    for value in ([1], [1, 0], [1, MIN]):
        wrong(name, PER_BAG, per_bag=value)
    wrong(name, f"4 ids for 2 bags of {MAX}", per_bag=[1, MAX])
    # 4 * 2^62 is 0 in 64 bits.
    wrong(
        name,
        "0 ids for 4 bags of",
        per_bag=[1, 2**62],
        ids=[i64([0, 4, 2]), i64([])],
        counts=[2, 4],
    )
    wrong(name, FIT, counts=[2])
    wrong(name, "feature 1: -2 bags", counts=[2, -2])
    wrong(name, f"4 ids for {MAX_32} bags of 2", counts=[2, MAX_32])
    wrong(name, FIT, bags=[])
    wrong(name, "2 splits for 2 bags", bags=[[0, 1]])
    for value in (MAX_32, -(2**31)):
        wrong(name, "splits aren't ascending", bags=[[0, value, 3]])
    wrong(name, "feature 0: -1 bags", bags=[[]], counts=[-1, 2])
    wrong(name, "1 weights for 3 ids", weights=[f32([1])])
    wrong(name, "3 scales for 2 bags", scales=[f32([1, 1, 1])])
    for value in (MIN, MAX, ROWS):
        ids = [i64([0, 4, value]), i64([1, 3, 2, 0])]
        wrong(name, f"id {value} is out of range", ids=ids)

for name in ("lookup", "lookup_concat", "combine"):
    wrong(name, "dims must have an entry", dims=[DIM])
    for value in (-1, DIM + 1, MAX_32):
        wrong(name, f"isn't dim {value}|dims: {value}", dims=[DIM, value])
    wrong(name, "out of range for an int32", dims=[DIM, 2**31])
for name in ("lookup", "combine"):
    wrong(name, "shapes (must have an entry|too)", shapes=[[2, DIM]])
    for value in (
        *([2, DIM + 1], [], None, [None, None, DIM]),
        *([2**40, 2**20], [None, 2**40, 2**40]),
    ):
        wrong(name, "vectors of shape", shapes=[[2, DIM], value])
for name in ("lookup", "lookup_concat"):
    wrong(name, "wrong type", tables=key_table)
    wrong(name, "of rank 2, got float", tables=variable([DIM]))
    wrong(name, "got int16", tables=variable(dtype=tf.int16))
    for value in ([0, 2**40], [2**62, 0]):
        wrong(name, "A table must have at most", tables=variable(value))
    for value in (1, -1):
        wrong(name, f"place {value} of 1", places=[value])
    wrong(
        name,
        f"rows: {MIN}",
        rows=[MIN, ROWS],
        ids=[i64([6, 10**4, 10**11]), i64([0, 0, 0, 0])],
    )
    wrong(name, "rows: -1", rows=[-1, ROWS])
    wrong(name, "1 rows for 2 features", rows=[ROWS])
    wrong(name, "the first: id 4 is out of range", rows=[2, ROWS])
    wrong(name, "2 rows for 1 features", names=["one"])

wrong(
    "lookup_of_bags",
    "no memory for the splits",
    EXHAUSTED,
    counts=[MAX_32, 2],
)
for message, value in [
    ("2 bags for 3 ids", [0, 1]),
    ("bags -2147483648 to 1 of 2", [-(2**31), 1, 1]),
    ("bags 0 to 2147483647 of 2", [0, 1, MAX_32]),
    ("the bags aren't ascending", [1, 0, 1]),
]:
    wrong("lookup_of_bags", message, bags=[value])
for value in ([], [-(2**31)], [MAX_32], [0]):
    wrong("lookup_of_bytes", "without a factor for each row", scale_of=value)
wrong("lookup_of_half_bytes", "dim 3 and of 4", dims=[3, 4])
for value in (-1, MAX_32):
    message = f"isn't half of dim {value}|dims: {value}"
    wrong("lookup_of_half_bytes", message, dims=[3, value])
for value in ([], [2]):
    wrong("lookup_concat", "order: none of the features", order=value)
for value in (3, -1):
    wrong("lookup_concat", f"order: {value}", order=[0, 1, value])
for value in ([3, 3], [2]):
    others = [np.ones(value, np.float32)]
    wrong("lookup_concat", "a tensor of shape .* beside 2", others=others)
wrong(
    "lookup_concat",
    "too many columns",
    **NO_IDS,
    others=lambda _: [tf.zeros([0, 2**62])] * 2,
    order=[0, 1, 2, 3],
)
wrong("combine", "of rank 2, got float", rows=TABLE[0])
for value in ([0, 2**40], [2**62, 0]):
    wrong("combine", "A table must have at most", rows=zeros(*value))
wrong("sum_gradients_by_row", "dim: -1", dim=-1)
for value in (MIN, 2**62):
    wrong(
        "sum_gradients_by_row",
        f"Attr dim has value {value} out of range",
        dim=value,
    )
wrong("sum_gradients_by_row", f"2 bags of dim {MAX_32}", dim=MAX_32)
wrong("sum_gradients_by_row", "num_rows < 0", num_rows=-1)
wrong(
    "sum_gradients_by_row",
    "id 4 is out of range; the table has 2 rows",
    num_rows=2,
)
wrong("sum_gradients_by_row", "num_rows must be a scalar", num_rows=[5, 5])
for value in ([3, DIM], [0, 2**62]):
    wrong(
        "sum_gradients_by_row",
        "a gradient of shape .* for 2 bags of dim 4",
        gradients=lambda _, shape=value: [tf.zeros(shape)] * 2,
    )
wrong(
    "sum_gradients_by_row",
    "OOM when allocating",
    EXHAUSTED,
    **NO_IDS,
    num_rows=MAX_32,
    dim=MAX_32,
    gradients=lambda _: [tf.zeros([0, MAX_32])] * 2,
)

wrong("update", "table_of must be ascending", table_of=[1, 0])
for value in (0, 10, -1, MAX_32):
    wrong("update", f"rules: {value}", rules=[value])
wrong("update", "settings must have 6 entries", rules=[])
wrong("update", "settings must have 6 entries", settings=[0.0] * 5)
wrong("update", "0 rates for 1 tables", rates=f32([]))
wrong("update", "2 rates for 1 tables", rates=f32([1, 1]))
wrong("update", "2 decays for 1 tables", decays=f32([1, 1]))
wrong("update", "step must be a scalar", step=i64([]))
wrong("update", "mark must be a scalar", mark=np.uint8([]))
wrong("update", "columns must have an entry", columns=[0])
for value in ([0, 5], [-1, 0], [0, MAX_32], [0, -(2**31)]):
    wrong("update", "at column (5|-1|2147483647|-2147483648)", columns=value)
wrong("update", "gradient_of must have an entry", gradient_of=[0])
for value in (1, -1):
    wrong("update", f"gradient {value} of 1", gradient_of=[0, value])
wrong(
    "update",
    "a gradient of shape .* at column 0",
    gradients=lambda _: [tf.zeros([0, 2**62])],
)
for value in (2, -(2**31)):
    wrong("update", f"place {value} of 2", places=[0, value])
wrong("update", "its marks' shape differs", places=[0])
wrong("update", "wrong type", states=key_table)
wrong("update", "its marks' shape differs", states=variable())
wrong(
    "update",
    "A table must have at most",
    states=lambda right: variable([2**62, 0])(right) * 2,
)
for name, value in {
    "clip_lows": [],
    "clip_highs": [0.0, 0.0],
    "row_norms": [],
    "max_norms": [],
    "marked": [],
    "stochastic": [],
    "seeds": [],
    "first_rows": [],
    "row_strides": [1, 1],
    "first_columns": [],
}.items():
    wrong("update", f"{name} must have an entry", **{name: value})
wrong("update_of_two_bytes", "only rows of float32", decays=f32([0.5]))
wrong("update_of_two_bytes", "only rows of float32 can have", max_norms=[0.5])

for value in ([], [3], [0], [-1], [MAX_32]):
    wrong("update_joint", "spans", spans=value or [1, 1])
for value in (-1, 2 * ROWS, MIN, MAX):
    ids = [i64([4, 5, value, 5])]
    message = f"id {value} is out of range; the tables have 10 rows"
    wrong("update_joint", message, ids=ids)
wrong("update_joint", "a bag has 2 joint ids", bags=[i32([1, 1, 4, 5])])
wrong(
    "update_joint",
    "several in a bag",
    weights=[f32([1, 1, 1, 1])],
    has_weights=[True],
)
wrong(
    "update_joint",
    "of 4 and of 3 columns",
    states=lambda _: [
        tf.Variable(tf.zeros([ROWS, n])).handle for n in (DIM, DIM - 1)
    ],
)

for value in (-1, 2 * ROWS + 2, MIN, MAX):
    message = f"id {value} is out of range; the tables have 12 rows"
    wrong("read_rows", message, rows=i64([4, value]))
wrong("read_rows", "must have rows of dim 3", dim=3)
wrong("read_rows", "out of range|dim", dim=-1)
wrong(
    "read_rows",
    "which are no integers",
    tables=variable(dtype=tf.int8),
    places=[0],
)
wrong("read_rows", "place 3 of 3", places=[3])
wrong("read_rows", "wrong type", tables=key_table, places=[0])

wrong("inside", "2 ids for 1 tables", rows=[5])
for value in (-1, MIN):
    wrong("inside", f"rows: {value}", rows=[value, 5])
wrong("require", "1 rows for 2 features", rows=[5])
wrong("require", f"rows: {MIN}", rows=[MIN, 5])
wrong("require", "id 0 is out of range; the table has 0", rows=[0, 0])
wrong("require", "2 rows for 0 features", names=[])
wrong("require", f"id {MAX} is out", ids=[i64([0]), i64([MAX])])

wrong("route", "minimum", world=0)
message = "world .* times tables .* must be in"
for world, tables in [(2**62, 8), (2**31, 2), (MAX, 1), (2, 2**27), (2, MAX)]:
    wrong("route", message, world=world, tables=tables)
wrong("route", "4 keys, but tables of 3", table_of=[0, 1, 0])
for value in (2, -1):
    wrong("route", f"Table {value} of 2", table_of=[0, 1, 0, value])
wrong("copy_runs", "values must be rows", values=np.float32(1))
wrong("copy_runs", "254 dimensions", values=zeros(5, *[1] * 253))
wrong(
    "copy_runs",
    "[Oo]verflow",
    values=np.zeros([0, 8192], np.float32),
    starts=np.zeros(2**20, np.int32),
    sizes=np.zeros(2**20, np.int32),
    capacity=MAX_32,
)
wrong(
    "copy_runs",
    "[Oo]verflow",
    values=zeros(0, 2**40, 2**40),
    starts=[0],
    sizes=[0],
    capacity=1,
)
wrong("copy_runs", "1 starts and 2 sizes", starts=[1])
for value in (-1, MAX_32):
    wrong("copy_runs", f"1 rows from {value} on, of 5", starts=[1, value])
for value in (-1, 2, MAX_32):
    wrong("copy_runs", f"{value} rows from 4 on, of 5", sizes=[2, value])
wrong("copy_runs", "there is room for 1", capacity=1)
wrong("copy_runs", "capacity is -1", capacity=-1)
wrong("copy_runs", "capacity must be a scalar", capacity=[3, 3])
wrong(
    "copy_runs",
    "OOM when allocating",
    EXHAUSTED,
    capacity=MAX_32,
    values=np.zeros([5, 2**20], np.float32),
)
wrong("read_splits", "starts must be .pieces, world.", starts=[0, 9])
for value in (-1, MAX_32):
    wrong("read_splits", f"at {value} of 3", starts=[[0, 9], [value, 9]])
wrong("read_splits", "has -1 bags", counts=[[2, 1], [-1, 1]])
wrong("read_splits", f"has {MAX_32} bags", counts=[[MAX_32, 1], [1, 1]])
wrong("read_splits", "have 2 ids too few", counts=[[2, 0], [1, 1]])
wrong("read_splits", "1 bags of -1 ids", numbers=[[5, 2], [-1, 1]])
wrong("read_splits", "2147483652 ids", numbers=[[5, MAX_32], [1, 1]])
wrong("read_splits", "-3 ids of 3", words=i32([2, -3, 1]).view(np.float32))
wrong(
    "read_splits",
    "starts must be .pieces, world.",
    **dict.fromkeys(
        ("starts", "has_lengths", "counts", "numbers"),
        zeros(2**60, 0, dtype=tf.int32),
    ),
)
wrong("ids_of_shard", "minimum", world=0)
for value in (3 << 32, 2**31):
    wrong("ids_of_shard", f"world has value {value} out of", world=value)
for value in (2, -1):
    wrong("ids_of_shard", f"shard {value} of 2", shards=[value, 0])
wrong("ids_of_shard", "shards must have an entry", shards=[0])
wrong("ids_of_shard", "bag_sizes: 0", bag_sizes=[0, 1])
wrong("ids_of_shard", "bag_sizes must have an entry", bag_sizes=[2])
for value in (2**62, MIN):
    wrong("ids_of_shard", f"bag_sizes: {value}", bag_sizes=[value, 1])
wrong("ids_of_shard", "0 weighted features", weighted=[False, False])
wrong("ids_of_shard", "weighted must have an entry", weighted=[])
wrong("ids_of_shard", "1 weighted features for W = 0", W=0)
wrong("ids_of_shard", "bag_sizes must have an entry", M=1)
for value in (f32([1, 2, 3, 4]), zeros(2**60, 0)):
    wrong("ids_of_shard", "a matrix of shape", matrix=value)
for value in (0, MIN):
    wrong("hash", "minimum", buckets=value)
for value in ([1], [1, 2, 3, 4]):
    wrong("hash", "numbers of salts for 1 rows", salts=value)
wrong("hash", "2 rows of an id without salts", N=2)


def of_table(message, error=INVALID, **changes):
    wrong("key_table_with_spill", message, error, **changes)


for value in ([1.0, 2.0], []):
    of_table("probability must be a scalar", probability=np.array(value))
for value in (-0.5, 1.5, np.nan):
    of_table("is not from 0 to 1", probability=np.float64(value))
for value in (2**47, 2**60, 2**62, MAX):
    of_table("no room for", capacity=value, max_capacity=MAX)
    of_table("no room for", candidates=value, threshold=2)
of_table("max_capacity 1 is less", max_capacity=1)
of_table("floor 3 is above max_capacity 2", floor=3)
of_table("half_life 5 doesn't fit the policy lru", half_life=5)
of_table("half_life 0 doesn't fit the policy decay", policy="decay")
for name in ("capacity", "candidates", "max_capacity", "floor"):
    of_table("minimum", **{name: 0})
    of_table("minimum", **{name: MIN})
for name in ("threshold", "ttl", "half_life"):
    of_table("minimum", **{name: -1})
of_table("mru", policy="mru")
for value in ([0], [-8], [16, 0], [2**30 + 1], [2**30, 1], [MAX, MAX], [MIN]):
    of_table("spill_parts must be positive", spill_parts=value)
for value in (0, -1, MIN):
    of_table("must have a folder and bytes", spill_bytes=value)
of_table("must have a folder and bytes", spill_folder="")
for value in ("/nowhere/at all", __file__, f"/{'x' * 300}"):
    of_table(
        "the table: its spill in .* no file can be made",
        EXHAUSTED,
        spill_folder=value,
    )

ON_TABLES = [
    *("find", "check", "publish", "reserve", "commit_with_spill", "export"),
    *("replace_with_spill", "remove", "score", "take_removed", "info"),
    *("find_spilled", "read_ahead_spilled"),
    *("lookup_spilled", "fetch_spilled", "read_spilled", "write_spilled"),
]
for name in [*ON_TABLES, "read_ahead", "pages_in_memory"]:
    tables = variable() if name in ON_TABLES else key_table
    wrong(name, "type", tables=tables)
    wrong(name, "must be a scalar", tables=stacked(2))
    wrong(name, "must be a scalar|Empty resource", tables=stacked(0))
for name in (
    "export",
    "replace_with_spill",
    "remove",
    "score",
    "take_removed",
    "read_spilled",
):
    wrong(name, "It takes one table", tables=both)
message = "The table has no spill|1 parameters, but 0"
for name in ON_TABLES[11:]:
    wrong(name, message, tables=no_spill)
wrong("commit_with_spill", "the spills have 0", tables=no_spill)
for name in (
    *("find", "reserve", "commit_with_spill", "replace_with_spill"),
    *("remove", "score", "find_spilled"),
):
    for value in (np.int64(1), i64([[1], [3]])):
        wrong(name, "keys must be a vector", keys=value)
for name in ("find", "reserve", "lookup_spilled"):
    wrong(name, "2 keys, but tables of 1", keys=KEYS, table_of=i32([0]))
    for value in (i32([]), i32([0])):
        wrong(
            name,
            "2 keys, but tables of",
            keys=KEYS,
            tables=both,
            table_of=value,
        )
    for value in (2, -1, MAX_32, -(2**31)):
        wrong(
            name,
            f"Table {value}",
            keys=KEYS,
            tables=both,
            table_of=i32([0, value]),
        )
wrong("score", "policy isn't score", tables=no_spill)
for value in (i64([1, 2]), i64([])):
    wrong("score", f"{len(value)} scores for 3 keys", scores=value)
wrong("score", "scores must be a vector", scores=i64([[1, 2, 3]]))
for value in (MIN, -(2**31) - 1):
    wrong(
        "score",
        f"Key 1 has the score {value}, less than",
        scores=i64([0, value, 0]),
    )
wrong("check", "rows must be a vector", rows=i64([[2, 3]]))
wrong("check_old_rows", "Row -1 < 0", rows=i64([2, -1]))
for name in ("check", "publish"):
    for value in (i64([]), i64([1, 2])):
        wrong(name, "one of each table", versions=value)
for name in ("reserve", "commit_with_spill"):
    wrong(name, "1 counts for 2 keys", counts=i64([1]))
    wrong(name, "counts must be a vector", counts=i64([[1, 1]]))
    for value in (i64([]), i64([1]), i64([1, 2, 3])):
        wrong(name, "step must be its number and its time", step=value)
    wrong(name, "step must be a vector", step=np.int64(1))
wrong("commit_with_spill", "1 rows for 2 keys", rows=i64([1]))
for name in ("commit_with_spill", "fetch_spilled"):
    wrong(
        name, "rows of 4 bytes, not 16", memory=with_slot(variable([ROWS, 1]))
    )
    wrong(
        name,
        "rows of 8 bytes, not 16",
        memory=with_slot(variable(dtype=tf.bfloat16)),
    )
    wrong(name, "A table must be", memory=with_slot(variable(dtype=tf.int32)))
    wrong(name, "A table must be", memory=with_slot(variable([])))
    wrong(name, "rows of 1 bytes", memory=with_slot(variable([ROWS], tf.uint8)))
    wrong(name, "type", memory=both)
    wrong(
        name,
        "not initialized",
        "FailedPreconditionError",
        memory=with_slot(uninitialized),
    )
    wrong(name, "nothing", NOT_FOUND, memory=with_slot(destroyed))
    wrong(
        name,
        "variables",
        memory=lambda right: right.arguments["memory"] + variable()(right),
    )
    wrong(name, "lacks|No row 3", memory=with_slot(variable([3, DIM])))
    wrong(
        name,
        "variables|missing",
        memory=lambda right: [tf.stack(right.arguments["memory"])] * 2,
    )
wrong("commit_with_spill", "is missing", memory=[])
wrong("commit_with_spill", "is missing", memory=variable())

for value in (i64([]), i64([1, 1])):
    wrong("replace_with_spill", "in_memory must be", in_memory=value)
for value in (-1, 3, MIN, MAX):
    wrong("replace_with_spill", "of 2 keys", in_memory=i64([value]))
for name in ("keys", "last_used", "candidate_keys", "candidate_last_seen"):
    wrong("replace_with_spill", r"\d .* for \d .*keys", **{name: i64([1])})
for name in ("frequency", "candidate_frequency"):
    for value in (-1, MIN):
        values = {name: i64([1, value])}
        wrong("replace_with_spill", f"was used {value} times", **values)
for value in (0, 1, 2):
    # In the spill, in both, in memory.
    wrong(
        "replace_with_spill",
        "Key 7 is among the keys twice",
        keys=i64([7, 7]),
        in_memory=i64([value]),
    )
# One of them is in the spill already.
wrong(
    "replace_with_spill",
    "Key 1 is among the keys twice",
    keys=i64([1, 1]),
    in_memory=i64([0]),
)
wrong(
    "replace_with_spill",
    "Key 5 is among the keys twice",
    tables=no_spill,
    candidate_keys=i64([5, 5]),
    in_memory=i64([2]),
)
wrong("replace_with_spill", "no room for 2 keys", tables=no_spill)
wrong(
    "replace_with_spill",
    "no room for 3 keys",
    **dict.fromkeys(("keys", "frequency", "last_used"), i64([1, 2, 3])),
    in_memory=i64([3]),
)

for value in (1, 2, 3, 8, 2**28):
    message = "A row of a spill has 16 bytes"
    wrong("lookup_spilled", message, dim=value, parameters=[])
for value in (2**29, 2**61, 2**62, MAX):
    wrong("lookup_spilled", "dim is", dim=value, parameters=[])
wrong("lookup_spilled", "minimum", dim=0)
message = "parameters have rows of|A table must be"
for value in (
    variable([ROWS, 2]),
    variable(dtype=tf.bfloat16),
    variable([ROWS, 16], tf.int8),
    variable(dtype=tf.uint8),
    variable([ROWS]),
):
    wrong("lookup_spilled", message, parameters=value)
wrong("lookup_spilled", message, T=tf.bfloat16, dim=8)
wrong(
    "lookup_spilled",
    "2 parameters, but",
    parameters=lambda right: right.arguments["parameters"] * 2,
)
wrong("fetch_spilled", "rows for 2 keys", rows=i64([2]))
for value in (ROWS, -1, 2**40, MIN, MAX):
    wrong("fetch_spilled", f"No row {value}", rows=i64([2, value]))
for name in ("read_spilled", "write_spilled"):
    wrong(name, "rows must be a vector", rows=i64([[SPILLED + 1]]))
    for value in (0, SPILLED, SPILLED - 1, SPILLED + 2**40, MIN, MAX):
        rows = i64([SPILLED + 1, value])
        wrong(name, f"has no row {value}", rows=rows)
    for value in (1, 2, MAX):
        wrong(name, "no such part", part=value)
    # The last two have as many bytes, but for an overflow or too many axes.
    for value in ([], [3], [0], [2**62], [2**62 + DIM], [2**31, 2**31]):
        wrong(name, "no such part", row=value)
    wrong(name, "dimensions", row=[1] * 253 + [DIM])
    wrong(name, "not fully defined", row=[None])
for value in ([1, DIM], [2, 2], [2 * DIM], [DIM, 2], [2, 2, 2]):
    wrong(
        "write_spilled",
        "values of shape",
        values=np.ones(value, np.float32),
    )

wrong("write_keys", "keys must be a vector", keys=i64([[5, 6, 7]]))
for value in (i64([3]), np.zeros([2**40, 0], np.int64), i64([[]])):
    wrong("write_keys", "counts of shape", counts=value)
for value in (-1, 2**40, MIN, MAX):
    wrong("write_keys", "keys for shard 1", counts=i64([[1, 1], [1, value]]))
for value in (i32([]), i32([1, 1])):
    wrong("write_keys", "capacity must be a scalar", capacity=value)
wrong("write_keys", "capacity < 0", capacity=np.int32(-1))
wrong("write_keys", f"more than {MAX_32}", capacity=np.int32(MAX_32))
wrong("read_keys", "messages of shape", message=i64([1, 2]))
wrong("read_keys", "minimum", tables=0)
for value in (6, MAX):
    wrong("read_keys", "messages of shape", tables=value)
for value in (-1, 4, 2**62, MIN, MAX):
    wrong("read_keys", "too many keys", message=i64([[value, value, 1, 2, 3]]))

for value in ([], [2**40, 2**22], [2**62 + ROWS * DIM]):
    wrong("mapped_rows", "No file has rows|invalid|[Oo]verflow", shape=value)
wrong("mapped_rows", "not fully defined", shape=[None, 4])
for value in ([], ["a", "b"]):
    wrong("mapped_rows", "path must be a scalar", path=np.array(value, "S"))
wrong("mapped_rows", "character 0", path=beside("rows\0"))
for shared in (False, True):
    wrong("mapped_rows", "not the 96", shape=[6, 4], shared=shared)
    # A link to what is written to is another error, of no argument.
    for value in ("pipe", "/dev/null", *([] if shared else ["link"])):
        wrong(
            "mapped_rows",
            "is no regular file",
            path=beside(value),
            shape=[0, 4],
            shared=shared,
        )
wrong("mapped_rows", "no regular file", path=beside("."))
for value in ("rows", "pipe"):
    wrong(
        "mapped_rows",
        "not the 96",
        path=beside(value, "file://"),
        shape=[6, 4],
    )
for name in ("read_ahead", "pages_in_memory"):
    wrong(name, "ids must be a vector", ids=i64([[1]]))
    wrong(name, "nothing", NOT_FOUND, tables=destroyed)
for value in (i64([-1]), i64([2**40, 2**40]), i64([2, MIN])):
    wrong("fill", "must be >= 0|would have more than", dims=value)
wrong("fill", "must be a vector", dims=np.int64(2))
wrong("fill", "value must be a scalar", value=np.ones(1, np.float32))
