"""The index of a TensorFlow checkpoint: files and offsets of tensors.

An index is a table of `BundleEntryProto`s in LevelDB's format: see
tensorflow/core/util/tensor_bundle/tensor_bundle.h and
tensorflow/core/lib/io/format.h.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import google_crc32c
import tensorflow as tf

from tfrs_embed.checkpoint.stored import Piece, damaged, masked_crc32c
from tfrs_embed.compat.private_tensorflow import tensor_bundle_pb2

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
# Bytes after each block: its compression, and a checksum.
_TRAILER = 5
_VARINT_BYTES = 10
# The limits of TensorFlow's shapes.
_MOST_DIMS = 254
_MOST = 2**63 - 1


class Index:
    """The index of the checkpoint `prefix`, with all entries checked.

    TensorFlow aborts the process over some damaged entries, such as a negative
    size, and allocates memory for data that are not there. Its errors don't
    name the files. `shapes` and `dtypes` are the tensors' by name.

    Raises:
        tf.errors.NotFoundError: there is no index.
        tf.errors.DataLossError: the index is damaged, or a data file is
            missing or cut off.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._path = f"{prefix}.index"
        with tf.io.gfile.GFile(self._path, "rb") as file:
            self._data = file.read()
        try:
            values = dict(self._entries())
            self._header = tensor_bundle_pb2.BundleHeaderProto.FromString(
                values.pop(b"")
            )
            if self._header.num_shards < 1:
                raise self._damaged("it has no data files")
            tensors: dict[str, tensor_bundle_pb2.BundleEntryProto] = {}
            # Each tensor's slices, in the order of their keys.
            slices: dict[str, list[Piece]] = {}
            for key, value in values.items():
                proto = self._checked_proto(key, value)
                if key.startswith(b"\0"):
                    name = _tensor_of(key)
                    piece = self._piece(name, proto)
                    slices.setdefault(name, []).append(piece)
                else:
                    tensors[key.decode()] = proto
            self.shapes: Mapping[str, list[int]] = {
                name: [dim.size for dim in proto.shape.dim]
                for name, proto in tensors.items()
            }
            self.dtypes: Mapping[str, tf.DType] = {
                name: tf.as_dtype(proto.dtype)
                for name, proto in tensors.items()
            }
            self._pieces = {
                name: self._find_pieces(name, proto, slices.get(name, []))
                for name, proto in tensors.items()
            }
        except tf.errors.DataLossError:
            raise
        except Exception as error:  # A protobuf's, or an IndexError.
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        self._check_files()

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a tensor's rows in their order; one if saved whole.

        Raises:
            ValueError: the tensor was saved in slices of columns, or on a
                big-endian machine.
        """
        header = tensor_bundle_pb2.BundleHeaderProto
        if self._header.endianness != header.LITTLE:
            raise ValueError(f"'{name}' was saved on a big-endian machine.")
        row = tuple(self.shapes[name][1:])
        if any(piece.shape[1:] != row for piece in self._pieces[name]):
            raise ValueError(
                f"'{name}' was saved in slices of its columns, not of its rows "
                "alone."
            )
        return self._pieces[name]

    def _find_pieces(
        self,
        name: str,
        proto: tensor_bundle_pb2.BundleEntryProto,
        pieces: list[Piece],
    ) -> list[Piece]:
        """Sets the first rows of a tensor's slices, `pieces`, and checks them.

        A tensor without slices is one piece.
        """
        if not proto.slices:
            return [self._piece(name, proto)]
        if len(pieces) != len(proto.slices):
            raise self._damaged(f"a slice of '{name}' is missing")
        # A slice's start and length in each dimension, (0, -1) for all of it.
        # Keys are sorted in this order.
        slices = sorted(
            [
                (e.start, e.length if e.HasField("length") else -1)
                for e in s.extent
            ]
            for s in proto.slices
        )
        for extents, piece in zip(slices, pieces, strict=True):
            shape = []
            for (start, length), size in zip(
                extents, self.shapes[name], strict=True
            ):
                if (start, length) == (0, -1):
                    length = size
                if not 0 <= start <= start + length <= size:
                    raise self._damaged(f"a slice of '{name}' is outside of it")
                shape.append(length)
            if piece.shape != tuple(shape) or piece.dtype != proto.dtype:
                raise self._damaged(f"a slice of '{name}' has another shape")
            piece.start = extents[0][0]
        return pieces

    def _check_files(self) -> None:
        """Checks that the data files are there, and long enough."""
        last: dict[str, tuple[int, str]] = {}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                found = piece.offset + piece.size, name
                last[piece.file] = max(found, last.get(piece.file, found))
        for file, (end, name) in sorted(last.items()):
            if _length(file) < end:
                raise damaged(
                    f"The checkpoint '{self._prefix}' can't be read: '{file}' "
                    f"is missing or cut off, and ends before '{name}' does"
                )

    def _checked_proto(
        self, key: bytes, value: bytes
    ) -> tensor_bundle_pb2.BundleEntryProto:
        proto = tensor_bundle_pb2.BundleEntryProto.FromString(value)
        sizes = [dim.size for dim in proto.shape.dim]
        dtype = tf.as_dtype(proto.dtype)
        elements = math.prod(sizes)
        # Without zeros, as products of some dimensions must be numbers too.
        product = math.prod(max(1, size) for size in sizes)
        if (
            proto.shape.unknown_rank
            or len(sizes) > _MOST_DIMS
            or min(sizes, default=0) < 0
            or product * max(1, dtype.size) > _MOST
            or not 0 <= proto.shard_id < self._header.num_shards
            or min(proto.offset, proto.size) < 0
            or proto.offset + proto.size > _MOST
        ):
            raise self._damaged(f"the entry of {key!r} is impossible")
        if proto.slices:
            return proto  # Its slices have the bytes.
        if dtype in (tf.string, tf.variant, tf.resource):
            # Each element takes at least one byte, for its length.
            if elements > proto.size:
                raise self._damaged(f"{key!r} has too few bytes")
        elif elements * dtype.size != proto.size:
            raise self._damaged(
                f"{key!r} has {proto.size} bytes, but the shape {sizes} of "
                f"{dtype.name}"
            )
        return proto

    def _piece(
        self, name: str, proto: tensor_bundle_pb2.BundleEntryProto
    ) -> Piece:
        shards = self._header.num_shards
        return Piece(
            name=name,
            file=f"{self._prefix}.data-{proto.shard_id:05d}-of-{shards:05d}",
            offset=proto.offset,
            size=proto.size,
            shape=tuple(d.size for d in proto.shape.dim),
            dtype=tf.as_dtype(proto.dtype),
            masked_crc=proto.crc32c,
        )

    def _entries(self) -> Iterator[tuple[bytes, bytes]]:
        if self._data[-8:] != _MAGIC or len(self._data) < _FOOTER:
            raise self._damaged("it does not end as an index does")
        # The place of a block that is not used, and of the block of blocks.
        footer = len(self._data) - _FOOTER
        _, _, offset, size, _ = _numbers(4, self._data, footer)
        for _, value in self._block(offset, size):
            offset, size, _ = _numbers(2, value, 0)
            yield from self._block(offset, size)

    def _block(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        end = offset + size
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
        if len(block) < 4 or end < 0 or count < 1:
            raise self._damaged("a block is too short")
        at, key = 0, b""
        while at < end:
            shared, others, length, at = _numbers(3, block, at)
            if shared > len(key) or at + others + length > end:
                raise self._damaged("an entry does not fit into its block")
            key = key[:shared] + block[at : at + others]
            at += others
            yield key, block[at : at + length]
            at += length

    def _damaged(self, why: str) -> tf.errors.DataLossError:
        return damaged(f"'{self._path}' is damaged: {why}")


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
        for i in range(_VARINT_BYTES):
            byte = data[at]
            at += 1
            numbers[place] |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                break
        else:
            raise ValueError("a number is too long")
    return [*numbers, at]


def _tensor_of(key: bytes) -> str:
    """The name of a slice's tensor.

    A slice's key is a zero, the name, and the slice's place: see
    tensorflow/core/util/saved_tensor_slice_util.h.
    """
    name, _, _ = key[1:].partition(b"\0\1")
    return name.replace(b"\0\xff", b"\0").decode()
