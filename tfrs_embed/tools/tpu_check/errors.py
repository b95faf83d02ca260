"""The error that a check raises."""

from __future__ import annotations

from collections.abc import Sequence


class CheckError(Exception):
    """TensorFlow or the TPU's compiler refuses a program.

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
