"""Updates of tables' rows by gradients of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import gather
from tfrs_embed.ops import rounding
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.rounding import Rounding
from tfrs_embed.optimizers.options import NO_OPTIONS, UpdateOptions
from tfrs_embed.optimizers.rules import Slots, UpdateRule

PARAMETERS = "parameters"
# Tables that are updated together. In larger groups tf.unique, on one thread,
# keeps the other threads waiting, and its hash table leaves the caches.
_TOGETHER = 32


class JointRows(NamedTuple):
    """Gradients of rows of several tables, before they are split by table.

    Attributes:
        sizes: the numbers of rows of the tables.
        bags: bags of at most one id, which number the rows of all tables, one
            table after the other.
        gradients: their gradients, [count, dim] float32.
    """

    sizes: Sequence[int]
    bags: BaggedIds
    gradients: tf.Tensor


class GradientContributions(NamedTuple):
    """Gradient contributions to a table's rows.

    Attributes:
        bags: each feature's bags.
        gradients: their vectors' gradients, [count, dim] float32.
        single: whether no bag can have more than one id, as exchanged
            gradients.
        joint: where the first of the bags come from; kernels update all tables
            from it, and the split ones are not computed.
    """

    bags: Sequence[BaggedIds]
    gradients: Sequence[tf.Tensor]
    single: bool = False
    joint: JointRows | None = None

    @property
    def sources(self) -> list[tf.Tensor]:
        """The gradients, those of `joint` before they are split."""
        if self.joint is None:
            return [*self.gradients]
        return [self.joint.gradients, *self.gradients[1:]]


def add_bags(
    contributions: dict[str, GradientContributions],
    table: str,
    bags: BaggedIds,
    gradient: tf.Tensor,
) -> None:
    """Adds bags, with their vectors' gradient, to a table's contributions."""
    of_table = contributions.get(table, GradientContributions([], []))
    contributions[table] = of_table._replace(
        bags=[*of_table.bags, bags],
        gradients=[*of_table.gradients, gradient],
        single=False,
    )


class Marks(NamedTuple):
    """Where an update marks the rows that it changes.

    Attributes:
        variable: [vocabulary_size] uint8.
        mark: the mark, a scalar uint8.
    """

    variable: tf.Variable
    mark: tf.Tensor


class TableUpdate(NamedTuple):
    """A table's update.

    Attributes:
        variables: the parameters and the rule's slots by name; empty if the
            rows are not in variables.
        rule: the update rule.
        rate: the learning rate, a scalar float32.
        contributions: the contributions to its rows' gradients.
        step: the number of earlier updates, a scalar int64.
        rounding: the rounding of new rows that aren't float32.
        options: clipping and decay before the rule, limits after it; norms
            over many rows are clipped earlier.
        decay: each row's loss, a share as scalar float32; None: none.
        marks: marks the rows; None: nobody asks which have changed.
    """

    variables: dict[str, tf.Variable]
    rule: UpdateRule
    rate: tf.Tensor
    contributions: GradientContributions
    step: tf.Tensor | int = 0
    rounding: Rounding = Rounding()
    options: UpdateOptions = NO_OPTIONS
    decay: tf.Tensor | None = None
    marks: Marks | None = None

    @property
    def parameters(self) -> tf.Variable:
        """The table's rows."""
        return self.variables[PARAMETERS]

    def new_rows(
        self, gradients: tf.Tensor, old: dict[str, tf.Tensor]
    ) -> Slots:
        """Returns the new rows and slots by name.

        `gradients` are [rows, dim] float32; `old` has the rows, as
        "parameters", and their slots, float32.
        """
        slots = {k: v for k, v in old.items() if k != PARAMETERS}
        rows = old[PARAMETERS]
        if self.decay is not None:
            rows -= self.decay * rows
        gradients = self.options.clip_rows(gradients)
        rows, slots = self.rule.update(
            self.rate, gradients, rows, slots, tf.convert_to_tensor(self.step)
        )
        return {PARAMETERS: self.options.limit_rows(rows), **slots}


def features_of(
    updates: Sequence[TableUpdate],
) -> Iterator[tuple[BaggedIds, tf.Tensor, int, int]]:
    """Yields an update's features: bags, gradients, table and span.

    The bags' ids number the rows of `span` tables from that one on.
    """
    joined = 0  # The tables before this one have had joint rows.
    for t, u in enumerate(updates):
        bags, gradients, _, joint = u.contributions
        if joint is not None and t >= joined:
            sizes = [
                v.parameters.shape[0]
                for v in updates[t : t + len(joint.sizes)]
                if v.contributions.joint is joint
            ]
            # Not if some of the tables are frozen.
            if sizes == [*joint.sizes]:
                yield joint.bags, joint.gradients, t, len(sizes)
                joined = t + len(sizes)
        first = 1 if t < joined else 0
        for b, gradient in zip(bags[first:], gradients[first:], strict=True):
            yield b, gradient, t, 1


def alike(updates: Sequence[TableUpdate]) -> list[list[TableUpdate]]:
    """Groups tables of one width and optimizer."""
    groups: dict[Any, list[TableUpdate]] = {}
    for number, table_update in enumerate(updates):
        rows, dim = table_update.parameters.shape
        key = (
            dim,
            table_update.rule,
            id(table_update.rate),
            table_update.options,
        )
        # Exchanged gradients are of a group of tables already, and numbering
        # rows needs their number.
        alone = table_update.contributions.single or rows is None
        groups.setdefault((number,) if alone else key, []).append(table_update)
    return [
        group[start : start + _TOGETHER]
        for group in groups.values()
        for start in range(0, len(group), _TOGETHER)
    ]


def update_together(
    updates: Sequence[TableUpdate], sum_by_row: Callable[..., tf.Tensor]
) -> None:
    """Updates tables of one width and optimizer.

    Rows are numbered table after table, so that many small tables cost little
    more than one: each operation takes some microseconds. `sum_by_row` is
    `Stock.sum_gradients_by_row`.
    """
    sizes = [u.parameters.shape[0] for u in updates]
    starts = np.cumsum([0, *sizes])
    dtype = tf.int32 if starts[-1] <= tf.int32.max else tf.int64
    ids = [
        tf.cast(b.ids, dtype) + tf.constant(start, dtype)
        for start, u in zip(starts, updates, strict=False)
        for b in u.contributions.bags
    ]
    unique, index = tf.unique(tf.concat(ids, 0))
    sums = sum_by_row(
        [g for u in updates for g in u.contributions.gradients],
        [b for u in updates for b in u.contributions.bags],
        index,
        tf.size(unique),
    )
    # Unique rows are in the order of their occurrence, so table after table.
    ends = tf.constant(starts[1:], dtype)
    table = tf.searchsorted(ends, unique, side="right")
    count = len(updates)
    counts = tf.math.bincount(table, minlength=count, maxlength=count)
    rows = tf.split(
        unique - tf.gather(tf.constant(starts, dtype), table), counts, num=count
    )
    first = updates[0]
    old = {
        name: tf.concat(
            [
                rounding.widen(gather(u.variables[name], r))
                for u, r in zip(updates, rows, strict=True)
            ],
            0,
        )
        for name in first.variables
    }
    for name, new in first.new_rows(sums, old).items():
        for table_update, r, each in zip(
            updates, rows, tf.split(new, counts, num=count), strict=True
        ):
            _write(table_update, name, r, each)


def update_unique(
    table_update: TableUpdate,
    ids: tf.Tensor,
    gradients: tf.Tensor,
    made: tf.Tensor | None = None,
) -> None:
    """Updates rows of a table and its slots, by gradients that are summed.

    Args:
        table_update: the table; its contributions are not read.
        ids: [n], unique, or equal ones with equal gradients.
        gradients: the rows' gradients, [n, dim] float32.
        made: scalar bool; false leaves the rows. None: true.
    """
    variables = table_update.variables
    old = {k: rounding.widen(gather(v, ids)) for k, v in variables.items()}
    for name, new in table_update.new_rows(gradients, old).items():
        rows = new if made is None else tf.where(made, new, old[name])
        _write(table_update, name, ids, rows)


def _write(
    table_update: TableUpdate, name: str, ids: tf.Tensor, rows: tf.Tensor
) -> None:
    """Writes new rows, float32, of the parameters or a slot."""
    variable, marks = table_update.variables[name], table_update.marks
    if name == PARAMETERS:
        if marks is not None:
            scatter_update(marks.variable, ids, marks.mark)
        rows = rounding.narrow(
            rows,
            variable.dtype,
            table_update.rounding,
            tf.convert_to_tensor(table_update.step, tf.int64),
            ids,
        )
    scatter_update(variable, ids, rows)


def scatter_update(
    variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor
) -> None:
    """Writes rows in place.

    ResourceScatterUpdate with unique ids was the fastest of TensorFlow's
    scatters on a CPU; it neither reads nor copies the variable.

    Args:
        variable: [vocabulary_size, dim] or [vocabulary_size], or a store's
            substitute for a variable, with a method `scatter_update`.
        ids: [rows], unique, or equal ones with equal rows.
        rows: [rows, dim] or [rows]; or a scalar, for a variable with a handle.
    """
    if not hasattr(variable, "handle"):
        variable.scatter_update(tf.IndexedSlices(rows, ids))
        return
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=ids, updates=rows
    )
