"""pyarrow, and files of TensorFlow's file systems as pyarrow wants them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def import_pyarrow(user: str) -> Any:
    """Returns pyarrow with its modules for Parquet.

    Raises an ImportError that names the `user`, a function.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"{user} needs pyarrow: pip install 'tfrs_embed[parquet]'."
        ) from error
    return pyarrow


class ArrowFile(tf.io.gfile.GFile):
    """A file on a file system of `tf.io.gfile`, to read or to write."""

    closed = False

    def write(self, file_content: Any) -> None:
        """Writes bytes, or a buffer of pyarrow's."""
        super().write(bytes(file_content))


@contextlib.contextmanager
def reading_parquet(arrow: Any, path: str, **options: Any) -> Iterator[Any]:
    """Opens a Parquet file; what fails in the context is a ValueError.

    Args:
        arrow: what `import_pyarrow` returns.
        path: the file, on a file system of `tf.io.gfile`.
        **options: arguments of pyarrow's `ParquetFile`.
    """
    try:
        where = ArrowFile(path, "rb") if "://" in path else path
        with arrow.parquet.ParquetFile(where, **options) as file:
            yield file
    except (OSError, tf.errors.OpError, arrow.ArrowException) as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error
