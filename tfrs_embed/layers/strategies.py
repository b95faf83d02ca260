"""The strategy that a layer belongs to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import tensorflow as tf


def check(name: str, strategy: tf.distribute.Strategy) -> None:
    """Checks that a layer is called under the strategy it was made under.

    Args:
        name: the layer's name.
        strategy: the strategy it was made under.

    Raises:
        RuntimeError: another strategy is in effect.
    """
    if not tf.distribute.has_strategy():
        return
    current = tf.distribute.get_strategy()
    if current is not strategy:
        raise RuntimeError(
            f"Layer '{name}' was made under {type(strategy).__name__} but is "
            f"called under {type(current).__name__}. Make it inside the scope "
            "of the strategy that runs it."
        )


def scope(strategy: tf.distribute.Strategy) -> AbstractContextManager:
    """Returns the strategy's scope, to make variables in."""
    # A replica that builds a layer is inside the scope, and can't enter.
    inside = tf.distribute.get_strategy() is strategy
    return nullcontext() if inside else strategy.scope()
