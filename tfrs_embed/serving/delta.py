"""Writes what changed in a model since its last export or delta."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle, chain
from tfrs_embed.checkpoint.chain import Link
from tfrs_embed.checkpoint.change_tracking import ChangedRows, end_moments
from tfrs_embed.checkpoint.rows import (
    FALLBACK,
    KEYS,
    REMOVED,
    ROWS,
)
from tfrs_embed.compat.files import plain_path
from tfrs_embed.distribution.failures import raised_on_all_workers
from tfrs_embed.serving.applying import (
    IDS,
    DenseVariable,
    dense_name,
    part_name,
)
from tfrs_embed.serving.tables import INDEX, ServedTable, ServedTables
from tfrs_embed.serving.values import Blocks
from tfrs_embed.serving.workers import agreed, incomplete, joined, strategy_of


@dataclasses.dataclass(frozen=True)
class UpdatableExport:
    """An updatable export of this process.

    Attributes:
        tables: its tables, by the names of their layers and their own.
        variables: its other variables.
        moments: the moments of the export and of its deltas by their ids: a
            moment for each table.
    """

    tables: dict[tuple[str, str], ServedTable]
    variables: Sequence[DenseVariable]
    moments: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def end_moment(self) -> list[int]:
        """Ends the present moment of each table; returns the moments.

        Raises a RuntimeError if a table's changes could be tracked, and aren't.
        """
        states = [table.state for table in self.tables.values()]
        for state in states:
            if state.moments is not None and not state.is_tracked:
                state.moment()  # The error that says what to do.
        ended = end_moments(states)
        return [ended.get(state, 0) for state in states]

    def changed(self, since: int) -> list[ChangedRows | None]:
        """Returns what has changed in each table since an export or a delta.

        None: that isn't known, and all rows count as changed.
        """
        states = [table.state for table in self.tables.values()]
        return [
            None if state.moments is None else state.changed(moment)
            for state, moment in zip(states, self.moments[since], strict=True)
        ]


# By the models that were exported, and the exports' ids.
_EXPORTED: MutableMapping[Any, dict[int, UpdatableExport]] = (
    weakref.WeakKeyDictionary()
)


def remember(
    model: Any,
    link: Link,
    tables: ServedTables,
    variables: Sequence[DenseVariable],
) -> None:
    """Keeps what `export_delta` must know of an export, while the model lives.

    Changes of tables after this call are in the next delta.
    """
    exported = UpdatableExport(
        {
            (layer, name): table
            for layer, its_tables in tables.by_layer.items()
            for name, table in its_tables.items()
        },
        variables,
    )
    exported.moments[link.id] = exported.end_moment()
    _EXPORTED.setdefault(model, {})[link.id] = exported


def export_delta(
    model: Any,
    path: str | os.PathLike[str],
    *,
    since: str | os.PathLike[str],
) -> int:
    """Writes what changed in a model since its last export or delta.

    A loaded model that was exported with `updatable=True` applies deltas in
    their order, by `apply_delta(path)`. Its answers are then those of an export
    of this moment. A delta has the tables' changed rows, in the export's dtype
    of rows, new and removed keys, and all other variables. Words and numbers of
    lookup tables, such as Keras's `StringLookup`, stay as they were exported.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table),
        ...     "adagrad",
        ...     size_threshold=0,
        ... )
        >>> layer.build(None)
        >>> layer.tables["movie"].track_changes()
        >>> movie = tf_keras.Input([], dtype=tf.int64, name="movie")
        >>> model = tf_keras.Model(movie, layer(movie))
        >>> tfrs_embed.serving.export(model, "models/delta/1", updatable=True)
        >>> served = tf.saved_model.load("models/delta/1")
        >>> # ... and after more training:
        >>> tfrs_embed.serving.export_delta(
        ...     model, "models/delta-1", since="models/delta/1"
        ... )
        1
        >>> served.apply_delta("models/delta-1")["number"].numpy().item()
        1

    With several workers all of them call this function, with the same paths,
    which all can see. Each sends its changed rows to all; the chief writes.
    Call it between steps.

    The delta is a checkpoint that `tf.train.load_checkpoint` reads. It is
    written to the folder `path` + ".incomplete"; its index, without which it
    is no checkpoint, is the last file to be renamed. After an error there is no
    delta, and the next one has what this one would have had.

    Args:
        model: the model that was exported, in the same process: another process
            doesn't know which rows have changed.
        path: the checkpoint's prefix, on a file system of `tf.io.gfile`: the
            files are `path` + ".index" and `path` + ".data-...".
        since: the folder of the model's export, or the path of its last delta.

    Returns:
        The delta's number: 1 if it builds on the export, and so on.

    Raises:
        ValueError: there is a checkpoint at `path`; `since` is no updatable
            export and no delta, of another model or process, or not the same
            on all workers; a table was restored since, or lost more than twice
            as many keys as it has room for; or a table has values that can't
            be stored in the export's dtype of rows.
        RuntimeError: the export failed on another worker.
    """
    path, since = plain_path(path, "export_delta"), os.fspath(since).rstrip("/")
    strategy = strategy_of(model)
    writes = strategy.extended.should_checkpoint
    with contextlib.ExitStack() as stack:
        with raised_on_all_workers(strategy, "The export of a delta"):
            if tf.io.gfile.exists(f"{path}.index"):
                raise ValueError(
                    f"'{path}' is there already: write to a new path."
                )
            base = _link_at(since)
            exported = _EXPORTED.get(model, {}).get(base.chain)
            if exported is None or base.id not in exported.moments:
                raise ValueError(
                    f"'{since}' is of another model than '{model.name}', or of "
                    "another process: the rows that changed since are not "
                    "known. Export the model with updatable=True."
                )
            moments = exported.end_moment()
            changed = exported.changed(base.id)
            folder = stack.enter_context(incomplete(path, writes))
        with raised_on_all_workers(strategy, "The export of a delta"):
            link = agreed(strategy, base.next(since))
            writer = bundle.BundleWriter(f"{folder}/part")
            blocks = Blocks(writer)
            for each in _values(exported, link, changed, strategy):
                # A worker that doesn't write reads for the others.
                if writes:
                    blocks.add(*each)
            if writes:
                bundle.merge(writer.finish(), f"{folder}/delta")
                bundle.move(f"{folder}/delta", path)
    exported.moments[link.id] = moments
    return link.number


def _link_at(path: str) -> Link:
    """Reads the place of an export, or of a delta.

    Raises:
        ValueError: there is no updatable export and no delta at the path.
        tf.errors.OpError: the file is damaged.
    """
    try:
        if not tf.io.gfile.isdir(path):
            link = chain.link_of(bundle.BundleReader(path))
            if link is None:
                raise ValueError("It has no header.")
            return link
        stored = bundle.BundleReader(f"{path}/variables/variables")
        # A loaded model that was saved again has the ids of deltas, too.
        ids = stored.read(IDS).numpy().tolist()
        return Link(ids[0], len(ids) - 1, ids[-1], ids[-2:][0])
    except (
        # Tensors of other shapes and dtypes, too.
        *(AttributeError, LookupError, TypeError, ValueError),
        tf.errors.NotFoundError,
    ) as error:
        raise ValueError(
            f"'{path}' is neither a model that was exported with "
            "updatable=True nor a delta of one."
        ) from error


def _values(
    exported: UpdatableExport,
    link: Link,
    changed: Sequence[ChangedRows | None],
    strategy: tf.distribute.Strategy,
) -> Iterator[tuple[str, Sequence[int], int, tf.Tensor]]:
    """Yields a delta's tensors in blocks: name, shape, first row, block."""
    yield chain.HEADER, [5], 0, link.header()
    for i, (variable, _) in enumerate(exported.variables):
        yield dense_name(i), variable.shape, 0, variable.read_value()
    for (owner, table), its_changes in zip(
        exported.tables.items(), changed, strict=True
    ):
        for name, *block in _parts(table, its_changes, strategy):
            yield part_name(*owner, name), *block


def _parts(
    table: ServedTable,
    changed: ChangedRows | None,
    strategy: tf.distribute.Strategy,
) -> Iterator[tuple[str, Sequence[int], int, tf.Tensor]]:
    """Yields blocks of a table's parts; None: all of its rows have changed."""
    if changed is None:
        rows = np.arange(table.state.spec.vocabulary_size)
        vectors, blocks = {ROWS: rows}, table.blocks()
    else:
        # Several workers may have copies, or other columns, of a row.
        rows = np.unique(joined(strategy, changed.rows))
        vectors, blocks = {ROWS: rows}, table.blocks_of(rows)
        if INDEX in table.variables:
            removed = np.sort(joined(strategy, changed.removed))
            vectors = {KEYS: rows, REMOVED: removed}
    for name, numbers in vectors.items():
        yield name, [len(numbers)], 0, tf.constant(numbers, tf.int64)
    for start, block in blocks:
        for name, values in block.items():
            yield name, [len(rows), *values.shape[1:]], start, values
    shared = len(table.fallback_rows)
    for start, block in table.fallback_blocks():
        for name, values in block.items():
            shape = [shared, *values.shape[1:]]
            yield f"{FALLBACK}{name}", shape, start, values
