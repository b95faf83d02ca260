"""The part of a page that checkpoints of one run have."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.conversion import reading
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.monitoring.reports import TOP
from tfrs_embed.tools.planner import html_parts
from tfrs_embed.tools.report import frequencies, pictures, values
from tfrs_embed.tools.report.hot_rows import hot_rows
from tfrs_embed.tools.report.measured import MeasuredTable, measure_tables
from tfrs_embed.tools.report.page import Part, Section

_NONE = (
    "has no tables of this package, of TensorFlow's TPU embeddings, of "
    "keras_rs, of Keras, or of SOK."
)


_COUNTED = (
    "Shares of the lookups of keys with rows that go to those looked up most, "
    "by the table's own counters."
)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A checkpoint.

    Attributes:
        contents: what it holds.
        tables: its tables, the largest first.
    """

    contents: Contents
    tables: list[MeasuredTable]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.contents.path.rstrip("/"))

    @property
    def step(self) -> int | None:
        """Updates that were made, of the layer with most; None: unknown."""
        return max(self.contents.steps.values(), default=None)

    def by_path(self) -> dict[str, MeasuredTable]:
        """Its tables by their paths."""
        return {each.table.path: each for each in self.tables}


def checkpoints(paths: Sequence[str]) -> Part:
    """Reads checkpoints of one run, and makes their part of a page.

    Args:
        paths: the checkpoints'; the oldest first, where they don't tell.

    Returns:
        The part: tables of the last one, and how they became so.

    Raises:
        ValueError: there is no such checkpoint, it has no tables, or two have
            no table in common.
        tf.errors.OpError: one is damaged.
    """
    read = [reading.read(path) for path in paths]
    read = list({each.path: each for each in read}.values())
    for each in read:
        if not each.tables:
            raise ValueError(f"'{each.path}' {_NONE}")
    for each in read[1:]:
        _check_one_run(read[0], each)
    run = [_Measured(each, measure_tables(each)) for each in read]
    steps = [each.step for each in run]
    if None not in steps:
        run.sort(key=lambda each: each.step or 0)
    last = run[-1]
    facts = values.facts(last.tables)
    if last.step is not None:
        facts = (("step", f"{last.step:,}"), *facts)
    if len(run) > 1:
        facts = (("checkpoints", f"{len(run):,}"), *facts)
    sections = [values.sizes(last.tables), values.norms(last.tables)]
    if len(run) > 1:
        sections.append(_growth(run))
    curves = frequencies.curves(last.contents)
    if curves:
        sections.append(Section("Hot rows", _hot_rows(curves), _COUNTED))
    rest = values.others(last.contents)
    if rest is not None:
        sections.append(rest)
    return Part(
        "Checkpoint",
        last.contents.path,
        (("written by", last.contents.format), *facts),
        tuple(sections),
        last.contents.notes,
    )


def _hot_rows(curves: Mapping[str, Mapping[float, float]]) -> str:
    lines = [
        (table, *(values.percent(share) for share in curve.values()))
        for table, curve in curves.items()
    ]
    head = ("table", *(f"top {values.percent(each)}" for each in TOP))
    return html_parts.pictures([hot_rows(curves)]) + html_parts.table(
        head, lines, ("table",)
    )


def _check_one_run(first: Contents, other: Contents) -> None:
    paths = {table.path for table in first.tables}
    if paths.isdisjoint(table.path for table in other.tables):
        raise ValueError(
            f"'{first.path}' and '{other.path}' have no table in common: "
            "several checkpoints must be of one run. Make a report of each."
        )


def _growth(run: Sequence[_Measured]) -> Section:
    known = [each.step for each in run]
    by_step = None not in known and len(set(known)) == len(known)
    x = [float(s or 0) for s in known] if by_step else _numbers(run)
    names = None if by_step else [each.name for each in run]

    def line(
        caption: str,
        value: _Value,
        text: pictures.Format,
        least: float | None = None,
    ) -> str:
        series = _series(run, value)
        if not any(v for found in series.values() for v in found):
            return ""  # Nothing is to be seen of zeros.
        return pictures.lines(
            caption,
            x,
            series,
            text,
            x_label="step" if by_step else "checkpoint",
            x_names=names,
            least=least,
        )

    drawn = [
        line("Memory of each table, with slots", _bytes, format_bytes, 0),
        line("Mean norm of a row", _mean_norm, lambda v: f"{v:.3g}"),
        line("Rows that are zero", _zero_share, values.percent),
        line("Rows that were never updated", _untouched, values.percent),
    ]
    head = (
        "checkpoint",
        "step",
        "tables",
        "rows",
        "size",
        "grown by",
        "zero rows",
        "never updated",
    )
    lines = []
    before: int | None = None
    for each in run:
        facts = dict(values.facts(each.tables))
        size = sum(table.bytes for table in each.tables)
        grown = "-"
        if before is not None:
            sign = "-" if size < before else "+" if size > before else ""
            grown = sign + format_bytes(abs(size - before))
        lines.append(
            (
                each.name,
                "-" if each.step is None else f"{each.step:,}",
                facts["tables"],
                facts["rows"],
                format_bytes(size),
                grown,
                facts["zero rows"],
                facts.get("never updated", "-"),
            )
        )
        before = size
    content = html_parts.pictures(drawn)
    content += html_parts.table(head, lines, ("checkpoint",))
    return Section("Growth over checkpoints", content)


_Value = Callable[[MeasuredTable], float | None]


def _series(
    run: Sequence[_Measured], value: _Value
) -> dict[str, list[float | None]]:
    """A value over the checkpoints, by the tables' names."""
    found = [each.by_path() for each in run]
    # Those of the last, the largest first, and those that it has no more.
    every = {
        path: table for each in reversed(found) for path, table in each.items()
    }
    order = dict.fromkeys([*found[-1], *every])
    tables = [every[path] for path in order]
    return {
        name: [value(each[path]) if path in each else None for each in found]
        for name, path in zip(values.names(tables), order, strict=True)
    }


def _numbers(run: Sequence[_Measured]) -> list[float]:
    return [float(i) for i in range(len(run))]


def _bytes(table: MeasuredTable) -> float:
    return float(table.bytes)


def _mean_norm(table: MeasuredTable) -> float:
    return table.statistics.mean_row_norm


def _zero_share(table: MeasuredTable) -> float:
    return table.statistics.zero_rows / max(1, table.rows)


def _untouched(table: MeasuredTable) -> float | None:
    if table.untouched is None:
        return None
    return table.untouched / max(1, table.rows)
