"""Predicts stars on GroupLens's folds, by a factorisation machine.

    python benchmarks/results/rating.py u1
    python benchmarks/results/rating.py folds
    python benchmarks/results/rating.py u1 --validate

The model is the one of examples/movielens_machine.py with two features more: a
user's movies with the stars that each got, and a movie's users with the stars
that each gave. They are bags of ids of "this movie with these stars". Ratings
that are to be predicted, in training too, are taken out of their two bags.

--validate holds out a tenth of the first fold's training set and tests on that:
the constants below were chosen with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import movielens_model
import numpy as np
import record
import splits
import tensorflow as tf

MODEL = "factorisation machine"
STARS = 5
BATCH, EPOCHS = 1000, 12
SIZE_THRESHOLD = 500
#: Ratings of a longer history are a random sample.
MOST = 60


class WithStars(movielens.MovieLens):
    """The data set with bags of who was given how many stars."""

    def join(self, user: tf.Tensor, movie: tf.Tensor) -> dict[str, tf.Tensor]:
        features = super().join(user, movie)
        for name, other in (("rated", movie), ("raters", user)):
            ids = features[name]
            features[name] = tf.ragged.boolean_mask(
                ids, ids // STARS != other[:, None]
            )
        return features


def bags(
    owner: np.ndarray, other: np.ndarray, stars: np.ndarray, owners: int
) -> tf.RaggedTensor:
    """Returns each owner's ids `other * STARS + stars - 1`, at most MOST."""
    found: list[list[int]] = [[] for _ in range(owners)]
    ids = other * STARS + stars.astype(np.int32) - 1
    for i, id_ in zip(owner, ids, strict=True):
        if len(found[i]) < MOST:
            found[i].append(id_)
    return tf.ragged.constant(found, dtype=tf.int32)


def with_stars(data: movielens.MovieLens) -> WithStars:
    """Returns `data` with the features "rated" and "raters"."""
    train = data.train
    users, movies = len(data.user_ids), len(data.movie_ids)
    rated = bags(train.user, train.movie, train.rating, users)
    raters = bags(train.movie, train.user, train.rating, movies)
    return WithStars(
        data.user_ids,
        data.movie_ids,
        data.user_features
        | {"rated": movielens.Feature(rated, movies * STARS)},
        data.movie_features
        | {"raters": movielens.Feature(raters, users * STARS)},
        train,
        data.test,
    )


def predictions(
    split: splits.Split, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Trains a model; returns its predictions for the test, and the stars."""
    tf.keras.utils.set_random_seed(seed)
    data = with_stars(movielens.load(movielens.find(), seed, split))
    batches = data.dataset(data.train, BATCH, shuffle_seed=seed)
    model = movielens_model.make(
        data, BATCH, EPOCHS * len(batches), SIZE_THRESHOLD
    )
    model.fit(batches, epochs=EPOCHS, verbose=0, shuffle=False)
    names = set(data.features)
    predicted = [
        model({name: batch[name] for name in names}).numpy()
        for batch in data.dataset(data.test, BATCH)
    ]
    return np.concatenate(predicted), data.test.rating


def rmse(predicted: np.ndarray, stars: np.ndarray) -> float:
    """Returns the root of the mean squared error."""
    return float(np.sqrt(np.mean(np.square(predicted - stars))))


def first_fold(seeds: Sequence[int], validate: bool) -> None:
    """Trains on u1 with several seeds; reports each, and their mean."""
    split = splits.fold(1)
    if validate:
        split = splits.validation(split)
    row = "validation" if validate else "rating_u1"
    timer, all_predicted = record.Timer(), []
    for seed in seeds:
        predicted, stars = predictions(split, seed)
        all_predicted.append(predicted)
        error = rmse(predicted, stars)
        timer.report(row, MODEL, f"seed {seed}", rmse=error)
    timer.report(
        row,
        f"mean of the {len(seeds)} models' predictions",
        "all seeds",
        rmse=rmse(np.mean(all_predicted, axis=0), stars),
    )


def each_fold(numbers: Sequence[int], seed: int) -> None:
    """Trains on folds, one after the other."""
    timer = record.Timer()
    for number in numbers:
        error = rmse(*predictions(splits.fold(number), seed))
        timer.report("rating_folds", MODEL, f"u{number}", rmse=error)


def main() -> None:
    """Trains on one fold or on all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("u1", "folds"))
    parser.add_argument("--seeds", type=int, default=5, help="of u1")
    parser.add_argument(
        "--folds", type=int, nargs="*", default=range(1, splits.FOLDS + 1)
    )
    parser.add_argument("--validate", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "u1":
        first_fold(range(arguments.seeds), arguments.validate)
    else:
        each_fold(arguments.folds, seed=0)


if __name__ == "__main__":
    main()
