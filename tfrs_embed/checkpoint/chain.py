"""Chains of checkpoints: a full one, and deltas of what changed after it.

A delta is a TensorFlow checkpoint that holds only the changed rows of tables,
under `<table>/delta`, and all other values as a full checkpoint does. A reader
of a delta reads its whole chain, as if it were one full checkpoint. Deltas for
servers begin with an export, and are applied one by one. Each file of either
kind has a header, which says which file it continues.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.names import DELTA, SUFFIX, is_plain
from tfrs_embed.checkpoint.rows import (
    KEYS,
    REMOVED,
    ROWS,
    TEXT,
    CheckpointValue,
)
from tfrs_embed.checkpoint.stored_pieces import REMEDY, damaged
from tfrs_embed.ops.update import PARAMETERS

if TYPE_CHECKING:
    from tfrs_embed.checkpoint.change_tracking import ChangedRows, TrackedTable

# So many rows in a row are skipped, and not read.
_GAP = 64
#: The tensor with a file's `Link`: [5] strings, in the order of its attributes.
HEADER = "tfrs_embed_delta"
# More than a header has whose file's name is as long as names can be.
_HEADER_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Link:
    """A file's place in a chain of checkpoints, or of updates of a server.

    Attributes:
        chain: the id of the chain's first file: a full checkpoint or an export.
        number: 0 for the first file, then 1 and so on.
        id: the file's own id, random.
        since: the id of the file that this one continues; the first file's own.
        previous: the name of the file that this one continues: a checkpoint's
            in the same folder, or an export's; "" for the first file.
    """

    chain: int
    number: int
    id: int
    since: int
    previous: str = dataclasses.field(default="", kw_only=True)

    @classmethod
    def first(cls) -> Link:
        """Returns the place of a full checkpoint or an export."""
        new = secrets.randbits(63)
        return cls(new, 0, new, new)

    def next(self, path: str) -> Link:
        """Returns the place of a file that continues this one, at `path`."""
        name = os.path.basename(os.path.abspath(path))
        new = secrets.randbits(63)
        return Link(self.chain, self.number + 1, new, self.id, previous=name)

    def header(self) -> tf.Tensor:
        """Returns the tensor that `HEADER` names."""
        return tf.constant([*map(str, dataclasses.astuple(self))])


class UnfinishedFile(NamedTuple):
    """A file of a chain that is being written.

    Attributes:
        link: its place in the chain.
        changed: the tables of which it holds changed rows only, and these.
        found: the values that were written, by key; the writer adds them.
    """

    link: Link
    changed: Mapping[TrackedTable, ChangedRows]
    found: dict[str, CheckpointValue]


# Each variable that is made after a restore is restored by itself: as long as
# somebody keeps the chain's reader, they share it.
_readers: weakref.WeakValueDictionary[str, ChainReader] = (
    weakref.WeakValueDictionary()
)

_writing: contextvars.ContextVar[UnfinishedFile | None] = (
    contextvars.ContextVar("writing", default=None)
)


@contextlib.contextmanager
def writing(file: UnfinishedFile) -> Iterator[None]:
    """Makes checkpoints that are written in this context files of a chain."""
    token = _writing.set(file)
    try:
        yield
    finally:
        _writing.reset(token)


def being_written() -> UnfinishedFile | None:
    """The file of the present context."""
    return _writing.get()


def link_of(reader: BundleReader) -> Link | None:
    """Returns a checkpoint's place in a chain; None: it is in none.

    Raises:
        tf.errors.OpError: the header is damaged.
    """
    if HEADER not in reader.shapes:
        return None
    where = f"'{reader.prefix}' does not say what it continues: its header"
    if reader.dtypes[HEADER] != tf.string or reader.shapes[HEADER] != [5]:
        raise damaged(f"{where} is no vector of five strings")
    if sum(piece.size for piece in reader.pieces[HEADER]) > _HEADER_BYTES:
        raise damaged(f"{where} has more than {_HEADER_BYTES} bytes")
    *numbers, name = (
        each.decode(errors="replace") for each in reader.read(HEADER).numpy()
    )
    if not all(n.isdecimal() and int(n) < 1 << 63 for n in numbers):
        raise damaged(f"{where} has the numbers {numbers}")
    link = Link(*map(int, numbers), previous=name)
    if not (is_plain(name) if link.number else not name):
        raise damaged(
            f"{where} says that number {link.number} continues {name!r}: from "
            "1 on a file continues one by its name, and 0 continues none"
        )
    return link


def read(prefix: str) -> BundleReader:
    """Returns a reader of a checkpoint, with its chain if it is a delta.

    Raises:
        tf.errors.OpError: a file is missing, damaged, or of another chain.
    """
    known = _readers.get(prefix)
    if known is not None and known.stamp == _stamp(prefix):
        return known
    reader = BundleReader(prefix)
    link = link_of(reader)
    if link is None or link.number == 0:
        return reader
    _readers[prefix] = made = ChainReader(prefix)
    return made


def _stamp(prefix: str) -> tuple[int, int]:
    """Returns numbers that change if a file is replaced."""
    found = tf.io.gfile.stat(f"{prefix}.index")
    return found.mtime_nsec, found.length


class ChainReader(BundleReader):
    """Reads the full checkpoint that a delta and its chain stand for.

    It has the tensors of that checkpoint, without those of changed rows; merged
    ones have no pieces.

    Raises:
        tf.errors.OpError: a file is missing, damaged, or of another chain.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.stamp = _stamp(prefix)
        #: The files, from the full checkpoint to the last delta.
        self.files = files_of(prefix)
        # The merged tensors, by name: a table's merger and the part's name.
        self._merged: dict[str, tuple[_Merger, str]] = {}
        for name in list(self.shapes):
            for part, kind in ((ROWS, _MergedRows), (KEYS, _MergedKeys)):
                if name.endswith(f"/{DELTA}/{part}{SUFFIX}"):
                    path = name[: -len(f"/{DELTA}/{part}{SUFFIX}")]
                    self._add(path, kind(path, self.files))

    def _add(self, path: str, merger: _Merger) -> None:
        for name in [
            n for n in self.shapes if n.startswith(f"{path}/{DELTA}/")
        ]:
            del self.shapes[name], self.dtypes[name], self.pieces[name]
        for part, (shape, dtype) in merger.parts().items():
            name = f"{path}/{part}{SUFFIX}"
            self._merged[name] = merger, part
            self.shapes[name], self.dtypes[name] = shape, dtype

    def read_array(self, name: str, start: int, size: int) -> np.ndarray:
        if name not in self._merged:
            return super().read_array(name, start, size)
        if size == 0:
            shape = [0, *self.shapes[name][1:]]
            return np.zeros(shape, self.dtypes[name].as_numpy_dtype)
        merger, part = self._merged[name]
        rows = merger.read(part, start, size)
        self._count(name, rows.shape)
        return rows


def files_of(prefix: str) -> list[BundleReader]:
    """Returns readers of a checkpoint's chain, the full checkpoint first.

    Raises:
        tf.errors.OpError: a file is missing, damaged, or of another chain.
    """
    files: list[BundleReader] = []
    last: Link | None = None
    while True:
        try:
            reader = BundleReader(prefix)
        except tf.errors.NotFoundError:
            if not files:
                raise
            raise tf.errors.NotFoundError(
                None,
                None,
                f"'{files[-1].prefix}' is a delta that continues "
                f"'{prefix}', which is missing. {REMEDY}",
            ) from None
        link = link_of(reader)
        if last and (
            link is None or (link.chain, link.id) != (last.chain, last.since)
        ):
            raise damaged(
                f"'{files[-1].prefix}' is a delta that continues another file "
                f"than '{prefix}', which has been replaced"
            )
        if last and link and link.number != last.number - 1:
            raise damaged(
                f"'{files[-1].prefix}' is number {last.number} of its chain, "
                f"but continues '{prefix}', which is number {link.number}"
            )
        files.append(reader)
        if link is None or link.number == 0:
            return files[::-1]
        last = link
        prefix = os.path.join(os.path.dirname(prefix), link.previous)


class _Merger:
    """Reads a table as the files of a chain leave it.

    `path` is the table's in the keys of checkpoints. The first of `files` has
    the whole table.

    Raises:
        tf.errors.DataLossError: a file lacks a part of the table, or has
            another number of its rows.
    """

    def __init__(self, path: str, files: list[BundleReader]) -> None:
        self._path = path
        # By file, the number of the table's rows in it.
        self._rows: list[int] = []
        # From the last file that has the whole table on.
        key = f"{path}/{PARAMETERS}{SUFFIX}"
        whole = [i for i, file in enumerate(files) if key in file.shapes]
        if not whole:
            raise damaged(
                f"'{files[-1].prefix}' has changed rows of '{path}', and no "
                "file of its chain has all rows"
            )
        self._files = files[whole[-1] :]

    def _key(self, file: int, part: str) -> str:
        """A part's key in one of the files."""
        folder = f"/{DELTA}" * (file > 0)
        return f"{self._path}{folder}/{part}{SUFFIX}"

    def _integers(self, file: int, part: str) -> np.ndarray:
        """Reads a vector of a file."""
        reader, key = self._files[file], self._key(file, part)
        shape = reader.shapes.get(key, [])
        if len(shape) != 1 or not reader.dtypes[key].is_integer:
            raise damaged(f"'{reader.prefix}' has no vector of '{key}'")
        if shape == [0]:
            return np.zeros([0], np.int64)
        return reader.read_array(key, 0, shape[0])

    def parts(self) -> dict[str, tuple[list[int], tf.DType]]:
        """Returns the shapes and dtypes of the table's merged parts."""
        last = len(self._files) - 1
        start = self._key(last, "")[: -len(SUFFIX)]
        found = {}
        for name in self._files[last].shapes:
            part = name[len(start) : -len(SUFFIX)]
            if name.startswith(start) and part not in (ROWS, REMOVED):
                found[part] = self._part(part)
        return found

    def _part(self, part: str) -> tuple[list[int], tf.DType]:
        """Returns a merged part's shape and dtype; checks it in all files."""
        keys = [self._key(file, part) for file in range(len(self._files))]
        row = self._files[0].shapes.get(keys[0], [])[1:]
        for reader, key, rows in zip(
            self._files, keys, self._rows, strict=True
        ):
            dtype = reader.dtypes.get(key, tf.string)
            is_number = dtype.is_floating or dtype.is_integer
            if not is_number or reader.shapes[key] != [rows, *row]:
                raise damaged(
                    f"'{reader.prefix}' has no '{key}' of {rows} rows of the "
                    f"shape {row}"
                )
        return [self._size(), *row], self._files[0].dtypes[keys[0]]

    def _size(self) -> int:
        raise NotImplementedError

    def read(self, part: str, start: int, size: int) -> np.ndarray:
        """Returns rows of the merged table."""
        raise NotImplementedError


class _MergedRows(_Merger):
    """A table of ids: later rows replace earlier ones."""

    def __init__(self, path: str, files: list[BundleReader]) -> None:
        super().__init__(path, files)
        # By delta, vectors of ascending rows, one for each worker that wrote,
        # each with its place.
        self._runs: list[list[tuple[int, np.ndarray]]] = []
        self._rows = self._files[0].shapes[self._key(0, PARAMETERS)][:1] or [0]
        for file in range(1, len(self._files)):
            rows = self._integers(file, ROWS)
            ends = np.flatnonzero(np.diff(rows) <= 0) + 1
            starts = [0, *ends.tolist()]
            runs = np.split(rows, ends)
            self._runs.append(list(zip(starts, runs, strict=True)))
            self._rows.append(len(rows))

    def _size(self) -> int:
        return self._rows[0]

    def read(self, part: str, start: int, size: int) -> np.ndarray:
        first = self._files[0]
        rows = np.array(first.read_array(self._key(0, part), start, size))
        for file, runs in enumerate(self._runs, 1):
            reader, key = self._files[file], self._key(file, part)
            for place, run in runs:
                a, b = np.searchsorted(run, [start, start + size])
                if a < b:
                    new = reader.read_array(key, place + int(a), int(b - a))
                    rows[run[a:b] - start] = new
        return rows


class _MergedKeys(_Merger):
    """A table of keys: the keys that each file was the last to change."""

    def __init__(self, path: str, files: list[BundleReader]) -> None:
        super().__init__(path, files)
        # By file, the places there of the keys that no later file changes.
        self._places: list[np.ndarray] = []
        later = np.zeros([0], np.int64)
        for file in reversed(range(len(self._files))):
            keys = self._integers(file, KEYS)
            self._rows.insert(0, len(keys))
            self._places.insert(0, np.flatnonzero(~np.isin(keys, later)))
            if file:
                removed = self._integers(file, REMOVED)
                later = np.concatenate([later, keys, removed])
        self._ends = np.cumsum([len(places) for places in self._places])

    def _part(self, part: str) -> tuple[list[int], tf.DType]:
        if part != TEXT:
            return super()._part(part)
        for file, (reader, rows) in enumerate(
            zip(self._files, self._rows, strict=True)
        ):
            # A table may have kept no texts before.
            key = self._key(file, part)
            if key in reader.shapes and (
                reader.dtypes[key] != tf.string or reader.shapes[key] != [rows]
            ):
                raise damaged(
                    f"'{reader.prefix}' has no '{key}' of {rows} strings"
                )
        return [self._size()], tf.string

    def _texts(self, file: int) -> np.ndarray:
        """Reads the texts of a file's keys, which TensorFlow reads whole."""
        reader, key = self._files[file], self._key(file, TEXT)
        if key not in reader.shapes or not self._rows[file]:
            return np.full(self._rows[file], b"", object)
        return reader.read(key).numpy()

    def _size(self) -> int:
        return int(self._ends[-1])

    def read(self, part: str, start: int, size: int) -> np.ndarray:
        found = []
        for file, (end, places) in enumerate(
            zip(self._ends, self._places, strict=True)
        ):
            first = end - len(places)
            wanted = places[
                max(0, start - first) : max(0, start + size - first)
            ]
            reader, key = self._files[file], self._key(file, part)
            if part == TEXT:
                found.append(self._texts(file)[wanted])
                continue
            # Few rows that are not wanted are read with the others.
            gaps = np.flatnonzero(np.diff(wanted) > _GAP) + 1
            for each in np.split(wanted, gaps) if len(wanted) else ():
                low, high = int(each[0]), int(each[-1])
                values = reader.read_array(key, low, high + 1 - low)
                found.append(values[each - low])
        return np.concatenate(found)
