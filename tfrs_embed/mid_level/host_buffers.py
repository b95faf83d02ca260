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
from tfrs_embed.sparsecore.csr import ChipBuffers, padded_sizes
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
    try:
        chips = [
            preprocess(layout, ids)
            for ids in split(layout, number, dense, arrays)
        ]
    except ValueError as error:
        empty = [
            np.zeros([0] * len(shape), dtype.as_numpy_dtype)
            for shape, dtype in zip(
                _shapes(layout), itertools.cycle(_DTYPES), strict=False
            )
        ]
        return [*empty, np.array(str(error), object)]
    shapes = iter(_shapes(layout))
    result = []
    for name in layout.stacks:
        for field, dtype in zip(ChipBuffers._fields, _DTYPES, strict=True):
            whole = _zeros(next(shapes), dtype.as_numpy_dtype)
            # A row for each chip; what it does not fill stays zero.
            for row, chip in zip(whole.reshape(number, -1), chips, strict=True):
                part = np.atleast_1d(getattr(chip[name], field))
                row[: part.size] = part
            result.append(whole)
    return [*result, np.array("", object)]


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros aligned as TensorFlow's, which then takes them without a copy.

    Most of a buffer is room for more ids, and its memory is never touched.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _shapes(layout: Layout) -> list[tuple[int, ...]]:
    """The shapes of the buffers, stack by stack."""
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
    return shapes


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
    *tensors, text = tf.numpy_function(
        functools.partial(_fill, layout, [each.even for each in parsed]),
        _to_tensors(parsed, checks),
        [*_DTYPES * len(layout.stacks), tf.string],
        stateful=False,
    )
    for tensor, shape in zip(tensors, _shapes(layout), strict=True):
        tensor.set_shape([None] * len(shape))
    text.set_shape([])
    within = Checks()
    within.require(tf.equal(text, ""), lambda: text)
    tensors = within.guard(tensors)
    # After the check: buffers must not exist where ids are wrong.
    for tensor, shape in zip(tensors, _shapes(layout), strict=True):
        tensor.set_shape(shape)
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
    _check_stacks(layout, value, source)
    for name, entry in value.items():
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise ValueError(
                f"{source}: for stack '{name}' a tuple of 3, got "
                f"{_describe(entry)}."
            )
    return preserved(layout, {k: v[0] for k, v in value.items()}, source)


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
    _check_stacks(layout, value, source)
    size = len(_DTYPES)
    for i, name in enumerate(layout.stacks):
        entry = value[name]
        if not isinstance(entry, PartitionedCsrFormatTensor):
            raise ValueError(
                f"{source}: for stack '{name}' a PartitionedCsrFormatTensor, "
                f"got {_describe(entry)}."
            )
        shapes = _shapes(layout)[size * i : size * i + 4]
        for field, tensor, shape in zip(
            entry._fields, entry, shapes, strict=False
        ):
            if not tensor.shape.is_compatible_with(shape):
                raise ValueError(
                    f"{source}: for stack '{name}' {field} of shape {shape}, "
                    f"got {tensor.shape}; it was made for another topology, "
                    "batch or limit."
                )
    return {name: value[name] for name in layout.stacks}


def _check_stacks(layout: Layout, value: Any, source: str) -> None:
    if not isinstance(value, Mapping) or set(value) != set(layout.stacks):
        raise ValueError(
            f"{source}: a dict with the stacks {list(layout.stacks)}, got "
            f"{_describe(value)}."
        )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"one with the keys {list(value)}"
    return type(value).__name__


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
