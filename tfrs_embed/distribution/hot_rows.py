"""Keys whose rows every replica has a copy of, so that they are not sent."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.traffic import WORD, Collective
from tfrs_embed.ops.messages import Route, counts_of


def num_floats(rows: int, dim: int) -> int:
    """Returns how many numbers a step sums up for a table's hot rows.

    They are the gradients, and for each row whether it was looked up.
    """
    return rows * (dim + 1)


def collectives(floats: int) -> list[Collective]:
    """Returns a step's collectives for the hot rows of all tables.

    `floats` is the sum of the tables' `num_floats`.
    """
    return [Collective("all_reduce", WORD * floats)] if floats else []


class HotKeys(NamedTuple):
    """A replica's unique keys that have copies of their rows.

    Attributes:
        places: [h] int32, unique, the places of their rows among the copies.
        order: [u] int32, for each unique key its index among [keys sent, keys
            with copies].
    """

    places: tf.Tensor
    order: tf.Tensor


def split(routed: Route, hot_keys: tf.Tensor) -> tuple[Route, HotKeys]:
    """Splits a route of unique keys into keys to send and keys with copies.

    `hot_keys`, [n] int64 ascending, are the keys that have copies. The route's
    `index` is still that of all keys.
    """
    world = routed.counts.shape[0]
    keys = routed.row * world + tf.cast(routed.owner, tf.int64)
    place = tf.searchsorted(hot_keys, keys)
    last = hot_keys.shape[0] - 1
    hot = tf.equal(tf.gather(hot_keys, tf.minimum(place, last)), keys)
    sent, kept = (
        tf.cast(tf.where(each)[:, 0], tf.int32)
        for each in (tf.logical_not(hot), hot)
    )
    owner = tf.gather(routed.owner, sent)
    others = Route(
        routed.index,
        tf.gather(routed.row, sent),
        owner,
        counts_of(owner, world),
    )
    order = tf.math.invert_permutation(tf.concat([sent, kept], 0))
    return others, HotKeys(tf.gather(place, kept), order)
