"""Tables by row with copies of frequent rows: what only these can get wrong.

Their numbers are those of the conformance tests.
"""

import tempfile

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import on
from reference import Ragged
from strategies.replicas import distribute, local, local_ids
from tfrs_embed.distribution.replicas import bucket_of
from traffic_of_ids import FeatureIds, expected_traffic
from training_helpers import differentiate

pytestmark = on("mirrored:2", "mirrored:4", "workers:2", tier="nightly")

ROWS = 90
#: Rows of each rank, some of no batch; of "c" there are none.
HOT = {"a": (*range(0, 40, 3), 89), "b": (5,), "d": (1, 2, 3)}
DIMS = {"a": 8, "b": 8, "c": 8, "d": 3}
#: All that are looked up.
EVERY = {name: tuple(range(60)) for name in DIMS}
SIZES = {"a": None, "b": 12, "c": 2, "d": 1}


def make_layer(
    strategy,
    hot=HOT,
    seed=1,
    trained=tuple(DIMS),
    table_dtype="float32",
    **options,
):
    """A layer of four tables in two widths, with a feature each."""
    features = {}
    for name, dim in DIMS.items():
        table = tfrs_embed.TableConfig(
            name,
            ROWS,
            dim,
            tf.keras.initializers.RandomUniform(-1, 1, seed),
            optimizer="adam" if name in trained else None,
            placement="row",
            hot_rows=hot.get(name, ()),
            dtype=table_dtype,
        )
        features[name] = tfrs_embed.FeatureConfig(
            name, table, output_shape=(None, dim)
        )
    with strategy.scope():
        return tfrs_embed.PartialTPUEmbedding(features, None, **options)


def draw(rng):
    """One replica's ids, and the same as the model of the traffic takes them.

    Replicas have different numbers of samples.
    """
    ids, known = {}, []
    bags = int(rng.integers(3, 9))
    for name, size in SIZES.items():
        if size is None:
            rows = [rng.integers(0, 60, n).tolist() for n in range(bags)]
            flat = np.concatenate(rows).astype(np.int64)
            ids[name] = Ragged(rows)
        else:
            flat = rng.integers(0, 60, [bags, size])
            ids[name] = flat
        known.append(FeatureIds(name, flat, bags, size is None))
    return ids, known


def batches_of(strategy, seed):
    rng = np.random.default_rng(seed)
    drawn = [draw(rng) for _ in range(strategy.num_replicas_in_sync)]
    return [ids for ids, _ in drawn], [known for _, known in drawn]


def stepper(strategy, layer, training=True, **options):
    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=training, **options)
            loss = tf.add_n([tf.reduce_sum(v**2) for v in outputs.values()])
        if training:
            differentiate(tape, loss, layer.trainable_variables)
        return outputs

    function = tf.function(lambda ids: strategy.run(step, (ids,)))
    return lambda ids: local(strategy, function(distribute(strategy, ids)))


def engine_of(layer):
    return layer._engine_layer.engine


def assert_copies_are_the_rows(layer, tables=tuple(HOT)):
    """Bit for bit, on all of this process's replicas."""
    engine = engine_of(layer)
    for name in tables:
        hot = engine._hot_rows.tables[name]
        assert sorted(hot.ids) == sorted(HOT[name])
        for key, variable in layer.tables[name].variables.items():
            whole = np.asarray(variable)
            for shard in engine._shards:
                np.testing.assert_array_equal(
                    shard.store.variables(hot.copies.name)[key],
                    whole[hot.ids],
                    err_msg=f"{name}/{key}",
                )


@on("workers:2", tier="more", when=lambda dtype: dtype == "bfloat16")
@pytest.mark.parametrize(
    ("seed", "dtype"), [(None, "float32"), (1, "bfloat16")]
)
def test_copies_stay_equal_to_the_rows(strategy, seed, dtype):
    """Workers that draw values of their own have those of the rows' owners.

    Copies of bfloat16 are rounded by equal random bits on all replicas.
    """
    layer = make_layer(strategy, seed=seed, table_dtype=dtype)
    layer.build(None)
    assert_copies_are_the_rows(layer)
    before = {n: np.asarray(t) for n, t in layer.embedding_tables.items()}
    step = stepper(strategy, layer)
    for i in range(3):
        step(batches_of(strategy, i)[0])
    assert_copies_are_the_rows(layer)
    # No batch has row 89, whose slots are zeros, too.
    assert (layer.embedding_tables["a"].numpy()[0] != before["a"][0]).all()
    for value in layer.tables["a"].slots.values():
        assert not np.asarray(value)[89].any()
    np.testing.assert_array_equal(
        layer.embedding_tables["a"].numpy()[89], before["a"][89]
    )
    # What is written from outside is looked up.
    layer.embedding_tables["a"].assign(before["a"] + 1)
    assert_copies_are_the_rows(layer)
    ids, _ = batches_of(strategy, 4)
    written = (before["a"] + 1).astype(np.float32)
    for replica, found in stepper(strategy, layer, False)(ids).items():
        rows = [written[r] for r in ids[replica]["a"].rows]
        expected = [r.mean(0) if len(r) else np.zeros(8) for r in rows]
        np.testing.assert_allclose(found["a"], expected, rtol=1e-5, atol=1e-6)


@on("mirrored:2", tier="more", when=lambda hot: hot is HOT)
@pytest.mark.parametrize("hot", [HOT, EVERY], ids=["some", "every"])
def test_bytes_are_those_of_the_model(strategy, hot):
    layer = make_layer(strategy, hot)
    ids, known = batches_of(strategy, 7)
    stepper(strategy, layer)(ids)
    expected = expected_traffic(
        {t: (ROWS, dim) for t, dim in DIMS.items()}, known, hot
    )
    counted = engine_of(layer).traffic()
    for rank, found in zip(local_ids(strategy), counted, strict=True):
        assert found == expected[rank]


@on("mirrored:2", tier="more")
def test_an_evaluation_sends_nothing_for_copies(strategy):
    """And frozen tables' copies take no part in an all-reduce."""
    world = strategy.num_replicas_in_sync
    layer = make_layer(strategy, EVERY, trained=("b", "d"))
    ids, _ = batches_of(strategy, 8)
    stepper(strategy, layer, training=False)(ids)
    empty = int(bucket_of(tf.constant(0, tf.int64))[0])
    # The smallest messages there are, of keys and rows, of two widths.
    sent = (world - 1) * (2 * 8 * (1 + empty) + 4 * (8 + 3) * empty)
    for traffic in engine_of(layer).traffic():
        assert traffic.bytes == sent
    stepper(strategy, layer)(ids)
    gradients = (world - 1) * 4 * (8 + 3) * empty
    reduced = 2 * (world - 1) * 4 * -(-60 * (8 + 1 + 3 + 1) // world)
    for traffic in engine_of(layer).traffic():
        assert traffic.bytes == 2 * sent + gradients + reduced


@on("mirrored:2", tier="more")
def test_a_partial_call_trains_what_it_has(strategy):
    """Others' copies are in the all-reduce, and stay what they are."""
    layer = make_layer(strategy, dtype="mixed_bfloat16")
    step = stepper(strategy, layer, partial=True)
    step(batches_of(strategy, 0)[0])
    before = {n: np.asarray(t) for n, t in layer.embedding_tables.items()}
    for names in ("c", "bd"):
        ids = batches_of(strategy, 1)[0]
        step([{n: each[n] for n in names} for each in ids])
        after = {n: np.asarray(t) for n, t in layer.embedding_tables.items()}
        for name, rows in after.items():
            assert (rows != before[name]).any() == (name in names), name
        before = after
    assert_copies_are_the_rows(layer)


@on("mirrored:2", tier="more")
def test_a_layer_is_made_again_and_saved(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("serving.export is for several workers")
    layer = make_layer(strategy)
    step = stepper(strategy, layer)
    step(batches_of(strategy, 1)[0])
    places = {t.table: t.reason for t in layer.placement.tables}
    assert places["a"].endswith(" replicas, copies of 15 hot rows")
    assert places["c"].endswith(" replicas")
    with strategy.scope():
        other = type(layer).from_config(layer.get_config())
        other.build(None)
    assert other.get_config() == layer.get_config()
    assert set(engine_of(other)._hot_rows.tables) == set(HOT)
    module = tf.Module()
    module.layer = layer
    module.look_up = tf.function(
        lambda ids: layer({n: ids for n in DIMS})["d"],
        input_signature=[tf.TensorSpec([4, 1], tf.int64)],
    )
    folder = tempfile.mkdtemp()
    tf.saved_model.save(module, folder)
    loaded = tf.saved_model.load(folder)
    found = loaded.look_up([[0], [1], [2], [3]])
    rows = layer.embedding_tables["d"].numpy()[:4]
    np.testing.assert_allclose(found, rows, rtol=1e-6)


def test_many_tables_are_built_and_read_without_warnings(strategy, caplog):
    def table(number, placement):
        rows = {"hot_rows": (1, 5)} if placement == "row" else {}
        name = f"{placement}_{number}"
        return tfrs_embed.TableConfig(name, 20, 2, placement=placement, **rows)

    tables = [
        table(number, placement)
        for placement in ("row", "replicated")
        for number in range(6)
    ]
    keys = tfrs_embed.DynamicKeys()
    tables += [
        tfrs_embed.TableConfig(f"keys_{number}", 20, 2, keys=keys)
        for number in range(6)
    ]
    features = {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables}
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(features, "sgd")
    with caplog.at_level("WARNING", tf.get_logger().name):
        layer.build(None)
        ids = np.array([1, 2, 3], np.int64)
        batches = [dict.fromkeys(features, ids)]
        stepper(strategy, layer)(batches * strategy.num_replicas_in_sync)
        for name in features:
            layer.tables[name].table.numpy()
    assert "retracing" not in caplog.text
