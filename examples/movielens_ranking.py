"""Predicts MovieLens-100K's ratings with embedding tables of two sizes.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python movielens_ranking.py

The model is a factorisation machine: a user's vector is the sum of the
embeddings of what is known of the user, a movie's likewise, and the rating is

    mean rating + user's bias + movie's bias + <user's vector, movie's vector>.

One `PartialTPUEmbedding` holds all tables. Those above `--size_threshold` are
trained row by row with Adagrad, the others by the model's Adam.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras
from tf_keras.optimizers import schedules

import tfrs_embed

FACTORS = 32
PENALTY = 0.05


def main() -> None:
    """Trains, evaluates, plots and exports the model."""
    flags = parse_flags()
    tf_keras.utils.set_random_seed(flags.seed)
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

    def decay(learning_rate: float) -> schedules.LearningRateSchedule:
        """Falls linearly, to zero at the end of training."""
        steps = flags.epochs * len(train)
        return schedules.PolynomialDecay(learning_rate, steps, 0.0)

    model = RankingModel(
        data,
        # A row's gradient is a mean over the batch, so that of a rare row is
        # tiny: next to Keras's initial accumulator of 0.1 it would do nothing.
        tf_keras.optimizers.Adagrad(
            decay(0.03), initial_accumulator_value=1e-5
        ),
        flags.size_threshold,
    )
    print(model.embeddings.placement)
    model.compile(
        tf_keras.optimizers.Adam(decay(0.002)),
        steps_per_execution=flags.steps_per_execution,
    )
    start = time.perf_counter()
    history = model.fit(train, epochs=flags.epochs, validation_data=test)
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(test, return_dict=True)["rmse"]

    plot(history.history, output / "training_curve.png")
    export(model, data, output / "model")
    print(f"test_rmse={rmse:.4f}")


# Features: one config per feature, one table per vocabulary.


def feature_configs(
    data: movielens.MovieLens,
) -> dict[str, tfrs_embed.FeatureConfig]:
    """Declares all features.

    A movie has the same embedding in a user's history as by itself, because
    both features name one table.
    """
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            feature.vocabulary_size,
            FACTORS + 1,  # The last column is the bias.
            initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
            # SVD++'s, for histories; a single movie is itself in any combiner.
            combiner="sqrtn" if name == "movie" else "mean",
        )
        for name, feature in data.features.items()
        if name != "history"
    }
    tables["history"] = tables["movie"]
    return {
        name: tfrs_embed.FeatureConfig(name, table)
        for name, table in tables.items()
    }


# Model.


class RankingModel(tfrs.models.Model):
    """Predicts the rating that a user gives a movie.

    Args:
        data: the data set, for its vocabularies and its mean rating.
        table_optimizer: trains the large tables.
        size_threshold: rows above which a table is large; None: none is.
    """

    def __init__(
        self,
        data: movielens.MovieLens,
        table_optimizer: tf_keras.optimizers.Optimizer,
        size_threshold: int | None,
    ) -> None:
        super().__init__()
        self.user_features = tuple(data.user_features)
        self.movie_features = tuple(data.movie_features)
        self.mean_rating = float(np.mean(data.train.rating))
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            feature_configs(data),
            optimizer=table_optimizer,
            size_threshold=size_threshold,
        )
        self.task = tfrs.tasks.Ranking(
            loss=tf_keras.losses.MeanSquaredError(),
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )

    def call(
        self, features: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        vectors = self.embeddings(features, training=training)
        # In place of weight decay, which would touch every row of a table.
        for vector in vectors.values():
            squares = tf.reduce_sum(tf.square(vector), axis=-1)
            self.add_loss(PENALTY * tf.reduce_mean(squares))
        user = tf.add_n([vectors[name] for name in self.user_features])
        movie = tf.add_n([vectors[name] for name in self.movie_features])
        rating = (
            self.mean_rating
            + (user[:, -1] + movie[:, -1])
            + tf.reduce_sum(user[:, :-1] * movie[:, :-1], axis=-1)
        )
        # Not in training: outside the range there would be no gradient.
        return rating if training else tf.clip_by_value(rating, 1.0, 5.0)

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        features = dict(inputs)
        rating = features.pop("rating")
        return self.task(rating, self(features, training=training))


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

    def __init__(self, model: RankingModel, data: movielens.MovieLens) -> None:
        super().__init__()
        # Variables must be tracked to be saved. Not through the model: Keras
        # would trace all of its layers for a loader of its own.
        self.model_variables = model.variables
        # No row for unknown ids: they are errors.
        user_row, movie_row = self.lookups = [
            tf_keras.layers.IntegerLookup(vocabulary=ids, num_oov_indices=0)
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
    model: RankingModel, data: movielens.MovieLens, path: pathlib.Path
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

    def positive_int(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    def threshold(text: str) -> int | None:
        return None if text == "none" else int(text)

    parser = argparse.ArgumentParser(
        description="Trains a ranking model on MovieLens-100K."
    )
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the files ml-100k.* are [the installed recbole]",
    )
    add(
        "--output",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the model and the training curve go [a temporary folder]",
    )
    add(
        "--epochs",
        type=positive_int,
        default=12,
        metavar="N",
        help="passes over the ratings [%(default)s]",
    )
    add(
        "--batch_size",
        type=positive_int,
        default=1000,
        metavar="N",
        help="ratings per step [%(default)s]",
    )
    add(
        "--steps_per_execution",
        type=positive_int,
        default=1,
        metavar="N",
        help="steps that Keras runs at once [%(default)s]",
    )
    add(
        "--size_threshold",
        type=threshold,
        default=500,
        metavar="ROWS",
        help="tables with more rows are large; none: no table is [%(default)s]",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of initial values and shuffling [%(default)s]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
