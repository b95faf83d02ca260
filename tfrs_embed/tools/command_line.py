"""The common part of `tfrs-embed`'s commands: help, errors, exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar

import tensorflow as tf

from tfrs_embed.compat.text_table import printable

T = TypeVar("T")

#: The exit status of a command that did its work.
FINE = 0
#: The work failed, or a check found something.
FAILED = 1
#: The command line or an input is wrong.
WRONG = 2

EXIT_STATUS = """\
exit status: 0: all is well. 1: the work failed, or a check found something.
2: the command line or an input is wrong.
"""
_WIDTH = 78


class InputError(ValueError):
    """A command's input is wrong; the text says where, and how."""


def add_command(
    commands: Any,
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """Adds a command, and returns its parser.

    Args:
        commands: the result of `add_subparsers`.
        name: the command's name.
        summary: its purpose in a few words.
        description: its work, in one paragraph.
        example: a command line, or several.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary)
    describe(parser, description, example)
    return parser


def describe(
    parser: argparse.ArgumentParser, description: str, example: str
) -> None:
    """Sets the texts of a command's help.

    Args:
        parser: the command's parser.
        description: its work, in one paragraph.
        example: a command line, or several.
    """
    lines = textwrap.indent(textwrap.dedent(example).strip(), "  ")
    parser.description = textwrap.fill(description, _WIDTH)
    parser.epilog = f"example:\n{lines}\n\n{EXIT_STATUS}".replace("%", "%%")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Returns an argument's `type`: `parse`, with its ValueErrors shown.

    argparse doesn't show the text of a ValueError.
    """

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def integer(least: int) -> Callable[[str], int]:
    """Returns an argument's `type`: an int64 of at least `least`."""

    def parse(text: str) -> int:
        valid = text.isascii() and text.isdigit()
        if not valid or not least <= int(text) <= tf.int64.max:
            raise ValueError(
                f"must be an integer from {least} to {tf.int64.max}, got "
                f"{text!r}"
            )
        return int(text)

    return checked(parse)


def show(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines as `printable` text; None: on stdout."""
    for line in lines:
        print(printable(line), file=file)


def attempt(work: Callable[[], None], *wrong: type[Exception]) -> int:
    """Does the work of a command that reads files.

    Returns the exit status, after it has printed an error in one line: WRONG if
    the error is of a type in `wrong`, which says that the input is wrong.
    """
    try:
        with _escaped_logs():
            work()
    except wrong as error:
        return fail(error, WRONG)
    except tf.errors.OpError as error:
        return fail(error.message)
    except (OSError, ValueError) as error:
        return fail(error)
    except MemoryError as error:
        return fail(f"not enough memory: {error}")
    return FINE


@contextlib.contextmanager
def _escaped_logs() -> Iterator[None]:
    """Makes TensorFlow's log `printable` inside: it quotes what is in files."""

    def escape(record: logging.LogRecord) -> bool:
        lines = record.getMessage().split("\n")
        record.msg, record.args = "\n".join(map(printable, lines)), ()
        return True

    logger = tf.get_logger()
    logger.addFilter(escape)
    try:
        yield
    finally:
        logger.removeFilter(escape)


def fail(error: object, status: int = FAILED) -> int:
    """Prints an error in one line on stderr, and returns the exit status.

    A BrokenPipeError is raised again: nobody reads on.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    show(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
