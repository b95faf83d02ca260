"""The error that a check raises, and the texts of processes that ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence


class CheckError(Exception):
    """TensorFlow refuses a program, or the check can't be made.

    Example:
        >>> try:
        ...     tfrs_embed.tpu_check.check(lambda strategy: None, "v5p-8")
        ... except tfrs_embed.tpu_check.CheckError as error:
        ...     print(error)
        the code called no tf.function with strategy.run in it: ...

    Args:
        message: the reason.
        operations: the kinds of operations that the error is about, if any.
    """

    def __init__(self, message: str, operations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.operations = tuple(operations)


def ending(code: int, log: str) -> str:
    """How a process ended, and the end of its log: "SIGSEGV: ..."."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    log = log[-2000:].strip()
    return f"{how}: {log}" if log else how
