"""Checks the buffers that users hand from one method to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfrs_embed.compat.private_tensorflow import PartitionedCsrFormatTensor
from tfrs_embed.sparsecore.host_buffers import buffer_specs
from tfrs_embed.sparsecore.layout import Layout

#: Each stack's buffers, which `dequeue` returns for the update.
Preserved = dict[str, PartitionedCsrFormatTensor]


def enqueued(layout: Layout, value: Any) -> Preserved:
    """Returns the buffers in `enqueue`'s result; refuses another layout's."""
    source = "dequeue takes the result of enqueue"
    buffers = _by_stack(layout, value, source)
    for name, entry in buffers.items():
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise ValueError(
                f"{source}: for stack '{name}' a tuple of 3, got "
                f"{type(entry).__name__}."
            )
        buffers[name] = entry[0]
    return _checked(layout, buffers, source)


def preserved(layout: Layout, value: Any) -> Preserved:
    """Returns the second result of `dequeue`; see `enqueued`."""
    source = "apply_gradients takes the second result of dequeue"
    return _checked(layout, _by_stack(layout, value, source), source)


def _by_stack(layout: Layout, value: Any, source: str) -> dict[str, Any]:
    """A user's value for each stack, in the layout's order."""
    if isinstance(value, Mapping) and set(value) == set(layout.stacks):
        return {name: value[name] for name in layout.stacks}
    got = type(value).__name__
    if isinstance(value, Mapping):
        got = f"one with the keys {list(value)}"
    raise ValueError(
        f"{source}: a dict with the stacks {list(layout.stacks)}, got {got}."
    )


def _checked(layout: Layout, found: dict[str, Any], source: str) -> Preserved:
    specs = buffer_specs(layout, layout.topology.chips)
    for name, entry in found.items():
        where = f"{source}: for stack '{name}'"
        if not isinstance(entry, PartitionedCsrFormatTensor):
            raise ValueError(
                f"{where} a PartitionedCsrFormatTensor, got "
                f"{type(entry).__name__}."
            )
        for field, spec in zip(entry._fields[:4], specs[name][:4], strict=True):
            tensor = getattr(entry, field)
            if not tensor.shape.is_compatible_with(spec.shape):
                raise ValueError(
                    f"{where} {field} of shape {spec.shape}, got "
                    f"{tensor.shape}; it was made for another topology, batch "
                    "or limit."
                )
    return found
