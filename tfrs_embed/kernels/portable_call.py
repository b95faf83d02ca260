"""Kernels in graphs that may be exported to where there are none.

Such a graph calls a function of TensorFlow's own operations. The call bears the
kernel that does the same as an attribute, which cc/replace_calls.cc puts in its
place when the graph runs where the kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import attr_value_pb2

_ATTRIBUTE = "_tfrs_embed_kernel"


def call(
    stock: Callable[..., list[tf.Tensor]],
    kernel: Callable[..., list[tf.Tensor]],
    inputs: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Calls one of two functions that do the same, in a graph.

    Args:
        stock: makes TensorFlow's operations from the inputs.
        kernel: makes one operation, which takes the inputs in their order, and
            returns its outputs, which have the same dtypes.
        inputs: the inputs.

    Returns:
        The outputs, with the shapes that `stock` gives them.
    """
    specs = [tf.TensorSpec(i.shape, i.dtype) for i in inputs]
    with tf.Graph().as_default():
        placeholders = [
            tf.compat.v1.placeholder(s.dtype, s.shape) for s in specs
        ]
        node = kernel(*placeholders)[0].op.node_def
    # Kept as a call, so that it is still there to be replaced.
    function = tf.function(
        stock,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    outputs = function.get_concrete_function(*specs)(*inputs)
    outputs[0].op._set_attr(
        _ATTRIBUTE, attr_value_pb2.AttrValue(s=node.SerializeToString())
    )
    return outputs
