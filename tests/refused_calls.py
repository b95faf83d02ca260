"""Calls of the kernels' operations that must fail; as a script, what they did.

    python tests/refused_calls.py

A call is a right one of `operation_calls.py` with other arguments. Each is made
in a process that may crash: that is a result like others.
"""

import json
import os
import resource
import signal
import sys

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2
from tensorflow.python.eager import context, execute

import operation_calls as calls
from operation_calls import DIM, ROWS, TABLE, f32, i32, i64

LEAST, MOST = -(2**63), 2**63 - 1
NONE = [i64([]), i64([])]

#: Room for what right calls need, beside what the process has already.
MEMORY = 6 << 30
SECONDS = 120


def variable(*args, **kwargs):
    """A function that makes a variable, as calls can't share one."""
    return lambda: [tf.Variable(*args, **kwargs).handle]


def empty(*shape, **kwargs):
    return lambda: tf.zeros(shape, **kwargs)


def key_table():
    return [calls.Keys(False).handle]


#: Of all operations that have features.
FEATURES = [
    {"table_of": [0, 1]},
    {"table_of": [0, -1]},
    {"table_of": [0]},
    {"has_bag": [True]},
    {"has_bag": [False, False]},
    {"has_weights": [True, True]},
    {"has_scale": []},
    {"splits": [True]},
    {"per_bag": [1]},
    {"per_bag": [1, 0]},
    {"per_bag": [1, LEAST]},
    {"per_bag": [1, MOST]},
    # 4 * 2^62 is 0 in 64 bits.
    {"per_bag": [1, 2**62], "ids": [i64([0, 4, 2]), NONE[1]], "counts": [2, 4]},
    {"counts": [2]},
    {"counts": [2, -2]},
    {"counts": [2, 2**31 - 1]},
    {"bags": []},
    {"bags": [[0, 1]]},
    {"bags": [[0, 2**31 - 1, 3]]},
    {"bags": [[0, -(2**31), 3]]},
    {"bags": [[]], "counts": [-1, 2]},
    {"weights": [f32([1])]},
    {"scales": [f32([1, 1, 1])]},
    {"ids": [i64([0, 4, LEAST]), i64([1, 3, 2, 0])]},
    {"ids": [i64([0, 4, MOST]), i64([1, 3, 2, 0])]},
    {"ids": [i64([0, 4, 5]), i64([1, 3, 2, 0])]},
]

VECTORS = [
    {"dims": [DIM]},
    {"dims": [DIM, -1]},
    {"dims": [DIM, DIM + 1]},
    {"dims": [DIM, 2**31 - 1]},
    {"dims": [DIM, 2**31]},
]

SHAPES = [
    {"shapes": [[2, DIM]]},
    {"shapes": [[2, DIM], [2, DIM + 1]]},
    {"shapes": [[2, DIM], []]},
    {"shapes": [[2, DIM], None]},
    {"shapes": [[2, DIM], [None, None, DIM]]},
    {"shapes": [[2, DIM], [2**40, 2**20]]},
    {"shapes": [[2, DIM], [None, 2**40, 2**40]]},
]

TABLES = [
    {"tables": key_table},
    {"tables": variable(TABLE[0])},
    {"tables": variable(TABLE.astype(np.int16))},
    {"tables": lambda: variable(tf.zeros([0, 2**40]))()},
    {"tables": lambda: variable(tf.zeros([2**62, 0]))()},
    {"places": [1]},
    {"places": [-1]},
    {
        "rows": [LEAST, ROWS],
        "ids": [i64([6, 10**4, 10**11]), i64([0, 0, 0, 0])],
    },
    {"rows": [-1, ROWS]},
    {"rows": [ROWS]},
    {"rows": [2, ROWS]},
    {"names": ["one"]},
]

CHANGES = {
    "lookup": [*FEATURES, *VECTORS, *SHAPES, *TABLES],
    "lookup_of_bags": [
        {"counts": [2**31 - 1, 2]},
        {"bags": [[0, 1]]},
        {"bags": [[-(2**31), 1, 1]]},
        {"bags": [[0, 1, 2**31 - 1]]},
        {"bags": [[1, 0, 1]]},
    ],
    "lookup_of_bytes": [
        {"scale_of": []},
        {"scale_of": [-(2**31)]},
        {"scale_of": [2**31 - 1]},
        {"scale_of": [0]},
    ],
    "lookup_of_half_bytes": [
        {"dims": [3, 4]},
        {"dims": [3, -1]},
        {"dims": [3, 2**31 - 1]},
    ],
    "lookup_concat": [
        *FEATURES,
        *VECTORS,
        *TABLES,
        {"order": []},
        {"order": [2]},
        {"order": [0, 1, 3]},
        {"order": [0, 1, -1]},
        {"others": [np.ones([3, 3], np.float32)]},
        {"others": [np.ones(2, np.float32)]},
        {
            "ids": NONE,
            "bags": [[0]],
            "weights": [f32([])],
            "scales": [f32([])],
            "counts": [0, 0],
            "others": lambda: [tf.zeros([0, 2**62])] * 2,
            "order": [0, 1, 2, 3],
        },
    ],
    "combine": [
        *FEATURES,
        *VECTORS,
        *SHAPES,
        {"rows": TABLE[0]},
        {"rows": empty(0, 2**40)},
        {"rows": empty(2**62, 0)},
    ],
    "spread": [
        *FEATURES,
        {"dim": -1},
        {"dim": LEAST},
        {"dim": 2**31 - 1},
        {"dim": 2**62},
        {"num_rows": -1},
        {"num_rows": 2},
        {"num_rows": [5, 5]},
        {"gradients": [np.ones([3, DIM], np.float32)] * 2},
        {"gradients": lambda: [tf.zeros([0, 2**62])] * 2},
        {
            "num_rows": 2**31 - 1,
            "dim": 2**31 - 1,
            "ids": NONE,
            "bags": [[0]],
            "weights": [f32([])],
            "scales": [f32([])],
            "counts": [0, 0],
            "gradients": lambda: [tf.zeros([0, 2**31 - 1])] * 2,
        },
    ],
    "update": [
        *FEATURES,
        {"table_of": [1, 0]},
        {"rules": [0]},
        {"rules": [9]},
        {"rules": [-1]},
        {"rules": [2**31 - 1]},
        {"rules": []},
        {"settings": [0.0] * 5},
        {"rates": f32([])},
        {"rates": f32([1, 1])},
        {"decays": f32([1, 1])},
        {"step": i64([])},
        {"mark": np.uint8([])},
        {"columns": [0]},
        {"columns": [0, 5]},
        {"columns": [-1, 0]},
        {"columns": [0, 2**31 - 1]},
        {"columns": [0, -(2**31)]},
        {"gradient_of": [0]},
        {"gradient_of": [0, 1]},
        {"gradient_of": [0, -1]},
        {"gradients": lambda: [tf.zeros([0, 2**62])]},
        {"places": [0, 2]},
        {"places": [0]},
        {"places": [0, -(2**31)]},
        {"states": key_table},
        {"states": variable(TABLE)},
        {"states": lambda: [*variable(tf.zeros([2**62, 0]))()] * 2},
        *(
            {name: values}
            for name, values in {
                "clip_lows": [],
                "clip_highs": [0.0, 0.0],
                "row_norms": [],
                "marked": [],
                "stochastic": [],
                "seeds": [],
                "first_rows": [],
                "row_strides": [1, 1],
                "first_columns": [],
            }.items()
        ),
    ],
    "update_of_two_bytes": [{"decays": f32([0.5])}],
    "inside": [{"rows": [5]}, {"rows": [-1, 5]}, {"rows": [LEAST, 5]}],
    "require": [
        {"rows": [5]},
        {"rows": [LEAST, 5]},
        {"rows": [0, 0]},
        {"names": []},
        {"ids": [i64([0]), i64([MOST])]},
    ],
    "route": [
        {"world": 0},
        {"world": 2**62, "tables": 8},
        {"world": 2**31, "tables": 2},
        {"world": MOST, "tables": 1},
        {"tables": 2**27},
        {"tables": MOST},
        {"table_of": [0, 1, 0]},
        {"table_of": [0, 1, 0, 2]},
        {"table_of": [0, 1, 0, -1]},
    ],
    "copy_runs": [
        {"values": np.float32(1)},
        {"values": empty(5, *[1] * 253)},
        {
            "values": np.zeros([0, 8192], np.float32),
            "starts": np.zeros(2**20, np.int32),
            "sizes": np.zeros(2**20, np.int32),
            "capacity": 2**31 - 1,
        },
        {
            "values": empty(0, 2**40, 2**40),
            "starts": [0],
            "sizes": [0],
            "capacity": 1,
        },
        {"starts": [1]},
        {"starts": [1, -1]},
        {"starts": [1, 2**31 - 1]},
        {"sizes": [2, -1]},
        {"sizes": [2, 2]},
        {"sizes": [2, 2**31 - 1]},
        {"capacity": 1},
        {"capacity": -1},
        {"capacity": [3, 3]},
        {"capacity": 2**31 - 1, "values": np.zeros([5, 2**20], np.float32)},
    ],
    "read_splits": [
        {"starts": [0, 9]},
        {"starts": [[0, 9], [-1, 9]]},
        {"starts": [[0, 9], [2**31 - 1, 9]]},
        {"counts": [[2, 1], [-1, 1]]},
        {"counts": [[2**31 - 1, 1], [1, 1]]},
        {"counts": [[2, 0], [1, 1]]},
        {"numbers": [[5, 2], [-1, 1]]},
        {"numbers": [[5, 2**31 - 1], [1, 1]]},
        {"words": i32([2, -3, 1]).view(np.float32)},
        {
            name: empty(2**60, 0, dtype=tf.int32)
            for name in ("starts", "has_lengths", "counts", "numbers")
        },
    ],
    "ids_of_shard": [
        {"world": 0},
        {"world": 3 << 32},
        {"world": 2**31},
        {"shards": [2, 0]},
        {"shards": [-1, 0]},
        {"shards": [0]},
        {"bag_sizes": [0, 1]},
        {"bag_sizes": [2]},
        {"bag_sizes": [2**62, 1]},
        {"bag_sizes": [LEAST, 1]},
        {"wide": [False]},
        {"wide": [True, False]},
        {"weighted": [False, False]},
        {"weighted": []},
        {"W": 0},
        {"M": 1},
        {"matrix": f32([1, 2, 3, 4])},
        {"matrix": empty(2**60, 0)},
    ],
    "hash": [
        {"buckets": 0},
        {"buckets": LEAST},
        {"salts": [1]},
        {"salts": [1, 2, 3, 4]},
        {"N": 2},
    ],
}

CASES = {
    f"{name}[{number}]": (name, changes)
    for name, each in CHANGES.items()
    for number, changes in enumerate(each)
}


# Graphs that TensorFlow's own checks let pass: the library's passes see them.


def run_changed(function, inputs, change):
    """Runs a traced function whose definition was changed."""
    outer = tf.function(lambda *given: function(*given), autograph=False)
    definition = outer.get_concrete_function(*inputs).function_def
    definition = type(definition).FromString(definition.SerializeToString())
    change(definition)
    definition.signature.name += "_changed"
    context.context().add_function_def(definition)
    outputs = len(definition.signature.output_arg)
    name = definition.signature.name.encode()
    return execute.execute(name, outputs, inputs, (), context.context())


def nodes(definition, operation):
    found = [n for n in definition.node_def if n.op == operation]
    assert found, f"no {operation}"
    return found


def look_up(handle, **changes):
    other = {"T": tf.float32, "dims": [DIM, DIM], **calls.features(), **changes}
    return calls.module().tfrs_embed_lookup(tables=[handle], **other)


def axis_of_another_type():
    """The axis of a concatenation of vectors says int32, and is float32."""
    wrong = tf.make_tensor_proto(np.float32(1))

    def change(definition):
        axes = [
            node
            for node in nodes(definition, "Const")
            if node.attr["value"].tensor.dtype == tf.int32.as_datatype_enum
        ]
        axes[-1].attr["value"].tensor.CopyFrom(wrong)

    shapes = [[2, DIM], [2, DIM]]
    run_changed(
        lambda handle: tf.concat(look_up(handle, shapes=shapes), 1),
        [tf.Variable(TABLE).handle],
        change,
    )


def checks_in_a_row(*limits):
    """Several checks of the ids of a lookup, of which one fails."""

    def check(handle, *ids):
        for limit in limits:
            ids = calls.module().tfrs_embed_require(
                ids=ids, rows=[limit, limit], names=["a", "b"]
            )
        return look_up(handle, ids=ids)

    inputs = [
        tf.Variable(TABLE).handle,
        *map(tf.constant, calls.features()["ids"]),
    ]
    tf.function(check, autograph=False)(*inputs)


def call_with_kernel(**kernel):
    """Calls a function that adds 1, with a kernel's node as an attribute."""
    adds = tf.function(lambda x: x + 1, autograph=False)

    def change(definition):
        [node] = nodes(definition, "PartitionedCall")
        attribute = node.attr["_tfrs_embed_kernel"]
        attribute.CopyFrom(attr_value_pb2.AttrValue(**kernel))

    [found] = run_changed(adds, [tf.constant([1, 2])], change)
    np.testing.assert_array_equal(found, [2, 3])


def call_with_node(operation, **attributes):
    node = node_def_pb2.NodeDef(op=operation)
    for name, value in attributes.items():
        node.attr[name].CopyFrom(attr_value_pb2.AttrValue(**value))
    call_with_kernel(s=node.SerializeToString())


INT32 = {"type": tf.int32.as_datatype_enum}

#: Graphs, and the beginnings of what they may do.
GRAPHS = {
    "axis": (axis_of_another_type, "InvalidArgumentError"),
    "checks": (
        lambda: checks_in_a_row(5, 2),
        "InvalidArgumentError: .*a: id 4",
    ),
    "checks back": (
        lambda: checks_in_a_row(2, 5),
        "InvalidArgumentError: .*a: id 4",
    ),
    # The call stays as it is, if the node can't be the kernel's.
    "another operation": (lambda: call_with_node("Neg", T=INT32), "accepted"),
    "none": (lambda: call_with_node("TfrsEmbedNone"), "accepted"),
    "no attributes": (lambda: call_with_node("TfrsEmbedRequire"), "accepted"),
    "a negative number": (
        lambda: call_with_node("TfrsEmbedRequire", M={"i": -1}, Tids=INT32),
        "accepted",
    ),
    "too many": (
        lambda: call_with_node("TfrsEmbedRequire", M={"i": 2}, Tids=INT32),
        "accepted",
    ),
    "no limits": (
        lambda: call_with_node("TfrsEmbedRequire", M={"i": 1}, Tids=INT32),
        "accepted|InvalidArgumentError",
    ),
    "bytes": (lambda: call_with_kernel(s=b"\xff\xff"), "accepted"),
    "a number": (lambda: call_with_kernel(i=3), "accepted"),
}


def made(value):
    return value() if callable(value) else value


def outcome(function):
    """What a call did, in words."""
    try:
        function()
    except (tf.errors.OpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def make(name):
    """Makes a wrong call; eagerly, in a graph, and then as it should be."""
    if name in GRAPHS:
        results = [outcome(GRAPHS[name][0])]
        calls.lookup().run_right()
        return results
    call, changes = CASES[name]
    results = []
    for in_graph in (False, True):
        right = calls.CALLS[call]()
        before = [v.numpy() for v in right.state]
        wrong = {key: made(value) for key, value in changes.items()}
        run = right.run_in_graph if in_graph else right.run
        results.append(outcome(lambda run=run, wrong=wrong: run(wrong)))
        for mine, old in zip(right.state, before, strict=True):
            np.testing.assert_array_equal(mine, old)
        right.run_right()
    return results


def _make_all(names, pipe):
    """Writes a line for each call, up to the first that ends the process."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in names:
        signal.alarm(SECONDS)
        try:
            found = make(name)
        except Exception as error:
            found = [f"then {type(error).__name__}: {error}"]
        os.write(pipe, json.dumps([name, found]).encode() + b"\n")


def make_all(names):
    """What the calls did, by name."""
    found, rest = {}, list(names)
    while rest:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _make_all(rest, write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        with os.fdopen(read) as lines:
            found.update(json.loads(line) for line in lines)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        rest = [name for name in rest if name not in found]
        if rest:
            end = signal.Signals(-code).name if code < 0 else f"exit {code}"
            found[rest.pop(0)] = [f"ended by {end}"]
    return found


if __name__ == "__main__":
    print(json.dumps(make_all(sys.argv[1:] or [*CASES, *GRAPHS])))
