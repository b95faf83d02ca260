"""The index of a TensorFlow checkpoint: files and offsets of tensors.

An index is a table of `BundleEntryProto`s in LevelDB's format: see
tensorflow/core/util/tensor_bundle/tensor_bundle.h and
tensorflow/core/lib/io/format.h.
"""

from __future__ import annotations

from collections.abc import Iterator

import google_crc32c
import tensorflow as tf

from tfrs_embed.checkpoint.stored import Piece, damaged, masked_crc32c
from tfrs_embed.compat.private_tensorflow import tensor_bundle_pb2

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
# Bytes after each block: its compression, and a checksum.
_TRAILER = 5


class Index:
    """The index of the checkpoint `prefix`.

    TensorFlow's errors of damaged files don't name the files.

    Attributes:
        shapes: the tensors' shapes by name.
        dtypes: the tensors' dtypes by name.
        pieces: each tensor's slices; one piece if it was saved whole.

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
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, tf.DType] = {}
        self.pieces: dict[str, list[Piece]] = {}
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
        protos: dict[str, tensor_bundle_pb2.BundleEntryProto] = {}
        # Each tensor's slices, in the order of their keys.
        slices: dict[str, list[Piece]] = {}
        for key, value in entries.items():
            proto = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            is_slice = key.startswith(b"\0")
            name = _tensor_of(key) if is_slice else key.decode()
            shape = [dim.size for dim in proto.shape.dim]
            dtype = tf.as_dtype(proto.dtype)
            piece = Piece(
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
            if is_slice:
                slices.setdefault(name, []).append(piece)
                continue
            protos[name] = proto
            self.shapes[name], self.dtypes[name] = shape, dtype
            self.pieces[name] = [piece]
        for name, proto in protos.items():
            if not proto.slices:
                continue
            # A slice's start and length in each dimension, (0, -1) for all of
            # it. Keys are sorted in this order.
            extents = sorted(
                [
                    (e.start, e.length if e.HasField("length") else -1)
                    for e in s.extent
                ]
                for s in proto.slices
            )
            self.pieces[name] = slices.get(name, [])
            if len(self.pieces[name]) != len(extents):
                raise self._damaged(f"a slice of '{name}' is missing")
            for piece, extent in zip(self.pieces[name], extents, strict=True):
                piece.starts = [start for start, _ in extent]

    def _check_files(self) -> None:
        """Checks that the data files are there, and long enough."""
        last: dict[str, tuple[int, str]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                found = piece.offset + piece.size, name
                last[piece.file] = max(found, last.get(piece.file, found))
        for file, (end, name) in sorted(last.items()):
            if _length(file) < end:
                raise damaged(
                    f"The checkpoint '{self._prefix}' can't be read: '{file}' "
                    f"is missing or cut off, and ends before '{name}' does"
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
        at, key = 0, b""
        while at < end:
            shared, others, length, at = _numbers(3, block, at)
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
        shift, byte = 0, 0x80
        while byte >= 0x80:
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
