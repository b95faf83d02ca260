"""The places in a user's code that an error comes from."""

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

#: At most as many places are named.
_PLACES = 5
_OWN = str(pathlib.Path(__file__).parents[1]) + os.sep

#: The methods that users call, or that updates run in.
_METHODS: tuple[tuple[type, str, str], ...] = (
    (TableLayer, "call", "call"),
    (All2AllDenseEmbedding, "call", "call"),
    (Embedding, "call", "call"),
    (EngineLayer, "_differentiate", "the update, in the gradient, of"),
    (TPUEmbeddingV2OnTPU, "enqueue", "enqueue"),
    (TPUEmbeddingV2OnTPU, "dequeue", "dequeue"),
    (TPUEmbeddingV2OnTPU, "apply_gradients", "apply_gradients"),
)


class Blamed:
    """The first call of a layer that raised an error.

    Its text is shorter than after Keras and AutoGraph have added theirs.
    """

    def __init__(self) -> None:
        self.message: str | None = None
        self._calls: dict[tuple[int, str], int] = {}
        self._running: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def count(self, owner: Any, what: str) -> Iterator[int]:
        """Counts the calls of an object's method; yields this one's number.

        A call of the base class's method inside belongs to it.
        """
        key = (id(owner), what)
        if key in self._running:
            yield self._calls[key]
            return
        self._calls[key] = self._calls.get(key, 0) + 1
        self._running.add(key)
        try:
            yield self._calls[key]
        finally:
            self._running.remove(key)


@contextlib.contextmanager
def blaming() -> Iterator[Blamed]:
    """Watches the calls of this library's layers.

    Yields:
        The first call that raised.
    """
    blamed = Blamed()
    with contextlib.ExitStack() as stack:
        for cls, name, what in _METHODS:
            for owner in _family(cls):
                if name in vars(owner):
                    watched = _watched(getattr(owner, name), what, blamed)
                    stack.enter_context(mock.patch.object(owner, name, watched))
        yield blamed


def _family(cls: Any) -> Iterator[Any]:
    yield cls
    for each in cls.__subclasses__():
        yield from _family(each)


def _watched(
    method: Callable[..., Any], what: str, blamed: Blamed
) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with blamed.count(self, what) as number:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if blamed.message is None:
                    kind = type(self).__name__
                    name = getattr(self, "name", None)
                    layer = f"{kind} '{name}'" if name else kind
                    place = _user_frame(tf_stack.extract_stack())
                    blamed.message = (
                        f"{what} {layer} (number {number}"
                        f"{f', at {place}' if place else ''}): {error}"
                    )
                raise

    return watched


def locate(recorded: Recorded, kinds: Collection[str]) -> list[str]:
    """Finds operations of some kinds in a function.

    Args:
        recorded: the function.
        kinds: the kinds.

    Returns:
        A line for each, with its name and where the user's code made it.
    """
    if not kinds:
        return []
    places = []
    for op in operations(recorded.function.graph):
        if op.type not in kinds or _on_host(op):
            continue
        place = _user_frame(op.traceback)
        line = f"{op.type} '{op.name}'" + (f", {place}" if place else "")
        if line not in places:
            places.append(line)
    more = len(places) - _PLACES
    if more > 0:
        places[_PLACES:] = [f"and {more} more"]
    return places


def _on_host(op: tf.Operation) -> bool:
    return "_xla_outside_compilation" in op.node_def.attr


def _user_frame(frames: Iterable[Any] | None) -> str | None:
    """The innermost frame that is the user's own code."""
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
