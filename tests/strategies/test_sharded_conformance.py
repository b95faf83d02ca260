"""Sharded tables against the numpy reference, over the replicas' batches."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from helpers import (
    KINDS,
    assert_unchanged,
    differentiate,
    make_ids,
    make_weights,
    state,
)
from reference import Feature, Reference, Table
from strategies.replicas import add, distribute, local
from test_conformance import (
    BATCH,
    OPTIMIZERS,
    ROWS,
    assert_outputs,
    assert_tables,
    build,
    make_step,
)

tpu = tf.tpu.experimental.embedding


def make_steps(rng, reference, weighted, strategy):
    """A step's ids, weights and gradients for each replica."""
    return [
        make_step(rng, reference, weighted)
        for _ in range(strategy.num_replicas_in_sync)
    ]


def make_invalid_steps(rng, reference, strategy):
    """The same with weights, some of the ids being outside of their tables."""
    batches = []
    for _ in range(strategy.num_replicas_in_sync):
        ids, weights, gradients = {}, {}, {}
        for name, feature in reference.features.items():
            kind, rows = name.split("_", 1)[1], ROWS[feature.table]
            ids[name] = make_ids(rng, kind, BATCH, rows + 4, low=-3)
            weights[name] = make_weights(rng, ids[name])
        for name, output in reference.lookup(ids, weights).items():
            gradients[name] = rng.normal(size=output.shape).astype(np.float32)
        batches.append((ids, weights, gradients))
    return batches


def trainer(strategy, layer, training=True):
    """A function that trains on all replicas' batches at once."""

    def replica_step(ids, weights, gradients):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights, training=training)
            loss = tf.add_n(
                [tf.reduce_sum(outputs[k] * gradients[k]) for k in outputs]
            )
        if training:
            differentiate(tape, loss, layer.trainable_variables)
        return outputs

    run = tf.function(
        lambda *args: strategy.run(replica_step, args), reduce_retracing=True
    )

    def step(batches):
        ids, weights, gradients = (
            [batch[i] for batch in batches] for i in range(3)
        )
        given = [distribute(strategy, values) for values in (ids, gradients)]
        if weights[0][next(iter(weights[0]))] is None:
            spread = {k: None for k in weights[0]}
        else:
            spread = distribute(strategy, weights)
        return local(strategy, run(given[0], spread, given[1]))

    return step


def check_step(step, reference, batches, put_off=None):
    """Trains once, checks the outputs, returns the gradients by row."""
    outputs = step(batches)
    for replica, output in outputs.items():
        ids, weights, _ = batches[replica]
        assert_outputs(output, reference.lookup(ids, weights))
    return add([reference.row_gradients(*batch) for batch in batches])


# Tracing a feature takes longer than all else here: three kinds stand for all,
# except where the kinds are what is tested.
FEW = ("dense", "ragged", "sparse_sequence")


def build_with_all_optimizers():
    """A layer with a table for each optimizer, and its reference."""
    features, reference, tables, rules = {}, {}, {}, {}
    for i, (optimizer, rule, settings) in enumerate(OPTIMIZERS.values()):
        name, combiner = f"t{i}", ("sum", "mean", "sqrtn")[i % 3]
        # Two widths, so that tables with other optimizers travel together.
        tables[name] = tpu.TableConfig(
            20 + i,
            (3, 5)[i % 2],
            tf.random_normal_initializer(seed=i),
            optimizer,
            combiner,
            name,
        )
        rules[name] = (combiner, rule, settings)
        for kind in ("dense", "ragged"):
            features[f"{name}_{kind}"] = tpu.FeatureConfig(tables[name])
            reference[f"{name}_{kind}"] = Feature(name)
    layer = tfrs_embed.PartialTPUEmbedding(features, None, size_threshold=0)
    values = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    return layer, Reference(
        reference,
        {
            name: Table(values[name], *rule, rate=lambda step: 0.3)
            for name, rule in rules.items()
        },
    )


def test_training_with_every_optimizer(strategy):
    with strategy.scope():
        layer, reference = build_with_all_optimizers()
    rng = np.random.default_rng(1)
    step = trainer(strategy, layer)
    for _ in range(3):
        batches = make_steps(rng, reference, True, strategy)
        reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)
    assert layer.tpu_embedding.step.numpy() == 3


def test_every_kind_of_ids(strategy):
    with strategy.scope():
        layer, reference = build(
            "mean", *OPTIMIZERS["adagrad"], size_threshold=0
        )
    rng = np.random.default_rng(5)
    step = trainer(strategy, layer)
    for _ in range(2):
        batches = make_steps(rng, reference, True, strategy)
        reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)


@pytest.mark.parametrize("threshold", [None, 20], ids=str)
def test_small_tables_look_up_the_same(strategy, threshold):
    with strategy.scope():
        layer, reference = build(
            "mean", "sgd", kinds=FEW, size_threshold=threshold
        )
    rng = np.random.default_rng(0)
    step = trainer(strategy, layer, training=False)
    batches = make_steps(rng, reference, True, strategy)
    check_step(step, reference, batches)
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines["y"] == "Keras"
    assert engines["x"] == ("Keras" if threshold is None else "sharded")


def test_pipelined_training(strategy):
    optimizer, rule, settings = OPTIMIZERS["adam"]
    with strategy.scope():
        layer, reference = build(
            "mean",
            optimizer,
            rule,
            settings,
            FEW,
            size_threshold=0,
            pipeline_execution_with_tensor_core=True,
        )
    rng = np.random.default_rng(2)
    step = trainer(strategy, layer)
    put_off = None
    for _ in range(4):
        batches = make_steps(rng, reference, True, strategy)
        sums = check_step(step, reference, batches)
        if put_off is not None:
            reference.update(put_off)
        put_off = sums
    reference.update(put_off)
    # Evaluating applies what is pending, before it looks up.
    check_step(trainer(strategy, layer, training=False), reference, batches)
    assert_tables(layer, reference)


def test_pipelined_updates_are_applied_when_tables_are_read(strategy):
    with strategy.scope():
        layer, reference = build(
            "sum",
            *OPTIMIZERS["sgd"],
            FEW,
            size_threshold=0,
            pipeline_execution_with_tensor_core=True,
        )
    batches = make_steps(np.random.default_rng(3), reference, False, strategy)
    reference.update(check_step(trainer(strategy, layer), reference, batches))
    assert_tables(layer, reference)


def test_invalid_ids_count_as_absent(strategy):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            FEW,
            size_threshold=0,
            invalid_ids="zero",
        )
    reference.invalid_ids = "zero"
    rng = np.random.default_rng(4)
    batches = make_invalid_steps(rng, reference, strategy)
    reference.update(check_step(trainer(strategy, layer), reference, batches))
    assert_tables(layer, reference)


@pytest.mark.parametrize(
    ("threshold", "x", "y", "kinds", "pipelined"),
    [
        (0, "sharded", "sharded", FEW, False),
        (20, "sharded", "mirrored", tuple(KINDS), False),
        (20, "sharded", "mirrored", FEW, True),
        (None, "mirrored", "mirrored", FEW, False),
    ],
)
def test_distributed_embedding(strategy, threshold, x, y, kinds, pipelined):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam" if pipelined else "adagrad"],
            kinds,
            size_threshold=threshold,
            pipeline_execution_with_tensor_core=pipelined,
            make=tfrs_embed.DistributedEmbedding,
        )
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines == {"x": x, "y": y}
    rng = np.random.default_rng(5)
    step = trainer(strategy, layer)
    put_off = None
    for _ in range(3):
        batches = make_steps(rng, reference, True, strategy)
        sums = check_step(step, reference, batches)
        if put_off is not None:
            reference.update(put_off)
        if pipelined:
            put_off = sums
        else:
            reference.update(sums)
    if put_off is not None:
        reference.update(put_off)
    assert_tables(layer, reference)
    assert layer.step.numpy() == 3


def test_distributed_embedding_counts_invalid_ids_as_absent(strategy):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            FEW,
            size_threshold=20,
            invalid_ids="zero",
            make=tfrs_embed.DistributedEmbedding,
        )
    reference.invalid_ids = "zero"
    rng = np.random.default_rng(4)
    batches = make_invalid_steps(rng, reference, strategy)
    reference.update(check_step(trainer(strategy, layer), reference, batches))
    assert_tables(layer, reference)


def test_distributed_embedding_changes_nothing_with_a_bad_id(strategy):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            FEW,
            size_threshold=20,
            make=tfrs_embed.DistributedEmbedding,
        )
    step = trainer(strategy, layer)
    rng = np.random.default_rng(4)
    batches = make_steps(rng, reference, False, strategy)
    step(batches)
    before = state(layer)
    # Of the mirrored table, on one replica.
    batches[-1][0]["y_dense"][2] = ROWS["y"]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"y_dense.*: id 7 is out of range; the table has 7 rows",
    ):
        step(batches)
    assert_unchanged(layer, before)
    batches[-1][0]["y_dense"][2] = 0
    step(batches)
    assert layer.step.numpy() == 2
