"""Retrieves movies for users with two towers, as TFRS's tutorial sets them up.

    python benchmarks/results/two_towers.py

A rating is a user's choice of a movie's title, whatever the stars. Each tower
is an embedding of 32 numbers, trained by `tfrs.tasks.Retrieval`. The metric is
the tutorial's: how often the chosen title is among the best 100 or 10 of all
titles; titles that the user has chosen in training are ranked too.

"corrected" is the same model with the sampling probabilities that the task
takes, without accidental hits, in smaller batches. Nothing of it was tuned.
"""

from __future__ import annotations

import argparse
import dataclasses

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import numpy as np
import ranking
import record
import splits
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

DIM, LEARNING_RATE = 32, 0.1


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    batch: int
    epochs: int
    corrected: bool


SETTINGS = {
    "as the tutorial": Setting(8192, 3, corrected=False),
    "corrected": Setting(1024, 6, corrected=True),
}


def names() -> list[str]:
    """Returns each movie's title and year; some movies share one."""
    return [
        name
        for _, name in sorted(movielens.load_titles(movielens.find()).items())
    ]


def titles() -> np.ndarray:
    """Returns the id of each movie's title and year."""
    return np.unique(names(), return_inverse=True)[1]


class TwoTowers(tfrs.Model):
    """Scores titles for users by the product of their vectors.

    Args:
        users: returns the vectors of users.
        titles: returns the vectors of titles.
        frequency: how often each title is chosen, to correct the batch's
            softmax; None: nothing is corrected.
    """

    def __init__(
        self,
        users: tf_keras.Model,
        titles: tf_keras.Model,
        frequency: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.users, self.titles = users, titles
        self.frequency = frequency
        self.task = tfrs.tasks.Retrieval(
            remove_accidental_hits=frequency is not None
        )

    def compute_loss(
        self, inputs: tuple[tf.Tensor, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        user, title = inputs
        options = {}
        if self.frequency is not None:
            options = {
                "candidate_ids": title,
                "candidate_sampling_probability": tf.gather(
                    self.frequency, title
                ),
            }
        return self.task(
            self.users(user, training=training),
            self.titles(title, training=training),
            compute_metrics=False,
            **options,
        )


def accuracy(
    ratings: splits.Ratings, split: splits.Split, setting: Setting, seed: int
) -> dict[str, float]:
    """Trains a model; returns how often the choice is among the best."""
    tf_keras.utils.set_random_seed(seed)
    train, test = split
    title_of = titles()
    title = title_of[ratings.movie]
    counts = np.bincount(title[train], minlength=splits.MOVIES)
    frequency = np.maximum(counts, 1).astype(np.float32) / len(train)
    model = TwoTowers(
        tf_keras.Sequential([tfrs_embed.Embedding(splits.USERS, DIM)]),
        tf_keras.Sequential([tfrs_embed.Embedding(splits.MOVIES, DIM)]),
        frequency if setting.corrected else None,
    )
    model.compile(tf_keras.optimizers.Adagrad(LEARNING_RATE))
    pairs = tf.data.Dataset.from_tensor_slices(
        (ratings.user[train], title[train])
    )
    if setting.corrected:
        batches = pairs.shuffle(len(train), seed).batch(setting.batch)
    else:  # The tutorial's are the same in each epoch.
        batches = pairs.batch(setting.batch)
    model.fit(batches, epochs=setting.epochs, verbose=0)
    # Of each movie, as the tutorial's candidates are: some titles come twice.
    candidates = model.titles(title_of).numpy()
    users = model.users(ratings.user[test]).numpy()
    return among_the_best(
        ranking.ranks(users @ candidates.T, ratings.movie[test])
    )


def popularity(
    ratings: splits.Ratings, split: splits.Split
) -> dict[str, float]:
    """Returns how often the choice is among the titles most often chosen."""
    train, test = split
    title_of = titles()
    title = title_of[ratings.movie[train]]
    counts = np.bincount(title, minlength=splits.MOVIES)[title_of]
    return among_the_best(ranking.places(counts)[ratings.movie[test]])


def among_the_best(rank: np.ndarray) -> dict[str, float]:
    """Returns the metrics of the ranks of what was chosen; the best is 0."""
    return {f"top-{k}": float(np.mean(rank < k)) for k in (100, 10)}


def main() -> None:
    """Trains both models with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", choices=SETTINGS, default=[*SETTINGS]
    )
    arguments = parser.parse_args()
    ratings, timer = splits.read(), record.Timer()
    for seed in range(arguments.seeds):
        found = popularity(ratings, splits.random(seed))
        name = "no model, the most rated titles"
        timer.report("retrieval_tfrs", name, f"seed {seed}", **found)
    for name in arguments.only:
        for seed in range(arguments.seeds):
            found = accuracy(ratings, splits.random(seed), SETTINGS[name], seed)
            timer.report("retrieval_tfrs", name, f"seed {seed}", **found)


if __name__ == "__main__":
    main()
