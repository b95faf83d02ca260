"""A tensor's rows, read straight from a checkpoint's data files.

TensorFlow reads all of what was saved in one piece, whatever is asked for.
"""

from __future__ import annotations

import google_crc32c
import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.index import Entry, Index, damaged, masked_crc32c

_VERIFY_BYTES = 16 << 20


class StoredTensor:
    """A tensor in a checkpoint's data files.

    Reading all rows of it, in their order, verifies its checksums.

    Args:
        index: the checkpoint's index.
        name: the tensor's name.

    Raises:
        KeyError: it was not saved.
        ValueError: it is cut along its columns too, or its bytes are in the
            order of another machine.
    """

    def __init__(self, index: Index, name: str) -> None:
        if not index.little_endian:
            raise ValueError(f"'{name}' was saved on a big-endian machine.")
        self._name = name
        self._pieces = [_Piece(name, *piece) for piece in index.pieces(name)]

    @property
    def largest(self) -> int:
        """Bytes of the largest piece that it was saved in."""
        return max(piece.nbytes for piece in self._pieces)

    def rows(self, start: int, size: int) -> np.ndarray:
        """Returns `size` rows from `start` on.

        Raises:
            tf.errors.DataLossError: a file is too short, or, at the end of a
                piece that was read in order, is not what was saved.
        """
        end = start + size
        parts = [
            piece.rows(max(start, piece.start), min(end, piece.end))
            for piece in self._pieces
            if piece.start < end and start < piece.end
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def verify(self) -> None:
        """Reads all of it and verifies its checksums.

        Raises:
            tf.errors.DataLossError: a file is too short, or is not what was
                saved.
        """
        for piece in self._pieces:
            step = max(1, _VERIFY_BYTES // max(1, piece.row_bytes))
            for start in range(piece.start, piece.end, step):
                piece.rows(start, min(start + step, piece.end))


class _Piece:
    """Rows that were saved together.

    Args:
        name: the tensor's name.
        start: the first row.
        entry: where they are.
    """

    def __init__(self, name: str, start: int, entry: Entry) -> None:
        self._name = name
        self._entry = entry
        self.start = start
        self.end = start + entry.shape[0]
        self.nbytes = entry.size
        self.row_bytes = entry.size // max(1, entry.shape[0])
        # Of the rows that were read in order.
        self._crc, self._next = 0, start

    def rows(self, start: int, end: int) -> np.ndarray:
        """Returns the rows from `start` to `end`."""
        entry = self._entry
        size = (end - start) * self.row_bytes
        with tf.io.gfile.GFile(entry.file, "rb") as file:
            # No room is made for what is not there.
            there = file.size() >= entry.offset + entry.size
            file.seek(entry.offset + (start - self.start) * self.row_bytes)
            data = file.read(size) if there else b""
        if not there or len(data) != size:
            raise damaged(
                f"'{entry.file}' is cut off: it ends within '{self._name}'"
            )
        if start == self.start:
            self._crc, self._next = 0, start
        if start == self._next:
            self._crc = google_crc32c.extend(self._crc, data)
            self._next = end
            if end == self.end and masked_crc32c(self._crc) != entry.masked_crc:
                raise damaged(
                    f"'{entry.file}' is damaged: the checksum of "
                    f"'{self._name}' is wrong"
                )
        shape = (end - start, *entry.shape[1:])
        return np.frombuffer(data, entry.dtype.as_numpy_dtype).reshape(shape)
