"""What becomes a table optimizer, and that it trains as its original does."""

import copy
import inspect
import itertools
import json
import math

import keras as keras_3
import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import (
    NUMBER,
    keras,
    layer_of_one_table,
    layers,
    of_keras_2,
)
from process_tiers import nightly, on, with_kernels, without_kernels
from tfrs_embed.optimizers import (
    Regularized,
    RowWiseAdagrad,
    RowWiseAdam,
    conversion,
)
from tfrs_embed.optimizers import rules as rules
from tfrs_embed.optimizers.conversion import convert
from tfrs_embed.optimizers.options import UpdateOptions
from training_helpers import assert_unchanged, state, train
from update_rules import CASES

BOTH_IMPLEMENTATIONS = pytest.mark.usefixtures("both_implementations")

pytestmark = on("keras:3", tier="nightly")

tpu = tf.tpu.experimental.embedding
new, legacy = keras.optimizers, keras.optimizers.legacy
schedules = keras.optimizers.schedules
MODULES = {"new": new, "legacy": legacy}

BOTH_MODES = pytest.mark.parametrize(
    "graph", [False, True], ids=["eager", "graph"]
)


def make_layer(optimizer, rows=4, dim=3, table_optimizer=None, **kwargs):
    table = {"optimizer": table_optimizer}
    return layer_of_one_table(optimizer, rows, dim, table, **kwargs)


class Probe:
    """Trains a row with the gradient 1 by SGD, and tells the rate it took."""

    def __init__(self, optimizer, graph, **kwargs):
        self.layer = make_layer(optimizer, rows=1, dim=1, **kwargs)
        self.table = self.layer.embedding_tables["t"]
        self._step = tf.function(self._train) if graph else self._train

    def _train(self):
        train(self.layer, tf.constant([0]), tf.ones([1, 1]))

    def rate(self):
        """Makes a step and returns its learning rate."""
        self.table.assign([[0.0]])
        self._step()
        return -self.table.numpy().item()


# What is accepted.

FORMS = {
    "sgd": (lambda: "sgd", rules.SGD(), 0.01),
    "adagrad": (lambda: "adagrad", rules.Adagrad(), 0.001),
    "adagrad_momentum": (
        lambda: "adagrad_momentum",
        rules.AdagradMomentum(),
        0.001,
    ),
    "adam": (lambda: "adam", rules.Adam(), 0.001),
    "ftrl": (lambda: "ftrl", rules.FTRL(), 0.001),
    "Adam": (lambda: "Adam", rules.Adam(), 0.001),
    "row_wise_adagrad": (
        lambda: "row_wise_adagrad",
        rules.RowWiseAdagrad(),
        0.01,
    ),
    "RowWiseAdagrad": (
        lambda: RowWiseAdagrad(0.3, 0.2, epsilon=1e-3),
        rules.RowWiseAdagrad(0.2, 1e-3),
        0.3,
    ),
    "row_wise_adam": (lambda: "row_wise_adam", rules.RowWiseAdam(), 0.01),
    "RowWiseAdam": (
        lambda: RowWiseAdam(0.3, 0.7, beta_2=0.8, epsilon=1e-3),
        rules.RowWiseAdam(0.7, 0.8, 1e-3),
        0.3,
    ),
    "tpu_sgd": (lambda: tpu.SGD(0.3), rules.SGD(), 0.3),
    "tpu_sgd_not_accumulated": (
        lambda: tpu.SGD(0.3, use_gradient_accumulation=False),
        rules.SGD(),
        0.3,
    ),
    "tpu_adagrad": (
        lambda: tpu.Adagrad(0.3, initial_accumulator_value=0.2),
        rules.Adagrad(0.2),
        0.3,
    ),
    "new_adamw": (
        lambda: new.AdamW(0.3),
        rules.Adam(sum_inside_sqrt=False),
        0.3,
    ),
    "tpu_adagrad_momentum": (
        lambda: tpu.AdagradMomentum(
            0.3,
            momentum=0.8,
            use_nesterov=True,
            exponent=3,
            beta2=0.9,
            epsilon=1e-3,
        ),
        rules.AdagradMomentum(0.8, True, 3.0, 0.9, 1e-3),
        0.3,
    ),
    "tpu_adam": (
        lambda: tpu.Adam(
            0.3, beta_1=0.7, beta_2=0.8, epsilon=1e-3, sum_inside_sqrt=False
        ),
        rules.Adam(0.7, 0.8, 1e-3, sum_inside_sqrt=False),
        0.3,
    ),
    "tpu_ftrl": (
        lambda: tpu.FTRL(
            0.3,
            learning_rate_power=-0.6,
            l1_regularization_strength=0.1,
            l2_regularization_strength=0.2,
            beta=0.4,
            initial_accumulator_value=0.5,
            multiply_linear_by_learning_rate=True,
        ),
        rules.FTRL(-0.6, 0.1, 0.2, 0.4, 0.5, True),
        0.3,
    ),
    "new_adagrad": (
        # sqrt(a + epsilon) is sqrt(a) of a larger initial accumulator.
        lambda: new.Adagrad(0.3, initial_accumulator_value=0.25, epsilon=0.5),
        rules.Adagrad(0.75),
        0.3,
    ),
    "new_rmsprop": (
        lambda: new.RMSprop(0.3, rho=0.8, epsilon=1e-3),
        rules.RMSprop(0.8, 1e-3),
        0.3,
    ),
    "legacy_adagrad": (
        lambda: legacy.Adagrad(0.3, initial_accumulator_value=0.25),
        rules.Adagrad(0.25),
        0.3,
    ),
    **{
        f"{name}_sgd": (lambda m=module: m.SGD(0.3), rules.SGD(), 0.3)
        for name, module in MODULES.items()
    },
    **{
        f"{name}_momentum": (
            lambda m=module: m.SGD(0.3, momentum=0.8, nesterov=True),
            rules.Momentum(0.8, nesterov=True),
            0.3,
        )
        for name, module in MODULES.items()
    },
    **{
        f"{name}_adam": (
            lambda m=module: m.Adam(0.3, beta_1=0.7, beta_2=0.8, epsilon=1e-3),
            rules.Adam(0.7, 0.8, 1e-3, sum_inside_sqrt=False),
            0.3,
        )
        for name, module in MODULES.items()
    },
    **{
        f"{name}_ftrl": (
            lambda m=module: m.Ftrl(
                0.3,
                learning_rate_power=-0.6,
                l1_regularization_strength=0.1,
                l2_regularization_strength=0.2,
                beta=0.4,
                initial_accumulator_value=0.5,
            ),
            rules.FTRL(-0.6, 0.1, 0.2, 0.4, 0.5),
            0.3,
        )
        for name, module in MODULES.items()
    },
    **{
        f"{name}_loss_scaled": (
            lambda m=module: keras.mixed_precision.LossScaleOptimizer(
                m.SGD(0.3)
            ),
            rules.SGD(),
            0.3,
        )
        for name, module in MODULES.items()
    },
}


@on("keras:3", tier="more")
@pytest.mark.parametrize("form", FORMS)
def test_an_accepted_form_becomes_its_rule_and_rate(form):
    make, rule, rate = FORMS[form]
    optimizer = convert(make(), "Table 't'")
    assert optimizer.rule == rule
    assert optimizer.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_stored_as_json_becomes_the_same_rule_and_rate(form):
    make, rule, rate = FORMS[form]
    stored = json.loads(json.dumps(conversion.serialize(make())))
    optimizer = convert(
        conversion.deserialize(stored, keras, "Table 't'"), "Table 't'"
    )
    assert optimizer.rule == rule
    assert optimizer.learning_rate == pytest.approx(rate)


# What comes before a rule.

OPTIONS = {
    "new_clipvalue": (
        lambda: new.Adam(0.1, clipvalue=0.5),
        UpdateOptions((-0.5, 0.5)),
    ),
    "new_clipnorm": (
        lambda: new.Ftrl(0.1, clipnorm=0.5),
        UpdateOptions(clipnorm=0.5),
    ),
    "new_global_clipnorm": (
        lambda: new.RMSprop(0.1, global_clipnorm=0.5),
        UpdateOptions(global_clipnorm=0.5),
    ),
    "new_weight_decay": (
        lambda: new.SGD(0.1, weight_decay=0.5),
        UpdateOptions(weight_decay=0.5),
    ),
    "new_adamw": (lambda: new.AdamW(0.1), UpdateOptions(weight_decay=0.004)),
    "legacy_clipnorm": (
        lambda: legacy.SGD(0.1, clipnorm=0.5),
        UpdateOptions(clipnorm=0.5),
    ),
    "loss_scaled_clipnorm": (
        lambda: keras.mixed_precision.LossScaleOptimizer(
            new.SGD(0.1, clipnorm=0.5)
        ),
        UpdateOptions(clipnorm=0.5),
    ),
    **{
        f"tpu_{kind.__name__}_clipvalue": (
            lambda kind=kind: kind(0.1, clipvalue=0.5),
            UpdateOptions((-0.5, 0.5)),
        )
        for kind in (
            tpu.SGD,
            tpu.Adagrad,
            tpu.AdagradMomentum,
            tpu.Adam,
            tpu.FTRL,
        )
    },
    "tpu_one_sided_clipvalue": (
        lambda: tpu.SGD(0.1, clipvalue=(None, 0.5)),
        UpdateOptions((None, 0.5)),
    ),
    "regularized_name": (
        lambda: Regularized("adam", row_clipnorm=0.5),
        UpdateOptions(row_clipnorm=0.5),
    ),
    "regularized_ours": (
        lambda: Regularized(
            RowWiseAdagrad(0.1), clipvalue=(-0.5, 0.25), weight_decay=0.25
        ),
        UpdateOptions((-0.5, 0.25), weight_decay=0.25),
    ),
    "regularized_rows": (
        lambda: Regularized(RowWiseAdam(0.1), max_norm=2, row_clipnorm=0.5),
        UpdateOptions(row_clipnorm=0.5, max_norm=2.0),
    ),
}


@pytest.mark.parametrize("form", OPTIONS)
def test_options_are_taken_and_are_part_of_the_config(form):
    make, options = OPTIONS[form]
    layer = make_layer(make())
    assert layer.table_optimizers["t"].options == options
    layer.table_optimizers["t"].learning_rate = 0.0625
    config = json.loads(json.dumps(layer.get_config()))
    again = layers.PartialTPUEmbedding.from_config(config)
    optimizer = again.table_optimizers["t"]
    assert optimizer.options == options
    assert optimizer.rule == layer.table_optimizers["t"].rule
    assert optimizer.learning_rate == 0.0625
    assert again.get_config() == config


BAD_OPTIONS = {
    "two_clips": (
        lambda: Regularized("sgd", clipvalue=1.0, clipnorm=2.0),
        ValueError,
        r"clipvalue=1\.0 and clipnorm=2\.0; give only one",
    ),
    "of_its_own": (
        lambda: Regularized(new.SGD(0.1, clipnorm=2.0), weight_decay=1.0),
        ValueError,
        r"has {'clipnorm': 2\.0} of its own; give all to Regularized",
    ),
    "zero": (
        lambda: Regularized("sgd", row_clipnorm=0),
        ValueError,
        "row_clipnorm must be above 0, got 0",
    ),
    "zero_rows": (
        lambda: Regularized("sgd", max_norm=0.0),
        ValueError,
        r"Regularized: max_norm must be above 0, got 0\.0",
    ),
    "rows_of_no_number": (
        lambda: Regularized("sgd", max_norm=True),
        TypeError,
        "Regularized: max_norm must be a number, got True",
    ),
    "infinite_rows": (
        lambda: Regularized("sgd", max_norm=math.inf),
        ValueError,
        "Regularized: max_norm must be finite, got inf",
    ),
    "negative": (
        lambda: Regularized("sgd", weight_decay=-0.5),
        ValueError,
        r"weight_decay must be at least 0, got -0\.5",
    ),
    "negative_of_keras": (
        lambda: new.SGD(0.1, clipnorm=-1.0),
        ValueError,
        r"SGD: clipnorm must be above 0, got -1\.0",
    ),
    "infinite": (
        lambda: Regularized("sgd", clipnorm=math.inf),
        ValueError,
        "clipnorm must be finite, got inf",
    ),
    "wrong_order": (
        lambda: Regularized("sgd", clipvalue=(1.0, -1.0)),
        ValueError,
        "clipvalue's low must not exceed high",
    ),
    "no_limit": (
        lambda: Regularized("sgd", clipvalue=(None, None)),
        ValueError,
        r"clipvalue must be a number or a pair \(low, high\)",
    ),
    "no_number": (
        lambda: Regularized("sgd", clipnorm="1"),
        TypeError,
        "clipnorm must be a number, got '1'",
    ),
    "no_option": (
        lambda: Regularized("sgd"),
        ValueError,
        "needs one of .*'row_clipnorm'",
    ),
    "no_optimizer": (
        lambda: Regularized(None, clipnorm=1.0),
        TypeError,
        "needs an optimizer or its name, got None",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_an_error_that_shows_it(name):
    make, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=message):
        make_layer(make())


@BOTH_MODES
@BOTH_IMPLEMENTATIONS
def test_a_global_norm_is_of_all_tables_that_share_the_optimizer(graph):
    optimizer = Regularized(tpu.SGD(1.0), global_clipnorm=1.0)
    tables = [
        tfrs_embed.TableConfig(
            name, 4, 2, initializer="zeros", optimizer=own, combiner="sum"
        )
        for name, own in {
            "a": optimizer,
            "b": optimizer,
            "c": Regularized(tpu.SGD(1.0), clipnorm=1.0),
            "d": tpu.SGD(1.0),
        }.items()
    ]
    layer = layers.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig(t.name, t) for t in tables],
        None,
        size_threshold=0,
    )
    ids = [tf.constant([1, 1]), tf.constant([2, 0]), *[tf.constant([0, 3])] * 2]
    gradients = [
        # Row 1 has the sum, [3, 0].
        tf.constant([[1.0, 0.0], [2.0, 0.0]]),
        tf.constant([[0.0, 4.0], [0.0, 0.0]]),
        tf.constant([[6.0, 0.0], [0.0, 8.0]]),
        tf.constant([[6.0, 0.0], [0.0, 8.0]]),
    ]
    step = tf.function(train) if graph else train
    step(layer, ids, gradients)
    found = {k: v.numpy() for k, v in layer.embedding_tables.items()}
    expected = {name: np.zeros([4, 2]) for name in "abcd"}
    expected["a"][1] = [-0.6, 0]
    expected["b"][2] = [0, -0.8]
    expected["c"][[0, 3]] = [[-0.6, 0], [0, -0.8]]
    expected["d"][[0, 3]] = [[-6, 0], [0, -8]]
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, atol=1e-6, err_msg=name)


@BOTH_IMPLEMENTATIONS
def test_only_rows_of_the_step_decay_whatever_their_gradient():
    layer = make_layer(Regularized(tpu.SGD(0.5), weight_decay=0.5))
    before = layer.embedding_tables["t"].numpy()
    train(layer, tf.constant([1, 3]), tf.zeros([2, 3]))
    expected = before * [[1], [0.75], [1], [0.75]]
    np.testing.assert_allclose(layer.embedding_tables["t"], expected, rtol=1e-6)


@BOTH_MODES
@BOTH_IMPLEMENTATIONS
def test_rows_of_the_step_end_with_the_largest_norm(graph):
    """As FBGEMM's post-update step of EXACT_ROWWISE_ADAGRAD for GPUs."""
    layer = make_layer(Regularized(RowWiseAdagrad(0.5), max_norm=2.0))
    rows = [[0.0, 3.0, 4.0], [0.0, 6.0, 8.0], [0.5, 0.0, 0.0], [9.0, 0.0, 0.0]]
    layer.embedding_tables["t"].assign(rows)
    gradients = np.float32([[1, 0, 0], [0, 0, 0], [0, 2, 0]])
    step = tf.function(train) if graph else train
    step(layer, tf.constant([0, 1, 2]), tf.constant(gradients))
    expected = np.array(rows)
    for row, g in enumerate(gradients):
        multiplier = 0.5 / (np.sqrt(np.mean(g * g)) + 1e-8)
        weight = expected[row] - multiplier * g
        norm = np.sqrt(np.sum(weight * weight))
        expected[row] = weight * (2.0 / norm if norm > 2.0 else 1.0)
    # Row 1 has a gradient of zeros, row 2 is short enough, row 3 is not used.
    norms = np.linalg.norm(expected, axis=1)
    np.testing.assert_allclose(norms[[0, 1, 3]], [2, 2, 9])
    np.testing.assert_allclose(layer.embedding_tables["t"], expected, rtol=1e-6)
    accumulators = state(layer)["t/accumulators"]
    np.testing.assert_allclose(accumulators, [1 / 3, 0, 4 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@BOTH_IMPLEMENTATIONS
def test_rows_of_two_bytes_are_limited_and_round_once(dtype):
    table = tfrs_embed.TableConfig(
        "t", 4, 3, "ones", dtype=dtype, rounding="nearest"
    )
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table),
        Regularized(tpu.SGD(0.5), max_norm=0.7),
        size_threshold=0,
    )
    train(layer, tf.range(4), tf.fill([4, 3], 0.3))
    row = np.full([4, 3], 0.85, np.float32)
    expected = tf.cast(row * (0.7 / np.sqrt(3 * 0.85**2)), dtype)
    np.testing.assert_array_equal(
        tf.cast(layer.embedding_tables["t"], tf.float32),
        tf.cast(expected, tf.float32),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@BOTH_IMPLEMENTATIONS
def test_rows_of_two_bytes_decay_and_round_once(dtype):
    table = tfrs_embed.TableConfig(
        "t",
        4,
        3,
        initializer=keras.initializers.RandomNormal(seed=1),
        dtype=dtype,
        rounding="nearest",
    )
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table),
        Regularized(tpu.SGD(0.5), weight_decay=0.25, clipvalue=0.5),
        size_threshold=0,
    )
    before = tf.cast(layer.embedding_tables["t"], tf.float32)
    train(layer, tf.range(4), tf.fill([4, 3], 2.0))
    expected = tf.cast(before - 0.125 * before - 0.25, dtype)
    np.testing.assert_array_equal(
        tf.cast(layer.embedding_tables["t"], tf.float32),
        tf.cast(expected, tf.float32),
    )


@pytest.mark.parametrize("where", ["table", "layer", "regularized"])
def test_a_config_of_keras_is_no_optimizer(where):
    config = keras.optimizers.serialize(new.Adam())
    with pytest.raises(
        TypeError, match=r"got a dict.*keras\.optimizers\.deserialize\(config\)"
    ):
        if where == "table":
            tfrs_embed.TableConfig("t", 4, 3, optimizer=config)
        elif where == "layer":
            make_layer(config)
        else:
            make_layer(Regularized(config, clipvalue=1.0))


def test_from_config_leaves_a_schedule_in_its_argument_alone():
    config = make_layer(
        tpu.SGD(SCHEDULE), table_optimizer=new.Adam(SCHEDULE)
    ).get_config()
    kept = copy.deepcopy(config)
    layers.PartialTPUEmbedding.from_config(config)
    assert config == kept


# What a Keras optimizer does to a table is what it does to a variable.

SCHEDULE = schedules.ExponentialDecay(0.3, decay_steps=2, decay_rate=0.5)
KERAS = {
    "sgd": lambda m: m.SGD(0.3),
    "sgd_scheduled": lambda m: m.SGD(SCHEDULE),
    "sgd_momentum": lambda m: m.SGD(0.3, momentum=0.8),
    "sgd_nesterov": lambda m: m.SGD(0.3, momentum=0.8, nesterov=True),
    "sgd_nesterov_alone": lambda m: m.SGD(0.3, nesterov=True),
    "sgd_momentum_scheduled": lambda m: m.SGD(SCHEDULE, momentum=0.8),
    "adagrad": lambda m: m.Adagrad(0.3, initial_accumulator_value=0.2),
    "adagrad_scheduled": lambda m: m.Adagrad(SCHEDULE),
    "adam": lambda m: m.Adam(0.1),
    "adam_settings": lambda m: m.Adam(
        0.1, beta_1=0.7, beta_2=0.8, epsilon=1e-2
    ),
    "adam_scheduled": lambda m: m.Adam(SCHEDULE),
    "ftrl": lambda m: m.Ftrl(0.3),
    "ftrl_beta": lambda m: m.Ftrl(0.3, beta=0.4),
    "ftrl_l1": lambda m: m.Ftrl(0.3, l1_regularization_strength=0.5),
    "ftrl_l2": lambda m: m.Ftrl(0.3, l2_regularization_strength=0.5),
    "ftrl_all": lambda m: m.Ftrl(
        0.3,
        learning_rate_power=-0.6,
        initial_accumulator_value=0.4,
        l1_regularization_strength=0.2,
        l2_regularization_strength=0.3,
        beta=0.4,
    ),
    "ftrl_scheduled": lambda m: m.Ftrl(SCHEDULE, beta=0.4),
}
OF_KERAS = {
    f"{name}_case": (kind.keras, settings)
    for name, (rule, settings) in CASES.items()
    if (kind := getattr(rules, rule)).keras is not None
    and {*settings} <= {*inspect.signature(getattr(new, kind.keras)).parameters}
}
ORIGINALS = {
    **{
        f"{module}_{name}": (
            lambda m=MODULES[module], make=KERAS[name]: make(m)
        )
        for module, name in itertools.product(MODULES, KERAS)
    },
    # Each case of a rule that Keras has settings for.
    **{
        f"new_{name}": lambda kind=kind, named=named: getattr(new, kind)(
            0.1, **named
        )
        for name, (kind, named) in OF_KERAS.items()
    },
    "new_adagrad_epsilon": lambda: new.Adagrad(0.3, epsilon=0.1),
    "new_rmsprop": lambda: new.RMSprop(0.3),
    "new_rmsprop_settings": lambda: new.RMSprop(0.3, rho=0.8, epsilon=0.1),
    "new_rmsprop_scheduled": lambda: new.RMSprop(SCHEDULE),
    **{
        f"{name}_{setting}": (
            lambda m=m, kind=kind, given=given: getattr(m, kind)(0.3, **given)
        )
        for name, m in MODULES.items()
        for setting, (kind, given) in {
            "clipvalue": ("Adagrad", {"clipvalue": 0.25}),
            "clipnorm": ("SGD", {"momentum": 0.8, "clipnorm": 0.5}),
            "global_clipnorm": ("Adam", {"global_clipnorm": 0.5}),
        }.items()
    },
    "new_weight_decay": lambda: new.Adam(0.3, weight_decay=0.5),
    "new_weight_decay_scheduled": lambda: new.SGD(SCHEDULE, weight_decay=0.5),
    "new_adamw": lambda: new.AdamW(0.3, weight_decay=0.5, clipnorm=0.5),
    "legacy_sgd_decay": lambda: legacy.SGD(0.3, decay=0.5),
    "legacy_adagrad_decay": lambda: legacy.Adagrad(0.3, decay=0.5),
    "legacy_adam_decay": lambda: legacy.Adam(0.3, decay=0.5),
    "legacy_ftrl_decay": lambda: legacy.Ftrl(0.3, decay=0.5),
    "legacy_sgd_scheduled_decay": lambda: legacy.SGD(SCHEDULE, decay=0.5),
}


def assert_trains_as(original, make, graph=False):
    """Trains a table and a variable, each row in every step, and compares."""
    layer = make_layer(make())
    variable = tf.Variable(layer.embedding_tables["t"])
    rng = np.random.default_rng(0)
    step = tf.function(train) if graph else train
    start = variable.numpy()
    for _ in range(5):
        order = rng.permutation(variable.shape[0])
        gradient = rng.normal(size=variable.shape).astype(np.float32)
        # Each row is looked up twice; its gradient is the sum of both.
        step(
            layer,
            tf.constant([order, order]),
            tf.stack([0.25 * gradient[order], 0.75 * gradient[order]]),
        )
        original.apply_gradients([(tf.constant(gradient), variable)])
    assert not np.allclose(variable, start, atol=1e-2)
    np.testing.assert_allclose(
        layer.embedding_tables["t"], variable, rtol=1e-5, atol=1e-6
    )


@on("keras:3", tier="more")
@nightly(without_kernels)
@pytest.mark.parametrize("name", ORIGINALS)
@BOTH_IMPLEMENTATIONS
def test_a_keras_optimizer_trains_a_table_as_it_trains_a_variable(name):
    make = ORIGINALS[name]
    assert_trains_as(make(), make)


@on("keras:3", tier="more", when=with_kernels)
@pytest.mark.parametrize(
    "name", ["new_adam_scheduled", "legacy_adam_decay", "legacy_ftrl_all"]
)
@BOTH_IMPLEMENTATIONS
def test_a_keras_optimizer_trains_alike_in_a_function(name):
    make = ORIGINALS[name]
    assert_trains_as(make(), make, graph=True)


def test_a_loss_scale_optimizer_trains_as_its_inner_optimizer():
    assert_trains_as(
        new.Adam(0.1),
        lambda: keras.mixed_precision.LossScaleOptimizer(new.Adam(0.1)),
    )


@BOTH_IMPLEMENTATIONS
def test_rows_that_are_not_looked_up_keep_values_and_slots():
    layer = make_layer(new.Adam(0.1))
    train(layer, tf.constant([0, 1, 2, 3]), tf.ones([4, 3]))
    before = state(layer)
    train(layer, tf.constant([1]), tf.ones([1, 3]))
    after = state(layer)
    for name in ("t/parameters", "t/momenta", "t/velocities"):
        changed = (before[name] != after[name]).all(axis=1)
        np.testing.assert_array_equal(changed, [False, True, False, False])


@pytest.mark.parametrize("nesterov", [False, True])
@BOTH_IMPLEMENTATIONS
def test_momentum_is_that_of_keras_legacy_sgd_with_sparse_gradients(nesterov):
    def make():
        return legacy.SGD(0.3, momentum=0.8, nesterov=nesterov)

    layer, original = make_layer(make()), make()
    variable = tf.Variable(layer.embedding_tables["t"])
    for ids in ([0, 2], [2, 3], [0, 2]):
        gradient = tf.random.normal([2, 3], seed=1)
        train(layer, tf.constant(ids), gradient)
        sparse = tf.IndexedSlices(gradient, ids, [4, 3])
        original.apply_gradients([(sparse, variable)])
    table = layer.embedding_tables["t"]
    np.testing.assert_allclose(table, variable, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        state(layer)["t/momenta"],
        original.get_slot(variable, "momentum"),
        rtol=1e-5,
        atol=1e-6,
    )


# What is refused.


def _excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


class OwnSGD(new.SGD):
    """A subclass, whose update could be anything."""


REFUSED_SETTINGS = {
    **{
        f"{name}_{setting}": (make, setting)
        for name, m in MODULES.items()
        for setting, make in {
            "amsgrad": lambda m=m: m.Adam(0.1, amsgrad=True),
            "momentum": lambda m=m: m.RMSprop(0.1, momentum=0.9),
            "centered": lambda m=m: m.RMSprop(0.1, centered=True),
            "l2_shrinkage_regularization_strength": lambda m=m: m.Ftrl(
                0.1, l2_shrinkage_regularization_strength=0.1
            ),
        }.items()
    },
    "excluded_from_weight_decay": (
        lambda: _excluding(new.Adam(0.1, weight_decay=0.01)),
        "exclude_from_weight_decay",
    ),
    "new_use_ema": (lambda: new.SGD(0.1, use_ema=True), "use_ema"),
    "legacy_epsilon": (lambda: legacy.Adagrad(0.1, epsilon=1e-3), "epsilon"),
    # It is added to the root, not under it.
    "legacy_rmsprop": (lambda: legacy.RMSprop(0.1), "epsilon"),
    "legacy_gradient_transformers": (
        lambda: legacy.SGD(0.1, gradient_transformers=[lambda pairs: pairs]),
        "gradient_transformers",
    ),
    "loss_scaled_use_ema": (
        lambda: keras.mixed_precision.LossScaleOptimizer(
            new.SGD(0.1, use_ema=True)
        ),
        "use_ema",
    ),
    "momentum_with_use_ema": (
        lambda: new.SGD(0.1, momentum=0.9, use_ema=True),
        "use_ema",
    ),
    **{
        f"tpu_{kind.__name__}_{setting}": (
            lambda kind=kind, setting=setting, value=value: kind(
                0.1, **{setting: value}
            ),
            setting,
        )
        for kind in (
            tpu.SGD,
            tpu.Adagrad,
            tpu.AdagradMomentum,
            tpu.Adam,
            tpu.FTRL,
        )
        for setting, value in {
            "clip_weight_min": -1.0,
            "clip_weight_max": 1.0,
            "weight_decay_factor": 0.01,
        }.items()
    },
    "tpu_lazy_adam": (lambda: tpu.Adam(0.1, lazy_adam=False), "lazy_adam"),
    **{
        f"tpu_{kind.__name__}_{setting}": (
            lambda kind=kind, setting=setting, value=value: kind(
                0.1, **{setting: value}
            ),
            setting,
        )
        for kind in (tpu.Adagrad, tpu.AdagradMomentum, tpu.Adam, tpu.FTRL)
        for setting, value in {
            "use_gradient_accumulation": False,
            "slot_variable_creation_fn": lambda *args: {},
        }.items()
    },
}


if NUMBER == 3:
    REFUSED_SETTINGS["accumulation"] = (
        lambda: new.SGD(0.1, gradient_accumulation_steps=2),
        "gradient_accumulation_steps",
    )


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_a_setting_that_no_rule_honours_is_an_error_that_names_it(name):
    make, setting = REFUSED_SETTINGS[name]
    with pytest.raises(ValueError, match=rf"Table 't': .*\b{setting}=") as e:
        make_layer(None, table_optimizer=make())
    # What it was given for, what it is.
    assert type(getattr(make(), "inner_optimizer", make())).__name__ in str(
        e.value
    )


def test_one_of_several_such_settings_is_named_with_its_own_value():
    optimizer = new.Adam(0.1, amsgrad=True, use_ema=True)
    with pytest.raises(ValueError, match=r"amsgrad=True|use_ema=True"):
        make_layer(None, table_optimizer=optimizer)


REFUSED_KINDS = {
    **{
        kind: lambda kind=kind: getattr(new, kind)(0.1)
        for kind in ("Adadelta", "Adamax", "Lion", "Nadam")
        if kind not in {rule.keras for rule in rules.RULES}
    },
    "OwnSGD": lambda: OwnSGD(0.1),
    "OwnAdagrad": lambda: type("OwnAdagrad", (tpu.Adagrad,), {})(0.1),
    "float": lambda: 0.1,
}
if NUMBER == 2:
    import tensorflow_recommenders as tfrs

    REFUSED_KINDS |= {
        "Keras 3": lambda: keras_3.optimizers.Adam(0.1),
        "CompositeOptimizer": lambda: (
            tfrs.experimental.optimizers.CompositeOptimizer(
                [(legacy.SGD(0.1), list)]
            )
        ),
    }
if hasattr(tpu, "CustomOptimizer"):  # Not in TF 2.16.
    REFUSED_KINDS["CustomOptimizer"] = lambda: tpu.CustomOptimizer(
        tf.function(lambda: None)
    )


@on("keras:3", tier="more")
@pytest.mark.parametrize("name", REFUSED_KINDS)
def test_another_optimizer_is_an_error_that_names_it(name):
    with pytest.raises(TypeError, match="PartialTPUEmbedding's optimizer") as e:
        make_layer(REFUSED_KINDS[name]())
    assert name.split()[-1] in str(e.value)


@pytest.mark.parametrize("kind", [tpu.FTRL, new.Ftrl, legacy.Ftrl, new.RMSprop])
def test_an_optimizer_class_is_an_error_that_asks_for_an_instance(kind):
    with pytest.raises(TypeError, match=rf"class {kind.__name__}\b"):
        make_layer(kind)


@pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
@pytest.mark.parametrize("own", [False, True], ids=["layer's", "table's"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(own, threshold):
    with pytest.raises(ValueError, match=r"'adamax'.*'adagrad_momentum'"):
        table = tfrs_embed.TableConfig(
            "t", 4, 3, optimizer="adamax" if own else None
        )
        layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table),
            "sgd" if own else "adamax",
            size_threshold=threshold,
        )


# Learning rates.


@BOTH_MODES
def test_a_number_is_the_rate_of_every_step(graph):
    probe = Probe(tpu.SGD(0.5), graph)
    assert [probe.rate() for _ in range(3)] == [0.5, 0.5, 0.5]


@BOTH_MODES
def test_a_variable_is_read_at_each_step(graph):
    rate = tf.Variable(0.5)
    probe = Probe(tpu.SGD(rate), graph)
    assert probe.rate() == 0.5
    rate.assign(0.25)
    assert probe.rate() == 0.25


@BOTH_MODES
def test_a_callable_that_returns_a_tensor_is_called_at_each_step(graph):
    half = tf.Variable(0.25)
    probe = Probe(tpu.SGD(lambda: 2.0 * half), graph)
    assert probe.rate() == 0.5
    half.assign(0.5)
    assert probe.rate() == 1.0


@BOTH_MODES
@pytest.mark.parametrize("number", [float, int, np.float64])
def test_a_callable_that_returns_a_number_is_called_at_each_step(number, graph):
    rates = {"now": number(2)}
    probe = Probe(tpu.SGD(lambda: rates["now"]), graph)
    assert probe.rate() == 2.0
    rates["now"] = number(1)
    assert probe.rate() == 1.0


@on("keras:3", tier="more")
@BOTH_MODES
def test_a_legacy_keras_optimizers_callable_is_called_at_each_step(graph):
    rates = {"now": 0.5}
    probe = Probe(legacy.SGD(lambda: rates["now"]), graph)
    assert probe.rate() == 0.5
    rates["now"] = 0.25
    assert probe.rate() == 0.25


@BOTH_MODES
@pytest.mark.parametrize(
    "make", [tpu.SGD, new.SGD, legacy.SGD], ids=["tpu", "new", "legacy"]
)
def test_a_schedule_advances_once_a_step(make, graph):
    probe = Probe(
        make(schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])), graph
    )
    assert [probe.rate() for _ in range(4)] == [4.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "make", [tpu.SGD, new.SGD, legacy.SGD], ids=["tpu", "new", "legacy"]
)
def test_a_scheduled_rate_that_is_read_is_that_of_the_next_step(make):
    probe = Probe(
        make(schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])), False
    )
    for rate in (4.0, 2.0, 1.0):
        assert probe.layer.table_optimizers["t"].learning_rate == rate
        assert probe.rate() == rate


def test_a_schedule_advances_once_a_step_however_many_tables_it_serves():
    optimizer = new.SGD(
        schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])
    )
    # More than are updated together.
    tables = [
        tfrs_embed.TableConfig(f"t{i}", 1, 1, initializer="zeros")
        for i in range(34)
    ]
    layer = layers.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig("f", t) for t in (*tables, *tables)],
        optimizer,
        size_threshold=0,
    )
    ids = [tf.constant([0])] * 68
    total = 0.0
    for rate in (4.0, 2.0, 1.0):
        train(layer, ids, [tf.ones([1, 1])] * 68)
        total -= 2 * rate  # Two features a table.
        for table in layer.embedding_tables.values():
            assert table.numpy().item() == total


@BOTH_MODES
def test_a_legacy_decay_advances_once_a_step(graph):
    probe = Probe(legacy.SGD(1.0, decay=1.0), graph)
    assert [probe.rate() for _ in range(3)] == pytest.approx([1, 1 / 2, 1 / 3])


@on("keras:3", tier="more")
@BOTH_MODES
@pytest.mark.parametrize(
    "make",
    [
        new.SGD,
        legacy.SGD,
        lambda rate: keras.mixed_precision.LossScaleOptimizer(new.SGD(rate)),
    ],
    ids=["new", "legacy", "loss_scaled"],
)
def test_assigning_a_keras_optimizers_rate_takes_effect(make, graph):
    optimizer = make(0.5)
    probe = Probe(optimizer, graph)
    assert probe.rate() == 0.5
    optimizer.learning_rate = 0.25
    assert probe.rate() == 0.25
    assert probe.layer.table_optimizers["t"].learning_rate == 0.25


ASSIGNABLE = {
    "name": lambda: "sgd",
    "number": lambda: tpu.SGD(0.5),
    "variable": lambda: tpu.SGD(tf.Variable(0.5)),
    "new": lambda: new.SGD(0.5),
    "legacy": lambda: legacy.SGD(0.5),
    "decayed": lambda: legacy.SGD(0.5, decay=1e-9),
}


@BOTH_MODES
@pytest.mark.parametrize("form", ASSIGNABLE)
def test_assigning_a_table_optimizers_rate_takes_effect(form, graph):
    probe = Probe(ASSIGNABLE[form](), graph)
    probe.rate()
    optimizer = probe.layer.table_optimizers["t"]
    optimizer.learning_rate = 0.125
    assert optimizer.learning_rate == 0.125
    assert probe.rate() == pytest.approx(0.125)


@on("keras:3", tier="more")
@pytest.mark.parametrize("module", MODULES)
def test_assigning_a_table_optimizers_rate_assigns_the_keras_optimizers(module):
    optimizer = MODULES[module].SGD(0.5)
    layer = make_layer(optimizer)
    layer.table_optimizers["t"].learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25


def test_assigning_a_keras_adams_rate_keeps_its_bias_correction():
    optimizer, original = new.Adam(0.1), new.Adam(0.1)
    layer = make_layer(optimizer)
    variable = tf.Variable(layer.embedding_tables["t"])
    for rate in (0.1, 0.2, 0.4):
        layer.table_optimizers["t"].learning_rate = rate
        original.learning_rate = rate
        train(layer, tf.range(4), tf.ones([4, 3]))
        original.apply_gradients([(tf.ones([4, 3]), variable)])
        assert layer.table_optimizers["t"].learning_rate == pytest.approx(rate)
    np.testing.assert_allclose(layer.embedding_tables["t"], variable, rtol=1e-5)


COMPUTED = {
    "schedule": lambda: tpu.SGD(SCHEDULE),
    "callable": lambda: tpu.SGD(lambda: 0.5),
    "new_schedule": lambda: new.SGD(SCHEDULE),
    "legacy_schedule": lambda: legacy.SGD(SCHEDULE),
    "legacy_callable": lambda: legacy.SGD(lambda: 0.5),
}


@pytest.mark.parametrize("form", COMPUTED)
def test_assigning_a_computed_rate_is_an_error_and_changes_nothing(form):
    probe = Probe(COMPUTED[form](), graph=False)
    optimizer = probe.layer.table_optimizers["t"]
    before = optimizer.learning_rate
    with pytest.raises(AttributeError, match="schedule or a callable"):
        optimizer.learning_rate = 0.125
    assert optimizer.learning_rate == before
    assert probe.rate() == pytest.approx(before)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make", [tpu.SGD, new.Adagrad, legacy.Adam], ids=["tpu", "new", "legacy"]
)
def test_a_rate_that_is_no_rate_is_an_error(make, rate):
    with pytest.raises(ValueError, match=rf"learning_rate .*{rate}"):
        make_layer(make(rate))


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("form", ASSIGNABLE)
def test_assigning_what_is_no_rate_is_an_error(form, rate):
    optimizer = make_layer(ASSIGNABLE[form]()).table_optimizers["t"]
    before = optimizer.learning_rate
    with pytest.raises(ValueError, match=rf"learning_rate .*{rate}"):
        optimizer.learning_rate = rate
    assert optimizer.learning_rate == before


@pytest.mark.parametrize("rate", ["0.1", [0.1], True, 1j, None])
def test_a_rate_of_a_wrong_type_is_an_error_that_shows_it(rate):
    with pytest.raises(TypeError, match="learning_rate") as e:
        make_layer(tpu.SGD(rate))
    assert repr(rate) in str(e.value)


# A table's own optimizer, and none.


def two_tables(optimizer, own):
    """A layer of the tables "a", with its own optimizer, and "b"."""
    tables = [
        tfrs_embed.TableConfig("a", 2, 1, initializer="zeros", optimizer=own),
        tfrs_embed.TableConfig("b", 2, 1, initializer="zeros"),
    ]
    return layers.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig("f", t) for t in tables],
        optimizer,
        size_threshold=0,
    )


def train_two(layer):
    ids = tf.constant([0])
    train(layer, [ids, ids], [tf.ones([1, 1]), tf.ones([1, 1])])
    return [float(t[0, 0]) for t in layer.embedding_tables.values()]


def test_a_tables_own_optimizer_wins_over_the_layers():
    layer = two_tables(tpu.SGD(0.5), own=tpu.SGD(0.25))
    assert train_two(layer) == [-0.25, -0.5]


def test_a_tables_own_rate_of_zero_keeps_it_as_it_is():
    layer = two_tables(tpu.SGD(0.5), own=tpu.SGD(0.0))
    assert train_two(layer) == [0.0, -0.5]


def test_a_tables_own_rule_decides_its_slots():
    assert sorted(state(two_tables(tpu.SGD(0.5), own=tpu.Adam(0.25)))) == [
        "a/momenta",
        "a/parameters",
        "a/velocities",
        "b/parameters",
        "step",
    ]


@pytest.mark.parametrize(
    ("layers", "own"),
    [(tpu.SGD(0.5), tpu.SGD(0.5)), ("sgd", "sgd")],
    ids=["objects", "names"],
)
def test_assigning_a_tables_own_rate_leaves_the_layers(layers, own):
    layer = two_tables(layers, own)
    before = layer.table_optimizers["b"].learning_rate
    layer.table_optimizers["a"].learning_rate = 0.125
    assert layer.table_optimizers["b"].learning_rate == before
    assert train_two(layer) == pytest.approx([-0.125, -before])


def test_without_an_optimizer_nothing_is_trained():
    layer = make_layer(None)
    before = state(layer)
    assert sorted(before) == ["step", "t/parameters"]
    assert layer.trainable_variables == []
    assert layer.table_optimizers == {}
    train(layer, tf.constant([0, 1]), tf.ones([2, 3]))
    assert_unchanged(layer, before)


def test_without_a_layers_optimizer_a_tables_own_still_trains_it():
    layer = two_tables(None, own=tpu.SGD(0.25))
    assert list(layer.table_optimizers) == ["a"]
    assert train_two(layer) == [-0.25, 0.0]


# Assigned rates in a stored config.


@on("keras:3", tier="more")
@pytest.mark.parametrize("form", [f for f in ASSIGNABLE if f != "variable"])
@pytest.mark.parametrize("own", [False, True], ids=["layer's", "table's"])
def test_an_assigned_rate_is_part_of_the_config(form, own):
    given = ASSIGNABLE[form]()
    layer = two_tables("sgd" if own else given, own=given if own else None)
    kept = layer.get_config()
    layer.table_optimizers["a"].learning_rate = 0.0625
    config = json.loads(json.dumps(layer.get_config()))
    other = layers.PartialTPUEmbedding.from_config(config)
    assert other.table_optimizers["a"].learning_rate == 0.0625
    assert other.table_optimizers["b"].learning_rate == pytest.approx(
        0.01 if own else 0.0625
    )
    assert other.get_config() == config
    # Of one whose rate is what it was.
    again = layers.PartialTPUEmbedding.from_config(kept)
    assert again.get_config() == kept


def test_equal_names_keep_rates_of_their_own_in_a_config():
    tables = [
        tfrs_embed.TableConfig(name, 2, 1, optimizer="sgd") for name in "abc"
    ]
    layer = layers.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig(t.name, t) for t in tables],
        None,
        size_threshold=0,
    )
    layer.table_optimizers["b"].learning_rate = 0.5
    other = layers.PartialTPUEmbedding.from_config(layer.get_config())
    rates = [o.learning_rate for o in other.table_optimizers.values()]
    assert rates == pytest.approx([0.01, 0.5, 0.01])


@on("keras:3", tier="more")
@pytest.mark.parametrize("suffix", ["keras", *of_keras_2("h5", "tf")])
def test_a_saved_model_has_the_assigned_rate(tmp_path, suffix):
    model = keras.Sequential(
        [
            keras.Input((), dtype="int64"),
            make_layer("adagrad", name="table"),
        ]
    )
    optimizer = model.get_layer("table").table_optimizers["t"]
    optimizer.learning_rate = 0.0625
    path = str(tmp_path / f"model.{suffix}")
    model.save(path, save_format=suffix)
    other = keras.models.load_model(path).get_layer("table")
    assert other.table_optimizers["t"].learning_rate == 0.0625
    train(other, tf.constant([0]), tf.ones([1, 3]))
