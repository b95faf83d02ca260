"""Fills chips' buffers from ids in tensors.

On TPUs each chip's host preprocesses its own batch. Here one process does it
for one chip or all chips, whose buffers follow each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import PartitionedCsrFormatTensor
from tfrs_embed.ops.checks import Checks
from tfrs_embed.sparsecore.buffers import padded_sizes, preprocess
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import Layout

#: TensorFlow sizes row pointers for so many minibatches, and makes one.
_MAX_MINIBATCHES = 64
#: The alignment of TensorFlow's tensors in bytes.
_ALIGNMENT = 64

#: The value of `TPUEmbeddingV2.enqueue`: by stack, the buffers, the unpadded
#: size of the row pointers, and the unpadded size of the ids.
Enqueued = dict[str, tuple[PartitionedCsrFormatTensor, Any, Any]]


def _to_tensors(ids: Sequence[Ids], checks: Checks) -> list[tf.Tensor]:
    """The fields of each feature's ids in a row; needs the checks to hold."""
    tensors: list[tf.Tensor] = []
    for splits, values, weights in ids:
        if weights is None:
            weights = tf.ones(tf.shape(values))
        tensors += [
            tf.cast(splits, tf.int32),
            tf.cast(values, tf.int32),
            tf.cast(weights, tf.float32),
        ]
    return checks.guard(tensors)


def _split(
    layout: Layout, chips: int, arrays: Sequence[np.ndarray]
) -> list[list[Ids]]:
    """Splits the arrays of `_to_tensors` over chips."""
    of_chips: list[list[Ids]] = [[] for _ in range(chips)]
    for i, feature in enumerate(layout.features):
        splits, values, weights = arrays[3 * i : 3 * i + 3]
        for chip, ids in enumerate(of_chips):
            first = chip * feature.samples
            mine = splits[first : first + feature.samples + 1]
            part = slice(mine[0], mine[-1])
            ids.append(Ids(mine - mine[0], values[part], weights[part]))
    return of_chips


def _fill(layout: Layout, chips: int, *arrays: np.ndarray) -> list[np.ndarray]:
    """The chips' buffers, and the text of an error or ""."""
    # Unused entries stay zero.
    result = {
        name: [_zeros(spec) for spec in specs]
        for name, specs in buffer_specs(layout, chips).items()
    }
    text = ""
    try:
        for chip, ids in enumerate(_split(layout, chips, arrays)):
            for name, buffers in preprocess(layout, ids).items():
                parts: list[Any] = [*buffers]
                parts += [buffers.row_pointers.size, buffers.sample_ids.size]
                for whole, part in zip(result[name], parts, strict=True):
                    whole.reshape(chips, -1)[chip, : np.size(part)] = part
    except ValueError as error:
        text = str(error)
    return [*itertools.chain(*result.values()), np.array(text, object)]


def _zeros(spec: tf.TensorSpec) -> np.ndarray:
    """Zeros aligned like TensorFlow's, which then uses them without a copy.

    Most of a buffer is unused, and its memory is never touched.
    """
    size = spec.shape.num_elements() * spec.dtype.size
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    whole = memory[start : start + size].view(spec.dtype.as_numpy_dtype)
    return whole.reshape(spec.shape.as_list())


def buffer_specs(layout: Layout, chips: int) -> dict[str, list[tf.TensorSpec]]:
    """The specs of `ChipBuffers` for chips, by stack.

    The specs of the unpadded sizes of row pointers and ids follow: scalars for
    one chip, else [chips].
    """
    topology, config = layout.topology, layout.config
    pointers = _MAX_MINIBATCHES * topology.sparse_cores
    pointers *= padded_sizes(topology.shards)
    of_chip = [chips] if chips > 1 else []
    specs = {}
    for name, stack in layout.stacks.items():
        capacity = config.max_ids_per_chip_per_sample * stack.samples
        specs[name] = [
            tf.TensorSpec([chips * pointers], tf.int32),
            tf.TensorSpec([chips * capacity], tf.int32),
            tf.TensorSpec([chips * capacity], tf.int32),
            tf.TensorSpec([chips * capacity], tf.float32),
            *[tf.TensorSpec(of_chip, tf.int32)] * 2,
        ]
    return specs


def fill_buffers(
    layout: Layout, ids: Sequence[Ids], chips: int, checks: Checks
) -> Enqueued:
    """Preprocesses a step's ids, as the hosts of `chips` do.

    `ids` has each feature's ids in the layout's order, chip by chip. A check
    that fails or a limit that is exceeded raises an InvalidArgumentError.
    """
    specs = buffer_specs(layout, chips)
    flat = [spec for of_stack in specs.values() for spec in of_stack]
    *tensors, text = tf.numpy_function(
        functools.partial(_fill, layout, chips),
        _to_tensors(ids, checks),
        [*(spec.dtype for spec in flat), tf.string],
        stateful=False,
    )
    for tensor, spec in zip(tensors, flat, strict=True):
        tensor.set_shape(spec.shape)
    text.set_shape([])
    within = Checks()
    within.require(tf.equal(text, ""), lambda: text)
    fields = iter(within.guard(tensors))
    result: Enqueued = {}
    for name, stack in layout.stacks.items():
        *of_ids, pointers_size, ids_size = (next(fields) for _ in specs[name])
        minibatches = tf.ones(ids_size.shape, tf.int32)  # One of each chip.
        buffers = PartitionedCsrFormatTensor(
            *of_ids, stack.samples, minibatches
        )
        result[name] = (buffers, pointers_size, ids_size)
    return result
