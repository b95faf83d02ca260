"""Errors that stay readable on their way through Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import make_decorator

F = TypeVar("F", bound=Callable[..., Any])


def without_input_dump(call: F) -> F:
    """Keeps Keras from adding all inputs to the errors of a layer's method.

    Keras prints whole ragged tensors: hundreds of thousands of characters
    around a message that says which feature has which bad id.
    """

    # AutoGraph needs to convert nothing in layers of this library.
    @tf.autograph.experimental.do_not_convert
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # Keras marks errors that it has handled already.
            error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise

    # Keras reads the signature, and unwraps only TensorFlow's decorators.
    return make_decorator(call, calling)


@contextlib.contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Prefixes errors of a layer's arguments with the layer's name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"Layer '{name}': {error}") from error
