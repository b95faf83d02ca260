"""A table's parameters and slots by name, as its checkpoint holds them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import growth, saver
from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.change_tracking import (
    Moments,
    TrackedTable,
)
from tfrs_embed.checkpoint.names import DELTA, in_saved_model
from tfrs_embed.checkpoint.rate import LEARNING_RATE, SavedRate
from tfrs_embed.checkpoint.rows import (
    FALLBACK,
    PARTS,
    CheckpointValue,
    VariableRows,
)
from tfrs_embed.compat.arguments import flag
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.key_inputs import as_int64
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.initial_values import initial_blocks

if TYPE_CHECKING:
    from tfrs_embed.storage.key_texts import KeyTexts
    from tfrs_embed.storage.retrieval import Exchange


#: What can be set; other names would have no effect.
_ATTRIBUTES = frozenset(
    {
        *("exchange", "freezing", "hashed_by", "key_texts", "known_since"),
        "layer",
        *("moments", "restored_from", "rule_slots", "saved", "sources"),
        *("spec", "strategy", "trainable", "variables"),
    }
)


@dataclasses.dataclass
class Freezing:
    """The tables of an engine that aren't trained for now.

    Attributes:
        frozen: their names.
        is_traced: whether a graph was traced that updates the others.
    """

    frozen: set[str] = dataclasses.field(default_factory=set)
    is_traced: bool = False


class TableState(Trackable, TrackedTable):
    """A table's parameters and slots by name: variables, or objects like them.

    A checkpoint holds them as `<table>/parameters` and `<table>/<slot>`. If a
    checkpoint was read before they exist, they are restored as they are added.
    The optimizer's learning rate is saved with them, unless it is computed.

    Args:
        spec: the table.
        optimizer: the table's optimizer; None: no engine trains it.
        strategy: the strategy under which it is made; None: a Keras layer holds
            the table.
        moments: numbers the moments of changes; None: a Keras layer or a TPU
            holds the table.

    Attributes:
        rule_slots: the slots of the optimizer's rule, by name.
        sources: the parts of the table that this process holds, each row once,
            and the stores that hold them.
        saved: what checkpoints save and restore, a `CheckpointValue` for each
            variable by name.
        exchange: finds the best rows if several workers divide the table.
        hashed_by: a feature whose hashing turns ids into rows; None: rows are
            ids or have keys.
        layer: returns the layer whose table it is, as long as it lives.
        freezing: which tables of its engine are frozen; None: a Keras layer or
            a TPU holds the table.
        key_texts: the texts of string keys; None: the table keeps none.
    """

    freezing: Freezing | None = None
    key_texts: KeyTexts | None = None

    layer: Callable[[], Any]
    exchange: Exchange | None = None
    hashed_by: str | None = None

    def __init__(
        self,
        spec: TableSpec,
        optimizer: TableOptimizer | None = None,
        strategy: tf.distribute.Strategy | None = None,
        moments: Moments | None = None,
    ) -> None:
        self.spec = spec
        self.strategy = strategy
        self.variables: dict[str, Any] = {}
        self.rule_slots = optimizer.rule.slots() if optimizer else {}
        _require_free_names(self.rule_slots, spec.name)
        self.moments = moments
        self._growing = False
        self.saved: dict[str, Any] = {}
        if optimizer is not None:
            rate = SavedRate(f"{spec.name}/{LEARNING_RATE}", optimizer)
            self._track_trackable(rate, LEARNING_RATE)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises an AttributeError for what a table doesn't have."""
        own = name in _ATTRIBUTES or name.startswith("_")
        # Keras sets the children of what it loads from a SavedModel.
        if not own and name not in self.variables:
            raise AttributeError(
                f"'{name}' of table '{self.spec.name}' can't be set: a table "
                "has what its TableConfig says, and is frozen by trainable = "
                "False; rates are set in layer.table_optimizers."
            )
        super().__setattr__(name, value)

    @property
    def trainable(self) -> bool:
        """Whether training steps update the table.

        False keeps the table and its slots as they are, bit by bit, until it is
        set to True again; the layer's other tables train on. As with a Keras
        layer's `trainable`, functions that were traced before, such as the
        step of `model.fit`, go on as they did: a warning says so. Layers'
        configs, and so saved models, keep it; checkpoints don't. With several
        workers, all of them must set it.

        Example:
            >>> texts = tfrs_embed.TableConfig("texts", 20_000, 8)
            >>> users = tfrs_embed.TableConfig("users", 50_000, 8)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     {t.name: tfrs_embed.FeatureConfig(t.name, t)
            ...      for t in (texts, users)}, "adagrad"
            ... )
            >>> layer.tables["texts"].trainable = False

        Raises:
            NotImplementedError: when set, if a TPU holds the table, or it has
                `DynamicKeys`: `layer.trainable` freezes all tables of a layer.
            TypeError: when set, if it is not a bool.
        """
        if self.freezing is None:
            layer = _keras_layer(self)
            return layer is None or bool(layer.trainable)
        return self.spec.name not in self.freezing.frozen

    @trainable.setter
    def trainable(self, value: bool) -> None:
        where = f"Table '{self.spec.name}'"
        value = flag(value, f"{where}: trainable")
        if self.spec.keys is not None or (
            self.freezing is None and _keras_layer(self) is None
        ):
            raise NotImplementedError(
                f"{where} can't be frozen by itself: it has DynamicKeys, or a "
                "TPU holds it. layer.trainable = False freezes all tables of "
                "its layer."
            )
        if value == self.trainable:
            return
        if self.strategy is not None:
            # Imported here: most programs freeze no table.
            from tfrs_embed.distribution import handshake

            handshake.compare_actions(
                self.strategy, f"setting trainable = {value} of {where}"
            )
        if self.freezing is None:
            _keras_layer(self).trainable = value
            return
        if self.freezing.is_traced:
            warnings.warn(
                f"{where}: functions that were traced before go on as they "
                "did. Call model.compile again, or trace them again.",
                stacklevel=2,
            )
        if value:
            self.freezing.frozen.discard(self.spec.name)
        else:
            self.freezing.frozen.add(self.spec.name)

    def belong_to(self, layer: Any, hashed_by: str | None) -> None:
        """Says whose table it is; see the attributes."""
        self.layer, self.hashed_by = weakref.ref(layer), hashed_by

    def add(self, name: str, variable: Any) -> None:
        """Adds the variable `name`: "parameters" or a slot's name."""
        self.variables[name] = variable
        saved = (
            variable
            if isinstance(variable, CheckpointValue)
            else VariableRows(f"{self.spec.name}/{name}", variable)
        )
        saved.initial = functools.partial(_initial_rows, self, name)
        saved.growing = self._growing
        saved.table = self
        self.saved[name] = saved
        saver.mark(variable, saved)
        # This restores a value that a checkpoint is waiting to restore.
        self._track_trackable(variable, name, overwrite=True)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        for saved in self.saved.values():
            saved.exporting = save_type == "savedmodel"
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            # Its functions keep the variable.
            children.pop(LEARNING_RATE, None)
        return children

    def _checkpoint_adapter(self, path: str) -> None:
        # The children may be restored much later.
        self._growing = growth.allowed()
        for saved in self.saved.values():
            saved.growing = self._growing

    def assign(self, ids: Any, vectors: Any) -> None:
        """Sets the vectors of some ids; other rows, and slots, stay.

        Vectors of another model or of a file are assigned so, also in parts:
        one call for each. In a table with `DynamicKeys`, keys that have no row
        get one, whatever the table's admission, with initial slots, counted
        once, and last used now. Call it eagerly, between steps. With several
        workers, all of them must call it, with the same ids.

        Example:
            >>> table = tfrs_embed.TableConfig("movie", 20_000, 2)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
            ... )
            >>> layer.build()
            >>> layer.tables["movie"].assign([7, 3], [[1, 2], [3, 4]])
            >>> layer(tf.constant([3])).numpy().tolist()
            [[3.0, 4.0]]

        Args:
            ids: [n] unique row numbers, or keys of the table's dtype.
            vectors: [n, dim] numbers.

        Raises:
            RuntimeError: it is called in a traced function.
            TypeError: ids or vectors are of a wrong dtype.
            ValueError: the layer has no tables yet; ids are out of range or not
                unique, or vectors have another shape; there is no room for
                new keys; or a feature's hashing makes rows of its ids. Then
                nothing has changed.
        """
        where = f"Table '{self.spec.name}'"
        if not tf.executing_eagerly():
            raise RuntimeError(f"{where}: assign rows between steps, eagerly.")
        if PARAMETERS not in self.variables:
            raise ValueError(
                f"{where} isn't made yet: call or build its layer first."
            )
        if self.hashed_by is not None:
            raise ValueError(
                f"{where}: {self.hashed_by} has hashing, which makes rows of "
                "its ids, so that several ids share a row."
            )
        known = as_numbers(self.spec, ids)
        unique, counts = np.unique(known, return_counts=True)
        if len(unique) < len(known):
            raise ValueError(
                f"{where}: each id must be there once, got "
                f"{unique[counts > 1][0]} {counts.max()} times."
            )
        rows = _as_vectors(vectors, (len(known), self.spec.dim), where)
        self.assign_numbers(known, rows)

    def assign_numbers(self, ids: np.ndarray, vectors: tf.Tensor) -> None:
        """Sets rows of unique ids, or keys, [n] int64; see `assign`."""
        saved = self.saved[PARAMETERS]
        with saved.writing():
            saved.write_rows(ids, tf.cast(vectors, saved.dtype))
        if self.is_tracked:
            for part, store in self.sources:
                row, here = part.locate(ids)
                store.marks.mark_some(self.spec.name, tf.constant(row[here]))

    def top_k(
        self, queries: Any, k: int, exclude: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds the k rows that have the largest dot products with queries.

        All rows are compared, in blocks, on the devices that hold them; those
        of a table with `DynamicKeys` that have keys, also in a spill. Call it
        between steps, eagerly or in a `tf.function`; or in `strategy.run`, with
        each replica's own queries. If several workers divide the table, all
        must call it together: in `strategy.run`, or eagerly with equal
        queries. No gradient goes through it. In a signature of an exported
        model it reads the exported rows.

        Example:
            >>> table = tfrs_embed.TableConfig("movie", 3, 2, "zeros")
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
            ... )
            >>> rows = [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]
            >>> layer.load_tables({"movie": rows})
            >>> movies = layer.tables["movie"]
            >>> scores, ids = movies.top_k([[2.0, 1.0]], k=2, exclude=[[0]])
            >>> scores.numpy().tolist(), ids.numpy().tolist()
            ([[10.0, 1.0]], [[2, 1]])

        Args:
            queries: [batch, dim] floating.
            k: how many ids to find for each query.
            exclude: [batch, m] integers, or keys of the table's dtype: ids that
                a query is not to find. Those that the table doesn't have, such
                as -1, exclude nothing. None: no ids.

        Returns:
            Scores, [batch, k] float32, descending; and ids, [batch, k] int64,
            or keys as `keys()` returns them, strings if the table keeps their
            text. Equal scores are in the order of ids, of strings of their
            fingerprints. If fewer than k are left of a table beside the
            excluded ones, minus infinity and -1, or "", follow. Scores that are
            NaN are left out, too.

        Raises:
            ValueError: the table has fewer than k rows, or isn't made yet, or
                a feature's hashing makes rows of its ids; or an argument has a
                wrong shape.
            TypeError: queries aren't floating, or ids are of a wrong dtype.
            NotImplementedError: the table is on TPUs, or cut into columns on
                several workers, and this isn't eager.
            RuntimeError: several workers hold the table, and it is called in a
                function that no replica runs.
            tf.errors.InvalidArgumentError: fewer than k keys have rows.
        """
        # Imported here, as few programs retrieve from tables.
        from tfrs_embed.storage import retrieval

        return retrieval.retrieve(self, queries, k, exclude)

    def read_ahead(self, ids: tf.Tensor) -> list[tf.Operation]:
        """Begins to read the rows of ids or keys, [n], that are in files.

        Returns the operations that do so.
        """
        ids, begun = tf.cast(ids, tf.int64), []
        for part, store in self.sources:
            here = ids
            if self.spec.keys is None:
                rows, is_here = part.locate(ids)
                here = tf.boolean_mask(rows, is_here)
            begun += store.read_ahead(self.spec.name, here)
        return begun

    @property
    def table(self) -> Any:
        """The rows, [vocabulary_size, dim] of the table's dtype."""
        return self.variables[PARAMETERS]

    @property
    def slots(self) -> dict[str, Any]:
        """The slots by name: of the table's shape, or a number for each row."""
        made = self.variables
        return {name: made[name] for name in self.rule_slots if name in made}


class Tables(Trackable, Mapping[str, TableState]):
    """The states of a layer's tables, by table name; a read-only mapping."""

    def __init__(self, states: Iterable[TableState] = ()) -> None:
        self._states: dict[str, TableState] = {}
        for state in states:
            self.add(state)

    def add(self, state: TableState) -> None:
        """Adds a table's state under the table's name."""
        self._states[state.spec.name] = state
        self._track_trackable(state, state.spec.name)

    def __getitem__(self, name: str) -> TableState:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    # Mappings compare by content and have no hash. TensorFlow tracks objects by
    # identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return children
        return {in_saved_model(k): child for k, child in children.items()}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = super()._lookup_dependency(name, *args, **kwargs)
        if found is None:
            # Keras looks up names that are in a SavedModel.
            for table, state in self._states.items():
                if table != name and in_saved_model(table) == name:
                    return state
        return found


def _keras_layer(table: TableState) -> Any:
    """The Keras layer that holds a table, or None."""
    layer = table.layer()
    return None if layer is None else layer._keras_layer(table.spec.name)


def _initial_rows(
    table: TableState, name: str, first: int
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields initial rows, from row `first` on, of the variable `name`."""
    if name != PARAMETERS:
        slot = table.rule_slots[name]
        row = slot.row(table.spec.dim)
        count = table.spec.vocabulary_size - first
        for start, size in blocks([count, *row], tf.float32):
            yield first + start, tf.fill([size, *row], slot.initial)
        return
    for start, rows in initial_blocks(table.spec):
        cut = max(0, first - start)
        if cut < rows.shape[0]:
            yield start + cut, rows[cut:]


def _require_free_names(slots: Iterable[str], table: str) -> None:
    """Requires names of slots that checkpoints don't use otherwise.

    Raises:
        ValueError: a slot has the name of another part of tables.
    """
    for slot in slots:
        taken = slot in (*PARTS, LEARNING_RATE, DELTA)
        if taken or slot.startswith(FALLBACK):
            raise ValueError(
                f"Table '{table}': its optimizer's rule has a slot '{slot}', "
                "and checkpoints have another part of tables by this name. "
                "Give the slot another name."
            )


def as_numbers(spec: TableSpec, ids: Any) -> np.ndarray:
    """Returns ids, or keys of a table's dtype, [n], as int64.

    Raises:
        TypeError: they are of another dtype.
        ValueError: they have another shape, or ids are no numbers of rows.
    """
    where = f"Table '{spec.name}'"
    if spec.keys is not None:
        keys = as_int64(where, spec.keys.dtype, ids, Checks())
        array: Any = keys.numpy() if tf.is_tensor(keys) else None
        if array is None or array.ndim != 1:
            raise ValueError(
                f"{where}: keys must be a Tensor of shape [n], got "
                f"{type(keys).__name__} of shape "
                f"{getattr(keys, 'shape', None)}."
            )
        return array
    given = np.asarray(ids)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"{where}: ids must be integers, got {given.dtype}.")
    rows = spec.vocabulary_size
    outside = given[(given < 0) | (given >= rows)]
    if given.ndim != 1 or outside.size:
        said = f"id {outside[0]}" if outside.size else f"{given.shape}"
        raise ValueError(
            f"{where}: ids must be [n], from 0 to {rows - 1}, got {said}."
        )
    return given.astype(np.int64)


def _as_vectors(value: Any, shape: tuple[int, int], where: str) -> tf.Tensor:
    """Returns vectors as float32 on the host, after checks."""
    with tf.device("CPU:0"):
        vectors = tf.convert_to_tensor(value)
        if not (vectors.dtype.is_floating or vectors.dtype.is_integer):
            raise TypeError(
                f"{where}: vectors must be numbers, got {vectors.dtype.name}."
            )
        if vectors.shape != shape:
            raise ValueError(
                f"{where}: vectors of {shape[0]} ids must have the shape "
                f"{list(shape)}, got {vectors.shape.as_list()}."
            )
        return tf.cast(vectors, tf.float32)
