"""Calls of the kernels' operations with inputs and attributes drawn at random.

Each begins as a right call of `right_calls.py`, of which a few arguments
are changed. It must succeed or raise one of `ERRORS`. An error must leave all
state as it was, and a right call must give the right numbers afterwards.
"""

import numpy as np
import tensorflow as tf

import right_calls as calls

ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.ResourceExhaustedError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
    # TensorFlow's own, before an operation is made.
    ValueError,
    TypeError,
)

NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3]
NUMBERS += [2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
# Of keys, which are in memory from the start. Where the sanitizers' `new` finds
# no memory, it ends the process.
NUMBERS_OF_KEYS = [n for n in NUMBERS if n < 2**31 - 1 or n > 2**60]
FLOATS = [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e30]
# Of no numbers too, which take no memory.
SHAPES = [[0], [1], [2, 2], [0, 3], [0, 2**40], [2**62, 0], [1] * 9, []]
TEXTS = ["", ".", "/nowhere/at all", "/dev/null", "a\0b", "x" * 5000]
TYPES = [tf.float32, tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.string]


def choose(rng, values):
    return values[rng.integers(len(values))]


def zeros(shape, dtype):
    """Zeros of any shape: `tf.zeros` makes numpy arrays, which are smaller."""
    return tf.fill(tf.constant(shape, tf.int64), tf.zeros([], dtype))


def draw_list(rng, values, draw):
    """A list of another length, or with another element."""
    values = list(values)
    kind = rng.integers(4)
    if kind == 0 or not values:
        return values + [draw()] * int(rng.integers(1, 4))
    if kind == 1:
        return values[: rng.integers(len(values))]
    values[rng.integers(len(values))] = draw()
    return values


def draw_shape(rng):
    if rng.random() < 0.2:
        return None
    sizes = [None, 0, 1, 2, 4, 2**31, 2**40, 2**62]
    return [choose(rng, sizes) for _ in range(rng.integers(4))]


def draw_attribute(rng, attr, value, numbers):
    """Another value of an attribute, which may be out of its range."""
    kind = attr.type.removeprefix("list(").removesuffix(")")

    def draw():
        return {
            "int": lambda: choose(rng, numbers),
            "float": lambda: choose(rng, FLOATS),
            "bool": lambda: bool(rng.integers(2)),
            "string": lambda: choose(rng, TEXTS),
            "shape": lambda: draw_shape(rng),
            "type": lambda: choose(rng, TYPES),
        }[kind]()

    return draw_list(rng, value, draw) if attr.type != kind else draw()


def draw_handle(rng):
    """A handle of another variable, or of a table of keys; or none."""
    shape = choose(rng, [[5, 4], [5], [4], [0, 4], [2**62, 0], [5, 4, 1]])
    dtype = choose(rng, [*TYPES[:5], tf.uint8, tf.int8])
    return choose(
        rng,
        [
            lambda: tf.Variable(zeros(shape, dtype)).handle,
            lambda: calls.Keys(bool(rng.integers(2))).handle,
            lambda: tf.reshape(tf.Variable(0.0).handle, [1])[:0],
        ],
    )()


def draw_tensor(rng, value):
    """A tensor of another size, rank or element."""
    if value.dtype == tf.resource:
        return draw_handle(rng)
    dtype, value = value.dtype, np.array(value.numpy())
    kind = rng.integers(5)
    if kind == 0:
        return zeros(choose(rng, SHAPES), dtype)
    if kind == 1:
        return np.expand_dims(value, 0)
    if kind == 2:
        return value.reshape(-1)[: rng.integers(value.size + 1)]
    if kind == 3:
        return np.concatenate([value.reshape(-1)] * 2)
    if not value.size:
        return zeros([3], dtype)
    place = rng.integers(value.size)
    if value.dtype.kind == "f":
        value.reshape(-1)[place] = choose(rng, FLOATS)
    elif value.dtype.kind in "iu":
        limits = np.iinfo(value.dtype)
        fit = [n for n in NUMBERS if limits.min <= n <= limits.max]
        value.reshape(-1)[place] = choose(rng, [*fit, limits.max])
    elif dtype == tf.string:
        return choose(rng, TEXTS)
    return value


def draw_changes(rng, right):
    """Draws other values of one or two of a call's arguments."""
    definition = calls.definition(right.operation)
    inputs = calls.inputs_of(right.operation, right.arguments)
    attrs = {attr.name: attr for attr in definition.attr}
    outputs = {arg.number_attr for arg in definition.output_arg}
    changes = {}
    names = list(right.arguments)
    for name in rng.permutation(names)[: rng.integers(1, 3)].tolist():
        if name in attrs:
            numbers = NUMBERS
            if right.operation == "tfrs_embed_key_table":
                numbers = NUMBERS_OF_KEYS
            if name in outputs:  # TensorFlow makes them before it asks.
                numbers = NUMBERS[:7]
            old = right.arguments[name]
            value = draw_attribute(rng, attrs[name], old, numbers)
        elif isinstance(inputs[name], list):
            given = inputs[name]
            value = [draw_tensor(rng, t) for t in given]
            if rng.random() < 0.5:
                value = [*given, *given][: rng.integers(2 * len(given) + 1)]
        else:
            value = draw_tensor(rng, inputs[name])
        changes[name] = value
    return changes


def shown(value):
    """A value as text, a tensor with its numbers if it has some."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if not isinstance(value, tf.Tensor):
        return repr(value)
    has_numbers = 0 not in value.shape and value.dtype != tf.resource
    numbers = np.array(value.numpy()).tolist() if has_numbers else ""
    return f"{value.dtype.name}{value.shape}{numbers}"


def try_call(rng, log):
    """Makes a call with changes; `log` is told which."""
    name = choose(rng, list(calls.CALLS))
    right = calls.CALLS[name]()
    if not right.arguments:
        return
    before = right.read_state()
    changes = draw_changes(rng, right)
    in_graph = rng.random() < 0.3
    where = " in a graph" if in_graph else ""
    log(f"{name}{where}: { ({k: shown(v) for k, v in changes.items()}) }")
    try:
        if in_graph:
            right.run_in_graph(changes, shapes=bool(rng.integers(2)))
        else:
            right.run(changes)
    except ERRORS:
        for value, old in zip(right.read_state(), before, strict=True):
            np.testing.assert_array_equal(value, old)
    if rng.random() < 0.3:
        calls.CALLS[name]().run_right()
