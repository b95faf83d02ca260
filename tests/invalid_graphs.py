"""Graphs that TensorFlow's own checks let pass, for the kernels' passes.

A saved model may have them: a pass leaves a graph that isn't one of its own.
"""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2
from tensorflow.python.eager import context, execute

import right_calls as calls
from right_calls import DIM, TABLE


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

#: Graphs, and what they do: a regular expression of its beginning.
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
