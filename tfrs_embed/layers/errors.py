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

    It prints whole ragged tensors: hundreds of thousands of characters around
    a message that says which feature has which bad id.
    """

    # Nor does AutoGraph have anything to convert in a layer of this library.
    @tf.autograph.experimental.do_not_convert
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # Keras's own mark of an error that it has seen before.
            error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise

    # Keras reads the signature, through TensorFlow's decorators only.
    return make_decorator(call, calling)


@contextlib.contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Begins errors that a layer's arguments cause with the layer's name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"Layer '{name}': {error}") from error
