"""Chains of a full checkpoint and deltas: what is in them, and one file of all.

See `tfrs_embed.checkpoint.DeltaManager`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfrs_embed.checkpoint import bundle, chain, listing
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, blocks
from tfrs_embed.checkpoint.names import DELTA, SUFFIX
from tfrs_embed.checkpoint.rows import KEYS, REMOVED, ROWS
from tfrs_embed.compat.files import temporary_folder
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion.objects import GRAPH


@dataclasses.dataclass(frozen=True)
class ChainFile:
    """A file of a chain.

    Attributes:
        path: the checkpoint's path.
        number: 0 for the first file of a chain, then 1 and so on.
        kind: "full"; "delta"; or "tables", a full one of tables alone, which a
            thread has written.
        bytes: the size of its index and its data files.
        rows: a delta's numbers of changed rows or keys, by the table's path
            among the saved objects.
        removed: a delta's numbers of removed keys, by the table's path.
    """

    path: str
    number: int
    kind: str
    bytes: int
    rows: dict[str, int]
    removed: dict[str, int]


def find_chains(path: str) -> list[list[ChainFile]]:
    """Finds the chains at a path: that of a delta, or all of a folder.

    Args:
        path: a path that `reading.read` takes.

    Returns:
        The files of each chain, the full checkpoint first. A full checkpoint
        without a delta is a chain of a folder only.

    Raises:
        tf.errors.OpError: a file is missing, damaged, or of another chain.
    """
    prefix = path.removesuffix(".index")
    listed, least = [prefix], 2
    if not tf.io.gfile.exists(f"{prefix}.index"):
        listed, least = listing.checkpoints(path), 1
    found: list[list[ChainFile]] = []
    seen: set[str] = set()
    # The last delta has all files of its chain.
    for prefix in reversed(listed):
        if prefix in seen:
            continue
        files = chain.files_of(prefix)
        seen |= {file.prefix for file in files}
        is_chain = chain.link_of(files[0]) is not None
        if is_chain and len(files) >= least:
            found.append([*map(_described, files)])
    return found[::-1]


def _described(file: BundleReader) -> ChainFile:
    link = chain.link_of(file)
    number = 0 if link is None else link.number
    kind = "delta" if number else "full" if GRAPH in file.shapes else "tables"
    names = {f"{file.prefix}.index"}
    names |= {piece.file for pieces in file.pieces.values() for piece in pieces}
    rows, removed = {}, {}
    for name, shape in file.shapes.items():
        path, _, part = name.removesuffix(SUFFIX).rpartition(f"/{DELTA}/")
        if path and part in (ROWS, KEYS):
            rows[path] = shape[0]
        elif path and part == REMOVED:
            removed[path] = shape[0]
    size = sum(tf.io.gfile.stat(name).length for name in names)
    return ChainFile(file.prefix, number, kind, size, rows, removed)


def reader_to_compact(prefix: str) -> chain.ChainReader:
    """Returns the reader of a delta.

    Raises:
        InputError: the checkpoint is no delta.
        tf.errors.OpError: a file is missing, damaged, or of another chain.
    """
    reader = chain.read(prefix)
    if not isinstance(reader, chain.ChainReader):
        raise InputError(
            f"'{prefix}' is no delta: it continues no other file, so there is "
            "nothing to merge. A delta is what "
            "tfrs_embed.checkpoint.DeltaManager saves between full checkpoints."
        )
    return reader


def compact(
    reader: chain.ChainReader, path: str, progress: Callable[[int], None]
) -> None:
    """Writes the full checkpoint that a delta and its chain stand for.

    Tables are copied block by block, other variables one by one. The index,
    which makes a checkpoint of data files, comes last. `progress` is called
    with numbers of bytes that were read.

    Raises:
        tf.errors.OpError: a file can't be read or written.
    """
    reader.progress = progress
    with temporary_folder(f"{path}_temp") as folder:
        writer = BundleWriter(f"{folder}/part")
        writer.add(chain.HEADER, chain.Link.first().header())
        for name, shape in reader.shapes.items():
            if name != chain.HEADER:
                _copy(reader, name, shape, writer)
        bundle.merge(writer.finish(), f"{folder}/all")
        bundle.move(f"{folder}/all", path)


def _copy(
    reader: chain.ChainReader,
    name: str,
    shape: list[int],
    writer: BundleWriter,
) -> None:
    # TensorFlow reads float16 and others only as they were written: in slices
    # or not.
    is_whole = len(reader.pieces.get(name, ())) == 1
    if is_whole or not shape or shape[0] == 0:
        writer.add(name, reader.read(name))
        return
    for start, size in blocks(shape, reader.dtypes[name]):
        rows = reader.read_rows(name, start, size)
        writer.add(name, rows, shape, start)
