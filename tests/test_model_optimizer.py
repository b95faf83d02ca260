"""What of a model's optimizer reaches tables, and what doesn't."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers, only_keras_2
from process_tiers import on
from tfrs_embed.optimizers import FollowLearningRate, Regularized

pytestmark = on("keras:3")

tpu = tf.tpu.experimental.embedding
new = keras.optimizers
SCHEDULE = new.schedules.PiecewiseConstantDecay([0, 1, 2], [8.0, 4.0, 2.0, 1.0])
IDS, LABELS = np.arange(8)[:, None] % 4, np.zeros([8, 1], np.float32)


def make_model(optimizer, compiled, **options):
    """A model of the tables "a" and "b", and its layer."""
    tables = [
        tfrs_embed.TableConfig("a", 4, 3, optimizer=optimizer),
        tfrs_embed.TableConfig("b", 4, 3, optimizer="sgd"),
    ]
    layer = layers.PartialTPUEmbedding(
        {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables},
        None,
        size_threshold=0,
    )
    ids = keras.Input((1,), dtype="int64")
    found = layer({"a": ids, "b": ids})
    outputs = keras.layers.Dense(1)(
        keras.layers.Concatenate()(list(found.values()))
    )
    model = keras.Model(ids, outputs)
    model.compile(compiled, "mse", **options)
    return model, layer


def fit(model, callbacks=(), **options):
    options = {"batch_size": 4, "epochs": 2, **options}
    model.fit(IDS, LABELS[:, None], verbose=0, callbacks=callbacks, **options)


class Rates(keras.callbacks.Callback):
    """Notes the rates of a layer's tables after each batch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.rates = {"a": [], "b": []}

    def on_train_batch_end(self, batch, logs=None):
        for name, optimizer in self.layer.table_optimizers.items():
            self.rates[name].append(round(optimizer.learning_rate, 6))


# What doesn't reach tables.

UNREACHED = {
    "clipnorm": ("sgd", {"clipnorm": 1.5}, ["a", "b"]),
    "clipvalue": ("sgd", {"clipvalue": 1.5}, ["a", "b"]),
    "global_clipnorm": ("sgd", {"global_clipnorm": 1.5}, ["a", "b"]),
    "weight_decay": ("sgd", {"weight_decay": 1.5}, ["a", "b"]),
    "use_ema": ("sgd", {"use_ema": True}, ["a", "b"]),
    "of_one_table": (
        Regularized("sgd", clipvalue=0.5),
        {"clipnorm": 1.5},
        ["b"],
    ),
    "another": (
        Regularized("sgd", weight_decay=0.5),
        {"clipnorm": 1.5},
        ["a", "b"],
    ),
}
if keras.__name__ == "keras":
    UNREACHED["accumulation"] = (
        "sgd",
        {"gradient_accumulation_steps": 2},
        ["a", "b"],
    )


@pytest.mark.parametrize("name", UNREACHED)
def test_a_setting_that_does_not_reach_tables_is_said_once(name):
    optimizer, settings, tables = UNREACHED[name]
    model, _ = make_model(optimizer, new.SGD(0.1, **settings))
    with pytest.warns(UserWarning, match="optimizers of their own") as caught:
        fit(model)
        fit(model)
    [message] = [
        str(w.message) for w in caught if "of their own" in str(w.message)
    ]
    [(setting, value)] = settings.items()
    assert f"{setting}={value!r} of the model's optimizer" in message
    assert f"tables {tables}" in message


def test_a_setting_behind_a_loss_scale_is_said():
    scaled = keras.mixed_precision.LossScaleOptimizer(new.Adam(clipnorm=1.5))
    model, _ = make_model("sgd", scaled)
    with pytest.warns(UserWarning, match=r"without clipnorm=1\.5"):
        fit(model)


@pytest.mark.parametrize(
    ("optimizer", "compiled"),
    [
        (lambda: "adam", lambda: new.SGD(0.1)),
        (
            lambda: Regularized("sgd", row_clipnorm=1.0, weight_decay=0.1),
            lambda: new.AdamW(0.1, clipnorm=1.0),
        ),
    ],
    ids=["nothing_is_set", "tables_have_it"],
)
def test_nothing_is_said_where_tables_lack_nothing(optimizer, compiled):
    table = tfrs_embed.TableConfig("t", 4, 3, optimizer=optimizer())
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table), None, size_threshold=0
    )
    ids = keras.Input((1,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(compiled(), "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model)


# A rate that follows the model's.


def test_tables_follow_a_schedule_of_the_models_optimizer():
    model, layer = make_model("adagrad", new.Adam(SCHEDULE))
    seen = Rates(layer)
    fit(model, [FollowLearningRate(0.5), seen])
    assert seen.rates == {name: [4.0, 2.0, 1.0, 0.5] for name in "ab"}


def test_tables_follow_a_rate_that_callbacks_set():
    model, layer = make_model(new.Adam(0.1), new.SGD(0.5))
    seen = Rates(layer)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0**-epoch)
    fit(model, [FollowLearningRate(), scheduler, seen])
    assert seen.rates == {name: [1.0, 1.0, 0.5, 0.5] for name in "ab"}


def test_tables_follow_a_rate_that_a_plateau_lowers():
    model, layer = make_model("adagrad", new.SGD(0.5))
    seen = Rates(layer)
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", 0.5, patience=1, min_delta=1e9
    )
    fit(model, [FollowLearningRate(2.0), plateau, seen], epochs=3)
    assert seen.rates["a"] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_the_rates_of_several_steps_of_one_execution_are_the_firsts():
    model, layer = make_model("sgd", new.SGD(SCHEDULE), steps_per_execution=2)
    seen = Rates(layer)
    fit(model, [FollowLearningRate(), seen])
    assert seen.rates["a"] == [8.0, 2.0]


def test_tables_follow_an_optimizer_that_scales_the_loss():
    scaled = keras.mixed_precision.LossScaleOptimizer(new.SGD(SCHEDULE))
    model, layer = make_model("sgd", scaled)
    seen = Rates(layer)
    fit(model, [FollowLearningRate(), seen])
    assert seen.rates["a"] == [8.0, 4.0, 2.0, 1.0]


@only_keras_2("Keras 3 has no legacy optimizers")
def test_tables_follow_a_legacy_optimizer_that_decays():
    model, layer = make_model("sgd", new.legacy.SGD(1.0, decay=1.0))
    seen = Rates(layer)
    fit(model, [FollowLearningRate(), seen], epochs=1)
    assert seen.rates["a"] == [1.0, 0.5]


def test_a_table_that_has_the_models_optimizer_follows_anyway():
    optimizer = new.SGD(0.5)
    model, layer = make_model(optimizer, optimizer)
    seen = Rates(layer)
    fit(model, [FollowLearningRate(), seen], epochs=1)
    assert seen.rates == {"a": [0.5, 0.5], "b": [0.5, 0.5]}
    with pytest.raises(ValueError, match=r"table 'a'.*can't be 2\.0 times"):
        fit(model, [FollowLearningRate(2.0)])


def test_a_rate_that_is_computed_is_an_error_that_changes_nothing():
    model, layer = make_model(tpu.SGD(SCHEDULE), new.SGD(0.5))
    with pytest.raises(ValueError, match=r"table 'a': a schedule"):
        fit(model, [FollowLearningRate()])
    assert layer.table_optimizers["b"].learning_rate == pytest.approx(0.01)
    assert int(layer.step) == 0


def test_a_model_without_such_tables_is_an_error():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has no layer with tables"):
        fit(model, [FollowLearningRate()])


@pytest.mark.parametrize(
    ("factor", "error"),
    [(0, ValueError), (float("inf"), ValueError), ("1", TypeError)],
)
def test_a_factor_that_is_none_is_an_error(factor, error):
    with pytest.raises(error, match="FollowLearningRate: factor must be"):
        FollowLearningRate(factor)
