"""Validity of ids where nothing can raise: inside XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Validity(NamedTuple):
    """The validity of a feature's ids, where nothing can raise.

    Attributes:
        mask: [n] bool, the ids that are in the table.
        all_valid: scalar bool, the same for all features of a call: whether it
            may be trained on. If not, ids outside are NaN, else zero.
    """

    mask: tf.Tensor
    all_valid: tf.Tensor

    def weights(
        self, weights: tf.Tensor | None, combined: bool
    ) -> tf.Tensor | None:
        """Weights, [n] float32 or None for ones, without those of absent ids.

        Args:
            weights: the weights.
            combined: whether a vector may be made of several ids.

        Returns:
            The weights, zero for ids that aren't there; None if no sum has a
            use for that.
        """
        if weights is not None:
            return tf.where(self.mask, weights, 0.0)
        return tf.cast(self.mask, tf.float32) if combined else None


def make_validities(
    inside: Sequence[tf.Tensor], shapes_fit: tf.Tensor, invalid_ids: str
) -> list[Validity]:
    """Says which of a call's ids are valid.

    Args:
        inside: each feature's [n] bool: whether an id is in the table.
        shapes_fit: scalar bool; if not, no id of the call is used.
        invalid_ids: "error", or "zero" if ids outside are to be absent.

    Returns:
        Each feature's validity.
    """
    all_valid = shapes_fit
    if invalid_ids == "error":
        all_valid = tf.reduce_all(
            [all_valid, *(tf.reduce_all(i) for i in inside)]
        )
    return [Validity(i & shapes_fit, all_valid) for i in inside]
