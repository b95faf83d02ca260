"""The error that a check raises, and the texts of processes that ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_FATAL = re.compile(r"^(?:F\d{4} |[\d-]+ [\d:.]+: F ).*", re.MULTILINE)


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
    """How a process ended, and why: "SIGABRT: ... Check failed: ..."."""
    if code >= 0:
        how, why = f"exit code {code}", log[-2000:].strip()
    else:
        # Stacks of C++ surround the only line that says something.
        fatal = _FATAL.search(log)
        how, why = signal.Signals(-code).name, fatal[0] if fatal else ""
    return f"{how}: {why}" if why else how
