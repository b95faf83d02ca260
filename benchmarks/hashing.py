"""Measures what tables of few rows predict: hashed, by quotient, by chunks.

MovieLens-100K's ratings are predicted by biased factorisation: a user and a
movie have a vector and a bias each. A fifth of the ratings, drawn at random, is
held out; the rest is trained on, in several passes. All contenders have the
same optimizer and batches, and but for "all rows" the same number of
parameters: rows for a tenth of the users and of the movies. They differ in how
an id's vector comes of rows:

- hash: it is the row that a hash says.
- quotient and remainder, by each operation. Where vectors are concatenated,
  rows are half as wide, and twice as many.
- multiplex: two rows of half the width, by two hashes, of twice as many.
- all rows: each id has its own, which is what the others would like to be.

Each has the learning rate and the penalty that were best for it on another
split. Seeds decide about the split, initial values, order and hashes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import movielens
import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed.configs.hashing import Hashing

BATCH = 256
WIDTH = 16
LEARNING_RATES = (0.03, 0.1, 0.3)
PENALTIES = (0.02, 0.1, 0.4)
# Of the run that tunes, which is none of those that are reported.
TUNING_SEED = 1000

#: Makes the hashing of a table: (number of ids, seed).
MakeHashing = Callable[[int, int], Hashing | None]


def _quotient(operation: str) -> MakeHashing:
    return lambda ids, _: tfrs_embed.QuotientRemainder(
        ids,
        operation=operation,  # type: ignore[arg-type]
    )


#: Each contender's hashing, and by how many rows' parts its vectors are made.
CONTENDERS: dict[str, tuple[MakeHashing, int]] = {
    "hash": (lambda _, seed: tfrs_embed.Hash(salt=seed), 1),
    "quotient and remainder, multiplied": (_quotient("mult"), 1),
    "quotient and remainder, added": (_quotient("add"), 1),
    "quotient and remainder, concatenated": (_quotient("concat"), 2),
    "multiplex": (lambda _, seed: tfrs_embed.Multiplex(2, salts=seed), 2),
    "all rows": (lambda *_: None, 1),
}


class Model(tf_keras.Model):
    """Predicts ratings of the vectors of a user and a movie.

    Args:
        sizes: the number of ids of users and of movies.
        part: rows, as a part of the ids.
        name: the contender.
        settings: the learning rate and the penalty.
        seed: of hashes and initial values.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        part: float,
        name: str,
        settings: tuple[float, float],
        seed: int,
    ) -> None:
        super().__init__()
        make, pieces = CONTENDERS[name]
        learning_rate, self._penalty = settings
        features = {}
        for i, (side, size) in enumerate(sizes.items()):
            hashing = make(size, seed)
            product = "multiplied" in name
            rows = size
            if hashing is not None:
                rows = int(np.ceil(part * size)) * pieces
            table = tfrs_embed.TableConfig(
                side,
                rows,
                WIDTH // pieces,
                initializer=tf_keras.initializers.RandomNormal(
                    # A product's spread is that of others.
                    stddev=0.1 ** (0.5 if product else 1.0),
                    seed=2 * seed + i,
                ),
            )
            features[side] = tfrs_embed.FeatureConfig(
                side, table, hashing=hashing
            )
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            features,
            tf_keras.optimizers.Adagrad(
                learning_rate, initial_accumulator_value=1e-5
            ),
            size_threshold=0,
        )
        self.embeddings.build(None)
        self._mean = tf.Variable(3.5)
        self._optimizer = tf_keras.optimizers.SGD(0.01)

    def call(
        self, user: tf.Tensor, movie: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        found = self.embeddings({"user": user, "movie": movie})
        users, movies = found["user"], found["movie"]
        # The last factor of each is a bias.
        stars = self._mean + users[:, -1] + movies[:, -1]
        stars += tf.reduce_sum(users[:, :-1] * movies[:, :-1], -1)
        squares = tf.reduce_sum(users**2) + tf.reduce_sum(movies**2)
        return stars, squares / BATCH

    @tf.function
    def learn(
        self, user: tf.Tensor, movie: tf.Tensor, stars: tf.Tensor
    ) -> None:
        """Trains a step for each row, [steps, BATCH]."""
        for i in tf.range(tf.shape(user)[0]):
            with tf.GradientTape() as tape:
                found, squares = self(user[i], movie[i])
                loss = tf.reduce_sum((found - stars[i]) ** 2) / BATCH
                loss += self._penalty * squares
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self._optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )

    @tf.function
    def error(
        self, user: tf.Tensor, movie: tf.Tensor, stars: tf.Tensor
    ) -> tf.Tensor:
        """The root of the mean squared error."""
        found, _ = self(user, movie)
        return tf.sqrt(
            tf.reduce_mean((tf.clip_by_value(found, 1.0, 5.0) - stars) ** 2)
        )


def run(
    folder: pathlib.Path,
    part: float,
    epochs: int,
    name: str,
    settings: tuple[float, float],
    seed: int,
) -> float:
    """Trains a contender; returns the RMSE of the ratings held out."""
    data = movielens.load(folder, seed)
    sizes = {"user": len(data.user_ids), "movie": len(data.movie_ids)}
    model = Model(sizes, part, name, settings, seed)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(data.train))
        order = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        model.learn(*_arrays(data.train[order]))
    return float(model.error(*_arrays(data.test)))


def _arrays(ratings: movielens.Ratings) -> list[tf.Tensor]:
    return [
        tf.constant(ratings.user, tf.int64),
        tf.constant(ratings.movie, tf.int64),
        tf.constant(ratings.rating, tf.float32),
    ]


def main() -> None:
    """Prints a table of RMSEs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER")
    add = parser.add_argument
    add("--seeds", type=int, default=5)
    add("--part", type=float, default=0.1, help="rows, as a part of the ids")
    add("--epochs", type=int, default=15)
    add("--only", nargs="*", default=list(CONTENDERS), help="contenders")
    args = parser.parse_args()
    folder = args.data or movielens.find()
    print(f"rows for {args.part:.0%} of the ids, {args.seeds} seeds")
    print("| | learning rate, penalty | RMSE | of seeds |\n|---|---|---|---|")
    for name in args.only:

        def measure(
            settings: tuple[float, float], seed: int, name: str = name
        ) -> float:
            return run(folder, args.part, args.epochs, name, settings, seed)

        best = min(
            itertools.product(LEARNING_RATES, PENALTIES),
            key=lambda settings: np.nan_to_num(
                measure(settings, TUNING_SEED),
                nan=np.inf,
            ),
        )
        found = [measure(best, seed) for seed in range(args.seeds)]
        print(
            f"| {name} | {best[0]:g}, {best[1]:g} | {np.mean(found):.4f} "
            f"| {min(found):.4f} to {max(found):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
