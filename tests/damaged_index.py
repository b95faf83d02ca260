"""Writes checkpoints' indexes that are damaged, with right checksums.

As a script it damages the index of a checkpoint at random, again and again,
and reads each: `damaged_index.py PREFIX SEED COUNT`.
"""

import os
import random
import sys

import google_crc32c
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.index import Index
from tfrs_embed.checkpoint.stored import masked_crc32c
from tfrs_embed.tools.conversion.command import main

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
NUMBERS = [0, 1, -1, 2, 7, 127, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]


def varint(value):
    data = b""
    while value >= 0x80:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def block(entries):
    data = b"".join(
        varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in entries
    )
    return data + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")


def table(blocks):
    """A file of a block of entries, one of nothing, and one of handles."""
    file, handles = b"", []
    for data in blocks:
        handles.append(varint(len(file)) + varint(len(data)))
        crc = masked_crc32c(google_crc32c.value(data + b"\0"))
        file += data + b"\0" + crc.to_bytes(4, "little")
    return file, handles


def write(path, entries, change_block=lambda data: data):
    """Writes an index of entries: (key, value) in their order."""
    data = change_block(block(entries))
    last = max((key for key, _ in entries), default=b"")
    _, handles = table([data, block([])])
    file, handles = table([data, block([]), block([(last, handles[0])])])
    footer = handles[1] + handles[2]
    with open(path, "wb") as out:
        out.write(file + footer.ljust(40, b"\0") + MAGIC)


def read(prefix):
    """The entries of a checkpoint's index."""
    return dict(Index(prefix)._entries())


def changed_proto(value, rng):
    proto = tensor_bundle_pb2.BundleEntryProto.FromString(value)
    number = rng.choice(NUMBERS)
    small = rng.choice([0, 1, 2, 3, 7, 9, 20, 21, 99, 2**31 - 1, -1, -(2**31)])
    kind = rng.randrange(9)
    if kind == 0 and proto.shape.dim:
        rng.choice(proto.shape.dim).size = number
    elif kind == 1:
        proto.shape.dim.add().size = number
    elif kind == 2:
        proto.dtype = small
    elif kind == 3:
        proto.shard_id = small
    elif kind == 4:
        proto.offset = number
    elif kind == 5:
        proto.size = number
    elif kind == 6 and proto.slices and rng.choice(proto.slices).extent:
        extent = rng.choice(rng.choice(proto.slices).extent)
        setattr(extent, rng.choice(["start", "length"]), number)
    elif kind == 7:
        proto.slices.add().extent.add().length = number
    else:
        proto.shape.unknown_rank = True
    return proto.SerializeToString()


def damage(entries, rng):
    """Entries, and a change of their block."""
    entries = list(entries.items())
    kind = rng.randrange(6)
    at = rng.randrange(len(entries))
    key, value = entries[at]
    if kind <= 2:
        for _ in range(rng.choice([1, 1, 2])):
            value = changed_proto(value, rng)
        entries[at] = key, value
    elif kind == 3:
        _, other = rng.choice(entries)
        entries[at] = key, other
    elif kind == 4:
        data = bytearray(value or b"\0")
        data[rng.randrange(len(data))] = rng.randrange(256)
        entries[at] = key, bytes(data)
    else:

        def change(data):
            data = bytearray(data)
            for _ in range(rng.choice([1, 3])):
                data[rng.randrange(len(data))] = rng.choice([0, 127, 128, 255])
            return bytes(data)

        return entries, change
    return entries, lambda data: data


def read_all(prefix):
    try:
        reader = BundleReader(prefix)
    except tf.errors.DataLossError as error:
        assert prefix in error.message, error
        return
    for name in reader.shapes:
        try:
            reader.read(name)
        except tf.errors.OpError as error:
            # What TensorFlow can't have: it is known before it makes room.
            assert name in error.message, error


def run(prefix, seed, count):
    entries = read(prefix)
    for i in range(seed, seed + count):
        rng = random.Random(i)
        print(i, flush=True)
        write(f"{prefix}.index", *damage(entries, rng))
        read_all(prefix)
        assert main(["inspect", prefix]) in (0, 1)
        new = f"{prefix}-new-{i}"
        if main(["convert", prefix, new]) == 0:
            os.remove(f"{new}.index")


if __name__ == "__main__":
    run(sys.argv[1], *map(int, sys.argv[2:]))
