"""Variables of one device, whatever strategy is in effect."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import ResourceVariable

#: In a strategy's scope `tf.Variable(...)` asks the strategy, which mirrors the
#: variable, and under several workers waits for all of them. The class itself
#: makes one variable here.
UnmirroredVariable = ResourceVariable


def make_variable(
    value: tf.Tensor,
    name: str,
    shape: Any = None,
    kind: type = UnmirroredVariable,
) -> tf.Variable:
    """Makes a variable of this device alone: no strategy mirrors it."""
    # Keras wants to see that it was made in the strategy's scope all the same.
    strategy = (
        tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    )
    return kind(
        value,
        trainable=False,
        name=_graph_name(name),
        shape=shape,
        distribute_strategy=strategy,
    )


def _graph_name(name: str) -> str:
    """A name that TensorFlow takes in the graph of a SavedModel.

    Tables may have any: other characters become their codes.
    """
    name = re.sub(
        r"[^A-Za-z0-9_.\\/-]", lambda match: f">{ord(match[0]):X}", name
    )
    return name if re.match("[A-Za-z0-9.]", name) else f".{name}"
