"""What tests of deltas share: layers of many tables, steps, the comparison."""

import tempfile

import numpy as np
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from strategies.replicas import distribute, of_chief
from tfrs_embed.checkpoint import DeltaManager, chain
from training_helpers import state

tpu = tf.tpu.experimental.embedding
ROWS = 60
OPTIMIZERS = {
    "adagrad": lambda: tpu.Adagrad(0.3),
    "adam": lambda: tpu.Adam(0.1),
    "row_wise": lambda: tfrs_embed.optimizers.RowWiseAdagrad(0.3),
}
DTYPES = ("float32", "bfloat16")
PLACEMENTS = (
    *("row", "column", "table", "replicated", "hot rows", "keys"),
    "spill",
)
KEYED = ("keys", "spill")


def make_layer(placement, rows=ROWS):
    """A layer with a table of each optimizer and dtype, and a small one.

    Keys are evicted, for good or to a file; "one" is one device's placement.
    """
    options = {}
    if placement == "spill":
        rows = rows * 2 // 3
        folder = tfrs_embed.FileStorage(tempfile.gettempdir())
        options["keys"] = tfrs_embed.DynamicKeys(spill=folder)
    if placement == "keys":
        options["keys"] = tfrs_embed.DynamicKeys(
            eviction="lru",
            when_full="evict",
            admission=tfrs_embed.FrequencyAdmission(2),
            fallback_rows=4,
        )
    elif placement == "hot rows":
        options.update(placement="row", hot_rows=range(0, rows, 3))
    elif placement not in ("one", "spill"):
        options["placement"] = placement
    features = {}
    for i, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        for dtype in DTYPES[:1] if placement in KEYED else DTYPES:
            table = tfrs_embed.TableConfig(
                f"{name}_{dtype}",
                rows,
                4,
                initializer=keras.initializers.RandomUniform(seed=i),
                optimizer=optimizer(),
                dtype=dtype,
                **options,
            )
            features[table.name] = tfrs_embed.FeatureConfig(table.name, table)
    if placement == "replicated":
        # Where Keras trains copies, they are saved whole.
        return layers.DistributedEmbedding(features)
    small = tfrs_embed.TableConfig("small", 7, 4)
    features["small"] = tfrs_embed.FeatureConfig("small", small)
    return layers.PartialTPUEmbedding(features, None, size_threshold=20)


class Job:
    """A layer under a strategy, its checkpoint, and its training steps."""

    def __init__(self, strategy, placement, **options):
        self.strategy = strategy
        with strategy.scope():
            self.layer = make_layer(placement, **options)
            self.optimizer = keras.optimizers.SGD(0.5)
            self.checkpoint = tf.train.Checkpoint(
                layer=self.layer, optimizer=self.optimizer
            )
        self._run = tf.function(self._step)
        self._steps = 0

    def _step(self, ids):
        def of_replica(ids):
            with tf.GradientTape() as tape:
                found = self.layer(ids, training=True)
                loss = tf.add_n(
                    [
                        tf.reduce_sum(tf.cast(v, tf.float32) ** 2)
                        for v in found.values()
                    ]
                )
            weights = self.layer.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))

        self.strategy.run(of_replica, (ids,))

    def build(self):
        with self.strategy.scope():
            self.layer.build(None)
            self.optimizer.build(self.layer.trainable_variables)

    def train(self, steps=1):
        """Trains on few ids of a step, so that most rows stay."""
        replicas = self.strategy.num_replicas_in_sync
        if not self._steps:
            # Before the step is traced, which else is traced two times.
            self.build()
        for _ in range(steps):
            rng = np.random.default_rng(self._steps)
            self._steps += 1
            start = rng.integers(0, 2 * ROWS)

            def draw(name, rng=rng, start=start):
                if name == "small":
                    return rng.integers(0, 7, 4)
                ids = start + rng.integers(0, 12, 8)
                keyed = self.layer.tables[name].spec.keys is not None
                return ids if keyed else ids % ROWS

            self._run(
                distribute(
                    self.strategy,
                    [
                        {name: draw(name) for name in self.layer.tables}
                        for _ in range(replicas)
                    ],
                )
            )

    def state(self):
        """Copies of all that is saved."""
        found = state(self.layer)
        found["iterations"] = np.asarray(self.optimizer.iterations)
        return found


def restored(strategy, placement, path):
    """The state of a new job that restores a checkpoint, then builds."""
    job = Job(strategy, placement)
    job.checkpoint.restore(str(path))
    job.build()
    return job


def check_chain(strategy, placement, folder, others, background=False):
    """Saves with deltas, and compares what each file restores.

    Args:
        strategy: the strategy to train under.
        placement: one of PLACEMENTS, or "one".
        folder: an empty folder, of each worker.
        others: pairs of a strategy and a placement that restore as well.
        background: whether threads write full checkpoints.
    """
    job = Job(strategy, placement)
    to = str(of_chief(strategy, folder))
    manager = DeltaManager(
        job.checkpoint, to, full_every=4, background=background
    )
    assert manager.restore_or_initialize() is None
    states = {}
    for steps in (1, 1, 2, 0, 1, 1, 1):
        job.train(steps)
        states[manager.save()] = job.state()
        if len(states) == 5:
            manager.wait()
    assert manager.checkpoints == [*states]
    files = [chain.files_of(path) for path in states]
    # With threads: the fourth save begins a full checkpoint, which one of the
    # next two continues.
    lengths = [len(each) for each in files]
    assert lengths[:4] == [1, 2, 3, 4]
    if background:
        assert lengths[5:] in ([2, 3], [3, 4])
    else:
        assert lengths[4:] == [1, 2, 3]
    # After two deltas, a full one that threads may have written, and deltas.
    for number, (path, expected) in enumerate(states.items()):
        if number not in (2, 4, 6):
            continue
        last = others if number == 6 else []
        for own, place in [(strategy, placement), *last]:
            found = restored(own, place, path).state()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(
                    found[name], value, err_msg=f"{path} {name} {place}"
                )
    return job, manager
