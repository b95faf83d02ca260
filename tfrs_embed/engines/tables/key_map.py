"""The rows that a shard has given to keys."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels

#: The row of a key that has none.
UNKNOWN = -1

# TensorFlow's hash tables live on the host, whatever the shard's device.
_HOST = "/device:CPU:0"


class _Table(tf.lookup.experimental.MutableHashTable):
    """TensorFlow's table, with the compiled one in its place if there is."""

    def _create_resource(self) -> tf.Tensor:
        if tf.executing_eagerly():
            module = kernels.operations(_HOST, training=True)
            if module:
                self._table_name = None  # As the base class does.
                return module.tfrs_embed_key_map()
        return super()._create_resource()


class KeyMap:
    """The rows of one shard's keys: 0, 1, 2 ... in the order they came.

    No strategy mirrors it. In a traced function its operations run in the order
    they are traced in.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(_HOST):
            self.resource = _Table(
                tf.int64,
                tf.int64,
                UNKNOWN,
                name="keys",
                experimental_is_anonymous=True,
            )

    def size(self) -> tf.Tensor:
        """The number of keys, a scalar int64."""
        with tf.device(_HOST):
            return self.resource.size()

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys' rows, int64; `UNKNOWN` for keys without one."""
        with tf.device(_HOST):
            rows = self.resource.lookup(keys)
        rows.set_shape(keys.shape)
        return rows

    def insert(self, keys: tf.Tensor, rows: tf.Tensor) -> None:
        """Gives rows to keys that have none.

        Args:
            keys: [n] int64, unique.
            rows: [n] int64, the next ones.
        """
        with tf.device(_HOST):
            self.resource.insert(keys, rows)

    def replace(self, keys: np.ndarray) -> None:
        """Forgets all keys, and gives rows to others, [n] int64 and unique."""
        with tf.device(_HOST):
            tf.raw_ops.LookupTableImportV2(
                table_handle=self.resource.resource_handle,
                keys=tf.constant(keys, tf.int64),
                values=tf.range(len(keys), dtype=tf.int64),
            )

    def rows(self) -> np.ndarray:
        """The keys' rows, [size] int64, in the order of `keys`."""
        return np.arange(int(self.size()))

    def keys(self) -> np.ndarray:
        """All keys, [size] int64, by row."""
        keys, rows = (tensor.numpy() for tensor in self.resource.export())
        by_row = np.empty_like(keys)
        by_row[rows] = keys
        return by_row
