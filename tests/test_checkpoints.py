"""Checkpoints of one device: blocks, growing tables, TensorFlow's options."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import nightly, on
from tfrs_embed import checkpoint
from tfrs_embed.checkpoint import bundle, slot_order
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, merge
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.engines import engine
from tfrs_embed.storage import initial_values
from training_helpers import assert_same, differentiate, state

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding
ROWS, DIM = 50, 6
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def make(rows=ROWS, dim=DIM, size_threshold=20, seed=1, **options):
    """A layer with a large table and a small one."""
    tables = {
        "large": tfrs_embed.TableConfig(
            "large",
            rows,
            dim,
            initializer=keras.initializers.RandomNormal(seed=seed),
        ),
        "small": tfrs_embed.TableConfig(
            "small",
            7,
            dim,
            initializer=keras.initializers.RandomNormal(seed=2),
        ),
    }
    return layers.PartialTPUEmbedding(
        {
            name: tfrs_embed.FeatureConfig(name, table)
            for name, table in tables.items()
        },
        tpu.Adagrad(0.5, initial_accumulator_value=0.25),
        size_threshold=size_threshold,
        **options,
    )


def train(layer, steps=1, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = {
            "large": tf.constant(rng.integers(0, ROWS, 8)),
            "small": tf.constant(rng.integers(0, 7, 8)),
        }
        with tf.GradientTape() as tape:
            vectors = layer(ids, training=True)
            loss = sum(tf.reduce_sum(v**2) for v in vectors.values())
        differentiate(tape, loss, layer.trainable_variables)


def save(layer, folder):
    return tf.train.Checkpoint(layer=layer).save(str(folder / "checkpoint"))


def restore(layer, path):
    return tf.train.Checkpoint(layer=layer).restore(path)


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks of 4 rows, initial ones too, and parts of a few blocks."""
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 4 * DIM)
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 4 * 4 * DIM)
    monkeypatch.setattr(bundle, "PART_BYTES", 3 * 4 * 4 * DIM)


def test_a_table_in_blocks_is_one_tensor_for_others(small_blocks, tmp_path):
    layer = make()
    train(layer, 3)
    path = save(layer, tmp_path)
    assert len(list(tmp_path.glob("*.data-*"))) > 5
    reader = tf.train.load_checkpoint(path)
    for name, value in state(layer).items():
        key = "step" if name == "step" else f"tables/{name}"
        found = reader.get_tensor(f"layer/{key}{SUFFIX}")
        np.testing.assert_array_equal(found, value)
    other = make()
    other.build(None)
    restore(other, path).assert_consumed()
    assert_same(state(other), state(layer))


THRESHOLDS = [None, 0, 20]


# By day each pair of thresholds once: built in one order, not in the other.
@nightly(
    lambda built, here, there: (
        built == (THRESHOLDS.index(here) < THRESHOLDS.index(there))
    )
)
@pytest.mark.parametrize("here", THRESHOLDS, ids=str)
@pytest.mark.parametrize("there", THRESHOLDS, ids=str)
@pytest.mark.parametrize("built", [False, True])
def test_another_size_threshold_loses_no_table(tmp_path, here, there, built):
    layer = make(size_threshold=there)
    train(layer, 2)
    path = save(layer, tmp_path)
    other = make(size_threshold=here, seed=9)
    if built:
        train(other)
    status = restore(other, path).expect_partial()
    other.build(None)
    found, saved = state(other), state(layer)
    common = sorted(set(found) & set(saved))
    assert {"large/parameters", "small/parameters"} <= set(common)
    assert_same({k: found[k] for k in common}, {k: saved[k] for k in common})
    if here == there:
        status.assert_existing_objects_matched()


def test_a_table_that_is_saved_by_itself(tmp_path):
    layer = make()
    train(layer)
    table = layer.embedding_tables["large"]
    saved = table.numpy()
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "table"))
    train(layer)
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    np.testing.assert_array_equal(table.numpy(), saved)


def test_a_save_removes_what_a_killed_one_of_its_number_left(tmp_path):
    layer = make()
    train(layer)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(layer=layer), tmp_path, max_to_keep=None
    )
    mine, other = tmp_path / "ckpt-1_temp", tmp_path / "ckpt-2_temp"
    tables = tmp_path / "ckpt-1-tfrs_embed.table_temp"
    for folder in mine, other, tables:
        folder.mkdir()
        # Of a save with more parts, which was killed while it wrote one.
        part = "part-00000-of-00009"
        (folder / f"{part}.index").touch()
        (folder / f"{part}.data-00000-of-00001.tempstate1").touch()
    path = manager.save(1)
    assert not mine.exists()
    assert not tables.exists()
    assert len(list(other.iterdir())) == 2
    (other / "notes").touch()
    manager.save(2)
    assert [file.name for file in other.iterdir()] == ["notes"]
    restored = make(seed=3)
    tf.train.Checkpoint(layer=restored).restore(path).expect_partial()
    assert_same(state(restored), state(layer))


def test_a_checkpoint_after_an_export(tmp_path):
    layer = make()
    train(layer)
    tf.saved_model.save(layer, str(tmp_path / "exported"))
    before = state(layer)
    path = save(layer, tmp_path)
    train(layer)
    restore(layer, path).assert_consumed()
    assert_same(state(layer), before)


def test_large_tables_of_any_name_are_in_a_saved_model(tmp_path):
    features = {}
    for name in ("a b", "日本/ü", "-x", "x:0", "a>20b"):
        table = tfrs_embed.TableConfig(name, 9, DIM, dtype="float32")
        features[name] = tfrs_embed.FeatureConfig(name, table)
    layer = layers.PartialTPUEmbedding(features, "adagrad", size_threshold=0)
    with tf.GradientTape() as tape:
        vectors = layer({name: tf.constant([3, 5]) for name in features})
        loss = sum(tf.reduce_sum(v**2) for v in vectors.values())
    tape.gradient(loss, layer.trainable_variables)
    module = tf.Module()
    module.layer = layer
    module.serve = tf.function(
        lambda ids: layer(ids, training=False),
        input_signature=[
            {name: tf.TensorSpec([None], tf.int64) for name in features}
        ],
    )
    ids = {name: tf.constant([1, 8], tf.int64) for name in features}
    expected = module.serve(ids)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    tf.nest.map_structure(
        np.testing.assert_array_equal, loaded.serve(ids), expected
    )


def without_step(layer):
    """The state but for the step, which is a variable of TensorFlow's own."""
    copies = state(layer)
    del copies["step"]
    return copies


# TensorFlow 2.16 tells no object of a restore that its variables wait for.
after_the_restore = pytest.mark.skipif(
    not hasattr(Trackable, "_checkpoint_adapter"),
    reason="this TensorFlow lets tables grow only if they are built",
)


class TestGrowing:
    @pytest.mark.parametrize(
        "built", [pytest.param(False, marks=after_the_restore), True]
    )
    def test_new_rows_are_initial_ones(self, small_blocks, tmp_path, built):
        layer = make()
        train(layer, 3)
        path = save(layer, tmp_path)
        saved = state(layer)
        fresh = make(rows=ROWS + 13)
        fresh.build(None)
        initial = state(fresh)
        grown = make(rows=ROWS + 13)
        if built:
            # Rows that have been trained become initial ones again.
            grown({"large": tf.range(ROWS + 13), "small": [1]})
            with tf.GradientTape() as tape:
                ids = {"large": tf.range(ROWS, ROWS + 13), "small": [1]}
                loss = tf.reduce_sum(grown(ids, training=True)["large"])
            differentiate(tape, loss, grown.trainable_variables)
        with checkpoint.growing_tables():
            status = restore(grown, path)
        grown.build(None)
        status.assert_existing_objects_matched()
        found = state(grown)
        for name in ("large/parameters", "large/accumulators"):
            np.testing.assert_array_equal(found[name][:ROWS], saved[name])
            np.testing.assert_array_equal(
                found[name][ROWS:], initial[name][ROWS:]
            )
        assert (found["large/accumulators"][ROWS:] == 0.25).all()

    @after_the_restore
    def test_what_grew_late_may_not_grow_again_unasked(self, tmp_path):
        layer = make()
        train(layer)
        path = save(layer, tmp_path)
        grown = make(rows=ROWS + 13)
        with checkpoint.growing_tables():
            restore(grown, path)
        grown.build(None)
        before = without_step(grown)
        with pytest.raises(ValueError, match=r"large/.* has 63 rows here"):
            restore(grown, path)
        assert_same(without_step(grown), before)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (
                {"rows": ROWS + 1},
                r"large/.* has 51 rows here and 50 there.*gro",
            ),
            (
                {"rows": ROWS - 1},
                r"large/.* has 49 rows here and 50 there; row",
            ),
            ({"dim": DIM + 1}, r"the shape \[\d+, 7\] here and \[\d+, 6\] th"),
        ],
        ids=["more rows", "fewer rows", "another dim"],
    )
    def test_what_does_not_fit_changes_no_table(self, tmp_path, options, match):
        layer = make()
        train(layer)
        path = save(layer, tmp_path)
        other = make(**options)
        other.build(None)
        # TensorFlow restores its own variables, as the step, before it asks
        # whether the tables fit.
        before = without_step(other)
        with pytest.raises(ValueError, match=match):
            restore(other, path)
        assert_same(without_step(other), before)
        if "rows" in options and options["rows"] > ROWS:
            return
        with (
            checkpoint.growing_tables(),
            pytest.raises(ValueError, match=match),
        ):
            restore(other, path)
        assert_same(without_step(other), before)

    def test_a_small_table_grows_into_a_large_one(self, tmp_path):
        layer = make(size_threshold=None)
        train(layer)
        path = save(layer, tmp_path)
        grown = make(rows=3 * ROWS, size_threshold=2 * ROWS)
        grown.build(None)
        with checkpoint.growing_tables():
            restore(grown, path).expect_partial()
        np.testing.assert_array_equal(
            state(grown)["large/parameters"][:ROWS],
            state(layer)["large/parameters"],
        )


def test_an_asynchronous_checkpoint_has_the_state_of_its_call(tmp_path):
    layer = make()
    train(layer)
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    saver = tf.train.Checkpoint(layer=layer)
    paths, states = [], []
    # The second time TensorFlow copies the tables in a function.
    for seed in range(3):
        states.append(state(layer))
        paths.append(saver.save(str(tmp_path / "checkpoint"), options))
        train(layer, 5, seed)
    saver.sync()
    for path, expected in zip(paths, states, strict=True):
        other = make()
        other.build(None)
        restore(other, path).assert_existing_objects_matched()
        assert_same(state(other), expected)


def test_tensorflows_sharding_option(tmp_path):
    policy = getattr(tf.train.experimental, "MaxShardSizePolicy", None)
    if policy is None:
        pytest.skip("this TensorFlow has no sharding policies")
    layer = make()
    train(layer)
    dense = tf.Variable(tf.random.normal([100, 10]))
    both = tf.train.Checkpoint(layer=layer, dense=dense)
    path = both.write(
        str(tmp_path / "checkpoint"),
        tf.train.CheckpointOptions(experimental_sharding_callback=policy(2048)),
    )
    before, kept = state(layer), dense.numpy()
    train(layer)
    dense.assign(tf.zeros_like(dense))
    both.read(path).assert_consumed()
    assert_same(state(layer), before)
    np.testing.assert_array_equal(dense.numpy(), kept)


def test_plain_checkpoints_of_the_same_names_are_read(tmp_path):
    layer = make()
    layer.build(None)
    value = tf.random.normal([ROWS, DIM])
    plain = tf.train.Checkpoint(
        tables=tf.train.Checkpoint(
            large=tf.train.Checkpoint(parameters=tf.Variable(value))
        )
    )
    path = tf.train.Checkpoint(layer=plain).write(str(tmp_path / "plain"))
    tf.train.Checkpoint(layer=layer).read(path).expect_partial()
    np.testing.assert_array_equal(
        layer.embedding_tables["large"].numpy(), value.numpy()
    )


def plain_objects(**variables):
    """Variables where the layer's large table has its own."""
    table = tf.train.Checkpoint(**variables)
    return tf.train.Checkpoint(tables=tf.train.Checkpoint(large=table))


def test_a_plain_variable_is_given_what_a_reader_reads(tmp_path):
    layer = make()
    train(layer, 2)
    path = save(layer, tmp_path)
    parameters = tf.Variable(tf.ones([ROWS, DIM]))
    with pytest.raises(ValueError, match=r"saver named 'tfrs_embed\.table'"):
        restore(plain_objects(parameters=parameters), path)
    np.testing.assert_array_equal(parameters, tf.ones([ROWS, DIM]))
    reader = tf.train.load_checkpoint(path)
    key = "layer/tables/large/parameters/.ATTRIBUTES/VARIABLE_VALUE"
    parameters.assign(reader.get_tensor(key))
    np.testing.assert_array_equal(parameters, state(layer)["large/parameters"])


# Learning rates.

RATES = {
    "name": lambda: "adagrad",
    "tensorflow": lambda: tpu.Adam(0.5),
    "keras": lambda: keras.optimizers.Adam(0.5),
    "legacy": lambda: keras.optimizers.legacy.SGD(0.5),
    "variable": lambda: tpu.SGD(tf.Variable(0.5)),
}


def make_of(optimizer, own=None):
    """A layer of the tables "a", with its own optimizer, and "b"."""
    tables = [
        tfrs_embed.TableConfig("a", 5, 2, optimizer=own),
        tfrs_embed.TableConfig("b", 5, 2),
    ]
    return layers.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig(t.name, t) for t in tables],
        optimizer,
        size_threshold=0,
    )


def rates(layer):
    return {
        name: round(optimizer.learning_rate, 6)
        for name, optimizer in layer.table_optimizers.items()
    }


@pytest.mark.parametrize("form", RATES)
@pytest.mark.parametrize("built", [False, True])
def test_an_assigned_rate_is_restored(tmp_path, form, built):
    layer = make_of(RATES[form](), own="sgd")
    layer.build(None)
    layer.table_optimizers["a"].learning_rate = 0.25
    layer.table_optimizers["b"].learning_rate = 0.125
    path = save(layer, tmp_path)
    other = make_of(RATES[form](), own="sgd")
    if built:
        other.build(None)
    status = restore(other, path)
    other.build(None)
    status.assert_consumed()
    assert rates(other) == {"a": 0.25, "b": 0.125}


OF_OTHER_RULES = {
    "with slots": (tpu.Adagrad(0.5), tpu.Adam(0.25)),
    "before there were none": (tpu.SGD(0.5), tpu.Adagrad(0.25)),
    "now there are none": (tpu.FTRL(0.5), tpu.SGD(0.25)),
}


@pytest.mark.parametrize("form", OF_OTHER_RULES)
@pytest.mark.parametrize("keys", [None, tfrs_embed.DynamicKeys()])
@pytest.mark.parametrize("built", [False, True])
def test_a_rate_of_another_rule_is_not_restored(tmp_path, form, keys, built):
    def make_table(optimizer):
        table = tfrs_embed.TableConfig("a", 5, 2, "ones", keys=keys)
        return layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("a", table), optimizer, size_threshold=0
        )

    before, now = OF_OTHER_RULES[form]
    saved, layer = make_table(before), make_table(now)
    saved.build(None)
    saved(tf.constant([3], tf.int64), training=True)
    saved.table_optimizers["a"].learning_rate = 0.125
    path = save(saved, tmp_path)
    message = "'a/learning_rate' stays 0.25: .* 0.125 of another optimizer"
    with pytest.warns(UserWarning, match=message):
        if built:
            layer.build(None)
        status = restore(layer, path)
        layer.build(None)
    assert rates(layer) == {"a": 0.25}
    status.expect_partial()
    again = make_table(before)
    restore(again, path)
    again.build(None)
    assert rates(again) == {"a": 0.125}


def test_an_assigned_rate_is_restored_by_an_all_to_all_layer(tmp_path):
    def make_all_to_all():
        return layers.All2AllDenseEmbedding(8, 2, 1, 1, optimizer="sgd")

    layer = make_all_to_all()
    layer.build((None, 1, 1))
    layer.table_optimizer.learning_rate = 0.25
    path = save(layer, tmp_path)
    other = make_all_to_all()
    restore(other, path)
    assert other.table_optimizer.learning_rate == 0.25


def test_a_checkpoint_without_rates_leaves_them_as_they_are(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    scheduled = make_of(tpu.Adagrad(schedule))
    scheduled.build(None)
    path = save(scheduled, tmp_path)
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    assert not any("learning_rate" in key for key in keys)
    layer = make_of(tpu.Adagrad(0.25))
    layer.build(None)
    restore(layer, path).assert_existing_objects_matched().assert_consumed()
    assert rates(layer) == {"a": 0.25, "b": 0.25}
    # And the other way round.
    path = save(layer, tmp_path)
    restore(scheduled, path).assert_existing_objects_matched()
    assert rates(scheduled) == {"a": 0.5, "b": 0.5}


def test_a_checkpoint_of_before_there_were_rates_is_restored(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(engine.TableState, "_trackable_children", no_rates)
        layer = make_of("adagrad")
        layer.build(None)
        path = save(layer, tmp_path)
    graph = tf.train.load_checkpoint(path).get_tensor(
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    )
    assert b"accumulators" in graph and b"learning_rate" not in graph
    other = make_of(tpu.Adagrad(0.25))
    other.build(None)
    status = restore(other, path)
    status.assert_existing_objects_matched().assert_consumed()
    assert rates(other) == {"a": 0.25, "b": 0.25}
    np.testing.assert_array_equal(
        other.embedding_tables["a"], layer.embedding_tables["a"]
    )


def no_rates(state, save_type="checkpoint", **kwargs):
    children = tf.__internal__.tracking.Trackable._trackable_children(
        state, save_type, **kwargs
    )
    return {k: v for k, v in children.items() if k != "learning_rate"}


def test_rates_that_one_optimizer_cannot_have_are_an_error(tmp_path):
    layer = make_of(tpu.SGD(0.5), own=tpu.SGD(0.25))
    layer.build(None)
    path = save(layer, tmp_path)
    other = make_of("sgd")
    other.build(None)
    before = other.embedding_tables["a"].numpy(), rates(other)
    with pytest.raises(ValueError, match=r"share one.*0\.25.*0\.5"):
        restore(other, path)
    np.testing.assert_array_equal(other.embedding_tables["a"], before[0])
    assert rates(other) == before[1]


def test_a_rate_is_saved_asynchronously(tmp_path):
    layer = make_of("sgd")
    layer.build(None)
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    saver = tf.train.Checkpoint(layer=layer)
    paths = []
    for rate in (0.5, 0.25, 0.125):
        layer.table_optimizers["a"].learning_rate = rate
        paths.append(saver.save(str(tmp_path / "checkpoint"), options))
    saver.sync()
    for path, rate in zip(paths, (0.5, 0.25, 0.125), strict=True):
        other = make_of("sgd")
        restore(other, path)
        assert rates(other) == {"a": rate, "b": rate}


# Keras's optimizers, whose slots are saved by position.


def compiled(size_threshold, optimizer="adam", rows=5, trained=True, by="sgd"):
    """A model of three tables, trained by a Keras optimizer."""
    sizes = {"a": rows, "b": 5, "c": 50}
    layer = layers.PartialTPUEmbedding(
        {
            name: tfrs_embed.FeatureConfig(
                name, tfrs_embed.TableConfig(name, size, 2)
            )
            for name, size in sizes.items()
        },
        by,
        size_threshold=size_threshold,
    )
    inputs = {name: keras.Input((), dtype="int64") for name in sizes}
    outputs = keras.layers.Concatenate()(list(layer(inputs).values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    # Tracing takes longer than all that is tested here.
    model.compile(optimizer, "mse", run_eagerly=True)
    if trained:
        fit(model)
    return model


def fit(model):
    ids = {name: tf.constant([0, 1, 2]) for name in "abc"}
    model.fit(ids, tf.ones([3, 1]), verbose=0)


def all_of(model):
    """The model's weights, tables, and its optimizer's variables, by number."""
    [layer] = [x for x in model.layers if hasattr(x, "embedding_tables")]
    values = [*model.weights, *model.optimizer.variables]
    values += layer.embedding_tables.values()
    return {i: tf.convert_to_tensor(v).numpy() for i, v in enumerate(values)}


DIFFERENT = {
    "threshold": ({"size_threshold": 20}, {"size_threshold": 2}),
    "small again": ({"size_threshold": 2}, {"size_threshold": 20}),
    "no optimizer": (
        {"size_threshold": 20},
        {"size_threshold": 20, "by": None},
    ),
    "nothing to train": (
        {"size_threshold": 20},
        {"size_threshold": 2, "by": None},
    ),
    "rows": (
        {"size_threshold": 20},
        {"size_threshold": 20, "rows": 7},
    ),
}


# Keras 3 numbers its optimizers.
REFUSED = r"'[Aa]dam\w*' can't be restored.*slots"


@on("keras:3", tier="more", when=lambda case: case == "rows")
@pytest.mark.parametrize("case", DIFFERENT)
def test_slots_by_position_do_not_go_to_another_variable(tmp_path, case):
    saved, other = DIFFERENT[case]
    path = tf.train.Checkpoint(model=compiled(**saved)).save(
        str(tmp_path / "checkpoint")
    )
    model = compiled(**other, trained=False)
    with checkpoint.growing_tables():
        tf.train.Checkpoint(model=model).restore(path)
    with pytest.raises(ValueError, match=REFUSED):
        fit(model)
    # Trying again doesn't help.
    with pytest.raises(ValueError, match=REFUSED):
        model.optimizer.build(model.trainable_variables)
    # Of one that is built the error may be TensorFlow's, about a shape.
    model = compiled(**other)
    with checkpoint.growing_tables(), pytest.raises(ValueError):
        tf.train.Checkpoint(model=model).restore(path)


def test_other_models_of_the_process_save_no_order(tmp_path):
    fit(compiled(20))
    inputs = {name: keras.Input((), dtype="int64") for name in "abc"}
    joined = keras.layers.Concatenate()(
        [keras.layers.Reshape((1,))(each) for each in inputs.values()]
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("adam", "mse")
    fit(model)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    # Nor the name of a saver, which other processes don't have.
    graph = tf.train.load_checkpoint(path).get_tensor(
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    )
    assert b"_variables" in graph
    assert b"tfrs_embed" not in graph


@on("keras:3", tier="more")
def test_slots_by_position_go_to_their_variables(tmp_path):
    model = compiled(20)
    saved = tf.train.Checkpoint(model=model)
    path = saved.save(str(tmp_path / "checkpoint"))
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    assert any("tfrs_embed_order" in key for key in keys)
    for trained in (False, True):
        other = compiled(20, trained=trained)
        status = tf.train.Checkpoint(model=other).restore(path)
        if trained:
            status.assert_consumed()
        else:
            status.assert_existing_objects_matched()
        fit(other)
        # A checkpoint that is made after it was restored has it as well.
        again = tf.train.Checkpoint(model=other).save(str(tmp_path / "again"))
        assert keys == (
            tf.train.load_checkpoint(again).get_variable_to_shape_map()
        )
    # What was refused is not refused for ever.
    wrong = tf.train.Checkpoint(model=compiled(2)).save(str(tmp_path / "wrong"))
    other = compiled(20, trained=False)
    tf.train.Checkpoint(model=other).restore(wrong).expect_partial()
    with pytest.raises(ValueError, match="slots"):
        other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other).restore(path)
    fit(other)


@pytest.mark.parametrize("text", ["[" * 10**5, "[1]", '{"0": 1}', 1.0])
def test_positions_that_nobody_saves_are_refused(tmp_path, text):
    writer = BundleWriter(str(tmp_path / "part"))
    writer.add("order", text)
    merge(writer.finish(), str(tmp_path / "c"))
    optimizer = keras.optimizers.Adam(name="adam")
    order = slot_order.SavedOrder(optimizer)
    order.tracked = True
    with pytest.raises(ValueError, match=r"'order' in .*/c'|adam.*slots"):
        order.check("order", BundleReader(str(tmp_path / "c")))


def test_a_checkpoint_is_restored_after_an_export(tmp_path):
    model = compiled(20)
    saved = tf.train.Checkpoint(model=model)
    path = saved.save(str(tmp_path / "checkpoint"))
    tf.saved_model.save(model, str(tmp_path / "model"))
    before = all_of(model)
    fit(model)
    saved.restore(path).assert_consumed()
    assert_same(all_of(model), before)
    fit(model)


@on("keras:3", tier="more")
def test_slots_by_variable_are_restored_under_another_threshold(tmp_path):
    legacy = keras.optimizers.legacy.Adam
    model = compiled(20, legacy())
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    for trained in (False, True):
        other = compiled(2, legacy(), trained=trained)
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
        other.optimizer._create_all_weights(other.trainable_variables)
        for mine, theirs in zip(
            other.layers[-1].weights, model.layers[-1].weights, strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
            for slot in "mv":
                np.testing.assert_array_equal(
                    other.optimizer.get_slot(mine, slot),
                    model.optimizer.get_slot(theirs, slot),
                )
        fit(other)


@on("keras:3", tier="more")
def test_a_model_that_is_not_compiled_takes_tables_across(tmp_path):
    model = compiled(20)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    between = keras.Model.from_config(compiled(2).get_config())
    tf.train.Checkpoint(model=between).restore(path).expect_partial()
    path = tf.train.Checkpoint(model=between).save(str(tmp_path / "between"))
    other = compiled(2, trained=False)
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    [mine] = [x for x in other.layers if hasattr(x, "embedding_tables")]
    [theirs] = [x for x in model.layers if hasattr(x, "embedding_tables")]
    for name, table in theirs.embedding_tables.items():
        np.testing.assert_array_equal(mine.embedding_tables[name], table)
    fit(other)
