"""The command line: `python -m tfrs_embed report`."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import tensorflow as tf

from tfrs_embed.report.writing import write

#: The statuses of a failure, and of wrong input, as argparse has it.
_FAILED, _WRONG = 1, 2


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands.

    Args:
        commands: what `add_subparsers` returned.
    """
    parser = commands.add_parser(
        "report",
        help="make a page of pictures of checkpoints, plans, limits or logs",
        description="Makes one page of HTML with the tables' sizes, norms, "
        "dead and hot rows, their places on replicas, and their growth over "
        "checkpoints. docs/reports.md shows one.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, a folder of some, or several of one run; an "
        "exported model; the JSON of a plan or of a limits report; or a "
        "folder of tfrs_embed.monitoring",
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

    Args:
        args: the arguments.

    Returns:
        The process's exit status: 2 if the input is wrong, 1 if it is damaged
        or the page can't be made.
    """
    try:
        write(args.paths, args.output)
    except (FileNotFoundError, ValueError) as error:
        return _fail(str(error), _WRONG)
    except tf.errors.OpError as error:
        return _fail(error.message, _FAILED)
    except (ImportError, OSError) as error:
        return _fail(str(error), _FAILED)
    except MemoryError as error:
        return _fail(f"not enough memory: {error}", _FAILED)
    print(f"Written to '{args.output}'.")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status
