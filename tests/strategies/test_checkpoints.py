"""Checkpoints of every placement, restored on every other.

What was trained somewhere goes on elsewhere as if it had been there from the
beginning: on one device, which the numpy reference defines.
"""

import functools
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tfrs_embed.testing import EmulatedTPUStrategy

import tfrs_embed
from strategies.replicas import distribute
from training_helpers import state

tpu = tf.tpu.experimental.embedding
STEPS, BATCH = 4, 12  # Of all replicas.
ROWS = {"user": 37, "item": 29, "hour": 5}
DIMS = {"user": 4, "item": 9, "hour": 3}

#: Where the checkpoints of other processes are.
FOLDER = os.environ.get("TFRS_EMBED_TEST_CHECKPOINTS")
#: Those that this process is to save, and those that it is to restore.
SAVED = os.environ.get("TFRS_EMBED_TEST_SAVED", "").split()
RESTORED = os.environ.get("TFRS_EMBED_TEST_RESTORED", "").split()

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="test_checkpoint_matrix.py says what to do"
)


@functools.cache
def strategy_of(placement, own):
    """The strategy that a placement stands for; `own` is the process's."""
    kind, _, count = placement.partition("-")
    if kind == "one":
        return tf.distribute.get_strategy()
    if not isinstance(own, EmulatedTPUStrategy):
        return own
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(int(count))]
        )
    return EmulatedTPUStrategy(placement)


def batches():
    rng = np.random.default_rng(0)
    return [
        {name: rng.integers(0, n, BATCH) for name, n in ROWS.items()}
        for _ in range(STEPS)
    ]


class Trained:
    """A layer under a strategy, and its training steps."""

    def __init__(self, strategy, size_threshold=20, **options):
        self.strategy = strategy
        tables = {
            name: tpu.TableConfig(
                rows,
                DIMS[name],
                initializer=tf_keras.initializers.RandomNormal(seed=i),
                optimizer=(
                    tpu.Adam(0.1) if name == "item" else tpu.Adagrad(0.3)
                ),
                name=name,
            )
            for i, (name, rows) in enumerate(ROWS.items())
        }
        share = BATCH // strategy.num_replicas_in_sync
        with strategy.scope():
            self.layer = tfrs_embed.PartialTPUEmbedding(
                {
                    name: tpu.FeatureConfig(table, output_shape=[share])
                    for name, table in tables.items()
                },
                None,
                size_threshold=size_threshold,
                **options,
            )
            self.optimizer = tf_keras.optimizers.SGD(0.5)
            self.checkpoint = tf.train.Checkpoint(
                embedding=self.layer, optimizer=self.optimizer
            )
        self._run = tf.function(self._step)

    def _step(self, batch):
        def of_replica(batch):
            with tf.GradientTape() as tape:
                vectors = self.layer(batch, training=True)
                loss = sum(
                    tf.reduce_sum(tf.square(v - 1.0)) for v in vectors.values()
                )
            weights = self.layer.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))

        self.strategy.run(of_replica, (batch,))

    def train(self, batches):
        number = self.strategy.num_replicas_in_sync
        for batch in batches:
            parts = [
                {k: v[i] for k, v in split.items()}
                for split in [
                    {k: np.split(v, number) for k, v in batch.items()}
                ]
                for i in range(number)
            ]
            self._run(distribute(self.strategy, parts))

    def state(self):
        """All tables and slots by name, and the step."""
        return state(self.layer)


@functools.cache
def expected(steps):
    """The state of one device after some steps."""
    one = Trained(tf.distribute.get_strategy())
    one.train(batches()[:steps])
    return one.state()


def assert_equal(state, other, **tolerance):
    assert sorted(state) == sorted(other)
    for name, value in other.items():
        np.testing.assert_allclose(
            state[name], value, err_msg=name, **tolerance
        )


def path_of(placement, strategy):
    """Where a process saves to: all but the chief into folders of their own."""
    resolver = strategy.cluster_resolver
    task = resolver.task_id if placement.startswith("workers") else 0
    folder = pathlib.Path(FOLDER) / placement
    return str((folder / f"worker-{task}" if task else folder) / "checkpoint")


@functools.cache
def trained(placement, strategy):
    """A placement's layer after two steps, which checkpoints replace."""
    model = Trained(strategy_of(placement, strategy))
    model.train(batches()[:2])
    return model


@pytest.mark.parametrize("placement", SAVED)
def test_save(strategy, placement):
    model = trained(placement, strategy)
    state = model.state()  # All workers read it together.
    assert_equal(state, expected(2), rtol=1e-4, atol=1e-5)
    path = path_of(placement, strategy)
    model.checkpoint.write(path)
    if "worker-" in path:
        return
    # Anyone reads it.
    reader = tf.train.load_checkpoint(path)
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    found = {
        name[len("embedding/") : -len(suffix)].removeprefix("tables/"): (
            reader.get_tensor(name)
        )
        for name, shape in reader.get_variable_to_shape_map().items()
        if name.startswith("embedding/")
        if shape or "/step/" in name  # Not the learning rates.
    }
    assert_equal(found, state, rtol=0, atol=0)


@pytest.mark.parametrize("there", RESTORED)
@pytest.mark.parametrize("here", SAVED)
def test_restore(strategy, here, there):
    path = str(pathlib.Path(FOLDER) / there / "checkpoint")
    reader = tf.train.load_checkpoint(path)
    model = trained(here, strategy)
    status = model.checkpoint.read(path)
    status.assert_existing_objects_matched()
    for name, value in model.state().items():
        key = name if name == "step" else f"tables/{name}"
        saved = reader.get_tensor(f"embedding/{key}/.ATTRIBUTES/VARIABLE_VALUE")
        np.testing.assert_array_equal(value, saved, err_msg=name)
    # It goes on as if it had always been here.
    model.train(batches()[2:])
    assert_equal(model.state(), expected(STEPS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("here", SAVED)
def test_restore_before_the_tables_are_made(strategy, here):
    path = str(pathlib.Path(FOLDER) / RESTORED[0] / "checkpoint")
    model = Trained(strategy_of(here, strategy))
    status = model.checkpoint.read(path)
    model.layer.build(None)
    status.expect_partial()
    assert_equal(model.state(), expected(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("here", SAVED)
def test_saving_while_training_goes_on(strategy, here, tmp_path):
    model = trained(here, strategy)
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    path = str(tmp_path / "checkpoint")
    if here.startswith("workers"):
        with pytest.raises(RuntimeError, match="without experimental_enable"):
            model.checkpoint.write(path, options)
        return
    # The second time TensorFlow copies the tables in a function.
    for _ in range(2):
        before = model.state()
        model.checkpoint.write(path, options)
        model.train(batches())
    model.checkpoint.sync()
    model.checkpoint.read(path)
    assert_equal(model.state(), before, rtol=0, atol=0)


def test_workers_need_paths_of_their_own(strategy, tmp_path):
    if not SAVED[0].startswith("workers"):
        pytest.skip("one process has one path")
    model = trained(SAVED[0], strategy)
    path = str(pathlib.Path(FOLDER) / "the same")
    with pytest.raises(ValueError, match="Worker 1 saves to the path of the"):
        model.checkpoint.write(path)
    # Nobody waits for anybody, and the next one works.
    path = path_of(SAVED[0], strategy) + "-again"
    model.checkpoint.write(path)
    if "worker-" in path:
        with pytest.raises(ValueError, match="only the chief's checkpoint"):
            model.checkpoint.read(path)
