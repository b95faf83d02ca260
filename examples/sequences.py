"""Predicts which movie a user of MovieLens rates next.

    pip install --no-deps recbole==1.2.1  # It contains MovieLens-100K.
    python sequences.py
    python sequences.py --ratings ml-1m/ratings.dat

The model is that of sasrec.py. Of each user the last movie is for the test, the
one before it for validation, and all before are trained on. A prediction ranks
all movies, or all that the user has not rated yet. HR@10 is the part of users
whose next movie is among the first ten; NDCG@10 counts it 1 / log2(1 + rank).

The export at the end answers requests: the ten movies that suit a history best.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import cluster
import common_flags
import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags
from movielens_sequences import (
    TOP,
    Recommender,
    cut,
    metrics,
    predict,
    ragged,
    read,
)
from sasrec import SASRec

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.data()
common_flags.path(
    "ratings",
    "a file in place of MovieLens-100K, a rating a line: user, item, stars and "
    "time, as in ml-1m/ratings.dat; or user and item in the order of time",
)
common_flags.path("output", "where the model goes; else a temporary folder")
common_flags.strategy()
common_flags.seed()
for _name, _default, _what in (
    ("min_ratings", 5, "movies with fewer ratings are left out"),
    ("epochs", 20, "passes over the histories"),
    ("batch_size", 32, "histories per step, of all replicas"),
    ("length", 50, "a history's last movies that are read"),
    ("dim", 64, "width of a movie's vector"),
    ("negatives", None, "movies drawn for a step's softmax; else it is of all"),
    ("validate_every", 5, "epochs between two validations"),
):
    common_flags.count(_name, _default, _what)
flags.DEFINE_float("dropout", 0.3, "the part that is dropped", 0.0, 0.9)
flags.DEFINE_float("learning_rate", 3e-3, "of Adam; falls to 0", 0.0)


def main(_: list[str]) -> None:
    """Trains, tests and exports the model."""
    # The first thing that touches TensorFlow's devices.
    strategy = cluster.of_strategy()
    cluster.check_batch_size(FLAGS.batch_size, strategy)
    tf_keras.utils.set_random_seed(FLAGS.seed)
    try:
        histories, movie_ids, titles = load()
        output = FLAGS.output or pathlib.Path(
            tempfile.mkdtemp(prefix="sequences_")
        )
        if (output / "model").exists():  # Not after minutes of training.
            raise SystemExit(f"{output / 'model'} is there already.")
    except (OSError, ValueError) as error:
        raise SystemExit(error) from None
    lengths = [len(history) for history in histories]
    print(
        f"{len(histories):,} users, {len(movie_ids):,} movies, "
        f"{sum(lengths):,} ratings; histories of {min(lengths)} to "
        f"{max(lengths)}, {np.mean(lengths):.0f} on average"
    )

    # Who has fewer than three ratings is not asked about.
    train = [h[:-2] if len(h) > 2 else h for h in histories]
    asked = [h for h in histories if len(h) > 2]
    if not asked:
        raise SystemExit("No user has three ratings: there is nothing to test.")
    windows = cut(train, FLAGS.length + 1)
    batches = (
        tf.data.Dataset.from_tensor_slices(ragged(windows))
        .shuffle(len(windows), FLAGS.seed)
        .ragged_batch(FLAGS.batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    with strategy.scope():
        model = make(len(movie_ids), FLAGS.epochs * len(batches))
    validation = Validation([h[:-1] for h in asked])
    start = time.perf_counter()
    model.fit(batches, epochs=FLAGS.epochs, callbacks=[validation], verbose=0)
    print(model.embeddings.placement)
    print(f"trained in {time.perf_counter() - start:.0f} s\n")

    seen = ragged([h[:-1] for h in asked])
    right = np.array([h[-1] for h in asked])
    popular = np.bincount(np.concatenate(train), minlength=len(movie_ids))
    scores = predict(model, seen)
    print(f"test of {len(asked):,} users        HR@{TOP}  NDCG@{TOP}")
    for name, each, masked in (
        ("popularity, of unrated", np.tile(popular, [len(asked), 1]), True),
        ("SASRec, of all", scores, False),
        ("SASRec, of unrated", scores, True),
    ):
        hr, ndcg = metrics(each, right, seen if masked else None)
        print(f"  {name:24}{hr:.4f}   {ndcg:.4f}")

    export(model, movie_ids, titles, output / "model")
    show(model, asked[0][:-1], movie_ids, titles, output / "model")
    print(f"test_hr={hr:.4f} test_ndcg={ndcg:.4f}", flush=True)


def load() -> tuple[list[np.ndarray], np.ndarray, list[str]]:
    """Reads the ratings.

    Returns:
        Each user's movies by their rows, the oldest first; each row's number in
        the file; and each row's title.

    Raises:
        OSError: a file is missing.
        ValueError: a line is no rating.
    """
    if FLAGS.ratings:
        histories, movie_ids = read(FLAGS.ratings, 0, FLAGS.min_ratings)
        return histories, movie_ids, [f"movie {i}" for i in movie_ids]
    folder = FLAGS.data or movielens.find()
    histories, movie_ids = read(
        folder / movielens.RATINGS, 1, FLAGS.min_ratings
    )
    title_of = movielens.load_titles(folder)
    return histories, movie_ids, [title_of[i] for i in movie_ids]


def make(movies: int, steps: int) -> SASRec:
    """Returns a model, compiled.

    Args:
        movies: their number.
        steps: the steps of the whole training.
    """

    def adam() -> tf_keras.optimizers.Adam:
        """Its rate falls linearly, to zero at the end of training."""
        return tf_keras.optimizers.Adam(
            tf_keras.optimizers.schedules.PolynomialDecay(
                FLAGS.learning_rate, steps, 0.0
            )
        )

    model = SASRec(
        movies,
        adam(),
        dim=FLAGS.dim,
        length=FLAGS.length,
        dropout=FLAGS.dropout,
        negatives=FLAGS.negatives,
    )
    model.compile(adam())  # Of all but the table. The model has a loss.
    return model


class Validation(tf_keras.callbacks.Callback):
    """Prints a line every few epochs.

    Args:
        histories: of each the last movie is to be predicted.
    """

    def __init__(self, histories: Sequence[np.ndarray]) -> None:
        super().__init__()
        self.seen = ragged([history[:-1] for history in histories])
        self.right = np.array([history[-1] for history in histories])
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        epoch += 1
        if epoch % FLAGS.validate_every and epoch != FLAGS.epochs:
            return
        scores = predict(self.model, self.seen)
        hr, ndcg = metrics(scores, self.right, self.seen)
        print(
            f"epoch {epoch:3}/{FLAGS.epochs}, "
            f"{time.perf_counter() - self.start:.0f} s: loss "
            f"{(logs or {})['loss']:.3f}, validation HR@{TOP} {hr:.4f}, "
            f"NDCG@{TOP} {ndcg:.4f}",
            flush=True,
        )


def export(
    model: SASRec,
    movie_ids: np.ndarray,
    titles: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Writes a SavedModel that recommends movies for histories."""
    recommender = Recommender(model, movie_ids, titles)
    spec = tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1)
    tfrs_embed.serving.export(
        model,
        path,
        signatures={"serving_default": (recommender, [spec])},
    )


def show(
    model: SASRec,
    history: np.ndarray,
    movie_ids: np.ndarray,
    titles: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Has the export recommend movies, as a server would.

    Raises:
        AssertionError: its scores aren't the model's, and minus infinity for
            what was rated.
    """
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    # One that has rated these movies, and one that has rated none.
    found = serve(
        history_values=tf.constant(movie_ids[history]),
        history_row_splits=tf.constant(
            [0, len(history), len(history)], tf.int64
        ),
    )
    rows = np.searchsorted(movie_ids, found["movie_id"])
    scores = model(ragged([history, history[:0]])).numpy()
    scores[0, history] = -np.inf
    np.testing.assert_allclose(
        found["score"], np.take_along_axis(scores, rows, axis=1), rtol=1e-3
    )
    print(f"\nwrote {path}; loaded, it recommends")
    last = " and ".join(titles[row] for row in history[-2:])
    for who, row in zip(
        (f"after {last}", "to whom nothing is known of"),
        found["title"].numpy(),
        strict=True,
    ):
        names = ", ".join(title.decode() for title in row[:4])
        print(f"  {who}: {names}, ...")


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
