"""Table optimizers: update rules, their learning rates, what is taken for one.

A module per idea: `rules` has the formulas, `learning_rate` what may change
between steps, `conversion` what users give for an optimizer.
"""

from tfrs_embed.optimizers.rules import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    TableOptimizer,
    UpdateRule,
)

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "TableOptimizer",
    "UpdateRule",
]
