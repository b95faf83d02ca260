"""Trains MovieLens-100K's model, exports it, and asks a server for ratings.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python serve.py
    python serve.py --stream

The server, serve/server.cc, is TensorFlow's own C++ loader with a socket in
front: it has no Python, and nothing of this library. Without a C++ compiler
serve/server.py takes its place. The model is exported three times, with rows of
float32, float16 and int8, and each server's ratings are compared with those of
the model that was trained.

With --stream the model of movielens_stream.py is trained week by week while the
server answers. After each week the server gets what has changed in the model, a
delta, and the week to come is rated by the server.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import movielens_deltas
import movielens_model
import movielens_server
import movielens_serving
import numpy as np
import tf_keras
from absl import app, flags
from epoch_lines import EpochLines

FLAGS = flags.FLAGS
common_flags.training(epochs=5, size_threshold=100)

flags.DEFINE_boolean("stream", False, "train on, and send the server deltas")
common_flags.count("days", 7, "with --stream: days between two deltas")

BATCH = 1000


def main(_: list[str]) -> None:
    """Trains, exports and serves the model."""
    tf_keras.utils.set_random_seed(FLAGS.seed)
    try:
        files = FLAGS.data or movielens.find()
        data = movielens.load(files)
        ratings = movielens.load_stream(files)
    except OSError as error:
        raise SystemExit(error) from None
    with tempfile.TemporaryDirectory(prefix="movielens_") as name:
        folder = pathlib.Path(name)
        compiling = movielens_server.start_compiling(folder / "server")
        if FLAGS.stream:
            command = movielens_server.finish_compiling(compiling)
            rmse_of_stream = movielens_deltas.run(
                ratings, 24 * FLAGS.days, command, folder
            )
            print(f"test_rmse={rmse_of_stream:.4f}")
            return
        model = train(data)
        expected = np.concatenate(
            [model(data.join(b.user, b.movie)) for b in batches(data)]
        )
        print(f"trained; test RMSE {rmse(expected, data):.4f}")
        command = movielens_server.finish_compiling(compiling)
        served = {}
        for rows in ("float32", "float16", "int8"):
            path = folder / rows
            movielens_serving.export(model, data, path, rows)
            served[rows] = ask(command, path, data)
            size = sum(f.stat().st_size for f in path.glob("variables/*"))
            difference = np.abs(served[rows] - expected).max()
            print(
                f"{rows:8} {size:9,} bytes; served test RMSE "
                f"{rmse(served[rows], data):.4f}, ratings within "
                f"{difference:.1e} of the model's"
            )
        np.testing.assert_allclose(served["float32"], expected, rtol=1e-4)
        print(f"test_rmse={rmse(served['float32'], data):.4f}")


def train(data: movielens.MovieLens) -> movielens_model.RankingModel:
    """Returns the model, trained."""
    dataset = data.dataset(data.train, FLAGS.batch_size, FLAGS.seed)
    model = movielens_model.make(
        data,
        FLAGS.batch_size,
        FLAGS.epochs * len(dataset),
        FLAGS.size_threshold,
        steps_per_execution=10,
    )
    model.fit(
        dataset,
        epochs=FLAGS.epochs,
        callbacks=[EpochLines(FLAGS.epochs)],
        verbose=0,
    )
    return model


def ask(
    command: Sequence[str], path: pathlib.Path, data: movielens.MovieLens
) -> np.ndarray:
    """Returns a server's ratings of the test set."""
    ratings = []
    with movielens_server.serving(command, path) as port:
        client = movielens_server.Client(port)
        for batch in batches(data):
            answer = client.ask(
                user_id=data.user_ids[batch.user],
                movie_id=data.movie_ids[batch.movie],
            )
            ratings.append(answer["rating"])
        # What the model refuses is an answer, too.
        try:
            client.ask(user_id=np.array([-7]), movie_id=np.array([1]))
        except movielens_server.Refused:
            pass
        else:
            raise AssertionError("The server knows a user -7.")
    return np.concatenate(ratings)


def batches(data: movielens.MovieLens) -> Iterator[movielens.Ratings]:
    """The test set in parts."""
    for start in range(0, len(data.test), BATCH):
        yield data.test[np.arange(start, min(start + BATCH, len(data.test)))]


def rmse(ratings: np.ndarray, data: movielens.MovieLens) -> float:
    """The root of the mean squared error in the test set."""
    return float(np.sqrt(np.mean(np.square(ratings - data.test.rating))))


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
