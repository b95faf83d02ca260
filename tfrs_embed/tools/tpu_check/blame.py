"""Names the layer's call and the user's line that an error is about."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tfrs_embed.compat.graphs import operations
from tfrs_embed.compat.private_tensorflow import tf_stack
from tfrs_embed.layers.all2all_dense_embedding import All2AllDenseEmbedding
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.layers.table_layer import TableLayer
from tfrs_embed.sparsecore.mid_level.on_tpu import TPUEmbeddingV2OnTPU
from tfrs_embed.tools.tpu_check.recording import Recorded

#: The number of lines that are named.
_MOST = 5
_OWN = str(pathlib.Path(__file__).parents[2]) + os.sep

#: The methods that users call or that update tables, and their names in errors.
_METHODS: tuple[tuple[type, str, str], ...] = (
    (TableLayer, "call", "call"),
    (All2AllDenseEmbedding, "call", "call"),
    (Embedding, "call", "call"),
    (EngineLayer, "_differentiate", "the update, in the gradient, of"),
    (TPUEmbeddingV2OnTPU, "enqueue", "enqueue"),
    (TPUEmbeddingV2OnTPU, "dequeue", "dequeue"),
    (TPUEmbeddingV2OnTPU, "apply_gradients", "apply_gradients"),
)


@contextlib.contextmanager
def blaming() -> Iterator[list[str]]:
    """Yields a list that gets the text of the first error in a layer's call.

    The text has the layer's name and the user's line, and is shorter than after
    Keras and AutoGraph have added theirs.
    """
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for cls, name, what in _METHODS:
            for owner in _family(cls):
                if name in vars(owner):
                    watched = _watched(getattr(owner, name), what, found)
                    stack.enter_context(mock.patch.object(owner, name, watched))
        yield found


def _family(cls: Any) -> Iterator[Any]:
    yield cls
    for each in cls.__subclasses__():
        yield from _family(each)


def _watched(
    method: Callable[..., Any], what: str, found: list[str]
) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if not found:
                kind = type(self).__name__
                name = getattr(self, "name", None)
                layer = f"{kind} '{name}'" if name else kind
                place = _user_line(tf_stack.extract_stack())
                at = f" (at {place})" if place else ""
                found.append(f"{what} {layer}{at}: {error}")
            raise

    return watched


def locate(recorded: Recorded, kinds: Collection[str]) -> list[str]:
    """Names a function's operations of some kinds, and the user's lines."""
    places = []
    for op in operations(recorded.function.graph):
        on_host = "_xla_outside_compilation" in op.node_def.attr
        if op.type not in kinds or on_host:
            continue
        place = _user_line(op.traceback)
        line = f"{op.type} '{op.name}'" + (f", {place}" if place else "")
        if line not in places:
            places.append(line)
    more = len(places) - _MOST
    if more > 0:
        places[_MOST:] = [f"and {more} more"]
    return places


def _user_line(frames: Iterable[Any] | None) -> str | None:
    """The innermost line outside of libraries, as "file:number"."""
    found = None
    for frame in frames or ():
        if not _is_library(frame.filename):
            found = f"{frame.filename}:{frame.lineno}"
    return found


def _is_library(filename: str) -> bool:
    parts = pathlib.PurePath(filename).parts
    return (
        filename.startswith((_OWN, "<"))
        or "site-packages" in parts
        or any(part.startswith("python3.") for part in parts)
    )
