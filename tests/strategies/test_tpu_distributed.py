"""DistributedEmbedding's own settings on an emulated slice."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from process_tiers import on
from reference import to_tf
from strategies.replicas import distribute
from tfrs_embed import DistributedEmbedding, FeatureConfig, TableConfig
from training_helpers import differentiate, sparse_core_config

pytestmark = on("tpu:2x2", tier="more")

tpu = tf.tpu.experimental.embedding
BATCH, WIDTH = 4, 3  # A replica's.


def make_layer(strategy, tables, **options):
    """A layer with a feature per table, for global batches."""
    batch = BATCH * strategy.num_replicas_in_sync
    with strategy.scope():
        return DistributedEmbedding(
            {
                t.name: FeatureConfig(
                    t.name, t, (batch, WIDTH), (batch, t.embedding_dim)
                )
                for t in tables
            },
            size_threshold=0,
            **options,
        )


def make_tables(names="abcd", **options):
    return [
        TableConfig(name, 50 + i, 5, **options) for i, name in enumerate(names)
    ]


def look_up(strategy, layer, ids):
    """Gives each replica its part of the ids, [replicas * BATCH, WIDTH]."""
    parts = np.split(ids, strategy.num_replicas_in_sync)
    inputs = distribute(
        strategy,
        [dict.fromkeys(layer.get_embedding_tables(), p) for p in parts],
    )
    return tf.function(lambda x: strategy.run(layer, (x,)))(inputs)


def stacks(layer):
    """The names of the tables of each stack."""
    layer.build(None)
    layouts = layer._engine_layer.engine._embedding.embedding_layouts
    by_stack = {}
    for name, layout in layouts.items():
        by_stack.setdefault(layout.stacked_table_name, []).append(name)
    return sorted(sorted(names) for names in by_stack.values())


@pytest.mark.parametrize(
    ("stacking", "expected"),
    [
        ("auto", [["a", "b", "c", "d"]]),
        (None, [["a"], ["b"], ["c"], ["d"]]),
        (["a", "c"], [["a", "c"], ["b"], ["d"]]),
        ([["a", "c"], ["b", "d"]], [["a", "c"], ["b", "d"]]),
    ],
)
def test_tables_are_stacked_as_they_were_asked_to_be(
    strategy, stacking, expected
):
    layer = make_layer(strategy, make_tables(), table_stacking=stacking)
    assert stacks(layer) == expected
    ids = np.arange(BATCH * WIDTH * strategy.num_replicas_in_sync) % 50
    outputs = look_up(strategy, layer, ids.reshape(-1, WIDTH))
    tables = layer.get_embedding_tables()
    for name, output in outputs.items():
        [first, *_] = strategy.experimental_local_results(output)
        expected = tables[name].numpy()[:WIDTH].mean(0)
        np.testing.assert_allclose(first[0], expected, rtol=1e-5, atol=1e-6)


def test_a_stack_that_tensorflow_does_not_make_is_an_error(strategy):
    layer = make_layer(
        strategy,
        make_tables(),
        table_stacking=["a", "b"],
        sparse_core_embedding_config=sparse_core_config(
            disable_table_stacking=True
        ),
    )
    with pytest.raises(ValueError, match=r"table_stacking.*\['a', 'b'\]"):
        layer.build(None)


def ids_of_one_shard(strategy):
    """Ids whose rows are all on the first shard."""
    hardware = strategy.extended.tpu_hardware_feature
    shards = (
        strategy.num_replicas_in_sync * hardware.num_embedding_devices_per_chip
    )
    count = BATCH * WIDTH * strategy.num_replicas_in_sync
    return (np.arange(count) * shards % 48).reshape(-1, WIDTH)


@pytest.mark.parametrize("measured", [False, True])
def test_partition_limits_reach_tensorflow(strategy, measured):
    tables = make_tables(
        "a", max_ids_per_partition=1, max_unique_ids_per_partition=1
    )
    layer = make_layer(strategy, tables, update_stats=True)
    ids = ids_of_one_shard(strategy)
    # Measuring what is not for training changes no limit.
    layer.preprocess({"a": ids}, training=measured)
    if measured:
        look_up(strategy, layer, ids)
        return
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="max ids per sparse core is set"
    ):
        look_up(strategy, layer, ids)
    # Those of tables that are there already.
    layer.preprocess({"a": ids}, training=True)
    look_up(strategy, layer, ids)


def test_batches_are_measured_eagerly(strategy):
    layer = make_layer(strategy, make_tables("a"), update_stats=True)
    ids = tf.constant(ids_of_one_shard(strategy))

    def prepare(ids):
        return layer.preprocess({"a": ids}, training=True)

    with pytest.raises(RuntimeError, match="update_stats"):
        tf.function(prepare, autograph=False)(ids)


def test_a_schedule_advances_on_the_sparse_cores(strategy):
    schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.5, 0.0]
    )
    layer = make_layer(
        strategy, make_tables("a", optimizer=tf_keras.optimizers.SGD(schedule))
    )
    replicas = strategy.num_replicas_in_sync
    ids = np.zeros((BATCH, WIDTH), int)

    def replica_step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(inputs, training=True)["a"])
        differentiate(tape, loss, layer.trainable_variables)

    step = tf.function(lambda x: strategy.run(replica_step, (x,)))
    inputs = distribute(strategy, [{"a": to_tf(ids)}] * replicas)
    moved = []
    for _ in range(3):
        before = layer.get_embedding_tables()["a"][0, 0]
        step(inputs)
        after = layer.get_embedding_tables()["a"][0, 0]
        moved.append(float(before - after))
    samples = BATCH * replicas
    np.testing.assert_allclose(
        moved, [samples, samples / 2, 0], rtol=1e-4, atol=1e-5
    )


def test_a_step_without_the_features_of_one_engine_is_an_error(strategy):
    tables = [
        *make_tables("a"),
        TableConfig("small", 9, 5, placement="default_device"),
    ]
    layer = make_layer(strategy, tables)
    replicas = strategy.num_replicas_in_sync
    look_up(strategy, layer, np.zeros((BATCH * replicas, WIDTH), int))
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert len(set(engines.values())) == 2, engines
    ids = tf.zeros([BATCH, WIDTH], tf.int64)
    for given, absent in (("a", "small"), ("small", "a")):
        run = tf.function(
            lambda ids, given=given: strategy.run(
                lambda ids: layer({given: ids}, partial=True), (ids,)
            )
        )
        with pytest.raises(
            NotImplementedError, match=rf"no ids for \['{absent}'\]"
        ):
            run(ids)


def test_tables_are_read_and_set_whole(strategy):
    layer = make_layer(strategy, make_tables("ab"))
    values = np.arange(250.0).reshape(50, 5)
    layer.set_embedding_tables({"a": values})
    np.testing.assert_array_equal(layer.get_embedding_tables()["a"], values)


def test_larger_batches_than_declared_are_errors(strategy):
    layer = make_layer(strategy, make_tables("a"))
    replicas = strategy.num_replicas_in_sync
    ids = np.zeros(((BATCH + 1) * replicas, WIDTH), int)
    with pytest.raises(ValueError, match=r"ids of shape \[5, 3\].*\[4, 3\]"):
        look_up(strategy, layer, ids)


def test_a_batch_that_replicas_cannot_share_is_an_error(strategy):
    batch = strategy.num_replicas_in_sync + 1
    feature = FeatureConfig("f", make_tables("a")[0], (batch,), (batch, 5))
    with strategy.scope(), pytest.raises(ValueError, match="can't be divided"):
        DistributedEmbedding(feature)
