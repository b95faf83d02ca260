"""Keys that a layer of keys is called with, checked."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.engines.engine import Engine
from tfrs_embed.layers.key_arguments import KeyArguments
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Checks, first, message
from tfrs_embed.ops.id_range import valid


def to_bags(
    inputs: Any,
    training: bool,
    arguments: KeyArguments,
    engine: Engine,
    where: str,
) -> BaggedIds:
    """Checks keys, and brings them to the engine's form.

    Args:
        inputs: the keys as the layer is called with them.
        training: whether the table is about to be updated.
        arguments: the layer's arguments.
        engine: the engine of the layer's table.
        where: the layer, for errors.

    Returns:
        The keys as int64 ids, each in a bag of its own.

    Raises:
        TypeError: keys of another kind or dtype.
        ValueError: keys of another shape.
    """
    if isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"{where}: keys must be a Tensor, got {type(inputs).__name__}."
        )
    keys = tf.convert_to_tensor(inputs)
    if keys.dtype != arguments.key_dtype:
        raise TypeError(
            f"{where}: keys must be of key_dtype="
            f"{arguments.key_dtype.name}, got {keys.dtype.name}."
        )
    static_shape = checked_shape(keys.shape, arguments, where)
    signed = (
        tf.bitcast(keys, tf.int64)
        if keys.dtype == tf.uint64
        else tf.cast(keys, tf.int64)
    )
    together = engine.together
    checks = Checks(together.consensus(training) if together else None)
    if not keys.shape[1:].is_fully_defined():
        checks.require(
            tf.reduce_all(tf.equal(tf.shape(keys)[1:], static_shape[1:])),
            lambda: message(
                f"{where}: keys must have the shape "
                f"{arguments.keys_shape_text}, got ",
                tf.shape(signed),
                ".",
            ),
        )
    if not arguments.use_hashtable:
        [feature] = engine.features
        rows = feature.table.vocabulary_size
        _require_rows(signed, rows, arguments, checks, where)
    [signed] = checks.guard([signed])
    ids = tf.reshape(signed, [-1])
    return BaggedIds(
        ids, None, None, None, tf.size(ids), tf.shape(signed), static_shape
    )


def _require_rows(
    signed: tf.Tensor,
    rows: int,
    arguments: KeyArguments,
    checks: Checks,
    where: str,
) -> None:
    """Requires all keys to be numbers of rows."""
    of_replica = arguments.max_vocabulary_size_per_gpu
    inside = valid(signed, rows)

    def text() -> tf.Tensor:
        key = first(signed, ~inside)
        if arguments.key_dtype == tf.uint64:
            key = tf.bitcast(key, tf.uint64)
        return message(
            f"{where}: key ",
            key,
            f" is out of range; with use_hashtable=False valid keys are 0 "
            f"to {rows - 1}: max_vocabulary_size_per_gpu="
            f"{of_replica} on each of {rows // of_replica} "
            "replicas.",
        )

    checks.require(tf.reduce_all(inside), text)


def checked_shape(
    shape: tf.TensorShape, arguments: KeyArguments, where: str
) -> tf.TensorShape:
    """Checks the keys' static shape, and fills in the known sizes.

    Args:
        shape: the shape.
        arguments: the layer's arguments.
        where: the layer, for errors.

    Raises:
        ValueError: the arguments say another shape.
    """
    wanted = arguments.keys_shape
    if shape.rank is None or not shape.is_compatible_with(wanted):
        raise ValueError(
            f"{where}: keys must have the shape {arguments.keys_shape_text}, "
            f"got {shape}."
        )
    return shape.merge_with(wanted)
