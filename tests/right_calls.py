"""Right calls of all of the kernels' operations, and checks of their results.

`CALLS` has functions by name: the operation's, or that and what is special.
Each makes new variables and tables, and returns a `Call`.
"""

import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.storage.key_rules import FIRST_ROW, SPILLED

PREFIX = "tfrs_embed_"


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
        operation: the name of its Python function.
        arguments: of this function.
        check: fails unless it is given the right results.
        state: the variables that the call may read or write.
        keys: the tables of keys that it may, too.
    """

    operation: str
    arguments: dict[str, Any]
    check: Callable[[Any], None]
    state: Sequence[tf.Variable] = ()
    keys: "Keys | None" = None

    def run(self, changes=None):
        """Returns the results of the call with some other arguments."""
        arguments = {**self.arguments, **(changes or {})}
        inputs = inputs_of(self.operation, arguments)
        return getattr(module(), self.operation)(**arguments | inputs)

    def run_in_graph(self, changes=None, shapes=False):
        """Like `run`; the shapes of inputs are known or not."""
        arguments = {**self.arguments, **(changes or {})}
        inputs = inputs_of(self.operation, arguments)
        flat = tf.nest.flatten(inputs)

        @tf.function(
            autograph=False,
            input_signature=[
                tf.TensorSpec(t.shape if shapes else None, t.dtype)
                for t in flat
            ],
        )
        def call(*tensors):
            given = tf.nest.pack_sequence_as(inputs, tensors)
            result = getattr(module(), self.operation)(**arguments | given)
            return () if isinstance(result, tf.Operation) else result

        return call(*flat)

    def run_right(self):
        """Calls as it should be; fails unless the results are right."""
        self.check(self.run())

    def read_state(self):
        """Returns all numbers that the call may change."""
        found = [v.read_value() for v in self.state]
        found += self.keys.read() if self.keys else []
        return [t.numpy() for t in tf.nest.flatten(found)]


def module():
    return kernels._load()[1]


def registered():
    """The names of all operations of the loaded library."""
    return sorted(
        name
        for name in vars(module())
        if name.startswith(PREFIX) and not name.endswith("_eager_fallback")
    )


@functools.cache
def definition(operation):
    """An operation's OpDef."""
    module()  # Its library defines the operations.
    words = operation.split("_")
    name = "".join(word.capitalize() for word in words)
    with tf.Graph().as_default() as graph:
        return graph.op_def_for_type(name)


def inputs_of(operation, arguments):
    """Returns the inputs among a function's arguments, as tensors."""

    def convert(arg, value):
        return tf.convert_to_tensor(value, arg.type or None)

    return {
        arg.name: [convert(arg, value) for value in arguments[arg.name]]
        if arg.number_attr
        else convert(arg, arguments[arg.name])
        for arg in definition(operation).input_arg
    }


CALLS: dict[str, Callable[[], Call]] = {}


def right_call(function):
    CALLS[function.__name__] = function
    return function


def equal(*expected):
    """Returns a check that results are these numbers, but for rounding."""

    def check(found):
        found = [found] if isinstance(found, tf.Tensor) else list(found)
        found = tf.nest.flatten(found)
        assert len(found) == len(expected), (len(found), len(expected))
        for mine, right in zip(found, expected, strict=True):
            if mine.dtype == tf.bfloat16:
                mine = tf.cast(mine, tf.float32)
            assert mine.shape == np.shape(right), (mine, right)
            np.testing.assert_allclose(mine, right, rtol=1e-6)

    return check


def returns_nothing(found):
    assert found in (None, ())


def call(operation, check, state=(), **arguments):
    return Call(PREFIX + operation, arguments, check, state)


i32, i64, f32 = (
    functools.partial(np.array, dtype=d) for d in ("int32", "int64", "float32")
)

ROWS, DIM = 5, 4
TABLE = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)


def features():
    """Two features of a table: two ragged bags, and two bags of two ids."""
    return {
        "ids": [i64([0, 4, 2]), i64([1, 3, 2, 0])],
        "bags": [i32([0, 1, 3])],
        "weights": [f32([1, 2, 3])],
        "scales": [f32([1, 0.5])],
        "counts": i32([2, 2]),
        "table_of": [0, 0],
        "has_bag": [True, False],
        "has_weights": [True, False],
        "has_scale": [True, False],
        "splits": [True, False],
        "per_bag": [1, 2],
    }


def vectors(table=TABLE):
    """The features' vectors."""
    return [
        np.stack([table[0], table[4] + 1.5 * table[2]]),
        np.stack([table[1] + table[3], table[2] + table[0]]),
    ]


def sums():
    """The sums of the features' gradients, which are those of `gradients`."""
    found = np.zeros_like(TABLE)
    for row, gradient in [
        (0, 1),
        (4, 2),
        (2, 3),
        (1, 3),
        (3, 3),
        (2, 4),
        (0, 4),
    ]:
        found[row] += gradient
    return found


def gradients():
    """A number for each bag; the second is halved by its scale."""
    return [
        np.outer(g, np.ones(DIM)).astype(np.float32) for g in ([1, 2], [3, 4])
    ]


def lookup_arguments(variables, dim=DIM, **other):
    return {
        "tables": [v.handle for v in variables],
        "places": [*range(len(variables))],
        "dims": [dim, dim],
        "rows": [ROWS, ROWS],
        "names": ["the first", "the second"],
        "T": tf.float32,
        **other,
        **features(),
    }


@right_call
def lookup():
    state = [tf.Variable(TABLE)]
    arguments = lookup_arguments(state, shapes=[[2, DIM], [None, 1, DIM]])
    first, second = vectors()
    check = equal(first, second[:, None])
    return call("lookup", check, state, **arguments)


@right_call
def lookup_of_bags():
    """The ids' bags are given, and nothing of what may be left out."""
    state = [tf.Variable(TABLE)]
    arguments = lookup_arguments(state, rows=[], names=[], places=[])
    arguments.update(bags=[i32([0, 1, 1])], splits=[], per_bag=[])
    arguments.update(ids=[i32([0, 4, 2]), i32([1, 3])], counts=i32([2, 2]))
    return call(
        "lookup", equal(vectors()[0], TABLE[[1, 3]]), state, **arguments
    )


def integers(dtype, width):
    byte = 1 if dtype == np.int8 else 0x99
    rows = np.full([ROWS, width], byte, dtype)
    return [tf.Variable(rows), tf.Variable(TABLE[:, :1])]


@right_call
def lookup_of_bytes():
    state = integers(np.int8, DIM)
    expected = vectors(TABLE[:, :1] * np.ones([1, DIM], np.float32))
    arguments = lookup_arguments(state, scale_of=[1])
    return call("lookup", equal(*expected), state, **arguments)


@right_call
def lookup_of_half_bytes():
    state = integers(np.uint8, 2)
    expected = vectors(TABLE[:, :1] * np.ones([1, 3], np.float32))
    arguments = lookup_arguments(state, 3, scale_of=[1])
    return call("lookup", equal(*expected), state, **arguments)


@right_call
def lookup_concat():
    state = [tf.Variable(TABLE)]
    other = f32([[7, 8, 9], [4, 5, 6]])
    arguments = lookup_arguments(state, others=[other], order=[1, 2, 0])
    del arguments["T"]  # It is that of the others.
    first, second = vectors()
    expected = np.concatenate([second, other, first], 1)
    return call("lookup_concat", equal(expected), state, **arguments)


@right_call
def read_rows():
    state = [tf.Variable(TABLE), tf.Variable(TABLE[:2]), tf.Variable(-TABLE)]
    return call(
        "read_rows",
        equal([TABLE[4], -TABLE[0], TABLE[0], TABLE[1], TABLE[0]]),
        state,
        tables=[v.handle for v in state],
        rows=i64([4, 7, 5, 6, 0]),
        T=tf.float32,
        dim=DIM,
        places=[0, 1, 2],
    )


@right_call
def combine():
    return call(
        "combine",
        equal(*vectors()),
        rows=TABLE,
        dims=[DIM, DIM],
        shapes=[[2, DIM], [2, DIM]],
        **features(),
    )


@right_call
def sum_gradients_by_row():
    return call(
        "sum_gradients_by_row",
        equal(sums()),
        num_rows=np.int32(ROWS),
        gradients=gradients(),
        T=tf.float32,
        dim=DIM,
        **features(),
    )


def update_of(rule, slots, new_slots, new_rows, dtype=tf.float32, **other):
    variables = [tf.Variable(tf.cast(TABLE, dtype))]
    variables += [tf.Variable(slot) for slot in slots]
    marks = tf.Variable(np.zeros(ROWS, np.uint8))

    def check(_):
        results = [v.read_value() for v in [*variables, marks]]
        equal(new_rows, *new_slots, np.full(ROWS, 3))(results)

    arguments = {
        "states": [v.handle for v in [*variables, marks]],
        "rates": f32([0.5]),
        "decays": f32([]),
        "mark": np.uint8(3),
        "step": np.int64(11),
        "gradients": [np.concatenate(gradients(), 1)],
        "columns": i32([0, DIM]),
        "places": [],
        "gradient_of": [0, 0],
        "rules": [rule],
        "settings": [0.0] * 6,
        "clip_lows": [-np.inf],
        "clip_highs": [np.inf],
        "row_norms": [np.inf],
        "max_norms": [0.0],
        "marked": [True],
        "stochastic": [False],
        "seeds": [7],
        "first_rows": [0],
        "row_strides": [1],
        "first_columns": [0],
        **features(),
        **other,
    }
    return call("update", check, [*variables, marks], **arguments)


@right_call
def update():
    return update_of(1, [], [], TABLE - 0.5 * sums())


@right_call
def update_of_two_bytes():
    # With these numbers nothing is rounded.
    rows = TABLE - 0.5 * sums()
    return update_of(1, [], [], rows, tf.bfloat16, stochastic=[True])


@right_call
def update_with_slot():
    slot, square = np.zeros_like(TABLE), sums() ** 2
    return update_of(2, [slot], [square], TABLE - 0.5)


@right_call
def update_joint():
    """Two tables' rows, one after the other, and bags without a row."""
    variables = [tf.Variable(TABLE), tf.Variable(-TABLE)]
    steps = np.zeros([2 * ROWS, DIM], np.float32)
    # Row 4 of the first table, and rows 0 and 2 of the second one.
    steps[[4, 5, 7]] = np.float32([[1], [2 + 5], [4]]) * 0.5

    def check(_):
        expected = np.concatenate([TABLE, -TABLE]) - steps
        equal(*np.split(expected, 2))([v.read_value() for v in variables])

    arguments = update().arguments | {
        "states": [v.handle for v in variables],
        "rates": f32([0.5, 0.5]),
        "gradients": [np.outer(range(6), np.ones(DIM)).astype(np.float32)],
        "columns": i32([0]),
        "gradient_of": [0],
        "ids": [i64([4, 5, 7, 5])],
        "bags": [i32([1, 2, 4, 5])],
        "weights": [],
        "scales": [],
        "counts": i32([6]),
        "table_of": [0],
        "has_bag": [True],
        "has_weights": [False],
        "has_scale": [False],
        "splits": [False],
        "per_bag": [1],
        "spans": [2],
    }
    for name in (
        *("rules", "settings", "clip_lows", "clip_highs", "row_norms"),
        *("max_norms", "stochastic", "seeds", "first_rows", "row_strides"),
        "first_columns",
    ):
        arguments[name] = arguments[name] * 2
    arguments["marked"] = [False, False]
    return call("update", check, variables, **arguments)


@right_call
def update_with_slot_by_row():
    slot, square = np.zeros(ROWS, np.float32), sums()[:, 0] ** 2
    return update_of(8, [slot], [square], TABLE - 0.5)


@right_call
def inside():
    ids = [i32([0, 4]), i32([0, 5])]
    return call("inside", equal([True, False]), ids=ids, rows=[5, 5])


@right_call
def require():
    ids = [i64([[0], [4]]), i64([1])]
    check = equal([0, 4], [1])
    return call("require", check, ids=ids, rows=[5, 2], names=["a", "b"])


@right_call
def route():
    return call(
        "route",
        equal([1, 0, 1, 2], [2, 0, 1], [0, 1, 1], [[0, 1], [1, 1]]),
        keys=i64([1, 4, 1, 3]),
        table_of=i32([0, 1, 0, 1]),
        world=2,
        tables=2,
    )


@right_call
def copy_runs():
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    expected = np.zeros([2, 3, 2], np.float32)
    expected[0, :2], expected[1, :1] = values[1:3], values[4:]
    return call(
        "copy_runs",
        equal(expected),
        values=values,
        starts=i32([1, 4]),
        sizes=i32([2, 1]),
        capacity=np.int32(3),
        padded=True,
    )


@right_call
def copy_runs_unpadded():
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    arguments = copy_runs().arguments | {"capacity": 0, "padded": False}
    return call("copy_runs", equal(values[[1, 2, 4]]), **arguments)


@right_call
def read_splits():
    return call(
        "read_splits",
        equal([0, 2, 5, 7, 0, 1, 2]),
        words=i32([2, 3, 1]).view(np.float32),
        starts=i32([[0, 9], [2, 9]]),
        has_lengths=i32([[1, 0], [1, 0]]),
        counts=i32([[2, 1], [1, 1]]),
        numbers=i32([[5, 2], [1, 1]]),
    )


@right_call
def ids_of_shard():
    ids = i32([[2, -1, 3], [4, 6, 5]]).view(np.float32)
    weights = f32([[0.5], [2]])
    return call(
        "ids_of_shard",
        equal([1, 2, 3], [1, 2], [0, 1, 3], [0, 1, 2], weights[:, 0]),
        matrix=np.concatenate([ids, weights], 1),
        bag_sizes=[2, 1],
        weighted=[False, True],
        M=2,
        W=1,
        world=2,
        shards=[0, 1],
    )


@right_call
def ids_of_shard_by_division():
    return call(
        "ids_of_shard",
        equal([1, 2], [0, 2]),
        matrix=i32([[3, 6, 7]]).view(np.float32),
        bag_sizes=[3],
        weighted=[False],
        M=1,
        W=0,
        world=3,
        shards=[0],
    )


@right_call
def hash():
    ids = i64([5, -17])
    right = tf.strings.to_hash_bucket_fast(tf.strings.as_string(ids), 10)
    return call("hash", equal(right), ids=ids, N=1, buckets=10, salts=[])


@right_call
def hash_with_salts():
    ids = np.array(["a", "bc"])
    right = [
        tf.strings.to_hash_bucket_strong(ids, 10, salt)
        for salt in ([1, 2], [3, 4])
    ]
    salts = [1, 2, 3, 4]
    return call("hash", equal(*right), ids=ids, N=2, buckets=10, salts=salts)


@right_call
def loops():
    def check(name):
        assert name.numpy() in (b"baseline", b"avx2", b"avx512")

    return call("loops", check)


@right_call
def fill():
    check = equal(np.full([2, 3], 0.5))
    return call("fill", check, dims=i64([2, 3]), value=np.float32(0.5))


@right_call
def write_keys():
    return call(
        "write_keys",
        equal([[1, 1, 5, 6, 0], [0, 1, 7, 0, 0]], [0, 1, 3]),
        keys=i64([5, 6, 7]),
        counts=i64([[1, 1], [0, 1]]),
        capacity=np.int32(3),
    )


@right_call
def read_keys():
    return call(
        "read_keys",
        equal([5, 6, 0, 7, 0, 0], [0, 1, 0, 1, 0, 0], [0, 1, 3]),
        message=i64([[1, 1, 5, 6, 0], [0, 1, 7, 0, 0]]),
        tables=2,
    )


class Rows:
    """A file of rows, a pipe and a link, in a folder that goes with this."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "rows"
        TABLE.tofile(self.path)
        os.mkfifo(self.path.with_name("pipe"))
        self.path.with_name("link").symlink_to("pipe")


@right_call
def mapped_rows():
    rows = Rows()

    def check(found):
        assert rows.path.exists()
        equal(TABLE)(found)

    path = str(rows.path)
    return call(
        "mapped_rows", check, path=path, T=tf.float32, shape=[ROWS, DIM]
    )


@right_call
def read_ahead():
    state = [tf.Variable(TABLE)]
    handles = [v.handle for v in state]
    ids = i64([0, 4])
    return call("read_ahead", returns_nothing, state, tables=handles, ids=ids)


@right_call
def pages_in_memory():
    state = [tf.Variable(TABLE)]

    def check(found):
        wanted, resident = found.numpy()
        assert wanted == resident <= 2, found

    handles = [v.handle for v in state]
    return call(
        "pages_in_memory", check, state, tables=handles, ids=i64([0, 4])
    )


# Tables of keys for two rows. The second commit's keys take the rows of the
# first one's, which go to the spill if there is one.

OLD, KEYS = i64([1, 2]), i64([10, 20])
ROWS_OF_KEYS = i64([FIRST_ROW, FIRST_ROW + 1])
SPILLED_ROWS = i64([SPILLED + 1, SPILLED + 2])
NO_TABLES, NO_COUNTS = i32([]), i64([])


def key_table_arguments(**other):
    return {
        "probability": np.float64(1),
        "capacity": 2,
        "max_capacity": 2,
        "candidates": 4,
        "threshold": 0,
        "seed": 1,
        "policy": "lru",
        "ttl": 0,
        "half_life": 0,
        "by_time": False,
        "floor": 2,
        "evicts": True,
        **other,
    }


class Keys:
    """A table that has given its rows to `OLD`, then to `KEYS`.

    Beside it is an empty table, which has no spill.
    """

    def __init__(self, spills, **rules):
        self.state, spill = [], {}
        if spills:
            self.folder = tempfile.TemporaryDirectory()
            self.state = [tf.Variable(TABLE), tf.Variable(TABLE[:, 0])]
            spill = {
                "spill_owner": "the table",
                "spill_folder": self.folder.name,
                "spill_parts": [4 * DIM, 4],
                "spill_bytes": 1 << 20,
            }
        arguments = key_table_arguments(**spill, **rules)
        self.handle = module().tfrs_embed_key_table(**arguments)
        self.empty = module().tfrs_embed_key_table(
            **key_table_arguments(threshold=2)
        )
        self.commit(OLD, 0)
        self.version = self.commit(KEYS, 1)

    def commit_arguments(self, keys, step):
        return {
            "tables": [self.handle],
            "keys": keys,
            "table_of": NO_TABLES,
            "counts": NO_COUNTS,
            "rows": np.zeros_like(keys),
            "step": i64([step, 0]),
            "memory": [v.handle for v in self.state],
        }

    def commit(self, keys, step):
        arguments = self.commit_arguments(keys, step)
        found = module().tfrs_embed_key_tables_commit(**arguments)
        module().tfrs_embed_key_tables_publish(
            tables=[self.handle], versions=found.versions
        )
        return found.versions

    def call(self, operation, check, **arguments):
        right = call(
            f"key_tables_{operation}",
            check,
            self.state,
            **{"tables": [self.handle], **arguments},
        )
        return right._replace(keys=self)

    def read(self):
        """Returns all that the tables and the spill have."""
        found = []
        for handle in (self.handle, self.empty):
            found.append(module().tfrs_embed_key_tables_info([handle]))
            for candidates in (False, True):
                found += module().tfrs_embed_key_tables_export(
                    [handle], candidates=candidates
                )
        for part, row in enumerate([[DIM], []] if self.state else []):
            found.append(
                module().tfrs_embed_key_tables_read_spilled(
                    [self.handle],
                    SPILLED_ROWS,
                    part=part,
                    row=row,
                    T=tf.float32,
                )
            )
        return found


@right_call
def key_table():
    def check(handle):
        keys = module().tfrs_embed_key_tables_export([handle], candidates=False)
        equal(*[[]] * 4)(keys)

    return call("key_table", check, **key_table_arguments())


@right_call
def key_table_with_spill():
    folder = tempfile.TemporaryDirectory()
    settings = {
        "spill_owner": "the table",
        "spill_folder": folder.name,
        "spill_parts": [16, 4],
        "spill_bytes": 1 << 20,
    }

    def check(handle):
        found = module().tfrs_embed_key_tables_find_spilled([handle], KEYS)
        assert pathlib.Path(folder.name).exists()
        equal([0, 0])(found)

    return call("key_table", check, **key_table_arguments(**settings))


@right_call
def find():
    check = equal([*ROWS_OF_KEYS, 0], [2])
    keys = i64([*KEYS, 1])
    return Keys(False).call("find", check, keys=keys, table_of=NO_TABLES)


@right_call
def find_in_two_tables():
    both = [Keys(False).handle, Keys(False).handle]
    return Keys(False).call(
        "find",
        equal([FIRST_ROW, FIRST_ROW, 0], [2, 2]),
        tables=both,
        keys=i64([10, 10, 1]),
        table_of=i32([1, 0, 1]),
    )


@right_call
def check():
    keys = Keys(False)
    return keys.call(
        "check",
        equal(ROWS_OF_KEYS, 0),
        rows=ROWS_OF_KEYS,
        table_of=NO_TABLES,
        versions=keys.version,
    )


@right_call
def check_old_rows():
    return Keys(False).call(
        "check",
        equal([0, 0], 2),
        rows=ROWS_OF_KEYS,
        table_of=NO_TABLES,
        versions=i64([1]),
    )


@right_call
def publish():
    keys = Keys(False)
    return keys.call("publish", returns_nothing, versions=keys.version)


@right_call
def reserve():
    return Keys(False).call(
        "reserve",
        equal(
            [FIRST_ROW, FIRST_ROW + 2],
            [30],
            [FIRST_ROW + 2],
            [1],
            [0],
            [5],
            [3],
        ),
        keys=i64([10, 30]),
        table_of=NO_TABLES,
        counts=i64([1, 2]),
        step=i64([2, 0]),
    )


def commit_of(spills):
    keys = Keys(spills)
    right = equal(ROWS_OF_KEYS, [30], [FIRST_ROW + 1], [1], [0], [4], [3])
    return keys.call("commit", right, **keys.commit_arguments(i64([10, 30]), 2))


@right_call
def commit():
    return commit_of(False)


@right_call
def commit_with_spill():
    return commit_of(True)


@right_call
def export():
    check = equal(KEYS, ROWS_OF_KEYS, [1, 1], [1, 1])
    return Keys(False).call("export", check, candidates=False)


@right_call
def replace():
    return Keys(False).call(
        "replace",
        equal(3),
        keys=i64([5, 6]),
        frequency=i64([1, 1]),
        last_used=i64([3, 3]),
        candidate_keys=i64([7]),
        candidate_frequency=i64([1]),
        candidate_last_seen=i64([1]),
        in_memory=i64([2]),
    )


@right_call
def replace_with_spill():
    return Keys(True).call(
        "replace",
        equal(3),
        keys=i64([10, 1]),
        frequency=i64([1, 1]),
        last_used=i64([3, 3]),
        candidate_keys=i64([5, 6]),
        candidate_frequency=i64([1, 1]),
        candidate_last_seen=i64([1, 1]),
        in_memory=i64([1]),
    )


@right_call
def remove():
    check = equal([FIRST_ROW, 0])
    return Keys(False).call("remove", check, keys=i64([10, 7]), evicted=False)


@right_call
def score():
    # In memory, in the spill, and nowhere.
    check = equal([FIRST_ROW, SPILLED + 1, 0])
    return Keys(True, policy="score").call(
        "score", check, keys=i64([10, 1, 7]), scores=i64([5, -5, 3])
    )


@right_call
def take_removed():
    return Keys(False).call("take_removed", equal([], [0]))


@right_call
def info():
    row = [2, 2, 4, 2, 2, 0, 0, 4, 2, 0, 0, 0, 0, 0, 0, 0]
    return Keys(False).call("info", equal([row]))


@right_call
def find_spilled():
    check = equal([*SPILLED_ROWS, 0])
    return Keys(True).call("find_spilled", check, keys=i64([1, 2, 20]))


@right_call
def read_ahead_spilled():
    return Keys(True).call("read_ahead_spilled", returns_nothing, keys=OLD)


@right_call
def lookup_spilled():
    keys = Keys(True)
    return keys.call(
        "lookup_spilled",
        equal([0, FIRST_ROW + 1], [2], [2, 1], [[0] * DIM, TABLE[3], TABLE[2]]),
        keys=i64([1, 20]),
        table_of=NO_TABLES,
        parameters=[keys.state[0].handle],
        dim=DIM,
        T=tf.float32,
    )


@right_call
def fetch_spilled():
    keys = Keys(True)

    def check(_):
        equal(TABLE, TABLE[:, 0])([v.read_value() for v in keys.state])

    memory = [v.handle for v in keys.state]
    return keys.call(
        "fetch_spilled", check, keys=OLD, rows=ROWS_OF_KEYS, memory=memory
    )


ALL_OF_A_ROW = {"part": 0, "row": [DIM], "T": tf.float32}


@right_call
def read_spilled():
    check = equal(TABLE[2:4])
    arguments = {"rows": SPILLED_ROWS, **ALL_OF_A_ROW}
    return Keys(True).call("read_spilled", check, **arguments)


@right_call
def write_spilled():
    keys = Keys(True)

    def check(_):
        found = module().tfrs_embed_key_tables_read_spilled(
            [keys.handle], SPILLED_ROWS, **ALL_OF_A_ROW
        )
        equal(-TABLE[:2])(found)

    arguments = {"part": 0, "row": [DIM]}
    arguments.update(rows=SPILLED_ROWS, values=-TABLE[:2])
    return keys.call("write_spilled", check, **arguments)
