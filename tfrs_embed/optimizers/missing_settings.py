"""Warnings of settings of a model's optimizer that tables lack.

Tables have optimizers of their own, without the clipping and decay of the
optimizer of `model.compile`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfrs_embed.optimizers.options import CLIPS
from tfrs_embed.optimizers.rules import TableOptimizer

# The attribute of a layer's scalar weight with the layer's name and options.
_ATTRIBUTE = "_tfrs_embed_table_options"

_SETTINGS = (*CLIPS, "weight_decay", "use_ema", "gradient_accumulation_steps")


def mark(
    variable: Any,
    layer: str,
    optimizers: Mapping[str, TableOptimizer | None],
) -> None:
    """Attaches a layer's tables' options to its scalar weight, for `warn`."""
    of_tables = {name: o.options for name, o in optimizers.items() if o}
    setattr(variable, _ATTRIBUTE, (layer, of_tables))


def warn(optimizer: Any, variables: Sequence[Any]) -> None:
    """Warns if a Keras optimizer has settings that marked tables lack.

    `variables` are those it trains; marked ones stand for tables.
    """
    settings = {name: getattr(optimizer, name, None) for name in _SETTINGS}
    asked = {
        name: value
        for name, value in settings.items()
        if value is not None and np.any(value)
    }
    if not asked:
        return
    for variable in variables:
        layer, of_tables = getattr(variable, _ATTRIBUTE, ("", {}))
        for name, value in asked.items():
            alike = CLIPS if name in CLIPS else (name,)
            lacking = [
                table
                for table, options in of_tables.items()
                if not options.given().keys() & set(alike)
            ]
            if lacking:
                warnings.warn(
                    f"Layer '{layer}': the tables {lacking} are trained by "
                    f"optimizers of their own, without {name}={value!r} of the "
                    f"model's optimizer '{optimizer.name}'. Give it to these "
                    "optimizers too, as to Keras's, or by "
                    "tfrs_embed.optimizers.Regularized. Tables have no "
                    "use_ema.",
                    stacklevel=2,
                )
