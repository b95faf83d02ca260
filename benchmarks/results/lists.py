"""Orders short lists of a user's movies, as keras_rs's tutorial sets it up.

    python benchmarks/results/lists.py

70% of the ratings are for training and the last 15% for the test; no rating is
in both. A list has five of a user's ratings: 50 lists of each user to train on,
one of each user to test with. From vectors of 32 for the user and the movie,
dense layers of 256, 64 and 1 compute a score. Adagrad trains five epochs of
batches of 1,024 lists, the same in each epoch, with the mean squared error or
with a hinge loss of pairs. The embedding layer is ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import movielens_lists
import numpy as np
import record
import splits
import tensorflow as tf
import tf_keras

import tfrs_embed

ROW = "listwise"
LISTS, LENGTH, DIM = 50, 5, 32
BATCH, EPOCHS, LEARNING_RATE = 1024, 5, 0.1
TRAIN, TEST = 70_000, 15_000
#: A movie's mean rating counts this many ratings of the mean of all.
PRIOR = 5

LOSSES: dict[str, str | Callable[..., tf.Tensor]] = {
    "squared error": "mse",
    "hinge loss of pairs": movielens_lists.pairwise_hinge,
}


class Scores(tf_keras.Model):
    """Scores a list of movies for a user."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"user": splits.USERS, "movie": splits.MOVIES}
        # Keras's Embedding starts so.
        start = {
            name: tf_keras.initializers.RandomUniform(-0.05, 0.05)
            for name in rows
        }
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.TableConfig(
                    name, size, DIM, initializer=start[name]
                )
                for name, size in rows.items()
            },
            tf_keras.optimizers.Adagrad(LEARNING_RATE),
            size_threshold=0,
        )
        self.dense = tf_keras.Sequential(
            [
                tf_keras.layers.Dense(256, activation="relu"),
                tf_keras.layers.Dense(64, activation="relu"),
                tf_keras.layers.Dense(1),
            ]
        )

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """Returns scores, [batch, LENGTH]."""
        vectors = self.embeddings(inputs, training=training)
        user = tf.repeat(vectors["user"][:, None], LENGTH, axis=1)
        both = tf.concat([user, vectors["movie"]], axis=2)
        return self.dense(both)[:, :, 0]


def train(
    lists: movielens_lists.Lists, loss: str | Callable[..., tf.Tensor]
) -> tf_keras.Model:
    """Returns a trained model."""
    model = Scores()
    model.compile(tf_keras.optimizers.Adagrad(LEARNING_RATE), loss)
    model.fit(
        lists.inputs(),
        movielens.scale(lists.stars).astype(np.float32),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return model


def movie_means(ratings: splits.Ratings, rows: np.ndarray) -> np.ndarray:
    """Returns each movie's mean rating, [movies]."""
    movie, stars = ratings.movie[rows], ratings.stars[rows]
    total = np.bincount(movie, stars, minlength=splits.MOVIES)
    count = np.bincount(movie, minlength=splits.MOVIES)
    return (total + PRIOR * stars.mean()) / (count + PRIOR)


def main() -> None:
    """Trains with both losses and several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    ratings, timer = splits.read(), record.Timer()
    for seed in range(arguments.seeds):
        rest, test = splits.random(seed, TEST)
        rows = rest[-TRAIN:]
        to_train, to_test = (
            movielens_lists.draw(
                ratings.user[part],
                ratings.movie[part],
                ratings.stars[part],
                number,
                LENGTH,
                seed,
            )
            for part, number in ((rows, LISTS), (test, 1))
        )
        means = movie_means(ratings, rows)[to_test.movie]
        of_nothing = np.zeros_like(means)
        run = f"seed {seed}"
        for name, scores in (
            ("no model, random order", of_nothing),
            ("no model, movies' mean ratings", means),
        ):
            found = movielens_lists.ndcg(to_test.stars, scores, seed)
            timer.report(ROW, name, run, **{"ndcg@5": found})
        for name, loss in LOSSES.items():
            tf_keras.utils.set_random_seed(seed)
            model = train(to_train, loss)
            scores = model.predict(to_test.inputs(), 1024, verbose=0)
            found = movielens_lists.ndcg(to_test.stars, scores, seed)
            timer.report(ROW, name, run, **{"ndcg@5": found})


if __name__ == "__main__":
    main()
