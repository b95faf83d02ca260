"""Reads rows of a tensor from a checkpoint's data files.

TensorFlow would read a whole piece for some of its rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorflow as tf

#: The end of errors about damaged files.
REMEDY = "Use an earlier checkpoint, or another copy of this one."
#: The size of a large piece.
LARGE_BYTES = 64 << 20

_VERIFY_BYTES = 16 << 20
# Up to this size, or this many times the stored size, data may be inflated.
_SMALL_BYTES = 64 << 20
_MOST_TIMES = 20


@dataclasses.dataclass(eq=False)
class StoredPiece:
    """A tensor, or a slice of it, in a data file.

    The first read verifies the checksum. That of a large piece, whose rows are
    read in their order, is verified as its last rows are read.

    Attributes:
        name: the tensor's name.
        file: the data file.
        offset: the first byte in the file.
        size: the number of bytes.
        shape: the piece's shape.
        dtype: the tensor's dtype.
        masked_crc: the bytes' checksum, of `masked_crc32c`.
        starts: the first index in each dimension of the tensor.
    """

    name: str
    file: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: tf.DType
    masked_crc: int
    starts: Sequence[int]

    def __post_init__(self) -> None:
        # The checksum of the rows read in order so far, and the next row.
        self._crc, self._next = 0, 0
        self._verified = False

    @property
    def start(self) -> int:
        """The first row's index in the tensor."""
        return self.starts[0]

    @property
    def end(self) -> int:
        """The last row's index in the tensor, plus one."""
        return self.start + self.shape[0]

    def rows(self, start: int, end: int) -> np.ndarray:
        """Returns the rows from `start` to `end`."""
        whole = (start, end) == (self.start, self.end)
        in_order = self.size > LARGE_BYTES and start in (self.start, self._next)
        if not (self._verified or whole or in_order):
            row_bytes = max(1, self.size // self.shape[0])
            step = max(1, _VERIFY_BYTES // row_bytes)
            for first in range(self.start, self.end, step):
                self._read(first, min(first + step, self.end))
        data = self._read(start, end)
        shape = (end - start, *self.shape[1:])
        return np.frombuffer(data, self.dtype.as_numpy_dtype).reshape(shape)

    def _read(self, start: int, end: int) -> bytes:
        row_bytes = self.size // self.shape[0]
        with tf.io.gfile.GFile(self.file, "rb") as file:
            file.seek(self.offset + (start - self.start) * row_bytes)
            data = file.read((end - start) * row_bytes)
        if len(data) < (end - start) * row_bytes:
            raise damaged(
                f"'{self.file}' is cut off: it ends within '{self.name}'"
            )
        if start == self.start:
            self._crc = 0
        if not self._verified:
            self._crc = google_crc32c.extend(self._crc, data)
            self._next = end
            if end == self.end and masked_crc32c(self._crc) != self.masked_crc:
                raise damaged(
                    f"'{self.file}' is damaged: the checksum of "
                    f"'{self.name}' is wrong"
                )
            self._verified = end == self.end
        return data


def read_rows(
    pieces: Sequence[StoredPiece], shape: Sequence[int], start: int, size: int
) -> np.ndarray:
    """Returns `size` rows from `start` on of a tensor with these `pieces`.

    Raises:
        tf.errors.DataLossError: a file is too short, a checksum is wrong, or
            slices are missing.
    """
    end, shape = start + size, (size, *shape[1:])
    parts = {
        piece: piece.rows(max(start, piece.start), min(end, piece.end))
        for piece in pieces
        if piece.start < end and start < piece.end
    }
    missing = damaged(
        f"'{pieces[0].file}' is damaged: slices of '{pieces[0].name}' are "
        "missing"
    )
    if sum(part.size for part in parts.values()) != math.prod(shape):
        raise missing
    if len(parts) == 1:
        return parts.popitem()[1]
    rows = np.empty(shape, pieces[0].dtype.as_numpy_dtype)
    covered = np.zeros(shape, bool)
    for piece, part in parts.items():
        first = max(start, piece.start) - start
        starts = [first, *piece.starts[1:]]
        place = tuple(
            slice(s, s + n) for s, n in zip(starts, part.shape, strict=True)
        )
        rows[place], covered[place] = part, True
    # Slices that overlap leave gaps, with whatever the memory had.
    if not covered.all():
        raise missing
    return rows


def most_bytes(stored: int) -> int:
    """The most bytes that so many stored bytes may stand for.

    What is compressed says how large it is. Beyond this size it is refused: a
    file of some MB must not fill the memory.
    """
    return max(_SMALL_BYTES, _MOST_TIMES * stored)


def masked_crc32c(crc: int) -> int:
    """A CRC in the form in which TensorFlow stores it beside the data."""
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def damaged(what: str) -> tf.errors.DataLossError:
    """An error that names the damage and the remedy."""
    return tf.errors.DataLossError(None, None, f"{what}. {REMEDY}")
