"""Training loops on the device, on every emulated slice."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.distribute_utils import regroup
from tfrs_embed.testing import EmulatedTPUStrategy

from conformance.descriptors import BATCH, TABLES
from conformance.harness import assert_outputs, assert_tables, build
from nightly_flag import ALL
from process_tiers import on
from strategies.replicas import add
from training_helpers import differentiate

# Engine, whether it overlaps steps, (chips, SparseCores of each).
LOOPS = [
    # test_emulated_training.py has the steps of the other slices.
    *(("sparse", True, slice_) for slice_ in ((1, 2), (2, 4), (4, 2))),
    # TensorCores don't overlap steps.
    ("dense", False, (1, 2)),
    ("dense", False, (2, 2)),
]
if ALL:
    ALL_SLICES = [(chips, cores) for chips in (1, 2, 4) for cores in (2, 4)]
    LOOPS += [
        ("sparse", pipelined, slice_)
        for pipelined in (True, False)
        for slice_ in ALL_SLICES
        if ("sparse", pipelined, slice_) not in LOOPS
    ]


@on("tpu:2x4", tier="more", when=lambda engine: engine == "dense")
@on("tpu:4x4", tier="more", when=lambda engine: engine == "sparse")
@pytest.mark.parametrize(("engine", "pipelined", "topology"), LOOPS, ids=str)
def test_loops_on_the_device(engine, pipelined, topology):
    steps = 3
    strategy = EmulatedTPUStrategy(topology)
    with strategy.scope():
        layer, reference = build(
            engine,
            TABLES["stacked"],
            per_table=True,
            pipeline_execution_with_tensor_core=pipelined,
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
