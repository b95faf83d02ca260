"""Tables on an emulated slice against the numpy reference."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.distribute_utils import regroup

import tfrs_embed
from helpers import KINDS, assert_unchanged, differentiate, state
from reference import Feature, Reference, Table
from strategies.replicas import add
from strategies.test_sharded_conformance import (
    FEW,
    check_step,
    make_invalid_steps,
    make_steps,
    trainer,
)
from test_conformance import (
    BATCH,
    OPTIMIZERS,
    ROWS,
    assert_outputs,
    assert_tables,
    build,
    first_ids,
)
from tfrs_embed.testing import EmulatedTPUStrategy

tpu = tf.tpu.experimental.embedding
Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature

# (chips, SparseCores of each)
SLICES = [(chips, cores) for chips in (1, 2, 4) for cores in (2, 4)]

pytestmark = pytest.mark.parametrize(
    "hardware", [Hardware.V2, Hardware.UNSUPPORTED], ids=lambda h: h.name
)


# One setting of each update rule.
RULES = ("sgd", "adagrad", "adagrad_momentum", "adam_outside", "ftrl_linear")


def build_with_all_optimizers(hardware, **kwargs):
    """A layer with a table for each optimizer, and its reference.

    Two tables have one optimizer, so that SparseCores stack them.
    """
    features, reference, tables, rules = {}, {}, {}, {}
    for i, key in enumerate(("adagrad", *RULES)):
        optimizer, rule, settings = OPTIMIZERS[key]
        name, combiner = f"t{i}", ("sum", "mean", "sqrtn")[i % 3]
        tables[name] = tpu.TableConfig(
            20 + 13 * i,
            5,
            tf.random_normal_initializer(seed=i),
            optimizer,
            combiner,
            name,
        )
        rules[name] = (combiner, rule, settings)
        kind = ("dense", "ragged")[i % 2]
        features[f"{name}_{kind}"] = tpu.FeatureConfig(tables[name])
        reference[f"{name}_{kind}"] = Feature(name)
    layer = tfrs_embed.PartialTPUEmbedding(
        features, None, size_threshold=0, embedding_feature=hardware, **kwargs
    )
    layer(first_ids(features))
    values = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    return layer, Reference(
        reference,
        {
            name: Table(values[name], *rule, rate=lambda step: 0.3)
            for name, rule in rules.items()
        },
    )


def test_training_with_every_optimizer(strategy, hardware):
    with strategy.scope():
        layer, reference = build_with_all_optimizers(hardware)
    rng = np.random.default_rng(1)
    step = trainer(strategy, layer)
    for _ in range(3):
        batches = make_steps(rng, reference, True, strategy)
        reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)
    assert layer.tpu_embedding.step.numpy() == 3


def test_every_kind_of_ids(strategy, hardware):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adagrad"],
            size_threshold=0,
            embedding_feature=hardware,
            called=True,
        )
    rng = np.random.default_rng(5)
    step = trainer(strategy, layer)
    for _ in range(2):
        batches = make_steps(rng, reference, True, strategy)
        reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("topology", SLICES, ids=str)
def test_loops_on_the_device(topology, hardware, pipelined):
    if pipelined and hardware is not Hardware.V2:
        pytest.skip("Only SparseCores overlap steps.")
    steps = 3
    strategy = EmulatedTPUStrategy(topology)
    with strategy.scope():
        layer, reference = build_with_all_optimizers(
            hardware, pipeline_execution_with_tensor_core=pipelined
        )
    names = [n for n in reference.features if n.endswith("dense")]
    others = [n for n in reference.features if n not in names]
    rng = np.random.default_rng(2)
    replicas = strategy.num_replicas_in_sync

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    ids, gradients = {}, {}
    for name, feature in reference.features.items():
        table = reference.tables[feature.table]
        shape = (steps, replicas, BATCH)
        ids[name] = rng.integers(0, len(table.rows), shape)
        gradients[name] = draw(*shape, table.rows.shape[1])

    def inputs_of(i, r):
        # Not in the replica: a TPU's host can't take ids from its program.
        inputs = {n: tf.constant(ids[n])[i, r] for n in ids}
        for n in others:
            one_each = tf.range(BATCH + 1, dtype=tf.int64)
            inputs[n] = tf.RaggedTensor.from_row_splits(inputs[n], one_each)
        return inputs

    def replica_step(i, inputs):
        r = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            outputs = layer(inputs, training=True)
            loss = tf.add_n(
                [
                    tf.reduce_sum(outputs[n] * tf.constant(gradients[n])[i, r])
                    for n in outputs
                ]
            )
        differentiate(tape, loss, layer.trainable_variables)
        return outputs

    def write(array, i, value):
        for r, mine in enumerate(strategy.experimental_local_results(value)):
            array = array.write(i * replicas + r, mine)
        return array

    @tf.function
    def loop():
        found = {
            n: tf.TensorArray(tf.float32, steps * replicas)
            for n in reference.features
        }
        for i in tf.range(steps):
            inputs = regroup([inputs_of(i, r) for r in range(replicas)])
            outputs = strategy.run(replica_step, (i, inputs))
            found = {n: write(found[n], i, outputs[n]) for n in found}
        return {n: array.stack() for n, array in found.items()}

    for _ in range(2):  # What a loop has left is applied at its end.
        found = loop()
        put_off = None
        for i in range(steps):
            sums = []
            for r in range(replicas):
                mine = {n: ids[n][i, r] for n in ids}
                given = {n: gradients[n][i, r] for n in ids}
                expected = reference.lookup(mine, dict.fromkeys(ids))
                outputs = {n: found[n][i * replicas + r] for n in ids}
                assert_outputs(outputs, expected)
                sums.append(
                    reference.row_gradients(mine, dict.fromkeys(ids), given)
                )
            if put_off is not None:
                reference.update(put_off)
            put_off = add(sums)
            if not pipelined:
                reference.update(put_off)
                put_off = None
        if put_off is not None:
            reference.update(put_off)
        assert_tables(layer, reference)


def test_small_tables_look_up_the_same(strategy, hardware):
    threshold = 20 if hardware is Hardware.V2 else None
    with strategy.scope():
        layer, reference = build(
            "mean",
            "sgd",
            size_threshold=threshold,
            embedding_feature=hardware,
            called=True,
        )
    rng = np.random.default_rng(0)
    step = trainer(strategy, layer, training=False)
    batches = make_steps(rng, reference, True, strategy)
    check_step(step, reference, batches)
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines["y"] == "Keras"
    if threshold is not None:
        on_tpu = {Hardware.V2: "SparseCore"}.get(hardware, "replicated on TPU")
        assert engines["x"] == on_tpu


def test_invalid_ids_count_as_absent(strategy, hardware):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            FEW,
            size_threshold=0,
            invalid_ids="zero",
            embedding_feature=hardware,
            called=True,
        )
    reference.invalid_ids = "zero"
    rng = np.random.default_rng(4)
    batches = make_invalid_steps(rng, reference, strategy)
    reference.update(check_step(trainer(strategy, layer), reference, batches))
    assert_tables(layer, reference)


def test_invalid_id_changes_nothing(strategy, hardware):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            ("dense",),
            size_threshold=0,
            embedding_feature=hardware,
            called=True,
        )
    step = trainer(strategy, layer)
    rng = np.random.default_rng(4)
    batches = make_steps(rng, reference, False, strategy)
    step(batches)
    before = state(layer)
    batches[-1][0]["x_dense"][2] = ROWS["x"]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"x_dense.*: id 50 is out of range; the table has 50 rows",
    ):
        step(batches)
    assert_unchanged(layer, before)


def test_distributed_embedding(strategy, hardware):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adagrad"],
            tuple(KINDS) if hardware is Hardware.V2 else FEW,
            size_threshold=20,
            embedding_feature=hardware,
            called=True,
            make=tfrs_embed.DistributedEmbedding,
        )
    small = "replicated on TPU"
    large = {Hardware.V2: "SparseCore"}.get(hardware, small)
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines == {"x": large, "y": small}
    rng = np.random.default_rng(5)
    step = trainer(strategy, layer)
    for _ in range(2):
        batches = make_steps(rng, reference, True, strategy)
        reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)
    assert layer.step.numpy() == 2


def test_distributed_embedding_changes_nothing_with_a_bad_id(
    strategy, hardware
):
    with strategy.scope():
        layer, reference = build(
            "mean",
            *OPTIMIZERS["adam"],
            ("dense",),
            size_threshold=20,
            embedding_feature=hardware,
            called=True,
            make=tfrs_embed.DistributedEmbedding,
        )
    step = trainer(strategy, layer)
    rng = np.random.default_rng(4)
    batches = make_steps(rng, reference, False, strategy)
    step(batches)
    before = state(layer)
    batches[-1][0]["y_dense"][2] = ROWS["y"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"id 7 is out of"):
        step(batches)
    assert_unchanged(layer, before)
