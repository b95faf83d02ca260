"""Ranks all movies for each user, by a denoising autoencoder of histories.

    python benchmarks/results/histories.py recommenders_team
    python benchmarks/results/histories.py cornac --validate

A user's movies, some of them left out, are a bag in an embedding table; from
the bag's vector a hidden layer and a softmax predict all of the user's movies
(Liang et al. 2018, Mult-DAE). The two rows have the splits and metrics of
recommenders-team's benchmark and of Cornac's first example.

--validate holds out a part of the training set and tests on that: the constants
below were chosen with it.
"""

from __future__ import annotations

import argparse
import dataclasses

import _examples  # noqa: F401  # Before TensorFlow.
import numpy as np
import ranking
import record
import splits
import tensorflow as tf
import tf_keras

import tfrs_embed


@dataclasses.dataclass(frozen=True)
class Task:
    """A row's ratings.

    Attributes:
        read: which movies each user's history has, [users, movies].
        target: which of these are to be predicted.
        candidates: which movies are ranked for each user.
        relevant: which movies should come first.
    """

    read: np.ndarray
    target: np.ndarray
    candidates: np.ndarray
    relevant: np.ndarray


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was chosen by --validate."""

    dim: int = 300
    dropout: float = 0.7
    learning_rate: float = 1e-3
    decay: float = 1e-2
    batch: int = 128
    epochs: int = 50


def task_of(row: str, validate: bool) -> Task:
    """Returns the row's task."""
    ratings = splits.read()
    split = (
        splits.recommenders_team(ratings)
        if row == "recommenders_team"
        else splits.cornac()
    )
    if validate:
        split = splits.validation(split, part=0.2)
    seen, held_out = (splits.matrix(ratings, rows) for rows in split)
    if row == "recommenders_team":
        return Task(seen, seen, ~seen, held_out)
    liked, held_out_liked = (
        splits.matrix(ratings, rows[ratings.stars[rows] >= 4]) for rows in split
    )
    # Cornac ranks all movies of the training set but those that the user is
    # known to like; users and movies that are only in the test are left out.
    known = seen.any(axis=0)
    return Task(
        seen,
        liked,
        known & ~liked,
        held_out_liked & known & seen.any(axis=1)[:, None],
    )


class Autoencoder(tf_keras.Model):
    """Predicts a user's movies by some of them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.dropout = settings.dropout
        table = tfrs_embed.TableConfig(
            "movies", splits.MOVIES, settings.dim, combiner="sqrtn"
        )
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {"history": tfrs_embed.FeatureConfig("history", table)},
            tf_keras.optimizers.Adam(),  # Of no table: the model's trains it.
            size_threshold=None,
        )
        self.scores = tf_keras.layers.Dense(splits.MOVIES)

    def call(
        self, history: tf.RaggedTensor, training: bool = False
    ) -> tf.Tensor:
        if training:
            kept = tf.random.uniform(tf.shape(history.values)) >= self.dropout
            history = tf.ragged.boolean_mask(history, history.with_values(kept))
        vectors = self.embeddings({"history": history}, training=training)
        return self.scores(tf.tanh(vectors["history"]))


def multinomial_loss(target: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Returns minus the mean log probability of each user's movies."""
    target = tf.cast(target, scores.dtype)
    likelihood = tf.reduce_sum(target * tf.nn.log_softmax(scores), axis=1)
    return -tf.math.divide_no_nan(likelihood, tf.reduce_sum(target, axis=1))


def to_ragged(rated: np.ndarray) -> tf.RaggedTensor:
    """Returns the movies of each user."""
    users, movies = np.nonzero(rated)
    return tf.RaggedTensor.from_value_rowids(movies, users, len(rated))


def train(task: Task, settings: Settings, seed: int, watch: bool) -> np.ndarray:
    """Returns the scores of all movies for all users."""
    tf_keras.utils.set_random_seed(seed)
    history = to_ragged(task.read)
    batches = (
        tf.data.Dataset.from_tensor_slices((history, task.target))
        .shuffle(splits.USERS, seed)
        .ragged_batch(settings.batch)
    )
    model = Autoencoder(settings)
    model.compile(
        tf_keras.optimizers.AdamW(
            settings.learning_rate, weight_decay=settings.decay
        ),
        multinomial_loss,
    )
    each = 20 if watch else settings.epochs
    for epoch in range(each, settings.epochs + 1, each):
        model.fit(batches, epochs=each, verbose=0)
        scores = model(history).numpy()
        if watch:
            print(f"epoch {epoch}: {metrics(task, scores)}", flush=True)
    return scores


def metrics(task: Task, scores: np.ndarray) -> dict[str, float]:
    """Returns the metrics of both rows."""
    rated = scores, task.candidates, task.relevant
    return {"ndcg@10": ranking.ndcg(*rated), "auc": ranking.auc(*rated)}


def main() -> None:
    """Trains with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=("recommenders_team", "cornac"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--validate", action="store_true")
    for field in dataclasses.fields(Settings):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), default=field.default
        )
    arguments = vars(parser.parse_args())
    row, seeds = arguments.pop("row"), arguments.pop("seeds")
    validate = arguments.pop("validate")
    task = task_of(row, validate)
    timer = record.Timer()
    for seed in range(1 if validate else seeds):
        scores = train(task, Settings(**arguments), seed, validate)
        if not validate:
            timer.report(
                row, "autoencoder", f"seed {seed}", **metrics(task, scores)
            )


if __name__ == "__main__":
    main()
