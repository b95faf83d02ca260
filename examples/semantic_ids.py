"""Predicts ratings of movies that nobody has rated yet, by semantic ids.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python semantic_ids.py

A fifth of MovieLens-100K's movies is cold: training has none of their ratings.
Two models, alike but for the movies' rows, are trained on the others:

- ids: a row for each movie's number. A cold movie's row stays as it began.
- prefixes: a row for each prefix of a movie's code (`PrefixNGrams`). A code is
  the movie's k-means cluster by genres and year, its cluster within that, and
  its number there. A cold movie has the rows of its clusters.

The last line has the RMSEs in stars of cold movies.
"""

from __future__ import annotations

import os
import pathlib

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.data()
common_flags.count("epochs", 20, "passes over the ratings")
common_flags.count("batch_size", 500, "ratings per step")
common_flags.count("clusters", 48, "clusters of all movies")
common_flags.count("parts", 4, "clusters within each of these, at most")
flags.DEFINE_float("learning_rate", 0.1, "Adagrad's", lower_bound=0.0)
flags.DEFINE_float(
    "penalty", 0.2, "of squares, in place of weight decay", lower_bound=0.0
)
common_flags.seed()

FACTORS = 16
COLD_PART = 0.2


def main(_: list[str]) -> None:
    """Trains both models and prints their errors."""
    try:
        folder = FLAGS.data or movielens.find()
        data = movielens.load(folder, FLAGS.seed)
    except OSError as error:
        raise SystemExit(error) from None
    tf_keras.utils.set_random_seed(FLAGS.seed)
    train, warm, cold = split(data, FLAGS.seed)
    print(
        f"{len(train):,} ratings to train on; to test, {len(warm):,} of movies "
        f"with others and {len(cold):,} of {len(np.unique(cold.movie)):,} cold "
        "movies"
    )
    vectors = content_of(data, folder)
    codes = make_codes(vectors, FLAGS.clusters, FLAGS.parts, FLAGS.seed)
    hashing = tfrs_embed.PrefixNGrams(codes)
    print(f"{len(codes):,} codes have {hashing.num_rows:,} prefixes")
    cold_rmses = {}
    for name, chosen in {"ids": None, "prefixes": hashing}.items():
        model = RatingModel(data, chosen, float(np.mean(train.rating)))
        model.compile(tf_keras.optimizers.SGD(0.0), "mse")
        model.fit(
            *as_inputs(train),
            batch_size=FLAGS.batch_size,
            epochs=FLAGS.epochs,
            verbose=0,
        )
        of_warm, cold_rmses[name] = (rmse(model, each) for each in (warm, cold))
        print(
            f"{name}: rmse {of_warm:.4f}, of cold movies "
            f"{cold_rmses[name]:.4f}",
            flush=True,
        )
    print(" ".join(f"cold_rmse_{k}={v:.4f}" for k, v in cold_rmses.items()))


def split(
    data: movielens.MovieLens, seed: int
) -> tuple[movielens.Ratings, movielens.Ratings, movielens.Ratings]:
    """Returns ratings to train on, to test, and of cold movies to test."""
    rng = np.random.default_rng([seed, 1])
    is_cold = rng.random(len(data.movie_ids)) < COLD_PART
    known, test = (
        ratings[np.flatnonzero(~is_cold[ratings.movie])]
        for ratings in (data.train, data.test)
    )
    cold = [
        ratings[np.flatnonzero(is_cold[ratings.movie])]
        for ratings in (data.train, data.test)
    ]
    both = (
        np.concatenate([getattr(each, name) for each in cold])
        for name in ("user", "movie", "rating")
    )
    return known, test, movielens.Ratings(*both)


def content_of(data: movielens.MovieLens, folder: pathlib.Path) -> np.ndarray:
    """Returns a vector of each movie's genres and year, [movies, columns].

    That of its genres has the length 1; a year is the 20th part of 1.
    """
    genres = data.movie_features["genres"]
    found = np.zeros([len(data.movie_ids), genres.vocabulary_size])
    found[genres.ids.value_rowids(), genres.ids.values] = 1.0
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1.0)
    years = movielens.load_years(folder)
    return np.concatenate([found, (years[:, None] - 1990.0) / 20.0], 1)


def make_codes(
    vectors: np.ndarray, clusters: int, parts: int, seed: int
) -> np.ndarray:
    """Returns a code of three levels for each vector, different for each.

    The levels are its cluster, its cluster within that, and its number there.
    """
    rng = np.random.default_rng(seed)
    codes = np.zeros([len(vectors), 3], np.int64)
    codes[:, 0] = k_means(vectors, clusters, rng)
    for of_all in np.unique(codes[:, 0]):
        inside = np.flatnonzero(codes[:, 0] == of_all)
        codes[inside, 1] = k_means(vectors[inside], parts, rng)
        for part in np.unique(codes[inside, 1]):
            members = inside[codes[inside, 1] == part]
            codes[members, 2] = np.arange(len(members))
    return codes


def k_means(
    vectors: np.ndarray, most: int, rng: np.random.Generator, rounds: int = 30
) -> np.ndarray:
    """Returns each vector's cluster, of at most `most` clusters."""
    different = np.unique(vectors, axis=0)
    centers = rng.choice(different, 1)
    # k-means++: the next center is far from the others.
    while len(centers) < min(most, len(different)):
        distance = np.min(squares(different, centers), 1)
        chosen = rng.choice(len(different), p=distance / np.sum(distance))
        centers = np.concatenate([centers, different[[chosen]]])
    for _ in range(rounds):
        nearest = np.argmin(squares(vectors, centers), 1)
        for k in np.unique(nearest):
            centers[k] = np.mean(vectors[nearest == k], 0)
    return nearest


def squares(vectors: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Returns the squared distance of each vector from each center."""
    return np.sum((vectors[:, None] - centers) ** 2, -1)


class RatingModel(tf_keras.Model):
    """Predicts mean + user's bias + movie's bias + <user, movie>.

    Args:
        data: the data set, for its vocabularies.
        hashing: makes rows of movies' numbers; None: these are rows.
        mean: the mean rating.
    """

    def __init__(
        self,
        data: movielens.MovieLens,
        hashing: tfrs_embed.PrefixNGrams | None,
        mean: float,
    ) -> None:
        super().__init__()
        self.mean = mean
        movies = len(data.movie_ids) if hashing is None else hashing.num_rows
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                "user": tfrs_embed.FeatureConfig(
                    "user", make_table("users", len(data.user_ids))
                ),
                "movie": tfrs_embed.FeatureConfig(
                    "movie", make_table("movies", movies), hashing=hashing
                ),
            },
            tf_keras.optimizers.Adagrad(FLAGS.learning_rate),
            size_threshold=0,
        )

    def call(
        self, ids: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        vectors = self.embeddings(ids, training=training)
        for vector in vectors.values():
            squares = tf.reduce_sum(tf.square(vector), 1)
            self.add_loss(FLAGS.penalty * tf.reduce_mean(squares))
        user, movie = vectors["user"], vectors["movie"]
        return (
            self.mean
            + (user[:, -1] + movie[:, -1])
            + tf.reduce_sum(user[:, :-1] * movie[:, :-1], 1)
        )


def make_table(name: str, rows: int) -> tfrs_embed.TableConfig:
    """Declares a table whose last column is a bias."""
    initializer = tf_keras.initializers.RandomNormal(
        stddev=0.03, seed=FLAGS.seed
    )
    return tfrs_embed.TableConfig(name, rows, FACTORS + 1, initializer)


def as_inputs(
    ratings: movielens.Ratings,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns ids by feature, and ratings, as `fit` takes them."""
    return {"user": ratings.user, "movie": ratings.movie}, ratings.rating


def rmse(model: RatingModel, ratings: movielens.Ratings) -> float:
    """Returns the error of predictions, which are kept within 1 to 5 stars."""
    ids, stars = as_inputs(ratings)
    predicted = model.predict(ids, batch_size=10_000, verbose=0)
    errors = np.clip(predicted.reshape(-1), 1.0, 5.0) - stars
    return float(np.sqrt(np.mean(np.square(errors, dtype=np.float64))))


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
