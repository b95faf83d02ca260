"""Ids and weights of a TPUEmbeddingV2, checked.

SparseCores read the row that an id leads to, even another table's, and
TensorFlow leaves out samples that it has no room for. So ids, weights and
their number are checked on the host, before buffers are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.ops.bags import Constants
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.parsed_ids import ParsedIds, parse_ids
from tfrs_embed.ops.validation import require_valid
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.setup import Setup


def parse(
    setup: Setup,
    inputs: Sequence[Any],
    weights: Sequence[Any],
    chips: int,
    checks: Checks,
) -> list[ParsedIds]:
    """Checks ids and weights.

    Args:
        setup: the configuration.
        inputs: each feature's ids: a Tensor, a RaggedTensor or a SparseTensor
            of rank 2, of any integer dtype; in the layout's order.
        weights: each feature's weights, of the ids' kind; or None.
        chips: how many chips' batches the inputs hold, one after the other.
        checks: takes the conditions that depend on values.

    Returns:
        Each feature's ids and weights, valid once the checks hold.

    Raises:
        TypeError: a wrong dtype or kind.
        ValueError: a wrong rank or static shape.
    """
    constants = Constants()
    made = []
    for i, feature in enumerate(setup.features):
        each = parse_ids(feature, inputs[i], weights[i], checks)
        each.flatten(constants)
        _require_samples(setup, i, each, chips, checks)
        made.append(each)
    require_valid(made, checks, training=True)
    return made


def by_sample(
    layout: Layout, parsed: Sequence[ParsedIds], chips: int
) -> list[Ids]:
    """Returns parsed ids as buffers are made of them."""
    ids = []
    for each, feature in zip(parsed, layout.features, strict=True):
        splits = each.splits
        if splits is None:
            # Dense ids are one sample each.
            splits = tf.range(chips * feature.samples + 1)
            if each.bag_ids is not None:
                splits = tf.searchsorted(each.bag_ids, splits)
        ids.append(Ids(splits, each.ids, each.weights))
    return ids


def _require_samples(
    setup: Setup, index: int, parsed: ParsedIds, chips: int, checks: Checks
) -> None:
    layout = setup.layout.features[index]
    expected = chips * layout.samples
    if parsed.even:
        # Dense ids are one sample each, in whatever shape they come.
        static, count = parsed.ids.shape[0], tf.size(parsed.ids)
    else:
        static, count = parsed.static_shape[0], parsed.shape[0]
    of_chips = f"{chips} chips with " if chips > 1 else ""
    need = (
        f"output_shape={layout.config.output_shape.as_list()} asks for "
        f"{expected} ({of_chips}{layout.samples} each)."
    )
    if static is not None and static != expected:
        raise ValueError(
            f"{setup.features[index]}: ids of {static} samples, but {need}"
        )
    if static is None:
        checks.require(
            tf.equal(count, expected),
            lambda: message(
                f"{setup.features[index]}: ids of ",
                count,
                f" samples, but {need}",
            ),
        )
