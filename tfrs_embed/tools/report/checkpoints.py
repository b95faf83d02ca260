"""The part of a page about checkpoints of one run, or an exported model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.conversion import exported, reading
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.report import hot_rows, page, pictures, values
from tfrs_embed.tools.report.measured import MeasuredTable, measure_tables

_NO_TABLES = (
    "has no tables of this package, of TensorFlow's TPU embeddings, of "
    "keras_rs, of Keras, or of SOK."
)


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint's contents and its measured tables, the largest first."""

    contents: Contents
    tables: list[MeasuredTable]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.contents.path.rstrip("/"))

    @property
    def step(self) -> int | None:
        """The number of updates of the layer with most; None: unknown."""
        return max(self.contents.steps.values(), default=None)


def checkpoints(paths: Sequence[str]) -> page.Part:
    """Reads checkpoints of one run, or an exported model.

    Args:
        paths: the checkpoints' paths, the oldest first if they hold no step;
            or one SavedModel.

    Returns:
        The last checkpoint's tables, and their growth over the checkpoints.

    Raises:
        ValueError: there is no such checkpoint, it has no tables, or two have
            no table in common.
        tf.errors.OpError: one is damaged.
    """
    read = [reading.read(path) for path in paths]
    read = list({each.path: each for each in read}.values())
    for each in read:
        if not each.tables:
            raise ValueError(f"'{each.path}' {_NO_TABLES}")
        first, other = ({t.path for t in c.tables} for c in (read[0], each))
        if first.isdisjoint(other):
            raise ValueError(
                f"'{read[0].path}' and '{each.path}' have no table in common: "
                "several checkpoints must be of one run. Make a report of each."
            )
    run = [_Checkpoint(each, measure_tables(each)) for each in read]
    if all(each.step is not None for each in run):
        run.sort(key=lambda each: each.step or 0)
    last = run[-1]
    facts = {"written by": last.contents.format}
    if len(run) > 1:
        facts["checkpoints"] = f"{len(run):,}"
    if last.step is not None:
        facts["step"] = f"{last.step:,}"
    facts |= values.facts(last.tables)
    tables = values.by_name(last.tables)
    sections = (
        values.sizes(tables),
        values.norms(tables),
        _growth(run) if len(run) > 1 else None,
        hot_rows.counted_keys(last.contents),
        values.others(last.contents),
    )
    return page.Part(
        _kind(last.contents),
        last.contents.path,
        tuple(facts.items()),
        tuple(each for each in sections if each is not None),
        tuple(last.contents.notes),
    )


def _kind(contents: Contents) -> str:
    if contents.format == exported.FORMAT:
        return "Exported model"
    if exported.is_saved_model(contents.path):
        return "SavedModel"
    return "Checkpoint"


def _growth(run: Sequence[_Checkpoint]) -> page.Section:
    steps = [each.step for each in run]
    by_step = None not in steps and len(set(steps)) == len(steps)
    x = [step or 0 for step in steps] if by_step else list(range(len(run)))
    # The last checkpoint's tables, then those that it no longer has.
    found = [{t.table.path: t for t in each.tables} for each in run]
    every = {path: t for each in reversed(found) for path, t in each.items()}

    def line(
        caption: str,
        value: Callable[[MeasuredTable], float | None],
        text: pictures.Format,
        least: float | None = None,
    ) -> str:
        series = {
            name: {
                x[i]: value(tables[table.table.path])
                for i, tables in enumerate(found)
                if table.table.path in tables
            }
            for name, table in values.by_name(list(every.values())).items()
        }
        if not any(v for points in series.values() for v in points.values()):
            return ""  # All values are zero.
        return pictures.lines(
            caption,
            series,
            text,
            x_label="step" if by_step else "checkpoint",
            x_text=None if by_step else lambda place: run[int(place)].name,
            least=least,
        )

    drawn = [
        line(
            "Memory of each table, with slots",
            lambda t: t.bytes,
            format_bytes,
            0,
        ),
        line(
            "Mean norm of a row",
            lambda t: t.statistics.mean_row_norm,
            lambda v: f"{v:.3g}",
        ),
        line("Rows that are zero", lambda t: t.zero_share, page.percent),
        line(
            "Rows that were never updated",
            lambda t: t.untouched_share,
            page.percent,
        ),
    ]
    sizes = [sum(table.bytes for table in each.tables) for each in run]
    rows = []
    for each, before, size in zip(run, [None, *sizes], sizes, strict=False):
        facts = values.facts(each.tables)
        rows.append(
            {
                "checkpoint": each.name,
                "step": "-" if each.step is None else f"{each.step:,}",
                "tables": facts["tables"],
                "rows": facts["rows"],
                "size": format_bytes(size),
                "grown by": "-" if before is None else _grown(size - before),
                "zero rows": facts["zero rows"],
                "never updated": facts.get("never updated", "-"),
            }
        )
    return page.section("Growth over checkpoints", drawn, rows)


def _grown(size: int) -> str:
    sign = "-" if size < 0 else "+" if size > 0 else ""
    return sign + format_bytes(abs(size))
