"""Keys of which each replica has a copy of the row, and which need not be sent.

They are told apart once the keys of a batch are unique.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.ops.messages import Route, counts_of


class HotKeys(NamedTuple):
    """Those of a replica's unique keys whose rows it has a copy of.

    Attributes:
        places: [h] int32, unique, the places of their rows among the copies.
        order: [u] int32, for each of all unique keys its number among those
            that are sent, or how many these are plus its number among `places`.
    """

    places: tf.Tensor
    order: tf.Tensor


def split(routed: Route, hot_keys: tf.Tensor) -> tuple[Route, HotKeys]:
    """Takes the keys that have copies out of a route.

    Args:
        routed: the route of all of a replica's keys.
        hot_keys: [n] int64, ascending: the keys that have copies.

    Returns:
        The route of the others, whose `index` is still that of all; and those
        that are left out.
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
