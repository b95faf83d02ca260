"""The command line: `tfrs-embed plan`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from tfrs_embed.configs.hardware import hardware, parse_bytes
from tfrs_embed.tools.command_line import (
    FAILED,
    FINE,
    WRONG,
    checked,
    describe,
    fail,
    integer,
)
from tfrs_embed.tools.planner import model_file
from tfrs_embed.tools.planner.planning import TablesDontFit, plan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    describe(
        parser,
        "Reads the tables and features of a model from a file of JSON, and "
        "prints where the tables should go on a number of replicas, why, and "
        "what a training step is predicted to cost. Nothing is built. "
        "docs/planning.md has the file's format, and the model. The exit "
        "status is 1 if the tables don't fit.",
        "tfrs-embed plan config.json --replicas 16 --topology 8xA100",
    )
    parser.add_argument("config", metavar="CONFIG.json", help="the model")
    parser.add_argument(
        "--replicas",
        type=integer(1),
        metavar="NUMBER",
        help="the number of replicas [those of one host]",
    )
    parser.add_argument(
        "--topology",
        type=checked(hardware),
        default="8xA100",
        metavar="HOST",
        help="accelerators of a host, such as 8xA100 or 4xH100, or cpu "
        "[8xA100]",
    )
    parser.add_argument(
        "--memory",
        type=checked(parse_bytes),
        metavar="SIZE",
        help="memory of a replica for tables and their slots, such as 40GB or "
        "1.5GiB [all that the hardware has]",
    )
    parser.add_argument(
        "--disk-iops",
        type=integer(1),
        metavar="NUMBER",
        help="random reads and writes of 4 KiB of a host's disk in a second, "
        "for tables in files [50,000]",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="PLAN.json",
        help="where to write the plan; tfrs-embed report makes a page of it",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the plan as JSON, as --output writes it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, 1 if the tables don't fit."""
    try:
        model = model_file.read(args.config)
        topology = args.topology
        if args.disk_iops is not None:
            topology = dataclasses.replace(topology, disk_iops=args.disk_iops)
        made = plan(
            model.feature_config(),
            {f.name: f.hotness for f in model.features},
            replicas=args.replicas,
            memory_per_replica=args.memory,
            topology=topology,
            optimizer=model.optimizer,
            batch_size=model.batch_size,
            zipf_exponent=model.zipf_exponent,
            communication_dtype=model.communication_dtype,
        )
    except TablesDontFit as error:
        return fail(error, FAILED)
    except (OSError, TypeError, ValueError) as error:
        return fail(error, WRONG)
    try:
        if args.output is not None:
            args.output.write_text(made.to_json() + "\n", "utf-8")
    except OSError as error:
        return fail(error, FAILED)
    print(made.to_json() if args.json else made)
    return FINE
