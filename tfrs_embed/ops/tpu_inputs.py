"""Requirements of TPU hosts: ids from the input pipeline, of known number."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import on_tpu
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds

# TensorFlow's compiler looks through these operations.
_TRANSPARENT = ("Identity", "Cast", "Reshape")


def require_given(what: str, ids: Any) -> None:
    """Requires ids or weights to come from outside the TPU's program.

    The host prepares ids before the program runs. Without this check
    TensorFlow's compiler fails without naming the feature. Outside a TPU's
    replica all ids are accepted.

    Raises:
        ValueError: the program computes them, or their number is unknown.
    """
    for tensor in tf.nest.flatten(ids, expand_composites=True):
        if not tf.is_symbolic_tensor(tensor):
            continue
        op = tensor.op
        while op.type in _TRANSPARENT and on_tpu(op):
            op = op.inputs[0].op
        if op.type == "XlaSetDynamicDimensionSize":
            dimension = tf.get_static_value(op.inputs[1])
            if dimension == 0:
                raise ValueError(_unknown(what))
            raise ValueError(_unknown_width(what, dimension))
        if on_tpu(op) and not _is_given(op):
            raise ValueError(
                f"{what}: they are computed inside strategy.run, by the "
                f"operation {op.type} '{op.name}', which is to run on the TPU. "
                "Its host looks ids up and can't take them from there: compute "
                "them before, in the input pipeline, with dataset.map."
            )


def require_known(feature: FeatureSpec, bags: BaggedIds) -> None:
    """Raises a ValueError unless the number of bags is known when tracing."""
    if bags.static_count is None:
        raise ValueError(_unknown(str(feature)))


def _unknown(what: str) -> str:
    return (
        f"{what}: the number of samples isn't known when strategy.run is "
        "traced, and a TPU's program has fixed shapes. Make batches of one "
        "size for all features, ragged and sparse ones too, with tf.data's "
        "batch(..., drop_remainder=True): one feature of unknown size makes "
        "the size of all features unknown to a TPUStrategy."
    )


def _unknown_width(what: str, dimension: int) -> str:
    return (
        f"{what}: the size of dimension {dimension} isn't known when "
        "strategy.run is traced, and a TPU's program has fixed shapes. Pad "
        "all batches to one width, with tf.data's padded_batch(..., "
        "padded_shapes=...), or give ragged ids."
    )


def _is_given(op: tf.Operation) -> bool:
    """Whether an operation is an input of the program, or a constant."""
    if op.type in ("TPUReplicatedInput", "Placeholder", "Const"):
        return True
    return op.type in ("Range", "Fill") and all(
        _is_given(each.op) for each in op.inputs
    )
