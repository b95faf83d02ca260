"""The command `tfrs-embed report`."""

from __future__ import annotations

import argparse

from tfrs_embed.tools.command_line import attempt, show
from tfrs_embed.tools.report.writing import write


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
