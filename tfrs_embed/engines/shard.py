"""The rows of tables that one device holds, and their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.names import in_saved_model
from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import AutoTrackable
from tfrs_embed.compat.unmirrored import UnmirroredVariable, make_variable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.engines.norms import Factors
from tfrs_embed.ops import backend, concat_gradients, rounding
from tfrs_embed.ops.bags import BaggedIds, bags_of_rows, id_dtype
from tfrs_embed.ops.rounding import Rounding
from tfrs_embed.ops.update import PARAMETERS, GradientContributions, TableUpdate
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage import kinds
from tfrs_embed.storage.row_store import RowStore, StoredTable


class _Step(UnmirroredVariable):
    """The number of updates made; restoring it drops the deferred update."""

    deferred: DeferredUpdate | None = None

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        if self.deferred is not None:
            self.deferred.exists.assign(False)
        return super()._restore_from_tensors(restored_tensors)


class DeferredUpdate(AutoTrackable):
    """The update that a pipelined step defers to the next one."""

    def __init__(
        self, tables: Iterable[TableSpec], num_rates: int, decays: bool
    ) -> None:
        super().__init__()
        # SavedModels contain these names.
        self.exists = make_variable(tf.constant(False), "pending")
        self.rates = make_variable(tf.zeros([num_rates]), "pending_rates")
        if decays:
            self.decays = make_variable(tf.zeros([num_rates]), "pending_decays")
        self.ids = {}
        self.gradients = {}
        for table in tables:
            self.ids[in_saved_model(table.name)] = make_variable(
                tf.zeros([0], id_dtype(table)),
                f"{table.name}/pending_ids",
                shape=[None],
            )
            self.gradients[in_saved_model(table.name)] = make_variable(
                tf.zeros([0, table.dim]),
                f"{table.name}/pending_gradients",
                shape=[None, table.dim],
            )


class Shard:
    """Tables' rows on one device: all of them, or one replica's share.

    A step reads and writes the rows it touches and nothing else, whatever the
    size of the tables. Tables of the same kind of storage share a store.

    Attributes:
        variables: each table's variables by the table's name, then by
            "parameters" or the slot's name; see `RowStore.variables`.
        step: the number of updates made.
        deferred: the deferred update, if pipelined.
        trash: the row that takes the gradients of ids without a row; None: all
            have one.
    """

    trash: int | None = None

    def __init__(
        self,
        tables: Iterable[TableSpec],
        optimizers: dict[str, TableOptimizer | None],
        pipelined: bool,
        device: str | None,
    ) -> None:
        self.device = device
        self.variables: dict[str, dict[str, Any]] = {}
        self.step: Any = None
        self.deferred: DeferredUpdate | None = None
        self._tables = tuple(tables)
        by_kind: dict[type[RowStore], RowStore] = {}
        self.stores: dict[str, RowStore] = {}
        for table in self._tables:
            kind = kinds.kind_of(table)
            if kind not in by_kind:
                by_kind[kind] = kind(device)
            self.stores[table.name] = by_kind[kind]
        self._optimizers = optimizers
        self._pipelined = pipelined
        # Tables that share an optimizer share its rate.
        self._distinct = distinct(optimizers)
        self._decays = any(o.options.weight_decay for o in self._distinct)
        self._owned: dict[str, tuple[str, tf.Tensor]] = {}

    def build(
        self,
        rows: Callable[[TableSpec], int],
        part: Callable[[TableSpec], Rounding] = rounding.of_part,
    ) -> None:
        """Creates the variables, with rows of zeros.

        `rows` gives the number of a table's rows here, `part` their rounding.
        """
        self._roundings = {t.name: part(t) for t in self._tables}
        with tf.init_scope(), tf.device(self.device):
            try:
                shares = [
                    stored(t, rows(t), self._optimizers[t.name])
                    for t in self._tables
                ]
                for store, places in self._by_store(self.stores):
                    store.build([shares[i] for i in places])
            except tf.errors.ResourceExhaustedError:
                self.drop_variables()
                raise
            for name, store in self.stores.items():
                self.variables[name] = store.variables(name)
            self.step = make_variable(
                tf.constant(0, tf.int64), "step", kind=_Step
            )
            if self._pipelined:
                self.deferred = DeferredUpdate(
                    self._tables, len(self._distinct), self._decays
                )
                self.step.deferred = self.deferred

    def _by_store(
        self, names: Iterable[str]
    ) -> Iterable[tuple[RowStore, list[int]]]:
        """The stores of tables, each with its tables' indices in `names`."""
        places: dict[RowStore, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(self.stores[name], []).append(place)
        return places.items()

    def drop_variables(self) -> None:
        """Frees the variables of tables that were made before one failed."""
        for store in self.stores.values():
            store.drop()
        self.variables.clear()

    def own(self, copies: str, table: str, rows: np.ndarray) -> None:
        """Makes updates of a table's copies write its rows too.

        `rows` has the row of each copy, [n] int64; -1: another shard has it.
        """
        with tf.device(self.device):
            self._owned[copies] = table, tf.constant(rows)

    def gather(
        self,
        names: Sequence[str],
        ids: Sequence[tf.Tensor],
        training: bool = False,
        dtype: tf.DType | None = None,
    ) -> list[tf.Tensor]:
        """Returns rows of each of several tables, [n, dim]; reads no others.

        `ids` are the rows of each, [n] int64. Without a dtype the rows have the
        tables' dtype.
        """
        wanted = dtype or self.variables[names[0]][PARAMETERS].dtype
        if training:
            # Bags of one row: exact in the tables' dtype.
            rows = self.lookup(names, bags_of_rows(ids), training, wanted)
        else:
            rows = [
                self.stores[name].read(name, PARAMETERS, each)
                for name, each in zip(names, ids, strict=True)
            ]
        return [tf.cast(each, wanted) for each in rows]

    def lookup(
        self,
        names: Sequence[str],
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        """Looks features up in the named tables; see `RowStore.lookup`."""
        found: list[Any] = [None] * len(names)
        for store, places in self._by_store(names):
            vectors = store.lookup(
                [names[i] for i in places],
                [bags[i] for i in places],
                training,
                dtype,
            )
            for i, vector in zip(places, vectors, strict=True):
                found[i] = vector
        return found

    def update(
        self,
        contributions: dict[str, GradientContributions],
        after: Sequence[tf.Tensor],
        factors: Factors | None = None,
    ) -> None:
        """Updates the tables, or defers the update if pipelined.

        Args:
            contributions: by table the ids of rows held here and their
                gradients; those of untrained tables are dropped.
            after: tensors that don't exist if the step is to change nothing.
            factors: clips gradients by norms over many rows; None: no table has
                such a norm.
        """
        contributions = {
            name: of_table
            for name, of_table in contributions.items()
            if self._optimizers[name] is not None
        }
        if factors is not None:
            contributions = self._clip_norms(contributions, factors)
        step = tf.convert_to_tensor(self.step)
        rates = [o.rate.at(step) for o in self._distinct]
        decays = [o.decay(step) for o in self._distinct]
        deferred = self.deferred
        if deferred is None:
            self._apply(contributions, rates, decays, step)
        else:
            # The update of another call in the same step, if any.
            self.apply_deferred()
            for name, of_table in contributions.items():
                ids, gradients = self._row_gradients(of_table)
                stored = deferred.ids[in_saved_model(name)]
                stored.assign(tf.cast(ids, stored.dtype))
                deferred.gradients[in_saved_model(name)].assign(gradients)
        # These variables don't depend on the ids, and must not change if the
        # ids are bad, or the loss or its gradient fails.
        gradients = concat_gradients.find(
            [g for c in contributions.values() for g in c.gradients]
        )
        with tf.control_dependencies(
            graphs.here([*after, *gradients.matrices])
        ):
            self.step.assign_add(1)
            if deferred is not None:
                # A replica may have no table.
                deferred.rates.assign(tf.stack(rates) if rates else [])
                if self._decays:
                    deferred.decays.assign(
                        tf.stack([0.0 if d is None else d for d in decays])
                    )
                deferred.exists.assign(True)

    def drop_deferred(self) -> None:
        if self.deferred is not None:
            self.deferred.exists.assign(False)

    def apply_deferred(self) -> None:
        deferred = self.deferred
        if deferred is None:
            return

        def apply() -> tf.Operation:
            rates = [deferred.rates[i] for i in range(len(self._distinct))]
            decays = [
                deferred.decays[i] if o.options.weight_decay else None
                for i, o in enumerate(self._distinct)
            ]
            contributions = {}
            for name, optimizer in self._optimizers.items():
                if optimizer is not None:
                    ids = tf.convert_to_tensor(
                        deferred.ids[in_saved_model(name)]
                    )
                    gradients = tf.convert_to_tensor(
                        deferred.gradients[in_saved_model(name)]
                    )
                    bags = BaggedIds.of_rows(ids, None, tf.size(ids))
                    contributions[name] = GradientContributions(
                        [bags], [gradients]
                    )
            # The step that deferred the update has been counted.
            step = tf.convert_to_tensor(self.step) - 1
            self._apply(contributions, rates, decays, step)
            deferred.exists.assign(False)
            return tf.no_op()

        with tf.device(self.device):
            tf.cond(deferred.exists, apply, tf.no_op)

    def _apply(
        self,
        contributions: dict[str, GradientContributions],
        rates: Sequence[tf.Tensor],
        decays: Sequence[tf.Tensor | None],
        step: tf.Tensor,
    ) -> None:
        """Updates tables by the rates and decays of the distinct optimizers.

        `step` is the number of updates made before this one.
        """
        updates = {}
        for name, of_table in contributions.items():
            optimizer = self._optimizers[name]
            assert optimizer is not None
            place = self._distinct.index(optimizer)
            updates[name] = TableUpdate(
                {},
                optimizer.rule,
                rates[place],
                of_table,
                step,
                self._roundings[name],
                optimizer.options,
                decays[place],
            )
        names = list(updates)
        for store, places in self._by_store(names):
            store.update({names[i]: updates[names[i]] for i in places})
        for copies, (table, rows) in self._owned.items():
            if copies in contributions:
                [bags] = contributions[copies].bags
                row = tf.gather(rows, bags.ids)
                mine = tf.where(row >= 0)[:, 0]
                row, updated = tf.gather(row, mine), tf.gather(bags.ids, mine)
                for name in self.variables[table]:
                    copied = self.stores[copies].read(copies, name, updated)
                    self.stores[table].write(table, name, row, copied)

    def _row_gradients(
        self, of_table: GradientContributions
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows of a table's gradients, and the gradients' sums by row."""
        return backend.of(self.device, training=True).row_gradients(of_table)

    def _clip_norms(
        self, contributions: dict[str, GradientContributions], factors: Factors
    ) -> dict[str, GradientContributions]:
        """Clips gradients by norms over many rows, and sums those by row."""
        squares: dict[str, tf.Tensor] = {}
        sums = {}
        for name, of_table in contributions.items():
            optimizer = self._optimizers[name]
            if optimizer is None or optimizer.options.norm is None:
                continue
            ids, rows = self._row_gradients(of_table)
            table, counted = name, None
            if name in self._owned:
                # All replicas have the copies' gradients; only owners count
                # them.
                table, owned = self._owned[name]
                counted = tf.gather(owned, ids) >= 0
            elif self.trash is not None:
                counted = ids != self.trash
            own = rows
            if counted is not None:
                own = tf.gather(rows, tf.where(counted)[:, 0])
            square = tf.reduce_sum(tf.square(own))
            squares[table] = squares.get(table, 0.0) + square
            sums[name] = table, ids, rows
        found = factors(squares)
        clipped = {}
        for name, (table, ids, rows) in sums.items():
            bags = BaggedIds.of_rows(ids, None, tf.size(ids))
            clipped[name] = GradientContributions(
                [bags], [rows * found[table]], single=True
            )
        return contributions | clipped


def stored(
    table: TableSpec, rows: int, optimizer: TableOptimizer | None
) -> StoredTable:
    """A table with so many rows here, and its optimizer's slots."""
    return StoredTable(table, rows, optimizer.rule.slots() if optimizer else {})


def distinct(
    optimizers: dict[str, TableOptimizer | None],
) -> list[TableOptimizer]:
    """The optimizers that train tables, each once."""
    return list({id(o): o for o in optimizers.values() if o}.values())
