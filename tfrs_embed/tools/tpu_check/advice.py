"""Warnings about programs that TPUs accept, and that lose training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    func_graph,
    record,
    tpu_embedding_v2,
    tpu_embedding_v3,
)
from tfrs_embed.tools.tpu_check.recording import RecordedFunction


class Use(NamedTuple):
    """A traced lookup or update of one of TensorFlow's embedding classes.

    Attributes:
        method: "dequeue" or "apply_gradients".
        embedding: the object of that class.
        graph: the graph of the function that the user's code calls.
        on_tape: whether a gradient tape records it.
    """

    method: str
    embedding: Any
    graph: Any
    on_tape: bool


@contextlib.contextmanager
def noting(uses: list[Use]) -> Iterator[None]:
    """Adds all lookups and updates that are traced within to a list."""

    def noted(cls: Any, name: str) -> Any:
        method = getattr(cls, name)

        @functools.wraps(method)
        def note(embedding: Any, *args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            while isinstance(graph.outer_graph, func_graph.FuncGraph):
                graph = graph.outer_graph
            on_tape = record.could_possibly_record()
            uses.append(Use(name, embedding, graph, on_tape))
            return method(embedding, *args, **kwargs)

        return mock.patch.object(cls, name, note)

    with contextlib.ExitStack() as stack:
        for cls in (
            tpu_embedding_v2.TPUEmbedding,
            tpu_embedding_v3.TPUEmbeddingV2,
        ):
            for name in "dequeue", "apply_gradients":
                stack.enter_context(noted(cls, name))
        yield


def warnings(
    functions: Sequence[RecordedFunction], uses: Sequence[Use]
) -> tuple[str, ...]:
    """Returns warnings about functions that were recorded."""
    found = []
    for embedding in {
        id(use.embedding): use.embedding for use in uses
    }.values():
        config = getattr(embedding, "_sparse_core_embedding_config", None)
        if config is not None and config.allow_id_dropping:
            found.append(
                "allow_id_dropping=True: a chip's ids above "
                "max_ids_per_chip_per_sample="
                f"{config.max_ids_per_chip_per_sample} on average are dropped, "
                "without an error or a count."
            )
    for recorded in functions:
        mine = [use for use in uses if use.graph is recorded.function.graph]
        updates = any(use.method == "apply_gradients" for use in mine)
        if not updates and any(use.on_tape for use in mine):
            found.append(
                f"{recorded.name} looks tables up on a gradient tape, but "
                "updates none: their gradients are not asked for, or the "
                "layer is called with training=False."
            )
    return tuple(dict.fromkeys(found))
