"""A layer's `table_stacking`: which tables SparseCores hold as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.optimizers.rules import TableOptimizer

#: SparseCores pad rows to multiples of this width.
_WIDTH = 8

#: The names of each stack's tables. Any other table is a stack by itself.
Groups = tuple[tuple[str, ...], ...]


def read(table_stacking: Any) -> Groups | None:
    """Reads a layer's `table_stacking`; None means that TensorFlow chooses.

    The argument is "auto"; None, for no stacking; a list of names of tables to
    stack; or a list of such lists.
    """
    if table_stacking is None:
        return ()
    text = (
        "table_stacking must be 'auto', None, a list of table names or a list "
        f"of such lists, got {table_stacking!r}."
    )
    if isinstance(table_stacking, str):
        if table_stacking == "auto":
            return None
        raise ValueError(text)
    if not isinstance(table_stacking, (list, tuple)):
        raise TypeError(text)
    groups = tuple(table_stacking)
    if groups and all(isinstance(name, str) for name in groups):
        groups = (groups,)
    for group in groups:
        if not (
            isinstance(group, (list, tuple))
            and group
            and all(isinstance(name, str) for name in group)
        ):
            raise TypeError(text)
    named = [name for group in groups for name in group]
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        raise ValueError(f"table_stacking names the table '{twice[0]}' twice.")
    return tuple(map(tuple, groups))


def unite_optimizers(
    groups: Groups,
    tables: Sequence[TableSpec],
    optimizers: Mapping[str, TableOptimizer | None],
) -> dict[str, TableOptimizer | None]:
    """Checks that the groups can be stacks, wherever the tables are.

    Returns the tables' optimizers by name, one object per group.
    """
    by_name = {table.name: table for table in tables}
    united = dict(optimizers)
    for group in groups:
        unknown = [name for name in group if name not in by_name]
        if unknown:
            raise ValueError(
                f"table_stacking names the tables {unknown}, which the "
                f"layer doesn't have; its tables are {list(by_name)}."
            )
        first, *others = (by_name[name] for name in group)
        for table in (first, *others):
            if table.placement not in ("auto", "sparsecore"):
                raise ValueError(
                    f"Table '{table.name}': placement="
                    f"'{table.placement}', but table_stacking names it, "
                    "and only SparseCores hold stacks."
                )
        for table in others:
            both = f"Tables '{first.name}' and '{table.name}' can't be"
            if _padded(table.dim) != _padded(first.dim):
                raise ValueError(
                    f"{both} stacked: their rows are {first.dim} and "
                    f"{table.dim} wide, padded to {_padded(first.dim)} "
                    f"and {_padded(table.dim)}."
                )
            mine, its = optimizers[table.name], optimizers[first.name]
            if mine is its:
                continue
            if mine is None or its is None or not mine.may_become(its):
                raise ValueError(
                    f"{both} stacked: their optimizers, {its} and {mine}, "
                    "differ, or their learning rates can change separately. "
                    "Give both tables one object, or the name of one."
                )
            united[table.name] = its
    return united


def _padded(dim: int) -> int:
    return -(-dim // _WIDTH) * _WIDTH
