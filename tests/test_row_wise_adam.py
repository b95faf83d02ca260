"""Row-wise Adam: FBGEMM's numbers, and slots of two shapes.

The conformance tests compare it with the reference on every engine.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from tfrs_embed.testing import EmulatedTPUStrategy

import tfrs_embed
from keras_under_test import keras, layer_of_one_table, layers, only_keras_2
from process_tiers import on
from tfrs_embed import DynamicKeys, checkpoint
from tfrs_embed.optimizers import Regularized, RowWiseAdam
from training_helpers import assert_same, state, train
from training_helpers import checkpoint_command as main

pytestmark = on("keras:3", tier="nightly")

ROWS, DIM = 6, 20
IDS = ([0, 1, 3], [3, 0, 4], [1, 3, 5], [0, 4, 3])


def make_layer(optimizer="row_wise_adam", rows=ROWS, dim=DIM, **table):
    layer = layer_of_one_table(optimizer, rows, dim, table)
    layer.build(None)
    return layer


def gradients(seed):
    return np.random.default_rng(seed).normal(size=(3, DIM)).astype(np.float32)


def trained(*arguments, **options):
    """A layer after two steps."""
    layer = make_layer(*arguments, **options)
    for seed, ids in enumerate(IDS[:2]):
        train(layer, tf.constant(ids, tf.int64), tf.constant(gradients(seed)))
    return layer


class PartialRowWiseAdam:
    """The CUDA code of FBGEMM's partial_rowwise_adam, in numpy.

    It is written from fbgemm_gpu/codegen/genscript/optimizers.py, with the
    accumulators in float32, as there. `iter` counts from 1.
    """

    def __init__(self, weights):
        self.weights = np.array(weights, np.float32)
        self.momentum1 = np.zeros_like(self.weights)
        self.momentum2 = np.zeros(len(self.weights), np.float32)
        self.iter = 0

    def step(self, ids, grads, lr, beta1, beta2, eps, weight_decay):
        self.iter += 1
        for idx, grad in zip(ids, grads, strict=True):
            g_avg_square = np.sum(grad * grad) / np.float32(len(grad))
            v_t = g_avg_square * (1.0 - beta2)
            v_t += self.momentum2[idx] * beta2
            self.momentum2[idx] = v_t
            v_hat_t = v_t / (1.0 - beta2**self.iter)
            m_t = self.momentum1[idx] * beta1 + grad * (1.0 - beta1)
            self.momentum1[idx] = m_t
            self.weights[idx] -= lr * (
                m_t / (1.0 - beta1**self.iter) / (np.sqrt(v_hat_t) + eps)
                + weight_decay * self.weights[idx]
            )


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
@pytest.mark.parametrize("settings", [(0.9, 0.999, 1e-8), (0.5, 0.75, 0.125)])
def test_a_table_goes_where_fbgemms_goes(settings, weight_decay):
    optimizer = RowWiseAdam(0.25, *settings)
    if weight_decay:
        optimizer = Regularized(optimizer, weight_decay=weight_decay)
    layer = make_layer(optimizer)
    there = PartialRowWiseAdam(layer.embedding_tables["t"].numpy())
    step = tf.function(train, reduce_retracing=True)
    for seed, ids in enumerate(IDS):
        given = gradients(seed) * (seed != 1)  # The second is of zeros.
        step(layer, tf.constant(ids), tf.constant(given))
        there.step(ids, given, 0.25, *settings, weight_decay)
        found = state(layer)
        for name, value in {
            "parameters": there.weights,
            "momenta": there.momentum1,
            "velocities": there.momentum2,
        }.items():
            np.testing.assert_allclose(
                found[f"t/{name}"], value, rtol=2e-6, atol=2e-6
            )
    assert found["t/velocities"][3] > 0  # In all steps.
    np.testing.assert_array_equal(found["t/momenta"][2], np.zeros(DIM))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, r"learning_rate must.*-1\.0"),
        ({"beta_1": 1.0}, ValueError, r"beta_1 must be in \[0, 1\), got 1\.0"),
        ({"beta_1": -0.1}, ValueError, r"beta_1 must be in .* got -0\.1"),
        ({"beta_2": "0.9"}, TypeError, "beta_2 must be a number, got '0.9'"),
        ({"beta_2": float("nan")}, ValueError, "beta_2 must be finite.*nan"),
        ({"epsilon": 0}, ValueError, "epsilon must be above 0, got 0"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(arguments, error, message):
    with pytest.raises(error, match=rf"RowWiseAdam: {message}"):
        RowWiseAdam(**arguments)


@pytest.mark.usefixtures("both_implementations")
def test_a_beta_of_0_keeps_nothing():
    layer = make_layer(RowWiseAdam(0.5, 0.0, 0.0))
    before = layer.embedding_tables["t"].numpy()
    train(layer, tf.constant([2]), tf.fill([1, DIM], 4.0))
    found = state(layer)
    np.testing.assert_allclose(found["t/parameters"][2], before[2] - 0.5)
    np.testing.assert_array_equal(found["t/momenta"][2], np.full(DIM, 4.0))
    np.testing.assert_array_equal(found["t/velocities"], [0, 0, 16, 0, 0, 0])


# Slots.


@on("keras:3", tier="more")
def test_copies_and_files_have_slots_of_both_shapes(tmp_path):
    layer = trained()
    before = state(layer)
    assert before["t/momenta"].shape == (ROWS, DIM)
    assert before["t/velocities"].shape == (ROWS,)
    inputs = keras.Input([], dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    for name in ("model.keras", "model.weights.h5"):
        path = str(tmp_path / name)
        if name.endswith("keras"):
            model.save(path)
            loaded = keras.models.load_model(path).layers[-1]
        else:
            model.save_weights(path)
            loaded = make_layer()
            keras.Model(inputs, loaded(inputs)).load_weights(path)
        assert_same(state(loaded), before)


@pytest.mark.parametrize("keys", [None, DynamicKeys()], ids=["ids", "keys"])
def test_a_checkpoint_continues_with_the_number_of_updates(keys, tmp_path):
    layer = trained(keys=keys)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    again = make_layer(keys=keys)
    tf.train.Checkpoint(layer=again).restore(path).assert_consumed()
    for each in (layer, again):
        train(each, tf.constant(IDS[0], tf.int64), tf.constant(gradients(9)))
    assert_same(state(again), state(layer))


def test_a_checkpoint_of_fewer_rows_begins_the_others(tmp_path):
    layer = trained()
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    larger = make_layer(rows=8)
    with checkpoint.growing_tables():
        tf.train.Checkpoint(layer=larger).restore(path)
    found, before = state(larger), state(layer)
    for name in ("momenta", "velocities"):
        value = found[f"t/{name}"]
        np.testing.assert_array_equal(value[:ROWS], before[f"t/{name}"])
        assert not value[ROWS:].any()


@pytest.mark.parametrize(
    ("there", "here"), [("adam", "row_wise_adam"), ("row_wise_adam", "adam")]
)
def test_adams_velocities_are_not_taken_for_it_nor_the_reverse(
    there, here, tmp_path
):
    saved, layer = trained(there), trained(here)
    path = tf.train.Checkpoint(layer=saved).save(str(tmp_path / "c"))
    before = state(layer)
    with pytest.raises(ValueError, match="One has a number for each row") as e:
        tf.train.Checkpoint(layer=layer).restore(path)
    assert "t/velocities" in str(e.value)
    assert_same(state(layer), before)


def test_the_converter_takes_it_along(tmp_path, capsys):
    layer = trained()
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    main(["convert", path, str(tmp_path / "own")])
    again = make_layer()
    tf.train.Checkpoint(layer=again).restore(str(tmp_path / "own"))
    assert_same(state(again), state(layer))
    capsys.readouterr()
    main(["inspect", path, "--json"])
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert table["columns"]["momenta"]["shape"] == [ROWS, DIM]
    assert table["columns"]["velocities"]["shape"] == [ROWS]


# Where there is none.


@only_keras_2("it has no TPUs")
def test_a_tpu_is_an_error_that_names_table_and_optimizer():
    message = "Table 't': TPUs don't have the update rule RowWiseAdam"
    strategy = EmulatedTPUStrategy((1, 4))
    with strategy.scope(), pytest.raises(ValueError, match=message):
        make_layer(RowWiseAdam())


def test_a_plan_counts_both_slots_and_cuts_no_table_into_columns():
    def plan(placement):
        table = tfrs_embed.TableConfig("t", 10**6, 128, placement=placement)
        return tfrs_embed.plan(
            tfrs_embed.FeatureConfig("f", table),
            4,
            replicas=4,
            batch_size=512,
            optimizer="row_wise_adam",
        )

    assert plan("auto").tables[0].bytes == 10**6 * (128 + 128 + 1) * 4
    with pytest.raises(ValueError, match=r"Table 't'.*column.*RowWiseAdam"):
        plan("column")


def test_it_is_a_layers_own_optimizer_with_the_rate_that_was_assigned():
    layer = trained(RowWiseAdam(0.3, beta_2=0.75))
    layer.table_optimizers["t"].learning_rate = 0.125
    config = json.loads(json.dumps(layer.get_config()))
    again = layers.PartialTPUEmbedding.from_config(config)
    assert again.table_optimizers["t"].learning_rate == 0.125
    assert again.table_optimizers["t"].rule == layer.table_optimizers["t"].rule
