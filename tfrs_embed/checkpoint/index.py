"""A TensorFlow checkpoint's index: where in which file a tensor's bytes are.

It is a sorted table of strings as LevelDB's, of `BundleEntryProto`s: see
tensorflow/core/util/tensor_bundle/tensor_bundle.h and
tensorflow/core/lib/io/format.h.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import tensor_bundle_pb2
from tfrs_embed.checkpoint.crc32c import crc32c, masked_crc32c

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
# Behind each block: how it is compressed, and a checksum.
_TRAILER = 5
_VARINT_BYTES = 10
#: What to do where a file is damaged.
REMEDY = "Use an earlier checkpoint, or another copy of this one."
# The limits of TensorFlow's shapes.
_MOST_DIMS = 254
_MOST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where the bytes of a tensor, or of a slice of it, are.

    Attributes:
        file: the data file.
        offset: the first byte in it.
        size: the number of bytes.
        shape: the shape.
        dtype: the dtype.
        masked_crc: the bytes' checksum, as `masked_crc32c` gives it.
    """

    file: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: tf.DType
    masked_crc: int


def check_files(prefix: str) -> None:
    """Checks a checkpoint's index, and that its data files are all there.

    TensorFlow's own errors name neither.

    Args:
        prefix: the checkpoint's path; if there is none, nothing is checked.

    Raises:
        tf.errors.DataLossError: a file is damaged, cut off or missing.
    """
    if tf.io.gfile.exists(f"{prefix}.index"):
        Index(prefix).check_files()


class Index:
    """The index of a checkpoint.

    All of it is checked, as TensorFlow ends the process over some of what an
    index may say, such as a negative size.

    Args:
        prefix: the checkpoint's path.

    Attributes:
        shapes: each tensor's shape, by name.
        dtypes: each tensor's dtype, by name.

    Raises:
        tf.errors.NotFoundError: there is none.
        tf.errors.DataLossError: it is damaged.
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
            self._protos = {
                key: self._checked_proto(key, value)
                for key, value in values.items()
            }
            # Slices' keys begin with a zero.
            names = {
                key.decode(): proto
                for key, proto in self._protos.items()
                if not key.startswith(b"\0")
            }
            self.shapes: Mapping[str, list[int]] = {
                name: [dim.size for dim in proto.shape.dim]
                for name, proto in names.items()
            }
            self.dtypes: Mapping[str, tf.DType] = {
                name: tf.as_dtype(proto.dtype) for name, proto in names.items()
            }
        except tf.errors.DataLossError:
            raise
        except Exception as error:  # A protobuf's, or of an index.
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    @property
    def little_endian(self) -> bool:
        """Whether its tensors' bytes are in this order."""
        header = tensor_bundle_pb2.BundleHeaderProto
        return self._header.endianness == header.LITTLE

    def pieces(self, name: str) -> list[tuple[int, Entry]]:
        """Says where the rows of a tensor are.

        Args:
            name: the tensor's name.

        Returns:
            Pieces that cover it: the first row of each, ascending, and where
            its bytes are. One, if the tensor was saved whole.

        Raises:
            KeyError: it was not saved.
            ValueError: it is cut along its columns too.
            tf.errors.DataLossError: some slices of it are not there.
        """
        proto = self._protos[name.encode()]
        if not proto.slices:
            return [(0, self._entry(proto))]
        pieces = []
        keys = _slice_keys(name.encode(), proto)
        for piece, key in zip(proto.slices, keys, strict=True):
            columns = zip(piece.extent[1:], proto.shape.dim[1:], strict=True)
            if any(
                e.HasField("length") and e.length < dim.size
                for e, dim in columns
            ):
                raise ValueError(
                    f"'{name}' was saved in slices of its columns, not of its "
                    "rows alone."
                )
            if key not in self._protos:
                raise self._damaged(f"a slice of '{name}' is missing")
            entry = self._entry(self._protos[key])
            shape = _slice_shape(proto, piece)
            if entry.shape != shape or entry.dtype != proto.dtype:
                raise self._damaged(f"a slice of '{name}' is not as it says")
            pieces.append((piece.extent[0].start, entry))
        return sorted(pieces, key=lambda p: p[0])

    def files(self, name: str) -> tuple[list[str], list[str]]:
        """Says which data files a tensor is in.

        Args:
            name: the tensor's name.

        Returns:
            The files, and those of them that aren't there or are cut off.

        Raises:
            As `pieces` does.
        """
        ends: dict[str, int] = {}
        for _, entry in self.pieces(name):
            end = entry.offset + entry.size
            ends[entry.file] = max(end, ends.get(entry.file, 0))
        incomplete = []
        for file, end in sorted(ends.items()):
            if _length(file) < end:
                incomplete.append(file)
        return sorted(ends), incomplete

    def check_files(self) -> None:
        """Checks that the data files are there, as long as they must be.

        Raises:
            tf.errors.DataLossError: one is not.
        """
        last: dict[str, tuple[int, bytes]] = {}
        for key, proto in self._protos.items():
            if not proto.slices:
                entry = self._entry(proto)
                found = entry.offset + entry.size, key
                last[entry.file] = max(found, last.get(entry.file, found))
        for file, (end, key) in sorted(last.items()):
            if _length(file) < end:
                # A slice's key begins with its tensor's name.
                name = key.split(b"\0\1")[0].lstrip(b"\0").decode()
                raise damaged(
                    f"The checkpoint '{self._prefix}' can't be read: '{file}' "
                    f"is missing, or ends before '{name}' does"
                )

    def _checked_proto(
        self, key: bytes, value: bytes
    ) -> tensor_bundle_pb2.BundleEntryProto:
        proto = tensor_bundle_pb2.BundleEntryProto.FromString(value)
        sizes = [dim.size for dim in proto.shape.dim]
        dtype = tf.as_dtype(proto.dtype)
        elements = math.prod(sizes)
        # Without zeros: a product of some of them must be a number, too.
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
            raise self._damaged(f"what it says of {key!r} can't be")
        if proto.slices:
            for piece in proto.slices:
                _slice_shape(proto, piece)
        elif dtype in (tf.string, tf.variant, tf.resource):
            # Each element takes a byte at least, for its length.
            if elements > proto.size:
                raise self._damaged(f"{key!r} has too few bytes")
        elif elements * dtype.size != proto.size:
            raise self._damaged(
                f"{key!r} has {proto.size} bytes, but the shape {sizes} of "
                f"{dtype.name}"
            )
        return proto

    def _entry(self, proto: tensor_bundle_pb2.BundleEntryProto) -> Entry:
        shards = self._header.num_shards
        return Entry(
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
        footer = len(self._data) - _FOOTER
        _, at = self._handle(self._data, footer)
        (offset, size), _ = self._handle(self._data, at)
        before = None
        for key, value in self._block(offset, size):
            (offset, size), _ = self._handle(value, 0)
            for inner, found in self._block(offset, size):
                # Those of the blocks are how TensorFlow finds a key's.
                if (before is not None and inner <= before) or inner > key:
                    raise self._damaged("its keys are not sorted")
                yield inner, found
                before = inner
            before = key

    def _handle(self, data: bytes, at: int) -> tuple[tuple[int, int], int]:
        offset, at = _varint(data, at)
        size, at = _varint(data, at)
        return (offset, size), at

    def _block(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        end = offset + size
        trailer = self._data[end : end + _TRAILER]
        if len(trailer) < _TRAILER:
            raise self._damaged("it is cut off")
        crc = crc32c(self._data[offset : end + 1])
        if masked_crc32c(crc) != int.from_bytes(trailer[1:], "little"):
            raise self._damaged("a checksum is wrong")
        if trailer[0] != 0:
            raise self._damaged("it is compressed")
        block = self._data[offset:end]
        # Behind the entries: places to begin reading at, and their number.
        count = int.from_bytes(block[-4:], "little")
        end = len(block) - 4 * (count + 1)
        if len(block) < 4 or end < 0 or count < 1:
            raise self._damaged("a block is too short")
        restarts = [
            int.from_bytes(block[i : i + 4], "little")
            for i in range(end, len(block) - 4, 4)
        ]
        begins = []
        at, key = 0, b""
        while at < end:
            start = at
            shared, at = _varint(block, at)
            others, at = _varint(block, at)
            length, at = _varint(block, at)
            if shared > len(key) or at + others + length > end:
                raise self._damaged("an entry does not fit into its block")
            if shared == 0:
                begins.append(start)
            key = key[:shared] + block[at : at + others]
            at += others
            yield key, block[at : at + length]
            at += length
        if restarts != sorted(set(restarts)) or not set(restarts) <= {
            0,
            *begins,
        }:
            raise self._damaged("a block does not say where its entries are")

    def _damaged(self, why: str) -> tf.errors.DataLossError:
        return damaged(f"'{self._path}' is damaged: {why}")


def damaged(what: str) -> tf.errors.DataLossError:
    """An error that says what is damaged, and what to do then."""
    return tf.errors.DataLossError(None, None, f"{what}. {REMEDY}")


def _length(file: str) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return int(tf.io.gfile.stat(file).length)
    except tf.errors.NotFoundError:
        return -1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(_VARINT_BYTES):
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number is too long")


def _slice_shape(
    proto: tensor_bundle_pb2.BundleEntryProto, piece: Any
) -> tuple[int, ...]:
    """The shape of a slice, which must be within its tensor's."""
    shape = []
    if len(piece.extent) != len(proto.shape.dim):
        raise ValueError("a slice has other dimensions than its tensor")
    for extent, dim in zip(piece.extent, proto.shape.dim, strict=True):
        length = extent.length if extent.HasField("length") else dim.size
        start = extent.start
        if not extent.HasField("length") and start:
            raise ValueError("a slice has no length")
        if start < 0 or length < 0 or start + length > dim.size:
            raise ValueError("a slice is not within its tensor")
        shape.append(length)
    return tuple(shape)


def _slice_keys(
    name: bytes, proto: tensor_bundle_pb2.BundleEntryProto
) -> list[bytes]:
    """The keys of a tensor's slices."""
    return [
        _slice_key(
            name,
            [
                (e.start, e.length if e.HasField("length") else -1)
                for e in piece.extent
            ],
        )
        for piece in proto.slices
    ]


def _slice_key(name: bytes, extents: Sequence[tuple[int, int]]) -> bytes:
    """The key of a slice: its tensor's name, and where it begins and ends.

    As tensorflow/core/util/saved_tensor_slice_util.h has it, in the code of
    tensorflow/core/lib/strings/ordered_code.h.

    Args:
        name: the tensor's name.
        extents: per dimension, the beginning and the length, -1 for all of it.
    """
    escaped = name.replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff")
    return b"".join(
        [
            _unsigned(0),
            escaped + b"\0\1",
            _unsigned(len(extents)),
            *(_signed(number) for extent in extents for number in extent),
        ]
    )


def _unsigned(value: int) -> bytes:
    size = -(-value.bit_length() // 8)
    return bytes([size]) + value.to_bytes(size, "big")


def _signed(value: int) -> bytes:
    """The length in unary in the first bits, then the number."""
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    ones = (1 << size) - 1
    header = ones << (8 * size - size)
    code = (value & ((1 << 8 * size) - 1)) ^ header
    return code.to_bytes(size, "big")
