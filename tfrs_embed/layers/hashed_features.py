"""Combines the lookups of a hashed feature into its activations."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.embedding_lookup import lookup_table
from tfrs_embed.ops.inputs import first_bags
from tfrs_embed.ops.lookup import activations


def compose(
    features: Sequence[FeatureSpec],
    bags: Sequence[BaggedIds],
    found: Sequence[tf.Tensor],
    strategy: tf.distribute.Strategy | None,
) -> list[tf.Tensor]:
    """Returns features' activations, made from those of their lookups.

    Args:
        features: the features.
        bags: the result of `to_bags` for the features.
        found: the activations of their lookups, one feature after the other.
        strategy: the layer's strategy; None: in an exported model.
    """
    remaining = iter(found)
    return [
        _compose(f, b, [next(remaining) for _ in f.lookups], strategy)
        for f, b in zip(features, first_bags(features, bags), strict=True)
    ]


def require_for_tpu(feature: FeatureSpec, ids: Any) -> None:
    """Raises a ValueError for ids that a TPU's program can't take.

    These are strings, unless the host may take them; and ragged or sparse ids
    of which each is looked up alone: their number is unknown to XLA.
    """
    strings = getattr(ids, "dtype", None) == tf.string
    if strings and not tf.config.get_soft_device_placement():
        raise ValueError(
            f"{feature}: TPUs take no strings. After "
            "tf.config.set_soft_device_placement(True) they stay on the host, "
            "which hashes them."
        )
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        return
    if not feature.combined:
        raise ValueError(
            f"{feature}: with combiner=None each ragged or sparse id has a "
            "vector, and a TPU's program has to know the number of ids when it "
            "is traced: give dense ids, or declare a max_sequence_length."
        )
    if hashings.multiplies(feature.hashing):
        raise ValueError(
            f"{feature}: its QuotientRemainder multiplies the rows of each id, "
            "and a TPU's program has to know the number of ids when it is "
            "traced: give dense ids, padded with a padding_value, or take "
            "operation='add' or 'concat'."
        )


def _compose(
    feature: FeatureSpec, bags: BaggedIds, parts: list[tf.Tensor], strategy: Any
) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0]
    if hashings.multiplies(feature.hashing):
        product = functools.reduce(operator.mul, parts)
        rows = tf.reshape(product, [-1, feature.table.dim])
        # The ids are indices of products.
        vectors = lookup_table(rows, bags, strategy)
        return activations([vectors], [bags], [feature], product.dtype)[0]
    if feature.width > feature.table.dim:
        return tf.concat(parts, -1)
    # The sum of combined parts is the combination of sums.
    return functools.reduce(operator.add, parts)
