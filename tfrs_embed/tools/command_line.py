"""The common part of `tfrs-embed`'s commands: errors and exit statuses."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import tensorflow as tf

from tfrs_embed.compat.text_table import printable

#: The exit status of a command that did its work.
FINE = 0
#: The work failed, or a check found something.
FAILED = 1
#: The command line or an input is wrong.
WRONG = 2


class InputError(ValueError):
    """A command's input is wrong; the text says where, and how."""


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
