"""Sparse tensors in distributed datasets, whose shares may be empty.

TensorFlow serialises a sparse tensor of a dataset, and reads none of zero rows
back ("Serialized sparse should have at least 1 serialized tensor"): the share
of a replica when a batch has fewer samples than there are replicas. It has no
such limit for ragged tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf


class _Rows(NamedTuple):
    """A sparse tensor as tensors that can be cut into shares by row.

    Attributes:
        columns: for each dimension but the first, the indices of each row's
            values; ragged. Reading none of zero rows, TensorFlow forgets inner
            dimensions, so that these can't be one tensor.
        values: each row's values; ragged.
        shape: a tensor without elements: the sparse one's shape, and then 0.
    """

    columns: Any
    values: Any
    shape: Any


def encode(data: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset with encoded sparse tensors; `decode` undoes it."""
    leaves = tf.nest.flatten(data.element_spec)
    if not any(isinstance(each, tf.SparseTensorSpec) for each in leaves):
        return data

    def rows(each: Any) -> Any:
        if not isinstance(each, tf.SparseTensor):
            return each
        shape, row = each.dense_shape, each.indices[:, 0]
        *columns, values = (
            tf.RaggedTensor.from_value_rowids(part, row, shape[0])
            for part in (*tf.unstack(each.indices[:, 1:], axis=1), each.values)
        )
        empty = tf.zeros(tf.concat([shape, [0]], 0), tf.int8)
        empty.set_shape([*each.shape, 0])
        return _Rows(tuple(columns), values, empty)

    def encoded(*batch: Any) -> Any:
        found = tf.nest.map_structure(rows, batch)
        return found if len(found) > 1 else found[0]

    return data.map(encoded)


def decode(batch: Any) -> Any:
    """Returns a batch with sparse tensors in place of encoded ones."""

    def sparse(each: Any) -> Any:
        if not isinstance(each, _Rows):
            return None  # What is in it is looked at.
        columns = [column.values for column in each.columns]
        indices = tf.stack([each.values.value_rowids(), *columns], 1)
        shape = tf.shape(each.shape, tf.int64)[:-1]
        return tf.SparseTensor(indices, each.values.values, shape)

    return keras.tree.traverse(sparse, batch)
