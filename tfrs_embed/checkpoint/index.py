"""The index of a TensorFlow checkpoint: files and offsets of tensors.

An index is a table of `BundleEntryProto`s in LevelDB's format: see
tensorflow/core/util/tensor_bundle/tensor_bundle.h and
tensorflow/core/lib/io/format.h.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import google_crc32c
import tensorflow as tf

from tfrs_embed.checkpoint.stored_pieces import (
    StoredPiece,
    damaged,
    masked_crc32c,
    most_bytes,
)
from tfrs_embed.compat.private_tensorflow import tensor_bundle_pb2, tensor_pb2

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
# Bytes after each block: its compression, and a checksum.
_TRAILER = 5


class Index:
    """The index of the checkpoint `prefix`.

    TensorFlow's errors of damaged files don't name the files. Anybody may have
    written the files: what the index says is checked against their sizes, so
    that reading takes no more memory or time than the files justify.

    Attributes:
        shapes: the tensors' shapes by name.
        dtypes: the tensors' dtypes by name.
        pieces: each tensor's slices; one piece if it was saved whole.

    Raises:
        tf.errors.NotFoundError: there is no index.
        tf.errors.DataLossError: the index is damaged; a data file is missing or
            cut off; or tensors have other sizes than their shapes, share bytes
            or lie outside of the tensor whose slices they are.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._path = f"{prefix}.index"
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise self._damaged("it is no file")  # A pipe would be waited for.
        with tf.io.gfile.GFile(self._path, "rb") as file:
            self._data = file.read()
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, tf.DType] = {}
        self.pieces: dict[str, list[StoredPiece]] = {}
        try:
            self._find_tensors(dict(self._entries()))
        except tf.errors.DataLossError:
            raise
        except Exception as error:  # A protobuf's, or an IndexError.
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        self._check_files()

    def _find_tensors(self, entries: dict[bytes, bytes]) -> None:
        header_proto = tensor_bundle_pb2.BundleHeaderProto
        header = header_proto.FromString(entries.pop(b""))
        if header.endianness != header_proto.LITTLE:
            raise self._damaged("a big-endian machine wrote it")
        # By tensor that was saved in slices: each slice's start and length in
        # each dimension, (0, -1) for all of it.
        extents: dict[str, list[list[tuple[int, int]]]] = {}
        for key, value in entries.items():
            proto = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            is_slice = key.startswith(b"\0")
            name = _tensor_of(key) if is_slice else key.decode()
            shape = [dim.size for dim in proto.shape.dim]
            dtype = tf.as_dtype(proto.dtype)
            if not is_slice:
                self.shapes[name], self.dtypes[name] = shape, dtype
            if proto.slices:
                extents[name] = [
                    [
                        (e.start, e.length if e.HasField("length") else -1)
                        for e in each.extent
                    ]
                    for each in proto.slices
                ]
                continue
            self._check_size(name, proto, dtype)
            piece = StoredPiece(
                name=name,
                file=f"{self._prefix}.data-{proto.shard_id:05d}-of-"
                f"{header.num_shards:05d}",
                offset=proto.offset,
                size=proto.size,
                shape=tuple(shape),
                dtype=dtype,
                masked_crc=proto.crc32c,
                starts=[0] * len(shape),
            )
            self.pieces.setdefault(name, []).append(piece)
        for name, of_tensor in extents.items():
            pieces = self.pieces.setdefault(name, [])
            if len(pieces) != len(of_tensor):
                raise self._damaged(f"a slice of '{name}' is missing")
            # The keys of slices are sorted by their extents.
            for piece, extent in zip(pieces, sorted(of_tensor), strict=True):
                piece.starts = [start for start, _ in extent]
                fits = piece.dtype == self.dtypes[name] and all(
                    0 <= start <= start + size <= whole
                    for start, size, whole in zip(
                        piece.starts,
                        piece.shape,
                        self.shapes[name],
                        strict=True,
                    )
                )
                if not fits:
                    raise self._damaged(f"a slice of '{name}' is not within it")

    def _check_size(self, name: str, proto: Any, dtype: tf.DType) -> None:
        """Checks that a tensor, or a slice, has the bytes of its shape."""
        shape = [dim.size for dim in proto.shape.dim]
        values = math.prod(shape)
        # Of what has no fixed size a value has a byte at least: its length.
        right = proto.size == values * dtype.size
        if dtype.size == 0:
            right = proto.size >= values
        if not right or min(shape, default=0) < 0 or proto.offset < 0:
            raise self._damaged(
                f"'{name}', {dtype.name} {shape}, has {proto.size} bytes at "
                f"{proto.offset}"
            )

    def _check_files(self) -> None:
        """Checks that the data files have each tensor's bytes, for it alone."""
        places: dict[str, list[tuple[int, int, str]]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                place = piece.offset, piece.offset + piece.size, name
                places.setdefault(piece.file, []).append(place)
        for file, found in sorted(places.items()):
            found.sort()
            for (_, end, one), (start, _, other) in itertools.pairwise(found):
                if start < end:
                    raise self._damaged(
                        f"'{one}' and '{other}' have bytes of '{file}' in "
                        "common"
                    )
            _, end, name = found[-1]
            if _length(file) < end:
                raise damaged(
                    f"The checkpoint '{self._prefix}' can't be read: '{file}' "
                    f"is missing or cut off, and ends before '{name}' does"
                )

    def _entries(self) -> Iterator[tuple[bytes, bytes]]:
        if self._data[-8:] != _MAGIC or len(self._data) < _FOOTER:
            raise self._damaged("it does not end as an index does")
        # Bytes of blocks, and of names: a name's beginning may be in the block
        # once for many names.
        self._of_blocks = self._of_names = 0
        # The place of a block that is not used, and of the block of blocks.
        footer = len(self._data) - _FOOTER
        _, _, offset, size, _ = _numbers(4, self._data, footer)
        for _, value in self._block(offset, size):
            offset, size, _ = _numbers(2, value, 0)
            yield from self._block(offset, size)

    def _block(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        end = offset + size
        self._of_blocks += size + _TRAILER
        if self._of_blocks > len(self._data):
            raise self._damaged("blocks overlap, or it is cut off")
        trailer = self._data[end : end + _TRAILER]
        if len(trailer) < _TRAILER:
            raise self._damaged("it is cut off")
        crc = google_crc32c.value(self._data[offset : end + 1])
        if masked_crc32c(crc) != int.from_bytes(trailer[1:], "little"):
            raise self._damaged("a checksum is wrong")
        if trailer[0] != 0:
            raise self._damaged("it is compressed")
        block = self._data[offset:end]
        # After the entries: offsets of some entries, and their number.
        count = int.from_bytes(block[-4:], "little")
        end = len(block) - 4 * (count + 1)
        at, key = 0, b""
        while at < end:
            shared, others, length, at = _numbers(3, block, at)
            key = key[:shared] + block[at : at + others]
            at += others
            self._of_names += len(key)
            if self._of_names > most_bytes(len(self._data)):
                raise self._damaged("its names are too long")
            yield key, block[at : at + length]
            at += length

    def _damaged(self, why: str) -> tf.errors.DataLossError:
        return damaged(f"'{self._path}' is damaged: {why}")


def check_lengths(piece: StoredPiece) -> None:
    """Checks the lengths of a piece's strings or variants, before it is read.

    TensorFlow allocates any length that is there, and crashes. It also makes
    the tensors in a variant, of any shape that is there.

    Raises:
        tf.errors.DataLossError: they don't make the size of the piece, or a
            variant's tensors would be far larger than it.
    """
    try:
        with tf.io.gfile.GFile(piece.file, "rb") as file:
            size = _size_of_values(file, piece)
    except tf.errors.OpError:
        raise
    except Exception:  # A protobuf's, or an IndexError.
        size = -1
    if size != piece.size:
        raise damaged(
            f"'{piece.file}' is damaged: the lengths of the values of "
            f"'{piece.name}' don't make its {piece.size} bytes"
        )


def _size_of_values(file: Any, piece: StoredPiece) -> int:
    """Returns the size of strings or variants as their lengths say."""
    count, most, end = math.prod(piece.shape), most_bytes(piece.size), 0
    if piece.dtype == tf.string:
        # All lengths, a checksum, and all strings.
        file.seek(piece.offset)
        lengths = file.read(min(10 * count, piece.size))
        *sizes, end = _numbers(count, lengths, 0)
        return end + 4 + sum(sizes)
    # Each variant has its length before it, and a checksum behind.
    for _ in range(count):
        file.seek(piece.offset + end)
        length, size = _numbers(1, file.read(9) + b"\0", 0)
        if end + size + length + 4 > piece.size:
            return -1
        file.seek(piece.offset + end + size)
        variant = tensor_pb2.VariantTensorDataProto.FromString(
            file.read(length)
        )
        most -= sum(map(_inflated, variant.tensors))
        if most < 0:
            raise damaged(
                f"'{piece.file}' is damaged: '{piece.name}' has {piece.size} "
                f"bytes, and would have more than {most_bytes(piece.size)} in "
                "memory"
            )
        end += size + length + 4
    return end


def _inflated(proto: Any) -> int:
    """The bytes of a tensor, and of the tensors in its variants."""
    values = math.prod(max(0, dim.size) for dim in proto.tensor_shape.dim)
    inner = (t for variant in proto.variant_val for t in variant.tensors)
    return values * max(8, tf.as_dtype(proto.dtype).size) + sum(
        map(_inflated, inner)
    )


def _length(file: str) -> int:
    """A file's size in bytes; -1 if there is no file."""
    try:
        return int(tf.io.gfile.stat(file).length)
    except tf.errors.NotFoundError:
        return -1


def _numbers(count: int, data: bytes, at: int) -> list[int]:
    """Reads numbers of 7 bits per byte; returns them, and the end's offset."""
    numbers = [0] * count
    for place in range(count):
        shift, byte = 0, 0x80
        while byte >= 0x80:
            if shift > 63:
                raise ValueError("a number has more than 64 bits")
            byte = data[at]
            numbers[place] |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
    return [*numbers, at]


def _tensor_of(key: bytes) -> str:
    """The name of a slice's tensor.

    A slice's key is a zero, the name, and the slice's place: see
    tensorflow/core/util/saved_tensor_slice_util.h.
    """
    name, _, _ = key[1:].partition(b"\0\1")
    return name.replace(b"\0\xff", b"\0").decode()
