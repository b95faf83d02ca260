"""Checks of ids and weights that parsing makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import in_tpu_replica
from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import is_recorded
from tfrs_embed.ops.checks import (
    Checks,
    Condition,
    FeatureValues,
    first,
    message,
)
from tfrs_embed.ops.tensors import map_values, to_tensor

# By dtype, the number up to which it holds every whole number.
_WHOLE = {
    tf.bfloat16: 2**8,
    tf.float16: 2**11,
    tf.float32: 2**24,
    tf.float64: 2**53,
}


def require_output_shape(
    feature: FeatureSpec,
    checks: Checks,
    shape: tf.Tensor,
    static: tf.TensorShape,
    wanted: tuple[int | None, ...] | None = None,
) -> None:
    """Requires ids laid out as `shape` to fill `wanted`, or output_shape."""
    wanted = feature.output_shape if wanted is None else wanted
    assert wanted is not None
    if not static.is_compatible_with(wanted):
        raise ValueError(
            f"{feature}: ids for an output of shape {static}, but output_shape "
            f"is {list(wanted)}."
        )
    for i, dim in enumerate(wanted):
        if dim is not None and static[i] is None:
            checks.require(
                tf.equal(shape[i], dim),
                lambda: message(
                    f"{feature}: ids for an output of shape ",
                    shape,
                    f", but output_shape is {list(wanted)}.",
                ),
            )


def require_splits(
    feature: FeatureSpec, ids: tf.RaggedTensor, checks: Checks
) -> None:
    """Requires row splits to ascend from 0 to the number of values."""
    splits, count = ids.row_splits, tf.size(ids.values, ids.row_splits.dtype)
    fits = [splits[:1] == 0, splits[1:] >= splits[:-1], splits[-1:] == count]
    checks.require(
        tf.reduce_all(tf.concat(fits, 0)),
        lambda: message(
            f"{feature}: the row splits ",
            splits,
            " of ragged ids must ascend from 0 to the number of ids, ",
            count,
            ".",
        ),
    )


def sparse_order(
    given: Sequence[tuple[FeatureSpec, tf.SparseTensor]],
) -> list[Condition]:
    """Requires sparse ids' indices to ascend and to be in the dense shape."""
    joined = FeatureValues(
        [f for f, _ in given], [ids.indices for _, ids in given]
    )
    indices, feature = joined.values, joined.feature_of_row()
    sizes = [ids.dense_shape for _, ids in given]
    size = sizes[0] if len(given) == 1 else tf.gather(tf.stack(sizes), feature)
    row, column = indices[:, 0], indices[:, 1]
    later_row = row[1:] > row[:-1]
    later_column = (row[1:] == row[:-1]) & (column[1:] > column[:-1])
    ascending = later_row | later_column
    if len(given) > 1:
        ascending |= feature[1:] > feature[:-1]
    inside = tf.reduce_all((indices >= 0) & (indices < size), 1)

    def out_of_order() -> tf.Tensor:
        return message(
            joined.name(first(feature[1:], ~ascending)),
            ": sparse ids must have unique indices in row-major order; ",
            first(indices[1:], ~ascending),
            " follows ",
            first(indices[:-1], ~ascending),
            ". tf.sparse.reorder sorts them.",
        )

    def outside() -> tf.Tensor:
        return message(
            joined.name(first(feature, ~inside)),
            ": sparse ids have the index ",
            first(indices, ~inside),
            " outside their dense shape ",
            size if len(given) == 1 else first(size, ~inside),
            ".",
        )

    return [
        (tf.reduce_all(ascending), out_of_order),
        (tf.reduce_all(inside), outside),
    ]


def weights_like(
    feature: FeatureSpec, ids: Any, weights: Any, checks: Checks
) -> tf.Tensor | None:
    """Returns weights as float32, checked against the ids.

    They have a gradient if a tape records them.

    Returns:
        A Tensor of the ids' shape, or [n] for ragged and sparse ids; None:
        there are no weights.
    """
    if weights is None:
        return None
    weights = to_tensor(weights, f"{feature}: weights")
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    kind = next((each for each in kinds if isinstance(ids, each)), None)
    given = next((each for each in kinds if isinstance(weights, each)), None)
    if given is not kind:
        wanted = f"a {kind.__name__}" if kind else "a Tensor"
        raise TypeError(
            f"{feature}: weights must be {wanted} like the ids, got "
            f"{type(weights).__name__}."
        )
    if kind is None:
        values = weights
        if not ids.shape.is_compatible_with(weights.shape):
            raise ValueError(
                f"{feature}: weights have the shape {weights.shape}, ids "
                f"{ids.shape}; they must be equal."
            )
        parts = {"shape": (tf.shape(ids), tf.shape(weights))}
    elif kind is tf.RaggedTensor:
        values = weights.values
        if weights.shape.rank != 2:
            raise ValueError(
                f"{feature}: ragged weights must have rank 2, got shape "
                f"{weights.shape}."
            )
        parts = {"row splits": (ids.row_splits, weights.row_splits)}
    else:
        values = weights.values
        parts = {
            "indices": (ids.indices, weights.indices),
            "dense shape": (ids.dense_shape, weights.dense_shape),
        }
    if not (values.dtype.is_floating or values.dtype.is_integer):
        raise TypeError(
            f"{feature}: weights must be numbers, got {values.dtype.name}."
        )
    for name, (expected, actual) in parts.items():
        if actual is not expected:
            if expected.dtype != actual.dtype:  # Row splits of 32 and 64 bits.
                expected = tf.cast(expected, tf.int64)
                actual = tf.cast(actual, tf.int64)
            key = (name, expected.dtype)
            checks.require_together(
                _equal, key, (feature, name, expected, actual)
            )
    values = tf.cast(values, tf.float32)
    if not is_recorded(values):
        return tf.stop_gradient(values)
    if in_tpu_replica():
        raise NotImplementedError(
            f"{feature}: a gradient tape records the weights, and TPUs give "
            "weights no gradient. Pass tf.stop_gradient(weights), or multiply "
            "vectors of FeatureConfig(combiner=None) by them."
        )
    return values


def _equal(
    given: Sequence[tuple[FeatureSpec, str, tf.Tensor, tf.Tensor]],
) -> list[Condition]:
    """Requires equality of the ids' and the weights' tensors, [m, ...] each.

    `given` has features, the tensors' name, and both tensors.
    """
    features, names, of_ids, of_weights = zip(*given, strict=True)
    expected, actual = (
        FeatureValues(features, of_ids),
        FeatureValues(features, of_weights),
    )
    wanted, found = expected.values, actual.values
    # Cut to one length, so that the comparison itself can't fail.
    length = tf.minimum(tf.shape(wanted)[0], tf.shape(found)[0])
    differ = tf.not_equal(wanted[:length], found[:length])
    lengths_differ = tf.not_equal(expected.lengths, actual.lengths)

    def text() -> tf.Tensor:
        # Later features than one of another length seem to differ, too.
        bad = tf.reduce_min(
            tf.concat(
                [
                    tf.gather(expected.feature_of_row(), _rows(differ)),
                    _rows(lengths_differ),
                    [len(given) - 1],
                ],
                0,
            )
        )
        return message(
            expected.name(bad),
            f": the {names[0]} of the weights ",
            actual.part(bad),
            f" differ from the {names[0]} of the ids ",
            expected.part(bad),
            ".",
        )

    ok = ~(tf.reduce_any(differ) | tf.reduce_any(lengths_differ))
    return [(ok, text)]


def _rows(where: tf.Tensor) -> tf.Tensor:
    """Returns the rows, int32, in which any value is true."""
    return tf.cast(tf.where(where)[:, 0], tf.int32)


def as_integers(feature: FeatureSpec, ids: Any, checks: Checks) -> Any:
    """Returns ids as integers, or as strings if hashed, in the same kind.

    Floats are taken where their dtype holds every id of the table, because
    Keras makes floats of inputs without a dtype. They must be whole numbers.

    Raises:
        TypeError: the ids are of another dtype.
    """
    dtype, hashing, size = ids.dtype, feature.hashing, feature.num_ids or 0
    if dtype.is_integer or (not size and dtype == tf.string):
        return ids
    if dtype == tf.string:
        hint = (
            "FeatureConfig(hashing=...) takes any, as does a table with "
            "DynamicKeys(dtype='string')."
        )
        if isinstance(hashing, hashings.PrefixNGrams):
            hint = "PrefixNGrams takes the places of items in its codes."
        elif hashing is not None:
            hint = "hashed=True takes any."
        raise TypeError(f"{feature}: ids must be integers, got string. {hint}")
    text = f"{feature}: ids must be integers, got {dtype.name}."
    if not size:
        text = text.replace("integers", "integers or strings")
    largest = _WHOLE.get(dtype, 0)
    if not 0 < size <= largest:
        if dtype == tf.bool:
            text += " Cast them: tf.cast(ids, tf.int64)."
        if largest:
            text += (
                f" {dtype.name} holds every id of up to {largest} rows"
                f"{f'; the table has {size}' if size else ''}. Cast ids at "
                "their origin. A Keras Input is of floats unless it has a "
                "dtype: keras.Input(shape, dtype='int64')."
            )
        raise TypeError(text)

    def convert(values: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(values, tf.float64)
        whole = tf.math.is_finite(wide) & tf.equal(wide, tf.floor(wide))
        flat = tf.reshape(wide, [-1])

        def fraction() -> tf.Tensor:
            wrong = ~tf.reshape(whole, [-1])
            found = first(flat, wrong)
            hint = tf.where(
                tf.math.is_nan(found), " NaN stands for a missing value.", ""
            )
            return message(
                f"{feature}: id ", found, " is not an integer.", hint
            )

        checks.require(tf.reduce_all(whole), fraction)
        # A cast of other numbers may give any id.
        limit = float(_WHOLE[tf.float64])
        known = tf.where(whole, tf.clip_by_value(wide, -limit, limit), -1.0)
        return tf.cast(known, tf.int64)

    return map_values(convert, ids)
