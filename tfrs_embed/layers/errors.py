"""Errors that stay readable on their way through Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def plain(call: F) -> F:
    """Keeps Keras from adding all inputs to the errors of a layer's `call`.

    It prints whole ragged tensors: hundreds of thousands of characters around
    a message that says which feature has which bad id.

    Args:
        call: the layer's method.

    Returns:
        The method, whose errors Keras passes on as they are.
    """

    @functools.wraps(call)
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # Keras's own mark of an error that it has seen before.
            error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise

    return calling  # type: ignore[return-value]
