"""Ids of any kind to bags: parsed, validated, and grouped."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops import backend, hashed_rows
from tfrs_embed.ops.bags import (
    BaggedIds,
    Constants,
    bag_of_id,
    bag_sizes,
    id_dtype,
    map_bag_sizes,
    of_one_dtype,
)
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.id_range import Row, outside, valid
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.parsed_ids import ParsedIds, parse_ids
from tfrs_embed.ops.validity import Validity, make_validities
from tfrs_embed.strategies import in_tpu_replica, in_xla


def to_bags(
    features: Sequence[FeatureSpec],
    ids: Sequence[Any],
    weights: Sequence[Any],
    invalid_ids: str = "error",
    consensus: Consensus | None = None,
    training: bool = False,
    input_shapes: Sequence[InputShape | None] | None = None,
) -> list[BaggedIds]:
    """Turns a call's ids into bags.

    Args:
        features: the features.
        ids: each feature's ids, of any integer dtype, or strings if they are
            hashed: a Tensor (or what converts to one) of any rank, a
            RaggedTensor of rank 2, or a SparseTensor of rank 2 in row-major
            order.
        weights: each feature's weights, or None: of the same kind and shape as
            its ids, with the same row splits or indices.
        invalid_ids: "error", or "zero" to leave out ids that are not in
            [0, vocabulary_size).
        consensus: the replicas that must all have valid features; None: this
            call stands alone.
        training: whether this is part of a training step.
        input_shapes: the shape that each feature's ids must have, or None.

    Returns:
        The bags of each feature's `bagged` features, one feature after the
        other. Those of a traced function exist only if all are valid.

    Raises:
        TypeError: ids or weights of a wrong dtype or kind.
        ValueError: ids or weights of a wrong rank or static shape.
        tf.errors.InvalidArgumentError: values that are wrong, raised at once
            when executing eagerly, else by the running graph; see
            `tfrs_embed.ops.xla` for functions that XLA compiles.
        NotImplementedError: ragged or sparse ids, or a consensus, inside XLA.
    """
    checks = Checks(consensus)
    layouts = _Layouts()
    parsed = []
    for feature, feature_ids, feature_weights, input_shape in zip(
        features,
        ids,
        weights,
        input_shapes or [None] * len(features),
        strict=True,
    ):
        if input_shape is not None:
            input_shape.require(feature, feature_ids, checks)
        each = parse_ids(feature, feature_ids, feature_weights, checks)
        if input_shape is not None and each.combine:
            each.most = input_shape.width
        parsed += hashed_rows.parts(feature, each, invalid_ids, checks)
    features = [each for feature in features for each in feature.bagged]
    if in_xla():
        for each in parsed:
            each.flatten()
        inside = [
            valid(
                each.ids,
                tf.int32.max if each.places else feature.table.vocabulary_size,
            )
            for feature, each in zip(features, parsed, strict=True)
        ]
        validity = make_validities(inside, checks.hold(), invalid_ids)
        return [
            _finish(feature, each, layouts, invalid_ids, of_feature)
            for feature, each, of_feature in zip(
                features, parsed, validity, strict=True
            )
        ]
    operations = backend.of(None, training)
    numbers = _numbered(features, parsed)
    at_once = (
        operations.checks_ids
        and invalid_ids == "error"
        and consensus is None
        and bool(numbers[1])
        and _together(numbers[1])
    )
    if not at_once:
        for each in parsed:
            each.flatten()
        if invalid_ids == "error":
            require_valid(*numbers, checks, training)
    if consensus is None:
        _guard(parsed, checks, [])
    else:
        early = consensus.prepare(
            features,
            [
                _finish(feature, each.without_weights(), layouts, invalid_ids)
                for feature, each in zip(features, parsed, strict=True)
            ],
            [each.weights is not None for each in parsed],
        )
        consensus.prepared(_guard(parsed, checks, early))
    if at_once:
        valid_ids = operations.require(
            numbers[0], of_one_dtype([each.ids for each in numbers[1]])
        )
        for each, of_feature in zip(numbers[1], valid_ids, strict=True):
            each.ids = of_feature
        for feature, each in zip(features, parsed, strict=True):
            if not _is_number(feature, each):
                # No key counts in a step that a bad id of another table fails,
                # and no row of a hashed id is read.
                with tf.control_dependencies(valid_ids):
                    each.ids = tf.reshape(each.ids, [-1])
    layouts.prepare_scales(
        [
            (each.splits, feature.table.combiner)
            for feature, each in zip(features, parsed, strict=True)
            if each.splits is not None
            and each.weights is None
            and not _drops(each, invalid_ids)
        ]
    )
    return [
        _finish(feature, each, layouts, invalid_ids)
        for feature, each in zip(features, parsed, strict=True)
    ]


def lookup_bags(
    features: Sequence[FeatureSpec], bags: Sequence[BaggedIds]
) -> list[BaggedIds]:
    """The bags of the features' lookups, one feature after the other.

    Args:
        features: the features.
        bags: what `to_bags` returned for them.
    """
    bagged = [(f, each) for f in features for each in f.bagged]
    return [
        b
        for (feature, each), b in zip(bagged, bags, strict=True)
        if each in feature.lookups
    ]


def first_bags(
    features: Sequence[FeatureSpec], bags: Sequence[BaggedIds]
) -> list[BaggedIds]:
    """The bags that each feature's activations are laid out by.

    Args:
        features: the features.
        bags: what `to_bags` returned for them.
    """
    numbers = itertools.accumulate(
        (len(feature.bagged) for feature in features), initial=0
    )
    return [bags[i] for i, _ in zip(numbers, features, strict=False)]


def _numbered(
    features: Sequence[FeatureSpec], parsed: Sequence[ParsedIds]
) -> tuple[list[FeatureSpec], list[ParsedIds]]:
    """The features whose ids are numbers of rows, and their parsed ids."""
    pairs = [
        (f, each)
        for f, each in zip(features, parsed, strict=True)
        if _is_number(f, each)
    ]
    return [f for f, _ in pairs], [each for _, each in pairs]


def _is_number(feature: FeatureSpec, parsed: ParsedIds) -> bool:
    """Whether the user's ids are numbers of rows, which have to be checked."""
    return feature.table.keys is None and parsed.drops is None


def _guard(
    parsed: Sequence[ParsedIds], checks: Checks, others: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Guards the parsed ids' tensors by all conditions, and returns others."""
    names = ("ids", "bag_ids", "weights", "shape", "kept", "splits")
    places = [
        (each, name)
        for each in parsed
        for name in names
        if tf.is_tensor(getattr(each, name))
    ]
    guarded = checks.guard([*(getattr(*place) for place in places), *others])
    for (each, name), tensor in zip(places, guarded, strict=False):
        setattr(each, name, tensor)
    return guarded[len(places) :]


class _Layouts:
    """The shapes that bags are laid out in, as tensors, each made once.

    On TPUs each use has its own, as of constants.

    Attributes:
        constants: those of the call.
    """

    def __init__(self) -> None:
        self.constants = Constants()
        self._known: dict[tuple[int, ...], tuple[tf.Tensor, tf.Tensor]] = {}
        self._scales: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}
        self._scales_of_splits: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}

    def of(self, shape: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """A shape, [rank] int32, and the number of its bags, a scalar.

        Args:
            shape: a list of integers, or a tensor.
        """
        if not isinstance(shape, list):
            shape = tf.cast(shape, tf.int32)
            if shape.shape == [1]:
                return shape, tf.squeeze(shape)
            return shape, tf.reduce_prod(shape)
        key = tuple(shape)
        if key not in self._known or not self.constants.shared:
            self._known[key] = (
                tf.constant(shape, tf.int32, [len(shape)]),
                tf.constant(math.prod(shape)),
            )
        return self._known[key]

    def scale(
        self, count: tf.Tensor, bag_size: int, combiner: str
    ) -> tf.Tensor:
        """The scales, [count] float32, of bags of so many ids of weight 1."""
        key = (id(count), bag_size, combiner)
        if key not in self._scales or not self.constants.shared:
            total = np.float32(bag_size)
            total = np.sqrt(total) if combiner == "sqrtn" else total
            scale = tf.fill([count], np.float32(1.0) / total)
            # With its count, whose identity is then no other tensor's.
            self._scales[key] = count, scale
        return self._scales[key][1]

    def prepare_scales(self, features: Sequence[tuple[tf.Tensor, str]]) -> None:
        """Computes the scales of several features' bags at once.

        Args:
            features: each one's splits, [count + 1] int32, and its combiner.
        """
        if not self.constants.shared:
            return
        for combiner in ("mean", "sqrtn"):
            splits = [each for each, c in features if c == combiner]
            if len(splits) < 2:
                continue
            found = map_bag_sizes(
                functools.partial(_scale_of_sizes, combiner), splits
            )
            for each, scale in zip(splits, found, strict=True):
                static = each.shape[0]
                scale.set_shape([None if static is None else static - 1])
                self._scales_of_splits[id(each), combiner] = each, scale

    def scale_of_splits(self, splits: tf.Tensor, combiner: str) -> tf.Tensor:
        """The scales, [count] float32, of bags of ids of weight 1."""
        known = self._scales_of_splits.get((id(splits), combiner))
        if known is not None:
            return known[1]
        sizes = tf.cast(bag_sizes(splits, self.constants), tf.float32)
        return _inverse(combiner, sizes)


def _drops(parsed: ParsedIds, invalid_ids: str) -> bool:
    """Whether ids may be left out of their bags."""
    return invalid_ids == "zero" if parsed.drops is None else parsed.drops


def _finish(
    feature: FeatureSpec,
    parsed: ParsedIds,
    layouts: _Layouts,
    invalid_ids: str,
    validity: Validity | None = None,
) -> BaggedIds:
    ids, bag, weights = parsed.ids, parsed.bag_ids, parsed.weights
    splits = parsed.splits
    if parsed.kept is not None:
        weights = tf.gather(weights, parsed.kept)
    shape, count = layouts.of(parsed.shape)
    bag_size = parsed.bag_size if parsed.even else None
    combiner = feature.table.combiner
    vocabulary_size = feature.table.vocabulary_size
    combine = parsed.combine
    drops = _drops(parsed, invalid_ids)
    if feature.table.keys is not None or not drops:
        pass  # Every key, and every hashed id, is one.
    elif validity is not None:
        weights = validity.weights(weights, combine)
    else:
        # An id that is left out leaves its bag empty, which is a zero vector.
        inside = ids >= 0 if parsed.drops else valid(ids, vocabulary_size)
        kept = tf.where(inside)[:, 0]
        bag = (
            tf.cast(kept // bag_size, tf.int32)
            if parsed.even
            else tf.gather(parsed.bag_of_id(), kept)
        )
        bag_size = splits = None
        ids = tf.gather(ids, kept)
        weights = None if weights is None else tf.gather(weights, kept)
    compiled = backend.of(None, training=True).compiled
    if splits is not None and (not compiled or weights is not None):
        # Once for all that needs it.
        bag = bag_of_id(splits, tf.size(ids), layouts.constants)
    if ids.dtype != tf.int64 or not compiled:
        # TensorFlow's operations are faster on int32.
        ids = tf.cast(ids, id_dtype(feature.table))
    if validity is not None:
        beyond = 0 if parsed.places else vocabulary_size
        ids = tf.where(validity.mask, ids, beyond)
    if combiner == "sum" or (
        # One id of weight 1: every combiner gives the row itself.
        weights is None and (not combine or bag_size == 1)
    ):
        scale = None
    elif weights is None and bag_size is not None:
        scale = layouts.scale(count, bag_size, combiner)
    elif weights is None and splits is not None:
        scale = layouts.scale_of_splits(splits, combiner)
    else:
        scale = _scale(combiner, bag, bag_size, weights, count)
    return BaggedIds(
        ids,
        bag,
        weights,
        scale,
        count,
        shape,
        parsed.static_shape,
        tf.TensorShape([bag_size]),
        validity,
        splits,
        tf.TensorShape([parsed.most if parsed.combine else 1]),
    )


def _scale(
    combiner: str,
    bag: tf.Tensor | None,
    bag_size: int | None,
    weights: tf.Tensor | None,
    count: tf.Tensor,
) -> tf.Tensor:
    """The factor of a bag's weighted sum; 0 for a zero total."""
    if weights is not None:
        terms = weights if combiner == "mean" else tf.square(weights)
    else:
        terms = tf.ones(tf.shape(bag), tf.float32)
    total = (
        tf.reduce_sum(tf.reshape(terms, [count, bag_size]), 1)
        if bag is None
        else tf.math.unsorted_segment_sum(terms, bag, count)
    )
    return _inverse(combiner, total)


def _scale_of_sizes(combiner: str, sizes: tf.Tensor) -> tf.Tensor:
    """The factor of bags of so many ids of weight 1."""
    return _inverse(combiner, tf.cast(tf.maximum(sizes, 0), tf.float32))


def _inverse(combiner: str, total: tf.Tensor) -> tf.Tensor:
    """The factor of sums whose (squared) weights have these totals."""
    if combiner == "sqrtn":
        total = tf.sqrt(total)
    return tf.math.divide_no_nan(1.0, total)


def require_valid(
    features: Sequence[FeatureSpec],
    parsed: Sequence[ParsedIds],
    checks: Checks,
    training: bool,
) -> None:
    """Adds the conditions that all ids are in their features' tables.

    Args:
        features: the features.
        parsed: their ids.
        checks: takes the conditions.
        training: whether this is part of a training step.
    """
    # TensorFlow's bridge for TPUs leaves the constants of the row's text behind
    # when it moves a check to the host.
    if len(features) < 2 or in_tpu_replica() or not _together(parsed):
        for feature, each in zip(features, parsed, strict=True):
            size = feature.table.vocabulary_size
            checks.require(
                tf.reduce_all(valid(each.ids, size)),
                functools.partial(outside, feature, each.ids),
            )
        return
    row = Row(features, [each.ids for each in parsed])
    checks.require_all(backend.of(None, training).inside(row), row.message)


def _together(parsed: Sequence[ParsedIds]) -> bool:
    """Whether features' ids can be checked by operations for all of them."""
    # Eagerly it is one condition after the other, as they are found.
    return not tf.executing_eagerly() and all(
        each.ids.dtype in (tf.int32, tf.int64) for each in parsed
    )
