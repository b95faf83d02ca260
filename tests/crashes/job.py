"""A job that trains, saves after each epoch, and can be killed while it saves.

It goes on after the last epoch that was saved, and writes what it has after
each one to `--states`. With file_operations.c loaded, saving is watched from
the second time on, which copies the files at all its moments.
"""

import argparse
import ctypes
import json
import os
import pathlib

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed.checkpoint import bundle
from tfrs_embed.storage import sharded
from tfrs_embed.tools.conversion import chains

tpu = tf.tpu.experimental.embedding
ROWS, DIM, BATCH = {"user": 40, "item": 9}, 4, 8
EPOCHS = 3
#: Where the tables of users and of items are. By default a small table is a
#: variable of Keras's.
PLACEMENTS = {
    "row": ("auto", "auto"),
    "table": ("table", "table"),
    "column": ("column", "table"),
    "replicated": ("replicated", "replicated"),
    "mixed": ("column", "replicated"),
    "dynamic": ("auto", "auto"),
}


def make_layer(placement):
    """The layer of both tables."""

    def table(name, place):
        if placement == "dynamic" and name == "user":
            # For fewer of the keys than there are.
            rows, keys = ROWS[name] // 2, tfrs_embed.DynamicKeys(eviction="lru")
        else:
            rows, keys = ROWS[name], None
        return tfrs_embed.TableConfig(
            name,
            rows,
            # Wide enough to be cut.
            16 if place == "column" else DIM,
            initializer=tf_keras.initializers.RandomNormal(seed=ROWS[name]),
            placement=place,
            keys=keys,
        )

    features = {
        name: tfrs_embed.FeatureConfig(name, table(name, place))
        for name, place in zip(ROWS, PLACEMENTS[placement], strict=True)
    }
    if placement in ("replicated", "mixed"):
        return tfrs_embed.DistributedEmbedding(
            features, optimizer=tpu.Adam(0.1)
        )
    return tfrs_embed.PartialTPUEmbedding(
        features, tpu.Adam(0.1), size_threshold=20
    )


class Job:
    """A model, of two tables of a placement, and its checkpoint."""

    def __init__(self, strategy, placement="row"):
        with strategy.scope():
            self.layer = make_layer(placement)
            inputs = {
                n: tf_keras.Input([], dtype="int64", name=n) for n in ROWS
            }
            vectors = self.layer(inputs)
            outputs = tf_keras.layers.Dense(
                1, kernel_initializer=tf_keras.initializers.RandomNormal(seed=3)
            )(tf.concat([vectors["user"], vectors["item"]], -1))
            self.model = tf_keras.Model(inputs, outputs)
            self.model.compile(tf_keras.optimizers.Adagrad(0.1), "mse")
            self.model.optimizer.build(self.model.trainable_variables)
            self.done = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.checkpoint = tf.train.Checkpoint(model=self.model, done=self.done)
        # TensorFlow makes its counter in the first restore, with the value of
        # the restore before, which may be one that failed.
        self.checkpoint.save_counter.assign(0)

    def fit(self, epoch, **kwargs):
        """Trains for an epoch, always the same, or from there to the last."""
        rng = np.random.default_rng(0)
        ids = {n: rng.integers(0, r, 2 * BATCH) for n, r in ROWS.items()}
        labels = rng.normal(size=(2 * BATCH, 1))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        data = tf.data.Dataset.from_tensor_slices((ids, labels))
        self.model.fit(
            data.batch(BATCH).with_options(options),
            initial_epoch=epoch,
            verbose=0,
            **kwargs,
        )

    def state(self):
        """All that is saved, by name."""
        state = {}
        for table in ROWS:
            values = {
                name: variable.numpy()
                for name, variable in self.layer.tables[table].variables.items()
            }
            if "keys" in values:
                # Keys that come and go are in no order of their own.
                order = np.argsort(values["keys"])
                values = {
                    name: value if name == "candidates" else value[order]
                    for name, value in values.items()
                }
            state |= {f"{table}/{name}": v for name, v in values.items()}
        for i, variable in enumerate(
            [*self.model.layers[-1].variables, *self.model.optimizer.variables]
        ):
            state[f"variable {i}"] = variable.numpy()
        return {**state, "step": self.layer.step.numpy()}


class Watch:
    """Has saving watched: into a folder per epoch, of that epoch's saves."""

    def __init__(self, args, chief):
        self._args, self._chief = args, chief
        self._library = ctypes.CDLL(None) if args.copies else None

    def begin(self, epoch):
        if self._library is None or epoch == 1:
            return
        copies = self._args.copies / str(epoch)
        copies.mkdir(exist_ok=True)
        fault = self._args.fault if epoch == self._args.fault_epoch else ""
        folder = self._args.folder / "chief"
        self._library.watch(
            str(folder).encode(), str(copies).encode(), fault.encode()
        )

    def end(self):
        if self._library is not None:
            self._library.watch(b"", b"", b"")


def train(job, args, watch, chief, record):
    """Saves checkpoints: numbered, in full or with deltas, and to one name.

    Or it saves deltas, and then watches how they become full checkpoints.
    """
    folder = args.folder / ("chief" if chief else "worker")
    if args.save == "compact":
        manager = tfrs_embed.checkpoint.DeltaManager(job.checkpoint, folder)
        newest = manager.restore_or_initialize()
    elif args.save == "deltas":
        # A full checkpoint, a delta, and one in full, which replaces both.
        manager = tfrs_embed.checkpoint.DeltaManager(
            job.checkpoint, args.folder / "chief", full_every=2, max_to_keep=1
        )
        newest = manager.restore_or_initialize()
    else:
        manager = tf.train.CheckpointManager(
            job.checkpoint, str(folder), max_to_keep=2
        )
        newest = tf.train.latest_checkpoint(args.folder / "chief")
        if newest:
            job.checkpoint.restore(newest).assert_consumed()
    print(f"restored {newest}", flush=True)
    for epoch in range(int(job.done.numpy()), EPOCHS):
        job.fit(epoch, epochs=epoch + 1)
        job.done.assign(epoch + 1)
        record(epoch + 1)
        if args.save == "compact":
            path = manager.save()
        watch.begin(epoch + 1)
        if args.save == "compact":
            if epoch:
                reader = chains.reader_to_compact(path)
                chains.compact(reader, f"{path}-full", lambda size: None)
        elif args.save == "deltas":
            manager.save()
            # What a thread writes is watched too, and by itself: copies are
            # made of files that nobody else changes.
            manager.wait()
        else:
            manager.save(epoch + 1)
        if args.strategy == "one" and args.save == "manager":
            job.checkpoint.write(str(folder / "same"))
        watch.end()
        print(f"saved {epoch + 1}", flush=True)


def train_in_keras(job, args, watch, record):
    """Saves with Keras's callbacks."""

    class Begin(tf_keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            job.done.assign(epoch + 1)
            record(epoch + 1)
            watch.begin(epoch + 1)

    class End(tf_keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            watch.end()

    folder = args.folder / "chief"
    folder.mkdir(exist_ok=True)
    job.fit(
        0,
        epochs=EPOCHS,
        callbacks=[
            Begin(),
            tf_keras.callbacks.BackupAndRestore(
                str(folder / "backup"), delete_checkpoint=False
            ),
            tf_keras.callbacks.ModelCheckpoint(
                str(folder / "models" / "weights-{epoch}"),
                save_weights_only=True,
            ),
            End(),
        ],
    )


def make_strategy(name):
    if name == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "mirrored":
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.get_strategy()


def use_small_blocks():
    """Has each table cut into blocks, and written as several parts."""
    bundle.BLOCK_BYTES = 16 * 4 * DIM
    bundle.PART_BYTES = 2 * bundle.BLOCK_BYTES
    sharded.BLOCK_ELEMENTS = 8 * DIM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="one")
    parser.add_argument("--placement", choices=PLACEMENTS, default="row")
    parser.add_argument("--save", default="manager")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--states", type=pathlib.Path, required=True)
    parser.add_argument("--copies", type=pathlib.Path)
    parser.add_argument("--fault", default="")
    parser.add_argument("--fault_worker", type=int, default=0)
    parser.add_argument("--fault_epoch", type=int, default=2)
    args = parser.parse_args()
    task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))
    worker = task["task"]["index"]
    if worker != args.fault_worker:
        args.fault = ""
    use_small_blocks()
    job = Job(make_strategy(args.strategy), args.placement)

    def record(epoch):
        state = job.state()  # All workers read it together.
        if worker == 0:
            np.savez(args.states / f"{epoch}.npz", **state)

    watch = Watch(args, worker == 0)
    if args.save == "keras":
        train_in_keras(job, args, watch, record)
    else:
        train(job, args, watch, worker == 0, record)
    print("done", flush=True)


if __name__ == "__main__":
    main()
