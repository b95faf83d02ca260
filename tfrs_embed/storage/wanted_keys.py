"""The keys whose texts training lookups look for among their strings."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.storage.row_store import HOST

# So many keys are added to the wanted ones without sorting all of these.
_FEW = 1024
#: The end of wanted keys, so that each key has a place among them.
END = np.int64(tf.int64.max)


class WantedKeys:
    """The keys whose texts lookups look for, in two ascending variables.

    Args:
        name: the table's name.
        alone: whether there are no other workers.

    Attributes:
        few: keys that were added lately, and are asked for anew by each step.
            Other workers get them in the step.
    """

    def __init__(self, name: str, alone: bool) -> None:
        self.few: set[int] = set()
        self._alone = alone
        # Many keys, which all workers know, and which are rarely sorted anew.
        # Some may not be wanted any more.
        self._many = np.zeros([0], np.int64)
        with tf.device(HOST):
            self._variables = [
                make_variable(
                    tf.constant([END]), f"{name}/{kind}", shape=[None]
                )
                for kind in ("wanted_texts", "new_texts")
            ]

    def read(self) -> list[tf.Tensor]:
        """Returns the many keys and the few, ascending.

        The last key of both, the largest int64, ends them.
        """
        return [
            tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.int64)
            for v in self._variables
        ]

    def publish(
        self, unknown: Set[int], elsewhere: Set[int], anew: bool = False
    ) -> None:
        """Makes lookups look for the few, and for keys of unknown texts.

        `unknown` are keys of this worker, `elsewhere` those of others. With
        several workers all must sort the many `anew` where they give keys rows
        between steps.
        """
        if self._alone and len(self.few & unknown) > _FEW:
            self.few -= unknown
            anew = True
        count = len(unknown) - len(self.few & unknown) + len(elsewhere)
        stale = len(self._many) - count
        if anew or stale > len(self._many) // 4:
            many = (unknown - self.few) | elsewhere
            self._many = np.sort(np.fromiter(many, np.int64, len(many)))
            self._assign(0, self._many)
        self._assign(1, np.sort(np.fromiter(self.few, np.int64)))

    def _assign(self, number: int, keys: np.ndarray) -> None:
        # By eager operations, also while a graph runs: TensorFlow would order
        # a graph's reads and writes across replicas.
        with tf.init_scope(), tf.device(HOST):
            tf.raw_ops.AssignVariableOp(
                resource=self._variables[number].handle,
                value=tf.constant(np.append(keys, END)),
            )


def are_among(keys: tf.Tensor, lists: list[tf.Tensor]) -> tf.Tensor:
    """Returns which keys, [n], are in a list; each is ascending, and ended."""
    found = tf.zeros_like(keys, tf.bool)
    for each in lists:
        place = tf.searchsorted(each, keys)
        found |= tf.equal(tf.gather(each, place), keys)
    return found
