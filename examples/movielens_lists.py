"""Ratings as short lists: drawing them, and a loss and a metric of order."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of ratings, each of one user.

    Attributes:
        user: the user of each list, [lists].
        movie: the movies that the user rated, [lists, length].
        stars: the user's ratings of them, [lists, length].
    """

    user: np.ndarray
    movie: np.ndarray
    stars: np.ndarray

    def __len__(self) -> int:
        return len(self.user)

    def inputs(self) -> dict[str, np.ndarray]:
        """Returns the ids that a model reads."""
        return {"user": self.user, "movie": self.movie}


def draw(
    user: np.ndarray,
    movie: np.ndarray,
    stars: np.ndarray,
    number: int,
    length: int,
    seed: int,
) -> Lists:
    """Draws lists of each user's ratings.

    A list has no rating twice; a user's lists may have ratings in common. Users
    with fewer than `length` ratings are left out.

    Args:
        user: who rated, [ratings].
        movie: what was rated, [ratings].
        stars: the ratings.
        number: lists of each user.
        length: ratings in a list.
        seed: of the draw.

    Raises:
        ValueError: no user has `length` ratings.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(user, kind="stable")
    ends = np.flatnonzero(np.diff(user[order])) + 1
    rows = [
        rng.permuted(np.tile(own, [number, 1]), axis=1)[:, :length]
        for own in np.split(order, ends)
        if len(own) >= length
    ]
    if not rows:
        raise ValueError(f"No user has {length} ratings, as a list needs.")
    chosen = np.concatenate(rows)
    return Lists(user[chosen[:, 0]], movie[chosen], stars[chosen])


def pairwise_hinge(stars: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Returns how far pairs of a list are from the right order, [batch].

    A pair of movies costs max(0, 1 - d), where d is the score of the better
    rated one less the other one's score; equal ratings cost nothing. The sum
    over pairs is divided by the list's length.

    Args:
        stars: ratings on any scale, [batch, length].
        scores: the model's scores, [batch, length].
    """
    better = stars[:, :, None] > stars[:, None, :]
    margin = scores[:, :, None] - scores[:, None, :]
    cost = tf.where(better, tf.nn.relu(1.0 - margin), 0.0)
    return tf.reduce_mean(tf.reduce_sum(cost, axis=2), axis=1)


def ndcg(stars: np.ndarray, scores: np.ndarray, seed: int = 0) -> float:
    """Returns the mean NDCG of the order that scores give to lists.

    A movie's gain is 2**r - 1, where r is its rating on a scale from 0 to 1,
    divided by log2(1 + its place). Equal scores have a drawn order. A list
    whose ratings are all one star has an NDCG of 0.

    Args:
        stars: ratings of 1 to 5, [lists, length].
        scores: [lists, length].
        seed: of the order of equal scores.
    """
    gains = 2 ** ((stars - 1.0) / 4.0) - 1
    discounts = 1 / np.log2(np.arange(stars.shape[1]) + 2)
    ties = np.random.default_rng(seed).random(stars.shape)
    order = np.lexsort((ties, -np.asarray(scores)), axis=1)
    found = np.take_along_axis(gains, order, axis=1) @ discounts
    best = -np.sort(-gains, axis=1) @ discounts
    return float(np.mean(found / np.where(best > 0, best, 1.0)))
