"""Table optimizers: update rules, their learning rates, what is taken for one.

`declared` has the optimizers that this package adds to TensorFlow's and
Keras's, which users make. A module per idea: `rules` has the formulas, and a
new rule is a class there; `options` clips gradients and decays rows before a
rule; `learning_rate` has what may change between steps, `conversion` what users
give for an optimizer. `following` has tables follow a model's optimizer, and
`unreached` says what of it doesn't reach them.

Example:
    >>> table = tfrs_embed.TableConfig(
    ...     "movie", 1000, 16, optimizer=tfrs_embed.optimizers.RowWiseAdagrad()
    ... )
    >>> table.optimizer.learning_rate
    0.01
"""

from tfrs_embed.optimizers.declared import Regularized, RowWiseAdagrad
from tfrs_embed.optimizers.following import FollowLearningRate

__all__ = ["FollowLearningRate", "Regularized", "RowWiseAdagrad"]
