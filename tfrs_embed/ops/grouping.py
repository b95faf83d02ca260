"""Groups valid ids into bags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import (
    BaggedIds,
    bag_of_id,
    bags_of_ids,
    id_dtype,
    is_recorded,
    map_bag_sizes,
    share_operations,
)
from tfrs_embed.ops.parsed_ids import ParsedIds


def group(
    parsed: Sequence[ParsedIds], layouts: Layouts, bare: bool = False
) -> list[BaggedIds]:
    """Groups a call's ids into bags without the absent ids.

    With `bare`, weights and scales are left out.
    """
    scales = {} if bare else _scales_of_splits(parsed, layouts.shared)
    bags = _bags_of_splits(parsed, layouts, bare)
    return [
        _group(each, layouts, bare, scales.get(i), bags.get(i))
        for i, each in enumerate(parsed)
    ]


def _bags_of_splits(
    parsed: Sequence[ParsedIds], layouts: Layouts, bare: bool
) -> dict[int, tf.Tensor]:
    """Returns each id's bag, [n] int32, where operations need it.

    The keys are the ids' positions in `parsed`.
    """
    compiled = backend.operations(None, training=True).compiled
    places = [
        i
        for i, each in enumerate(parsed)
        if each.splits is not None
        and not each.may_be_absent
        and (not compiled or (each.weights is not None and not bare))
    ]
    ids = [parsed[i].ids for i in places]
    splits: list[Any] = [parsed[i].splits for i in places]
    if layouts.shared and len(places) > 1:
        return dict(zip(places, bags_of_ids(splits, ids), strict=True))
    return {
        place: bag_of_id(each, tf.size(its_ids))
        for place, each, its_ids in zip(places, splits, ids, strict=True)
    }


def _scales_of_splits(
    parsed: Sequence[ParsedIds], together: bool
) -> dict[int, tf.Tensor]:
    """Returns scales, [count] float32, of unweighted bags given by splits.

    The keys are the ids' positions in `parsed`. With `together` features share
    operations.
    """
    found = {}
    for combiner in ("mean", "sqrtn"):
        places = [
            i
            for i, each in enumerate(parsed)
            if each.feature.table.combiner == combiner
            and each.splits is not None
            and each.weights is None
            and each.max_bag_size != 1
            and not each.may_be_absent
        ]

        def scale(sizes: tf.Tensor, combiner: str = combiner) -> tf.Tensor:
            total = tf.cast(tf.maximum(sizes, 0), tf.float32)
            return _inverse(combiner, total)

        for group in [places] if together else [[i] for i in places]:
            splits: list[Any] = [parsed[i].splits for i in group]
            for i, scales in zip(
                group, map_bag_sizes(scale, splits), strict=True
            ):
                scales.set_shape([parsed[i].static_shape.num_elements()])
                found[i] = scales
    return found


def _group(
    parsed: ParsedIds,
    layouts: Layouts,
    bare: bool,
    scale: tf.Tensor | None,
    bag: tf.Tensor | None,
) -> BaggedIds:
    """Groups a feature's ids; `bag` is each id's if the splits are given."""
    ids = parsed.ids
    bag = parsed.bag_ids if bag is None else bag
    weights = None if bare else parsed.weights
    splits = parsed.splits
    if weights is not None and parsed.kept is not None:
        weights = tf.gather(weights, parsed.kept)
    shape, count = layouts.layout(parsed.shape)
    bag_size, even = parsed.max_bag_size, parsed.even
    table = parsed.feature.table
    if parsed.all_valid is not None:
        if parsed.may_be_absent and (weights is not None or bag_size != 1):
            there = ids < ids.dtype.max
            weights = tf.cast(there, tf.float32) if weights is None else weights
            weights = tf.where(there, weights, 0.0)
    elif parsed.may_be_absent:
        # A bag without ids gives a zero vector.
        kept = tf.where(parsed.present())[:, 0]
        if even:
            bag = tf.cast(kept // bag_size, tf.int32)
        else:
            bag = bag_of_id(splits) if bag is None else bag
            bag = tf.gather(bag, kept)
        even, splits = False, None
        ids = tf.gather(ids, kept)
        weights = None if weights is None else tf.gather(weights, kept)
    if ids.dtype != lookup_dtype(parsed):
        ids = tf.cast(ids, lookup_dtype(parsed))
    # One id of weight 1: every combiner gives the row itself. A weight
    # multiplies the row of an id that isn't combined.
    alone = weights is None or not parsed.combined
    single = alone and bag_size == 1
    if table.combiner == "sum" or single or bare:
        scale = None
    elif scale is not None:
        pass
    elif weights is None and even:
        assert bag_size is not None
        scale = layouts.scale(count, bag_size, table.combiner)
    else:
        size = bag_size if even else None
        scale = _scale(table.combiner, bag, size, weights, count)
    return BaggedIds(
        ids,
        bag,
        weights,
        scale,
        count,
        shape,
        parsed.static_shape,
        tf.TensorShape([bag_size]),
        splits,
        parsed.all_valid,
    )


def lookup_dtype(parsed: ParsedIds) -> tf.DType:
    """Returns the dtype of the ids that operations take, int32 or int64."""
    compiled = backend.operations(None, training=True).compiled
    if parsed.ids.dtype == tf.int64 and compiled:
        return tf.int64
    # TensorFlow's operations are faster on int32.
    return id_dtype(parsed.feature.table)


class Layouts:
    """A call's layouts and scales, each made once.

    Attributes:
        shared: whether features share them and other operations.
    """

    def __init__(self) -> None:
        self.shared = share_operations()
        self._known: dict[Any, tf.Tensor] = {}

    def layout(self, shape: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a list or tensor as layout, [rank] int32, and bag count."""
        if not isinstance(shape, list):
            shape = tf.cast(shape, tf.int32)
            if shape.shape == [1]:
                return shape, tf.squeeze(shape)
            return shape, tf.reduce_prod(shape)
        return self._once(shape), self._once(math.prod(shape))

    def _once(self, value: Any) -> tf.Tensor:
        key = repr(value)
        if key not in self._known or not self.shared:
            self._known[key] = tf.constant(value, tf.int32)
        return self._known[key]

    def scale(
        self, count: tf.Tensor, bag_size: int, combiner: str
    ) -> tf.Tensor:
        """Returns [count] scales of bags of `bag_size` ids without weights."""
        key = (count.ref(), bag_size, combiner)
        if key not in self._known or not self.shared:
            total = np.float32(bag_size)
            total = np.sqrt(total) if combiner == "sqrtn" else total
            self._known[key] = tf.fill([count], np.float32(1.0) / total)
        return self._known[key]


def _scale(
    combiner: str,
    bag: tf.Tensor | None,
    bag_size: int | None,
    weights: tf.Tensor | None,
    count: tf.Tensor,
) -> tf.Tensor:
    """Returns each bag's scale; 0 for a zero total."""
    # Squares of small or large float32 are no float32. TPUs have no float64.
    tpu = is_tpu(tf.distribute.get_strategy())
    wide = tf.float32 if tpu else tf.float64
    if weights is None:
        terms = tf.ones(tf.shape(bag), wide)
    else:
        terms = tf.cast(weights, wide)
        terms = terms if combiner == "mean" else tf.square(terms)
    total = (
        tf.reduce_sum(tf.reshape(terms, [count, bag_size]), 1)
        if bag is None
        else tf.math.unsorted_segment_sum(terms, bag, count)
    )
    return _inverse(combiner, total)


def _inverse(combiner: str, total: tf.Tensor) -> tf.Tensor:
    """Returns scales from the bags' sums of (squared) weights."""
    if combiner == "sqrtn":
        if is_recorded(total):
            # The root of zero has an infinite gradient.
            total = tf.where(total > 0, total, tf.stop_gradient(total))
        total = tf.sqrt(total)
    return tf.math.divide_no_nan(1.0, tf.cast(total, tf.float32))
