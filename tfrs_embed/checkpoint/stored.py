"""Reads rows of a tensor from a checkpoint's data files.

TensorFlow would read a whole piece for some of its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorflow as tf

#: The end of errors about damaged files.
REMEDY = "Use an earlier checkpoint, or another copy of this one."

_VERIFY_BYTES = 16 << 20


@dataclasses.dataclass(eq=False)
class Piece:
    """A tensor, or some of its rows, in a data file.

    Reading all rows in their order verifies the checksum.

    Attributes:
        name: the tensor's name.
        file: the data file.
        offset: the first byte in the file.
        size: the number of bytes.
        shape: the piece's shape.
        dtype: the tensor's dtype.
        masked_crc: the bytes' checksum, of `masked_crc32c`.
        start: the first row's index in the tensor.
    """

    name: str
    file: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: tf.DType
    masked_crc: int
    start: int = 0

    def __post_init__(self) -> None:
        # The checksum of the rows read in order so far, and the next row.
        self._crc, self._next = 0, 0

    @property
    def end(self) -> int:
        """The last row's index in the tensor, plus one."""
        return self.start + self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return self.size // max(1, self.shape[0])

    def rows(self, start: int, end: int) -> np.ndarray:
        """Returns the rows from `start` to `end`."""
        size = (end - start) * self.row_bytes
        with tf.io.gfile.GFile(self.file, "rb") as file:
            if file.size() < self.offset + self.size:
                raise damaged(
                    f"'{self.file}' is cut off: it ends within '{self.name}'"
                )
            file.seek(self.offset + (start - self.start) * self.row_bytes)
            data = file.read(size)
        if start == self.start:
            self._crc, self._next = 0, start
        if start == self._next:
            self._crc = google_crc32c.extend(self._crc, data)
            self._next = end
            if end == self.end and masked_crc32c(self._crc) != self.masked_crc:
                raise damaged(
                    f"'{self.file}' is damaged: the checksum of "
                    f"'{self.name}' is wrong"
                )
        shape = (end - start, *self.shape[1:])
        return np.frombuffer(data, self.dtype.as_numpy_dtype).reshape(shape)


def read_rows(pieces: Sequence[Piece], start: int, size: int) -> np.ndarray:
    """Returns `size` rows from `start` on of a tensor with these `pieces`.

    Raises:
        tf.errors.DataLossError: a file is too short, or the checksum of a piece
            that was read in order is wrong.
    """
    end = start + size
    parts = [
        piece.rows(max(start, piece.start), min(end, piece.end))
        for piece in pieces
        if piece.start < end and start < piece.end
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def verify(pieces: Sequence[Piece]) -> None:
    """Verifies the checksums of a tensor's pieces; raises DataLossError."""
    for piece in pieces:
        step = max(1, _VERIFY_BYTES // max(1, piece.row_bytes))
        for start in range(piece.start, piece.end, step):
            piece.rows(start, min(start + step, piece.end))


def masked_crc32c(crc: int) -> int:
    """A CRC in the form in which TensorFlow stores it beside the data."""
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def damaged(what: str) -> tf.errors.DataLossError:
    """An error that names the damage and the remedy."""
    return tf.errors.DataLossError(None, None, f"{what}. {REMEDY}")
