"""A worker that trains a model of Keras 3, and misbehaves if told to.

Prints a line per epoch with its loss; a job that is started again with the same
folder goes on after the last epoch that was saved.
"""

import argparse
import json
import os
import pathlib
import signal

os.environ["TF_USE_LEGACY_KERAS"] = "0"

import keras
import numpy as np
import tensorflow as tf

import tfrs_embed

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Reports(keras.callbacks.Callback):
    """Prints epochs; worker 1 has its fault in the fourth."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.epoch = fault, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 3 and batch == 1 and self.fault:
            os.kill(os.getpid(), self.fault)

    def on_epoch_end(self, epoch, logs=None):
        print(f"step {epoch} loss {logs['loss']:.5f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    tfrs_embed.set_heartbeat_timeout(3)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        table = tfrs_embed.TableConfig(
            "t", 50, 4, keras.initializers.RandomNormal(seed=1)
        )
        layer = tfrs_embed.keras3.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), "adagrad", size_threshold=0
        )
        ids = keras.Input([], dtype="int64")
        head = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.RandomNormal(seed=2)
        )
        model = keras.Model(ids, head(layer(ids)))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    data = tf.data.Dataset.from_tensor_slices((np.arange(30), np.ones([30, 1])))
    tfrs_embed.keras3.fit(
        model,
        data.batch(8),
        strategy,
        epochs=6,
        callbacks=[
            keras.callbacks.BackupAndRestore(
                str(args.folder), delete_checkpoint=False
            ),
            Reports(FAULTS.get(args.fault) if worker == 1 else None),
        ],
        verbose=0,
    )
    print("done", flush=True)


if __name__ == "__main__":
    main()
