"""The command line: `python -m tfrs_embed plan`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

from tfrs_embed import strict_json
from tfrs_embed.configs import FeatureConfig, TableConfig
from tfrs_embed.planner.hardware import hardware, parse_bytes
from tfrs_embed.planner.html_report import html_report
from tfrs_embed.planner.planning import ZIPF_EXPONENT, plan
from tfrs_embed.planner.plans import Plan
from tfrs_embed.types import CommunicationDtype


@dataclasses.dataclass(frozen=True)
class _Table:
    """An entry of "tables"."""

    name: str
    rows: int
    dim: int
    optimizer: str | None = None

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> TableConfig:
        return TableConfig(
            self.name,
            self.rows,
            self.dim,
            optimizer=self.optimizer,  # type: ignore[arg-type]
        )


@dataclasses.dataclass(frozen=True)
class _Feature:
    """An entry of "features"."""

    name: str
    table: str
    hotness: float

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a feature's name must not be empty.")
        if self.hotness <= 0:
            raise ValueError(
                f"Feature '{self.name}': hotness must be above 0, got "
                f"{self.hotness:g}."
            )


@dataclasses.dataclass(frozen=True)
class _Config:
    """The file."""

    tables: tuple[_Table, ...]
    features: tuple[_Feature, ...]
    batch_size: int
    optimizer: str | None = None
    zipf_exponent: float = ZIPF_EXPONENT
    communication_dtype: CommunicationDtype = "float32"

    def __post_init__(self) -> None:
        tables: dict[str, int] = {}
        for i, table in enumerate(self.tables):
            first = tables.setdefault(table.name, i)
            if first != i:
                raise ValueError(
                    f"tables[{first}] and tables[{i}] are both named "
                    f"'{table.name}'."
                )
        features: dict[str, int] = {}
        for i, feature in enumerate(self.features):
            first = features.setdefault(feature.name, i)
            if first != i:
                raise ValueError(
                    f"features[{first}] and features[{i}] are both named "
                    f"'{feature.name}'."
                )
            if feature.table not in tables:
                raise ValueError(
                    f"features[{i}] ('{feature.name}'): there is no table "
                    f"'{feature.table}'; the tables are {list(tables)}."
                )
        used = {feature.table for feature in self.features}
        for i, table in enumerate(self.tables):
            if table.name not in used:
                raise ValueError(
                    f"tables[{i}] ('{table.name}') has no feature."
                )
        if not self.tables:
            raise ValueError("there are no tables.")


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands.

    Args:
        commands: what `add_subparsers` returned.
    """
    parser = commands.add_parser(
        "plan",
        help="plan where tables go, and what a step will cost",
        description="Reads the tables and features of a model from a file of "
        "JSON, and prints where the tables should go on a number of replicas, "
        "why, and what a training step is predicted to cost. Nothing is built. "
        "docs/planning.md has the file's format, and the model.",
    )
    parser.add_argument("config", metavar="CONFIG.json", help="the model")
    parser.add_argument(
        "--replicas",
        type=_replicas,
        metavar="NUMBER",
        help="the number of replicas [those of one host]",
    )
    parser.add_argument(
        "--topology",
        type=_topology,
        default="8xA100",
        metavar="HOST",
        help="accelerators of a host, such as 8xA100 or 4xH100, or cpu "
        "[8xA100]",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help="memory of a replica for tables and their slots, such as 40GB or "
        "1.5GiB [all that the hardware has]",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="PLAN.json",
        help="where to write the plan",
    )
    parser.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="REPORT.html",
        help="where to write the report as a page with pictures",
    )
    parser.set_defaults(run=run)


def _replicas(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be an integer >= 1, got {text!r}"
        )
    return int(text)


def _topology(text: str) -> str:
    try:
        hardware(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: the arguments.

    Returns:
        The process's exit status: 1 if there is no plan.
    """
    try:
        made = _plan(args)
        if args.output is not None:
            args.output.write_text(made.to_json() + "\n", "utf-8")
        if args.html is not None:
            args.html.write_text(html_report(made), "utf-8")
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(made)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    path = pathlib.Path(args.config)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not a file of text: {error}.") from None
    config = strict_json.loads(text, _Config, "config")
    tables = {table.name: table.config() for table in config.tables}
    return plan(
        {
            f.name: FeatureConfig(f.name, tables[f.table])
            for f in config.features
        },
        {f.name: f.hotness for f in config.features},
        replicas=args.replicas,
        memory_per_replica=args.memory,
        topology=args.topology,
        optimizer=config.optimizer,
        batch_size=config.batch_size,
        zipf_exponent=config.zipf_exponent,
        communication_dtype=config.communication_dtype,
    )
