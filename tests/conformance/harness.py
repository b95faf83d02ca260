"""Layers beside the numpy reference: build both, train both, compare.

All of it works on one device and under a strategy, where each step has a batch
for each replica.
"""

import contextlib
import itertools
import tempfile

import numpy as np
import tensorflow as tf

from conformance.descriptors import (
    BATCH,
    ENGINES,
    OPTIMIZERS,
    OPTIONS,
    dense_shapes,
    fresh,
    large_and_small,
)
from keras_under_test import layers
from reference import Feature, Ragged, Reference, Sparse, to_tf
from strategies.replicas import add, distribute, local
from tfrs_embed import FeatureConfig
from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs.placement import ShardingType
from tfrs_embed.distribution import replicas
from training_helpers import differentiate

tpu = tf.tpu.experimental.embedding


#: Tables' files, which stay mapped when it is removed, at the process's end.
FOLDER = tempfile.TemporaryDirectory()


@contextlib.contextmanager
def replicas_on_host(number):
    """The strategy's hosts have so many replicas for layers that are built."""
    shared = replicas.get_replicas(tf.distribute.get_strategy())
    before, shared.on_host = shared.on_host, number
    yield
    shared.on_host = before


# Layers and their references.


def build(engine, tables=None, per_table=False, **options):
    """A layer and its reference: a feature `<table>_<kind>` for each kind.

    Args:
        engine: a name in ENGINES.
        tables: TableCases by name; None: `large_and_small()`.
        per_table: whether each table names its optimizer, or the layer has the
            one that all tables share.
        **options: further arguments of the layer.
    """
    layer_class = ENGINES[engine].layer
    options = {**ENGINES[engine].options, **options}
    tables = tables or large_and_small()
    optimizers = {
        name: case.optimizer and fresh(OPTIMIZERS[case.optimizer].optimizer)
        for name, case in tables.items()
    }
    shared = None
    if not per_table:
        # As equal objects may not be hashable.
        [shared] = {case.optimizer for case in tables.values()}
    features, described = {}, {}
    storage = ENGINES[engine].storage
    if storage is not None:
        storage = storage(tempfile.mkdtemp(dir=FOLDER.name))
    places = itertools.cycle(ENGINES[engine].places or ["auto"])
    hot_rows = itertools.cycle(ENGINES[engine].hot or [0])
    for (table, case), place, hot in zip(
        tables.items(), places, hot_rows, strict=False
    ):
        own = optimizers[table] if per_table else None
        config = case.config(
            table,
            own,
            ENGINES[engine].keys,
            place,
            hot,
            storage,
        )
        for kind in case.kinds:
            name, shape = f"{table}_{kind}", OPTIONS[kind]
            if layer_class is layers.DistributedEmbedding:
                if kind == "scalar":
                    continue  # It has no batch.
                if kind == "matrix":
                    shape = {"output_shape": (BATCH,)}
            features[name] = _feature(name, config, OPTIONS[kind])
            described[name] = Feature(table, **shape)
    layer = layer_class(
        features,
        optimizer=shared and fresh(OPTIMIZERS[shared].optimizer),
        **options,
    )
    group = ENGINES[engine].group
    if group > 1:
        with replicas_on_host(group):
            layer.build(None)  # Which makes the exchange.
    if is_tpu(tf.distribute.get_strategy()):
        # A TPU's tables are made by the first call.
        rng = np.random.default_rng(0)
        layer({n: to_tf(make_ids(rng, kind_of(n), 1)) for n in features})
    if ENGINES[engine].keys is not None:
        layer.build(None)
        for name, case in tables.items():
            layer.tables[name].give_rows(range(case.rows))
    rows = {n: table.numpy() for n, table in layer.embedding_tables.items()}
    places, keras = places_of(layer), ShardingType.KERAS.value
    reference = Reference(
        described,
        {
            name: case.reference(rows[name], trained=places[name] != keras)
            for name, case in tables.items()
        },
        options.get("invalid_ids", "error"),
        layer_class is layers.DistributedEmbedding,
    )
    # These places refuse weights of ids that aren't combined.
    reference.unweighted = {
        name
        for name, feature in described.items()
        if places[feature.table] in ("sparsecore", "TPU embedding core")
        and tables[feature.table].combiner != "sum"
    }
    return layer, reference


def _feature(name, table, options):
    """A feature in the class of its table, or ours if only ours has it."""
    if isinstance(table, tpu.TableConfig) and "combiner" not in options:
        return tpu.FeatureConfig(table, **options)
    options = dict(options)
    if "output_shape" in options:
        options["output_shape"] += (table.embedding_dim,)
    return FeatureConfig(name, table, **options)


def places_of(layer):
    """The place of each table."""
    return {t.table: t.engine for t in layer.placement.tables}


# Batches.


#: More than a sample has of ragged ids; the columns of sparse ones.
MOST_IDS = 6


def kind_of(feature):
    """A feature's kind of ids."""
    return feature.split("_", 1)[1]


def make_ids(rng, kind, rows, low=0, batch=BATCH):
    """Random ids in [low, rows): duplicates and empty rows included."""

    def draw(*size):
        return rng.integers(low, rows, size)

    if kind in dense_shapes():
        dtype = np.int32 if kind == "matrix" else np.int64
        return np.asarray(draw(*dense_shapes(batch)[kind]), dtype)
    lengths = rng.integers(0, MOST_IDS, batch)
    if batch:
        lengths[rng.integers(batch)] = 0
    if kind.startswith("ragged"):
        return Ragged([draw(n).tolist() for n in lengths])
    cells = {}
    for row, length in enumerate(lengths):
        for column in rng.choice(MOST_IDS, size=length, replace=False):
            cells[row, int(column)] = int(draw())
    return Sparse(cells, (batch, MOST_IDS))


def make_weights(rng, ids):
    """Random weights for ids: some negative, some zero."""

    def draw(*size):
        # Eighths: a bag's sum of them is exact, so that one near 0 makes no
        # mean inexact.
        values = rng.integers(-4, 17, size) / 8
        return np.where(rng.random(size) < 0.1, 0.0, values)

    if isinstance(ids, np.ndarray):
        return np.asarray(draw(*ids.shape), np.float32)
    if isinstance(ids, Ragged):
        rows = [draw(len(row)).tolist() for row in ids.rows]
        return Ragged(rows, "float32")
    cells = {key: float(draw()) for key in ids.cells}
    return Sparse(cells, ids.shape, "float32")


def make_step(rng, reference, weighted, batch=BATCH):
    """Random ids, weights and gradients of the activations, by feature.

    Some ids are outside of their tables where the reference takes these.
    """
    low, beyond = (-3, 4) if reference.invalid_ids == "zero" else (0, 0)
    ids, weights, gradients = {}, {}, {}
    for name, feature in reference.features.items():
        rows = len(reference.tables[feature.table].rows) + beyond
        ids[name] = make_ids(rng, kind_of(name), rows, low, batch)
        weights[name] = None
        if weighted and (
            name not in reference.unweighted
            or reference.is_combined(feature, ids[name])
        ):
            weights[name] = make_weights(rng, ids[name])
    for name, output in reference.lookup(ids, weights).items():
        gradients[name] = rng.normal(size=output.shape).astype(np.float32)
    return ids, weights, gradients


def make_steps(rng, reference, weighted, strategy, sizes=(BATCH,)):
    """A step's ids, weights and gradients for each replica.

    Args:
        rng, reference, weighted: as those of `make_step`.
        strategy: the layer's.
        sizes: of replicas' batches, in turns.
    """
    return [
        make_step(rng, reference, weighted, sizes[i % len(sizes)])
        for i in range(strategy.num_replicas_in_sync)
    ]


def tensors(values):
    return {k: to_tf(v) for k, v in values.items()}


# Training.


def is_ragged(value):
    return isinstance(value, tf.RaggedTensor)


def product(output, gradient):
    """The sum of an output times its gradient, which is padded if ragged."""
    if not is_ragged(output):
        return tf.reduce_sum(output * gradient)
    gradient = tf.RaggedTensor.from_tensor(gradient, output.row_lengths())
    return tf.reduce_sum(output.values * gradient.values)


def padded(gradients):
    """Gradients of ragged outputs with one length in all steps.

    Another one in each step would have a function traced again.
    """
    return {
        name: np.pad(each, [(0, 0), (0, MOST_IDS - each.shape[1]), (0, 0)])
        if name.endswith("_uncombined")
        else each
        for name, each in gradients.items()
    }


def trainer(strategy, layer, training=True, mode="function", of_weights=False):
    """A function that trains once, on all replicas' batches.

    It returns the activations of this process's replicas, by replica. With
    `of_weights` weights are watched, and their gradients are returned too.

    Args:
        strategy: the layer's.
        layer: what maps ids and weights to activations, by feature.
        training: whether to train, or only to look up. None: to train, without
            saying so to the layer.
        mode: "eager" or "function"; under a strategy "function".
    """

    def replica_step(ids, weights, gradients):
        values = {}
        if of_weights:
            values = {
                name: each if isinstance(each, tf.Tensor) else each.values
                for name, each in weights.items()
            }
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = layer(ids, weights=weights, training=training)
            products = [product(outputs[k], gradients[k]) for k in outputs]
            loss = tf.add_n(products)
        trained = layer.trainable_variables if training is not False else []
        found = differentiate(tape, loss, trained, values.values())
        return {
            name: each.to_tensor() if is_ragged(each) else each
            for name, each in outputs.items()
        } | {
            f"{name}'s weights": gradient
            for name, gradient in zip(values, found, strict=False)
        }

    if strategy is tf.distribute.get_strategy():  # TensorFlow's default.
        run = replica_step
        if mode != "eager":
            run = tf.function(replica_step, reduce_retracing=True)

        def step_alone(batches):
            [(ids, weights, gradients)] = batches
            given = tensors(ids), tensors(weights), padded(gradients)
            return {0: run(*given)}

        return step_alone

    assert mode == "function"
    on_all = tf.function(
        lambda *args: strategy.run(replica_step, args), reduce_retracing=True
    )

    def step(batches):
        ids, weights, gradients = (
            [batch[i] for batch in batches] for i in range(3)
        )
        gradients = [padded(each) for each in gradients]
        given = [distribute(strategy, values) for values in (ids, gradients)]
        names = [
            name for name, values in weights[0].items() if values is not None
        ]
        present = [{k: each[k] for k in names} for each in weights]
        spread = dict.fromkeys(weights[0])
        spread |= distribute(strategy, present) if names else {}
        return local(strategy, on_all(given[0], spread, given[1]))

    return step


def check_step(step, reference, batches, **tolerance):
    """Trains once, checks the outputs, returns the gradients by row."""
    for replica, outputs in step(batches).items():
        ids, weights, _ = batches[replica]
        assert_outputs(outputs, reference.lookup(ids, weights), **tolerance)
    return add([reference.row_gradients(*batch) for batch in batches])


def train(
    step,
    reference,
    strategy,
    steps,
    seed=1,
    weighted=True,
    change=None,
    sizes=(BATCH,),
    **tolerance,
):
    """Trains a layer and its reference side by side; returns the last batches.

    `change(i, batches)` changes the random batches of step i, whose replicas
    have batches of `sizes` in turns.
    """
    rng = np.random.default_rng(seed)
    for i in range(steps):
        # Of other replicas in each step.
        turned = [sizes[(i + k) % len(sizes)] for k in range(len(sizes))]
        batches = make_steps(rng, reference, weighted, strategy, turned)
        if change:
            change(i, batches)
        reference.update(check_step(step, reference, batches, **tolerance))
    return batches


# What must hold.

#: Of numbers up to 1 that are rounded to another one beside it.
ONE_STEP = {"bfloat16": {"rtol": 2**-7, "atol": 2**-8}}


def assert_outputs(outputs, expected, rtol=2e-5, atol=2e-6):
    assert list(outputs) == list(expected)
    for name, output in outputs.items():
        np.testing.assert_allclose(
            output, expected[name], rtol=rtol, atol=atol, err_msg=name
        )


def assert_tables(layer, reference):
    tables = layer.embedding_tables
    for name, table in reference.tables.items():
        rows = np.asarray(tf.cast(tables[name], tf.float64))
        tolerance = {"rtol": 2e-4, "atol": 2e-5}
        if table.dtype != "float32":
            # Few are so near the middle of two numbers that they may be either.
            assert np.mean(rows != table.rows) < 0.01
            tolerance = ONE_STEP[table.dtype]
        np.testing.assert_allclose(rows, table.rows, **tolerance, err_msg=name)
        slots = layer.tables[name].slots
        assert sorted(slots) == sorted(table.slots)
        for slot, value in table.slots.items():
            np.testing.assert_allclose(
                slots[slot],
                value,
                rtol=2e-4,
                atol=2e-5,
                err_msg=f"{name}/{slot}",
            )
