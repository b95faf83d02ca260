"""Tables of bfloat16 and float16: what they hold, and how it is rounded."""

import copy
import json

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layer_of_one_table, layers
from reference import HALVES, random_bits, round_stochastically
from tfrs_embed import serving
from tfrs_embed.ops import rounding
from training_helpers import checkpoint_command, differentiate

BOTH_IMPLEMENTATIONS = pytest.mark.usefixtures("both_implementations")


ROWS, DIM, RATE = 40, 13, 0.3
tpu = tf.tpu.experimental.embedding


def make_layer(dtype, how="stochastic", optimizer=None, rows=ROWS, **options):
    table = {"combiner": "sum", "dtype": dtype, "rounding": how}
    optimizer = tpu.SGD(RATE) if optimizer is None else optimizer
    layer = layer_of_one_table(optimizer, rows, DIM, table, **options)
    layer.build(None)
    return layer


def train(layer, ids, gradient):
    with tf.GradientTape() as tape:
        output = layer(tf.constant(ids), training=True)
        loss = tf.reduce_sum(tf.cast(output, tf.float32) * gradient)
    differentiate(tape, loss, layer.trainable_variables)
    return output


def rows_of(layer):
    return np.asarray(tf.cast(layer.embedding_tables["t"], tf.float32))


@pytest.mark.parametrize("how", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", HALVES)
@BOTH_IMPLEMENTATIONS
def test_training_is_that_of_the_reference_to_the_bit(dtype, how):
    layer = make_layer(dtype, how)
    assert layer.embedding_tables["t"].dtype == dtype
    first = tf.random_normal_initializer(seed=1)((ROWS, DIM))
    rows = np.array(tf.cast(tf.cast(first, dtype), tf.float32))
    np.testing.assert_array_equal(rows_of(layer), rows)
    rng = np.random.default_rng(0)
    for step in range(3):
        ids = rng.permutation(ROWS)[:20]
        # Small ones, too, so that float16 has denormal numbers.
        gradient = (
            rng.normal(size=(20, DIM))
            * 10.0 ** rng.integers(-7, 0, 20)[:, None]
        )
        gradient = gradient.astype(np.float32)
        if step == 0:
            gradient[:, 0] = rows[ids, 0] / np.float32(RATE) * 0.99999
        output = train(layer, ids, gradient)
        assert output.dtype == tf.float32
        np.testing.assert_array_equal(output, rows[ids])
        new = rows[ids] - np.float32(RATE) * gradient
        if how == "nearest":
            rows[ids] = tf.cast(tf.cast(new, dtype), tf.float32)
            continue
        for i, values in zip(ids, new, strict=True):
            for j, value in enumerate(values):
                bits = random_bits("t", step, int(i), j)
                rows[i, j] = round_stochastically(value, dtype, bits)
    np.testing.assert_array_equal(rows_of(layer), rows)


@pytest.mark.parametrize("dtype", HALVES)
@BOTH_IMPLEMENTATIONS
def test_values_at_the_ends_of_a_type_are_rounded_as_the_reference_does(dtype):
    _, least, largest = HALVES[dtype]
    # Processors that compute steps flush float32's own denormal numbers.
    small = 2.0**-14 if dtype == "float16" else 2.0 ** (least + 1)
    values = np.float32(
        [
            *(largest, np.nextafter(np.float32(largest), np.float32(np.inf))),
            *(largest * (1 + 2.0**-13), np.inf, np.nan, 0.0, 2.0**least),
            *(small * (1 - 2.0**-20), 2.0**-24, 0.3 * 2.0**-24, 2.0**-40),
            *(1e-30, 1.999999),
        ]
    )
    values = np.stack([values, -values])
    layer = make_layer(dtype, optimizer=tpu.SGD(1.0))
    layer.load_tables({"t": np.zeros((ROWS, DIM), np.float32)})
    for step in range(3):
        ids = np.arange(2) + 2 * step
        train(layer, ids, -values)
        expected = np.zeros_like(values)
        for i, j in np.ndindex(*values.shape):
            bits = random_bits("t", step, int(ids[i]), j)
            expected[i, j] = round_stochastically(values[i, j], dtype, bits)
        np.testing.assert_array_equal(rows_of(layer)[ids], expected)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "rowwise_adagrad"])
@BOTH_IMPLEMENTATIONS
def test_slots_are_float32_and_results_near_those_of_float32(optimizer):
    if optimizer == "rowwise_adagrad":
        optimizer = tfrs_embed.optimizers.RowWiseAdagrad(0.1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        layer = make_layer(dtype, optimizer=copy.deepcopy(optimizer))
        rng = np.random.default_rng(0)
        for _ in range(4):
            gradient = rng.normal(size=(30, DIM)).astype(np.float32)
            train(layer, rng.integers(0, ROWS, 30), gradient)
        assert all(
            s.dtype == tf.float32 for s in layer.tables["t"].slots.values()
        )
        found[dtype] = rows_of(layer)
    np.testing.assert_allclose(
        found["bfloat16"], found["float32"], rtol=0.03, atol=0.01
    )


@pytest.mark.parametrize("how", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", HALVES)
@BOTH_IMPLEMENTATIONS
def test_small_updates_accumulate_on_average(dtype, how):
    """Of a tenth of a step between numbers, 200 times: by 20 steps."""
    layer = make_layer(dtype, how)
    layer.load_tables({"t": np.ones((ROWS, DIM), np.float32)})
    step = 2.0 ** -HALVES[dtype][0]
    gradient = np.full((ROWS, DIM), -0.1 * step / RATE, np.float32)
    run = tf.function(lambda: train(layer, np.arange(ROWS), gradient))
    for _ in range(200):
        run()
    steps = (rows_of(layer) - 1) / step
    if how == "nearest":
        assert not steps.any()
    else:
        # Each of 520 numbers moves by 20 steps, with a variance of 18.
        assert abs(steps.mean() - 20) < 5 * np.sqrt(18 / steps.size)
        assert 2 < steps.std() < 6


@pytest.mark.parametrize("dtype", HALVES)
@BOTH_IMPLEMENTATIONS
def test_rounding_is_unbiased_and_keeps_what_has_no_number(dtype):
    rng = np.random.default_rng(0)
    _, least, largest = HALVES[dtype]
    values = rng.normal(size=64).astype(np.float32)
    values[:16] *= 2.0 ** (least + 1) if dtype == "float16" else 1.0
    number = 4000
    how = rounding.Rounding(True, 5)
    rows = tf.constant(np.tile(values, (number, 1)))
    found = rounding.narrow(
        rows,
        tf.as_dtype(dtype),
        how,
        tf.constant(3, tf.int64),
        tf.range(number),
    )
    found = tf.cast(found, tf.float64).numpy()
    # Each is one of the two numbers beside its value.
    for j, value in enumerate(values):
        low, *rest = np.unique(found[:, j])
        assert len(rest) == 1 and low < value < rest[0]
        share = (float(value) - low) / (rest[0] - low)
        deviation = (rest[0] - low) * np.sqrt(share * (1 - share) / number)
        assert abs(found[:, j].mean() - value) < 5 * deviation
    special = tf.constant(
        [[0.0, -0.0, np.inf, -np.inf, np.nan, largest, -largest, 3.4e38]]
    )
    kept = rounding.narrow(
        special, tf.as_dtype(dtype), how, tf.constant(0, tf.int64), [0]
    )
    nearest = tf.cast(special, dtype)
    np.testing.assert_array_equal(
        tf.cast(kept, tf.float32), tf.cast(nearest, tf.float32)
    )


@BOTH_IMPLEMENTATIONS
def test_columns_and_rows_are_not_rounded_alike():
    """Their random bits, 16 of which bfloat16 takes, don't go together."""
    number, dim = 20_000, 48
    bits = rounding.random_bits(
        rounding.Rounding(True, 5),
        tf.constant(3, tf.int64),
        tf.range(number),
        dim,
    )
    shares = bits.numpy() // 2**16 / 2**16
    assert abs(shares.mean() - 0.5) < 5 / np.sqrt(12 * shares.size)
    # By chance, a correlation deviates from 0 by number^-1/2.
    for table in (shares, shares.reshape(-1, 50 * dim).T):
        together = np.corrcoef(table, rowvar=False)
        np.fill_diagonal(together, 0.0)
        assert np.abs(together).max() < 6 / np.sqrt(len(table))


@BOTH_IMPLEMENTATIONS
def test_training_again_gives_the_same_table_and_another_name_another():
    def trained():
        layer = make_layer("bfloat16")
        for _ in range(3):
            train(layer, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        return rows_of(layer)

    np.testing.assert_array_equal(trained(), trained())
    assert rounding.seed_of("t") != rounding.seed_of("u")


@pytest.mark.parametrize(
    ("saved", "restored"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_tables_grow_from_another_dtype(tmp_path, saved, restored):
    source = make_layer(saved, optimizer="adagrad", rows=ROWS - 7)
    train(source, np.arange(9), np.ones((9, DIM), np.float32))
    path = tf.train.Checkpoint(layer=source).save(str(tmp_path / "c"))
    target = make_layer(restored, optimizer="adagrad")
    initial = rows_of(target)
    with tfrs_embed.checkpoint.growing_tables():
        tf.train.Checkpoint(layer=target).restore(path).assert_consumed()
    expected = tf.cast(tf.cast(rows_of(source), restored), tf.float32)
    np.testing.assert_array_equal(rows_of(target)[: ROWS - 7], expected)
    np.testing.assert_array_equal(rows_of(target)[ROWS - 7 :], initial[-7:])
    train(target, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))


@pytest.mark.parametrize(
    ("saved", "restored"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32")],
)
def test_checkpoints_move_between_dtypes(tmp_path, saved, restored):
    source = make_layer(saved, optimizer="adagrad")
    train(source, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    path = tf.train.Checkpoint(layer=source).save(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)
    [key] = [
        k for k in reader.get_variable_to_shape_map() if "t/parameters" in k
    ]
    assert reader.get_variable_to_dtype_map()[key] == saved
    target = make_layer(restored, optimizer="adagrad")
    tf.train.Checkpoint(layer=target).restore(path).assert_consumed()
    expected = tf.cast(tf.cast(rows_of(source), restored), tf.float32)
    np.testing.assert_array_equal(rows_of(target), expected)
    np.testing.assert_array_equal(
        target.tables["t"].slots["accumulators"],
        source.tables["t"].slots["accumulators"],
    )


def model_of(layer):
    inputs = keras.Input([], dtype="int64", name="f")
    return keras.Model(inputs, layer(inputs))


@pytest.mark.parametrize("dtype", HALVES)
def test_files_of_keras_hold_them_to_the_bit(tmp_path, dtype):
    layer = make_layer(dtype, optimizer="adagrad")
    model = model_of(layer)
    train(layer, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    model.save(str(tmp_path / "m.keras"))
    loaded = keras.models.load_model(str(tmp_path / "m.keras")).layers[-1]
    model.save_weights(str(tmp_path / "m.weights.h5"))
    restored, wide = (
        make_layer(dtype, optimizer="adagrad"),
        make_layer("float32", optimizer="adagrad"),
    )
    for each in (restored, wide):
        model_of(each).load_weights(str(tmp_path / "m.weights.h5"))
    for other in (loaded, restored, wide):
        expected = "float32" if other is wide else dtype
        assert other.embedding_tables["t"].dtype == expected
        np.testing.assert_array_equal(rows_of(other), rows_of(layer))
        np.testing.assert_array_equal(
            other.tables["t"].slots["accumulators"],
            layer.tables["t"].slots["accumulators"],
        )
    # From here on all train alike: their steps are stored, too.
    for each in (layer, loaded, restored):
        train(each, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        np.testing.assert_array_equal(rows_of(each), rows_of(layer))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_command_line_shows_and_converts_them(tmp_path, dtype, capsys):
    layer = make_layer(dtype, optimizer="adagrad")
    train(layer, np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    assert checkpoint_command(["inspect", path, "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    parameters = table["columns"]["parameters"]
    assert (parameters["dtype"], parameters["bytes"]) == (dtype, 2 * ROWS * DIM)
    norm = np.linalg.norm(rows_of(layer))
    assert parameters["norm"] == pytest.approx(norm, rel=1e-6)
    assert table["columns"]["accumulators"]["dtype"] == "float32"
    new = str(tmp_path / "new")
    assert checkpoint_command(["convert", path, new, "--layer", "other"]) == 0
    assert f"parameters ({dtype}), accumulators" in capsys.readouterr().out
    reader = tf.train.load_checkpoint(new)
    key = "other/tables/t/parameters/.ATTRIBUTES/VARIABLE_VALUE"
    assert reader.get_variable_to_dtype_map()[key] == dtype
    target = make_layer(dtype, optimizer="adagrad")
    tf.train.Checkpoint(other=target).restore(new).assert_consumed()
    np.testing.assert_array_equal(rows_of(target), rows_of(layer))


@pytest.mark.parametrize("rows", [None, "float32", "bfloat16", "int8"])
def test_an_export_has_the_tables_own_dtype_or_what_is_asked(tmp_path, rows):
    layer = make_layer("bfloat16")
    model = model_of(layer)
    serving.export(model, str(tmp_path / "m"), rows=rows)
    served = tf.saved_model.load(str(tmp_path / "m"))
    ids = tf.range(ROWS, dtype=tf.int64)
    atol = 0.01 if rows == "int8" else 0
    np.testing.assert_allclose(
        served.serve(ids), rows_of(layer), rtol=0, atol=atol
    )
    variables = tf.train.load_checkpoint(
        str(tmp_path / "m/variables/variables")
    )
    types = set(variables.get_variable_to_dtype_map().values())
    assert tf.as_dtype(rows or "bfloat16") in types


def test_a_layers_config_keeps_dtype_and_rounding():
    layer = make_layer("float16", "nearest")
    again = type(layer).from_config(layer.get_config())
    again.build(None)
    assert again.embedding_tables["t"].dtype == tf.float16
    [table] = again._spec.tables
    assert (table.dtype, table.rounding) == ("float16", "nearest")


@pytest.mark.parametrize(
    "given", [tf.bfloat16, "bfloat16", tf.bfloat16.as_numpy_dtype]
)
def test_a_dtype_may_be_any_librarys(given):
    table = tfrs_embed.TableConfig("t", 9, 4, dtype=given)
    assert table.dtype == "bfloat16" == tf.bfloat16


def test_dtypes_that_are_not_available_are_errors():
    with pytest.raises(ValueError, match=r"'t': dtype must be one of .*'int8'"):
        tfrs_embed.TableConfig("t", 9, 4, dtype="int8")
    with pytest.raises(ValueError, match="rounding must be one of"):
        tfrs_embed.TableConfig("t", 9, 4, rounding="up")
    with pytest.raises(ValueError, match="not available to a table with keys"):
        tfrs_embed.TableConfig(
            "t", 9, 4, dtype="float16", keys=tfrs_embed.DynamicKeys()
        )
    small = tfrs_embed.TableConfig("t", 9, 4, dtype="float16")
    with pytest.raises(
        ValueError, match=r"'t': dtype='float16' .* Keras layer"
    ):
        layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", small), "sgd", size_threshold=100
        )
