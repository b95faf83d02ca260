"""The command `tfrs-embed checkpoint`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import progress
from tfrs_embed.compat.text_table import value_table
from tfrs_embed.tools.command_line import InputError, attempt, show
from tfrs_embed.tools.conversion import (
    chains,
    convert,
    paths,
    reading,
)
from tfrs_embed.tools.conversion.chains import ChainFile
from tfrs_embed.tools.conversion.contents import NO_TABLES, Column, Contents
from tfrs_embed.tools.conversion.statistics import Statistics, measure


def run(args: argparse.Namespace) -> int:
    """Does the work of `args.action`; returns the process's exit status."""
    work = {"inspect": _inspect, "convert": _convert, "compact": _compact}
    return attempt(lambda: work[args.action](args), InputError)


def _inspect(args: argparse.Namespace) -> None:
    contents = reading.read(args.source)
    found = chains.find_chains(paths.resolve(args.source, "source"))
    with _task("Reading", contents) as task:
        described = _described(contents, task)
    described["chains"] = [[*map(dataclasses.asdict, files)] for files in found]
    if args.json:
        print(json.dumps(described, indent=2))
    else:
        show(*_as_text(described))
        for files in found:
            show(*_chain_as_text(files))


def _described(contents: Contents, task: progress.Task) -> dict[str, Any]:
    """Reads all values, and returns what `--json` prints."""

    def shape_of(column: Column) -> dict[str, Any]:
        return {
            "shape": column.shape,
            "dtype": column.dtype.name,
            "bytes": column.nbytes,
        }

    tables = []
    for table in contents.tables:
        columns = {
            name: {
                **shape_of(column),
                **dataclasses.asdict(measure(column, task.advance)),
            }
            for name, column in table.columns.items()
        }
        # Keys and counters have no statistics: reading finds damaged files.
        for column in table.parts.values():
            for _ in column.blocks(task.advance):
                pass
        tables.append(
            {
                "path": table.path,
                "layer": table.layer,
                "name": table.name,
                "rows": table.shape[0],
                "dim": table.shape[1],
                "keys": table.keys is not None,
                "learning_rate": table.learning_rate,
                "parts": {n: shape_of(c) for n, c in table.parts.items()},
                "columns": columns,
            }
        )
    return {
        "path": contents.path,
        "format": contents.format,
        "tables": tables,
        "steps": contents.steps,
        "others": [dataclasses.asdict(other) for other in contents.others],
        "notes": contents.notes,
    }


def _as_text(described: Mapping[str, Any]) -> list[str]:
    lines = [f"{described['path']}: {described['format']}"]
    statistics = [field.name for field in dataclasses.fields(Statistics)]
    columns = [
        {
            "table": table["path"],
            "values": name,
            **column,
            # Keys and counters have none.
            **{key: column.get(key) for key in statistics},
        }
        for table in described["tables"]
        for name, column in {**table["columns"], **table["parts"]}.items()
    ]
    for each in (columns, described["others"]):
        if each:
            lines += ["", *value_table([_cells(row) for row in each])]
    for layer, step in described["steps"].items():
        lines.append(f"Step of '{layer}': {step}")
    for table in described["tables"]:
        if table["learning_rate"] is not None:
            rate = f"{table['learning_rate']:.6g}"
            lines.append(f"Learning rate of '{table['path']}': {rate}")
    return [*lines, *(f"Note: {note}" for note in described["notes"])]


def _chain_as_text(files: Sequence[ChainFile]) -> list[str]:
    """The files of a chain, and each delta's changes by table."""
    names = {file.path: os.path.basename(file.path) for file in files}
    lines = [
        {
            "file": names[file.path],
            "number": file.number,
            "kind": file.kind,
            "bytes": file.bytes,
            "changed rows": sum(file.rows.values()) if file.number else None,
            "removed keys": sum(file.removed.values()) if file.number else None,
        }
        for file in files
    ]
    text = ["", f"Chain of '{files[-1].path}':", *value_table(lines)]
    for what in ("rows", "removed"):
        deltas = {f.number: getattr(f, what) for f in files if f.number}
        if any(any(each.values()) for each in deltas.values()):
            # "-": the delta has the whole table, or no keys.
            counts = [
                {
                    what: table,
                    **{f"delta {n}": deltas[n].get(table) for n in deltas},
                }
                for table in sorted(set().union(*deltas.values()))
            ]
            text += ["", *value_table(counts)]
    return text


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {**row, "shape": str(list(row["shape"]))}
    return {
        name: f"{cell:.6g}" if isinstance(cell, float) else cell
        for name, cell in cells.items()
    }


def _convert(args: argparse.Namespace) -> None:
    destination = paths.resolve(args.destination, "destination")
    paths.check_new_checkpoint(destination)
    contents = reading.read(args.source)
    if not contents.tables:
        raise InputError(f"'{contents.path}' {NO_TABLES}")
    tables = dict(_pair(text, "--table") for text in args.table)
    convert.rename_tables(contents, tables, args.ids)
    convert.rename_layers(contents, _layers(args.layer, contents))
    convert.fit(contents)
    convert.set_steps(contents, args.step)
    # The bar of saving would be a second one.
    with _task("Converting", contents) as task, progress.off():
        left = convert.write_checkpoint(contents, destination, task.advance)
    _report(contents, destination, left)


def _compact(args: argparse.Namespace) -> None:
    destination = paths.resolve(args.destination, "destination")
    paths.check_new_checkpoint(destination)
    source = reading.prefix_of(paths.resolve(args.source, "source"))
    reader = chains.reader_to_compact(source)
    total = sum(map(reader.nbytes, reader.shapes))
    name = os.path.basename(source)
    with progress.Task("Merging", f"'{name}'", total) as task:
        chains.compact(reader, destination, task.advance)
    files = ", ".join(os.path.basename(file.prefix) for file in reader.files)
    show(f"{files}: written to '{destination}'.")


def _task(verb: str, contents: Contents) -> progress.Task:
    """The task of reading all values."""
    total = sum(
        column.nbytes
        for table in contents.tables
        for column in table.all_columns.values()
    )
    name = os.path.basename(contents.path.rstrip("/"))
    return progress.Task(verb, f"'{name}'", total)


def _layers(given: Sequence[str], contents: Contents) -> dict[str, str]:
    """The new paths of layers by their old ones."""
    if len(given) == 1 and "=" not in given[0]:
        tables = contents.tables
        ours = [table for table in tables if not table.of_keras]
        layers = {table.layer for table in ours or tables}
        if len(layers) > 1:
            raise InputError(
                f"--layer {given[0]}: there are the layers {sorted(layers)}. "
                "Say which one: --layer OLD=NEW, once for each."
            )
        return {layers.pop(): given[0]}
    return dict(_pair(text, "--layer") for text in given)


def _pair(text: str, option: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise InputError(f"{option} must be OLD=NEW, got '{text}'.")
    return old, new


def _report(contents: Contents, path: str, left: Sequence[str]) -> None:
    """Prints what was written, and on stderr what was not."""
    for table in contents.tables:
        columns = [
            name
            if c.dtype in (tf.float32, tf.int64)
            else f"{name} ({c.dtype.name})"
            for name, c in table.all_columns.items()
        ]
        show(f"{table.path}: {list(table.shape)}, {', '.join(columns)}")
    for layer, step in contents.steps.items():
        show(f"step of '{layer}': {step}")
    show(f"Written to '{path}'.")
    for note in contents.notes:
        show(f"note: {note}", file=sys.stderr)
    for what in [*left, *(f"'{other.name}'" for other in contents.others)]:
        show(f"not taken over: {what}", file=sys.stderr)
