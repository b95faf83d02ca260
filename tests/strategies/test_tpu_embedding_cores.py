"""The engine for embedding cores against the numpy reference."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from conformance.descriptors import (
    FEW,
    OPTIMIZERS,
    RATE,
    Hardware,
    Optimizer,
    large_and_small,
    on_tpu,
    tpu,
)
from conformance.harness import (
    assert_tables,
    build,
    check_step,
    make_steps,
    places_of,
    trainer,
)
from process_tiers import nightly, on
from reference import best_ids
from strategies.embedding_cores import EmbeddingCores
from tfrs_embed.optimizers import Regularized
from tfrs_embed.storage import initial_values
from tfrs_embed.storage.sharded import Part

pytestmark = on("tpu:2x4", tier="more")


@pytest.fixture
def cores(strategy, monkeypatch):
    return EmbeddingCores(strategy, monkeypatch)


def build_on(strategy, optimizer, kinds=("dense",)):
    with strategy.scope():
        return build("cores", large_and_small("mean", optimizer, kinds))


@nightly(lambda optimizer: optimizer != "adagrad")
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_training(strategy, cores, optimizer):
    layer, reference = build_on(strategy, optimizer, on_tpu(FEW))
    assert set(places_of(layer).values()) == {"TPU embedding core"}
    rng = np.random.default_rng(5)
    step = trainer(strategy, layer)
    for weighted in (True, False):
        batches = make_steps(rng, reference, weighted, strategy)
        reference.update(check_step(step, reference, batches))
    silent = trainer(strategy, layer, training=None)
    reference.update(check_step(silent, reference, batches))
    assert_tables(layer, reference)
    assert cores.training == [True] * len(cores.training)
    # Evaluating must not wait for gradients.
    check_step(trainer(strategy, layer, training=False), reference, batches)
    assert not cores.training[-1]


def test_the_best_rows_are_those_of_the_last_step(strategy, cores):
    layer, reference = build_on(strategy, "sgd")
    batches = make_steps(np.random.default_rng(5), reference, False, strategy)
    check_step(trainer(strategy, layer), reference, batches)
    rng = np.random.default_rng(0)
    for table in layer.tables.values():
        queries = rng.normal(size=[3, table.spec.dim]).astype(np.float32)
        scores, ids = table.top_k(queries, 5)
        expected = best_ids(queries @ table.table.numpy().T, 5)
        np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
        np.testing.assert_array_equal(ids, expected[1])


@pytest.mark.parametrize("engine", ["cores", "dense"])
def test_gradients_are_clipped_by_value(strategy, cores, engine, monkeypatch):
    limits = {"clipvalue": (-0.5, 0.25)}
    made = Optimizer(tpu.Adagrad(RATE, **limits), "Adagrad", {}, limits)
    monkeypatch.setitem(OPTIMIZERS, "clipped", made)
    with strategy.scope():
        tables = large_and_small("mean", "clipped", ("dense",))
        layer, reference = build(engine, tables)
    batches = make_steps(np.random.default_rng(0), reference, True, strategy)
    step = trainer(strategy, layer)
    reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        (Hardware.V2, {"clipvalue": 0.5}),
        (Hardware.V2, {"clipnorm": 0.5}),
        (Hardware.UNSUPPORTED, {"row_clipnorm": 0.5}),
        (Hardware.UNSUPPORTED, {"weight_decay": 0.5}),
        (Hardware.V2, {"max_norm": 0.5}),
    ],
    ids=str,
)
def test_what_these_tpus_cannot_do_before_a_rule_is_an_error(
    strategy, feature, options
):
    table = tfrs_embed.TableConfig("t", 100, 8)
    [(name, _)] = options.items()
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=rf"'t': these TPUs have no {name}="),
    ):
        tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table),
            Regularized("adagrad", **options),
            size_threshold=0,
            embedding_feature=feature,
        )


def test_checkpoint_moves_to_one_device_and_back(strategy, cores, tmp_path):
    layer, reference = build_on(strategy, "adam")
    step = trainer(strategy, layer)
    batches = make_steps(np.random.default_rng(0), reference, False, strategy)
    reference.update(check_step(step, reference, batches))
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "tpu"))
    other, _ = build("partial", large_and_small("mean", "adam", ("dense",)))
    tf.train.Checkpoint(layer=other).restore(path).expect_partial()
    assert_tables(other, reference)

    reference.update(check_step(step, reference, batches))
    tf.train.Checkpoint(layer=layer).restore(path).expect_partial()
    for name, table in other.embedding_tables.items():
        np.testing.assert_array_equal(
            layer.embedding_tables[name].numpy(), table.numpy()
        )
        np.testing.assert_array_equal(
            cores.tables[name]["parameters"].numpy(), table.numpy()
        )


NUMBERED = np.arange(150, dtype=np.float32).reshape(50, 3)


def numbered(strategy, monkeypatch):
    """A layer whose initializer makes the blocks of `NUMBERED` it is asked."""
    # Seven rows each, and one of what is left.
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 21)

    def block(shape, dtype, partition_shape, partition_offset):
        assert (shape, dtype) == ((50, 3), tf.float32)
        first, column = partition_offset
        assert (partition_shape[1], column) == (3, 0)
        return NUMBERED[first : first + partition_shape[0]]

    table = tfrs_embed.TableConfig("x", 50, 3, block)
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table, output_shape=[4, 3]),
            "sgd",
            size_threshold=0,
            batch_size=4,
        )
        layer.build()
    return layer


def test_tables_begin_with_all_blocks_of_their_initial_rows(
    strategy, cores, monkeypatch
):
    layer = numbered(strategy, monkeypatch)
    np.testing.assert_array_equal(cores.tables["x"]["parameters"], NUMBERED)
    np.testing.assert_array_equal(layer.embedding_tables["x"], NUMBERED)


def test_rows_are_those_of_the_hosts_that_hold_them(
    strategy, cores, monkeypatch
):
    table = numbered(strategy, monkeypatch).embedding_tables["x"]
    # An emulated slice has one host.
    hosts = [tf.Variable(tf.zeros([n, 3])) for n in (20, 20, 10)]
    parts = [Part(range(*ends)) for ends in ((0, 20), (20, 40), (40, 50))]
    monkeypatch.setattr(table, "_variables", hosts)
    monkeypatch.setattr(table, "_parts", parts)
    monkeypatch.setattr(table._embedding, "_retrieve_variables", lambda: None)
    numbers = np.arange(50)[:, None]
    for start, end in [(0, 7), (7, 20), (20, 21), (21, 45), (45, 50)]:
        table.write_rows(range(start, end), tf.constant(NUMBERED[start:end]))
        np.testing.assert_array_equal(
            tf.concat(hosts, 0), np.where(numbers < end, NUMBERED, 0)
        )
    for start, size in [(0, 50), (0, 20), (19, 2), (20, 20), (25, 5), (39, 11)]:
        np.testing.assert_array_equal(
            table.read_rows(start, size), NUMBERED[start : start + size]
        )


def test_a_second_layer_is_an_error(strategy, cores):
    build_on(strategy, "sgd")
    with pytest.raises(
        RuntimeError, match="serve one layer, and another layer uses them"
    ):
        build_on(strategy, "sgd")


def test_a_bad_id_is_an_error(strategy, cores):
    layer, reference = build_on(strategy, "sgd")
    step = trainer(strategy, layer)
    batches = make_steps(np.random.default_rng(0), reference, False, strategy)
    batches[0][0]["y_dense"][1] = 7
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"y_dense.*: id 7 is out of range"
    ):
        step(batches)
    assert_tables(layer, reference)


def test_sequences_and_sizes(strategy, cores):
    table = tfrs_embed.TableConfig("x", 50, 4)
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            [tfrs_embed.FeatureConfig("f", table, max_sequence_length=3)],
            "sgd",
            size_threshold=0,
            batch_size=5,
        )
    run = tf.function(
        lambda ids: strategy.run(layer, ([ids],), {"training": True})
    )
    ids = tf.ragged.constant([[1, 2], [], [3, 4, 5, 6]], dtype=tf.int64)
    [found] = run(ids)
    assert not any(cores.training)  # There is no tape, and no gradient.
    for rows in strategy.experimental_local_results(found):
        assert rows.shape == (3, 3, 4)
        values = layer.embedding_tables["x"].numpy()
        np.testing.assert_allclose(rows[2], values[3:6], rtol=1e-6)
        assert not np.any(rows[1])
