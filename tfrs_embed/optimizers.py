"""Table optimizers: SparseCore's update rules, and what becomes one.

A rule is a formula on the rows that were looked up. `g` is a row's gradient
summed over the global batch. The formulas are those of
`tensorflow/core/protobuf/tpu/optimization_parameters.proto` as SparseCore
applies them: a row that was not looked up keeps its values and slots.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tfrs_embed.learning_rate import LearningRate, call, is_schedule

Slots = dict[str, tf.Tensor]
_tpu = tf.tpu.experimental.embedding


class UpdateRule(abc.ABC):
    """How a row and its slots change, given the row's gradient."""

    @property
    def name(self) -> str:
        """The rule's name in reports."""
        return type(self).__name__

    def slots(self) -> dict[str, float]:
        """Returns each slot's name and initial value."""
        return {}

    @abc.abstractmethod
    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """Returns the new rows and slots.

        Args:
            rate: the learning rate, a scalar float32.
            g: the rows' gradients, [rows, dim] float32.
            w: the rows, [rows, dim] float32.
            slots: the rows' slots by name, each [rows, dim] float32.

        Returns:
            The rows and slots after the update, in the same shapes.
        """


@dataclasses.dataclass(frozen=True)
class SGD(UpdateRule):
    """w -= rate g."""

    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """See the base class."""
        return w - rate * g, {}


@dataclasses.dataclass(frozen=True)
class Adagrad(UpdateRule):
    """a += g^2; w -= rate g / sqrt(a). There is no epsilon."""

    initial_accumulator_value: float = 0.1

    def slots(self) -> dict[str, float]:
        """See the base class."""
        return {"accumulators": self.initial_accumulator_value}

    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """See the base class."""
        a = slots["accumulators"] + tf.square(g)
        return w - rate * g * tf.math.rsqrt(a), {"accumulators": a}


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(UpdateRule):
    """Adagrad's scaled gradient with momentum.

    a = a + g^2 if beta2 == 1 else beta2 a + (1 - beta2) g^2;
    s = (a + epsilon)^(-1/exponent) g; m = momentum m + s;
    w -= rate (momentum m + s if use_nesterov else m).
    """

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2.0
    beta2: float = 1.0
    epsilon: float = 1e-10

    def slots(self) -> dict[str, float]:
        """See the base class."""
        return {"accumulators": 0.0, "momenta": 0.0}

    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """See the base class."""
        a, m = slots["accumulators"], slots["momenta"]
        if self.beta2 == 1.0:
            a = a + tf.square(g)
        else:
            a = self.beta2 * a + (1.0 - self.beta2) * tf.square(g)
        s = tf.pow(a + self.epsilon, -1.0 / self.exponent) * g
        m = self.momentum * m + s
        step = self.momentum * m + s if self.use_nesterov else m
        return w - rate * step, {"accumulators": a, "momenta": m}


@dataclasses.dataclass(frozen=True)
class Adam(UpdateRule):
    """Lazy Adam without bias correction.

    m = beta_1 m + (1 - beta_1) g; v = beta_2 v + (1 - beta_2) g^2;
    w -= rate m / sqrt(v + epsilon^2) if sum_inside_sqrt, else
    w -= rate m / (sqrt(v) + epsilon).
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    sum_inside_sqrt: bool = True

    def slots(self) -> dict[str, float]:
        """See the base class."""
        return {"momenta": 0.0, "velocities": 0.0}

    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """See the base class."""
        m = self.beta_1 * slots["momenta"] + (1.0 - self.beta_1) * g
        v = self.beta_2 * slots["velocities"]
        v += (1.0 - self.beta_2) * tf.square(g)
        if self.sum_inside_sqrt:
            # epsilon^2 underflows to zero in float32 below 1e-22; a row that
            # never had a gradient must then give 0 / 0 = 0, not NaN.
            step = tf.math.divide_no_nan(m, tf.sqrt(v + self.epsilon**2))
        else:
            step = m / (tf.sqrt(v) + self.epsilon)
        return w - rate * step, {"momenta": m, "velocities": v}

    def bias_correction(self, step: tf.Tensor) -> tf.Tensor:
        """Keras's factor on the rate at update t = step + 1.

        Adam (Kingma & Ba 2015, section 2, "a simpler form"):
        sqrt(1 - beta_2^t) / (1 - beta_1^t).

        Args:
            step: the number of updates made so far.

        Returns:
            The factor, a scalar float32.
        """
        t = tf.cast(step + 1, tf.float32)
        return tf.sqrt(1.0 - tf.pow(self.beta_2, t)) / (
            1.0 - tf.pow(self.beta_1, t)
        )


@dataclasses.dataclass(frozen=True)
class FTRL(UpdateRule):
    """Follow The Regularized Leader (McMahan et al. 2013).

    a' = a + g^2; D = a'^(-p) - a^(-p), p the learning_rate_power.
    By default: l' = l + g - D w / rate; N = clamp(l', +-l1) - l';
    w = N / ((a'^(-p) + beta) / rate + 2 l2).
    With multiply_linear_by_learning_rate: l' = l + rate g - D w;
    N = clamp(l', +-rate l1) - l'; w = N / (a'^(-p) + 2 rate l2 + beta).
    """

    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    multiply_linear_by_learning_rate: bool = False

    def slots(self) -> dict[str, float]:
        """See the base class."""
        return {
            "accumulators": self.initial_accumulator_value,
            "linears": 0.0,
        }

    def update(
        self, rate: tf.Tensor, g: tf.Tensor, w: tf.Tensor, slots: Slots
    ) -> tuple[tf.Tensor, Slots]:
        """See the base class."""
        l1 = self.l1_regularization_strength
        l2 = self.l2_regularization_strength
        a = slots["accumulators"] + tf.square(g)
        power = tf.pow(a, -self.learning_rate_power)
        d = power - tf.pow(slots["accumulators"], -self.learning_rate_power)
        if self.multiply_linear_by_learning_rate:
            linear = slots["linears"] + rate * g - d * w
            bound = rate * l1
            denominator = power + 2.0 * rate * l2 + self.beta
        else:
            linear = slots["linears"] + g - d * w / rate
            bound = tf.constant(l1, tf.float32)
            denominator = (power + self.beta) / rate + 2.0 * l2
        w = (tf.clip_by_value(linear, -bound, bound) - linear) / denominator
        return w, {"accumulators": a, "linears": linear}


class TableOptimizer:
    """An update rule with its learning rate.

    Attributes:
        rule: the update rule.
        source: what the user gave.

    Args:
        rule: the update rule.
        rate: its learning rate.
        source: what the user gave.
    """

    def __init__(
        self, rule: UpdateRule, rate: LearningRate, source: Any
    ) -> None:
        self.rule = rule
        self.rate = rate
        self.source = source
        self._step: Callable[[], Any] = lambda: 0

    def follow(self, step: Callable[[], Any]) -> None:
        """Reads the number of updates from `step()`, as an engine counts."""
        self._step = step

    @property
    def learning_rate(self) -> float:
        """The rate as given, assigned or scheduled; assign it to change it.

        A bias correction is not part of it.

        Raises:
            AttributeError: on assignment, if a schedule or callable computes
                the rate.
        """
        step = tf.convert_to_tensor(self._step(), tf.int64)
        return float(self.rate.base(step))

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.rate.assign(value)

    def __str__(self) -> str:
        """The rule's name, for reports."""
        return self.rule.name


def convert(optimizer: Any, where: str) -> TableOptimizer | None:
    """Turns whatever a user may give into a table optimizer.

    Args:
        optimizer: None; "sgd", "adagrad", "adagrad_momentum", "adam" or "ftrl"
            (the `tf.tpu.experimental.embedding` optimizer with its defaults);
            such an object; a `tf_keras` SGD, Adagrad, Adam or Ftrl, new or
            legacy, possibly wrapped in a LossScaleOptimizer; or a dict as
            `serialize` makes it.
        where: what the optimizer is for, in error messages: "Table 'user'".

    Returns:
        The table optimizer, or None for None.

    Raises:
        ValueError: a setting that the update rules can't honour exactly, or an
            unknown name.
        TypeError: another kind of object.
    """
    if optimizer is None or isinstance(optimizer, TableOptimizer):
        return optimizer
    if isinstance(optimizer, Mapping):
        return convert(deserialize(optimizer), where)
    if isinstance(optimizer, str):
        return _from_tpu(_by_name(optimizer, where), where, optimizer)
    if isinstance(optimizer, tuple(_TPU_RULES)):
        return _from_tpu(optimizer, where, optimizer)
    if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
        return convert(optimizer.inner_optimizer, where)
    for kind in _KERAS_RULES:
        if type(optimizer) in _keras_classes(kind):
            return _from_keras(optimizer, kind, where)
    message = (
        f"{where}: {_class_name(optimizer)} can't train a table; use SGD, "
        "Adagrad, Adam or Ftrl of tf_keras.optimizers, or SGD, Adagrad, "
        "AdagradMomentum, Adam or FTRL of tf.tpu.experimental.embedding."
    )
    if type(optimizer).__module__.split(".")[0] == "keras":
        message += (
            " This one is Keras 3's; tfrs_embed's layers are tf_keras layers."
        )
    raise TypeError(message)


def _by_name(name: str, where: str) -> Any:
    kinds = {_snake(kind.__name__): kind for kind in _TPU_RULES}
    if name.lower() not in kinds:
        raise ValueError(
            f"{where}: unknown optimizer {name!r}; known names are "
            f"{sorted(kinds)}."
        )
    kind: Any = kinds[name.lower()]
    return kind()


def _sgd(o: Any) -> UpdateRule:
    return SGD()


def _adagrad(o: Any) -> UpdateRule:
    return Adagrad(float(o.initial_accumulator_value))


def _adagrad_momentum(o: Any) -> UpdateRule:
    return AdagradMomentum(
        momentum=float(o.momentum),
        use_nesterov=bool(o.use_nesterov),
        exponent=float(o.exponent),
        beta2=float(o.beta2),
        epsilon=float(o.epsilon),
    )


def _adam(o: Any) -> UpdateRule:
    return Adam(
        beta_1=float(o.beta_1),
        beta_2=float(o.beta_2),
        epsilon=float(o.epsilon),
        sum_inside_sqrt=bool(o.sum_inside_sqrt),
    )


def _ftrl(o: Any) -> UpdateRule:
    return FTRL(
        learning_rate_power=float(o.learning_rate_power),
        l1_regularization_strength=float(o.l1_regularization_strength),
        l2_regularization_strength=float(o.l2_regularization_strength),
        beta=float(o.beta),
        initial_accumulator_value=float(o.initial_accumulator_value),
        multiply_linear_by_learning_rate=bool(
            o.multiply_linear_by_learning_rate
        ),
    )


_TPU_RULES: dict[type, Callable[[Any], UpdateRule]] = {
    _tpu.SGD: _sgd,
    _tpu.Adagrad: _adagrad,
    _tpu.AdagradMomentum: _adagrad_momentum,
    _tpu.Adam: _adam,
    _tpu.FTRL: _ftrl,
}
# The arguments of TF's optimizers that no update rule here has, and the values
# that ask for nothing.
_TPU_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "clip_weight_min": (None,),
    "clip_weight_max": (None,),
    "weight_decay_factor": (None, 0.0),
    "slot_variable_creation_fn": (None,),
    "lazy_adam": (True,),
}


def _from_tpu(optimizer: Any, where: str, source: Any) -> TableOptimizer:
    where = f"{where}: {type(optimizer).__name__}"
    for setting, neutral in _TPU_NEUTRAL.items():
        value = getattr(optimizer, setting, neutral[0])
        if value not in neutral:
            _refuse(where, setting, value)
    low, high = optimizer.clip_gradient_min, optimizer.clip_gradient_max
    if low is not None or high is not None:
        _refuse(where, "clipvalue", (low, high))
    # Summing a row's gradients first changes nothing for SGD.
    if not optimizer.use_gradient_accumulation and not isinstance(
        optimizer, _tpu.SGD
    ):
        _refuse(where, "use_gradient_accumulation", False)
    rate = LearningRate.of(optimizer.learning_rate, where)
    rules = [r for k, r in _TPU_RULES.items() if isinstance(optimizer, k)]
    return TableOptimizer(rules[0](optimizer), rate, source)


_KERAS_RULES = ("SGD", "Adagrad", "Adam", "Ftrl")
# The arguments of Keras's optimizers that no update rule here has.
_KERAS_FOREIGN = (
    "momentum",
    "nesterov",
    "amsgrad",
    "adaptive_epsilon",
    "l2_shrinkage_regularization_strength",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
)
# A legacy Keras Adagrad adds epsilon to sqrt(a). With a >= 0.01, 1e-7 is within
# float32's rounding of it.
_ADAGRAD_EPSILON = 1e-7
_ADAGRAD_ACCUMULATOR = 0.01


def _keras_classes(kind: str) -> tuple[type, ...]:
    return (
        getattr(tf_keras.optimizers, kind),
        getattr(tf_keras.optimizers.legacy, kind),
    )


def _from_keras(optimizer: Any, kind: str, where: str) -> TableOptimizer:
    where = f"{where}: Keras {kind}"
    legacy = isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)
    config = optimizer.get_config()
    for foreign in _KERAS_FOREIGN:
        value = config.get(foreign, getattr(optimizer, foreign, None))
        if callable(value):  # A method that happens to have that name.
            continue
        if value is not None and np.any(value):
            _refuse(where, foreign, value)

    def setting(name: str) -> float:
        return float(config[name])

    rate = _keras_rate(optimizer, legacy, where)
    decay = float(config.get("decay") or 0.0)
    if decay:
        rate = rate.times(
            lambda step: 1.0 / (1.0 + decay * tf.cast(step, tf.float32))
        )
    rule: UpdateRule
    if kind == "SGD":
        rule = SGD()
    elif kind == "Adagrad":
        rule = Adagrad(
            _adagrad_start(
                setting("initial_accumulator_value"),
                setting("epsilon"),
                legacy,
                where,
            )
        )
    elif kind == "Adam":
        rule = Adam(
            beta_1=setting("beta_1"),
            beta_2=setting("beta_2"),
            epsilon=setting("epsilon"),
            sum_inside_sqrt=False,
        )
        rate = rate.times(rule.bias_correction)
    else:
        rule = FTRL(
            learning_rate_power=setting("learning_rate_power"),
            l1_regularization_strength=setting("l1_regularization_strength"),
            l2_regularization_strength=setting("l2_regularization_strength"),
            beta=setting("beta"),
            initial_accumulator_value=setting("initial_accumulator_value"),
        )
    return TableOptimizer(rule, rate, optimizer)


def _adagrad_start(
    accumulator: float, epsilon: float, legacy: bool, where: str
) -> float:
    """The initial accumulator with which no epsilon is needed."""
    if not legacy:
        # sqrt(a + epsilon), and a only ever has g^2 added to it.
        return accumulator + epsilon
    if epsilon > _ADAGRAD_EPSILON or accumulator < _ADAGRAD_ACCUMULATOR:
        raise ValueError(
            f"{where}: epsilon={epsilon!r} with initial_accumulator_value="
            f"{accumulator!r} can't be honoured exactly by a table's update "
            f"rule, which has no epsilon; it must be at most "
            f"{_ADAGRAD_EPSILON}, with an accumulator of at least "
            f"{_ADAGRAD_ACCUMULATOR}."
        )
    return accumulator


def _keras_rate(optimizer: Any, legacy: bool, where: str) -> LearningRate:
    """The optimizer's own rate, so that assigning it there takes effect."""
    if legacy:
        # Makes plain numbers variables now, before a traced function could
        # take them for constants.
        with tf.init_scope():
            optimizer._create_hypers()
        given = lambda: optimizer._hyper["learning_rate"]  # noqa: E731
    else:
        given = lambda: optimizer._learning_rate  # noqa: E731

    def read(step: tf.Tensor) -> Any:
        value = given()
        return value(step) if is_schedule(value) else call(value)

    def write(value: Any) -> None:
        optimizer.learning_rate = value

    return LearningRate(read, write, given)


def serialize(optimizer: Any) -> Any:
    """Returns what `get_config` stores for an optimizer a user gave.

    Args:
        optimizer: None, a name, or an object that `convert` accepts.

    Returns:
        A JSON-able value that `deserialize` turns into an equal object.

    Raises:
        ValueError: the learning rate is a callable or a variable, which can't
            be stored.
    """
    if optimizer is None or isinstance(optimizer, (str, Mapping)):
        return optimizer
    if not isinstance(optimizer, tuple(_TPU_RULES)):
        return {
            "kind": "keras",
            "config": tf_keras.optimizers.serialize(optimizer),
        }
    arguments = {
        name: getattr(optimizer, name)
        for name in _TPU_ARGUMENTS
        if hasattr(optimizer, name)
    }
    rate = arguments["learning_rate"]
    if is_schedule(rate):
        arguments["learning_rate"] = tf_keras.optimizers.schedules.serialize(
            rate
        )
    elif callable(rate) or isinstance(rate, tf.Variable):
        raise ValueError(
            f"{type(optimizer).__name__}'s learning_rate is a "
            f"{type(rate).__name__}, which can't be stored in a config; use a "
            "number or a Keras LearningRateSchedule."
        )
    return {
        "kind": "tpu",
        "class_name": type(optimizer).__name__,
        "config": arguments,
    }


def deserialize(config: Any) -> Any:
    """Returns the optimizer that `serialize` stored."""
    if not isinstance(config, Mapping):
        return config
    if config["kind"] == "keras":
        return tf_keras.optimizers.deserialize(dict(config["config"]))
    arguments = dict(config["config"])
    if isinstance(arguments["learning_rate"], Mapping):
        arguments["learning_rate"] = tf_keras.optimizers.schedules.deserialize(
            dict(arguments["learning_rate"])
        )
    kinds = {kind.__name__: kind for kind in _TPU_RULES}
    return kinds[config["class_name"]](**arguments)


# The arguments that `_from_tpu` lets pass and that are needed to make an equal
# object.
_TPU_ARGUMENTS = (
    "learning_rate",
    "use_gradient_accumulation",
    "low_dimensional_packing_status",
    "initial_accumulator_value",
    "momentum",
    "use_nesterov",
    "exponent",
    "beta2",
    "epsilon",
    "beta_1",
    "beta_2",
    "sum_inside_sqrt",
    "learning_rate_power",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "beta",
    "multiply_linear_by_learning_rate",
    "allow_zero_accumulator",
)


def _refuse(where: str, setting: str, value: Any) -> None:
    raise ValueError(
        f"{where}: {setting}={value!r} can't be honoured by a table's update "
        "rule; leave it at its default."
    )


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def _snake(name: str) -> str:
    if name.isupper():
        return name.lower()
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
