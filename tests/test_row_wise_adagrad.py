"""Row-wise Adagrad: FBGEMM's numbers, slots of one number for each row.

That it is the reference's formula is what the conformance tests say.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from tfrs_embed.testing import EmulatedTPUStrategy

import fbgemm_trajectory
import tfrs_embed
from keras_under_test import keras, layer_of_one_table, layers, only_keras_2
from process_tiers import on
from reference import Ragged, to_tf
from tfrs_embed import DynamicKeys, checkpoint
from tfrs_embed.optimizers import RowWiseAdagrad
from training_helpers import assert_same, state, train
from training_helpers import checkpoint_command as main

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding


def make_layer(
    optimizer, rows=6, dim=4, kind=layers.PartialTPUEmbedding, **table
):
    table = {"combiner": "sum", **table}
    layer = layer_of_one_table(optimizer, rows, dim, table, kind)
    if kind is layers.PartialTPUEmbedding:
        layer.build(None)
    return layer


def trained(*arguments, **options):
    """The same after two steps."""
    layer = make_layer(*arguments, **options)
    for ids in ([0, 1, 1], [3, 0, 4]):
        train(layer, tf.constant(ids, tf.int64), tf.ones([3, 4]) * 0.5)
    return layer


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_table_goes_where_fbgemms_goes(graph):
    there = json.loads(fbgemm_trajectory.FILE.read_text())
    layer = make_layer(
        RowWiseAdagrad(
            there["learning_rate"],
            there["initial_accumulator_value"],
            there["epsilon"],
        ),
        *np.shape(there["parameters"]),
    )
    layer.embedding_tables["t"].assign(there["parameters"])
    step = tf.function(train, reduce_retracing=True) if graph else train
    for expected in there["steps"]:
        gradients = tf.constant(expected["gradients"])
        step(layer, to_tf(Ragged(expected["ids"])), gradients)
        found = state(layer)
        for name in ("parameters", "accumulators"):
            # It adds squares up in another order.
            np.testing.assert_allclose(
                found[f"t/{name}"], expected[name], rtol=2e-6, atol=2e-7
            )


# Settings.


@on("keras:3", tier="more", when=lambda arguments: "learning_rate" in arguments)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, r"learning_rate must.*-1\.0"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate must.*'fast'"),
        ({"epsilon": -1e-8}, ValueError, "epsilon must be at least 0.*-1e-08"),
        ({"epsilon": None}, TypeError, "epsilon must be a number, got None"),
        (
            {"initial_accumulator_value": float("nan")},
            ValueError,
            "initial_accumulator_value must.*nan",
        ),
        (
            {"epsilon": 0},
            ValueError,
            "initial_accumulator_value or epsilon must be above 0",
        ),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(arguments, error, message):
    with pytest.raises(error, match=rf"RowWiseAdagrad: {message}"):
        RowWiseAdagrad(**arguments)


@on("keras:3", tier="more")
def test_a_layers_config_has_the_rate_that_was_assigned():
    layer = trained(RowWiseAdagrad(0.3, epsilon=1e-3))
    layer.table_optimizers["t"].learning_rate = 0.125
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config).table_optimizers["t"]
    assert again.learning_rate == 0.125
    assert again.rule == layer.table_optimizers["t"].rule


@on("keras:3", tier="more")
def test_two_tables_that_share_it_share_its_rate():
    optimizer = RowWiseAdagrad(tf.Variable(0.5))
    layer = layers.PartialTPUEmbedding(
        [
            tfrs_embed.FeatureConfig(
                name, tfrs_embed.TableConfig(name, 6, 4, optimizer=optimizer)
            )
            for name in "ab"
        ],
        None,
        size_threshold=0,
    )
    first, second = layer.table_optimizers.values()
    assert first is second
    optimizer.learning_rate.assign(0.25)
    assert first.learning_rate == 0.25


# Slots.


@on("keras:3", tier="more")
def test_copies_and_files_have_a_number_for_each_row(tmp_path):
    layer = trained("row_wise_adagrad")
    before = state(layer)
    assert before["t/accumulators"].shape == (6,)
    inputs = keras.Input([], dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    for name in ("model.keras", "model.weights.h5"):
        path = str(tmp_path / name)
        if name.endswith("keras"):
            model.save(path)
            loaded = keras.models.load_model(path).layers[-1]
        else:
            model.save_weights(path)
            loaded = make_layer("row_wise_adagrad")
            keras.Model(inputs, loaded(inputs)).load_weights(path)
        assert_same(state(loaded), before)


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("here", "rows", "text"),
    [
        ("adagrad", 6, "accumulators have the shape .* One has a number for"),
        ("adam", 6, "Table 't': the file has no momenta of it"),
        ("row_wise_adagrad", 7, r"parameters have the shape \(7, 4\) here"),
    ],
)
def test_files_of_another_optimizer_change_nothing(tmp_path, here, rows, text):
    path = str(tmp_path / "model.weights.h5")
    inputs = keras.Input([], dtype="int64")
    saved = trained("row_wise_adagrad")
    keras.Model(inputs, saved(inputs)).save_weights(path)
    layer = trained(here, rows=rows)
    before = state(layer)
    with pytest.raises(ValueError, match=text):
        keras.Model(inputs, layer(inputs)).load_weights(path)
    assert_same(state(layer), before)


def test_a_checkpoint_of_fewer_rows_begins_the_others(tmp_path):
    path = tf.train.Checkpoint(layer=trained("row_wise_adagrad")).save(
        str(tmp_path / "c")
    )
    larger = make_layer(RowWiseAdagrad(0.1, 0.75), rows=8)
    with checkpoint.growing_tables():
        tf.train.Checkpoint(layer=larger).restore(path)
    slots = state(larger)["t/accumulators"]
    np.testing.assert_array_equal(slots[6:], [0.75, 0.75])
    np.testing.assert_allclose(slots[:4], [0.5, 1.0, 0.0, 0.25])


@pytest.mark.parametrize("keys", [None, DynamicKeys()], ids=["ids", "keys"])
@pytest.mark.parametrize("there", ["adagrad", "row_wise_adagrad"])
def test_adagrads_slot_is_not_taken_for_it_nor_the_reverse(
    there, keys, tmp_path
):
    here = {"adagrad": "row_wise_adagrad"}.get(there, "adagrad")
    saved, layer = trained(there, keys=keys), trained(here, keys=keys)
    path = tf.train.Checkpoint(layer=saved).save(str(tmp_path / "c"))
    before = state(layer)
    with pytest.raises(ValueError, match="One has a number for each row") as e:
        tf.train.Checkpoint(layer=layer).restore(path)
    assert "t/accumulators" in str(e.value)
    rows = 6 if keys is None else 4
    for shape in ([rows, 4], [rows]):
        assert f"{shape} here" in str(e.value) or f"{shape} there" in str(
            e.value
        )
    assert_same(state(layer), before)


def test_keys_that_come_and_go_have_accumulators_of_their_own(tmp_path):
    keys = DynamicKeys(when_full="grow", eviction="lru")
    layer = make_layer(RowWiseAdagrad(0.1, 0.5), rows=2, keys=keys)
    many = tf.range(3000, dtype=tf.int64) * 7
    train(layer, many, tf.ones([3000, 4]))
    train(layer, many[:1], 2 * tf.ones([1, 4]))
    table = layer.tables["t"]
    expected = np.full(3000, 1.5)
    expected[0] += 4.0
    np.testing.assert_allclose(table.slots["accumulators"], expected)
    table.remove(many[:2])
    train(layer, many[:2], tf.ones([2, 4]))  # They begin anew.
    expected[:2] = 1.5
    np.testing.assert_allclose(table.slots["accumulators"], expected)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    again = make_layer("row_wise_adagrad", rows=2, keys=keys)
    tf.train.Checkpoint(layer=again).restore(path).assert_consumed()
    assert_same(state(again), state(layer))


def test_the_converter_takes_it_along(tmp_path, capsys):
    layer = trained("row_wise_adagrad")
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    main(["convert", path, str(tmp_path / "own")])
    again = make_layer("row_wise_adagrad")
    tf.train.Checkpoint(layer=again).restore(str(tmp_path / "own"))
    assert_same(state(again), state(layer))
    capsys.readouterr()
    main(["inspect", path, "--json"])
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert table["columns"]["accumulators"]["shape"] == [6]


# Where there is none.


@only_keras_2("it has no TPUs")
def test_a_tpu_is_an_error_that_names_table_and_optimizer():
    strategy = EmulatedTPUStrategy((1, 4))
    message = "Table 't': TPUs don't have the update rule RowWiseAdagrad"
    with strategy.scope(), pytest.raises(ValueError, match=message):
        make_layer(RowWiseAdagrad())
    table = tfrs_embed.TableConfig("t", 6, 4, optimizer=RowWiseAdagrad())
    with pytest.raises(ValueError, match=message):
        tfrs_embed.sparsecore.compute_limits(
            [[0, 1]],
            tfrs_embed.FeatureConfig("f", table),
            (1, 4),
            progress=False,
        )
    feature = tpu.FeatureConfig(
        tpu.TableConfig(6, 4, name="t"), output_shape=[4]
    )
    with pytest.raises(ValueError, match="RowWiseAdagrad is an unsupported"):
        tfrs_embed.TPUEmbeddingV2(feature, RowWiseAdagrad(), topology=(1, 4))


def test_a_plan_cuts_no_table_that_it_trains_into_columns():
    def feature(placement):
        table = tfrs_embed.TableConfig("t", 10**6, 128, placement=placement)
        return tfrs_embed.FeatureConfig("f", table)

    plans = {
        name: tfrs_embed.plan(
            feature("auto"), 4, replicas=4, batch_size=512, optimizer=name
        )
        for name in ("adagrad", "row_wise_adagrad")
    }
    assert plans["row_wise_adagrad"].tables[0].bytes == 10**6 * 129 * 4
    with pytest.raises(ValueError, match=r"Table 't'.*column.*RowWiseAdagrad"):
        tfrs_embed.plan(
            feature("column"),
            4,
            replicas=4,
            batch_size=512,
            optimizer="row_wise_adagrad",
        )
