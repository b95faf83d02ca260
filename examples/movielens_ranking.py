"""Predicts MovieLens-100K's ratings with embedding tables of two sizes.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python movielens_ranking.py

The model is the factorisation machine of movielens_model.py. Tables above
`--size_threshold` are trained row by row with Adagrad, the others by the
model's Adam.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time

# What tf.keras is, is decided when TensorFlow is imported: tf_keras, which
# tensorflow_recommenders needs, or with 0 Keras 3, of which the model then is.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import movielens_model
import movielens_pictures
import movielens_serving
import numpy as np
import tensorflow as tf
from absl import app, flags
from epoch_lines import EpochLines

FLAGS = flags.FLAGS
common_flags.training(epochs=12, size_threshold=500)
common_flags.path(
    "output",
    "where the pictures and the model go; if not given, a temporary folder",
)
common_flags.row_dtype("table_dtype", "the dtype of the large tables' rows")
common_flags.count("steps_per_execution", 1, "steps that Keras runs at once")

#: Published test RMSEs of other models: on GroupLens's fold u1, and on a fifth
#: that was drawn.
ON_U1 = {"GC-MC": 0.910, "GC-MC with features": 0.905}
ON_A_DRAWN_FIFTH = {"matrix factorisation": 0.934}
CHECKED = 1000


def main(_: list[str]) -> None:
    """Trains, evaluates, draws and exports the model."""
    tf.keras.utils.set_random_seed(FLAGS.seed)
    try:
        folder = FLAGS.data or movielens.find()
        fold = movielens.fold_u1(folder)
        data = movielens.load(folder, split=fold)
        output = FLAGS.output or pathlib.Path(
            tempfile.mkdtemp(prefix="movielens_")
        )
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(error) from None
    if (output / "model").exists():  # Not after a minute of training.
        raise SystemExit(f"{output / 'model'} is there already.")

    print(data)
    train = data.dataset(data.train, FLAGS.batch_size, shuffle_seed=FLAGS.seed)
    test = data.dataset(data.test, FLAGS.batch_size)

    model = movielens_model.make(
        data,
        FLAGS.batch_size,
        FLAGS.epochs * len(train),
        FLAGS.size_threshold,
        FLAGS.steps_per_execution,
        table_dtype=FLAGS.table_dtype,
    )
    print(f"\n{model.embeddings.placement}\n")
    start = time.perf_counter()
    history = model.fit(
        train,
        epochs=FLAGS.epochs,
        validation_data=test,
        callbacks=[EpochLines(FLAGS.epochs)],
        verbose=0,
        shuffle=False,  # The data set is, which Keras 3 would remark on.
    ).history
    print(f"trained in {time.perf_counter() - start:.0f} s\n")
    rmse = model.evaluate(test, return_dict=True, verbose=0)["rmse"]
    baselines = {
        "always the mean rating": rmse_of_mean(data),
        **(ON_U1 if fold else ON_A_DRAWN_FIFTH),
    }

    movielens_pictures.draw(
        model, data, movielens.load_movies(folder), history, baselines, output
    )
    export(model, data, output / "model")
    print("\ntest RMSE, in stars")
    for name, value in {**baselines, "this model": rmse}.items():
        print(f"  {name:22}  {value:.4f}")
    print(f"test_rmse={rmse:.4f}", flush=True)


def rmse_of_mean(data: movielens.MovieLens) -> float:
    """The test RMSE of the one number that suits the training set best."""
    errors = data.test.rating - np.mean(data.train.rating)
    return float(np.sqrt(np.mean(np.square(errors))))


def export(
    model: tf.keras.Model, data: movielens.MovieLens, path: pathlib.Path
) -> None:
    """Exports the model, loads it as a server would and checks its ratings.

    Raises:
        AssertionError: they are not the model's, or an unknown user has one.
    """
    movielens_serving.export(model, data, path)
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]

    rows = data.test[np.arange(min(CHECKED, len(data.test)))]
    user_ids, movie_ids = data.user_ids[rows.user], data.movie_ids[rows.movie]
    served = serve(
        user_id=tf.constant(user_ids), movie_id=tf.constant(movie_ids)
    )["rating"].numpy()
    expected = model(data.join(rows.user, rows.movie))
    np.testing.assert_allclose(served, expected, rtol=1e-4)
    try:
        serve(user_id=tf.constant([-7], tf.int64), movie_id=movie_ids[:1])
    except tf.errors.InvalidArgumentError:
        pass
    else:
        raise AssertionError("An unknown user has a rating.")
    print(f"wrote {path}; loaded, it predicts the same:")
    for i in range(min(3, len(rows))):
        print(
            f"  user {user_ids[i]:3}, movie {movie_ids[i]:4}: rating "
            f"{served[i]:.2f}, in truth {rows.rating[i]:.0f}"
        )


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
