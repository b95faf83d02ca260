"""Decides which keys of tables with `DynamicKeys` are exported."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import numpy as np

from tfrs_embed.checkpoint.rows import FREQUENCY, SCORE
from tfrs_embed.compat.arguments import integer, text
from tfrs_embed.storage.dynamic_table import DynamicTable, counted_keys
from tfrs_embed.storage.key_rules import eviction_order
from tfrs_embed.storage.table_state import TableState

#: A condition's limit, for all tables with `DynamicKeys`, or by their names.
Limit: TypeAlias = int | Mapping[str, int]
#: The number of steps, or the time, since a key's last use.
Age: TypeAlias = int | datetime.timedelta
AgeLimit: TypeAlias = Age | Mapping[str, Age]

#: The conditions by name, and the least limit of each.
_LEAST = {"min_frequency": 1, "max_age": 0, "max_keys": 1}
_MICROSECOND = datetime.timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True)
class KeyFilter:
    """Chooses the keys of a table that fulfil all conditions; None: no limit.

    Attributes:
        min_frequency: keys that were used at least so often.
        max_age: keys that were used in one of the last `max_age` + 1 steps, or
            at most so long ago.
        max_keys: of these keys, those that the table would evict last.
    """

    min_frequency: int | None = None
    max_age: Age | None = None
    max_keys: int | None = None

    def choose(self, state: TableState) -> np.ndarray:
        """Returns the chosen keys, [n] int64 ascending; all workers call it."""
        table = cast(DynamicTable, state)
        known, now = counted_keys(table)
        chosen = np.ones(len(known.keys), bool)
        if self.min_frequency is not None:
            chosen &= known.frequency >= self.min_frequency
        if self.max_age is not None:
            most: Any = self.max_age
            if isinstance(most, datetime.timedelta):
                most //= _MICROSECOND
            chosen &= now - known.last_used <= most
        known = known.select(chosen)
        if self.max_keys is not None and len(known.keys) > self.max_keys:
            rules = table.built("the exported keys").rules
            last = eviction_order(rules, known, now)[-self.max_keys :]
            return np.sort(known.keys[last])
        return known.keys


class KeyFilters:
    """The filters of an export's tables.

    Args:
        **limits: the limits of `KeyFilter` by the conditions' names. A table's
            name, or "<layer>/<table>", stands for each table with this name.

    Raises:
        TypeError: a table's name is no string.
        ValueError: a limit is no integer, or too small.
    """

    def __init__(self, **limits: Limit | AgeLimit | None) -> None:
        self._limits = {
            name: _checked(limit, name, _LEAST[name])
            for name, limit in limits.items()
            if limit is not None
        }

    def of_table(self, layer: str, state: TableState) -> KeyFilter | None:
        """Returns the filter of a table; None: all of its keys are exported.

        Raises:
            ValueError: a limit is for this table, which has no keys, or doesn't
                count how often and when they are used; or two limits are.
        """
        table, found = state.spec.name, {}
        for condition, limit in self._limits.items():
            if not isinstance(limit, Mapping):
                if state.spec.keys is not None:
                    found[condition] = limit
                continue
            names = [n for n in (table, f"{layer}/{table}") if n in limit]
            if len(names) > 1:
                raise ValueError(
                    f"{condition} has two limits for one table, by the names "
                    f"'{names[0]}' and '{names[1]}'."
                )
            if names:
                found[condition] = limit[names[0]]
        if not found:
            return None
        where = f"Table '{table}' of layer '{layer}' can't be exported with "
        where += ", ".join(f"{n}={value}" for n, value in found.items())
        if state.spec.keys is None:
            raise ValueError(f"{where}: it has no DynamicKeys.")
        scored = SCORE in state.variables
        if FREQUENCY not in state.variables and not scored:
            raise ValueError(
                f"{where}: it doesn't count how often and when its keys are "
                "used."
            )
        if scored and "min_frequency" in found:
            raise ValueError(
                f"{where}: with eviction='score' it has scores, and doesn't "
                "count how often its keys are used."
            )
        by_time, age = state.spec.keys.by_time, found.get("max_age")
        if age is not None and isinstance(age, int) == by_time:
            raise ValueError(
                f"{where}: by its eviction rule it counts "
                + (
                    "in time. Give a datetime.timedelta."
                    if by_time
                    else "in steps. Give an integer."
                )
            )
        return KeyFilter(**found)

    def require_tables(self, known: Iterable[tuple[str, TableState]]) -> None:
        """Requires that each limit is for one of an export's tables.

        Args:
            known: the tables, each with its layer's name.

        Raises:
            ValueError: a limit is for another table, or there is no table with
                `DynamicKeys`.
        """
        tables = [
            (layer, state.spec.name)
            for layer, state in known
            if state.spec.keys is not None
        ]
        keyed = [f"{layer}/{table}" for layer, table in tables]
        names = {*keyed, *(table for _, table in tables)}
        for condition, limit in self._limits.items():
            if not isinstance(limit, Mapping):
                if not keyed:
                    raise ValueError(
                        f"{condition}={limit} is for tables with DynamicKeys, "
                        "and what is exported reads none."
                    )
                continue
            unknown = [name for name in limit if name not in names]
            if unknown:
                raise ValueError(
                    f"{condition}: what is exported reads no table "
                    f"'{unknown[0]}' with DynamicKeys; those that it reads are "
                    f"{keyed}."
                )


def _checked(limit: Any, name: str, least: int) -> Any:
    """Returns a limit, or limits by table, as int or timedelta."""
    if not isinstance(limit, Mapping):
        return _checked_limit(limit, f"export: {name}", name, least)
    return {
        text(table, f"export: a table's name in {name}"): _checked_limit(
            value, f"export: {name} of table '{table}'", name, least
        )
        for table, value in limit.items()
    }


def _checked_limit(value: Any, what: str, name: str, least: int) -> Any:
    if name != "max_age" or not isinstance(value, datetime.timedelta):
        return integer(value, what, least)
    if value < datetime.timedelta(0):
        raise ValueError(f"{what} must be at least 0, got {value!r}.")
    return value
