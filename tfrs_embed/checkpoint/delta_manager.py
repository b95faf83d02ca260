"""Saves full checkpoints, and between them what has changed."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.background import BackgroundFile
from tfrs_embed.checkpoint.bundle import BundleReader, blocks, unwritten
from tfrs_embed.checkpoint.change_tracking import TrackedTable, end_moments
from tfrs_embed.checkpoint.listing import BASE, ChainFolder, latest, remove
from tfrs_embed.compat.arguments import flag, integer
from tfrs_embed.compat.files import plain_path
from tfrs_embed.distribution.failures import raised_on_all_workers


class DeltaManager:
    """Saves a `tf.train.Checkpoint` in full now and then, and deltas between.

    A delta holds the rows of tables that have changed since the file before it,
    with their slots, and all other values whole. It takes as little time and
    room as few rows have changed. All files are checkpoints of TensorFlow's
    format: `tf.train.load_checkpoint` reads them, and a table's changed rows
    are `<table>/delta/rows`, [n] int64, with `<table>/delta/parameters` and
    `<table>/delta/<slot>`; of a table with `DynamicKeys` `<table>/delta/keys`
    and counters, and `<table>/delta/removed`, the keys that lost their rows.

    Restoring a delta, also with `tf.train.Checkpoint.restore` and
    `tf.train.latest_checkpoint`, restores what a full checkpoint of that moment
    would, on any placement and number of replicas.

    The first save is a full checkpoint. Later ones are deltas: where a full
    checkpoint is due, a thread writes the tables to a file while training goes
    on, and then the next delta begins a new chain with that file. So `save`
    takes as long as a delta, and a chain has some deltas more than `full_every`
    says. With several workers, full checkpoints are saved at once.

    Make the manager before the first training step: from then on a step marks
    the rows that it changes, with one byte a row. Tables that Keras layers or
    TPUs hold are saved whole each time. Save between steps. With several
    workers, all of them make a manager with the same arguments, of a folder
    that all can see, and save together; each writes its share.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> checkpoint = tf.train.Checkpoint(layer=layer)
        >>> manager = tfrs_embed.checkpoint.DeltaManager(checkpoint, "movies")
        >>> manager.restore_or_initialize()
        >>> layer.build()
        >>> manager.save().rpartition("/")[2]
        'ckpt-1'
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(layer(tf.constant([5, 3, 5])))
        >>> _ = tape.gradient(loss, layer.trainable_variables)
        >>> path = manager.save()
        >>> key = "layer/tables/movie/delta/rows/.ATTRIBUTES/VARIABLE_VALUE"
        >>> tf.train.load_checkpoint(path).get_tensor(key).tolist()
        [3, 5]

    Args:
        checkpoint: what to save: a `tf.train.Checkpoint`.
        directory: the folder of the files, which is made if it isn't there. A
            relative one is of the working directory now; paths are absolute.
        full_every: every so many saves, a chain ends, and one begins with a
            full checkpoint; 1: all saves are full.
        max_to_keep: how many chains to keep: full checkpoints with deltas.
        background: whether threads write full checkpoints; False: `save` does.
        name: the beginning of the files' names.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value.
        RuntimeError: a training step was traced before.
    """

    __slots__ = (
        *("__weakref__", "_background", "_checkpoint", "_folder"),
        *("_full_every", "_last", "_max_to_keep", "_moments"),
        *("_next", "_reader"),
    )

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        full_every: int = 24,
        max_to_keep: int = 2,
        *,
        background: bool = True,
        name: str = "ckpt",
    ) -> None:
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise TypeError(
                "DeltaManager: checkpoint must be a tf.train.Checkpoint, got "
                f"{type(checkpoint).__name__}."
            )
        integer(full_every, "DeltaManager: full_every")
        integer(max_to_keep, "DeltaManager: max_to_keep")
        if not re.fullmatch(r"[\w.-]*\w", name):
            raise ValueError(
                "DeltaManager: name must be letters, digits, dots and hyphens, "
                f"got {name!r}."
            )
        self._checkpoint = checkpoint
        directory = os.fspath(directory)
        if "://" not in directory:
            # A program may change its working directory.
            directory = os.path.abspath(directory)
        directory = plain_path(directory, "DeltaManager: directory")
        self._folder = ChainFolder(directory, name)
        self._full_every, self._max_to_keep = full_every, max_to_keep
        self._background = flag(background, "DeltaManager: background")
        self._next: BackgroundFile | None = None
        # The last file's path, and each table's moment when it was saved.
        self._last: str | None = None
        self._moments: dict[TrackedTable, int] = {}
        self._reader: BundleReader | None = None
        self._tables()

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the files, the oldest first.

        Raises:
            tf.errors.OpError: see `latest_checkpoint`; or a file is damaged.
        """
        return [path for path, _ in self._folder.files()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the last complete file; None: there is none.

        Raises:
            tf.errors.OpError: the folder's list of files is damaged, or names
                files of other folders.
        """
        return latest(self._folder.folder)

    def save(self) -> str:
        """Saves a full checkpoint or a delta.

        Returns:
            Its path, of a checkpoint that is complete.

        Raises:
            RuntimeError: another trainer saves to the folder, or the save
                failed on another worker, or it is called in a function that is
                being traced.
            tf.errors.OpError: a file can't be written, or one of the chain is
                damaged. The last save stays, and the next one holds what this
                one lacks.
            OSError: the folder or its lock's file can't be made.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "DeltaManager.save saves between steps: it can't be called in "
                "a function that is being traced."
            )
        tables = self._tables()
        strategy = _strategy(tables)
        is_chief = strategy.extended.should_checkpoint
        with raised_on_all_workers(strategy, "The save"):
            file = self._begin(tables, strategy)
            path = self._folder.new_path()
            with self._written(is_chief, path) as to, chain.writing(file):
                try:
                    self._checkpoint.write(to)
                except tf.errors.OpError as error:
                    raise unwritten(path, error) from error
                gone = self._folder.add(
                    path, file.link, self._max_to_keep, is_chief
                )
        self._moments = end_moments(tables)
        self._last, self._reader = path, None
        if is_chief:
            self._folder.remove(gone)
        if self._is_full_due() and self._in_background(strategy):
            self._next = BackgroundFile(
                f"{path}{BASE}", file.found, self._moments
            )
        return path

    def wait(self) -> None:
        """Waits until no thread writes a full checkpoint any more."""
        if self._next is not None:
            self._next.wait()

    def restore_or_initialize(self) -> str | None:
        """Restores the last complete file, with its chain, if there is one.

        All files of the chain are read, and their checksums verified, before
        anything is restored. Values of layers that are not built yet are
        restored when they are.

        Returns:
            The file's path; None: there is none, and nothing has changed.

        Raises:
            tf.errors.OpError: a file is missing, damaged, or of another chain;
                nothing is restored.
            ValueError: a table doesn't fit; see `tf.train.Checkpoint.restore`.
            RuntimeError: another trainer saves to the folder.
            OSError: the folder or its lock's file can't be made.
        """
        if _strategy(self._tables()).extended.should_checkpoint:
            self._folder.lock()
        path = self.latest_checkpoint
        if path is None:
            return None
        # Kept for layers that are built after this.
        self._reader = reader = chain.read(path)
        files = [reader]
        if isinstance(reader, chain.ChainReader):
            files = reader.files
        for file in files:
            _verify(file)
        self._checkpoint.restore(path)
        self._last, self._moments = path, {}
        return path

    def _tables(self) -> list[TrackedTable]:
        """Returns all tables; begins to track their changes, where possible."""
        found = []
        for each in tf.train.TrackableView(self._checkpoint).descendants():
            if isinstance(each, TrackedTable) and each not in found:
                found.append(each)
                with contextlib.suppress(NotImplementedError):
                    each.track_changes()
        return found

    def _begin(
        self, tables: list[TrackedTable], strategy: tf.distribute.Strategy
    ) -> chain.UnfinishedFile:
        """Returns the next file: its place, and the changed rows it holds."""
        if strategy.extended.should_checkpoint:
            self._folder.lock()
            if self.latest_checkpoint != self._last:
                raise RuntimeError(
                    f"The last checkpoint in '{self._folder.folder}' is "
                    f"'{self.latest_checkpoint}', and this DeltaManager's is "
                    f"'{self._last}': another trainer saves there, or "
                    "restore_or_initialize was not called."
                )
        first, known = chain.Link.first(), self._folder.files()
        saves_in_full = self._is_full_due() and not self._in_background(
            strategy
        )
        # The last file is in no chain if another manager has saved it.
        if self._last is None or not known[-1][1].id or saves_in_full:
            return chain.UnfinishedFile(first, {}, {})
        path, before, moments = self._last, known[-1][1], self._moments
        if self._next is not None and self._next.is_done:
            if self._next.error is None:
                path, before = self._next.path, self._next.link
                moments = self._next.moments
            else:
                logging.warning(
                    "The full checkpoint '%s' could not be written, and the "
                    "chain of deltas goes on: %s",
                    self._next.path,
                    self._next.error,
                )
                remove(self._next.path)
            self._next = None
        changed = {}
        for table in (each for each in tables if each.is_tracked):
            since = moments.get(table, -1)
            if since < table.known_since:
                if table.restored_from != self._last or moments:
                    continue  # It is saved whole.
                since = table.known_since
            changed[table] = table.changed(since)
        if not changed:
            return chain.UnfinishedFile(first, {}, {})
        return chain.UnfinishedFile(before.next(path), changed, {})

    def _is_full_due(self) -> bool:
        known = self._folder.files()
        return (
            self._next is None
            and bool(known)
            and known[-1][1].number + 1 >= self._full_every
        )

    def _in_background(self, strategy: tf.distribute.Strategy) -> bool:
        """Whether a thread can write full checkpoints."""
        return (
            self._background
            and self._full_every > 1
            and not isinstance(
                strategy, tf.distribute.MultiWorkerMirroredStrategy
            )
        )

    @contextlib.contextmanager
    def _written(self, is_chief: bool, path: str) -> Iterator[str]:
        """Yields where this worker writes; removes what a failure leaves."""
        if not is_chief:
            # Only the chief's file is complete.
            with tempfile.TemporaryDirectory() as folder:
                yield os.path.join(folder, "part")
            return
        tf.io.gfile.makedirs(self._folder.folder)
        try:
            yield path
        except BaseException:
            with contextlib.suppress(tf.errors.OpError):
                remove(path)
            raise


def _strategy(tables: list[TrackedTable]) -> tf.distribute.Strategy:
    """The strategy under which the tables were made."""
    known = (each.strategy for each in tables if each.strategy is not None)
    return next(known, None) or tf.distribute.get_strategy()


def _verify(reader: BundleReader) -> None:
    """Reads all of a file, which verifies its checksums."""
    for name, shape in reader.shapes.items():
        if not shape or reader.dtypes[name].size == 0:
            reader.read(name)  # Strings, and states of iterators, too.
            continue
        for start, size in blocks(shape, reader.dtypes[name]):
            reader.read_rows(name, start, size)
