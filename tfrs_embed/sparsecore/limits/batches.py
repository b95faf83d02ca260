"""A chip's batch, in whatever form it comes, as checked ids in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.inputs import lookup_bags, to_bags
from tfrs_embed.ops.tensors import to_tensor
from tfrs_embed.sparsecore.tf_configs import declares_samples


def read(
    features: Sequence[FeatureSpec], given: Sequence[Any], where: str
) -> list[BaggedIds]:
    """Turns features' ids into bags, as a layer does.

    Args:
        features: the features.
        given: each feature's ids: a Tensor, RaggedTensor, SparseTensor or their
            values, an array, or nested lists.
        where: which batch it is, for errors.

    Returns:
        The bags of each of the features' lookups.

    Raises:
        ValueError: another shape, an id outside the table, or sparse indices
            that do not ascend.
        TypeError: ids that are no integers, or another kind of object.
    """
    try:
        ids = [_to_tensor(*each) for each in zip(features, given, strict=True)]
        bags = to_bags(features, ids, [None] * len(ids))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}: {error}") from error
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{where}: {error.message}") from error
    return lookup_bags(features, bags)


def _to_tensor(feature: FeatureSpec, given: Any) -> Any:
    if isinstance(given, tf.compat.v1.SparseTensorValue):
        return tf.SparseTensor.from_value(given)
    if isinstance(given, tf.compat.v1.ragged.RaggedTensorValue):
        return tf.RaggedTensor.from_row_splits(given.values, given.row_splits)
    given = to_tensor(given, f"{feature}: ids")
    if isinstance(given, tf.Tensor) and declares_samples(feature):
        # One id a sample may come in any shape, as TensorFlow takes them.
        here = tf.TensorShape(given.shape)
        wanted = tf.TensorShape(feature.output_shape)
        if here != wanted and here.num_elements() == wanted.num_elements():
            return tf.reshape(given, wanted)
    return given
