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


@dataclasses.dataclass
class UpdatableExport:
    """An updatable export of this process.

    Attributes:
        tables: its tables, by the names of their layers and their own.
        variables: its other variables.
        moments: the moments of the export and of its deltas by their ids: a
            moment for each table.
        latest: the id of the export or delta that has the tables' `chosen`
            keys; None: they are forgotten.
    """

    tables: dict[tuple[str, str], ServedTable]
    variables: Sequence[DenseVariable]
    moments: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    latest: int | None = None

    def choose_keys(self) -> list[np.ndarray | None]:
        """Returns the keys that each table's filter chooses now.

        None: the table has no filter. All workers must call it.
        """
        return [
            table.key_filter.choose(table.state) if table.key_filter else None
            for table in self.tables.values()
        ]

    def keep(
        self,
        link: int,
        moments: list[int],
        chosen: Sequence[np.ndarray | None],
    ) -> None:
        """Keeps the moments and chosen keys of the latest export or delta."""
        self.moments[link] = moments
        self.latest = link
        for table, keys in zip(self.tables.values(), chosen, strict=True):
            table.chosen = keys

    def forget_keys(self) -> None:
        """Frees the chosen keys; the next delta has the rows of all of them."""
        self.latest = None
        for table in self.tables.values():
            table.chosen = None

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
    exports = _EXPORTED.setdefault(model, {})
    for earlier in exports.values():
        earlier.forget_keys()
    exported.latest = link.id
    exported.moments[link.id] = exported.end_moment()
    exports[link.id] = exported


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

    If the export has limits of keys (`min_frequency`, `max_age`, `max_keys`),
    its deltas follow them: they add keys that fulfil them now, and remove those
    that no longer do. Other limits need a new export.

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
            if exported.latest != base.id:
                exported.forget_keys()
            chosen = exported.choose_keys()
            writer = bundle.BundleWriter(f"{folder}/part")
            blocks = Blocks(writer)
            for each in _values(exported, link, changed, chosen, strategy):
                # A worker that doesn't write reads for the others.
                if writes:
                    blocks.add(*each)
            if writes:
                bundle.merge(writer.finish(), f"{folder}/delta")
                bundle.move(f"{folder}/delta", path)
    exported.keep(link.id, moments, chosen)
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
    chosen: Sequence[np.ndarray | None],
    strategy: tf.distribute.Strategy,
) -> Iterator[tuple[str, Sequence[int], int, tf.Tensor]]:
    """Yields a delta's tensors in blocks: name, shape, first row, block."""
    yield chain.HEADER, [5], 0, link.header()
    for i, (variable, _) in enumerate(exported.variables):
        yield dense_name(i), variable.shape, 0, variable.read_value()
    for (owner, table), its_changes, keys in zip(
        exported.tables.items(), changed, chosen, strict=True
    ):
        for name, *block in _parts(table, its_changes, keys, strategy):
            yield part_name(*owner, name), *block


def _parts(
    table: ServedTable,
    changed: ChangedRows | None,
    chosen: np.ndarray | None,
    strategy: tf.distribute.Strategy,
) -> Iterator[tuple[str, Sequence[int], int, tf.Tensor]]:
    """Yields blocks of a table's parts; None: all of its rows have changed."""
    if changed is None:
        rows = np.arange(table.state.spec.vocabulary_size)
        vectors, blocks = {ROWS: rows}, table.blocks()
    else:
        # Several workers may have copies, or other columns, of a row.
        rows, removed = (
            np.unique(joined(strategy, each))
            for each in (changed.rows, changed.removed)
        )
        vectors = {ROWS: rows}
        if INDEX in table.variables:
            if chosen is not None:
                rows, removed = _of_chosen(table, rows, removed, chosen)
            vectors = {KEYS: rows, REMOVED: removed}
        blocks = table.blocks_of(rows)
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


def _of_chosen(
    table: ServedTable,
    changed: np.ndarray,
    removed: np.ndarray,
    chosen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys whose rows a delta has, and those that it removes.

    Args:
        table: a table with a filter.
        changed: the keys that have changed, in training.
        removed: the keys that have lost their rows, in training.
        chosen: the keys that the filter chooses now.
    """
    before = table.chosen
    if before is None:
        # The served model has none but these.
        live = table.state.variables[KEYS].numpy()
        return chosen, np.setdiff1d(np.union1d(live, removed), chosen)
    new = np.setdiff1d(chosen, before, assume_unique=True)
    rows = np.union1d(np.intersect1d(changed, chosen), new)
    return rows, np.setdiff1d(before, chosen, assume_unique=True)
