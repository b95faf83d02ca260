"""A layer with a table of keys, their uses, and which of them are served."""

import numpy as np
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from tfrs_embed.serving import export

DIM = 3
SPEC = tf.TensorSpec([None], tf.int64)
#: Limits of the keys that are exported.
LIMITS = [
    {"min_frequency": 3},
    {"max_age": 0},
    {"max_keys": 7},
    {"min_frequency": 2, "max_age": 2, "max_keys": 5},
    {"min_frequency": 10**9},
]


class Stream:
    """A layer that random keys train, and what served keys are expected.

    Args:
        strategy: where the layer is made.
        eviction: the table's rule.
        rows: the table's; with few of them, keys lose their rows.
    """

    def __init__(self, strategy, eviction, rows=400, **table):
        self.strategy = strategy
        self.eviction = eviction
        self.random = np.random.default_rng(3)
        keyed = tfrs_embed.DynamicKeys(eviction=eviction, **table)
        with strategy.scope():
            tables = {
                "items": tfrs_embed.TableConfig("items", rows, DIM, keys=keyed),
                "movie": tfrs_embed.TableConfig("movie", 20, DIM),
            }
            self.layer = layers.PartialTPUEmbedding(
                {n: tfrs_embed.FeatureConfig(n, t) for n, t in tables.items()},
                keras.optimizers.SGD(0.1),
                size_threshold=0,
                name="layer",
            )
            self.layer.build(None)
        self.table = self.layer.tables["items"]
        self.table.track_changes()
        self.layer.tables["movie"].track_changes()
        #: The number of uses of each key, and the step of the last one.
        self.frequency, self.last_used, self.steps = {}, {}, 0
        self._run = tf.function(self._step)

    def _step(self, keys):
        def of_replica():
            context = tf.distribute.get_replica_context()
            mine = keys[context.replica_id_in_sync_group :: self.replicas]
            with tf.GradientTape() as tape:
                vectors = self.layer({"items": mine, "movie": mine % 20})
                loss = tf.add_n(
                    [tf.reduce_sum(tf.sin(v)) for v in vectors.values()]
                )
            tape.gradient(loss, self.layer.trainable_variables)

        self.strategy.run(of_replica)

    @property
    def replicas(self):
        return self.strategy.num_replicas_in_sync

    def train(self, low, high, steps=3, size=12):
        """Trains steps of keys from low to high - 1, small ones more often."""
        for _ in range(steps):
            u = self.random.random(size) ** 2
            keys = low + (u * (high - low)).astype(np.int64)
            self._run(tf.constant(keys))
            self.steps += 1
            for key in keys.tolist():
                self.frequency[key] = self.frequency.get(key, 0) + 1
                self.last_used[key] = self.steps

    def read_uses(self):
        """Takes the table's word for the uses of the keys that it has."""
        of = {n: v.numpy().tolist() for n, v in self.table.variables.items()}
        keys = of["keys"]
        self.frequency = dict(zip(keys, of["frequency"], strict=True))
        self.last_used = dict(zip(keys, of["last_used"], strict=True))

    def expected(self, min_frequency=1, max_age=10**9, max_keys=10**9):
        """The keys that an export has, found one by one."""
        fit = [
            key
            for key, times in self.frequency.items()
            if times >= min_frequency
            and self.steps - self.last_used[key] <= max_age
        ]

        def order(key):
            by = (self.last_used[key], key)
            return (self.frequency[key], *by) if self.eviction == "lfu" else by

        return sorted(sorted(fit, key=order, reverse=True)[:max_keys])

    def export(self, path, **options):
        """Exports the layer, for keys and for movies."""
        specs = {"items": SPEC, "movie": SPEC}
        export(self.layer, path, specs, progress=False, **options)

    def answers(self, path_or_served, asked):
        """What a server says of keys."""
        served = path_or_served
        if not hasattr(served, "serve"):
            served = tf.saved_model.load(str(served))
        keys = tf.constant(asked, tf.int64)
        vectors = served.serve({"items": keys, "movie": keys % 20})
        return {name: value.numpy() for name, value in vectors.items()}

    def assert_serves(self, served, chosen, asked):
        """A server knows the chosen keys alone, with the layer's vectors."""
        keys, rows = (
            self.table.variables[name].numpy()
            for name in ("keys", "parameters")
        )
        row_of = dict(zip(keys.tolist(), rows, strict=True))
        expected = [
            row_of[key] if key in chosen else np.zeros(DIM)
            for key in asked.tolist()
        ]
        movies = self.layer.embedding_tables["movie"].numpy()
        found = self.answers(served, asked)
        np.testing.assert_array_equal(found["items"], expected)
        np.testing.assert_array_equal(found["movie"], movies[asked % 20])
        assert len(chosen) == np.any(found["items"] != 0, axis=1).sum()
