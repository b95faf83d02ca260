"""Chains of deltas: an exported model, and the deltas that build on it.

Each export and each delta has a random id. A delta has the ids of the model and
of what it builds on, and a number: an export has the number 0.
"""

from __future__ import annotations

import dataclasses
import os
import secrets

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.names import key_of
from tfrs_embed.serving.workers import joined

#: The ids of an updatable export and of the deltas it was given, [n] int64.
IDS = key_of("applied/ids")
#: A delta's numbers, int64 scalars, in the order of `Link`.
LINK = ("delta/model", "delta/number", "delta/id", "delta/since")


@dataclasses.dataclass(frozen=True)
class Link:
    """A place in a chain.

    Attributes:
        model: the export's id.
        number: how many deltas lie between the export and this place.
        id: the id of the export or delta.
        since: the id of what the delta builds on; of an export, its own.
    """

    model: int
    number: int
    id: int
    since: int

    @classmethod
    def first(cls) -> Link:
        """A new export."""
        new = _random()
        return cls(new, 0, new, new)

    def next(self) -> Link:
        """A new delta that builds on this place."""
        return Link(self.model, self.number + 1, _random(), self.id)

    def agreed(self, strategy: tf.distribute.Strategy) -> Link:
        """Returns the link of one of the workers, the same on all of them.

        Raises a ValueError if they build on different places.
        """
        mine = np.array(dataclasses.astuple(self))
        links = joined(strategy, mine).reshape(-1, len(mine))
        if self.number and len(np.unique(links[:, [0, 1, 3]], axis=0)) > 1:
            raise ValueError("The workers give different paths in since.")
        return Link(*links[0].tolist())


def _random() -> int:
    return secrets.randbits(63)


def read_link(path: str | os.PathLike[str]) -> Link:
    """Reads the place of an export, or of a delta.

    Raises:
        ValueError: there is no updatable export and no delta at the path.
        tf.errors.OpError: the file is damaged.
    """
    path = os.fspath(path).rstrip("/")
    try:
        if tf.io.gfile.isdir(path):
            stored = tf.train.load_checkpoint(f"{path}/variables/variables")
            # A loaded model that was saved again has the ids of deltas, too.
            ids = stored.get_tensor(IDS).tolist()
            return Link(ids[0], len(ids) - 1, ids[-1], ids[-2:][0])
        stored = tf.train.load_checkpoint(path)
        return Link(*(int(stored.get_tensor(name)) for name in LINK))
    except (
        # Tensors of other shapes and dtypes, too.
        *(AttributeError, LookupError, OverflowError, TypeError, ValueError),
        tf.errors.NotFoundError,
    ) as error:
        raise ValueError(
            f"'{path}' is neither a model that was exported with "
            "updatable=True nor a delta of one."
        ) from error
