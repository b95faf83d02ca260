"""Retrieves movies with deep towers, as TFRS's tutorial sets them up.

    python benchmarks/results/deep_choices.py

A rating is a user's choice of a movie's title, whatever the stars. A user's
tower reads the user's number and the choice's time, in a thousand intervals and
as a number; a movie's tower reads the title and the title's words. Each has a
vector of 32; one to three dense layers follow. `tfrs.tasks.Retrieval` trains
the towers by Adagrad with batches of 2,048. The tutorial has 300 epochs: see
`--epochs`. The metric is how often the chosen title is among the best 100 or 10
of all titles; titles that the user has chosen in training are ranked too. The
embedding layers are ours.
"""

from __future__ import annotations

import argparse
import re
import string

import _examples  # noqa: F401  # Before TensorFlow.
import deep_towers
import numpy as np
import ranking
import record
import splits
import tensorflow as tf
import tf_keras
import two_towers

ROW = "deep_retrieval_tfrs"
BATCH, LEARNING_RATE, INTERVALS = 2048, 0.1, 1000


def words(title: str) -> list[str]:
    """Returns a title's words, as Keras's TextVectorization finds them."""
    punctuation = f"[{re.escape(string.punctuation)}]"
    return re.sub(punctuation, "", title.lower()).split()


def features(
    ratings: splits.Ratings,
) -> tuple[deep_towers.Features, deep_towers.Features]:
    """Returns the features of choices and those of movies."""
    time = ratings.time
    bounds = np.linspace(time.min(), time.max(), INTERVALS)
    choices = {
        "user": deep_towers.one(ratings.user),
        "time": deep_towers.one(np.digitize(time, bounds)),
    }
    names = two_towers.names()
    movies = {
        "title": deep_towers.one(tuple(names)),
        "words": deep_towers.many([words(name) for name in names]),
    }
    return choices, movies


def results(
    ratings: splits.Ratings,
    split: splits.Split,
    widths: tuple[int, ...],
    epochs: int,
) -> dict[str, float]:
    """Trains a model; returns how often the choice is among the best."""
    train, test = split
    choices, movies = features(ratings)
    time = (ratings.time - ratings.time.mean()) / ratings.time.std()
    model = two_towers.TwoTowers(
        deep_towers.Tower(
            choices, widths, LEARNING_RATE, time.astype(np.float32)
        ),
        deep_towers.Tower(movies, widths, LEARNING_RATE),
    )
    model.compile(tf_keras.optimizers.Adagrad(LEARNING_RATE))
    pairs = tf.data.Dataset.from_tensor_slices((train, ratings.movie[train]))
    batches = pairs.shuffle(len(train)).batch(BATCH)
    model.fit(batches, epochs=epochs, verbose=0)
    candidates = model.titles(tf.range(splits.MOVIES)).numpy()
    scores = model.users(test).numpy() @ candidates.T
    return two_towers.among_the_best(ranking.ranks(scores, ratings.movie[test]))


def main() -> None:
    """Trains all models with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=deep_towers.MODELS,
        default=[*deep_towers.MODELS],
    )
    arguments = parser.parse_args()
    ratings, timer = splits.read(), record.Timer()
    for seed in range(arguments.seeds):
        split, run = splits.random(seed), f"seed {seed}"
        found = two_towers.popularity(ratings, split)
        timer.report(ROW, "no model, the most rated titles", run, **found)
        for name in arguments.only:
            tf_keras.utils.set_random_seed(seed)
            found = results(
                ratings, split, deep_towers.MODELS[name], arguments.epochs
            )
            timer.report(ROW, name, run, **found)


if __name__ == "__main__":
    main()
