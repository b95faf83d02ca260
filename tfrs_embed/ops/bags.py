"""Ids of any kind as bags: the one form that lookups and updates work on.

A bag is the set of ids that become one output vector. Dense ids are bags of one
id each; a row of ragged or sparse ids is a bag; each position of a sequence is
a bag of one id or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs.tables import FeatureSpec, TableSpec


def is_wide(rows: int) -> bool:
    """Whether the ids of a table of so many rows take 64 bits."""
    return rows > tf.int32.max


def id_dtype(table: TableSpec) -> tf.DType:
    """The smallest of int32 and int64 that holds a table's ids."""
    large = table.keys is not None or is_wide(table.vocabulary_size)
    return tf.int64 if large else tf.int32


class Validity(NamedTuple):
    """The validity of a feature's ids, where nothing can raise.

    Attributes:
        mask: [n] bool, the ids that are in the table.
        all_valid: scalar bool, the same for all features of a call: whether it
            may be trained on. If not, ids outside are NaN, else zero.
    """

    mask: tf.Tensor
    all_valid: tf.Tensor


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
        most: [k], if no bag can have more than k ids, and every bag has k if
            the bags are `even`; [None]: not known. Not an integer, which Keras
            would make a tensor of.
        validity: inside XLA, which ids are in the table; the others are
            vocabulary_size, just beyond it. None: all are.
        splits: [count + 1] int32, where each bag begins and the last ends, if
            that is how they were given. The kernels need no `bag_ids` then,
            which take longer to trace than all else of a feature.
    """

    ids: tf.Tensor
    bag_ids: tf.Tensor | None
    weights: tf.Tensor | None
    scale: tf.Tensor | None
    count: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    most: tf.TensorShape = tf.TensorShape([1])
    validity: Validity | None = None
    splits: tf.Tensor | None = None

    @classmethod
    def in_one_row(
        cls,
        ids: tf.Tensor,
        count: tf.Tensor,
        *,
        bag_ids: tf.Tensor | None = None,
        splits: tf.Tensor | None = None,
        weights: tf.Tensor | None = None,
    ) -> BaggedIds:
        """Bags without scales, laid out as [count]; see the attributes."""
        unknown = tf.TensorShape([None])
        return cls(
            ids,
            bag_ids,
            weights,
            None,
            count,
            count[None],
            unknown,
            unknown,
            splits=splits,
        )

    @classmethod
    def of_rows(
        cls, ids: tf.Tensor, bag: tf.Tensor | None, count: tf.Tensor
    ) -> BaggedIds:
        """Bags of one id each, or none."""
        made = cls.in_one_row(ids, count, bag_ids=bag)
        return made._replace(most=tf.TensorShape([1]))

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
        return number_evenly(self.count, self.most[0])

    def scaled(
        self, vectors: tf.Tensor, constants: Constants | None = None
    ) -> tf.Tensor:
        """Vectors, or gradients, [count, dim], by the bags' scales."""
        if self.scale is None:
            return vectors
        scale = tf.cast(self.scale, vectors.dtype)
        axis = (constants or Constants()).of(1)
        return vectors * tf.expand_dims(scale, axis)

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
        return self.most[0]

    @property
    def bag_size(self) -> int | None:
        """The number of ids in every bag, or None if they differ."""
        return self.most[0] if self.even else None


def number_evenly(count: tf.Tensor, bag_size: int) -> tf.Tensor:
    """The bag of each id, [count * bag_size] int32, of bags of equal size."""
    bags = tf.range(count)
    if bag_size == 1:
        return bags
    # `tf.repeat` takes twice as many operations.
    return tf.reshape(tf.tile(tf.expand_dims(bags, 1), [1, bag_size]), [-1])


def position_mask(bags: BaggedIds) -> tf.Tensor:
    """Tells which of a sequence's positions hold an id.

    Args:
        bags: bags of one id each, or none.

    Returns:
        bool, in the bags' shape.
    """
    ids = tf.ones_like(bags.ids, tf.int32)
    if bags.validity is not None:
        ids = tf.cast(bags.validity.mask, tf.int32)
    bag = bags.bag_of_id()
    flat = tf.math.unsorted_segment_sum(ids, bag, bags.count) > 0
    return tf.ensure_shape(tf.reshape(flat, bags.shape), bags.static_shape)


class Constants:
    """int32 constants of one call, each made once.

    Half of the operations that ragged features are traced to would be such. On
    TPUs each use has its own: the bridge cuts a pipelined loop into parts, and
    refuses it if two of them have a constant in common.

    Attributes:
        shared: whether features share them, and may share other operations.
    """

    def __init__(self) -> None:
        self.shared = not is_tpu(tf.distribute.get_strategy())
        self._known: dict[Any, tf.Tensor] = {}

    def of(self, value: int | Sequence[int]) -> tf.Tensor:
        """A number, [], or a vector, [n]."""
        key = value if isinstance(value, int) else tuple(value)
        if key not in self._known or not self.shared:
            self._known[key] = tf.constant(value, tf.int32)
        return self._known[key]


def bag_of_id(
    splits: tf.Tensor,
    num_ids: tf.Tensor | None = None,
    constants: Constants | None = None,
) -> tf.Tensor:
    """The bag of each id, [n] int32.

    Args:
        splits: [count + 1] int32, where each bag begins and the last ends.
        num_ids: scalar int32, n; None: the last of the splits.
        constants: those of the call; None: this needs its own.
    """
    constants = constants or Constants()
    num_ids = splits[-1] if num_ids is None else num_ids
    # Each place that a bag ends at counts one more; those at the end of all ids
    # are behind them. `tf.repeat` takes the memory of all bags being as long as
    # the longest, and traces for longer.
    # Its size is "all that follow".
    ends = tf.raw_ops.Slice(
        input=splits, begin=constants.of([1]), size=constants.of([-1])
    )
    counts = tf.raw_ops.UnsortedSegmentSum(
        data=tf.raw_ops.OnesLike(x=ends),
        segment_ids=ends,
        num_segments=num_ids + constants.of(1),
    )
    return tf.raw_ops.Slice(
        input=tf.raw_ops.Cumsum(x=counts, axis=constants.of(0)),
        begin=constants.of([0]),
        size=tf.expand_dims(num_ids, constants.of(0)),
    )


def sum_by_segment(
    rows: tf.Tensor,
    indices: tf.Tensor,
    segment_ids: tf.Tensor,
    num_segments: tf.Tensor,
    constants: Constants,
) -> tf.Tensor:
    """Sums rows segment by segment, without a copy of each row.

    Args:
        rows: [m, dim] float32 or float64.
        indices: [n] int32, the row of each term.
        segment_ids: [n] int32, the segment of each term, ascending.
        num_segments: scalar int32.
        constants: those of the call.

    Returns:
        [num_segments, dim]; a segment without terms is zero.
    """
    # One segment more, which is cut off: for no segments, as in an empty batch,
    # TensorFlow's kernel for GPUs raises an error.
    total = tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=rows,
        indices=indices,
        segment_ids=segment_ids,
        num_segments=num_segments + constants.of(1),
    )
    return tf.raw_ops.StridedSlice(
        input=total,
        begin=constants.of([0]),
        end=tf.expand_dims(num_segments, constants.of(0)),
        strides=constants.of([1]),
    )


def map_bag_sizes(
    function: Callable[[tf.Tensor], tf.Tensor], splits: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Computes something of the sizes of several features' bags at once.

    Each operation takes some microseconds, whatever it does, and a model may
    have hundreds of ragged features.

    Args:
        function: takes [n] int32, sizes, and returns [n]. Some of them are of
            no bag, and may be negative.
        splits: each feature's [count + 1] int32, where its bags begin and the
            last ends.

    Returns:
        Each feature's [count].
    """
    if len(splits) < 2:
        return [function(each[1:] - each[:-1]) for each in splits]
    ends = num_rows(splits)
    between = tf.ones_like(ends)
    pieces = tf.reshape(tf.stack([ends - 1, between], 1), [-1])[:-1]
    joined = tf.concat(splits, 0)
    # From one feature to the next it is the size of no bag.
    values = function(joined[1:] - joined[:-1])
    found: list[tf.Tensor] = tf.split(values, pieces, num=2 * len(splits) - 1)
    return found[::2]


def num_rows(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The length of each of several tensors of one rank, [k] int32."""
    known = [tensor.shape[0] for tensor in tensors]
    if None not in known:
        return tf.constant(known, tf.int32)
    dtypes = {tensor.dtype for tensor in tensors}
    # TensorFlow's compiler for TPUs puts a ShapeN behind its use.
    if len(dtypes) > 1 or is_tpu(tf.distribute.get_strategy()):
        return tf.stack(
            [
                tf.size(tensor)
                if tensor.shape.rank == 1
                else tf.shape(tensor)[0]
                for tensor in tensors
            ]
        )
    rank = tensors[0].shape.rank
    shapes = tf.concat(tf.shape_n(tensors), 0)
    return shapes if rank == 1 else shapes[::rank]


def bags_of_rows(ids: Sequence[tf.Tensor]) -> list[BaggedIds]:
    """Bags of one id each, of several tables, by a few operations for all."""
    shapes = tf.shape_n(ids)
    counts = tf.unstack(tf.concat(shapes, 0))
    first = BaggedIds.of_rows(ids[0], None, counts[0])
    return [
        first._replace(ids=i, count=count, shape=shape)
        for i, count, shape in zip(ids, counts, shapes, strict=True)
    ]


def split_by_bags(
    values: tf.Tensor, bags: Sequence[BaggedIds]
) -> list[tf.Tensor]:
    """Splits values, one for each id of several features, by the features."""
    if len(bags) == 1:
        return [values]
    lengths = num_rows([b.ids for b in bags])
    split: list[tf.Tensor] = tf.split(values, lengths, num=len(bags))
    return split


def concat(tensors: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
    """Tensors as one along an axis; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)


def of_one_dtype(ids: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Ids of several features, int32 or int64, in the widest dtype of them."""
    if any(i.dtype == tf.int64 for i in ids):
        return [tf.cast(i, tf.int64) for i in ids]
    return list(ids)
