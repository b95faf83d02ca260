"""Models that are moving averages of other models."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from layers_by_place import DIM, ROWS
from process_tiers import on
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig
from training_helpers import state

pytestmark = on("keras:3", tier="more")


def make_model(strategy, units=1, freeze=False, **options):
    """A model of a large table, a small one, and dense variables."""
    tables = [
        TableConfig("t", ROWS, DIM, "uniform", **options),
        TableConfig("small", 5, DIM, "uniform"),
    ]
    with strategy.scope():
        layer = layers.PartialTPUEmbedding(
            {t.name: FeatureConfig(t.name, t) for t in tables},
            optimizer="adagrad",
            size_threshold=10,
        )
        ids = {
            t.name: keras.Input([], name=t.name, dtype="int64") for t in tables
        }
        x = keras.layers.Concatenate()(list(layer(ids).values()))
        hidden = keras.layers.Dense(3, trainable=not freeze)
        x = keras.layers.BatchNormalization()(hidden(x))
        inner = keras.Sequential([keras.layers.Dense(units)])
        model = keras.Model(ids, inner(x))
    return model, layer


def dense(model):
    """The kernels, and the statistics of batches, in float64."""
    norm, hidden = (
        next(x for x in model.layers if isinstance(x, kind))
        for kind in (keras.layers.BatchNormalization, keras.layers.Dense)
    )
    found = {
        "hidden": hidden.kernel,
        "inner": model.layers[-1].layers[-1].kernel,
        "gamma": norm.gamma,
        "mean": norm.moving_mean,
    }
    return {k: np.asarray(v).astype(np.float64) for k, v in found.items()}


def values_of(model, layer):
    rows = {k: v for k, v in state(layer).items() if "parameters" in k}
    return {
        **{k: v.astype(np.float64) for k, v in rows.items()},
        **dense(model),
    }


def blend(before, after, rate):
    return {
        k: v if k == "mean" else rate * before[k] + (1 - rate) * v
        for k, v in after.items()
    }


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, atol=1e-5, rtol=1e-5, err_msg=name
        )


BATCH = (
    {"t": np.array([3, 7, 3, 9]), "small": np.array([1, 2, 1, 4])},
    np.arange(4.0, dtype=np.float32)[:, None],
)


@on("mirrored:2", tier="more", when=lambda every: every == 3)
@pytest.mark.parametrize("every", [1, 3])
def test_a_callback_averages_a_model(strategy, every):
    model, layer = make_model(strategy)
    average, averaged = make_model(strategy, freeze=True)
    tfrs_embed.assign_moving_average(average, model, 0.0)
    start = values_of(model, layer)
    for name, value in values_of(average, averaged).items():
        np.testing.assert_array_equal(value, start[name])
    slots = state(averaged)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: seen.append(
            values_of(model, layer)
        )
    )
    keep = tfrs_embed.MovingAverageCallback(average, 0.75, every)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensors(BATCH).repeat(4)
    model.fit(data, epochs=2, verbose=0, callbacks=[note, keep])
    assert len(seen) == 8
    assert np.abs(seen[-1]["mean"]).max() > 0
    for values in seen[every - 1 :: every]:
        start = blend(start, values, 0.75)
    assert_close(values_of(average, averaged), start)
    for name, value in state(averaged).items():
        if "parameters" not in name:
            np.testing.assert_array_equal(value, slots[name])


def test_a_model_of_keys_is_copied():
    strategy = tf.distribute.get_strategy()
    model, layer = make_model(strategy, keys=DynamicKeys())
    average, averaged = make_model(strategy, keys=DynamicKeys())
    layer.tables["t"].assign([7, 10**12], np.ones([2, DIM], np.float32))
    tfrs_embed.assign_moving_average(average, model, 0.0)
    assert averaged.tables["t"].keys().tolist() == [7, 10**12]
    assert_close(values_of(average, averaged), values_of(model, layer))


def test_models_that_do_not_match():
    strategy = tf.distribute.get_strategy()
    model, layer = make_model(strategy)
    before = values_of(model, layer)
    average = tfrs_embed.assign_moving_average
    wide, _ = make_model(strategy, units=2)
    keyed, _ = make_model(strategy, keys=DynamicKeys())
    plain = keras.Sequential([keras.layers.Dense(1)])
    plain.build((None, 2))
    for other, message in (
        (wide, r"is float32 of the shape \(3, 1\), .* float32 of \(3, 2\)"),
        (keyed, "Table 't': the other table has another shape or keys"),
        (plain, "the layers of tables are"),
        (model, "both are one model"),
    ):
        with pytest.raises(ValueError, match=message):
            average(model, other, 0.5)
    short = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    short.build((None, 2))
    with pytest.raises(ValueError, match="beside tables they have 2 and 1"):
        average(plain, short, 0.5)
    with pytest.raises(TypeError, match="models of Keras, got 3"):
        average(model, 3, 0.5)
    for rate, error in ((1.5, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="rate must be"):
            average(model, wide, rate)
        with pytest.raises(error, match="MovingAverageCallback: rate must"):
            tfrs_embed.MovingAverageCallback(model, rate)
    with pytest.raises(ValueError, match="every_steps must be an integer"):
        tfrs_embed.MovingAverageCallback(model, 0.5, 0)
    # Before the first step.
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors(BATCH)
    with pytest.raises(ValueError, match="can't be the average of"):
        model.fit(
            data,
            verbose=0,
            callbacks=[tfrs_embed.MovingAverageCallback(wide, 0.5)],
        )
    assert_close(values_of(model, layer), before)
