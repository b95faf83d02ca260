"""Retrieves movies with deep towers, as keras_rs's tutorial sets them up.

    python benchmarks/results/deep_towers.py

A user's tower reads the user's number, gender, age in ten bins, both together,
and occupation; a movie's tower reads the movie's number, the words of its title
and its genres. Each has a vector of 32; one to three dense layers follow. The
product of the towers' results is trained to be the rating on a scale from 0 to
1, with the mean squared error: 30 epochs of batches of 1,000 by Adagrad, the
same batches in each epoch. The metric is how often a movie with five stars is
among the user's best 100 of all movies. The embedding layers are ours.
"""

from __future__ import annotations

import argparse
import csv
import re

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import numpy as np
import ranking
import record
import splits
import tensorflow as tf
import tf_keras

import tfrs_embed

ROW = "deep_retrieval"
DIM, BATCH, EPOCHS, LEARNING_RATE = 32, 1000, 30, 0.05
AGE_BINS, BEST = 10, 100
#: Tables with more rows are trained by the layer's own optimizer.
SIZE_THRESHOLD = 500

#: The widths of the towers' dense layers.
MODELS = {
    "1 layer": (32,),
    "2 layers": (64, 32),
    "3 layers": (128, 64, 32),
}

Features = dict[str, movielens.Feature]


def read(name: str) -> list[tuple[str, ...]]:
    """Returns the columns of a file, in the order of its numbers."""
    path = movielens.find() / name
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        rows = sorted(list(reader)[1:], key=lambda row: int(row[0]))
    return list(zip(*rows, strict=True))


def one(values: np.ndarray | tuple[str, ...]) -> movielens.Feature:
    """Returns a feature of one value a row."""
    known, ids = np.unique(values, return_inverse=True)
    return movielens.Feature(tf.constant(ids, tf.int32), len(known))


def many(values: list[list[str]]) -> movielens.Feature:
    """Returns a feature of any number of values a row."""
    ragged = tf.ragged.constant(values)
    known, ids = np.unique(ragged.values.numpy(), return_inverse=True)
    ids = tf.constant(ids, tf.int32)
    return movielens.Feature(ragged.with_values(ids), len(known))


def features(ratings: splits.Ratings) -> tuple[Features, Features]:
    """Returns the features of users and those of movies."""
    number, ages, gender, occupation, _ = read(movielens.USERS)
    age = np.array(ages, float)
    # As many ratings in each bin, as Keras's Discretization has it.
    parts = np.arange(1, AGE_BINS) / AGE_BINS
    bins = np.digitize(age, np.quantile(age[ratings.user], parts))
    pairs = [f"{g} {b}" for g, b in zip(gender, bins, strict=True)]
    users = {
        "user": one(np.array(number, int)),
        "gender": one(gender),
        "age": one(bins),
        "gender and age": one(np.array(pairs)),
        "occupation": one(occupation),
    }
    number, title, year, genres = read(movielens.MOVIES)
    words = [
        re.findall(r"\w+", f"{t} {y}".lower())
        for t, y in zip(title, year, strict=True)
    ]
    movies = {
        "movie": one(np.array(number, int)),
        "title": many(words),
        "genres": many([g.split() for g in genres]),
    }
    return users, movies


class Tower(tf_keras.Model):
    """Makes a vector of the features of users or of movies.

    Args:
        features: the categorical features.
        widths: of the dense layers.
        learning_rate: of the embeddings.
        numbers: a numeric feature, a number a row.
    """

    def __init__(
        self,
        features: Features,
        widths: tuple[int, ...],
        learning_rate: float = LEARNING_RATE,
        numbers: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.features, self.numbers = features, numbers
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.TableConfig(
                    name,
                    feature.vocabulary_size,
                    DIM,
                    # Keras's Embedding starts so.
                    initializer=tf_keras.initializers.RandomUniform(
                        -0.05, 0.05
                    ),
                    combiner="mean",
                )
                for name, feature in features.items()
            },
            tf_keras.optimizers.Adagrad(learning_rate),
            size_threshold=SIZE_THRESHOLD,
        )
        *hidden, last = widths
        self.dense = tf_keras.Sequential(
            [tf_keras.layers.Dense(w, activation="relu") for w in hidden]
            + [tf_keras.layers.Dense(last)]
        )

    def call(self, rows: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns the vectors of users or movies by their rows."""
        ids = {n: tf.gather(f.ids, rows) for n, f in self.features.items()}
        vectors = list(self.embeddings(ids, training=training).values())
        if self.numbers is not None:
            vectors.append(tf.gather(self.numbers, rows)[:, None])
        return self.dense(tf.concat(vectors, axis=1))


class TwoTowers(tf_keras.Model):
    """Predicts ratings by the product of two towers."""

    def __init__(
        self, users: Features, movies: Features, widths: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.users, self.movies = Tower(users, widths), Tower(movies, widths)

    def call(
        self, pair: tuple[tf.Tensor, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """Returns predictions [batch] of a pair of rows, each [batch]."""
        user, movie = pair
        user, movie = self.users(user, training), self.movies(movie, training)
        return tf.reduce_sum(user * movie, axis=1)


def results(
    ratings: splits.Ratings,
    split: splits.Split,
    sides: tuple[Features, Features],
    widths: tuple[int, ...],
) -> dict[str, float]:
    """Trains a model; returns how often five stars are among the best."""
    train, test = split
    model = TwoTowers(*sides, widths)
    model.compile(tf_keras.optimizers.Adagrad(LEARNING_RATE), "mse")
    pairs = (ratings.user, ratings.movie)
    pairs = tuple(column.astype(np.int32) for column in pairs)
    stars = movielens.scale(ratings.stars).astype(np.float32)
    model.fit(
        tf.data.Dataset.from_tensor_slices(
            (tuple(column[train] for column in pairs), stars[train])
        ).batch(BATCH),
        epochs=EPOCHS,
        verbose=0,
    )
    users = model.users(tf.range(splits.USERS)).numpy()
    scores = users @ model.movies(tf.range(splits.MOVIES)).numpy().T
    best = test[ratings.stars[test] == 5]
    user, movie = ratings.user[best], ratings.movie[best]
    rank = ranking.ranks(scores[user], movie)
    predicted = scores[ratings.user[test], ratings.movie[test]]
    error = 4 * np.sqrt(np.mean(np.square(predicted - stars[test])))
    return {f"top-{BEST}": float(np.mean(rank < BEST)), "rmse": float(error)}


def popularity(ratings: splits.Ratings, split: splits.Split) -> float:
    """Returns how often five stars are among the 100 most rated movies."""
    train, test = split
    counts = np.bincount(ratings.movie[train], minlength=splits.MOVIES)
    best = test[ratings.stars[test] == 5]
    return float(np.mean(ranking.places(counts)[ratings.movie[best]] < BEST))


def main() -> None:
    """Trains all models with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=[*MODELS])
    arguments = parser.parse_args()
    ratings, timer = splits.read(), record.Timer()
    sides = features(ratings)
    for seed in range(arguments.seeds):
        split, run = splits.random(seed), f"seed {seed}"
        found = {f"top-{BEST}": popularity(ratings, split)}
        timer.report(ROW, "no model, the most rated movies", run, **found)
        for name in arguments.only:
            tf_keras.utils.set_random_seed(seed)
            found = results(ratings, split, sides, MODELS[name])
            timer.report(ROW, name, run, **found)


if __name__ == "__main__":
    main()
