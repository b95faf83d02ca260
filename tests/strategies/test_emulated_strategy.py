"""What an EmulatedTPUStrategy is, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_replication
from tensorflow.python.tpu.ops import gen_xla_ops
from tf_keras.src import backend
from tfrs_embed.testing import EmulatedTPUStrategy

from process_tiers import on
from small_tpu_programs import BATCH, STEPS, traced
from strategies.slices import FEATURES, Slice, make_batch, tpu
from training_helpers import sparse_core_config

pytestmark = on("tpu:4x4", tier="more")


@pytest.mark.parametrize("name", ["v5p-8", "v5p:2x2x1"])
def test_it_is_a_tpu_strategy_of_the_slice(name):
    strategy = EmulatedTPUStrategy(name)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert backend.is_tpu_strategy(strategy)
    assert strategy.num_replicas_in_sync == 4
    hardware = strategy.extended.tpu_hardware_feature
    assert hardware.embedding_feature == hardware.EmbeddingFeature.V2
    assert hardware.num_embedding_devices_per_chip == 4
    assert strategy.extended._tpu_devices.shape == (4, 1)
    assert strategy.cluster_resolver is None


def test_it_reduces_and_gathers():
    strategy = EmulatedTPUStrategy((2, 2))

    @tf.function
    def replica_ids():
        return strategy.run(
            lambda: tf.reshape(
                tf.distribute.get_replica_context().replica_id_in_sync_group,
                [1],
            )
        )

    ids = replica_ids()
    assert strategy.reduce("SUM", ids, axis=None).numpy() == [1]
    np.testing.assert_array_equal(strategy.gather(ids, 0), [0, 1])
    assert len(strategy.experimental_local_results(ids)) == 2


def test_more_chips_than_logical_cpus_are_refused():
    with pytest.raises(RuntimeError, match=r"8 chips.*4 logical CPUs"):
        EmulatedTPUStrategy((8, 2))


def test_a_function_must_be_traced():
    strategy = EmulatedTPUStrategy((2, 2))
    with pytest.raises(NotImplementedError, match="pure eager"):
        strategy.run(lambda: None)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_refused_as_on_tpus(name, soft_placement):
    step = STEPS[name]
    function = traced(EmulatedTPUStrategy((2, 2)), step)
    if step.error is not None:
        with pytest.raises(TypeError, match=step.error):
            function(BATCH)
    elif step.on_host is not None and not soft_placement:
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=f"No TPU has a kernel for.* {step.on_host} ",
        ):
            function(BATCH)
    else:
        function(BATCH)


def test_outside_compilation_is_the_hosts():
    tf.config.set_soft_device_placement(False)

    @tf.function
    def function(x):
        def step(x):
            text = tpu_replication.outside_compilation(tf.strings.as_string, x)
            length = tpu_replication.outside_compilation(
                tf.strings.length, text
            )
            return x, length

        return strategy.run(step, (x,))

    strategy = EmulatedTPUStrategy((2, 2))
    try:
        # No TPU has a kernel for these operations: `STEPS` shows it.
        x, lengths = map(strategy.experimental_local_results, function(BATCH))
        for given, found in zip(x, lengths, strict=True):
            texts = tf.strings.as_string(given).numpy()
            np.testing.assert_array_equal(found, np.vectorize(len)(texts))
    finally:
        tf.config.set_soft_device_placement(True)


def test_ragged_features_stay_on_the_host():
    strategy = EmulatedTPUStrategy((2, 2))
    dataset = tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]]))
    with pytest.raises(ValueError, match="experimental_fetch_to_device"):
        strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ValueError, match="experimental_fetch_to_device"):
        strategy.distribute_datasets_from_function(lambda _: dataset)


def test_too_many_ids_are_an_error_of_the_kernel():
    config = sparse_core_config(
        max_ids_per_table={"eels": 2}, max_unique_ids_per_table={"eels": 2}
    )
    s = Slice((2, 2), pipelined=False, config=config)
    before = s.table("eels")
    batches = s.batches(1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"Sparse core \d gets \d+ ids while the max ids per sparse core "
        "is set to be 2 for table eels",
    ):
        tf.function(s.step)(next(s.dataset(batches)))
    np.testing.assert_array_equal(s.table("eels"), before)


def test_too_many_ids_are_an_error_when_enqueued_eagerly():
    config = sparse_core_config(max_ids_per_table={"eels": 1})
    s = Slice((2, 2), pipelined=False, config=config)
    ids, weights, _ = make_batch(np.random.default_rng(0)).to_tf()
    weights = {name: weights.get(name) for name in FEATURES}
    with pytest.raises(tf.errors.InvalidArgumentError, match="for table eels"):
        s.embedding.enqueue(ids, weights)


@pytest.mark.parametrize("kind", ["function", "branch"])
def test_lookups_deeper_than_a_replica_function_are_refused(kind):
    s = Slice((2, 2), pipelined=False)

    def replica_fn(ids, weights, slopes):
        del slopes
        weights = {name: weights.get(name) for name in FEATURES}
        lookup = lambda: s.embedding(ids, weights)[0]  # noqa: E731
        if kind == "function":
            return tf.function(lookup)()
        return tf.cond(tf.constant(True), lookup, lookup)

    @tf.function
    def step(batch):
        return s.strategy.run(replica_fn, batch)

    with pytest.raises(
        RuntimeError, match=r"function that\s+strategy.run runs"
    ):
        step(next(s.dataset(s.batches(1))))


def test_the_limits_that_ids_need_are_counted():
    s = Slice((2, 2), pipelined=False)
    feature = tpu.FeatureConfig(
        tpu.TableConfig(100, 8, name="t", combiner="sum"), output_shape=[4]
    )
    with s.strategy.scope():
        ids, unique = tpu.TPUEmbeddingV2.compute_sparse_core_stats(
            {"f": tf.constant([4, 4, 8, 1])}, {"f": feature}, 2, 2, tpu.SGD()
        )
    assert (int(ids["t"]), int(unique["t"])) == (2, 1)


def test_shards_are_read_and_assigned():
    s = Slice((2, 2), pipelined=False)
    [*devices] = s.strategy.extended.worker_devices
    shards = s.embedding.embedding_table_shards["eels"]
    assert [device for device, _ in shards] == devices
    table = s.embedding.embedding_tables["eels"]
    for (_, shard), variable in zip(shards, table.values, strict=True):
        np.testing.assert_array_equal(shard, variable)
    table.assign(tf.ones_like(shards[0][1]))
    assert s.table("eels").min() == 1


def test_tensorflow_is_as_it_was_elsewhere():
    EmulatedTPUStrategy((2, 2))
    with pytest.raises((tf.errors.OpError, NotImplementedError)):
        gen_xla_ops.tpu_copy_with_dynamic_shape([tf.zeros([8])], [8])
    with pytest.raises(RuntimeError, match="created under TPUStrategy"):
        tpu.TPUEmbeddingV2(
            tpu.FeatureConfig(tpu.TableConfig(8, 8), output_shape=[8]),
            tpu.SGD(),
        )


def test_lookups_are_quantized_before_they_are_combined():
    strategy = EmulatedTPUStrategy((2, 2))
    table = tpu.TableConfig(
        8,
        8,
        tf.constant_initializer(0.37),
        combiner="sum",
        quantization_config=tpu.QuantizationConfig(5, 0.0, 1.0),
    )
    with strategy.scope():
        embedding = tpu.TPUEmbeddingV2(
            tpu.FeatureConfig(table, output_shape=[2]), tpu.SGD()
        )
        embedding.build()

    @tf.function
    def lookup():
        ids = tf.ragged.constant([[1, 2, 3], [4]], row_splits_dtype=tf.int64)
        return strategy.run(lambda: embedding(ids)[0])

    for vectors in strategy.experimental_local_results(lookup()):
        np.testing.assert_allclose(vectors[:, 0], [0.75, 0.25])


def test_a_checkpoint_of_the_same_slice_is_exact(tmp_path):
    s = Slice((2, 2), pipelined=True)

    @tf.function
    def loop(iterator):
        for _ in tf.range(2):
            s.step(next(iterator))

    loop(s.dataset(s.batches(2)))
    parts = {"embedding": s.embedding, "steps": s.steps}
    path = tf.train.Checkpoint(**parts).save(str(tmp_path / "saved"))
    saved = tables(s)
    batches = s.batches(2)
    loop(s.dataset(batches))
    expected = tables(s)
    assert any((saved[k] != expected[k]).any() for k in saved)
    other = Slice((2, 2), pipelined=True, seed=1)
    parts = {"embedding": other.embedding, "steps": other.steps}
    tf.train.Checkpoint(**parts).restore(path).assert_consumed()
    assert_same(tables(other), saved)

    @tf.function
    def other_loop(iterator):
        for _ in tf.range(2):
            other.step(next(iterator))

    other_loop(other.dataset(batches))
    assert_same(tables(other), expected)


def tables(s):
    return {
        (name, slot): s.table(name, slot)
        for name, table in s.reference.tables.items()
        for slot in ("parameters", *table.slots)
    }


def assert_same(got, expected):
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, str(key))
