"""What commands of `tfrs-embed` have in common: help, errors, exit statuses."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

#: All is well.
FINE = 0
#: The work failed, or a check found something.
FAILED = 1
#: The command line or an input is wrong.
WRONG = 2
#: A shell's exit status of a command that SIGINT ended.
INTERRUPTED = 130

EXIT_STATUS = """\
exit status: 0: all is well. 1: the work failed, or a check found something.
2: the command line or an input is wrong.
"""
_WIDTH = 78


class InputError(ValueError):
    """What a command was given is wrong; the text says where, and how."""


def add_command(
    commands: Any,
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
        commands: what `add_subparsers` returned.
        name: the command's name.
        summary: what it is for, in a few words.
        description: what it does, one paragraph.
        example: a command line, or several.

    Returns:
        The command's parser.
    """
    lines = textwrap.indent(textwrap.dedent(example).strip(), "  ")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=f"example:\n{lines}\n\n{EXIT_STATUS}".replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def fail(error: object, status: int = FAILED) -> int:
    """Says in one line on stderr why a command ends, and returns the status.

    A BrokenPipeError is raised again: there is no more to say.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
