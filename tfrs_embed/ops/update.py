"""Gradients of activations to new rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.kernels import calls
from tfrs_embed.ops import compiled, lookup
from tfrs_embed.ops.bags import Bags
from tfrs_embed.ops.ids import of_one_dtype
from tfrs_embed.optimizers import UpdateRule

PARAMETERS = "parameters"


class Uses(NamedTuple):
    """What adds to the gradients of a table's rows.

    Attributes:
        bags: bags of ids, of each feature.
        gradients: their vectors' gradients, [count, dim] float32.
        single: whether it is known that no bag has more than one id.
    """

    bags: Sequence[Bags]
    gradients: Sequence[tf.Tensor]
    single: bool = False


class Change(NamedTuple):
    """A table that is to be updated.

    Attributes:
        variables: the parameters and the rule's slots, by name.
        rule: the update rule.
        rate: its learning rate, a scalar float32.
        uses: what adds to the gradients.
    """

    variables: dict[str, tf.Variable]
    rule: UpdateRule
    rate: tf.Tensor
    uses: Uses


def row_gradients(
    uses: Uses, device: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums a table's gradients row by row, over all its features.

    Args:
        uses: what adds to the gradients.
        device: where the table is.

    Returns:
        The unique ids, [rows], in the order they first occur, and their summed
        gradients, [rows, dim] float32.
    """
    ids = of_one_dtype([b.ids for b in uses.bags])
    unique, index = tf.unique(ids[0] if len(ids) == 1 else tf.concat(ids, 0))
    module = kernels.operations(device, training=True)
    if module is None and _one_each(uses):
        source = uses.bags[0].bag_of_id()
        size = tf.size(unique)
        return unique, _add_by_row(uses.gradients[0], source, index, size)
    rows = lookup.spread(
        uses.gradients, uses.bags, index, tf.size(unique), device
    )
    return unique, rows


def _add_by_row(
    values: tf.Tensor, source: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor
) -> tf.Tensor:
    """rows[index[i]] += values[source[i]]; index has all of the rows."""
    # Where most rows occur once, copying the first value of each and adding the
    # rest costs a third of a segment sum over all.
    number = tf.range(tf.size(index))
    first = tf.math.unsorted_segment_min(number, index, num_rows)
    rest = tf.where(tf.gather(first, index) < number)
    return tf.tensor_scatter_nd_add(
        tf.gather(values, tf.gather(source, first)),
        tf.gather(index, rest),
        tf.gather(values, tf.gather(source, rest[:, 0])),
    )


def _one_each(uses: Uses) -> bool:
    """Whether each id's gradient is that of one feature's bag, as it is."""
    first, *others = uses.bags
    if first.weights is not None or first.scale is not None or others:
        return False
    return uses.single or first.per_bag == 1


def update(changes: Sequence[Change], device: str | None) -> None:
    """Updates the rows that are used, of tables and their slots.

    Args:
        changes: the tables, and what changes them.
        device: where they are.
    """
    # As the lookup was, wherever its gradient is traced.
    if any(b.validity is not None for c in changes for b in c.uses.bags):
        for change in changes:
            num_rows = change.variables[PARAMETERS].shape[0]
            bags, gradients, _ = change.uses
            update_unique(
                change, *compiled.row_gradients(bags, gradients, num_rows)
            )
        return
    module = kernels.operations(device, training=True)
    if module and changes and all(calls.has_rule(c.rule) for c in changes):
        calls.update(
            module,
            [_in_order(c) for c in changes],
            [c.rule for c in changes],
            [c.rate for c in changes],
            [c.uses.bags for c in changes],
            [c.uses.gradients for c in changes],
        )
        return
    for group in _alike(changes):
        if len(group) == 1:
            [change] = group
            ids, gradients = row_gradients(change.uses, device)
            update_unique(change, ids, gradients)
        else:
            _update_together(group, device)


def _alike(changes: Sequence[Change]) -> list[list[Change]]:
    """Groups tables of one width, rule and rate."""
    groups: dict[Any, list[Change]] = {}
    for number, change in enumerate(changes):
        dim = change.variables[PARAMETERS].shape[1]
        key = (dim, change.rule, id(change.rate))
        # What was exchanged is shared by tables already.
        groups.setdefault((number,) if change.uses.single else key, []).append(
            change
        )
    return list(groups.values())


def _update_together(changes: Sequence[Change], device: str | None) -> None:
    """Updates tables of one width, rule and rate.

    Their rows are numbered one table after the other, so that many small tables
    cost little more than one: TensorFlow's operations cost some microseconds
    each, whatever they do.
    """
    sizes = [c.variables[PARAMETERS].shape[0] for c in changes]
    starts = np.cumsum([0, *sizes])
    dtype = tf.int32 if starts[-1] <= tf.int32.max else tf.int64
    ids = [
        tf.cast(b.ids, dtype) + tf.constant(start, dtype)
        for start, c in zip(starts, changes, strict=False)
        for b in c.uses.bags
    ]
    unique, index = tf.unique(tf.concat(ids, 0))
    sums = lookup.spread(
        [g for c in changes for g in c.uses.gradients],
        [b for c in changes for b in c.uses.bags],
        index,
        tf.size(unique),
        device,
    )
    # In the order that they first occur in, and so table after table.
    ends = tf.constant(starts[1:], dtype)
    table = tf.searchsorted(ends, unique, side="right")
    count = len(changes)
    counts = tf.math.bincount(table, minlength=count, maxlength=count)
    rows = tf.split(
        unique - tf.gather(tf.constant(starts, dtype), table), counts, num=count
    )
    first = changes[0]
    old = {
        name: tf.concat(
            [
                tf.gather(c.variables[name], r)
                for c, r in zip(changes, rows, strict=True)
            ],
            0,
        )
        for name in first.variables
    }
    slots = {k: v for k, v in old.items() if k != PARAMETERS}
    parameters, slots = first.rule.update(
        first.rate, sums, old[PARAMETERS], slots
    )
    for name, new in {PARAMETERS: parameters, **slots}.items():
        for change, r, each in zip(
            changes, rows, tf.split(new, counts, num=count), strict=True
        ):
            scatter_update(change.variables[name], r, each)


def _in_order(change: Change) -> dict[str, tf.Variable]:
    names = [PARAMETERS, *change.rule.slots()]
    return {name: change.variables[name] for name in names}


def update_unique(
    change: Change,
    ids: tf.Tensor,
    gradients: tf.Tensor,
    made: tf.Tensor | None = None,
) -> None:
    """Updates rows of a table and its slots.

    Args:
        change: the table; its uses are not read.
        ids: [n], unique, or equal ones with equal gradients.
        gradients: the rows' gradients, [n, dim] float32.
        made: scalar bool; if not, the rows stay what they are. None: true.
    """
    variables = change.variables
    old = {k: tf.gather(v, ids) for k, v in variables.items()}
    slots = {k: v for k, v in old.items() if k != PARAMETERS}
    parameters, slots = change.rule.update(
        change.rate, gradients, old[PARAMETERS], slots
    )
    for name, new in {PARAMETERS: parameters, **slots}.items():
        rows = new if made is None else tf.where(made, new, old[name])
        scatter_update(variables[name], ids, rows)


def scatter_update(
    variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor
) -> None:
    """Writes rows in place.

    ResourceScatterUpdate with unique ids was the fastest of TensorFlow's
    scatter ops on a CPU, and it does not read or copy the variable.

    Args:
        variable: [vocabulary_size, dim].
        ids: [rows], unique, or equal ones with equal rows.
        rows: [rows, dim].
    """
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=ids, updates=rows
    )
