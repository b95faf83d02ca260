"""`copy.deepcopy` of a layer of tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfrs_embed import strategies
from tfrs_embed.engines.tables.state import TableState


def copy_layer(
    layer: Any, strategy: tf.distribute.Strategy, memo: dict[int, Any]
) -> Any:
    """Makes a layer of another's config, under its strategy.

    Python would copy the strategy, which can't be, and share the variables
    that the layer's functions read.

    Args:
        layer: the layer.
        strategy: the strategy it was made under.
        memo: what `copy.deepcopy` has copied.

    Returns:
        The layer, without tables.

    Raises:
        ValueError: the layer's config can't be stored.
    """
    with strategies.scope(strategy):
        copied = type(layer).from_config(layer.get_config())
    memo[id(layer)] = copied
    return copied


def copy_state(
    tables: Iterable[tuple[TableState, TableState]], steps: tuple[Any, Any]
) -> None:
    """Copies tables, slots and the step. With several workers, all must.

    Args:
        tables: each table here and in the copy.
        steps: the number of updates, or None, here and in the copy.
    """
    for here, copied in tables:
        # Keys come before their rows.
        for name, variable in here.variables.items():
            copied.variables[name].assign(variable.numpy())
    if steps[0] is not None:
        steps[1].assign(steps[0].numpy())
