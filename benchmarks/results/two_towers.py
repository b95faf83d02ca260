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
import csv
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


def titles() -> np.ndarray:
    """Returns the id of each movie's title and year; some movies share one."""
    path = movielens.find() / movielens.MOVIES
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        rows = sorted(list(reader)[1:], key=lambda row: int(row[0]))
    names = [f"{row[1]} ({row[2]})" for row in rows]
    return np.unique(names, return_inverse=True)[1]


class TwoTowers(tfrs.Model):
    """Scores titles for users.

    Args:
        frequency: how often each title is chosen, to correct the batch's
            softmax; None: nothing is corrected.
    """

    def __init__(self, frequency: np.ndarray | None) -> None:
        super().__init__()
        self.users = tfrs_embed.Embedding(splits.USERS, DIM)
        self.titles = tfrs_embed.Embedding(splits.MOVIES, DIM)
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
            self.users(user),
            self.titles(title),
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
    model = TwoTowers(frequency if setting.corrected else None)
    model.compile(tf_keras.optimizers.Adagrad(LEARNING_RATE))
    pairs = tf.data.Dataset.from_tensor_slices(
        (ratings.user[train], title[train])
    )
    if setting.corrected:
        batches = pairs.shuffle(len(train), seed).batch(setting.batch)
    else:  # The tutorial's are the same in each epoch.
        batches = pairs.batch(setting.batch)
    model.fit(batches, epochs=setting.epochs, verbose=0)
    vectors = model.users(np.arange(splits.USERS)).numpy()
    # Of each movie, as the tutorial's candidates are: some titles come twice.
    scores = vectors @ model.titles(title_of).numpy().T
    user, movie = ratings.user[test], ratings.movie[test]
    better = scores[user] > scores[user, movie][:, None]
    return among_the_best(np.count_nonzero(better, axis=1))


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
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    ratings, timer = splits.read(), record.Timer()
    for seed in range(arguments.seeds):
        found = popularity(ratings, splits.random(seed))
        name = "no model, the most rated titles"
        timer.report("retrieval_tfrs", name, f"seed {seed}", **found)
    for name, setting in SETTINGS.items():
        for seed in range(arguments.seeds):
            found = accuracy(ratings, splits.random(seed), setting, seed)
            timer.report("retrieval_tfrs", name, f"seed {seed}", **found)


if __name__ == "__main__":
    main()
