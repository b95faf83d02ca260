"""A `fit` on a topic of Kafka that is killed, and started again.

    python killed_kafka_fit.py ADDRESS FOLDER MESSAGES KILL

The topic is read by the function of docs/input.md. A row is minus the number
of messages that it was trained on. After KILL steps the program kills itself
with SIGKILL, unless KILL is 0; after MESSAGES messages it writes `result.json`.
"""

import json
import os
import pathlib
import signal
import sys
import time

import tensorflow as tf
import tf_keras

import documentation
import tfrs_embed
from tfrs_embed.checkpoint import FitPosition, SaveCallback

#: Where a job that has lost a message gives up.
LIMIT_S = 60

USERS = [f"user {i}" for i in range(1, 41)]


def read(address):
    """The dataset of docs/input.md, of a broker elsewhere."""
    [block] = (
        block
        for block in documentation.blocks("docs/input.md")
        if "def open_topic" in block.code
    )
    names = {
        "tfrs_embed": tfrs_embed,
        "text": tf.TensorSpec([None], tf.string),
        "number": tf.TensorSpec([None], tf.float32),
    }
    exec(block.code, names)
    names["SERVERS"] = address  # Which its function reads when it is called.
    return names["messages"]


class Sum(tf_keras.losses.Loss):
    def call(self, labels, outputs):
        return tf.reduce_sum(outputs)


def make_model():
    users = tfrs_embed.TableConfig(
        *("users", 100, 1, "zeros"), keys=tfrs_embed.DynamicKeys(tf.string)
    )
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("user", users), tf_keras.optimizers.SGD(1.0)
    )
    model = tf_keras.Sequential([layer])
    model.compile("sgd", Sum(reduction="none"))
    return model


class Stop(tf_keras.callbacks.Callback):
    """Ends the process, or the training."""

    def __init__(self, messages, kill):
        super().__init__()
        self.messages, self.kill = messages, kill
        self.end = time.monotonic() + LIMIT_S

    def on_train_batch_end(self, batch, logs=None):
        self.kill -= 1
        if self.kill == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = sum(counts(self.model).values())
        if seen >= self.messages or time.monotonic() > self.end:
            self.model.stop_training = True


def counts(model):
    """By user, the messages that its row was trained on."""
    rows = model(tf.constant(USERS)).numpy()[:, 0]
    found = {
        user: -round(float(row)) for user, row in zip(USERS, rows, strict=True)
    }
    return {user: count for user, count in found.items() if count}


def main(address, folder, messages, kill):
    model, position = make_model(), FitPosition()
    checkpoint = tf.train.Checkpoint(model=model, position=position)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    manager.restore_or_initialize()
    model.fit(
        read(address),
        steps_per_epoch=100_000,
        verbose=0,
        callbacks=[
            Stop(int(messages), int(kill)),
            SaveCallback(manager, position, every_steps=3),
        ],
    )
    result = json.dumps(counts(model))
    pathlib.Path(folder, "result.json").write_text(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
