"""A worker of scaling_out.py: trains its part of a model with the others.

The notebook starts it twice, with `TF_CONFIG` set, and shows this file.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

# Two workers on one machine: each takes half of its cores.
threads = max(1, len(os.sched_getaffinity(0)) // 2)
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
# Reads TF_CONFIG, and waits for the others. It has to come before all else
# that does something with TensorFlow.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

EXAMPLES = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(EXAMPLES))

import movielens
import pair_model
import tf_keras

BATCH, EPOCHS = 1000, 2


def main(folder: pathlib.Path) -> None:
    """Trains, and writes a checkpoint and a report to `folder`."""
    tf_keras.utils.set_random_seed(0)  # The same on all workers.
    data = movielens.load(movielens.find())

    def distribute(
        ratings: movielens.Ratings, seed: int | None = None
    ) -> tf.distribute.DistributedDataset:
        # `context` says which part of each batch is this worker's.
        return strategy.distribute_datasets_from_function(
            lambda context: data.dataset(ratings, BATCH, seed, context).map(
                pair_model.for_fit
            )
        )

    with strategy.scope():
        model = pair_model.make(data)
        model.compile(
            tf_keras.optimizers.Adam(0.003),
            "mse",
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )
    history = model.fit(
        distribute(data.train, seed=0),
        epochs=EPOCHS,
        steps_per_epoch=len(data.train) // BATCH,
        validation_data=distribute(data.test),
        validation_steps=len(data.test) // BATCH,
        verbose=0,
    ).history

    first = strategy.extended.should_checkpoint
    # All workers save, as each has a part of the tables; only the first one's
    # path is read again.
    name = "model" if first else f"unused-{os.getpid()}"
    tf.train.Checkpoint(model=model).write(str(folder / name))
    if first:
        report = {
            "replicas": strategy.num_replicas_in_sync,
            "placement": str(model.get_layer("vectors").placement),
            "history": history,
        }
        (folder / "report.json").write_text(json.dumps(report), "utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
