"""One JSON line a run: what the programs print and runs.jsonl keeps."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Iterable, Sequence

RUNS = pathlib.Path(__file__).resolve().parent / "runs.jsonl"


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training gave.

    Attributes:
        row: the name of a row of the page.
        model: the model's name on the page.
        run: what is different from the row's other runs: a seed or a fold.
        seconds: training and test together.
        metrics: the results by name.
    """

    row: str
    model: str
    run: str
    seconds: float
    metrics: dict[str, float]


class Timer:
    """Prints runs, with the seconds since the previous run's end."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def report(self, row: str, model: str, run: str, **metrics: float) -> None:
        """Prints a run as a JSON line."""
        now = time.monotonic()
        seconds, self._start = round(now - self._start, 1), now
        rounded = {name: round(float(v), 5) for name, v in metrics.items()}
        print(to_line(Run(row, model, run, seconds, rounded)), flush=True)


def to_line(run: Run) -> str:
    """Returns a run as a JSON line."""
    return json.dumps(dataclasses.asdict(run))


def read(lines: Iterable[str]) -> list[Run]:
    """Returns the runs among lines; lines that are no JSON object are skipped.

    Raises:
        ValueError: a JSON object is no run, or a metric is not finite.
    """
    runs = []
    for line in lines:
        if not line.startswith("{"):
            continue
        try:
            run = Run(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"{line.strip()}: {error}") from None
        if not all(map(math.isfinite, run.metrics.values())):
            raise ValueError(f"{line.strip()}: a metric is not finite.")
        runs.append(run)
    return runs


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and its standard error; None of a single value."""
    if len(values) == 1:
        return values[0], None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), error
