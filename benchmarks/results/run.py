"""Computes our figures beside published ones, and writes docs/results.md.

    python benchmarks/results/run.py [ROW ...]

Without names all rows are computed, one after the other. runs.jsonl keeps the
runs; those of a row are replaced when its program has ended well.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import time

import page
import record
from rows import ROWS, Row

HERE = pathlib.Path(__file__).resolve().parent


def compute(row: Row) -> list[record.Run]:
    """Runs a row's program.

    Raises:
        subprocess.CalledProcessError: it failed.
        ValueError: it printed runs of another row, or none.
    """
    program, *arguments = row.program
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    )
    runs = record.read(done.stdout.splitlines())
    if {run.row for run in runs} != {row.name}:
        raise ValueError(f"{program} printed runs of {[r.row for r in runs]}.")
    return runs


def replaced(
    kept: list[record.Run], name: str, new: list[record.Run]
) -> list[record.Run]:
    """Returns the runs with those of a row replaced, in the order of ROWS."""
    runs = [run for run in kept if run.row != name] + new
    order = [row.name for row in ROWS]
    return sorted(runs, key=lambda run: order.index(run.row))


def main() -> None:
    """Computes the rows that the command line names."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(names))
    chosen = parser.parse_args().rows or names
    unknown = sorted({*chosen} - {*names})
    if unknown:
        sys.exit(f"no row: {', '.join(unknown)}; rows: {', '.join(names)}")
    runs = record.read(record.RUNS.read_text("utf-8").splitlines())
    for row in ROWS:
        if row.name not in chosen:
            continue
        print(f"{row.name}: {row.title}", flush=True)
        start = time.monotonic()
        runs = replaced(runs, row.name, compute(row))
        lines = [record.to_line(run) + "\n" for run in runs]
        record.RUNS.write_text("".join(lines), "utf-8")
        page.write(runs)
        print(page.table(row, runs))
        print(f"in {time.monotonic() - start:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
