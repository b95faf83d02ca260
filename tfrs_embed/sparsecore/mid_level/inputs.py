"""Checks the ids and weights of a TPUEmbeddingV2 on the host.

SparseCores don't check ids: a bad one leads to another row, even of another
table. TensorFlow silently drops samples that it has no room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.parsed_ids import ParsedIds, parse_ids
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import FeatureLayout, Layout


def parse(
    features: Sequence[FeatureSpec],
    layout: Layout,
    inputs: Sequence[Any],
    weights: Sequence[Any],
    chips: int,
    checks: Checks,
) -> list[ParsedIds]:
    """Checks ids and weights, but not that ids are in their tables.

    Features are in the layout's order and have no output_shape. Ids are
    Tensors, or RaggedTensors or SparseTensors of rank 2, of any integer dtype;
    weights are of the same kind, or None. The batches of `chips` follow each
    other.
    """
    made = []
    for feature, place, ids, weight in zip(
        features, layout.features, inputs, weights, strict=True
    ):
        parsed = parse_ids(feature, ids, weight, checks)
        parsed.flatten()
        _require_samples(parsed, place, chips, checks)
        made.append(parsed)
    return made


def by_sample(
    layout: Layout, parsed: Sequence[ParsedIds], chips: int
) -> list[Ids]:
    """Converts parsed ids to the input of host preprocessing."""
    ids = []
    for each, feature in zip(parsed, layout.features, strict=True):
        splits = each.splits
        if splits is None:
            # Each dense id is a sample.
            splits = tf.range(chips * feature.samples + 1)
            if each.bag_ids is not None:
                splits = tf.searchsorted(each.bag_ids, splits)
        ids.append(Ids(splits, each.ids, each.weights))
    return ids


def _require_samples(
    parsed: ParsedIds, feature: FeatureLayout, chips: int, checks: Checks
) -> None:
    expected = chips * feature.samples
    if parsed.even:
        # Dense ids of any shape are one sample each.
        static, count = parsed.ids.shape[0], tf.size(parsed.ids)
    else:
        static, count = parsed.static_shape[0], parsed.shape[0]
    of_chips = f"{chips} chips with " if chips > 1 else ""
    head = f"{parsed.feature}: ids of "
    tail = (
        f" samples, but output_shape={feature.config.output_shape.as_list()} "
        f"asks for {expected} ({of_chips}{feature.samples} each)."
    )
    if static is None:
        checks.require(
            tf.equal(count, expected), lambda: message(head, count, tail)
        )
    elif static != expected:
        raise ValueError(f"{head}{static}{tail}")
