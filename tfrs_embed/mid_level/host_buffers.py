"""From checked ids to the buffers of all chips, in one process.

Each chip's host preprocesses its own batch; here one process does it for all of
them. Their buffers follow each other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed._tensorflow import PartitionedCsrFormatTensor
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.parsed_ids import ParsedIds
from tfrs_embed.sparsecore.buffers import preprocess, statistics
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.csr import padded_sizes
from tfrs_embed.sparsecore.device import Buffers
from tfrs_embed.sparsecore.layout import Layout

#: The numbers that TF sizes row pointers for; it never makes more.
_MAX_MINIBATCHES = 64
# Bytes.
_ALIGNMENT = 64
_DTYPES = (*[tf.int32] * 3, tf.float32, *[tf.int32] * 3)

#: The value of `enqueue` in TF's class: by stack, the buffers, the unpadded
#: size of their row pointers, and that of their ids.
Enqueued = dict[str, tuple[PartitionedCsrFormatTensor, Any, Any]]
#: The value that it preserves for the update: each stack's buffers.
Preserved = dict[str, PartitionedCsrFormatTensor]


def _to_tensors(parsed: Sequence[ParsedIds], checks: Checks) -> list[tf.Tensor]:
    """Each feature's ids, their samples and weights, once the checks hold.

    Ids are [n] int32 and weights [n] float32; samples are [n] int32, or [0]
    where an id's position is its sample.
    """
    none = tf.zeros([0], tf.int32)
    tensors: list[tf.Tensor] = []
    for each in parsed:
        weights = each.weights
        if weights is None:
            weights = tf.ones(tf.shape(each.ids))
        tensors += [
            each.ids,
            none if each.even else each.bag_of_id(),
            weights,
        ]
    tensors = checks.guard(tensors)
    return [
        t if t.dtype == tf.float32 else tf.cast(t, tf.int32) for t in tensors
    ]


def split(
    layout: Layout,
    number: int,
    dense: Sequence[bool],
    arrays: Sequence[np.ndarray],
) -> list[list[Ids]]:
    """Splits features' ids over chips.

    Args:
        layout: the layout.
        number: of chips.
        dense: whether a feature's samples have one id each.
        arrays: for each feature its ids, [n] int32; the sample of each, [n]
            int32, ascending, or [0] if dense; and weights, [n] float32.

    Returns:
        For each chip, each feature's ids.
    """
    chips: list[list[Ids]] = [[] for _ in range(number)]
    for i, feature in enumerate(layout.features):
        ids, sample, weights = arrays[3 * i : 3 * i + 3]
        splits = np.arange(number * feature.samples + 1)
        if not dense[i]:
            splits = np.searchsorted(sample, splits)
        for chip, of_chip in enumerate(chips):
            # Samples ascend, so that a chip's ids are a slice.
            first = chip * feature.samples
            mine = splits[first : first + feature.samples + 1]
            part = slice(mine[0], mine[-1])
            where = np.zeros([0]) if dense[i] else mine - mine[0]
            of_chip.append(
                Ids(where.astype(np.int32), ids[part], weights[part])
            )
    return chips


def _fill(layout: Layout, dense: Sequence[bool], *arrays: np.ndarray) -> Any:
    """All chips' buffers, and an error's text; "" if there is no error."""
    number = layout.topology.chips
    # What chips do not fill stays zero.
    result = [_zeros(*spec) for spec in _specs(layout)]
    try:
        chips = [
            preprocess(layout, ids)
            for ids in split(layout, number, dense, arrays)
        ]
    except ValueError as error:
        return [*result, np.array(str(error), object)]
    by_chip = [
        [part for name in layout.stacks for part in chip[name]]
        for chip in chips
    ]
    for whole, parts in zip(result, zip(*by_chip, strict=True), strict=True):
        for row, part in zip(whole.reshape(number, -1), parts, strict=True):
            row[: np.size(part)] = part
    return [*result, np.array("", object)]


def _zeros(shape: tuple[int, ...], dtype: tf.DType) -> np.ndarray:
    """Zeros aligned as TensorFlow's, which then takes them without a copy.

    Most of a buffer is room for more ids, and its memory is never touched.
    """
    size = math.prod(shape) * dtype.size
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    whole = memory[start : start + size].view(dtype.as_numpy_dtype)
    return whole.reshape(shape)


def _specs(layout: Layout) -> list[tuple[tuple[int, ...], tf.DType]]:
    """The shapes and dtypes of the buffers, stack by stack."""
    topology, config = layout.topology, layout.config
    pointers = _MAX_MINIBATCHES * topology.sparse_cores
    pointers *= padded_sizes(topology.shards)
    sizes = (topology.chips,) if topology.chips > 1 else ()
    shapes: list[tuple[int, ...]] = []
    for stack in layout.stacks.values():
        capacity = config.max_ids_per_chip_per_sample * stack.samples
        shapes += [(topology.chips * pointers,)]
        shapes += [(topology.chips * capacity,)] * 3
        shapes += [sizes] * 3
    return list(zip(shapes, _DTYPES * len(layout.stacks), strict=True))


def fill_buffers(
    layout: Layout, parsed: Sequence[ParsedIds], checks: Checks
) -> Enqueued:
    """Preprocesses a step's ids, as the hosts of the chips do.

    Args:
        layout: the layout.
        parsed: each feature's ids.
        checks: their checks.

    Returns:
        By stack, all chips' buffers, the unpadded size of their row pointers
        and that of their ids: scalars for one chip, else [chips].

    Raises:
        tf.errors.InvalidArgumentError: a check fails, or there are more ids
            than a limit allows.
    """
    specs = _specs(layout)
    *tensors, text = tf.numpy_function(
        functools.partial(_fill, layout, [each.even for each in parsed]),
        _to_tensors(parsed, checks),
        [*(dtype for _, dtype in specs), tf.string],
        stateful=False,
    )
    for tensor, (shape, _) in zip(tensors, specs, strict=True):
        tensor.set_shape(shape)
    text.set_shape([])
    within = Checks()
    within.require(tf.equal(text, ""), lambda: text)
    tensors = within.guard(tensors)
    result: Enqueued = {}
    size = len(_DTYPES)
    for i, (name, stack) in enumerate(layout.stacks.items()):
        fields = tensors[size * i : size * (i + 1)]
        *of_ids, pointers_size, ids_size, minibatches = fields
        buffers = PartitionedCsrFormatTensor(
            *of_ids, stack.samples, minibatches
        )
        result[name] = (buffers, pointers_size, ids_size)
    return result


def count(
    layout: Layout, parsed: Sequence[ParsedIds], checks: Checks
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Counts what the limits of one chip's batch must be.

    Args:
        layout: the layout.
        parsed: each feature's ids, on one chip.
        checks: their checks.

    Returns:
        By stack, the most ids, and the most unique ids, that a SparseCore
        sends to a shard, scalar int32.
    """
    dense = [each.even for each in parsed]

    def most(*arrays: np.ndarray) -> list[np.int32]:
        (ids,) = split(layout, 1, dense, arrays)
        counts = statistics(layout, ids).values()
        return [
            np.int32(np.max(number))
            for c in counts
            for number in (c.ids, c.unique_ids)
        ]

    numbers = tf.numpy_function(
        most,
        _to_tensors(parsed, checks),
        [tf.int32] * (2 * len(layout.stacks)),
        stateful=False,
    )
    for number in numbers:
        number.set_shape([])
    return (
        dict(zip(layout.stacks, numbers[::2], strict=True)),
        dict(zip(layout.stacks, numbers[1::2], strict=True)),
    )


def enqueued(layout: Layout, value: Any) -> Preserved:
    """Returns the buffers in what `fill_buffers` returned, checked.

    Args:
        layout: the layout.
        value: what a user gave for it.

    Returns:
        Each stack's buffers.

    Raises:
        ValueError: it is something else, or another layout's.
    """
    source = "dequeue takes what enqueue returned"
    buffers = {}
    for name, entry in _by_stack(layout, value, source).items():
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise ValueError(
                f"{source}: for stack '{name}' a tuple of 3, got "
                f"{type(entry).__name__}."
            )
        buffers[name] = entry[0]
    return preserved(layout, buffers, source)


def preserved(
    layout: Layout,
    value: Any,
    source: str = "apply_gradients takes the second of what dequeue returned",
) -> Preserved:
    """Returns a user's buffers, checked.

    Args:
        layout: the layout.
        value: what the user gave.
        source: what it must be, for error messages.

    Returns:
        Each stack's buffers.

    Raises:
        ValueError: it is something else, or another layout's.
    """
    found = _by_stack(layout, value, source)
    specs = iter(_specs(layout))
    for name, entry in found.items():
        if not isinstance(entry, PartitionedCsrFormatTensor):
            raise ValueError(
                f"{source}: for stack '{name}' a PartitionedCsrFormatTensor, "
                f"got {type(entry).__name__}."
            )
        of_stack = list(itertools.islice(specs, len(_DTYPES)))
        for field, tensor, (shape, _) in zip(
            entry._fields[:4], entry[:4], of_stack[:4], strict=True
        ):
            if not tensor.shape.is_compatible_with(shape):
                raise ValueError(
                    f"{source}: for stack '{name}' {field} of shape {shape}, "
                    f"got {tensor.shape}; it was made for another topology, "
                    "batch or limit."
                )
    return found


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


def of_chips(
    layout: Layout, buffers: PartitionedCsrFormatTensor
) -> list[Buffers]:
    """Returns each chip's buffers of a stack."""
    number = layout.topology.chips

    def parts(tensor: tf.Tensor) -> list[tf.Tensor]:
        # Slices share their tensor's memory, which a split would copy.
        size = tensor.shape[0] // number
        return [tensor[size * i : size * (i + 1)] for i in range(number)]

    fields = map(parts, buffers[: len(Buffers._fields)])
    return [Buffers(*of_chip) for of_chip in zip(*fields, strict=True)]
