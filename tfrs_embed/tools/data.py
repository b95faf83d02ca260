"""Batches of Parquet files, and of streams, as a `tf.data.Dataset`.

The dataset of files is a range of batch numbers, and a function from a number
to its batch. What the function keeps in memory changes no batch: TensorFlow
saves an iterator as its next number, and restores it exactly.

Example:
    >>> import pyarrow as pa
    >>> import pyarrow.parquet as pq
    >>> pq.write_table(pa.table({"user": ["ann", "bob"]}), "clicks.parquet")
    >>> dataset = tfrs_embed.data.parquet_dataset(
    ...     "clicks.parquet", ["user"], batch_size=2
    ... )
    >>> [batch["user"].numpy().tolist() for batch in dataset]
    [[b'ann', b'bob']]
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.arguments import flag, integer
from tfrs_embed.compat.arrow import import_pyarrow, reading_parquet
from tfrs_embed.tools.streams import stream_dataset

__all__ = ["parquet_dataset", "stream_dataset"]

#: Decoded row groups in memory: the one that batches are cut from, the one
#: before, whose last batch may still be on its way, and the next.
_GROUPS_IN_MEMORY = 3
#: Threads that read footers, which takes a file system's latency each.
_FOOTER_THREADS = 16


def parquet_dataset(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    columns: Sequence[str],
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    drop_remainder: bool = False,
    default_values: Mapping[str, Any] | None = None,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns a dataset of batches of the rows of Parquet files.

    An element is a dict of a tensor for each column:

    | column | tensor |
    |---|---|
    | integers | int64 [batch]; of uint64 uint64 |
    | float16, float32, float64, bool | the same dtype, [batch] |
    | string, binary, or dictionaries of them | string [batch], their bytes |
    | list of one of these | RaggedTensor [batch, None] |
    | fixed-size list of n of these | [batch, n] |

    Batches cross row groups and files, and all but the last one have
    `batch_size` rows. The number of batches is known (`cardinality()`). An
    iterator's state is the number of its next batch: checkpoints and
    `tfrs_embed.checkpoint.FitPosition` continue with this batch, and read no
    row before it, except those of its own row group. With `shuffle_seed` put
    `repeat` right behind the dataset: what runs ahead, as `map` and `prefetch`
    do, would come to the end of an iteration, where TensorFlow saves
    no seeds.

    Up to three row groups are in memory, decoded. A thread reads the next one;
    end the input with `prefetch`, as any, so that batches are made ahead, too.
    Needs pyarrow: `pip install 'tfrs_embed[parquet]'`.

    Example:
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> rows = {"user": ["ann", "bob", "ann"], "seen": [[7, 42], [], [5]]}
        >>> pq.write_table(pa.table(rows), "clicks.parquet")
        >>> dataset = tfrs_embed.data.parquet_dataset(
        ...     "clicks.parquet", ["user", "seen"], batch_size=2
        ... )
        >>> [batch["seen"].to_list() for batch in dataset]
        [[[7, 42], []], [[5]]]

    Args:
        files: paths, read in this order; or one path or pattern of
            `tf.io.gfile.glob`, whose files are read in the order of their
            names. They may be on any file system of `tf.io.gfile`.
        columns: the names of the columns to read.
        batch_size: the number of rows in a batch: with `input_context` in a
            batch of one input pipeline.
        shuffle_seed: a number that determines the order of the row groups, and
            of the rows within each, another one in each iteration; None: the
            order of the files. Together with `tf.random.set_seed`, as in
            `tf.data`: all workers must set the same one.
        drop_remainder: whether to leave out the rows that don't fill a batch.
        default_values: by the column's name, a value in place of nulls; a list
            column's is that of null elements. Without one, a null is an error.
        input_context: of several input pipelines, as
            `tf.distribute.Strategy.distribute_datasets_from_function` has
            them, each gets other rows, equally many but for one. There may be
            fewer files, and fewer row groups, than pipelines.

    Returns:
        The dataset. Its iterators raise `tf.errors.InvalidArgumentError` for a
        null, and for text of a string column that is not UTF-8, with the
        column, the file and the row's number in it. Bytes of a binary column
        may be any.

    Raises:
        ImportError: pyarrow is not installed.
        TypeError: an argument has a wrong type.
        ValueError: no file matches; a file can't be read as Parquet, lacks a
            column, or has it in another type than the first file; the type of
            a column is none of the above; or there are no rows, or too few for
            one batch of each pipeline with `drop_remainder`.
    """
    batch_size = integer(batch_size, "batch_size")
    if shuffle_seed is not None:
        shuffle_seed = integer(shuffle_seed, "shuffle_seed", 0)
    if isinstance(columns, str) or not all(isinstance(c, str) for c in columns):
        raise TypeError(f"columns must be a list of names, got {columns!r}.")
    names = list(columns)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns must be different names, got {names}.")
    pipelines, pipeline = 1, 0
    if input_context is not None:
        pipelines = input_context.num_input_pipelines
        pipeline = input_context.input_pipeline_id
    source = _Files(_paths(files), names, dict(default_values or {}))
    rows = sum(source.counts)
    if flag(drop_remainder, "drop_remainder"):
        rows -= rows % (pipelines * batch_size)
    if rows < pipelines:
        raise ValueError(
            f"{sum(source.counts):,} rows of {_few(source.paths)} are too few "
            f"for {pipelines} input pipelines"
            f"{f' with batches of {batch_size:,}' * drop_remainder}."
        )
    span = range(
        rows * pipeline // pipelines, rows * (pipeline + 1) // pipelines
    )
    batches = -(-len(span) // batch_size)
    reader = _Reader(source, span, batch_size, shuffle_seed is not None)
    dtypes = [dtype for column in source.columns for dtype in column.parts]

    def read(seed: tf.Tensor, number: tf.Tensor) -> dict[str, Any]:
        # TensorFlow saves iterators of functions without state only.
        parts = iter(
            tf.numpy_function(
                reader.read, [seed, number], dtypes, stateful=False
            )
        )
        length = batch_size if drop_remainder else None
        return {
            name: column.tensor(parts, length)
            for name, column in zip(names, source.columns, strict=True)
        }

    if shuffle_seed is None:
        seeds = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
    else:
        seeds = tf.data.Dataset.random(
            shuffle_seed, rerandomize_each_iteration=True
        ).take(1)
    numbers = tf.data.Dataset.range(batches)
    # Python makes the batches, one after the other: no parallel calls.
    dataset = seeds.flat_map(
        lambda seed: numbers.map(functools.partial(read, seed))
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def _paths(files: Any) -> list[str]:
    if not isinstance(files, (str, os.PathLike)):
        paths = [os.fspath(path) for path in files]
        if not paths:
            raise ValueError("files is an empty list.")
        return paths
    paths = sorted(tf.io.gfile.glob(os.fspath(files)))
    if not paths:
        raise ValueError(f"No file matches '{os.fspath(files)}'.")
    return paths


def _few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1:,} more files" if len(paths) > 1 else ""
    return f"'{paths[0]}'{more}"


class _Column(NamedTuple):
    """The tensor that a column becomes.

    Attributes:
        dtype: of its values.
        is_list: whether it is a list of any length.
        size: of a fixed-size list; None: it is none.
    """

    dtype: tf.DType
    is_list: bool = False
    size: int | None = None

    @property
    def parts(self) -> list[tf.DType]:
        """The dtypes of the arrays that a batch has of it."""
        return [self.dtype, tf.int64] if self.is_list else [self.dtype]

    def tensor(self, parts: Iterator[tf.Tensor], length: int | None) -> Any:
        """Takes the column's parts, and returns its tensor."""
        values = next(parts)
        if self.is_list:
            lengths = tf.ensure_shape(next(parts), [length])
            return tf.RaggedTensor.from_row_lengths(
                tf.ensure_shape(values, [None]), lengths, validate=False
            )
        inner = [] if self.size is None else [self.size]
        return tf.ensure_shape(values, [length, *inner])

    def __str__(self) -> str:
        kind = "text or bytes" if self.dtype == tf.string else self.dtype.name
        size = "" if self.size is None else f"{self.size} "
        lists = "lists of " if self.is_list or size else ""
        return f"{lists}{size}{kind}"


class _Values(NamedTuple):
    """A column of a row group.

    Attributes:
        values: numbers, [rows] or [rows, size]; of a list of any length those
            of all rows.
        words: if the values are places in it, [n] bytes.
        splits: where each row's values begin, and where the last one's end.
    """

    values: np.ndarray
    words: np.ndarray | None
    splits: np.ndarray | None

    def cut(self, rows: slice) -> list[np.ndarray]:
        """Returns the column's parts of some rows."""
        lengths = []
        if self.splits is not None:
            splits = self.splits[rows.start : rows.stop + 1]
            lengths, rows = [np.diff(splits)], slice(splits[0], splits[-1])
        values = self.values[rows]
        return [values if self.words is None else self.words[values], *lengths]


class _Files:
    """Files that have been checked, and their row groups.

    Attributes:
        paths: the files.
        columns: what the columns become.
        groups: of each row group that has rows, its file, its number in the
            file, and the number of its first row there.
        counts: the rows of each of these groups.
    """

    def __init__(
        self, paths: list[str], names: list[str], defaults: dict[str, Any]
    ) -> None:
        self._arrow = import_pyarrow("parquet_dataset")
        self.paths, self._names, self._defaults = paths, names, defaults
        self.groups: list[tuple[str, int, int]] = []
        self.counts: list[int] = []
        with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
            footers = list(threads.map(self._footer, paths))
        self.columns: list[_Column] = footers[0][0]
        for path, (columns, counts) in zip(paths, footers, strict=True):
            for each in zip(names, columns, self.columns, strict=True):
                if each[1] != each[2]:
                    raise ValueError(
                        f"Column '{each[0]}' of '{path}' is of {each[1]}, and "
                        f"of '{paths[0]}' of {each[2]}."
                    )
            starts = [0, *itertools.accumulate(counts)]
            for group, count in enumerate(counts):
                if count:
                    self.groups.append((path, group, starts[group]))
                    self.counts.append(count)
        self._check_defaults()
        # Each text is converted once for a row group, not once for a row.
        self._texts = [
            name
            for name, column in zip(names, self.columns, strict=True)
            if column == _Column(tf.string)
        ]

    def _check_defaults(self) -> None:
        columns = dict(zip(self._names, self.columns, strict=True))
        for name, value in self._defaults.items():
            if name not in columns:
                raise ValueError(
                    f"default_values has '{name}', which is none of the "
                    f"columns {self._names}."
                )
            dtype = columns[name].dtype
            try:
                tf.constant(value, dtype, [])
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The default value of column '{name}' must be of "
                    f"{dtype.name}, got {value!r}."
                ) from error

    def read(self, number: int, seed: int | None) -> list[_Values]:
        """Reads a row group; with a seed in another order of rows."""
        path, group, start = self.groups[number]
        with reading_parquet(
            self._arrow, path, read_dictionary=self._texts
        ) as file:
            metadata = file.metadata
            if (
                metadata.num_row_groups <= group
                or metadata.row_group(group).num_rows != self.counts[number]
            ):
                raise ValueError(f"'{path}' has changed since it was opened.")
            table = file.read_row_group(group, self._names)
        rows = np.arange(len(table))
        if seed is not None:
            rows = np.random.default_rng([seed, number]).permutation(rows)
            table = table.take(rows)
        return [
            self._values(name, table[name].combine_chunks(), path, start + rows)
            for name in self._names
        ]

    def _footer(self, path: str) -> tuple[list[_Column], list[int]]:
        """Returns a file's columns, and the rows of its row groups."""
        with reading_parquet(self._arrow, path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        columns = []
        for name in self._names:
            if name not in schema.names:
                raise ValueError(
                    f"'{path}' has no column '{name}', but {schema.names}."
                )
            kind = schema.field(name).type
            column = self._column(kind)
            if column is None:
                raise ValueError(
                    f"Column '{name}' of '{path}' is of {kind}, which can't be "
                    "read: it must be of integers, floats, booleans, strings "
                    "or bytes, or of lists of one of them."
                )
            columns.append(column)
        groups = range(metadata.num_row_groups)
        return columns, [metadata.row_group(i).num_rows for i in groups]

    def _column(self, kind: Any) -> _Column | None:
        """Returns what a column of a type becomes; None: it can't be read."""
        types = self._arrow.types
        is_list = types.is_list(kind) or types.is_large_list(kind)
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        if is_list or size is not None:
            kind = kind.value_type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if self._is_text(kind) or (
            types.is_binary(kind) or types.is_large_binary(kind)
        ):
            return _Column(tf.string, is_list, size)
        if types.is_integer(kind):
            dtype = tf.uint64 if types.is_uint64(kind) else tf.int64
            return _Column(dtype, is_list, size)
        if types.is_floating(kind) or types.is_boolean(kind):
            return _Column(tf.as_dtype(kind.to_pandas_dtype()), is_list, size)
        return None

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def _values(
        self, name: str, array: Any, path: str, rows: np.ndarray
    ) -> _Values:
        """Checks and converts a column, of rows with these numbers."""
        types, kind, splits = self._arrow.types, array.type, None
        default = self._defaults.get(name)

        def fail(at: int, what: str) -> None:
            row = at if splits is None else np.searchsorted(splits, at, "right")
            row = rows[row - (splits is not None)]
            raise ValueError(
                f"Column '{name}' of '{path}' has {what} in row {row:,}."
            )

        if types.is_nested(kind):
            if array.null_count:
                fail(_first(array.is_null()), "a null in place of a list")
            lengths = self._arrow.compute.list_value_length(array)
            splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            array = array.flatten()
        if array.null_count:
            if default is None:
                fail(_first(array.is_null()), "a null")
            array = array.fill_null(default)
        words = array.dictionary if types.is_dictionary(array.type) else None
        for at in self._not_utf8(array if words is None else words):
            if words is not None:
                at = _first(self._arrow.compute.equal(array.indices, at))
            fail(at, "text that is not UTF-8")
        if words is None:
            values = self._numpy(array)
        else:
            words, values = self._numpy(words), array.indices.to_numpy()
        if types.is_fixed_size_list(kind):
            values, splits = values.reshape([-1, kind.list_size]), None
        return _Values(values, words, splits)

    def _not_utf8(self, array: Any) -> Iterator[int]:
        """Yields the places of texts that are not UTF-8."""
        if not self._is_text(array.type):
            return
        try:
            array.validate(full=True)
        except self._arrow.ArrowInvalid:
            for at, text in enumerate(self._numpy(array)):
                try:
                    text.decode()
                except UnicodeDecodeError:
                    yield at

    def _numpy(self, array: Any) -> np.ndarray:
        if self._is_text(array.type):
            array = array.cast(self._arrow.large_binary())
        values = array.to_numpy(zero_copy_only=False)
        if values.dtype.kind in "iu" and values.dtype != np.uint64:
            return values.astype(np.int64, copy=False)
        return values


def _first(flags: Any) -> int:
    return int(flags.to_numpy(zero_copy_only=False).argmax())


class _Reader:
    """Makes batches by number.

    Args:
        files: the files.
        span: which rows to read, by their numbers in the order of an iteration.
        batch_size: the rows of a batch.
        shuffled: whether the order depends on the iteration's seed.
    """

    def __init__(
        self, files: _Files, span: range, batch_size: int, shuffled: bool
    ) -> None:
        self._files, self._span = files, span
        self._batch_size, self._shuffled = batch_size, shuffled
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._read: dict[tuple[int, int], Future[list[_Values]]] = {}
        # An iteration may begin before another one has ended.
        self._order = functools.lru_cache(4)(self._make_order)

    def read(self, seed: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        """Returns the parts of all columns of a batch of an iteration."""
        order, ends = self._order(int(seed))
        start = self._span.start + int(number) * self._batch_size
        stop = min(start + self._batch_size, self._span.stop)
        found = []
        for place in range(
            bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1
        ):
            begin = ends[place] - self._files.counts[order[place]]
            rows = slice(max(start - begin, 0), min(stop, ends[place]) - begin)
            group = self._group(int(seed), order[place])
            if ends[place] < self._span.stop:
                self._group(int(seed), order[place + 1])
            found.append(
                [part for column in group.result() for part in column.cut(rows)]
            )
        if len(found) == 1:
            return found[0]
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _make_order(self, seed: int) -> tuple[list[int], list[int]]:
        """Returns the order of the row groups, and where each ends."""
        order = np.arange(len(self._files.counts))
        if self._shuffled:
            order = np.random.default_rng(seed).permutation(order)
        ends = np.cumsum(np.array(self._files.counts)[order])
        return order.tolist(), ends.tolist()

    def _group(self, seed: int, number: int) -> Future[list[_Values]]:
        """Returns a row group, which a thread reads if it is not in memory."""
        with self._lock:
            group = self._read.pop((seed, number), None)
            if group is None:
                group = self._thread.submit(
                    self._files.read, number, seed if self._shuffled else None
                )
            self._read[seed, number] = group
            while len(self._read) > _GROUPS_IN_MEMORY:
                del self._read[next(iter(self._read))]
        return group
