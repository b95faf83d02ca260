"""A table's values, restored into a variable that is no table."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rows import Saved, VariableRows
from tfrs_embed.checkpoint.session import Session


class PlainVariable(Saved):
    """A variable of any kind, at the key of what a table has.

    That is its rows, a slot, its keys or its learning rate.

    It is only restored: TensorFlow saves it as it saves any variable.

    Args:
        variable: the variable.
    """

    def __init__(self, variable: tf.Variable) -> None:
        self.name = variable.name
        self._variable = variable

    def save(self, key: str, session: Session) -> None:
        """Not called; see the class."""
        raise NotImplementedError

    def check(self, key: str, reader: BundleReader) -> None:
        where = (
            f"Variable '{self.name}' can't be restored from '{key}' in "
            f"'{reader.prefix}'"
        )
        here, there = self._variable.dtype, reader.dtypes[key]
        if here != there:
            raise ValueError(
                f"{where}: it is {here.name} here and {there.name} there."
            )
        if not self._variable.shape.is_compatible_with(reader.shapes[key]):
            raise ValueError(
                f"{where}: it has the shape {self._variable.shape} here and "
                f"{reader.shapes[key]} there."
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        shape = self._variable.shape
        in_rows = shape.rank == 2 and shape.is_fully_defined()
        if reader.dtypes[key] == tf.float32 and in_rows:
            VariableRows(self.name, self._variable).restore(key, reader)
        else:
            self._variable.assign(reader.read(key))
