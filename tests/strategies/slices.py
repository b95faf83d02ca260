"""An embedding on an emulated slice, and the same in the numpy reference."""

import dataclasses

import numpy as np
import tensorflow as tf
from tfrs_embed.testing import EmulatedTPUStrategy

from reference import Feature, Ragged, Reference, Sparse, Table, to_tf

tpu = tf.tpu.experimental.embedding

BATCH = 8  # Of each chip.

TABLES = {
    # Two that are stacked, of different combiners.
    "cats": ("SGD", {}, 50, 5, "mean"),
    "dogs": ("SGD", {}, 21, 5, "sum"),
    "eels": ("Adagrad", {"initial_accumulator_value": 0.2}, 30, 8, "sqrtn"),
    "fish": (
        "AdagradMomentum",
        {"momentum": 0.8, "use_nesterov": True, "beta2": 0.9, "exponent": 3.0},
        40,
        3,
        "mean",
    ),
    "gnus": (
        "Adam",
        {"beta_1": 0.8, "beta_2": 0.9, "sum_inside_sqrt": False},
        64,
        9,
        "sum",
    ),
    "hens": (
        "FTRL",
        {
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "beta": 0.1,
        },
        33,
        8,
        "mean",
    ),
}

#: Feature -> table, kind of ids, whether they have weights.
FEATURES = {
    "cat_dense": ("cats", "dense", True),
    "cat_ragged": ("cats", "ragged", True),
    "dog_sparse": ("dogs", "sparse", True),
    "eel_ragged": ("eels", "ragged", False),
    "fish_sparse": ("fish", "sparse", False),
    "gnu_ragged": ("gnus", "ragged", True),
    "hen_dense": ("hens", "dense", False),
}

#: Of two stacked tables and one with slots: for what does not depend on rules
#: and kinds of ids, as tracing all features is what most tests' time goes to.
FEW = ("cat_ragged", "dog_sparse", "eel_ragged")


@dataclasses.dataclass
class Batch:
    """One chip's ids, weights and constant parts of the gradients."""

    ids: dict
    weights: dict
    slopes: dict

    def to_tf(self):
        return tuple(
            {name: to_tf(value) for name, value in part.items()}
            for part in (self.ids, self.weights, self.slopes)
        )


def make_batch(rng, features=tuple(FEATURES)):
    ids, weights, slopes = {}, {}, {}
    for name in features:
        table, kind, weighted = FEATURES[name]
        _, _, vocabulary, dim, _ = TABLES[table]
        lengths = rng.integers(0, 4, BATCH)
        # Few different ids, so that chips share some.
        draw = lambda size, v=vocabulary: rng.integers(0, v // 2, size) * 2  # noqa: E731
        if kind == "dense":
            ids[name] = draw(BATCH)
            weight = rng.uniform(0.5, 2, BATCH).astype(np.float32)
        elif kind == "ragged":
            ids[name] = Ragged([draw(n).tolist() for n in lengths])
            weight = Ragged(
                [rng.uniform(0.5, 2, n).tolist() for n in lengths], "float32"
            )
        else:
            keys = [(r, c) for r, n in enumerate(lengths) for c in range(n)]
            shape = (BATCH, 4)
            ids[name] = Sparse({k: int(draw(())) for k in keys}, shape)
            weight = Sparse(
                {k: float(rng.uniform(0.5, 2)) for k in keys}, shape, "float32"
            )
        if weighted:
            weights[name] = weight
        slopes[name] = rng.normal(size=(BATCH, dim)).astype(np.float32)
    return Batch(ids, weights, slopes)


def rate(step):
    """The learning rate of each step; another one in each."""
    return 0.1 / (1 + step)


class Slice:
    """Tables on a slice, and their reference.

    A step's gradients are half the activations plus constants, so that those of
    stale activations differ.

    Args:
        topology: chips, and SparseCores of each.
        pipelined: whether loops overlap their steps.
        features: names in FEATURES; their tables are those there are.
        seed: of the batches.
        config: limits of the SparseCores.
    """

    def __init__(
        self, topology, pipelined, features=tuple(FEATURES), seed=0, config=None
    ):
        self.strategy = EmulatedTPUStrategy(topology)
        self.pipelined = pipelined
        self.features = features
        used = {FEATURES[name][0] for name in features}
        self.tables = {k: v for k, v in TABLES.items() if k in used}
        self.rng = np.random.default_rng(seed)
        with self.strategy.scope():
            self.steps = tf.Variable(0, dtype=tf.int64)
            self.embedding = self._make_embedding(config)
            self.embedding.build()
        self.reference = Reference(
            {name: Feature(FEATURES[name][0]) for name in features},
            {
                name: Table(self.table(name), combiner, rule, settings, rate)
                for name, (rule, settings, *_, combiner) in self.tables.items()
            },
            by_sample=True,
        )

    def _make_embedding(self, config):
        def learning_rate():
            return 0.1 / (1.0 + tf.cast(self.steps.read_value(), tf.float32))

        optimizers, tables = {}, {}
        for name, table in self.tables.items():
            rule, settings, rows, dim, combiner = table
            if rule not in optimizers:
                optimizers[rule] = getattr(tpu, rule)(learning_rate, **settings)
            tables[name] = tpu.TableConfig(
                rows,
                dim,
                tf.random_normal_initializer(),
                optimizers[rule],
                combiner,
                name,
            )
        features = {
            name: tpu.FeatureConfig(
                tables[FEATURES[name][0]], output_shape=[BATCH]
            )
            for name in self.features
        }
        return tpu.TPUEmbeddingV2(features, None, self.pipelined, config)

    def table(self, name, slot="parameters"):
        """A table as its user sees it, from all chips' shards."""
        layout = self.embedding.embedding_layouts[name]
        variable = self.embedding.variables[layout.stacked_table_name][slot]
        shards = layout.num_sparse_cores
        rows = np.concatenate([v.numpy() for v in variable.values])
        rows = rows.reshape(shards, -1, rows.shape[-1])
        vocabulary, dim = layout.unsharded_shape
        ids = np.arange(vocabulary)
        shard = (ids + layout.sparse_core_shard_rotation) % shards
        row = layout.sparse_core_shard_row_offset + ids // shards
        return rows[shard, row, :dim]

    def batches(self, steps):
        """Each step's batch of each chip."""
        chips = self.strategy.num_replicas_in_sync
        return [
            [make_batch(self.rng, self.features) for _ in range(chips)]
            for _ in range(steps)
        ]

    def dataset(self, batches):
        """An iterator over steps, as training loops have it."""
        flat = [chip.to_tf() for step in batches for chip in step]
        spec = tf.nest.map_structure(_spec, flat[0], expand_composites=False)

        def dataset_fn(_):
            return tf.data.Dataset.from_generator(
                lambda: iter(flat), output_signature=spec
            )

        return iter(
            self.strategy.distribute_datasets_from_function(
                dataset_fn,
                tf.distribute.InputOptions(experimental_fetch_to_device=False),
            )
        )

    def replica_step(self, ids, weights, slopes):
        weights = {name: weights.get(name) for name in self.features}
        activations, residuals = self.embedding(ids, weights)
        gradients = {k: 0.5 * v + slopes[k] for k, v in activations.items()}
        self.embedding.apply_gradients(gradients, residuals)
        return activations

    def step(self, batch):
        outputs = self.strategy.run(self.replica_step, batch)
        self.steps.assign_add(1)
        return outputs

    def reference_loop(self, batches):
        """The steps of one loop; returns the last one's activations by chip."""
        held_back = None
        for batch in batches:
            activations, sums = self._reference_step(batch)
            if held_back:
                self.reference.update(held_back)
            held_back = sums
            if not self.pipelined:
                self.reference.update(held_back)
                held_back = None
        if held_back:
            self.reference.update(held_back)
        return activations

    def _reference_step(self, chips):
        activations, total = [], {name: {} for name in self.tables}
        for chip in chips:
            weights = {name: chip.weights.get(name) for name in self.features}
            outputs = self.reference.lookup(chip.ids, weights)
            gradients = {
                k: 0.5 * v + chip.slopes[k] for k, v in outputs.items()
            }
            sums = self.reference.row_gradients(chip.ids, weights, gradients)
            for name, rows in sums.items():
                for row, gradient in rows.items():
                    total[name][row] = total[name].get(row, 0) + gradient
            activations.append(outputs)
        return activations, total

    def check(self):
        """The tables and slots are those of the reference."""
        for name, table in self.reference.tables.items():
            for slot, expected in {
                "parameters": table.rows,
                **table.slots,
            }.items():
                np.testing.assert_allclose(
                    self.table(name, slot),
                    expected,
                    rtol=1e-4,
                    atol=2e-6,
                    err_msg=f"{name}/{slot}",
                )

    def check_activations(self, outputs, expected):
        for chip, activations in enumerate(expected):
            for name, value in activations.items():
                got = self.strategy.experimental_local_results(outputs[name])
                np.testing.assert_allclose(
                    got[chip], value, rtol=1e-4, atol=2e-6, err_msg=name
                )


def _spec(value):
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([BATCH, None], value.dtype, 1, tf.int64)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(value.shape, value.dtype)
    return tf.TensorSpec(value.shape, value.dtype)
