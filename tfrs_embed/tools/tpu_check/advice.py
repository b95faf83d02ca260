"""Warnings about programs that TPUs accept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    func_graph,
    record,
    tpu_embedding_v2,
    tpu_embedding_v3,
)
from tfrs_embed.sparsecore.layout import DEFAULT_LIMIT
from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check.recording import RecordedFunction


class Use(NamedTuple):
    """A traced lookup or update of one of TensorFlow's embedding classes.

    Attributes:
        embedding: the object of that class.
        graph: the graph of the function that the user's code calls.
        on_tape: whether a gradient tape records it.
        updates: whether it is an update.
        pipelined: whether it overlaps with other steps.
    """

    embedding: Any
    graph: Any
    on_tape: bool
    updates: bool
    pipelined: bool


@contextlib.contextmanager
def noting(uses: list[Use]) -> Iterator[None]:
    """Adds all lookups and updates that are traced within to a list."""

    def noted(method: Callable[..., Any], updates: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def note(embedding: Any, *args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            while isinstance(graph.outer_graph, func_graph.FuncGraph):
                graph = graph.outer_graph
            on_tape = record.could_possibly_record()
            pipelined = _is_pipelined(embedding)
            uses.append(Use(embedding, graph, on_tape, updates, pipelined))
            return method(embedding, *args, **kwargs)

        return note

    with contextlib.ExitStack() as stack:
        for cls in (
            tpu_embedding_v2.TPUEmbedding,
            tpu_embedding_v3.TPUEmbeddingV2,
        ):
            for name, updates in (
                ("dequeue", False),
                ("apply_gradients", True),
            ):
                method = noted(getattr(cls, name), updates)
                stack.enter_context(mock.patch.object(cls, name, method))
        yield


def warnings(
    tpu_slice: Slice, functions: Sequence[RecordedFunction], uses: Sequence[Use]
) -> tuple[str, ...]:
    """Warnings about functions that were recorded, from what they use."""
    found = []
    if tpu_slice.hosts > 1:
        found.append(
            f"{tpu_slice.name} has {tpu_slice.hosts} hosts and was checked as "
            "one: the hosts' input, memory and checkpoints were not."
        )
    embeddings = {id(use.embedding): use.embedding for use in uses}.values()
    for embedding in embeddings:
        if isinstance(embedding, tpu_embedding_v3.TPUEmbeddingV2):
            found += _of_limits(embedding)
    for recorded in functions:
        graph = recorded.function.graph
        mine = [use for use in uses if use.graph is graph]
        updates = [use for use in mine if use.updates]
        if not updates and any(use.on_tape for use in mine):
            found.append(
                f"{recorded.name} looks tables up on a gradient tape, but "
                "updates none: their gradients are not asked for, or the "
                "layer is called with training=False."
            )
        if any(_asked(use.embedding) and not use.pipelined for use in updates):
            found.append(
                f"{recorded.name} is not pipelined, although "
                "pipeline_execution_with_tensor_core=True. A step is where it "
                "is directly in a loop of the function (in Keras: "
                "steps_per_execution above 1) and records no summaries."
            )
    return tuple(dict.fromkeys(found))


def _of_limits(embedding: Any) -> Iterator[str]:
    config = embedding._sparse_core_embedding_config
    ids = embedding._table_to_max_ids_per_sparse_core
    unique = embedding._table_to_max_unique_ids_per_sparse_core
    stacks = [n for n in ids if DEFAULT_LIMIT in (ids[n], unique[n])]
    capacity = config.max_ids_per_chip_per_sample
    remedy = "tfrs_embed.sparsecore.compute_limits computes it from batches."
    if stacks:
        yield (
            "max_ids_per_table or max_unique_ids_per_table of the stacks "
            f"{stacks} is the default, {DEFAULT_LIMIT}. A batch that needs "
            f"more ends the program; {remedy}"
        )
    if capacity == type(config)().max_ids_per_chip_per_sample:
        yield (
            f"max_ids_per_chip_per_sample is the default, {capacity}, by which "
            f"the buffers of ids are sized; {remedy}"
        )
    if config.allow_id_dropping:
        yield (
            "allow_id_dropping=True: a chip's ids above "
            f"max_ids_per_chip_per_sample={capacity} on average are dropped, "
            "without an error or a count."
        )


def _asked(embedding: Any) -> bool:
    """Whether pipelining on SparseCores was asked for."""
    always = getattr(embedding, "_pipelining", False)
    return bool(getattr(embedding, "_asked", always))


def _is_pipelined(embedding: Any) -> bool:
    """Whether an update that is made now overlaps with other steps."""
    if not getattr(embedding, "_pipelining", False):
        return False
    backward = tpu_embedding_v3._PIPELINE_MODE_BACKWARD
    context = tpu_embedding_v3.EmbeddingPipeliningContext(backward, True)
    return bool(context._mode.s == backward.encode())
