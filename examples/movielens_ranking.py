"""Predicts MovieLens-100K's ratings with embedding tables of two sizes.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python movielens_ranking.py

The model is the factorisation machine of movielens_model.py. Tables above
`--size_threshold` are trained row by row with Adagrad, the others by the
model's Adam.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time

# What tf.keras is, is decided when TensorFlow is imported: tf_keras, which
# tensorflow_recommenders needs, or with 0 Keras 3, of which the model then is.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens
import movielens_model
import numpy as np
import tensorflow as tf


def main() -> None:
    """Trains, evaluates, plots and exports the model."""
    flags = parse_flags()
    tf.keras.utils.set_random_seed(flags.seed)
    try:
        data = movielens.load(flags.data or movielens.find())
        output = flags.output or pathlib.Path(
            tempfile.mkdtemp(prefix="movielens_")
        )
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(error) from None

    print(data)
    train = data.dataset(data.train, flags.batch_size, shuffle_seed=flags.seed)
    test = data.dataset(data.test, flags.batch_size)

    model = movielens_model.make(
        data,
        flags.batch_size,
        flags.epochs * len(train),
        flags.size_threshold,
        flags.steps_per_execution,
        table_dtype=flags.table_dtype,
    )
    print(model.embeddings.placement)
    start = time.perf_counter()
    history = model.fit(train, epochs=flags.epochs, validation_data=test)
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(test, return_dict=True)["rmse"]

    plot(history.history, output / "training_curve.png")
    export(model, data, output / "model")
    print(f"test_rmse={rmse:.4f}")


# Results.


def plot(history: dict[str, list[float]], path: pathlib.Path) -> None:
    """Draws the RMSE after each epoch."""
    try:
        import matplotlib
    except ImportError:
        print("no training curve: pip install matplotlib")
        return
    matplotlib.use("Agg")  # No display needed.
    from matplotlib import pyplot as plt

    epochs = range(1, len(history["rmse"]) + 1)
    figure, axes = plt.subplots()
    axes.plot(epochs, history["rmse"], label="train, during the epoch")
    axes.plot(epochs, history["val_rmse"], label="test, after the epoch")
    axes.set(title="MovieLens-100K", xlabel="epoch", ylabel="RMSE")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


class Server(tf.Module):
    """What is exported: ratings for MovieLens's own user and movie numbers."""

    def __init__(
        self,
        model: tf.keras.Model,
        data: movielens.MovieLens,
    ) -> None:
        super().__init__()
        # Variables must be tracked to be saved. Not through the model: Keras
        # would trace all of its layers for a loader of its own.
        self.model_variables = model.variables
        # No row for unknown ids: they are errors.
        user_row, movie_row = self.lookups = [
            tf.keras.layers.IntegerLookup(vocabulary=ids, num_oov_indices=0)
            for ids in (data.user_ids, data.movie_ids)
        ]
        ids = tf.TensorSpec([None], tf.int64)

        @tf.function(input_signature=[ids, ids])
        def serve(
            user_id: tf.Tensor, movie_id: tf.Tensor
        ) -> dict[str, tf.Tensor]:
            features = data.join(user_row(user_id), movie_row(movie_id))
            return {"rating": model(features)}

        self.serve = serve


def export(
    model: tf.keras.Model,
    data: movielens.MovieLens,
    path: pathlib.Path,
) -> None:
    """Writes a SavedModel, reloads it and checks its predictions.

    Raises:
        AssertionError: they are not the model's.
    """
    server = Server(model, data)
    # For serving only: the tables' updates, custom gradients, stay behind.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(server, path, server.serve, options)
    serve = tf.saved_model.load(path).signatures["serving_default"]

    rows = data.test[np.arange(1000)]
    user_ids, movie_ids = data.user_ids[rows.user], data.movie_ids[rows.movie]
    served = serve(
        user_id=tf.constant(user_ids), movie_id=tf.constant(movie_ids)
    )["rating"]
    expected = model(data.join(rows.user, rows.movie))
    np.testing.assert_allclose(served, expected, rtol=1e-5)
    print(f"wrote {path}, which predicts the same:")
    for i in range(3):
        print(
            f"  user {user_ids[i]}, movie {movie_ids[i]}: rating "
            f"{served[i]:.2f}, in truth {rows.rating[i]:.0f}"
        )


# Flags.


def parse_flags() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a ranking model on MovieLens-100K."
    )
    movielens.add_flags(parser, epochs=12, size_threshold=500)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the model and the training curve go [a temporary folder]",
    )
    parser.add_argument(
        "--table_dtype",
        "--table-dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="the dtype of the large tables' rows [%(default)s]",
    )
    parser.add_argument(
        "--steps_per_execution",
        type=movielens.positive_int,
        default=1,
        metavar="N",
        help="steps that Keras runs at once [%(default)s]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
