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
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops import compiled
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.ids import (
    Draft,
    bag_of_id,
    checking_kernels,
    make_draft,
    require_valid,
    require_valid_in_kernel,
    valid,
)
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.strategies import in_xla


class Bags(NamedTuple):
    """A feature's ids, grouped into the vectors that they become.

    Bag b's vector is scale[b] * sum over its ids i of weights[i] * row(ids[i]).

    Attributes:
        ids: [n] int32 or int64, each inside the table, or what `validity` says.
        bag: [n] int32, the bag of each id, ascending; None: every bag has the
            same number of ids.
        weights: [n] float32, or None for ones.
        scale: [count] float32, or None for ones.
        count: scalar int32, the number of bags.
        shape: [rank] int32, the output's shape without the embedding dim; its
            product is count.
        static_shape: what is known of `shape` when tracing.
        lengths: [k], if every bag has k ids; [None], if `bag` says it. Not an
            integer, which Keras would make a tensor of.
        validity: inside XLA, which ids are in the table; the others are
            vocabulary_size, just beyond it. None: all are.
        splits: [count + 1] int32, where each bag begins and the last ends, if
            that is how they were given. It says what `bag` says, which is not
            computed in a graph where nothing needs it.
        most: [k], if no bag can have more than k ids; [None]: not known.
    """

    ids: tf.Tensor
    bag: tf.Tensor | None
    weights: tf.Tensor | None
    scale: tf.Tensor | None
    count: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    lengths: tf.TensorShape = tf.TensorShape([1])
    validity: compiled.Validity | None = None
    splits: tf.Tensor | None = None
    most: tf.TensorShape = tf.TensorShape([None])

    @classmethod
    def of_rows(
        cls, ids: tf.Tensor, bag: tf.Tensor | None, count: tf.Tensor
    ) -> Bags:
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
    def none(cls, feature: FeatureSpec) -> Bags:
        """The bags of a feature that a call leaves out: there are none."""
        small = feature.table.vocabulary_size <= tf.int32.max
        ids = tf.zeros([0], tf.int32 if small else tf.int64)
        # No constant: TensorFlow 2.21 folds the sum by row of constants without
        # elements, in a function that has two of them, into one that fails.
        ids = tf.compat.v1.placeholder_with_default(ids, [None])
        return cls.of_rows(ids, None, tf.size(ids))

    def bag_of_id(self) -> tf.Tensor:
        """Returns [n] int32, the bag of each id."""
        if self.bag is not None:
            return self.bag
        bags = tf.range(self.count)
        return bags if self.per_bag == 1 else tf.repeat(bags, self.per_bag)

    @property
    def grouping(self) -> tf.Tensor | None:
        """What says how ids are grouped, in its shortest form."""
        return self.bag if self.splits is None else self.splits

    @property
    def static_count(self) -> int | None:
        """The number of bags, if it is known when tracing."""
        return self.static_shape.num_elements()

    @property
    def longest(self) -> int | None:
        """The most ids that a bag can have, if it is known."""
        return self.most[0] if self.per_bag is None else self.per_bag

    @property
    def per_bag(self) -> int | None:
        """The number of ids in every bag, or None if `bag` says it."""
        return None if self.bag is not None else self.lengths[0]


def to_bags(
    features: Sequence[FeatureSpec],
    ids: Sequence[Any],
    weights: Sequence[Any],
    invalid_ids: str = "error",
    consensus: Consensus | None = None,
    training: bool = False,
    input_shapes: Sequence[InputShape | None] | None = None,
) -> list[Bags]:
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
            `tfrs_embed.ops.compiled` for functions that XLA compiles.
        NotImplementedError: ragged or sparse ids, or a consensus, inside XLA.
    """
    checks = Checks(consensus)
    drafts = []
    for feature, feature_ids, feature_weights, input_shape in zip(
        features,
        ids,
        weights,
        input_shapes or [None] * len(features),
        strict=True,
    ):
        if input_shape is not None:
            input_shape.require(feature, feature_ids, checks)
        draft = make_draft(feature, feature_ids, feature_weights, checks)
        if input_shape is not None and draft.combine:
            draft.most = input_shape.width
        drafts.append(draft)
    if in_xla():
        for draft in drafts:
            draft.flatten()
        inside = [
            valid(draft.ids, feature.table.vocabulary_size)
            for feature, draft in zip(features, drafts, strict=True)
        ]
        validity = compiled.judge(inside, checks.hold(), invalid_ids)
        return [
            _finish(feature, draft, invalid_ids, of_feature)
            for feature, draft, of_feature in zip(
                features, drafts, validity, strict=True
            )
        ]
    module = checking_kernels(drafts)
    in_kernel = module and invalid_ids == "error" and consensus is None
    if not in_kernel:
        for draft in drafts:
            draft.flatten()
        if invalid_ids == "error":
            require_valid(features, drafts, checks, training)
    _guard(drafts, checks)
    if in_kernel:
        require_valid_in_kernel(module, features, drafts, training)
    return [
        _finish(feature, draft, invalid_ids)
        for feature, draft in zip(features, drafts, strict=True)
    ]


def held(bags: Bags) -> tf.Tensor:
    """Tells which of a sequence's positions hold an id.

    Args:
        bags: bags of one id each, or none.

    Returns:
        bool, in the bags' shape.
    """
    there = None if bags.validity is None else bags.validity.there
    if bags.bag is None:
        flat = tf.fill(bags.count[None], True) if there is None else there
    else:
        if there is None:
            there = tf.fill(tf.shape(bags.bag), True)
        ids = tf.cast(there, tf.int32)
        flat = tf.math.unsorted_segment_sum(ids, bags.bag, bags.count) > 0
    return tf.ensure_shape(tf.reshape(flat, bags.shape), bags.static_shape)


def _guard(drafts: Sequence[Draft], checks: Checks) -> None:
    """Lets the drafts' tensors exist only if all conditions hold."""
    names = ("ids", "bag", "weights", "shape", "kept", "splits")
    places = [
        (draft, name)
        for draft in drafts
        for name in names
        if tf.is_tensor(getattr(draft, name))
        and not (name == "bag" and draft.splits is not None)
    ]
    guarded = checks.guard([getattr(*place) for place in places])
    for (draft, name), tensor in zip(places, guarded, strict=True):
        if name == "splits" and tensor is not draft.splits:
            draft.bag = bag_of_id(tensor)
        setattr(draft, name, tensor)


def _finish(
    feature: FeatureSpec,
    draft: Draft,
    invalid_ids: str,
    validity: compiled.Validity | None = None,
) -> Bags:
    ids, bag, weights = draft.ids, draft.bag, draft.weights
    splits = draft.splits
    if draft.kept is not None:
        weights = tf.gather(weights, draft.kept)
    shape = tf.cast(draft.shape, tf.int32)
    count = (
        tf.constant(math.prod(draft.shape))
        if isinstance(draft.shape, list)
        else tf.reduce_prod(shape)
    )
    per_bag = draft.per_bag if bag is None else None
    combiner = feature.table.combiner
    vocabulary_size = feature.table.vocabulary_size
    combine = draft.combine
    if invalid_ids == "zero" and validity is not None:
        weights = validity.weights(weights, combine)
    elif invalid_ids == "zero":
        # An id that is left out leaves its bag empty, which is a zero vector.
        kept = tf.where(valid(ids, vocabulary_size))[:, 0]
        bag = (
            tf.cast(kept // per_bag, tf.int32)
            if bag is None
            else tf.gather(bag, kept)
        )
        per_bag = splits = None
        ids = tf.gather(ids, kept)
        weights = None if weights is None else tf.gather(weights, kept)
    if ids.dtype != tf.int64 or not kernels.operations(None, training=True):
        # TensorFlow's operations are faster on int32.
        small = vocabulary_size <= tf.int32.max
        ids = tf.cast(ids, tf.int32 if small else tf.int64)
    if validity is not None:
        ids = tf.where(validity.there, ids, vocabulary_size)
    if weights is None and (not combine or per_bag == 1):
        # One id of weight 1: every combiner gives the row itself.
        scale = None
    else:
        scale = _scale(combiner, bag, splits, per_bag, weights, count)
    return Bags(
        ids,
        bag,
        weights,
        scale,
        count,
        shape,
        draft.static_shape,
        tf.TensorShape([per_bag]),
        validity,
        splits,
        tf.TensorShape([draft.most if draft.combine else 1]),
    )


def _scale(
    combiner: str,
    bag: tf.Tensor | None,
    splits: tf.Tensor | None,
    per_bag: int | None,
    weights: tf.Tensor | None,
    count: tf.Tensor,
) -> tf.Tensor | None:
    """What a bag's weighted sum is multiplied by; 0 for a zero total."""
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
            terms = tf.ones([count * per_bag], tf.float32)
        total = (
            tf.reduce_sum(tf.reshape(terms, [count, per_bag]), 1)
            if bag is None
            else tf.math.unsorted_segment_sum(terms, bag, count)
        )
    if combiner == "sqrtn":
        total = tf.sqrt(total)
    return tf.math.divide_no_nan(1.0, total)
