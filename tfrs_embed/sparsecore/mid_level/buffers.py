"""Checks the buffers that users hand from one method to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfrs_embed.compat.private_tensorflow import PartitionedCsrFormatTensor
from tfrs_embed.sparsecore.host_buffers import buffer_specs
from tfrs_embed.sparsecore.layout import Layout

#: Each stack's buffers, which `dequeue` returns for the update.
Preserved = dict[str, PartitionedCsrFormatTensor]


def checked(
    layout: Layout, value: Any, source: str, enqueued: bool = False
) -> Preserved:
    """Returns each stack's buffers; refuses those of another layout.

    `source` says what the value must be; `enqueued` is whether each stack's
    buffers are the first of a tuple.
    """
    if not isinstance(value, Mapping) or set(value) != set(layout.stacks):
        got = type(value).__name__
        if isinstance(value, Mapping):
            got = f"one with the keys {list(value)}"
        raise ValueError(
            f"{source}: a dict with the stacks {list(layout.stacks)}, got "
            f"{got}."
        )
    found = {}
    for name, specs in buffer_specs(layout, layout.topology.chips).items():
        entry = value[name]
        if enqueued and isinstance(entry, tuple):
            entry = entry[0]
        where = f"{source}: for stack '{name}'"
        if not isinstance(entry, PartitionedCsrFormatTensor):
            raise ValueError(
                f"{where} a PartitionedCsrFormatTensor, got "
                f"{type(entry).__name__}."
            )
        for tensor, spec in zip(entry[:4], specs[:4], strict=True):
            if not tensor.shape.is_compatible_with(spec.shape):
                raise ValueError(
                    f"{where} a buffer of shape {spec.shape}, got "
                    f"{tensor.shape}; it was made for another topology, batch "
                    "or limit."
                )
        found[name] = entry
    return found
