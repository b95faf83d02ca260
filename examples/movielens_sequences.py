"""Ratings as histories: reading, ranking what comes next, and serving.

A history is an array of a user's movies by their rows, the oldest first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tf_keras

TOP = 10

# Data.


def read(
    path: pathlib.Path, header: int = 0, min_ratings: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Reads a file of ratings.

    Ratings of one second keep the file's order. Sorted by the movie's number,
    many of them would be easy to predict.

    Args:
        path: the file.
        header: lines to leave out.
        min_ratings: movies with fewer ratings are left out.

    Returns:
        Each user's movies by their rows, and each row's number in the file.

    Raises:
        OSError: the file is missing.
        ValueError: a line is no rating.
    """
    histories, _, movie_ids = read_with_times(path, header, min_ratings)
    return histories, movie_ids


def read_with_times(
    path: pathlib.Path, header: int = 0, min_ratings: int = 1
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Reads a file of ratings, as `read` does, and when they were given.

    Args:
        path: see `read`.
        header: see `read`.
        min_ratings: see `read`.

    Returns:
        Each user's movies by their rows, their times, all 0 if the file has
        none, and each row's number in the file.

    Raises:
        OSError: the file is missing.
        ValueError: a line is no rating.
    """
    lines = path.read_text("utf-8").replace("::", " ").splitlines()[header:]
    if not lines:
        raise ValueError(f"{path} has no ratings.")
    try:
        columns = np.loadtxt(lines, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if columns.shape[1] not in (2, 4):
        raise ValueError(
            f"{path} has {columns.shape[1]} columns: 2 or 4 are expected."
        )
    _, rows, counts = np.unique(
        columns[:, 1], return_inverse=True, return_counts=True
    )
    columns = columns[counts[rows] >= min_ratings]
    user = columns[:, 0]
    keys = (columns[:, 3], user) if columns.shape[1] == 4 else (user,)
    order = np.lexsort(keys)
    movie_ids, rows = np.unique(
        columns[:, 1].astype(np.int64), return_inverse=True
    )
    ends = np.flatnonzero(np.diff(user[order])) + 1
    time = columns[:, 3] if columns.shape[1] == 4 else np.zeros(len(user))
    times = np.split(time[order].astype(np.int64), ends)
    return np.split(rows[order], ends), times, movie_ids


def cut(histories: Sequence[np.ndarray], length: int) -> list[np.ndarray]:
    """Cuts histories into windows of at most `length`, from their ends on."""
    return [
        history[max(0, end - length) : end]
        for history in histories
        for end in range(len(history), 0, -length)
    ]


def ragged(rows: Sequence[np.ndarray]) -> tf.RaggedTensor:
    """Returns rows of ids as one tensor."""
    return tf.RaggedTensor.from_row_lengths(
        np.concatenate(rows), [len(row) for row in rows]
    )


# Ranking.


def predict(model: tf_keras.Model, histories: tf.RaggedTensor) -> np.ndarray:
    """Returns the scores of all movies, [histories, movies]."""
    batches = tf.data.Dataset.from_tensor_slices(histories).ragged_batch(256)
    return model.predict(batches, verbose=0)


def metrics(
    scores: np.ndarray, right: np.ndarray, seen: tf.RaggedTensor | None
) -> tuple[float, float]:
    """Returns HR@10 and NDCG@10.

    Args:
        scores: of all movies, [users, movies].
        right: each user's next movie.
        seen: movies that are not ranked, unless they are the right one.
    """
    users = np.arange(len(right))
    # Ties, and scores that are no numbers, count against the right one.
    better = ~(scores < scores[users, right][:, None])
    if seen is not None:
        better[seen.value_rowids().numpy(), seen.values.numpy()] = False
    better[users, right] = True
    rank = np.count_nonzero(better, axis=1)
    gains = np.where(rank <= TOP, 1 / np.log2(1 + rank), 0.0)
    return float(np.mean(gains > 0)), float(np.mean(gains))


# Serving.


class Recommender(tf.Module):
    """The ten movies that suit each history best, without those in it.

    Histories are of MovieLens's own numbers. If fewer than ten movies are left,
    the rest of the ten has a score of minus infinity.

    Args:
        model: the model.
        movie_ids: the number of the movie of each row, ascending.
        titles: the title of each.
    """

    def __init__(
        self,
        model: tf_keras.Model,
        movie_ids: np.ndarray,
        titles: Sequence[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.movie_ids, self.titles = tf.constant(movie_ids), list(titles)
        # Numbers of no movie are errors.
        self.row = tf_keras.layers.IntegerLookup(
            vocabulary=movie_ids, num_oov_indices=0
        )

    def __call__(self, history: tf.RaggedTensor) -> dict[str, tf.Tensor]:
        rows = history.with_values(self.row(history.values))
        scores = self.model(rows, training=False)
        # All that was rated, also what is too long ago to be read.
        places = tf.stack([rows.value_rowids(), rows.values], axis=1)
        scores = tf.tensor_scatter_nd_update(
            scores, places, tf.fill([tf.size(rows.values)], -float("inf"))
        )
        scores, best = tf.math.top_k(scores, min(TOP, len(self.titles)))
        return {
            "movie_id": tf.gather(self.movie_ids, best),
            "title": tf.gather(self.titles, best),
            "score": scores,
        }
