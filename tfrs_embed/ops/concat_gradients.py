"""Gradients of concatenated activations, read as columns of one matrix.

A model concatenates its activations. The gradient of that is a matrix, which
TensorFlow cuts into one tensor for each activation: a copy of them all. The
kernels need no copy; they read the columns of the matrix. Nor do they need the
copies in float32 of gradients that came in fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed._tensorflow import EagerTensor


class ConcatGradients(NamedTuple):
    """The places of gradients in matrices.

    Attributes:
        matrices: float32 tensors: matrices, or gradients that are no part of
            one.
        matrix_of: each gradient's among them.
        first: [gradients] int32, each one's first column.
    """

    matrices: list[tf.Tensor]
    matrix_of: list[int]
    first: tf.Tensor


class _Cut(NamedTuple):
    """An operation that cuts a matrix into gradients.

    Attributes:
        matrix: [count, width].
        firsts: [k] int32, first columns of its parts.
    """

    matrix: tf.Tensor
    firsts: tf.Tensor


class _Finder:
    """Finds the operations that gradients were cut by."""

    def __init__(self) -> None:
        self._cuts: dict[Any, _Cut] = {}

    def find(self, gradient: tf.Tensor) -> tuple[_Cut, int] | None:
        """The cut that made a gradient, and which part it is; None: no cut."""
        source = _source(gradient)
        if source is None:
            return None
        gradient, op = source, source.op
        if op.type == "SplitV" and _constant(op.inputs[2]) == 1:
            return self._of(op, self._by_sizes), gradient.value_index
        if (
            op.type == "Unpack"
            and op.inputs[0].shape.rank == 3
            and op.get_attr("axis") in (1, -2)
        ):
            return self._of(op, self._unpacked), gradient.value_index
        if op.type == "Slice" and _is_offset(op.inputs[1].op):
            return self._of(op, self._by_offset), 0
        return None

    def _of(self, op: Any, make: Any) -> _Cut:
        if op not in self._cuts:
            self._cuts[op] = make(op)
        return self._cuts[op]

    def _by_sizes(self, op: Any) -> _Cut:
        firsts = _firsts(_stacked(op.inputs[1]))
        if firsts is None:
            sizes = tf.cast(op.inputs[1], tf.int32)
            firsts = tf.cumsum(sizes, exclusive=True)
        return self._of_part(op.inputs[0], firsts)

    def _unpacked(self, op: Any) -> _Cut:
        parts = op.inputs[0]
        count, number, dim = tf.unstack(tf.shape(parts))
        matrix = tf.reshape(parts, [count, number * dim])
        return _Cut(matrix, tf.range(number) * dim)

    def _by_offset(self, op: Any) -> _Cut:
        offset = op.inputs[1]
        firsts = _firsts(offset.op.inputs[1:])
        first = (
            tf.cast(offset, tf.int32)[1:]
            if firsts is None
            else firsts[offset.value_index :][:1]
        )
        return self._of_part(op.inputs[0], first)

    def _of_part(self, matrix: tf.Tensor, firsts: tf.Tensor) -> _Cut:
        """A cut of a matrix that may itself be a part of a larger one."""
        found = self.find(matrix)
        if found is None:
            return _Cut(matrix, firsts)
        cut, part = found
        return _Cut(cut.matrix, cut.firsts[part] + firsts)


def find(gradients: Sequence[tf.Tensor]) -> ConcatGradients:
    """Finds the matrices that gradients are columns of.

    Args:
        gradients: each [count, dim] float32.

    Returns:
        Where they are. One that was not cut from a matrix, or in a way that
        isn't known here, is a matrix of its own.
    """
    finder = _Finder()
    found = [finder.find(gradient) for gradient in gradients]
    numbers: dict[Any, int] = {}
    matrices: list[tf.Tensor] = []
    matrix_of = []
    # The parts' first columns, cut after cut; 0 for those without.
    firsts: list[tf.Tensor] = [tf.zeros([1], tf.int32)]
    cuts: dict[int, int] = {}
    cut_of, part_of = [], []
    for gradient, cut_and_part in zip(gradients, found, strict=True):
        matrix = gradient
        cut_of.append(0)
        part_of.append(0)
        if cut_and_part is not None:
            cut, part_of[-1] = cut_and_part
            matrix = cut.matrix
            if id(cut) not in cuts:
                cuts[id(cut)] = len(firsts)
                firsts.append(cut.firsts)
            cut_of[-1] = cuts[id(cut)]
        if matrix.ref() not in numbers:
            numbers[matrix.ref()] = len(matrices)
            matrices.append(matrix)
        matrix_of.append(numbers[matrix.ref()])
    if not cuts:
        return ConcatGradients(
            matrices, matrix_of, tf.zeros([len(found)], tf.int32)
        )
    starts = tf.cumsum(tf.stack([tf.size(f) for f in firsts]), exclusive=True)
    places = tf.gather(starts, cut_of) + tf.constant(part_of)
    return ConcatGradients(
        matrices, matrix_of, tf.gather(tf.concat(firsts, 0), places)
    )


def before_casts(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients as they were before they were cast to float32.

    Args:
        gradients: float32 tensors.

    Returns:
        What they were cast from, if that was bfloat16 for all or float16 for
        all; else themselves.
    """
    found = [_before_cast(gradient) for gradient in gradients]
    dtypes = {None if source is None else source.dtype for source in found}
    if dtypes in ({tf.bfloat16}, {tf.float16}):
        return found
    return list(gradients)


def _before_cast(gradient: tf.Tensor) -> tf.Tensor | None:
    """What a gradient was cast from; None: it wasn't."""
    source = _source(gradient)
    if source is None or source.op.type != "Cast":
        return None
    return source.op.inputs[0]


def _source(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor that identities hand on; None: it is not of a graph."""
    if tf.executing_eagerly() or isinstance(tensor, EagerTensor):
        return None
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# Shapes that are known when tracing are read from the graph: a gradient that
# asked for the activations would keep the kernels from writing these into the
# concatenation.


def _firsts(shapes: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """The first column of each of several matrices side by side, if known.

    Args:
        shapes: the matrices' shapes, [2] each.

    Returns:
        [matrices] int32, or None.
    """
    widths = [_width(shape) for shape in shapes]
    if not widths or None in widths:
        return None
    return tf.cumsum(tf.constant(widths), exclusive=True)


def _width(shape: tf.Tensor) -> int | None:
    """A matrix's width, by its shape, [2]; None if it isn't known."""
    if shape.op.type in ("Shape", "ShapeN"):
        static = shape.op.inputs[shape.value_index].shape
        return static[1] if static.rank == 2 else None
    value = tf.get_static_value(shape)
    return None if value is None or value.size != 2 else int(value[1])


def _stacked(sizes: tf.Tensor) -> list[tf.Tensor]:
    """The shapes that the gradient of a concatenation takes sizes from."""
    # A row of them all, stacked as columns; which row is the axis.
    op = sizes.op
    for kind in ("Squeeze", "Slice"):
        if op.type != kind:
            return []
        op = op.inputs[0].op
    stacked = op.type == "Pack" and op.get_attr("axis") == 1
    return list(op.inputs) if stacked else []


def _is_offset(op: tf.Operation) -> bool:
    """Whether an operation says where parts begin in a matrix's columns."""
    return op.type == "ConcatOffset" and _constant(op.inputs[0]) == 1


def _constant(tensor: tf.Tensor) -> int | None:
    """The value of a scalar that is known when tracing, else None."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "FloorMod":
        # As the gradient of a concatenation takes its axis.
        axis, rank = (_constant(i) for i in tensor.op.inputs)
        return None if axis is None or not rank else axis % rank
    return None if value is None else int(value)
