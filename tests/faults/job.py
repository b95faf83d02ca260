"""A job that trains and saves, with tables of one placement.

It prints a line for each thing that it begins, so that whoever kills it knows
what it was at; a job that is started again with the same folder goes on after
the last complete checkpoint.
"""

import argparse
import json
import os
import pathlib
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed

tpu = tf.tpu.experimental.embedding
PLACEMENTS = ("row", "table", "column", "replicated", "mixed", "dynamic", "hot")
# Tables in files are variables like others, until their process is killed.
WITH_FILES = (*PLACEMENTS, "files")
BATCH, STEPS, STEPS_PER_SAVE = 6, 8, 2
# What a step waits for its data, in seconds.
PAUSE_S = 0.01


def begin(phase):
    """Says what this worker is at from now on."""
    print(f"at {time.monotonic():.4f} {phase}", flush=True)


def make_tables(placement, folder=None):
    """Tables by name; the first is wide enough to be cut into columns.

    `folder` is for "files".
    """

    def table(name, rows, dim, place, **kwargs):
        return tfrs_embed.TableConfig(
            name,
            rows,
            dim,
            initializer=tf_keras.initializers.RandomUniform(seed=rows),
            combiner="sum",
            placement=place,
            **kwargs,
        )

    if placement == "mixed":
        places = ("row", "table", "column", "replicated")
        made = [table(p, 20 + i, 16, p) for i, p in enumerate(places)]
    elif placement == "dynamic":
        keys = tfrs_embed.DynamicKeys(
            admission=tfrs_embed.FrequencyAdmission(2), eviction="lru"
        )
        made = [
            table("users", 24, 16, "auto", keys=keys),
            table("items", 11, 5, "row"),
        ]
    elif placement == "hot":
        made = [
            table("users", 24, 16, "row", hot_rows=range(0, 24, 3)),
            table("items", 11, 5, "row", hot_rows=(1, 4)),
        ]
    elif placement == "files":
        storage = tfrs_embed.FileStorage(folder)
        made = [
            table("users", 24, 16, "row", storage=storage),
            table("items", 11, 5, "column", storage=storage),
            table(
                *("posts", 24, 4, "auto"),
                keys=tfrs_embed.DynamicKeys(spill=storage),
            ),
        ]
    else:
        place = "auto" if placement == "variables" else placement
        made = [
            table("users", 24, 16, place),
            table("items", 11, 5, place),
        ]
    return {each.name: each for each in made}


def make_layer(placement, tables, optimizer, name=None):
    """A layer of tables, of the kind that has an engine for each.

    "variables" are small tables, which are Keras's and have no engine.
    """
    features = {n: tfrs_embed.FeatureConfig(n, t) for n, t in tables.items()}
    if placement == "variables":
        return tfrs_embed.PartialTPUEmbedding(features, optimizer, name=name)
    if placement in ("replicated", "mixed"):
        return tfrs_embed.DistributedEmbedding(
            features, optimizer=optimizer, name=name
        )
    return tfrs_embed.PartialTPUEmbedding(
        features, optimizer, size_threshold=0, name=name
    )


class Job:
    """A model and its checkpoint.

    Args:
        strategy: what it trains under.
        placement: one of `WITH_FILES`.
        folder: for tables in files.
    """

    def __init__(self, strategy, placement, folder):
        self._strategy = strategy
        tables = make_tables(placement, folder)
        # Where keys come and go there are more of them than rows.
        self._keys = {
            n: t.vocabulary_size * (2 if t.keys else 1)
            for n, t in tables.items()
        }
        with strategy.scope():
            layer = make_layer(placement, tables, tpu.Adam(0.1))
            layer.build()
            dense = tf_keras.layers.Dense(
                1, kernel_initializer=tf_keras.initializers.RandomNormal(seed=3)
            )
            dense.build([None, sum(t.embedding_dim for t in tables.values())])
            optimizer = tf_keras.optimizers.Adam(0.01)
            variables = [*dense.trainable_variables, *layer.trainable_variables]
            optimizer.build(variables)
            self.done = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.checkpoint = tf.train.Checkpoint(
            layer=layer, dense=dense, optimizer=optimizer, done=self.done
        )

        def step(ids):
            with tf.GradientTape() as tape:
                vectors = layer(ids, training=True)
                both = tf.concat([vectors[n] for n in tables], -1)
                loss = tf.reduce_sum((dense(both) - 1.0) ** 2)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        @tf.function
        def train(ids):
            losses = strategy.run(step, (ids,))
            return strategy.reduce("SUM", losses, axis=None)

        self._train = train

    def train(self, step, worker):
        """A step on this worker's own data, always the same."""
        rng = np.random.default_rng((step, worker))
        loss = self._train(
            {
                name: tf.constant(rng.integers(0, keys, BATCH))
                for name, keys in self._keys.items()
            }
        )
        self.done.assign(step + 1)
        return float(loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement", choices=WITH_FILES, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--deltas", action="store_true")
    args = parser.parse_args()
    begin("starting")
    config = json.loads(os.environ["TF_CONFIG"])
    worker = config["task"]["index"]
    strategy = tf.distribute.get_strategy()
    if len(config["cluster"]["worker"]) > 1:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    begin("building")
    job = Job(strategy, args.placement, args.folder / "tables")
    if args.deltas:
        # The last of the saves is a full one.
        deltas = tfrs_embed.checkpoint.DeltaManager(
            job.checkpoint,
            args.folder / "chief",
            full_every=STEPS // STEPS_PER_SAVE - 1,
            max_to_keep=1,
        )
        begin("restoring")
        deltas.restore_or_initialize()
    else:
        # All workers save; what counts is what the first one wrote.
        name = "chief" if worker == 0 else f"worker-{worker}"
        manager = tf.train.CheckpointManager(
            job.checkpoint, str(args.folder / name), max_to_keep=2
        )
        newest = tf.train.latest_checkpoint(args.folder / "chief")
        if newest:
            begin("restoring")
            job.checkpoint.restore(newest).assert_consumed()
    first = int(job.done.numpy())
    print(f"continues after step {first}", flush=True)
    for i in range(first, STEPS):
        begin("between")
        time.sleep(PAUSE_S)
        begin("step" if i > first else "first step")
        job.train(i, worker)
        if (i + 1) % STEPS_PER_SAVE == 0:
            begin("saving")
            if args.deltas:
                deltas.save()
            else:
                manager.save(i + 1)
            print(f"saved {i + 1}", flush=True)
    begin("ending")


if __name__ == "__main__":
    main()
