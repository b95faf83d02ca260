"""Kernels in graphs that may be exported to machines without kernels.

The graph calls a function of TensorFlow's operations. An attribute of the call
contains the equal kernel, with which cc/replace_calls.cc replaces the call when
the graph runs where there are kernels. Elsewhere TensorFlow puts the function's
operations in place of the call: running a function takes longer.
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
    """Calls `stock` in a graph, or `kernel` where there are kernels.

    `stock` makes TensorFlow's operations from the inputs, and decides the
    outputs' shapes. `kernel` makes one operation with the same inputs, in
    order, and outputs of the same dtypes.
    """
    specs = [tf.TensorSpec(i.shape, i.dtype) for i in inputs]
    with tf.Graph().as_default():
        placeholders = [
            tf.compat.v1.placeholder(s.dtype, s.shape) for s in specs
        ]
        node = kernel(*placeholders)[0].op.node_def
    function = tf.function(stock, autograph=False)
    outputs = function.get_concrete_function(*specs)(*inputs)
    outputs[0].op._set_attr(
        _ATTRIBUTE, attr_value_pb2.AttrValue(s=node.SerializeToString())
    )
    return outputs
