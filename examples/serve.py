"""Trains MovieLens-100K's model, exports it, and asks a server for ratings.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python serve.py

The server, serve/server.cc, is TensorFlow's own C++ loader with a socket in
front: it has no Python, and nothing of this library. Without a C++ compiler
serve/server.py takes its place. The model is exported three times, with rows of
float32, float16 and int8, and each server's ratings are compared with those of
the model that was trained.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import movielens_model
import movielens_serving
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags
from epoch_lines import EpochLines

FLAGS = flags.FLAGS
common_flags.training(epochs=5, size_threshold=100)

SOURCES = pathlib.Path(__file__).resolve().parent / "serve"
BATCH = 1000


def main(_: list[str]) -> None:
    """Trains, exports and serves the model."""
    tf_keras.utils.set_random_seed(FLAGS.seed)
    try:
        data = movielens.load(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    with tempfile.TemporaryDirectory(prefix="movielens_") as name:
        folder = pathlib.Path(name)
        compiling = start_compiling(folder / "server")
        model = train(data)
        expected = np.concatenate(
            [model(data.join(b.user, b.movie)) for b in batches(data)]
        )
        print(f"trained; test RMSE {rmse(expected, data):.4f}")
        command = finish_compiling(compiling, folder / "server")
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


# The server.


def start_compiling(output: pathlib.Path) -> subprocess.Popen[str] | None:
    """Starts the compiler, which works while the model is trained."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    libraries = tf.sysconfig.get_lib()
    return subprocess.Popen(
        [
            *(compiler, "-std=c++17", "-w", *tf.sysconfig.get_compile_flags()),
            *(str(SOURCES / "server.cc"), "-o", str(output), f"-L{libraries}"),
            *("-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"),
            f"-Wl,-rpath,{libraries}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_compiling(
    compiling: subprocess.Popen[str] | None, output: pathlib.Path
) -> list[str]:
    """Returns the server's command."""
    plain = [sys.executable, str(SOURCES / "server.py")]
    if compiling is None:
        print("no C++ compiler: a Python process serves")
        return plain
    _, errors = compiling.communicate()
    if compiling.returncode:
        print(f"server.cc doesn't compile: a Python process serves\n{errors}")
        return plain
    print("TensorFlow's C++ loader serves")
    return [str(output)]


@contextlib.contextmanager
def serving(command: Sequence[str], path: pathlib.Path) -> Iterator[int]:
    """Serves a model; yields the port."""
    with (
        # Each start has TensorFlow's first lines, which count if one fails.
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            [*command, str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            server.kill()


def ask(
    command: Sequence[str], path: pathlib.Path, data: movielens.MovieLens
) -> np.ndarray:
    """Returns a server's ratings of the test set."""
    ratings = []
    with (
        serving(command, path) as port,
        socket.create_connection(("127.0.0.1", port)) as connection,
        connection.makefile("rw", encoding="ascii", newline="\n") as stream,
    ):

        def request(**inputs: np.ndarray) -> list[str]:
            for name, values in inputs.items():
                numbers = " ".join(map(str, values.tolist()))
                stream.write(f"{name} {len(values)} {numbers}\n")
            stream.write("\n")
            stream.flush()
            return list(iter(stream.readline, "\n"))

        for batch in batches(data):
            [line] = request(
                user_id=data.user_ids[batch.user],
                movie_id=data.movie_ids[batch.movie],
            )
            name, _, *values = line.split()
            assert name == "rating", line
            ratings.append(np.array(values, np.float32))
        # What the model refuses is an answer, too.
        [line] = request(user_id=np.array([-7]), movie_id=np.array([1]))
        assert line.startswith("error"), line
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
