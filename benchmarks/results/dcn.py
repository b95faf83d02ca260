"""Predicts stars with Deep & Cross networks, as two tutorials set them up.

    python benchmarks/results/dcn.py keras_rs
    python benchmarks/results/dcn.py tfrs

Both have vectors of 32 for a movie's and a user's number, gender, age, zip code
and occupation, then a cross layer (Wang et al. 2020), two dense layers of 192
and one of 1; the deep network has three of 192 and no cross layer. They differ
in optimizer, batch and epochs. The embedding layers are ours.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Callable

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import numpy as np
import record
import splits
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

DIM, UNITS, PROJECTION = 32, 192, 20
AGES = (18, 25, 35, 45, 50, 56)

#: Of each model whether it has a cross layer, its rank, and the dense layers.
MODELS: dict[str, tuple[bool, int | None, int]] = {
    "DCN": (True, None, 2),
    "low-rank DCN": (True, PROJECTION, 2),
    "deep network": (False, None, 3),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a tutorial trains."""

    optimizer: Callable[[], tf_keras.optimizers.Optimizer]
    batch: int
    epochs: int


SETTINGS = {
    # AdamW's weight decay is Keras's default in the tutorial.
    "keras_rs": Setting(
        lambda: tf_keras.optimizers.AdamW(0.01, weight_decay=0.004), 1024, 10
    ),
    "tfrs": Setting(lambda: tf_keras.optimizers.Adam(0.01), 8192, 8),
}


def columns(ratings: splits.Ratings) -> list[np.ndarray]:
    """Returns the six features of all ratings, as ids from 0 on."""
    path = movielens.find() / movielens.USERS
    with path.open(encoding="utf-8", newline="") as file:
        users = list(csv.reader(file, delimiter="\t"))[1:]
    users.sort(key=lambda user: int(user[0]))
    age = np.digitize([int(user[1]) for user in users], AGES)
    others = [
        np.unique([user[i] for user in users], return_inverse=True)[1]
        for i in (2, 3, 4)
    ]
    of_users = [column[ratings.user] for column in (age, *others)]
    return [ratings.movie, ratings.user, *of_users]


def make(features: list[np.ndarray], name: str) -> tf_keras.Model:
    """Returns a model of one of MODELS."""
    cross, rank, dense = MODELS[name]
    inputs = [tf_keras.Input([], dtype=tf.int64) for _ in features]
    vectors = [
        tfrs_embed.Embedding(int(column.max()) + 1, DIM)(ids)
        for column, ids in zip(features, inputs, strict=True)
    ]
    x = tf.concat(vectors, axis=1)
    if cross:
        x = tfrs.layers.dcn.Cross(
            projection_dim=rank, kernel_initializer="glorot_uniform"
        )(x)
    for _ in range(dense):
        x = tf_keras.layers.Dense(UNITS, activation="relu")(x)
    return tf_keras.Model(inputs, tf_keras.layers.Dense(1)(x))


def rmse(
    features: list[np.ndarray],
    stars: np.ndarray,
    split: splits.Split,
    name: str,
    setting: Setting,
    seed: int,
) -> float:
    """Trains a model, and returns the RMSE of its test."""
    tf_keras.utils.set_random_seed(seed)
    train, test = split
    model = make(features, name)
    model.compile(setting.optimizer(), "mse")
    # The tutorials' batches are cached: the same in each epoch.
    model.fit(
        [column[train] for column in features],
        stars[train],
        batch_size=setting.batch,
        epochs=setting.epochs,
        shuffle=False,
        verbose=0,
    )
    predicted = model.predict(
        [column[test] for column in features], 4096, verbose=0
    )
    return float(np.sqrt(np.mean(np.square(predicted[:, 0] - stars[test]))))


def main() -> None:
    """Trains all models with several seeds and splits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=[*MODELS])
    arguments = parser.parse_args()
    ratings = splits.read()
    features = columns(ratings)
    stars = ratings.stars.astype(np.float32)
    kinds = {"": splits.random}
    if arguments.setting == "keras_rs":
        kinds[", test overlaps training"] = splits.leaking
    timer = record.Timer()
    for suffix, split_of in kinds.items():
        for name in arguments.only:
            for seed in range(arguments.seeds):
                error = rmse(
                    features,
                    stars,
                    split_of(seed),
                    name,
                    SETTINGS[arguments.setting],
                    seed,
                )
                timer.report(
                    f"dcn_{arguments.setting}",
                    name + suffix,
                    f"seed {seed}",
                    rmse=error,
                )


if __name__ == "__main__":
    main()
