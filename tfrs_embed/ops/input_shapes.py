"""Declared shapes of ids, and the check that a call's ids have them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.checks import Checks, message


@dataclasses.dataclass(frozen=True)
class InputShape:
    """A feature's declared shape of ids: `[batch, ..., width]`, or `[batch]`.

    A batch may be smaller, as the last of an epoch is. Rows of ragged and
    sparse ids may be shorter than the width. With width 1 or none, `[batch]`
    and `[batch, 1]` are both accepted.

    Attributes:
        shape: the shape for one call, None for any size.
    """

    shape: tuple[int | None, ...]

    @property
    def width(self) -> int | None:
        """The most ids of a row of ragged or sparse ids."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def require(self, feature: FeatureSpec, ids: Any, checks: Checks) -> None:
        """Requires ids to have the shape.

        A shape that is known when tracing and impossible is a ValueError;
        `checks` takes conditions on unknown sizes.
        """
        rank = ids.shape.rank
        if rank is None:
            return
        rows = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
        wanted = self._of_rank(rank, rows)
        fits, open_sizes = wanted is not None, []
        for i, limit in enumerate(wanted or ()):
            size = ids.shape[i]
            less = i == 0 or (rows and i == rank - 1)
            if limit is not None and size is None:
                open_sizes.append((i, limit, less))
            elif limit is not None:
                fits &= size <= limit if less else size == limit
        if not fits:
            raise ValueError(
                f"{feature}: ids of shape {ids.shape.as_list()}, but "
                f"{self._describe()}."
            )
        if not open_sizes:
            return
        if isinstance(ids, tf.RaggedTensor):
            longest = tf.reduce_max(tf.pad(ids.row_lengths(), [[0, 1]]))
            shape = tf.stack([ids.nrows(), longest])
        elif isinstance(ids, tf.SparseTensor):
            shape = ids.dense_shape
        else:
            shape = tf.shape(ids, tf.int64)
        for i, limit, less in open_sizes:
            size = tf.cast(shape[i], tf.int64)
            checks.require(
                size <= limit if less else tf.equal(size, limit),
                lambda: message(
                    f"{feature}: ids of shape ",
                    shape,
                    f", but {self._describe()}.",
                ),
            )

    def _of_rank(self, rank: int, rows: bool) -> tuple[int | None, ...] | None:
        """The declared shape in `rank` dimensions; None: impossible."""
        shape = self.shape
        if len(shape) == rank:
            return shape
        if rows and rank == 2 and len(shape) > 2:
            # As many rows as there are bags.
            *outer, width = shape
            known = [size for size in outer if size is not None]
            count = math.prod(known) if len(known) == len(outer) else None
            return count, width
        if len(shape) == rank + 1 and shape[-1] in (1, None):
            return shape[:-1]
        if len(shape) + 1 == rank and rank == 2:
            return (*shape, 1)
        return None

    def _describe(self) -> str:
        return (
            f"input_shape is {list(self.shape)} here, and only a batch, and "
            "rows of ragged or sparse ids, may be less; None in its place "
            "takes any size"
        )
