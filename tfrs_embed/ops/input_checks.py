"""Checks of one feature's ids and weights, as parsing needs them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed import hashing as hashings
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.checks import Checks, first, message


def require_output_shape(
    feature: FeatureSpec,
    checks: Checks,
    shape: tf.Tensor,
    static: tf.TensorShape,
    wanted: tuple[int | None, ...] | None = None,
) -> None:
    """Requires ids that fill a feature's output_shape.

    Args:
        feature: the feature.
        checks: takes the condition on sizes that are not known when tracing.
        shape: the shape of the output that the ids would have, a tensor.
        static: its static shape.
        wanted: the shape that it must have; None: the output_shape.

    Raises:
        ValueError: the static shape is another.
    """
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


def require_sparse_order(
    feature: FeatureSpec,
    ids: tf.SparseTensor,
    row: tf.Tensor,
    column: tf.Tensor,
    checks: Checks,
) -> None:
    """Requires indices that ascend and are within the dense shape."""
    indices, size = ids.indices, ids.dense_shape
    later_row = row[1:] > row[:-1]
    later_column = (row[1:] == row[:-1]) & (column[1:] > column[:-1])
    ascending = later_row | later_column
    checks.require(
        tf.reduce_all(ascending),
        lambda: message(
            f"{feature}: sparse ids must have unique indices in row-major "
            "order; ",
            first(indices[1:], ~ascending),
            " follows ",
            first(indices[:-1], ~ascending),
            ". tf.sparse.reorder sorts them.",
        ),
    )
    inside = (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
    checks.require(
        tf.reduce_all(inside),
        lambda: message(
            f"{feature}: sparse ids have the index ",
            first(indices, ~inside),
            " outside their dense shape ",
            size,
            ".",
        ),
    )


def weights_like(
    feature: FeatureSpec, ids: Any, weights: Any, checks: Checks
) -> tf.Tensor | None:
    """Weights' values as float32, if they are of the kind and shape of the ids.

    Args:
        feature: the feature.
        ids: a Tensor, RaggedTensor or SparseTensor.
        weights: its weights, or None.
        checks: takes the conditions that depend on values.

    Returns:
        In the ids' shape, or [n], without a gradient; None: there are none.

    Raises:
        TypeError: weights of another kind, or no numbers.
        ValueError: a wrong rank or static shape.
    """
    if weights is None:
        return None
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
        values = weights = to_tensor(weights, f"{feature}: weights")
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
            _require_equal(feature, checks, expected, actual, name)
    # Weights are data, on every engine: the TPU's give them no gradient.
    return tf.stop_gradient(tf.cast(values, tf.float32))


def _require_equal(
    feature: FeatureSpec,
    checks: Checks,
    expected: tf.Tensor,
    actual: tf.Tensor,
    name: str,
) -> None:
    """Requires a tensor of the weights, [m, ...], to be that of the ids."""
    if expected.dtype != actual.dtype:  # Row splits of 32 and of 64 bits.
        expected, actual = (
            tf.cast(expected, tf.int64),
            tf.cast(actual, tf.int64),
        )
    # Cut to one length, so that the comparison itself can't fail.
    lengths = tf.shape(expected)[0], tf.shape(actual)[0]
    length = tf.minimum(*lengths)
    equal = tf.equal(*lengths) & tf.reduce_all(
        tf.equal(expected[:length], actual[:length])
    )
    checks.require(
        equal,
        lambda: message(
            f"{feature}: the {name} of the weights ",
            actual,
            f" differ from the {name} of the ids ",
            expected,
            ".",
        ),
    )


def to_tensor(value: Any, what: str) -> tf.Tensor:
    """Converts dense ids or weights to a tensor.

    Raises:
        TypeError: it is no tensor, and can't be converted.
    """
    if tf.is_tensor(value):
        return value
    # Keras makes a tensor of each of Python's integers, by its size.
    dtypes = {getattr(each, "dtype", None) for each in tf.nest.flatten(value)}
    if dtypes == {tf.int32, tf.int64}:
        value = tf.nest.map_structure(lambda i: tf.cast(i, tf.int64), value)
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise TypeError(
            f"{what} must be a Tensor, RaggedTensor or SparseTensor, or "
            f"convert to a Tensor; got {type(value).__name__}: {error}"
        ) from error


def check_rank_2(
    feature: FeatureSpec, shape: tf.TensorShape, what: str, layout: str
) -> None:
    """Checks the rank of ragged or sparse ids.

    Raises:
        ValueError: it isn't 2.
    """
    if shape.rank != 2:
        raise ValueError(
            f"{feature}: {what} must have rank 2, {layout}, got shape {shape}."
        )


def check_ids_dtype(feature: FeatureSpec, dtype: tf.DType) -> None:
    """Checks that ids are integers, or strings that are hashed.

    Raises:
        TypeError: they aren't.
    """
    hashing = feature.hashing
    any_id = hashing is not None and hashings.takes_any_id(hashing)
    if dtype == tf.string:
        if any_id:
            return
        hint = "hashed=True" if hashing else "FeatureConfig(hashing=...)"
        raise TypeError(
            f"{feature}: ids must be integers, got string. {hint} takes "
            "strings."
        )
    if not dtype.is_integer:
        raise TypeError(
            f"{feature}: ids must be integers{' or strings' if any_id else ''},"
            f" got {dtype.name}. Cast them where they are made: a float32 "
            "can't hold every id above 2^24."
        )
