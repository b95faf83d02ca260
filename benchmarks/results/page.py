"""Writes the tables of docs/results.md, by the runs that runs.jsonl keeps."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import record
from rows import ROWS, Row

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results.md"
#: The sections of rows are those from the page's first to this one.
END = "## What is not compared\n"


def cell(values: Sequence[float], decimals: int = 4) -> str:
    """Returns a mean with its standard error; a dash of no values."""
    if not values:
        return "-"
    mean, error = record.mean_and_error(values)
    text = f"{mean:.{decimals}f}"
    return text if error is None else f"{text} ± {error:.{decimals}f}"


def table(row: Row, runs: Sequence[record.Run]) -> str:
    """Returns the table of a row, published figures first.

    Args:
        row: the row.
        runs: all runs; those of other rows are skipped.
    """
    runs = [run for run in runs if run.row == row.name]
    columns = list(row.metrics.values())
    lines = [
        f"| model | {' | '.join(columns)} | runs | seconds a run |",
        "|" + "---|" * (len(columns) + 3),
    ]
    rest = " |" * (len(columns) - 1)
    for other in row.published:
        lines.append(
            f"| {other.model} ([{other.source}]({other.address})) | "
            f"{other.figure} |{rest} | |"
        )
    for model in dict.fromkeys(run.model for run in runs):
        of_model = [run for run in runs if run.model == model]
        cells = [
            cell(
                [r.metrics[name] for r in of_model if name in r.metrics],
                1 if name.startswith("ms ") else 4,
            )
            for name in row.metrics
        ]
        # A run that only measures a step's time is no training.
        first = next(iter(row.metrics))
        trained = [run.seconds for run in of_model if first in run.metrics]
        seconds = f"{sum(trained) / len(trained):.0f}" if trained else "-"
        name = model if model.startswith("no model") else f"**ours: {model}**"
        lines.append(
            f"| {name} | {' | '.join(cells)} | {len(trained)} | {seconds} |"
        )
    return "\n".join(lines)


def section(row: Row, runs: Sequence[record.Run]) -> str:
    """Returns the section of a row."""
    command = f'`make results ARGS="{row.name}"`'
    return "\n\n".join(
        [
            f"## {row.title}",
            row.about,
            table(row, runs),
            f"{row.verdict} {command} repeats it.",
        ]
    )


def write(runs: Sequence[record.Run], page: pathlib.Path = PAGE) -> None:
    """Replaces the tables of the page.

    Raises:
        ValueError: a run belongs to no row, or the page has no place for
            tables.
    """
    names = {row.name for row in ROWS}
    unknown = sorted({run.row for run in runs} - names)
    if unknown:
        raise ValueError(f"runs.jsonl has runs of no row: {unknown}.")
    text = page.read_text("utf-8")
    before, heading, rest = text.partition("\n## ")
    if not heading or (heading + rest).count("\n" + END) != 1:
        raise ValueError(f"{page} doesn't have one place for tables.")
    after = END + text.split(END)[1]
    sections = [section(row, runs) for row in ROWS]
    text = "\n\n".join([before.rstrip("\n"), *sections, after])
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    write(record.read(record.RUNS.read_text("utf-8").splitlines()))
