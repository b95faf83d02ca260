"""Models on an emulated slice: Keras's loops, checkpoints, and errors."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import nightly, on
from strategies.keras_models import (
    PER_REPLICA,
    as_batches,
    assert_equal_heads,
    assert_equal_tables,
    compile_model,
    make_model,
    make_samples,
    one_device,
)
from tfrs_embed import sparsecore
from tfrs_embed.compat import strategies
from tfrs_embed.optimizers import rules
from tfrs_embed.optimizers.learning_rate import LearningRate
from tfrs_embed.sparsecore import host_kernels
from training_helpers import differentiate, sparse_core_config

pytestmark = on("tpu:2x2", tier="more")

tpu = tf.tpu.experimental.embedding
Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


@pytest.fixture(scope="module")
def steps(strategy):
    """Four steps of the global batch."""
    return make_samples(4 * PER_REPLICA * strategy.num_replicas_in_sync)


@pytest.fixture(scope="module")
def alone(steps, strategy):
    """The model, and its layer, that one device trains; only to be read."""
    return one_device(steps, strategy)


def make_on_tpu(strategy, **kwargs):
    with strategy.scope():
        return make_model(batch_size=PER_REPLICA, **kwargs)


def distribute(strategy, samples):
    """Gives replica r of step s the batch number s * replicas + r."""
    batches = tf.data.Dataset.from_tensor_slices(samples).batch(
        PER_REPLICA, drop_remainder=True
    )
    return strategy.distribute_datasets_from_function(
        lambda context: batches,
        tf.distribute.InputOptions(experimental_fetch_to_device=False),
    )


@nightly(lambda steps_per_execution: steps_per_execution == 1)
@pytest.mark.parametrize(
    "hardware", [Hardware.V2, Hardware.UNSUPPORTED], ids=lambda h: h.name
)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_fit_equals_one_device(
    strategy, steps, alone, hardware, steps_per_execution
):
    model, layer = make_on_tpu(strategy, embedding_feature=hardware)
    with strategy.scope():
        compile_model(model, steps_per_execution=steps_per_execution)
    single, expected = alone
    for _ in range(2):
        model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)
    assert_equal_tables(layer, expected)
    assert_equal_heads(model, single)
    assert layer.tpu_embedding.step.numpy() == 8
    theirs = single.evaluate(as_batches(steps, PER_REPLICA), verbose=0)
    ours = model.evaluate(distribute(strategy, steps), steps=4, verbose=0)
    np.testing.assert_allclose(
        ours, theirs * strategy.num_replicas_in_sync, rtol=1e-4
    )


@pytest.mark.parametrize("hardware", [None, Hardware.UNSUPPORTED], ids=str)
def test_a_checkpoint_waits_for_the_tables(strategy, hardware, tmp_path):
    layer = make_layer(strategy, embedding_feature=hardware)
    look_up(strategy, layer, tf.range(3))
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "layer"))
    # Its tables are made when it is called.
    other = make_layer(strategy, embedding_feature=hardware)
    tf.train.Checkpoint(layer=other).restore(path).expect_partial()
    look_up(strategy, other, tf.range(3))
    np.testing.assert_array_equal(
        other.embedding_tables["x"].numpy(), layer.embedding_tables["x"].numpy()
    )


def test_weights_move_to_one_device(strategy, tmp_path):
    model, layer = make_on_tpu(strategy)
    model.save_weights(str(tmp_path / "model.weights.h5"))
    single, expected = make_model()
    single.load_weights(str(tmp_path / "model.weights.h5"))
    assert_equal_tables(layer, expected, rtol=0, atol=0)


def test_learning_rate_can_be_assigned(strategy, steps):
    model, layer = make_on_tpu(strategy)
    with strategy.scope():
        compile_model(model)
    before = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    for optimizer in layer.table_optimizers.values():
        optimizer.learning_rate = 0.0
    model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)
    for name in ("user", "item"):
        np.testing.assert_array_equal(
            layer.embedding_tables[name].numpy(), before[name]
        )
    for optimizer in layer.table_optimizers.values():
        optimizer.learning_rate = 0.1
    model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)
    assert np.any(layer.embedding_tables["user"].numpy() != before["user"])


def test_the_host_reads_a_rate_that_it_holds(strategy):
    layer = make_layer(strategy, batch_size=4)
    [optimizer] = layer.table_optimizers.values()
    handle = optimizer.rate.variable.handle
    reads = {}

    def replica_step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"f": ids})["f"])
        differentiate(tape, loss, layer.trainable_variables)
        graph = tf.compat.v1.get_default_graph()
        given = graph.capture(handle)
        for op in graph.get_operations():
            if op.type == "ReadVariableOp" and op.inputs[0] is given:
                reads[op.name] = strategies.on_tpu(op)

    tf.function(lambda ids: strategy.run(replica_step, (ids,)))(tf.range(4))
    assert reads and not any(reads.values())


def test_keras_optimizer_on_the_tpu_schedules_its_rate(strategy, steps):
    def make():
        return tf_keras.optimizers.Adam(
            tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        )

    _, expected = one_device(steps, strategy, optimizer=make())
    with strategy.scope():
        optimizer = make()
    model, layer = make_on_tpu(strategy, optimizer=optimizer)
    with strategy.scope():
        compile_model(model)
    for _ in range(2):
        model.fit(distribute(strategy, steps), steps_per_epoch=4, verbose=0)
    assert_equal_tables(layer, expected, rtol=1e-3, atol=1e-4)


# Sizes of batches.


def make_layer(strategy, feature=None, **kwargs):
    table = tfrs_embed.TableConfig("x", 50, 4)
    with strategy.scope():
        return tfrs_embed.PartialTPUEmbedding(
            {"f": feature or tfrs_embed.FeatureConfig("f", table)},
            "sgd",
            **{"size_threshold": 0, **kwargs},
        )


def look_up(strategy, layer, ids):
    run = tf.function(
        lambda ids: strategy.run(lambda i: layer({"f": i})["f"], (ids,))
    )
    return strategy.experimental_local_results(run(ids))


@pytest.mark.parametrize("hardware", [None, Hardware.UNSUPPORTED], ids=str)
def test_smaller_batches_are_padded(strategy, hardware):
    layer = make_layer(strategy, embedding_feature=hardware)
    # Any number, whatever the number of SparseCores.
    for count in (7, 5, 1):
        ids = tf.range(count)
        expected = (
            layer.embedding_tables["x"].numpy()[:count] if (count < 7) else None
        )
        for rows in look_up(strategy, layer, ids):
            assert rows.shape == (count, 4)
            if expected is not None:
                np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_larger_batches_are_errors(strategy):
    layer = make_layer(strategy)
    look_up(strategy, layer, tf.range(3))
    with pytest.raises(
        ValueError, match=r"Feature 'f'.*: 4 samples .* at most 3"
    ):
        look_up(strategy, layer, tf.range(4))


def test_batch_size_says_what_comes(strategy):
    layer = make_layer(strategy, batch_size=4)
    for count in (3, 4):
        found = look_up(strategy, layer, tf.range(count))
        expected = layer.embedding_tables["x"].numpy()[:count]
        for rows in found:
            np.testing.assert_allclose(rows, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"5 samples .* at most 4"):
        look_up(strategy, layer, tf.range(5))


def test_an_unknown_batch_is_an_error(strategy):
    layer = make_layer(strategy)
    with pytest.raises(ValueError, match=r"Feature 'f'.*samples isn't known"):
        _ = layer.embedding_tables


@pytest.mark.parametrize(
    "spec",
    [
        tf.TensorSpec([None], tf.int64),
        tf.RaggedTensorSpec([None, None], tf.int64, 1),
        tf.SparseTensorSpec([None, None], tf.int64),
    ],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("threshold", [0, None], ids=["large", "small"])
def test_a_batch_of_unknown_size_is_an_error(strategy, spec, threshold):
    layer = make_layer(strategy, batch_size=2, size_threshold=threshold)
    run = tf.function(
        lambda ids: strategy.run(lambda i: layer({"f": i})["f"], (ids,))
    )
    with pytest.raises(
        ValueError, match=r"Feature 'f'.*: the number of samples isn't known"
    ):
        run.get_concrete_function(spec)


@pytest.mark.parametrize("hardware", [None, Hardware.UNSUPPORTED], ids=str)
def test_ids_that_a_step_computes_are_an_error(strategy, hardware):
    layer = make_layer(strategy, embedding_feature=hardware)

    @tf.function
    def run(ids, weights=None):
        return strategy.run(
            lambda ids, weights: layer({"f": ids % 7}, {"f": weights})["f"],
            (ids, weights),
        )

    with pytest.raises(ValueError, match=r"'f'.*: ids: .*, by .* FloorMod"):
        run(tf.range(4))

    @tf.function
    def weigh(ids):
        weights = {"f": tf.ones([4])}
        return strategy.run(
            lambda ids, w: layer({"f": ids}, {"f": w["f"] * 2.0})["f"],
            (ids, weights),
        )

    with pytest.raises(ValueError, match=r"'f'.*: weights: .*, by .* Mul"):
        weigh(tf.range(4))


def test_ids_may_be_cast_reshaped_and_computed_before_a_step(strategy):
    layer = make_layer(strategy, batch_size=4)

    @tf.function
    def run(ids):
        ids = ids % 7

        def replica(ids):
            ids = tf.reshape(tf.cast(ids, tf.int32), [4])
            return layer({"f": ids})["f"]

        return strategy.run(replica, (ids,))

    for rows in strategy.experimental_local_results(
        run(tf.constant([[1, 2], [3, 9]]))
    ):
        expected = layer.embedding_tables["x"].numpy()[[1, 2, 3, 2]]
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


# Configurations.


def test_hardware_that_is_not_there_is_an_error(strategy):
    with pytest.raises(
        ValueError, match="embedding_feature=V1, but these TPUs have V2"
    ):
        make_layer(strategy, embedding_feature=Hardware.V1)


@pytest.mark.parametrize(
    "hardware",
    [Hardware.V2, Hardware.UNSUPPORTED],
    ids=lambda h: h.name,
)
def test_a_rule_that_tpus_dont_have_is_an_error(strategy, hardware):
    class Own(rules.SGD):
        """A formula that TensorFlow has no optimizer of."""

        tpu = None

    rate = LearningRate.convert(0.5, "Own")
    own = rules.TableOptimizer(Own(), rate, None)
    table = tfrs_embed.TableConfig("t", 8, 4, optimizer=own)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"Table 't': TPUs don't .* Own; use"),
    ):
        tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table),
            "sgd",
            size_threshold=0,
            embedding_feature=hardware,
        )


def test_the_wrong_wheel_is_an_error_that_names_the_right_one(
    strategy, monkeypatch
):
    monkeypatch.setattr(host_kernels, "has_kernels", lambda: False)
    make_layer(strategy)  # An emulated slice needs none.
    monkeypatch.delattr(strategy, "topology")
    with pytest.raises(RuntimeError, match="pip install tensorflow-tpu=="):
        make_layer(strategy)


def test_placement_on_sparse_cores(strategy):
    table = tfrs_embed.TableConfig("x", 50, 4, placement="sparsecore")
    feature = tfrs_embed.FeatureConfig("f", table)
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding({"f": feature}, "sgd")
        [placed] = layer.placement.tables
        assert placed.engine == "sparsecore"
        with pytest.raises(ValueError, match=r"'x': placement='sparsecore'"):
            tfrs_embed.PartialTPUEmbedding(
                {"f": feature}, "sgd", embedding_feature=Hardware.UNSUPPORTED
            )


def test_limits_reach_the_sparse_cores(strategy):
    table = tfrs_embed.TableConfig(
        "x", 50, 4, max_ids_per_partition=1, max_unique_ids_per_partition=1
    )
    layer = make_layer(strategy, tfrs_embed.FeatureConfig("f", table))
    hardware = strategy.extended.tpu_hardware_feature
    shards = (
        strategy.num_replicas_in_sync * hardware.num_embedding_devices_per_chip
    )
    # All samples of a SparseCore want rows of one shard.
    ids = tf.range(4 * shards) * shards % 48
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="max ids per sparse core is set"
    ):
        look_up(strategy, layer, ids)


def test_computed_limits_are_what_a_layer_needs(strategy):
    rng = np.random.default_rng(0)
    table = tfrs_embed.TableConfig("x", 50, 4, optimizer="sgd")
    other = tfrs_embed.TableConfig("y", 70, 3, optimizer="sgd")
    config = {
        "f": tfrs_embed.FeatureConfig("f", table),
        "g": tfrs_embed.FeatureConfig("g", other, max_sequence_length=2),
    }
    batches = [
        {
            "f": tf.constant(rng.integers(0, 50, 7)),
            "g": tf.ragged.constant(
                [
                    rng.integers(0, 70, n).tolist()
                    for n in rng.integers(0, 5, 7)
                ],
                dtype=tf.int64,
                ragged_rank=1,
            ),
        }
        for _ in range(5)
    ]
    limits, _ = sparsecore.compute_limits(
        batches, config, strategy.topology, progress=False
    )

    def look_up_all(limits):
        with strategy.scope():
            layer = tfrs_embed.PartialTPUEmbedding(
                config,
                None,
                size_threshold=0,
                sparse_core_embedding_config=limits,
            )
        run = tf.function(
            lambda batch: strategy.run(layer, (batch,)), reduce_retracing=True
        )
        for batch in batches:
            run(batch)

    look_up_all(limits)
    for field in ("max_ids_per_table", "max_unique_ids_per_table"):
        for stack, limit in getattr(limits, field).items():
            smaller = {**getattr(limits, field), stack: limit - 1}
            with pytest.raises(
                (ValueError, tf.errors.InvalidArgumentError),
                match=f"for table {stack}|must be an integer from 1",
            ):
                look_up_all(dataclasses.replace(limits, **{field: smaller}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"y": 8}, r"max_ids_per_table has no stack 'y'; the stacks are"),
        ({"x": 0}, r"max_ids_per_table\['x'\] must be an .* from 1 .*, got 0"),
    ],
)
def test_bad_limits_are_errors(strategy, limits, message):
    layer = make_layer(
        strategy,
        sparse_core_embedding_config=sparse_core_config(
            max_ids_per_table=limits
        ),
    )
    with pytest.raises(ValueError, match=message):
        layer({"f": tf.range(4)})


def test_training_outside_of_run_is_an_error(strategy):
    layer = make_layer(strategy)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer({"f": tf.range(4)})["f"])
    with pytest.raises(RuntimeError, match=re.escape("inside strategy.run")):
        differentiate(tape, loss, layer.trainable_variables)


def test_a_call_under_another_strategy_is_an_error(strategy):
    layer = make_layer(strategy)
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with other.scope(), pytest.raises(RuntimeError, match="was made under"):
        layer({"f": tf.range(4)})


@pytest.mark.parametrize("hardware", [None, Hardware.UNSUPPORTED], ids=str)
def test_a_step_with_a_part_of_the_features_is_an_error(strategy, hardware):
    tables = [tfrs_embed.TableConfig(name, 50, 4) for name in "xy"]
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables},
            "sgd",
            batch_size=4,
            size_threshold=0,
            embedding_feature=hardware,
        )
    layer({"x": tf.range(4), "y": tf.range(4)})
    ids = {"x": tf.range(4)}
    with pytest.raises(NotImplementedError, match="gradient_norm of tables on"):
        layer.gradient_norm()
    # Where no TPU's program looks them up, a part is as good as all.
    expected = layer.embedding_tables["x"].numpy()[:4]
    outputs = layer(ids, partial=True)
    assert list(outputs) == ["x"]
    np.testing.assert_array_equal(outputs["x"], expected)
    run = tf.function(
        lambda ids: strategy.run(lambda i: layer(i, partial=True), (ids,))
    )
    with pytest.raises(
        NotImplementedError, match=r"no ids for \['y'\].*with all of them"
    ):
        run(ids)


def test_embedding_trains_as_in_numpy(strategy):
    table = np.random.default_rng(0).normal(size=(10, 2)).astype("float32")
    dense = tf.constant([[1, 2], [3, 3]])
    ragged = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    share = np.array([0, 0.5, 0.5, 1, 0, 0, 0, 0, 0, 0])
    cases = [
        (dense, None, table[dense], np.bincount([1, 2, 3, 3], minlength=10)),
        (ragged, "mean", [table[[1, 2]].mean(0), table[3]], share),
        (
            ragged.to_sparse(),
            "sum",
            [table[[1, 2]].sum(0), table[3]],
            share > 0,
        ),
    ]
    optimizer = tf_keras.optimizers.legacy.SGD(1.0)
    for ids, combiner, vectors, counts in cases:
        with strategy.scope():
            layer = tfrs_embed.Embedding(10, 2, combiner=combiner)
            layer.build(None)
        layer.set_weights([table])

        def step(ids=ids, layer=layer):
            with tf.GradientTape() as tape:
                found = layer(ids)
                loss = tf.reduce_sum(found)
            weights = layer.trainable_variables
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return found

        results = strategy.run(tf.function(step))
        for found in strategy.experimental_local_results(results):
            np.testing.assert_allclose(found, vectors, rtol=1e-6)
        # Each replica has these ids.
        counts = counts * strategy.num_replicas_in_sync
        np.testing.assert_allclose(
            layer.get_weights()[0], table - counts[:, None], rtol=1e-5
        )
    wrong = tf.function(lambda: layer(tf.sparse.from_dense([[3, 10]])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 10 is out of"):
        strategy.run(wrong)
