"""Converts the activations of stacks to those of features, and back.

Chip by chip and SparseCore by SparseCore, a stack has its part of the first
feature's samples, then its part of the second one's, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.sparsecore.layout import FeatureLayout, Layout
from tfrs_embed.sparsecore.setup import CheckedConfig


def shape_of(layout: Layout, feature: FeatureLayout) -> list[int]:
    """The shape of a feature's activations of all chips."""
    batch, *rest = feature.config.output_shape.as_list()
    return [layout.topology.chips * batch, *rest, feature.dim]


def check_gradients(setup: CheckedConfig, gradients: Any) -> list[tf.Tensor]:
    """Checks the nested gradients of activations; None stands for zeros.

    Returns each feature's gradient, float32 in the shape of its activations.
    """
    checked = []
    flat = setup.flatten(gradients, "gradients")
    for gradient, feature, layout in zip(
        flat, setup.features, setup.layout.features, strict=True
    ):
        shape = shape_of(setup.layout, layout)
        if gradient is None:
            tf.get_logger().warning(
                "%s: no gradient was given; it is taken for zero.", feature
            )
            gradient = tf.zeros(shape)
        got = type(gradient).__name__
        if isinstance(gradient, tf.Tensor):
            got = f"{gradient.dtype.name} of shape {gradient.shape}"
            fits = tf.TensorSpec(shape).is_compatible_with(gradient)
        if not isinstance(gradient, tf.Tensor) or not fits:
            raise ValueError(
                f"{feature}: the gradient must be a float32 Tensor of its "
                f"activations' shape, {shape}, or None; got {got}."
            )
        checked.append(tf.ensure_shape(gradient, shape))
    return checked


def unstack(
    layout: Layout, activations: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Splits the stacks' activations, [chips * samples, dim], by feature."""
    cores = layout.topology.sparse_cores
    by_core = {}
    for name, stack in layout.stacks.items():
        shape = [layout.topology.shards, stack.samples // cores, stack.dim]
        by_core[name] = tf.reshape(activations[name], shape)
    result = []
    for feature in layout.features:
        first = feature.row_offset // cores
        last = first + feature.samples // cores
        part = by_core[feature.stack][:, first:last, : feature.dim]
        result.append(tf.reshape(part, shape_of(layout, feature)))
    return result


def stack(
    layout: Layout, gradients: Sequence[tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Joins the features' gradients by stack, with zeros as padding."""
    topology = layout.topology
    parts: dict[str, list[tf.Tensor]] = {name: [] for name in layout.stacks}
    for feature, gradient in zip(layout.features, gradients, strict=True):
        per_core = feature.samples // topology.sparse_cores
        gradient = tf.reshape(
            gradient, [topology.shards, per_core, feature.dim]
        )
        padding = layout.stacks[feature.stack].dim - feature.dim
        if padding:
            gradient = tf.pad(gradient, [[0, 0], [0, 0], [0, padding]])
        parts[feature.stack].append(gradient)
    return {
        name: tf.reshape(tf.concat(p, 1), [-1, layout.stacks[name].dim])
        for name, p in parts.items()
    }
