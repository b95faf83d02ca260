"""Conditions on the values of tensors, checked before anything depends on them.

A condition that only the running graph can decide is collected here with a
function that words the error. All of a call's conditions are then checked by
one branch, which costs a few reductions when all is well, and every tensor of
the call is made to wait for it: when one feature is bad, no table is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def message(*parts: Any) -> tf.Tensor:
    """Joins strings and tensors into the text of an error.

    Args:
        *parts: strings, and tensors that are printed as `tf.print` does.

    Returns:
        A scalar string tensor.
    """
    return tf.strings.join(
        [
            part if isinstance(part, str) else tf.strings.format("{}", part)
            for part in parts
        ]
    )


def first(values: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
    """Returns the first of the values that `where` marks; if none, zeros."""
    return tf.reduce_sum(tf.gather_nd(values, tf.where(where)[:1]), 0)


class Checks:
    """Collects a call's conditions."""

    def __init__(self) -> None:
        self._checks: list[tuple[tf.Tensor, Callable[[], tf.Tensor]]] = []

    def require(self, ok: tf.Tensor, text: Callable[[], tf.Tensor]) -> None:
        """Adds a condition.

        Args:
            ok: a scalar bool tensor.
            text: called where any condition failed, this one or another;
                returns the error's text, as `message` makes it.

        Raises:
            tf.errors.InvalidArgumentError: when executing eagerly, at once.
        """
        if not tf.executing_eagerly():
            self._checks.append((ok, text))
        elif not bool(ok):
            raise tf.errors.InvalidArgumentError(
                None, None, text().numpy().decode()
            )

    def guard(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, which now exist only if all conditions hold."""
        if not self._checks:
            return list(tensors)

        oks = tf.stack([ok for ok, _ in self._checks])

        def fail() -> list[tf.Tensor]:
            texts = tf.stack([text() for _, text in self._checks])
            failed = tf.debugging.Assert(
                False, [tf.boolean_mask(texts, ~oks)[0]]
            )
            with tf.control_dependencies([failed]):
                return [tf.zeros([0] * t.shape.rank, t.dtype) for t in tensors]

        # The tensors go through the branch, not just beside it: Grappler
        # assumes that all operations succeed, so that it would take a shape
        # that a later one demands for known, and the check for true.
        guarded = tf.cond(
            tf.reduce_all(oks), lambda: [tf.identity(t) for t in tensors], fail
        )
        for after, before in zip(guarded, tensors, strict=True):
            after.set_shape(before.shape)
        return guarded
