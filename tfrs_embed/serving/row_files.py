"""Exports tables' rows as Parquet files, for feature stores."""

from __future__ import annotations

import collections
import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.change_tracking import ChangedRows, end_moments
from tfrs_embed.checkpoint.names import in_folder
from tfrs_embed.checkpoint.rows import KEYS, Rows
from tfrs_embed.compat.arguments import flag
from tfrs_embed.compat.arrow import ArrowFile, import_pyarrow
from tfrs_embed.distribution.failures import raised_on_all_workers
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving.tables import unique_name
from tfrs_embed.serving.workers import incomplete, joined, strategy_of
from tfrs_embed.storage.table_state import Tables, TableState

#: The columns that every file of rows has.
KEY = "key"
ROW = "row"
#: The column of string keys' fingerprints, in files that have their text.
FINGERPRINT = "fingerprint"


def export_rows(
    model: Any,
    folder: str | os.PathLike[str],
    since: Mapping[str, int | None] | None = None,
    slots: bool = False,
    counters: bool = False,
) -> dict[str, int | None]:
    """Exports the rows of a model's tables, or those that have changed.

    Each table has a folder `<folder>/<layer>/<table>` with a Parquet file
    `part-<worker>.parquet`, in row groups of about 16 MiB, of the columns

    - key: int64, the number of the row; of a table with `DynamicKeys` the key.
      uint64 keys keep their bits, and strings are the fingerprints that
      `tf.fingerprint` computes. If the table keeps the text of its keys:
      binary, the text, null if it isn't known; and the fingerprints are
    - fingerprint: int64, only of such a table.
    - row: a list of `dim` float32, of any dtype of the table.
    - step: int64, the number of the layer's updates; null if it counts none.
    - with `slots`, one for each slot of the optimizer, by its name: a list of
      `dim` float32; a float32 if the slot has one number for each row.
    - with `counters`, of a table with `DynamicKeys` that counts its keys' uses:
      frequency, int64, or score, float32, with eviction="score"; and last_used,
      int64, a step, or last_used_time, int64, microseconds since 1970.

    `import_rows` reads the folder into a model.

    A table with `DynamicKeys` also has `_removed-<worker>.parquet`, with the
    column key: keys that have lost their rows, and have none now, int64: of
    strings their fingerprints. The readers of whole folders skip names that
    begin with "_".

    With several workers all of them call this function, with a folder that all
    can see. Each writes the rows that it holds; the chief writes tables of
    which all have copies, and the worker with the first columns tables that are
    cut into columns. The files are written to `folder` + ".incomplete", which
    is renamed at the end. Call it between steps.

    The first call, before the first training step, begins to track changes,
    which takes one byte a row. Tables that Keras layers or TPUs hold are
    exported whole each time. `Embedding` layers aren't exported.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> movie = tf_keras.Input([], dtype=tf.int64, name="movie")
        >>> model = tf_keras.Model(movie, layer(movie))
        >>> since = tfrs_embed.serving.export_rows(model, "rows/0")
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(model(tf.constant([5, 3, 5])))
        >>> _ = tape.gradient(loss, model.trainable_variables)
        >>> since = tfrs_embed.serving.export_rows(model, "rows/1", since)
        >>> import pyarrow.parquet as pq
        >>> path = f"rows/1/{layer.name}/movie"
        >>> pq.read_table(path)["key"].to_pylist()
        [3, 5]

    Args:
        model: a Keras model, or a layer, whose tables are built.
        folder: the folder to make, on a file system of `tf.io.gfile`.
        since: what an earlier call in this process returned: rows that have
            changed since then are exported; None: all rows.
        slots: whether to export the optimizer's slots too.
        counters: whether to export what eviction rules know of keys, too. Of
            keys without rows, which admission rules count, nothing is exported.

    Returns:
        The moment of this export, for `since`: a number by "<layer>/<table>";
        None for a table whose changes aren't tracked.

    Raises:
        ImportError: pyarrow is not installed.
        TypeError: `since` is no mapping, or `slots` or `counters` no bool.
        ValueError: `folder` exists; a layer isn't built; `since` is of other
            tables, or a table was restored after it.
        RuntimeError: `since` is given, and a table's changes aren't tracked
            because a training step was traced before; or the export failed on
            another worker.
    """
    folder = os.fspath(folder).rstrip("/")
    flag(slots, "export_rows: slots")
    flag(counters, "export_rows: counters")
    strategy, worker = strategy_of(model), 0
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        worker = strategy.cluster_resolver.task_id
    is_chief = strategy.extended.should_checkpoint
    with contextlib.ExitStack() as stack:
        with raised_on_all_workers(strategy, "The export"):
            pyarrow = import_pyarrow("export_rows")
            tables = tables_of(model)
            changed = {k: _changed(k, t, since) for k, t in tables.items()}
            if is_chief and tf.io.gfile.exists(folder):
                raise ValueError(
                    f"'{folder}' exists: export rows to a new folder."
                )
            temporary = stack.enter_context(incomplete(folder, is_chief))
        with raised_on_all_workers(strategy, "The export"):
            errors = []
            for name, table in tables.items():
                to = _Files(pyarrow, f"{temporary}/{name}", worker)
                try:
                    parts = [PARAMETERS, *(table.state.slots if slots else ())]
                    if counters:
                        parts += counters_of(table.state)
                    _write(to, table, parts, changed[name], is_chief)
                except Exception as error:
                    # Other workers wait for this one's columns.
                    errors.append(error)
            if errors:
                raise errors[0]
            ended = end_moments(table.state for table in tables.values())
            moments = {n: ended.get(t.state) for n, t in tables.items()}
        with raised_on_all_workers(strategy, "The export"):
            if is_chief:
                tf.io.gfile.rename(temporary, folder)
    return moments


class LayerTable(NamedTuple):
    """A table, and the number of its layer's updates."""

    state: TableState
    step: int | None


def tables_of(model: Any) -> dict[str, LayerTable]:
    """Finds a model's tables, by the paths of their folders."""
    layers: dict[str, Any] = {}
    found = {}
    for layer in tf.train.TrackableView(model).descendants():
        # Any object may be among them, with any __getattr__.
        tables = inspect.getattr_static(layer, "tables", None)
        if not isinstance(tables, Tables):
            continue
        name = unique_name(layer, layers)
        for table, state in tables.items():
            if not state.variables:
                raise ValueError(
                    f"Table '{table}' of layer '{layer.name}' isn't built: "
                    "call the layer once, or build it."
                )
            step = None if layer.step is None else int(layer.step.numpy())
            path = f"{in_folder(name)}/{in_folder(table)}"
            found[path] = LayerTable(state, step)
    if not found:
        raise ValueError(
            f"Model '{getattr(model, 'name', model)}' has no layer with tables "
            "of this library."
        )
    return dict(sorted(found.items()))


def counters_of(state: TableState) -> list[str]:
    """Returns the names of a table's counters of keys; none without keys."""
    if KEYS not in state.variables:
        return []
    counters = state.built("the counters of keys").counters
    return [name for name in counters if name in state.variables]


def _changed(
    name: str, table: LayerTable, since: Mapping[str, int | None] | None
) -> ChangedRows | None:
    """Returns what has changed in a table; None: all of it is to be exported.

    Begins to track changes where `since` is None.
    """
    state = table.state
    if since is None:
        # Held by a Keras layer or a TPU, or a step was traced before.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            state.track_changes()
        return None
    if not isinstance(since, Mapping):
        raise TypeError(
            "export_rows: since must be what an earlier call returned, got "
            f"{type(since).__name__}."
        )
    if name not in since:
        raise ValueError(
            f"export_rows: since has no table '{name}', but {sorted(since)}."
        )
    moment = since[name]
    if moment is not None:
        return state.changed(moment)
    if state.moments is not None:
        state.track_changes()  # An error if it wasn't tracked before.
    return None


class _Files(NamedTuple):
    """Where a worker's files of a table go, and what writes them."""

    pyarrow: Any
    folder: str
    worker: int

    @contextlib.contextmanager
    def writer(self, name: str, schema: Any) -> Iterator[Any]:
        path = f"{self.folder}/{name}-{self.worker:05d}.parquet"
        tf.io.gfile.makedirs(self.folder)
        with (
            ArrowFile(path, "wb") as file,
            self.pyarrow.parquet.ParquetWriter(file, schema) as writer,
        ):
            yield writer


def _write(
    files: _Files,
    table: LayerTable,
    names: Sequence[str],
    changed: ChangedRows | None,
    is_chief: bool,
) -> None:
    """Writes this worker's files of a table; its parameters come first."""
    pyarrow, state = files.pyarrow, table.state
    int64, float32 = pyarrow.int64(), pyarrow.float32()
    row = pyarrow.list_(float32, state.spec.dim)
    kinds = [float32 if len(state.saved[n].shape) == 1 else row for n in names]
    for i, name in enumerate(names):
        if state.saved[name].dtype == tf.int64:
            kinds[i] = int64
    texts = state.key_texts
    fields = [(KEY, int64), (ROW, row), ("step", int64)]
    if texts is not None:
        fields[:1] = [(KEY, pyarrow.binary()), (FINGERPRINT, int64)]
    fields += zip(names[1:], kinds[1:], strict=True)
    schema = pyarrow.schema(fields)
    keyed = KEYS in state.variables
    parts = (
        _by_key(state, names, changed)
        if keyed
        else _by_number(state, names, changed, is_chief)
    )
    # Other workers may wait for this one to read on, also if writing fails.
    with contextlib.ExitStack() as stack:
        stack.callback(collections.deque, parts, 0)
        with files.writer("part", schema) as writer:
            for keys, values in parts:
                rows, *others = (_column(pyarrow, each) for each in values)
                step = pyarrow.scalar(table.step, int64)
                numbers = [pyarrow.array(keys, int64)]
                if texts is not None:
                    known = [each or None for each in texts.of(keys)]
                    numbers.insert(0, pyarrow.array(known, pyarrow.binary()))
                columns = [
                    *numbers,
                    rows,
                    pyarrow.repeat(step, len(keys)),
                    *others,
                ]
                batch = pyarrow.record_batch(columns, schema=schema)
                writer.write_batch(batch, row_group_size=len(keys))
    if keyed:
        gone = np.zeros([0], np.int64) if changed is None else changed.removed
        schema = pyarrow.schema([(KEY, int64)])
        with files.writer("_removed", schema) as writer:
            columns = [pyarrow.array(gone, int64)]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))


def _column(pyarrow: Any, values: np.ndarray) -> Any:
    """Returns a part of some rows, [n, dim] or [n], as a column."""
    flat = pyarrow.array(values.reshape(-1))
    if values.ndim == 1:
        return flat
    return pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _by_key(
    state: TableState, names: Sequence[str], changed: ChangedRows | None
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields keys, and their parts by name, of this process's shards."""
    held = [state.saved[name].held() for name in names]
    shards = [*zip(*held, strict=True)]
    wanted: Sequence[np.ndarray | None] = [None] * len(shards)
    if changed is not None:
        ends = np.cumsum(changed.shards)[:-1]
        wanted = np.split(changed.rows, ends)
    for shard, keys in zip(shards, wanted, strict=True):
        has = shard[0].keys
        assert has is not None
        if keys is None:
            places = np.arange(shard[0].rows)
        else:
            order = np.argsort(has)
            places = order[np.searchsorted(has, keys, sorter=order)]
        for start, size in blocks([len(places), state.spec.dim], tf.float32):
            here = places[start : start + size]
            yield has[here], [part.gather(here).numpy() for part in shard]


def _by_number(
    state: TableState,
    names: Sequence[str],
    changed: ChangedRows | None,
    is_chief: bool,
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields numbers, and the rows' parts; of a divided table this worker's."""
    tables: list[Rows] = [state.saved[name] for name in names]
    table = tables[0]
    shape = table.shape.as_list()
    if table.is_cut:
        yield from _of_columns(tables, changed, state.strategy)
    elif table.workers == 1 and not is_chief:
        return
    elif table.workers == 1 and changed is None:
        with contextlib.ExitStack() as stack:
            for each in tables:
                stack.enter_context(each.reading())
            for start, size in blocks(shape, tf.float32):
                parts = [each.read_rows(start, size) for each in tables]
                yield np.arange(start, start + size), _as_float32(parts)
    else:
        wanted: Sequence[Any] = [part.rows for part, _ in state.sources]
        if changed is not None:
            wanted = [changed.rows]
        for numbers in wanted:
            for start, size in blocks([len(numbers), *shape[1:]], tf.float32):
                here = np.asarray(numbers[start : start + size])
                parts = [each.gather_rows(here) for each in tables]
                yield here, _as_float32(parts)


def _of_columns(
    tables: Sequence[Rows], changed: ChangedRows | None, strategy: Any
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Reads rows together with the workers that have other columns.

    The worker that has the first columns yields them.
    """
    wanted = np.arange(tables[0].shape[0])
    if changed is not None:
        # A worker that has no columns doesn't know which rows have changed.
        wanted = np.unique(joined(strategy, changed.rows))
    shape = [len(wanted), *tables[0].shape[1:]]
    for start, size in blocks(shape, tf.float32):
        here = wanted[start : start + size]
        parts = [table.collect_rows(here) for table in tables]
        if tables[0].is_first:
            yield here, _as_float32(parts)


def _as_float32(parts: Sequence[tf.Tensor]) -> list[np.ndarray]:
    return [np.asarray(part.numpy(), np.float32) for part in parts]
