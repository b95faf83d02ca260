"""Ids of any kind as bags: the one form that lookups and updates work on.

A bag is the set of ids that become one output vector. Dense ids are bags of one
id each; a row of ragged or sparse ids is a bag; each position of a sequence is
a bag of one id or none.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.ops import hashed_rows
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.id_range import (
    checking_kernels,
    require_valid,
    require_valid_in_kernel,
    valid,
)
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.parsed_ids import (
    Constants,
    ParsedIds,
    bag_of_id,
    bag_sizes,
    map_bag_sizes,
    parse_ids,
)
from tfrs_embed.ops.validity import Validity, make_validities
from tfrs_embed.strategies import in_xla


def id_dtype(table: TableSpec) -> tf.DType:
    """The smallest of int32 and int64 that holds a table's ids."""
    large = table.keys is not None or table.vocabulary_size > tf.int32.max
    return tf.int64 if large else tf.int32


class BaggedIds(NamedTuple):
    """A feature's ids, grouped into the vectors that they become.

    Bag b's vector is scale[b] * sum over its ids i of weights[i] * row(ids[i]).

    Attributes:
        ids: [n] int32 or int64, each inside the table, or what `validity` says.
        bag_ids: [n] int32, the bag of each id, ascending; None: `splits` says
            it, or every bag has the same number of ids.
        weights: [n] float32, or None for ones.
        scale: [count] float32, or None for ones.
        count: scalar int32, the number of bags.
        shape: [rank] int32, the output's shape without the embedding dim; its
            product is count.
        static_shape: what is known of `shape` when tracing.
        lengths: [k], if every bag has k ids; [None], if they differ. Not an
            integer, which Keras would make a tensor of.
        validity: inside XLA, which ids are in the table; the others are
            vocabulary_size, just beyond it. None: all are.
        splits: [count + 1] int32, where each bag begins and the last ends, if
            that is how they were given. The kernels need no `bag_ids` then,
            which take longer to trace than all else of a feature.
        most: [k], if no bag can have more than k ids; [None]: not known.
    """

    ids: tf.Tensor
    bag_ids: tf.Tensor | None
    weights: tf.Tensor | None
    scale: tf.Tensor | None
    count: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    lengths: tf.TensorShape = tf.TensorShape([1])
    validity: Validity | None = None
    splits: tf.Tensor | None = None
    most: tf.TensorShape = tf.TensorShape([None])

    @classmethod
    def of_rows(
        cls, ids: tf.Tensor, bag: tf.Tensor | None, count: tf.Tensor
    ) -> BaggedIds:
        """Bags of one id each, or none."""
        return cls(
            ids,
            bag,
            None,
            None,
            count,
            count[None],
            tf.TensorShape([None]),
            tf.TensorShape([1 if bag is None else None]),
            most=tf.TensorShape([1]),
        )

    @classmethod
    def none(cls, feature: FeatureSpec) -> BaggedIds:
        """The bags of a feature that a call leaves out: there are none."""
        ids = tf.zeros([0], id_dtype(feature.table))
        # No constant: TensorFlow 2.21 folds the sum by row of constants without
        # elements, in a function that has two of them, into one that fails.
        ids = tf.compat.v1.placeholder_with_default(ids, [None])
        return cls.of_rows(ids, None, tf.size(ids))

    def bag_of_id(self) -> tf.Tensor:
        """Returns [n] int32, the bag of each id."""
        if self.bag_ids is not None:
            return self.bag_ids
        if self.splits is not None:
            return bag_of_id(self.splits)
        return number_evenly(self.count, self.lengths[0])

    def scaled(self, vectors: tf.Tensor) -> tf.Tensor:
        """Vectors, or gradients, [count, dim], by the bags' scales."""
        if self.scale is None:
            return vectors
        return vectors * tf.expand_dims(self.scale, 1)

    @property
    def even(self) -> bool:
        """Whether all bags have the same number of ids."""
        return self.bag_ids is None and self.splits is None

    @property
    def grouping(self) -> tf.Tensor | None:
        """The grouping of the ids in its shortest form: splits, else bags."""
        return self.bag_ids if self.splits is None else self.splits

    @property
    def static_count(self) -> int | None:
        """The number of bags, if it is known when tracing."""
        return self.static_shape.num_elements()

    @property
    def longest(self) -> int | None:
        """The most ids that a bag can have, if it is known."""
        return self.most[0] if self.bag_size is None else self.bag_size

    @property
    def bag_size(self) -> int | None:
        """The number of ids in every bag, or None if they differ."""
        return self.lengths[0] if self.even else None


def number_evenly(count: tf.Tensor, bag_size: int) -> tf.Tensor:
    """The bag of each id, [count * bag_size] int32, of bags of equal size."""
    bags = tf.range(count)
    if bag_size == 1:
        return bags
    # `tf.repeat` takes twice as many operations.
    return tf.reshape(tf.tile(tf.expand_dims(bags, 1), [1, bag_size]), [-1])


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
    module = checking_kernels(_numbered(features, parsed)[1])
    in_kernel = module and invalid_ids == "error" and consensus is None
    if not in_kernel:
        for each in parsed:
            each.flatten()
        if invalid_ids == "error":
            require_valid(*_numbered(features, parsed), checks, training)
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
    if in_kernel:
        numbered = _numbered(features, parsed)
        require_valid_in_kernel(module, *numbered, training)
        valid_ids = [each.ids for each in numbered[1]]
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


def position_mask(bags: BaggedIds) -> tf.Tensor:
    """Tells which of a sequence's positions hold an id.

    Args:
        bags: bags of one id each, or none.

    Returns:
        bool, in the bags' shape.
    """
    mask = None if bags.validity is None else bags.validity.mask
    if bags.even:
        flat = tf.fill(bags.count[None], True) if mask is None else mask
    else:
        if mask is None:
            mask = tf.fill(tf.shape(bags.ids), True)
        ids = tf.cast(mask, tf.int32)
        flat = (
            tf.math.unsorted_segment_sum(ids, bags.bag_of_id(), bags.count) > 0
        )
    return tf.ensure_shape(tf.reshape(flat, bags.shape), bags.static_shape)


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
    in_kernels = kernels.operations(None, training=True)
    if splits is not None and (not in_kernels or weights is not None):
        # Once for all that needs it.
        bag = bag_of_id(splits, tf.size(ids), layouts.constants)
    if ids.dtype != tf.int64 or not in_kernels:
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
