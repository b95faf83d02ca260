"""Ids of any kind as bags: the one form that lookups and updates work on.

A bag is the set of ids that become one output vector. Dense ids are bags of one
id each; a row of ragged or sparse ids is a bag; each position of a sequence is
a bag of one id or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.id_range import (
    checking_kernels,
    require_valid,
    require_valid_in_kernel,
    valid,
)
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.parsed_ids import ParsedIds, bag_of_id, parse_ids
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
        bag_ids: [n] int32, the bag of each id, ascending; None: every bag has
            the same number of ids.
        weights: [n] float32, or None for ones.
        scale: [count] float32, or None for ones.
        count: scalar int32, the number of bags.
        shape: [rank] int32, the output's shape without the embedding dim; its
            product is count.
        static_shape: what is known of `shape` when tracing.
        lengths: [k], if every bag has k ids; [None], if `bag_ids` says it. Not
            an integer, which Keras would make a tensor of.
        validity: inside XLA, which ids are in the table; the others are
            vocabulary_size, just beyond it. None: all are.
        splits: [count + 1] int32, where each bag begins and the last ends, if
            that is how they were given. It says what `bag_ids` says, which is
            not computed in a graph where nothing needs it.
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
        bags = tf.range(self.count)
        return bags if self.bag_size == 1 else tf.repeat(bags, self.bag_size)

    def scaled(self, vectors: tf.Tensor) -> tf.Tensor:
        """Vectors, or gradients, [count, dim], by the bags' scales."""
        return vectors if self.scale is None else vectors * self.scale[:, None]

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
        """The number of ids in every bag, or None if `bag_ids` says it."""
        return None if self.bag_ids is not None else self.lengths[0]


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
        ids: each feature's ids, of any integer dtype: a Tensor (or what
            converts to one) of any rank, a RaggedTensor of rank 2, or a
            SparseTensor of rank 2 in row-major order.
        weights: each feature's weights, or None: of the same kind and shape as
            its ids, with the same row splits or indices.
        invalid_ids: "error", or "zero" to leave out ids that are not in
            [0, vocabulary_size).
        consensus: the replicas that must all have valid features; None: this
            call stands alone.
        training: whether this is part of a training step.
        input_shapes: the shape that each feature's ids must have, or None.

    Returns:
        The bags of each feature. Those of a traced function exist only if all
        features are valid.

    Raises:
        TypeError: ids or weights of a wrong dtype or kind.
        ValueError: ids or weights of a wrong rank or static shape.
        tf.errors.InvalidArgumentError: values that are wrong, raised at once
            when executing eagerly, else by the running graph; see
            `tfrs_embed.ops.xla` for functions that XLA compiles.
        NotImplementedError: ragged or sparse ids, or a consensus, inside XLA.
    """
    checks = Checks(consensus)
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
        parsed.append(each)
    if in_xla():
        for each in parsed:
            each.flatten()
        inside = [
            valid(each.ids, feature.table.vocabulary_size)
            for feature, each in zip(features, parsed, strict=True)
        ]
        validity = make_validities(inside, checks.hold(), invalid_ids)
        return [
            _finish(feature, each, invalid_ids, of_feature)
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
                _finish(feature, each.without_weights(), invalid_ids)
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
            if feature.table.keys is not None:
                # No key counts in a step that a bad id of another table fails.
                with tf.control_dependencies(valid_ids):
                    each.ids = tf.reshape(each.ids, [-1])
    return [
        _finish(feature, each, invalid_ids)
        for feature, each in zip(features, parsed, strict=True)
    ]


def _numbered(
    features: Sequence[FeatureSpec], parsed: Sequence[ParsedIds]
) -> tuple[list[FeatureSpec], list[ParsedIds]]:
    """The features whose ids are numbers of rows, and their parsed ids."""
    pairs = [
        (f, each)
        for f, each in zip(features, parsed, strict=True)
        if f.table.keys is None
    ]
    return [f for f, _ in pairs], [each for _, each in pairs]


def position_mask(bags: BaggedIds) -> tf.Tensor:
    """Tells which of a sequence's positions hold an id.

    Args:
        bags: bags of one id each, or none.

    Returns:
        bool, in the bags' shape.
    """
    mask = None if bags.validity is None else bags.validity.mask
    if bags.bag_ids is None:
        flat = tf.fill(bags.count[None], True) if mask is None else mask
    else:
        if mask is None:
            mask = tf.fill(tf.shape(bags.bag_ids), True)
        ids = tf.cast(mask, tf.int32)
        flat = tf.math.unsorted_segment_sum(ids, bags.bag_ids, bags.count) > 0
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
        and not (name == "bag_ids" and each.splits is not None)
    ]
    guarded = checks.guard([*(getattr(*place) for place in places), *others])
    for (each, name), tensor in zip(places, guarded, strict=False):
        if name == "splits" and tensor is not each.splits:
            each.bag_ids = bag_of_id(tensor)
        setattr(each, name, tensor)
    return guarded[len(places) :]


def _finish(
    feature: FeatureSpec,
    parsed: ParsedIds,
    invalid_ids: str,
    validity: Validity | None = None,
) -> BaggedIds:
    ids, bag, weights = parsed.ids, parsed.bag_ids, parsed.weights
    splits = parsed.splits
    if parsed.kept is not None:
        weights = tf.gather(weights, parsed.kept)
    shape = tf.cast(parsed.shape, tf.int32)
    count = (
        tf.constant(math.prod(parsed.shape))
        if isinstance(parsed.shape, list)
        else tf.reduce_prod(shape)
    )
    bag_size = parsed.bag_size if bag is None else None
    combiner = feature.table.combiner
    vocabulary_size = feature.table.vocabulary_size
    combine = parsed.combine
    if feature.table.keys is not None:
        pass  # Every key is one.
    elif invalid_ids == "zero" and validity is not None:
        weights = validity.weights(weights, combine)
    elif invalid_ids == "zero":
        # An id that is left out leaves its bag empty, which is a zero vector.
        kept = tf.where(valid(ids, vocabulary_size))[:, 0]
        bag = (
            tf.cast(kept // bag_size, tf.int32)
            if bag is None
            else tf.gather(bag, kept)
        )
        bag_size = splits = None
        ids = tf.gather(ids, kept)
        weights = None if weights is None else tf.gather(weights, kept)
    if ids.dtype != tf.int64 or not kernels.operations(None, training=True):
        # TensorFlow's operations are faster on int32.
        ids = tf.cast(ids, id_dtype(feature.table))
    if validity is not None:
        ids = tf.where(validity.mask, ids, vocabulary_size)
    if weights is None and (not combine or bag_size == 1):
        # One id of weight 1: every combiner gives the row itself.
        scale = None
    else:
        scale = _scale(combiner, bag, splits, bag_size, weights, count)
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
    splits: tf.Tensor | None,
    bag_size: int | None,
    weights: tf.Tensor | None,
    count: tf.Tensor,
) -> tf.Tensor | None:
    """The factor of a bag's weighted sum; 0 for a zero total."""
    if combiner == "sum":
        return None
    if weights is None and splits is not None:
        total = tf.cast(splits[1:] - splits[:-1], tf.float32)
    else:
        if weights is not None:
            terms = weights if combiner == "mean" else tf.square(weights)
        elif bag is not None:
            terms = tf.ones(tf.shape(bag), tf.float32)
        else:
            terms = tf.ones([count * bag_size], tf.float32)
        total = (
            tf.reduce_sum(tf.reshape(terms, [count, bag_size]), 1)
            if bag is None
            else tf.math.unsorted_segment_sum(terms, bag, count)
        )
    if combiner == "sqrtn":
        total = tf.sqrt(total)
    return tf.math.divide_no_nan(1.0, total)
