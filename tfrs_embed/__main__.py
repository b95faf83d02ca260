"""The command line: `python -m tfrs_embed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tfrs_embed.planner import command as plan
from tfrs_embed.report import command as report
from tfrs_embed.tpu_check import command as tpu_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: those of the command line; None: the process's.

    Returns:
        The process's exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tfrs_embed",
        description="Tools for models with embedding tables. Checkpoints have "
        "theirs in python -m tfrs_embed.checkpoint.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_parser(commands)
    report.add_parser(commands)
    tpu_check.add_parser(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The rest are the checked script's own arguments.
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    args.arguments = given[end + 1 :]
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
