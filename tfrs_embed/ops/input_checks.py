"""Checks of one feature's ids and weights, as parsing needs them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed import hashing as hashings
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.checks import Checks, message


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


def require_equal(
    feature: FeatureSpec,
    checks: Checks,
    expected: tf.Tensor,
    actual: tf.Tensor,
    actual_name: str,
    expected_name: str,
) -> None:
    """Requires two tensors to be equal, such as indices of ids and weights.

    Args:
        feature: the feature.
        checks: takes the condition.
        expected: a tensor, [n, ...].
        actual: a tensor, [m, ...].
        actual_name: its name, for errors.
        expected_name: the other's.
    """
    # Cut to one length, so that the comparison itself can't fail.
    lengths = tf.shape(expected)[0], tf.shape(actual)[0]
    length = tf.minimum(*lengths)
    equal = tf.equal(*lengths) & tf.reduce_all(
        tf.equal(expected[:length], actual[:length])
    )
    checks.require(
        equal,
        lambda: message(
            f"{feature}: the {actual_name} ",
            actual,
            f" differ from the {expected_name} ",
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


def as_float32(feature: FeatureSpec, weights: tf.Tensor) -> tf.Tensor:
    """Casts weights to float32, without a gradient.

    Raises:
        TypeError: they are no numbers.
    """
    if not (weights.dtype.is_floating or weights.dtype.is_integer):
        raise TypeError(
            f"{feature}: weights must be numbers, got {weights.dtype.name}."
        )
    # Weights are data, on every engine: the TPU's give them no gradient.
    return tf.stop_gradient(tf.cast(weights, tf.float32))


def refuse_weights(feature: FeatureSpec, wanted: str, weights: Any) -> None:
    """Refuses weights of another kind than their ids.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{feature}: weights must be {wanted} like the ids, got "
        f"{type(weights).__name__}."
    )
