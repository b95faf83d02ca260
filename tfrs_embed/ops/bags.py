"""Bags of ids, the form on which lookups and updates work.

A bag is the set of ids that become one output vector: one dense id, a row of
ragged or sparse ids, or a sequence's position with one id or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import record
from tfrs_embed.compat.strategies import in_xla, is_tpu
from tfrs_embed.configs.tables import FeatureSpec, TableSpec


def is_recorded(weights: tf.Tensor) -> bool:
    """Whether a gradient tape records weights, so that they may be trained."""
    return bool(record.should_record_backprop([weights]))


def is_wide(rows: int) -> bool:
    """Whether the ids of a table with `rows` rows need 64 bits."""
    return rows > tf.int32.max


def id_dtype(table: TableSpec) -> tf.DType:
    """Returns the smaller of int32 and int64 that holds a table's ids."""
    large = table.keys is not None or is_wide(table.vocabulary_size)
    return tf.int64 if large else tf.int32


class BaggedIds(NamedTuple):
    """A feature's ids, grouped into bags.

    Bag b's vector is scale[b] * sum over its ids i of weights[i] * row(ids[i]).

    Attributes:
        ids: [n] int32 or int64, each in the table; see `all_valid`.
        bag_ids: [n] int32, each id's bag, ascending. None: `splits` has the
            bags, or every bag has the same number of ids.
        weights: [n] float32, or None for ones.
        scale: [count] float32, or None for ones.
        count: scalar int32, the number of bags.
        shape: [rank] int32, the output's shape without the embedding dim; its
            product is count.
        static_shape: the shape as far as it is known when tracing.
        max_bag_size: [k]: a bag has at most k ids, or exactly k if the bags are
            `even`; [None]: unknown. Not an integer, which Keras would make a
            tensor.
        splits: [count + 1] int32, each bag's first id and the last bag's end,
            if the ids were given by splits. The kernels then need no `bag_ids`,
            whose tracing takes longer than the rest of a feature.
        all_valid: inside XLA, whether all ids of the call are valid, a scalar
            bool. Ids without a row are then the largest number of their dtype;
            their vectors are NaN if this is false, else zero. None: elsewhere.
    """

    ids: tf.Tensor
    bag_ids: tf.Tensor | None
    weights: tf.Tensor | None
    scale: tf.Tensor | None
    count: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    max_bag_size: tf.TensorShape = tf.TensorShape([1])
    splits: tf.Tensor | None = None
    all_valid: tf.Tensor | None = None

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
        """Makes bags without scales, of layout [count]."""
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
        """Makes bags of one id each, or none."""
        made = cls.in_one_row(ids, count, bag_ids=bag)
        return made._replace(max_bag_size=tf.TensorShape([1]))

    @classmethod
    def none(cls, feature: FeatureSpec) -> BaggedIds:
        """Makes the empty bags of a feature that a call leaves out."""
        ids = tf.zeros([0], id_dtype(feature.table))
        # Not a constant: TensorFlow 2.21 folds a function's sums by row of two
        # empty constants into an operation that fails.
        ids = tf.compat.v1.placeholder_with_default(ids, [None])
        return cls.of_rows(ids, None, tf.size(ids))

    def bag_of_id(self) -> tf.Tensor:
        """Returns each id's bag, [n] int32."""
        if self.bag_ids is not None:
            return self.bag_ids
        if self.splits is not None:
            return bag_of_id(self.splits)
        return number_evenly(self.count, self.max_bag_size[0])

    def have_rows(self) -> tf.Tensor:
        """Returns which ids have rows, [n] bool: inside XLA not all do."""
        if self.all_valid is None:
            return tf.ones_like(self.ids, tf.bool)
        return self.ids < self.ids.dtype.max

    def scaled(self, vectors: tf.Tensor) -> tf.Tensor:
        """Multiplies vectors or gradients, [count, dim], by bags' scales."""
        if self.scale is None:
            return vectors
        scale = tf.cast(self.scale, vectors.dtype)
        return vectors * tf.expand_dims(scale, 1)

    @property
    def learns(self) -> bool:
        """Whether a gradient tape records the weights."""
        return self.weights is not None and is_recorded(self.weights)

    def one_by_one(self) -> BaggedIds:
        """Returns bags of one id each, without weights: [n], in order."""
        made = BaggedIds.of_rows(self.ids, None, tf.size(self.ids))
        return made._replace(all_valid=self.all_valid)

    @property
    def even(self) -> bool:
        """Whether all bags have the same number of ids."""
        return self.bag_ids is None and self.splits is None

    @property
    def grouping(self) -> tf.Tensor | None:
        """The ids' grouping for the kernels: splits, else bag_ids."""
        return self.bag_ids if self.splits is None else self.splits

    @property
    def static_count(self) -> int | None:
        """The number of bags, if known when tracing."""
        return self.static_shape.num_elements()

    @property
    def bag_size(self) -> int | None:
        """The number of ids in every bag, or None if they differ."""
        return self.max_bag_size[0] if self.even else None


def all_valid(bags: Iterable[BaggedIds]) -> tf.Tensor:
    """Returns whether all ids of the bags' calls are valid, a scalar bool."""
    marks = [b.all_valid for b in bags if b.all_valid is not None]
    return tf.reduce_all([True, *marks])


def number_evenly(count: tf.Tensor, bag_size: int) -> tf.Tensor:
    """Returns each id's bag, [count * bag_size] int32, of bags of one size."""
    bags = tf.range(count)
    if bag_size == 1:
        return bags
    # `tf.repeat` takes twice as many operations.
    return tf.reshape(tf.tile(tf.expand_dims(bags, 1), [1, bag_size]), [-1])


def position_mask(bags: BaggedIds) -> tf.Tensor:
    """Returns which positions of a sequence hold an id, bool in its layout."""
    ids = tf.cast(bags.have_rows(), tf.int32)
    bag = bags.bag_of_id()
    flat = tf.math.unsorted_segment_sum(ids, bag, bags.count) > 0
    return tf.ensure_shape(tf.reshape(flat, bags.shape), bags.static_shape)


def share_operations() -> bool:
    """Whether features share constants and other operations.

    On TPUs each has its own: the bridge refuses a pipelined loop whose parts
    share a constant. XLA needs sizes that it can compute without the ids.
    """
    return not (is_tpu(tf.distribute.get_strategy()) or in_xla())


def bag_of_id(splits: tf.Tensor, num_ids: tf.Tensor | None = None) -> tf.Tensor:
    """Returns each id's bag, [n] int32, from splits, [count + 1] int32.

    `num_ids`, scalar int32, is n; None: the last of the splits.
    """
    num_ids = splits[-1] if num_ids is None else num_ids
    # The bag of an id is the number of ends up to it. `tf.repeat` takes memory
    # for count times the longest bag, and longer to trace. Size -1: the rest.
    ends = tf.raw_ops.Slice(input=splits, begin=[1], size=[-1])
    counts = tf.raw_ops.UnsortedSegmentSum(
        data=tf.raw_ops.OnesLike(x=ends),
        segment_ids=ends,
        num_segments=num_ids + 1,
    )
    return tf.raw_ops.Slice(
        input=tf.raw_ops.Cumsum(x=counts, axis=0),
        begin=[0],
        size=tf.expand_dims(num_ids, 0),
    )


def bags_of_ids(
    splits: Sequence[tf.Tensor], ids: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns each id's bag, [n] int32, for several features at once.

    It takes some twenty operations for all features, where `bag_of_id` takes
    seven for each.
    """
    num_splits, num_ids = num_rows(splits), num_rows(ids)
    first_ids = tf.cumsum(num_ids, exclusive=True)
    joined = tf.concat(splits, 0) + repeat(first_ids, num_splits)
    # Bags of all features, and one without ids between each two of them.
    bags = bag_of_id(joined)
    bags -= repeat(tf.cumsum(num_splits, exclusive=True), num_ids)
    found: list[tf.Tensor] = tf.split(bags, num_ids, num=len(ids))
    return found


def repeat(values: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Returns each value as often as its length says, [sum of lengths]."""
    # `tf.repeat` takes memory for as many as the largest length for each.
    part = bag_of_id(tf.concat([[0], tf.cumsum(lengths)], 0))
    return tf.gather(values, part)


def sum_by_segment(
    rows: tf.Tensor,
    indices: tf.Tensor,
    segment_ids: tf.Tensor,
    num_segments: tf.Tensor,
) -> tf.Tensor:
    """Sums rows by segment, [num_segments, dim], without copies of rows.

    Args:
        rows: [m, dim] float32 or float64.
        indices: [n] int32, each term's row.
        segment_ids: [n] int32, each term's segment, ascending.
        num_segments: scalar int32.
    """
    if tf.get_static_value(num_segments):
        return tf.raw_ops.SparseSegmentSumWithNumSegments(
            data=rows,
            indices=indices,
            segment_ids=segment_ids,
            num_segments=num_segments,
        )
    # One more segment, cut off again: TensorFlow's kernel for GPUs raises an
    # error for none, as in an empty batch.
    total = tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=rows,
        indices=indices,
        segment_ids=segment_ids,
        num_segments=num_segments + 1,
    )
    return tf.raw_ops.StridedSlice(
        input=total,
        begin=[0],
        end=tf.expand_dims(num_segments, 0),
        strides=[1],
    )


def map_bag_sizes(
    function: Callable[[tf.Tensor], tf.Tensor], splits: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Applies a function to the bag sizes of several features at once.

    Each operation takes some microseconds, and a model may have hundreds of
    ragged features. The function maps [n] int32 to [n]; some of its sizes
    belong to no bag and may be negative.

    Returns:
        Each feature's [count].
    """
    if len(splits) < 2:
        return [function(each[1:] - each[:-1]) for each in splits]
    ends = num_rows(splits)
    between = tf.ones_like(ends)
    pieces = tf.reshape(tf.stack([ends - 1, between], 1), [-1])[:-1]
    joined = tf.concat(splits, 0)
    # The size between two features belongs to no bag.
    values = function(joined[1:] - joined[:-1])
    found: list[tf.Tensor] = tf.split(values, pieces, num=2 * len(splits) - 1)
    return found[::2]


def num_rows(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the lengths of tensors of one rank, [k] int32."""
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
    """Makes bags of one id each, of several tables, by few operations."""
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
    """Splits values, one for each id of several features, by feature."""
    if len(bags) == 1:
        return [values]
    return split(values, [b.ids for b in bags])


def split(
    values: tf.Tensor, like: Sequence[tf.Tensor], ids: bool = False
) -> list[tf.Tensor]:
    """Splits values into parts as long as some tensors, of one rank.

    Values of int32 are ids, or lengths and positions, which GPUs have on the
    host.
    """
    bits, sizes, number = values, num_rows(like), len(like)
    # TensorFlow's kernels for GPUs split no integers.
    if values.dtype == tf.int64:
        bits = tf.bitcast(values, tf.float64)
    elif ids and values.dtype == tf.int32:
        bits = tf.bitcast(values, tf.float32)
    parts: list[tf.Tensor] = tf.split(bits, sizes, num=number)
    if bits is not values:
        parts = [tf.bitcast(part, values.dtype) for part in parts]
    return parts


def concat(tensors: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
    """Concatenates tensors along an axis."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)


def of_one_dtype(ids: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Casts ids of several features, int32 or int64, to their widest dtype."""
    if any(i.dtype == tf.int64 for i in ids):
        return [tf.cast(i, tf.int64) for i in ids]
    return list(ids)
