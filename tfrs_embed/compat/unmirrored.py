"""Variables of one device, under any strategy."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import ResourceVariable

#: In a strategy's scope `tf.Variable(...)` makes a mirrored variable, and waits
#: for all workers. This class makes one variable here.
UnmirroredVariable = ResourceVariable


def make_variable(
    value: tf.Tensor, name: str, shape: Any = None
) -> tf.Variable:
    """Makes a variable of this device alone: no strategy mirrors it."""
    # TensorFlow refuses other names in a SavedModel's graph.
    name = re.sub(
        r"[^A-Za-z0-9_.\\/-]", lambda match: f">{ord(match[0]):X}", name
    )
    # Keras checks that it was made in the strategy's scope.
    strategy = (
        tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    )
    return UnmirroredVariable(
        value,
        trainable=False,
        name=name if re.match("[A-Za-z0-9.]", name) else f".{name}",
        shape=shape,
        distribute_strategy=strategy,
    )
