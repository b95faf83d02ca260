"""A TPU host's requirements: ids from the input pipeline, of known number."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import on_tpu
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds

# TensorFlow's compiler sees through these.
_TRANSPARENT = ("Identity", "Cast", "Reshape")


def require_given(what: str, ids: Any) -> None:
    """Requires ids, or weights, not to be computed by a TPU's program.

    The host prepares the ids before the program runs, so it can't look up what
    the program computes: TensorFlow's compiler fails, with errors that don't
    name the feature. Outside of a TPU's replica all ids are accepted.

    Args:
        what: whose they are, for errors.
        ids: a Tensor, a RaggedTensor or a SparseTensor; None: there are none.

    Raises:
        ValueError: they are computed by the program, or of unknown size.
    """
    for tensor in tf.nest.flatten(ids, expand_composites=True):
        if not tf.is_symbolic_tensor(tensor):
            continue
        op = tensor.op
        while op.type in _TRANSPARENT and on_tpu(op):
            op = op.inputs[0].op
        if op.type == "XlaSetDynamicDimensionSize":
            raise ValueError(_unknown(what))
        if on_tpu(op) and not _is_given(op):
            raise ValueError(
                f"{what}: they are computed inside strategy.run, by the "
                f"operation {op.type} '{op.name}', which is to run on the TPU. "
                "Its host looks ids up and can't take them from there: compute "
                "them before, in the input pipeline, with dataset.map."
            )


def require_known(feature: FeatureSpec, bags: BaggedIds) -> None:
    """Requires the number of a feature's bags to be known when tracing.

    Args:
        feature: the feature.
        bags: its bags.

    Raises:
        ValueError: it is not.
    """
    if bags.static_count is None:
        raise ValueError(_unknown(str(feature)))


def _unknown(what: str) -> str:
    return (
        f"{what}: the number of samples isn't known when strategy.run is "
        "traced, and a TPU's program has fixed shapes. Make batches of one "
        "size, with tf.data's batch(..., drop_remainder=True), and that of all "
        "features, ragged and sparse ones too: one of unknown size makes a "
        "TPUStrategy take all of them for such."
    )


def _is_given(op: tf.Operation) -> bool:
    """Whether an operation is an input of the program, or a constant."""
    if op.type in ("TPUReplicatedInput", "Placeholder", "Const"):
        return True
    return op.type in ("Range", "Fill") and all(
        _is_given(each.op) for each in op.inputs
    )
