"""The rows of tables that one device holds, and their updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.strategies import in_xla
from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.engines.accumulation import Accumulation, is_last
from tfrs_embed.engines.norms import Factors, Total
from tfrs_embed.ops import backend, concat_gradients, rounding
from tfrs_embed.ops.bags import BaggedIds, all_valid, bags_of_rows
from tfrs_embed.ops.rounding import Rounding
from tfrs_embed.ops.update import PARAMETERS, GradientContributions, TableUpdate
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.row_store import TableShare
from tfrs_embed.storage.table_state import Freezing


class Shard:
    """Tables' rows on one device: all of them, or one replica's share.

    A step reads and writes the rows it touches and nothing else, whatever the
    size of the tables.

    Args:
        tables: the tables.
        optimizers: each table's optimizer by name; None: it is not trained.
        device: where the rows are used; None: where TensorFlow places them.
        freezing: which of the tables are frozen for now.

    Attributes:
        store: the tables' rows and slots.
        step: the number of updates made.
        squares: [2] float64, the sum of the squares of the gradient in the last
            measured update, on all shards, and the number of updates after it;
            None: nobody has asked.
    """

    def __init__(
        self,
        tables: Iterable[TableSpec],
        optimizers: dict[str, TableOptimizer | None],
        device: str | None,
        freezing: Freezing,
    ) -> None:
        self.device = device
        self._freezing = freezing
        self.step: Any = None
        self.squares: tf.Variable | None = None
        self._tables = tuple(tables)
        # Imported here, as programs import this module for its functions too.
        from tfrs_embed.storage.stores import store_of

        self.store = store_of(self._tables, device)
        self._optimizers = optimizers
        self._owned: dict[str, tuple[str, tf.Tensor]] = {}
        self._accumulations: dict[str, Accumulation] = {}

    def build(
        self,
        rows: Callable[[TableSpec], int],
        part: Callable[[TableSpec], Rounding] = rounding.of_part,
        layer: str = "",
        world: int = 1,
    ) -> None:
        """Creates the variables, with rows of zeros.

        `rows` gives the number of a table's rows here, `part` their rounding.
        `layer` is the owner of the tables, for errors; `world` shards hold
        them.
        """
        self._roundings = {t.name: part(t) for t in self._tables}
        with tf.init_scope(), tf.device(self.device):
            shares = []
            for table in self._tables:
                optimizer = self._optimizers[table.name]
                slots = optimizer.rule.slots() if optimizer else {}
                trained = optimizer is not None
                shares.append(
                    TableShare(table, rows(table), slots, trained, layer, world)
                )
            self.store.build(shares)
            for table in self._tables:
                optimizer = self._optimizers[table.name]
                steps = optimizer and optimizer.options.accumulation
                if steps:
                    self._accumulations[table.name] = Accumulation(
                        table.name, table.dim, steps
                    )
            self.step = make_variable(tf.constant(0, tf.int64), "step")

    def measure(self) -> None:
        """Makes updates measure the gradient; see `squares`."""
        with tf.init_scope(), tf.device(self.device):
            none = tf.constant([0.0, -1.0], tf.float64)
            self.squares = make_variable(none, "gradient_squares")

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
        wanted = dtype or self.store.variables(names[0])[PARAMETERS].dtype
        if training:
            # Bags of one row: exact in the tables' dtype.
            bags = bags_of_rows(ids)
            rows = self.store.lookup(names, bags, training, wanted)
        else:
            rows = [
                self.store.read(name, PARAMETERS, each)
                for name, each in zip(names, ids, strict=True)
            ]
        return [tf.cast(each, wanted) for each in rows]

    def update(
        self,
        contributions: dict[str, GradientContributions],
        after: Sequence[tf.Tensor],
        factors: Factors | None = None,
        total: Total = tf.identity,
    ) -> None:
        """Updates the tables.

        Args:
            contributions: by table the ids of rows held here and their
                gradients; those of untrained tables are dropped.
            after: tensors that don't exist if the step is to change nothing.
            factors: clips gradients by norms over many rows; None: no table has
                such a norm.
            total: sums a number, float32, over all shards.
        """
        if not tf.executing_eagerly():
            self._freezing.is_traced = True
        contributions = {
            name: of_table
            for name, of_table in contributions.items()
            if self._optimizers[name] is not None
            and self._table_of(name) not in self._freezing.frozen
        }
        if self.squares is not None:
            contributions, squares = self._sum_rows(contributions)
            square = tf.add_n([*squares.values(), tf.zeros([])])
            measured = total(square), self.step + 1
            self.squares.assign([tf.cast(m, tf.float64) for m in measured])
        contributions = self._accumulate(contributions)
        made: Any = 1
        if in_xla():
            bags = (b for c in contributions.values() for b in c.bags)
            made = tf.cast(all_valid(bags), tf.int64)
        if factors is not None:
            contributions = self._clip_norms(contributions, factors)
        self._apply(contributions)
        # The step doesn't depend on the ids, and must not change if the ids are
        # bad, or the loss or its gradient fails.
        gradients = concat_gradients.find_matrices(
            [g for c in contributions.values() for g in c.sources]
        )
        with tf.control_dependencies(
            graphs.capture([*after, *gradients.matrices])
        ):
            self.step.assign_add(made)

    def _table_of(self, name: str) -> str:
        """The table of copies of rows; other tables are their own."""
        return self._owned[name][0] if name in self._owned else name

    def _accumulate(
        self, contributions: dict[str, GradientContributions]
    ) -> dict[str, GradientContributions]:
        """Adds the gradients of earlier steps that are not applied yet."""
        if not self._accumulations:
            return contributions
        if in_xla():
            raise NotImplementedError(
                "XLA can't compile an update by a table's optimizer with "
                "gradient_accumulation_steps: leave out jit_compile=True."
            )
        step = tf.convert_to_tensor(self.step)
        operations = backend.operations(self.device, training=True)
        found = dict(contributions)
        for name, accumulation in self._accumulations.items():
            if name in contributions:
                ids, rows = operations.row_gradients(contributions[name])
                found[name] = accumulation.add(ids, rows, step)
        return found

    def _apply(self, contributions: dict[str, GradientContributions]) -> None:
        """Updates trained tables; some in each n-th step only."""
        step = tf.convert_to_tensor(self.step)
        by_steps: dict[int, dict[str, GradientContributions]] = {1: {}}
        for name, of_table in contributions.items():
            kept = self._accumulations.get(name)
            by_steps.setdefault(kept.steps if kept else 1, {})[name] = of_table
        self._write(by_steps.pop(1), step)
        for steps, of_tables in by_steps.items():
            write = functools.partial(self._write, of_tables, step // steps)
            tf.cond(
                is_last(step, steps),
                lambda write=write: (write(), True)[1],
                lambda: False,
            )

    def _write(
        self, contributions: dict[str, GradientContributions], step: tf.Tensor
    ) -> None:
        """Updates tables, and their rows that are copies.

        `step` is the number of updates made.
        """
        if not contributions:
            return
        # Tables that share an optimizer share its rate.
        rates = {
            id(o): (o.rate.at(step), o.decay(step))
            for o in distinct(self._optimizers)
        }
        updates = {}
        for name, of_table in contributions.items():
            optimizer = self._optimizers[name]
            assert optimizer is not None
            rate, decay = rates[id(optimizer)]
            updates[name] = TableUpdate(
                {},
                optimizer.rule,
                rate,
                of_table,
                step,
                self._roundings[name],
                optimizer.options,
                decay,
            )
        self.store.update(updates)
        for copies, (table, rows) in self._owned.items():
            if copies in contributions:
                [bags] = contributions[copies].bags
                row = tf.gather(rows, bags.ids)
                mine = tf.where(row >= 0)[:, 0]
                row, updated = tf.gather(row, mine), tf.gather(bags.ids, mine)
                for name in self.store.variables(table):
                    copied = self.store.read(copies, name, updated)
                    self.store.write(table, name, row, copied)

    def _clip_norms(
        self, contributions: dict[str, GradientContributions], factors: Factors
    ) -> dict[str, GradientContributions]:
        """Clips gradients by norms over many rows, and sums those by row."""
        clips = {}
        for name, of_table in contributions.items():
            optimizer = self._optimizers[name]
            if optimizer is not None and optimizer.options.norm is not None:
                clips[name] = of_table
        sums, squares = self._sum_rows(clips)
        found = factors(squares)
        for name, of_table in sums.items():
            [rows] = of_table.gradients
            rows *= found[self._table_of(name)]
            sums[name] = of_table._replace(gradients=[rows])
        return contributions | sums

    def _sum_rows(
        self, contributions: dict[str, GradientContributions]
    ) -> tuple[dict[str, GradientContributions], dict[str, tf.Tensor]]:
        """Sums gradients by row; returns the sums of tables' squares too."""
        squares: dict[str, tf.Tensor] = {}
        sums = {}
        for name, of_table in contributions.items():
            ids, rows = backend.operations(
                self.device, training=True
            ).row_gradients(of_table)
            table, counted = self._table_of(name), None
            if name in self._owned:
                # All replicas have the copies' gradients; only owners count
                # them.
                counted = tf.gather(self._owned[name][1], ids) >= 0
            elif self.store.trash is not None:
                counted = ids != self.store.trash
            own = rows
            if counted is not None:
                own = tf.gather(rows, tf.where(counted)[:, 0])
            square = tf.reduce_sum(tf.square(own))
            squares[table] = squares.get(table, 0.0) + square
            bags = BaggedIds.of_rows(ids, None, tf.size(ids))
            sums[name] = GradientContributions([bags], [rows], single=True)
        return sums, squares


def distinct(
    optimizers: dict[str, TableOptimizer | None],
) -> list[TableOptimizer]:
    """The optimizers that train tables, each once."""
    return list({id(o): o for o in optimizers.values() if o}.values())
