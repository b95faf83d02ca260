"""Lookups in graphs that may be exported to where there are no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.kernels import portable_call
from tfrs_embed.ops import kernel_calls
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.parsed_ids import of_one_dtype
from tfrs_embed.ops.rounding import widen

_FIELDS = ("ids", "grouping", "weights", "scale")


def lookup(
    module: Any,
    tables: Sequence[tf.Variable],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    combine: Callable[[tf.Tensor, None, BaggedIds], tf.Tensor],
) -> list[tf.Tensor]:
    """Looks up features, each in one of the tables, in a graph.

    Args:
        module: the kernels' operations.
        tables: each [rows, dim] float32, bfloat16 or float16.
        table_of: each feature's table.
        bags: each feature's bags.
        combine: combines the rows of a feature's ids in TensorFlow operations.

    Returns:
        Each feature's vectors, float32, in the shape that
        `tfrs_embed.ops.kernel_calls.lookup` gives them.
    """
    dims = [tables[t].shape[1] for t in table_of]
    shapes = [
        kernel_calls.shape_of_vectors(b, dim)
        for b, dim in zip(bags, dims, strict=True)
    ]
    # The call has the kernel's inputs, which has ids of one dtype.
    ids = of_one_dtype([b.ids for b in bags])
    bags = [b._replace(ids=i) for b, i in zip(bags, ids, strict=True)]

    def stock(*inputs: tf.Tensor) -> list[tf.Tensor]:
        handles, unpacked = _unpack(inputs, len(tables), bags)
        vectors = []
        for t, shape, b in zip(table_of, shapes, unpacked, strict=True):
            rows = tf.raw_ops.ResourceGather(
                resource=handles[t], indices=b.ids, dtype=tables[t].dtype
            )
            rows.set_shape([None, shape[-1]])
            combined = combine(widen(rows), None, b)
            if shape.rank != 2:
                sizes = [-1 if size is None else size for size in shape]
                combined = tf.reshape(combined, sizes)
            vectors.append(combined)
        return vectors

    def kernel(*inputs: tf.Tensor) -> list[tf.Tensor]:
        handles, unpacked = _unpack(inputs, len(tables), bags)
        return kernel_calls.lookup_handles(
            module, handles, dims, table_of, unpacked
        )

    inputs = [t.handle for t in tables]
    for name in _FIELDS:
        inputs += [
            getattr(b, name) for b in bags if getattr(b, name) is not None
        ]
    inputs.append(tf.stack([b.count for b in bags]))
    vectors = portable_call.call(stock, kernel, inputs)
    for vector, shape in zip(vectors, shapes, strict=True):
        vector.set_shape(shape)
    return vectors


def _unpack(
    inputs: Sequence[tf.Tensor], num_tables: int, bags: Sequence[BaggedIds]
) -> tuple[list[tf.Tensor], list[BaggedIds]]:
    """Tables' handles, and bags like the given ones."""
    rest = iter(inputs[num_tables:])
    fields: dict[str, list[Any]] = {}
    for name in _FIELDS:
        fields[name] = [
            None if getattr(b, name) is None else next(rest) for b in bags
        ]
    counts = tf.unstack(next(rest), num=len(bags))
    unpacked = []
    for i, b in enumerate(bags):
        given = {name: values[i] for name, values in fields.items()}
        grouping = given.pop("grouping")
        if b.splits is None:
            given["bag_ids"] = grouping
        else:
            # Bags' numbers of the outer graph would be one more input.
            given.update(splits=grouping, bag_ids=None)
        unpacked.append(b._replace(count=counts[i], **given))
    return list(inputs[:num_tables]), unpacked
