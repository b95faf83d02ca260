"""Table optimizers: update rules, learning rates, and their conversion.

`declared` has the optimizers that this package adds to TensorFlow's and
Keras's, `rules` the formulas: a new rule is a class there. `options` clips
gradients and decays rows before a rule and limits their norms after it,
`learning_rate` changes between steps, `conversion` takes users' optimizers.
`following` copies a model's rate to tables, and `missing_settings` warns of the
model's settings that tables lack.

Example:
    >>> table = tfrs_embed.TableConfig(
    ...     "movie", 1000, 16, optimizer=tfrs_embed.optimizers.RowWiseAdagrad()
    ... )
    >>> table.optimizer.learning_rate
    0.01
"""

from tfrs_embed.optimizers.declared import (
    Regularized,
    RowWiseAdagrad,
    RowWiseAdam,
)
from tfrs_embed.optimizers.following import FollowLearningRate

__all__ = [
    "FollowLearningRate",
    "Regularized",
    "RowWiseAdagrad",
    "RowWiseAdam",
]
