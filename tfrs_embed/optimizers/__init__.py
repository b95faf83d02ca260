"""Table optimizers: update rules, their learning rates, what is taken for one.

A module per idea: `rules` has the formulas, and a new rule is a class there;
`learning_rate` has what may change between steps, `conversion` what users give
for an optimizer.
"""

from tfrs_embed.optimizers.rules import (
    FTRL,
    RULES,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Momentum,
    RMSprop,
    TableOptimizer,
    UpdateRule,
)

__all__ = [
    "FTRL",
    "RULES",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Momentum",
    "RMSprop",
    "TableOptimizer",
    "UpdateRule",
]
