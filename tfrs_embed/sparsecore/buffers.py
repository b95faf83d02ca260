"""From a chip's ids to the buffers of its SparseCores, all features at once."""

from __future__ import annotations

from collections.abc import Sequence

from tfrs_embed.sparsecore.coo import Coo, Ids, convert
from tfrs_embed.sparsecore.csr import ChipBuffers, wrap
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.partitions import Partitions, check_limits, sort


def preprocess(layout: Layout, ids: Sequence[Ids]) -> dict[str, ChipBuffers]:
    """Fills one chip's buffers, as `TPUEmbeddingV2.enqueue` does.

    Touches nothing shared: may run in several threads at once.

    Args:
        layout: the layout, with the limits of each stack.
        ids: each feature's ids on this chip, in the layout's order.

    Returns:
        The buffers of each stack, by its name; cut at their unpadded sizes, as
        TensorFlow's static ones are mostly room for more ids.

    Raises:
        ValueError: a limit or the capacity is exceeded. No id is checked
            against its table's rows.
    """
    stacks = _sort(layout, ids, with_gains=True)
    for name, parts in stacks.items():
        stack = layout.stacks[name]
        check_limits(parts, stack)
    return {
        name: wrap(
            parts,
            layout.config.max_ids_per_chip_per_sample
            * layout.stacks[name].samples,
            layout.config.allow_id_dropping,
        )
        for name, parts in stacks.items()
    }


def count(layout: Layout, ids: Sequence[Ids]) -> dict[str, Partitions]:
    """Counts what would be in one chip's buffers, whatever the limits.

    Args:
        layout: the layout.
        ids: see `preprocess`; weights are not read.

    Returns:
        The partitions of each stack, without gains, by its name.
    """
    return _sort(layout, ids, with_gains=False)


def _sort(
    layout: Layout, ids: Sequence[Ids], with_gains: bool
) -> dict[str, Partitions]:
    coos: dict[str, list[Coo]] = {name: [] for name in layout.stacks}
    offsets: dict[str, list[int]] = {name: [] for name in layout.stacks}
    for feature, given in zip(layout.features, ids, strict=True):
        coos[feature.stack].append(convert(layout, feature, given, with_gains))
        offsets[feature.stack].append(feature.col_offset)
    return {
        name: sort(
            features,
            offsets[name],
            layout.stacks[name].samples,
            layout.topology,
        )
        for name, features in coos.items()
    }
