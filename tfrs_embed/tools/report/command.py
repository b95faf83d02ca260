"""The command `tfrs-embed report`."""

from __future__ import annotations

import argparse
import pathlib

from tfrs_embed.tools.command_line import attempt, describe, show
from tfrs_embed.tools.report.writing import write


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    describe(
        parser,
        "Makes one page of HTML with the tables' sizes, norms, dead and hot "
        "rows, and their growth over checkpoints. docs/reports.md shows one.",
        "tfrs-embed report checkpoints/ logs/ --output report.html",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, a folder of some, or several of one run; an "
        "exported model; or a folder of tfrs_embed.monitoring",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        metavar="REPORT.html",
        help="where to write the page [report.html]",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The process's exit status: 2 if the input is wrong, 1 if it is damaged
        or the page can't be made.
    """

    def work() -> None:
        write(args.paths, args.output)
        show(f"Written to '{args.output}'.")

    return attempt(work, FileNotFoundError, ValueError)
