"""A worker that trains, saves after each step, and misbehaves if told to.

Prints a line per step with its loss; a job that is started again with the same
folder goes on after the last step that was saved.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed.distribution import handshake, long_waits

ROWS, BATCH = 50, 8


def read(layer):
    return [table.numpy() for table in layer.embedding_tables.values()]


# What a worker does between steps that the others don't do with it.
ALONE = {
    "saves alone": lambda worker, layers, checkpoint, path: (
        worker == 0 and checkpoint.save(path)
    ),
    "reads alone": lambda worker, layers, checkpoint, path: (
        worker == 0 and read(layers["item"])
    ),
    "reads another": lambda worker, layers, checkpoint, path: read(
        layers["user" if worker else "item"]
    ),
}


def make_layers(args, worker):
    """The layers; `--tables` and `--order` make those of worker 1 differ."""
    odd = worker == 1
    users = tfrs_embed.TableConfig(
        "users",
        ROWS,
        4,
        initializer=tf_keras.initializers.RandomNormal(seed=1),
    )
    rows = ROWS + 1 if odd and args.fault == "tables" else ROWS
    items = tfrs_embed.TableConfig(
        "items",
        rows,
        4,
        initializer=tf_keras.initializers.RandomNormal(seed=2),
    )
    configs = {
        "user": tfrs_embed.FeatureConfig("user", users),
        "item": tfrs_embed.FeatureConfig("item", items),
    }
    names = list(configs)
    if odd and args.fault == "order":
        names.reverse()
    layers = {}
    for name in names:
        layers[name] = tfrs_embed.PartialTPUEmbedding(
            configs[name], "adagrad", size_threshold=0, name=name
        )
        layers[name].build()
        if odd and args.fault == "missing":
            time.sleep(1000)
    return layers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--fault_step", type=int, default=3)
    parser.add_argument("--heartbeat", type=float, help="seconds")
    args = parser.parse_args()
    if args.fault == "missing":
        handshake.TIMEOUT_S = 5
    if args.fault in ("missing", *ALONE):
        long_waits.AFTER_S = 1
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if args.heartbeat:
        tfrs_embed.set_heartbeat_timeout(args.heartbeat)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = make_layers(args, worker)
        dense = tf_keras.layers.Dense(
            1, kernel_initializer=tf_keras.initializers.RandomNormal(seed=3)
        )
        dense.build([None, 4])
        optimizer = tf_keras.optimizers.Adam(0.01)
        variables = [
            *dense.trainable_variables,
            *(v for i in layers.values() for v in i.trainable_variables),
        ]
        optimizer.build(variables)
        done = tf.Variable(0, trainable=False)
    checkpoint = tf.train.Checkpoint(
        **layers, dense=dense, optimizer=optimizer, done=done
    )
    # All workers save; what counts is what the first one wrote.
    mine = args.folder / ("chief" if worker == 0 else f"worker-{worker}")
    newest = tf.train.latest_checkpoint(args.folder / "chief")
    if newest:
        checkpoint.restore(newest).assert_consumed()

    def step(ids):
        with tf.GradientTape() as tape:
            vectors = layers["user"](ids["user"], training=True)
            vectors *= layers["item"](ids["item"], training=True)
            loss = tf.reduce_sum((dense(vectors) - 1.0) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return loss

    def stop(fault):
        if fault == args.fault:
            os.kill(os.getpid(), signal.SIGSTOP)

    @tf.function
    def train(ids):
        losses = strategy.run(step, (ids,))
        return strategy.reduce("SUM", losses, axis=None)

    for i in range(int(done.numpy()), args.steps):
        if i == args.fault_step:
            stop(f"worker {worker} stops in a step")
        if worker == 1 and i == args.fault_step:
            if args.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if args.fault == "raised":
                raise RuntimeError("this worker's own error")
        if i == args.fault_step and args.fault in ALONE:
            path = str(mine / "step")
            ALONE[args.fault](worker, layers, checkpoint, path)
        rng = np.random.default_rng((i, worker))
        ids = {k: tf.constant(rng.integers(0, ROWS, BATCH)) for k in layers}
        print(f"step {i} loss {float(train(ids)):.5f}", flush=True)
        done.assign(i + 1)
        if i == args.fault_step and args.fault.endswith("stops in a save"):
            # The other asks for its part of the last sum while it is in the
            # step: no worker stops before both have left it.
            (args.folder / f"stepped-{worker}").touch()
            while len(list(args.folder.glob("stepped-*"))) < 2:
                time.sleep(0.01)
            stop(f"worker {worker} stops in a save")
        checkpoint.save(str(mine / "step"))
    print("done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
