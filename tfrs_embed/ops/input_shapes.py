"""Declared shapes of ids: whether a call's ids have them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.checks import Checks, message


@dataclasses.dataclass(frozen=True)
class InputShape:
    """The shape that a feature's ids are declared to have.

    It is `[batch, ..., width]`, or `[batch]`: one id per sample. A batch may be
    smaller, as the last one of an epoch is. Rows of ragged and sparse ids may
    be shorter than the width. Where the width is 1, or there is none, ids may
    be `[batch]` and `[batch, 1]`.

    Attributes:
        shape: the shape, None where any size will do; its batch is that of one
            call.
        strict: whether none of these exceptions is made.
    """

    shape: tuple[int | None, ...]
    strict: bool

    @property
    def width(self) -> int | None:
        """The most ids that a row of ragged or sparse ids may have."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def check_static(
        self, feature: FeatureSpec, shape: tf.TensorShape, rows: bool
    ) -> None:
        """Checks what is known of the shape of ids when tracing.

        Args:
            feature: the feature, for errors.
            shape: the shape.
            rows: whether they are, or may be, ragged or sparse.

        Raises:
            ValueError: the ids can't have the declared shape.
        """
        if shape.rank is None:
            return
        wanted = self._of_rank(shape.rank, rows)
        if wanted is not None:
            below = self._at_most(wanted, rows)
            sizes = zip(shape.as_list(), wanted, below, strict=True)
            if all(self._fits(*each) for each in sizes):
                return
        raise ValueError(
            f"{feature}: ids of shape {shape.as_list()}, but "
            f"{self._describe()}."
        )

    def require(self, feature: FeatureSpec, ids: Any, checks: Checks) -> None:
        """Requires ids to have the shape.

        Args:
            feature: the feature, for errors.
            ids: a Tensor, or a RaggedTensor or SparseTensor of rank 2.
            checks: takes the conditions that depend on values.

        Raises:
            ValueError: the static shape can't be right.
        """
        rows = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
        self.check_static(feature, ids.shape, rows)
        if ids.shape.rank is None:
            return  # An error on all engines.
        wanted = self._of_rank(ids.shape.rank, rows)
        assert wanted is not None
        at_most = self._at_most(wanted, rows)
        shape, known = self._dynamic(ids)
        for i, (limit, below) in enumerate(zip(wanted, at_most, strict=True)):
            if limit is None or known[i] is not None:
                continue
            size = tf.cast(shape[i], tf.int64)
            ok = size <= limit if below else tf.equal(size, limit)
            checks.require(
                ok,
                lambda: tf.strings.join(
                    [
                        f"{feature}: ids of shape [",
                        tf.strings.reduce_join(
                            [tf.strings.as_string(s) for s in shape],
                            separator=", ",
                        ),
                        f"], but {self._describe()}.",
                    ]
                ),
            )
        if isinstance(ids, tf.RaggedTensor) and self.strict and wanted[1]:
            shortest = tf.reduce_min(ids.row_lengths())
            checks.require(
                tf.equal(ids.nrows(), 0) | tf.equal(shortest, wanted[1]),
                lambda: message(
                    f"{feature}: a row of ",
                    shortest,
                    f" ids, but {self._describe()}.",
                ),
            )

    def _of_rank(self, rank: int, rows: bool) -> tuple[int | None, ...] | None:
        """The declared shape as one of this rank, or None: there is none."""
        shape = self.shape
        if len(shape) == rank:
            return shape
        if rows and rank == 2 and len(shape) > 2:
            # As many rows as there are bags.
            *outer, width = shape
            known = [size for size in outer if size is not None]
            count = math.prod(known) if len(known) == len(outer) else None
            return count, width
        if self.strict:
            return None
        if len(shape) == rank + 1 and shape[-1] in (1, None):
            return shape[:-1]
        if len(shape) + 1 == rank and rank == 2:
            return (*shape, 1)
        return None

    def _at_most(
        self, wanted: tuple[int | None, ...], rows: bool
    ) -> list[bool]:
        """The sizes that may be smaller."""
        at_most = [False] * len(wanted)
        if not self.strict and at_most:
            at_most[0] = True
            at_most[-1] = at_most[-1] or rows
        return at_most

    @staticmethod
    def _fits(size: int | None, limit: int | None, at_most: bool) -> bool:
        if size is None or limit is None:
            return True
        return size <= limit if at_most else size == limit

    @staticmethod
    def _dynamic(ids: Any) -> tuple[list[Any], list[int | None]]:
        """The sizes of ids, and what is known of them when tracing."""
        known = ids.shape.as_list()
        if isinstance(ids, tf.RaggedTensor):
            longest = tf.reduce_max(tf.pad(ids.row_lengths(), [[0, 1]]))
            return [ids.nrows(), longest], known
        if isinstance(ids, tf.SparseTensor):
            return tf.unstack(ids.dense_shape, num=2), known
        return tf.unstack(tf.shape(ids), num=len(known)), known

    def _describe(self) -> str:
        smaller = (
            "strict_shapes is set"
            if self.strict
            else "only a batch, and rows of ragged or sparse ids, may be less"
        )
        return (
            f"input_shape is {list(self.shape)} here, and {smaller}; None in "
            "its place takes any size"
        )
