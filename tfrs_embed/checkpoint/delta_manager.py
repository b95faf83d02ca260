"""Saves full checkpoints, and between them what has changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import uuid
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.rows import Changed, Changing
from tfrs_embed.compat.arguments import integer
from tfrs_embed.compat.private_tensorflow import checkpoint_management
from tfrs_embed.distribution.failures import raised_on_all_workers

_LOCK = ".delta_manager.lock"


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
        >>> manager.save()
        'movies/ckpt-1'
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(layer(tf.constant([5, 3, 5])))
        >>> _ = tape.gradient(loss, layer.trainable_variables)
        >>> path = manager.save()
        >>> key = "layer/tables/movie/delta/rows/.ATTRIBUTES/VARIABLE_VALUE"
        >>> tf.train.load_checkpoint(path).get_tensor(key).tolist()
        [3, 5]

    Args:
        checkpoint: what to save: a `tf.train.Checkpoint`.
        directory: the folder of the files, which is made if it isn't there.
        full_every: every so many saves, one is full; 1: all are.
        max_to_keep: how many full checkpoints to keep, each with its deltas.
        name: the beginning of the files' names.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value.
        RuntimeError: a training step was traced before.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        full_every: int = 24,
        max_to_keep: int = 2,
        *,
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
        self._directory = os.fspath(directory)
        self._full_every, self._max_to_keep = full_every, max_to_keep
        self._name = name
        self._files: list[tuple[str, chain.Header]] | None = None
        # The last file's path, and each table's moment when it was saved.
        self._last: str | None = None
        self._moments: dict[Changing, int] = {}
        self._lock: int | None = None
        self._tables()

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the files, the oldest first."""
        return [path for path, _ in self._known()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the last complete file; None: there is none."""
        return tf.train.latest_checkpoint(self._directory)

    def save(self) -> str:
        """Saves a full checkpoint or a delta; returns its path.

        Raises:
            RuntimeError: another trainer saves to the folder, or the save
                failed on another worker, or it is called in a function that is
                being traced.
            tf.errors.OpError: a file can't be written. The last save stays, and
                the next one holds what this one lacks.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "DeltaManager.save saves between steps: it can't be called in "
                "a function that is being traced."
            )
        tables = self._tables()
        strategy = self._strategy()
        with raised_on_all_workers(strategy, "The save"):
            file, changed = self._begin(tables, strategy)
            path = self._path(file)
            with (
                self._folder(strategy, path) as to,
                chain.writing(chain.Writing(file, changed)),
            ):
                self._checkpoint.write(to)
        self._moments = {table: table.moment() for table in tables}
        self._last = path
        self._known().append((path, file))
        if strategy.extended.should_checkpoint:
            self._finish()
        return path

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
        """
        if self._strategy().extended.should_checkpoint:
            self._take_lock()
        path = self.latest_checkpoint
        if path is None:
            return None
        for file in chain.files_of(path):
            _verify(file)
        self._tables()
        self._checkpoint.restore(path)
        self._last, self._moments = path, {}
        return path

    def _tables(self) -> list[Changing]:
        """Returns the tables whose changes are tracked; begins to track."""
        found = []
        for each in tf.train.TrackableView(self._checkpoint).descendants():
            if isinstance(each, Changing) and each not in found:
                with contextlib.suppress(NotImplementedError):
                    each.track_changes()
                    found.append(each)
        return found

    def _strategy(self) -> tf.distribute.Strategy:
        """The strategy under which the tables were made."""
        for each in tf.train.TrackableView(self._checkpoint).descendants():
            if isinstance(each, Changing) and each.strategy is not None:
                return each.strategy
        return tf.distribute.get_strategy()

    def _begin(
        self, tables: list[Changing], strategy: tf.distribute.Strategy
    ) -> tuple[chain.Header, dict[Changing, Changed]]:
        """Returns the next file's header, and the changed rows it will hold."""
        if strategy.extended.should_checkpoint:
            self._take_lock()
            if self.latest_checkpoint != self._last:
                raise RuntimeError(
                    f"The last checkpoint in '{self._directory}' is "
                    f"'{self.latest_checkpoint}', and this DeltaManager's is "
                    f"'{self._last}': another trainer saves there, or "
                    "restore_or_initialize was not called."
                )
        known = self._known()
        header = chain.Header(uuid.uuid4().hex)
        if not known or self._last is None:
            return header, {}
        last = known[-1][1]
        if last.number + 1 >= self._full_every:
            return header, {}
        changed = {}
        for table in tables:
            since = self._moments.get(table, -1)
            if since < table.known_since:
                if table.restored_from != self._last:
                    continue  # It is saved whole.
                since = table.known_since
            changed[table] = table.changed(since)
        name = os.path.basename(self._last)
        return header._replace(
            number=last.number + 1, previous=name, previous_id=last.id
        ), changed

    def _path(self, file: chain.Header) -> str:
        known = self._known()
        number = int(known[-1][0].rpartition("-")[2]) if known else 0
        return os.path.join(self._directory, f"{self._name}-{number + 1}")

    @contextlib.contextmanager
    def _folder(
        self, strategy: tf.distribute.Strategy, path: str
    ) -> Iterator[str]:
        """Yields where this worker writes; removes what a failure leaves."""
        if not strategy.extended.should_checkpoint:
            # Only the chief's file is complete.
            with tempfile.TemporaryDirectory() as folder:
                yield os.path.join(folder, "part")
            return
        tf.io.gfile.makedirs(self._directory)
        try:
            yield path
        except BaseException:
            with contextlib.suppress(tf.errors.OpError):
                _remove(path)
            raise

    def _known(self) -> list[tuple[str, chain.Header]]:
        """The complete files, the oldest first, with their headers."""
        if self._files is None:
            state = tf.train.get_checkpoint_state(self._directory)
            paths = [] if state is None else state.all_model_checkpoint_paths
            found = []
            for path in paths:
                if tf.io.gfile.exists(f"{path}.index"):
                    header = chain.header_of(BundleReader(path))
                    found.append((path, header or chain.Header("")))
            self._files = found
        return self._files

    def _finish(self) -> None:
        """Makes the last file the latest; removes old chains."""
        known = self._known()
        full = [i for i, (_, file) in enumerate(known) if file.number == 0]
        first = full[-self._max_to_keep] if full[self._max_to_keep :] else 0
        gone, self._files = known[:first], known[first:]
        checkpoint_management.update_checkpoint_state_internal(
            self._directory,
            self._last,
            [path for path, _ in self._files],
            save_relative_paths=True,
        )
        for path, _ in gone:
            _remove(path)

    def _take_lock(self) -> None:
        """Keeps other trainers of this machine from saving to the folder."""
        if self._lock is not None or "://" in self._directory:
            return
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, _LOCK)
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise RuntimeError(
                f"Another DeltaManager saves to '{self._directory}': each "
                "trainer needs a folder of its own. To read what a trainer "
                "saves, use tf.train.latest_checkpoint and "
                "tf.train.Checkpoint.restore."
            ) from None
        self._lock = file
        weakref.finalize(self, os.close, file)


def _verify(reader: BundleReader) -> None:
    """Reads all of a file, which verifies its checksums."""
    for name, shape in reader.shapes.items():
        if not shape or reader.dtypes[name] == tf.string:
            reader.read(name)
            continue
        for start, size in blocks(shape, reader.dtypes[name]):
            reader.read_rows(name, start, size)


def _remove(path: str) -> None:
    """Removes a checkpoint's files: its index first, then its data."""
    pattern = re.sub(r"([\[*?])", r"[\1]", path)
    files = sorted(tf.io.gfile.glob(f"{pattern}.*"), reverse=True)
    for file in files:
        tf.io.gfile.remove(file)
