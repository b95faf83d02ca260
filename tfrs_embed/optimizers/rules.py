"""Table optimizers: update rules with their learning rates.

A rule is a formula on looked-up rows; `g` is a row's gradient summed over the
global batch. Formulas that TPUs have are those of
`tensorflow/core/protobuf/tpu/optimization_parameters.proto` as SparseCore
applies them: other rows keep their values and slots.

A rule is one class in `RULES`. Its fields are its settings; its class
attributes name it elsewhere, for `conversion`. Its loop in C++ is in
kernels/cc/rows.cc.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import tensorflow as tf

from tfrs_embed.optimizers import declared
from tfrs_embed.optimizers.learning_rate import LearningRate
from tfrs_embed.optimizers.options import (
    NO_OPTIONS,
    WHOLE_ROWS,
    UpdateOptions,
)

Tensor: TypeAlias = tf.Tensor
Slots = dict[str, Tensor]

_tpu = tf.tpu.experimental.embedding
# A legacy Keras Adagrad adds epsilon to sqrt(a); with a >= 0.01, 1e-7 is within
# float32's rounding.
_ADAGRAD_EPSILON = 1e-7
_ADAGRAD_ACCUMULATOR = 0.01


class Slot(NamedTuple):
    """A variable that a rule keeps beside a table.

    Attributes:
        initial: its first value, everywhere.
        by_row: whether it has one number for each row, [vocabulary_size],
            instead of the table's shape.
    """

    initial: float
    by_row: bool = False

    def row(self, dim: int) -> tuple[int, ...]:
        """The slot's shape per row, for a table of width `dim`."""
        return () if self.by_row else (dim,)


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """A formula that updates rows and their slots by gradients.

    Fields have defaults, and the names of TensorFlow's optimizer of the rule,
    or Keras's without one.

    Attributes:
        tpu: TensorFlow's optimizer of the same formula and defaults, or None.
        declared: this package's optimizer of the same formula and defaults, or
            None.
        loop: the rule's number in kernels/cc/rows.h; None: no kernel.
        keras: the name of the class in `tf_keras.optimizers` and its `legacy`
            with the same updates, or None. Of rules of one class the last has
            the most settings.
    """

    tpu: ClassVar[type | None] = None
    declared: ClassVar[type | None] = None
    loop: ClassVar[int | None] = None
    keras: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        """The rule's name in reports."""
        return type(self).__name__

    def slots(self) -> dict[str, Slot]:
        """Returns the slots by name."""
        return {}

    def numbers_per_row(self, dim: int) -> int:
        """Returns all slots' numbers per row of a table of width `dim`."""
        return sum(math.prod(s.row(dim)) for s in self.slots().values())

    @abc.abstractmethod
    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        """Returns the new rows and slots, in the same shapes.

        Args:
            rate: the learning rate, a scalar float32.
            g: the rows' gradients, [rows, dim] float32.
            w: the rows, [rows, dim] float32.
            slots: the rows' slots by name, each [rows, dim] float32, or [rows]
                if by row.
            step: the number of earlier updates, a scalar int64.
        """

    def loop_settings(self) -> list[float]:
        """Returns the loop's settings, in the order of rows.h.

        Constants are computed here, in Python's precision, as for TensorFlow's
        operations.
        """
        return []

    @classmethod
    def settings_of_keras(
        cls, config: Mapping[str, Any], legacy: bool, where: str
    ) -> Mapping[str, Any]:
        """Returns the rule's settings for a Keras optimizer's `config`.

        Missing fields have their defaults; other names are ignored. `legacy`
        optimizers of tf_keras have other formulas. If the rule can't be that
        optimizer, a ValueError begins with `where`.
        """
        return config

    def keras_rate(self, rate: LearningRate) -> LearningRate:
        """Returns the rate for the rule that equals Keras's `rate`."""
        return rate


@dataclasses.dataclass(frozen=True)
class SGD(UpdateRule):
    """Stochastic gradient descent.

    Robbins & Monro 1951, "A Stochastic Approximation Method": w -= rate g.
    """

    tpu = _tpu.SGD
    loop = 1
    keras = "SGD"

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        return w - rate * g, {}


@dataclasses.dataclass(frozen=True)
class Adagrad(UpdateRule):
    """Adagrad without an epsilon.

    Duchi, Hazan & Singer 2011, "Adaptive Subgradient Methods for Online
    Learning and Stochastic Optimization": a += g^2; w -= rate g / sqrt(a).
    """

    initial_accumulator_value: float = 0.1

    tpu = _tpu.Adagrad
    loop = 2
    keras = "Adagrad"

    def slots(self) -> dict[str, Slot]:
        return {"accumulators": Slot(self.initial_accumulator_value)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        a = slots["accumulators"] + tf.square(g)
        return w - rate * g * tf.math.rsqrt(a), {"accumulators": a}

    @classmethod
    def settings_of_keras(
        cls, config: Mapping[str, Any], legacy: bool, where: str
    ) -> Mapping[str, Any]:
        """Replaces epsilon by a larger initial accumulator."""
        accumulator = float(config["initial_accumulator_value"])
        epsilon = float(config["epsilon"])
        if not legacy:
            # Keras has sqrt(a + epsilon), and only adds g^2 to a.
            accumulator += epsilon
        elif epsilon > _ADAGRAD_EPSILON or accumulator < _ADAGRAD_ACCUMULATOR:
            raise ValueError(
                f"{where}: epsilon={epsilon!r} with initial_accumulator_value="
                f"{accumulator!r}: a table's update rule has no epsilon; it "
                f"must be at most {_ADAGRAD_EPSILON}, with an accumulator of "
                f"at least {_ADAGRAD_ACCUMULATOR}."
            )
        return {"initial_accumulator_value": accumulator}


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(UpdateRule):
    """Adagrad with one accumulator for each row.

    Duchi, Hazan & Singer 2011, "Adaptive Subgradient Methods for Online
    Learning and Stochastic Optimization", with the mean of a row's squares as
    FBGEMM's EXACT_ROWWISE_ADAGRAD has it, without its weight decay:
    a += mean(g^2); w -= rate g / (sqrt(a) + epsilon).
    """

    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    declared = declared.RowWiseAdagrad
    loop = 8

    def slots(self) -> dict[str, Slot]:
        begin = self.initial_accumulator_value
        return {"accumulators": Slot(begin, by_row=True)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        a = slots["accumulators"] + tf.reduce_mean(tf.square(g), 1)
        scale = rate / (tf.sqrt(a) + self.epsilon)
        return w - scale[:, None] * g, {"accumulators": a}

    def loop_settings(self) -> list[float]:
        return [self.epsilon]


@dataclasses.dataclass(frozen=True)
class RowWiseAdam(UpdateRule):
    """Lazy Adam with one second moment for each row, and bias correction.

    Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", with the
    mean of a row's squares as FBGEMM's PARTIAL_ROWWISE_ADAM has it, without its
    weight decay. In update t, from 1:
    m = beta_1 m + (1 - beta_1) g; v = beta_2 v + (1 - beta_2) mean(g^2);
    w -= rate m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon).
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    declared = declared.RowWiseAdam
    loop = 9

    def slots(self) -> dict[str, Slot]:
        return {"momenta": Slot(0.0), "velocities": Slot(0.0, by_row=True)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        m = self.beta_1 * slots["momenta"] + (1.0 - self.beta_1) * g
        v = self.beta_2 * slots["velocities"]
        v += (1.0 - self.beta_2) * tf.reduce_mean(tf.square(g), 1)
        root = tf.sqrt(v * _unbias(self.beta_2, step))
        scale = rate * _unbias(self.beta_1, step) / (root + self.epsilon)
        return w - scale[:, None] * m, {"momenta": m, "velocities": v}

    def loop_settings(self) -> list[float]:
        betas = self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2
        return [*betas, self.epsilon]


def _unbias(beta: float, step: Tensor) -> Tensor:
    """Returns 1 / (1 - beta^t) for update t, which follows `step` updates.

    In float32 the difference would have few correct digits.
    """
    number = tf.cast(step, tf.float64) + 1.0
    power = tf.pow(tf.constant(beta, tf.float64), number)
    return tf.cast(1.0 / (1.0 - power), tf.float32)


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(UpdateRule):
    """Adagrad's scaled gradient with momentum, as TPUs have it.

    The accumulator is that of Duchi, Hazan & Singer 2011, "Adaptive Subgradient
    Methods for Online Learning and Stochastic Optimization", or a moving
    average:

    a = a + g^2 if beta2 == 1 else beta2 a + (1 - beta2) g^2;
    s = (a + epsilon)^(-1/exponent) g; m = momentum m + s;
    w -= rate (momentum m + s if use_nesterov else m).
    """

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2.0
    beta2: float = 1.0
    epsilon: float = 1e-10

    tpu = _tpu.AdagradMomentum
    loop = 3

    def slots(self) -> dict[str, Slot]:
        return {"accumulators": Slot(0.0), "momenta": Slot(0.0)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        a, m = slots["accumulators"], slots["momenta"]
        if self.beta2 == 1.0:
            a = a + tf.square(g)
        else:
            a = self.beta2 * a + (1.0 - self.beta2) * tf.square(g)
        s = tf.pow(a + self.epsilon, -1.0 / self.exponent) * g
        m = self.momentum * m + s
        step = self.momentum * m + s if self.use_nesterov else m
        return w - rate * step, {"accumulators": a, "momenta": m}

    def loop_settings(self) -> list[float]:
        added = 1.0 if self.beta2 == 1.0 else 1.0 - self.beta2
        return [
            self.momentum,
            float(self.use_nesterov),
            -1.0 / self.exponent,
            self.beta2,
            added,
            self.epsilon,
        ]


@dataclasses.dataclass(frozen=True)
class Adam(UpdateRule):
    """Lazy Adam without bias correction.

    Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization":
    m = beta_1 m + (1 - beta_1) g; v = beta_2 v + (1 - beta_2) g^2;
    w -= rate m / sqrt(v + epsilon^2) if sum_inside_sqrt, else
    w -= rate m / (sqrt(v) + epsilon).
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    sum_inside_sqrt: bool = True

    tpu = _tpu.Adam
    loop = 4
    keras = "Adam"

    def slots(self) -> dict[str, Slot]:
        return {"momenta": Slot(0.0), "velocities": Slot(0.0)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        m = self.beta_1 * slots["momenta"] + (1.0 - self.beta_1) * g
        v = self.beta_2 * slots["velocities"]
        v += (1.0 - self.beta_2) * tf.square(g)
        if self.sum_inside_sqrt:
            # epsilon^2 may underflow to 0; a row that never had a gradient then
            # gives 0 / 0 = 0, not NaN.
            step = tf.math.divide_no_nan(m, tf.sqrt(v + self.epsilon**2))
        else:
            step = m / (tf.sqrt(v) + self.epsilon)
        return w - rate * step, {"momenta": m, "velocities": v}

    def loop_settings(self) -> list[float]:
        inside = self.sum_inside_sqrt
        return [
            self.beta_1,
            1.0 - self.beta_1,
            self.beta_2,
            1.0 - self.beta_2,
            self.epsilon**2 if inside else self.epsilon,
            float(inside),
        ]

    @classmethod
    def settings_of_keras(
        cls, config: Mapping[str, Any], legacy: bool, where: str
    ) -> Mapping[str, Any]:
        return {**config, "sum_inside_sqrt": False}

    def keras_rate(self, rate: LearningRate) -> LearningRate:
        return rate.times(self._bias_correction, "Adam's bias correction")

    def _bias_correction(self, step: tf.Tensor) -> tf.Tensor:
        """The paper's section 2: sqrt(1 - beta_2^t) / (1 - beta_1^t)."""
        t = tf.cast(step + 1, tf.float32)
        return tf.sqrt(1.0 - tf.pow(self.beta_2, t)) / (
            1.0 - tf.pow(self.beta_1, t)
        )


@dataclasses.dataclass(frozen=True)
class FTRL(UpdateRule):
    """Follow The Regularized Leader.

    McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches":
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

    tpu = _tpu.FTRL
    loop = 5
    keras = "Ftrl"

    def slots(self) -> dict[str, Slot]:
        return {
            "accumulators": Slot(self.initial_accumulator_value),
            "linears": Slot(0.0),
        }

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
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

    def loop_settings(self) -> list[float]:
        return [
            -self.learning_rate_power,
            self.l1_regularization_strength,
            self.l2_regularization_strength,
            self.beta,
            float(self.multiply_linear_by_learning_rate),
        ]


@dataclasses.dataclass(frozen=True)
class Momentum(UpdateRule):
    """Gradient descent with momentum, lazily: rows without a gradient rest.

    Sutskever et al. 2013, "On the importance of initialization and momentum in
    deep learning": m = momentum m - rate g;
    w += momentum m - rate g if nesterov else m.
    """

    momentum: float = 0.0
    nesterov: bool = False

    loop = 6
    keras = "SGD"

    def slots(self) -> dict[str, Slot]:
        return {"momenta": Slot(0.0)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        m = self.momentum * slots["momenta"] - rate * g
        step = self.momentum * m - rate * g if self.nesterov else m
        return w + step, {"momenta": m}

    def loop_settings(self) -> list[float]:
        return [self.momentum, float(self.nesterov)]


@dataclasses.dataclass(frozen=True)
class RMSprop(UpdateRule):
    """RMSprop, lazily: rows without a gradient rest.

    Tieleman & Hinton 2012, "Lecture 6.5 - RMSprop: Divide the gradient by a
    running average of its recent magnitude", with Keras's epsilon:
    v = rho v + (1 - rho) g^2; w -= rate g / sqrt(v + epsilon).
    """

    rho: float = 0.9
    epsilon: float = 1e-7

    loop = 7
    keras = "RMSprop"

    def slots(self) -> dict[str, Slot]:
        return {"velocities": Slot(0.0)}

    def update(
        self, rate: Tensor, g: Tensor, w: Tensor, slots: Slots, step: Tensor
    ) -> tuple[tf.Tensor, Slots]:
        v = self.rho * slots["velocities"] + (1.0 - self.rho) * tf.square(g)
        step = rate * g * tf.math.rsqrt(v + self.epsilon)
        return w - step, {"velocities": v}

    def loop_settings(self) -> list[float]:
        return [self.rho, 1.0 - self.rho, self.epsilon]

    @classmethod
    def settings_of_keras(
        cls, config: Mapping[str, Any], legacy: bool, where: str
    ) -> Mapping[str, Any]:
        if legacy:
            raise ValueError(
                f"{where}: epsilon={config['epsilon']!r}: a table's rule "
                "divides by sqrt(v + epsilon), as tf_keras.optimizers.RMSprop "
                "does; a legacy one divides by sqrt(v) + epsilon."
            )
        return config


#: All rules.
RULES: tuple[type[UpdateRule], ...] = (
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    FTRL,
    Momentum,
    RMSprop,
    RowWiseAdagrad,
    RowWiseAdam,
)


# Slots refuse attributes that would have no effect, such as `lr`.
@dataclasses.dataclass(eq=False, repr=False, slots=True)
class TableOptimizer:
    """An update rule with its learning rate and options.

    Attributes:
        rule: the update rule.
        rate: the learning rate.
        source: the user's optimizer.
        options: clipping and decay before the rule, limits after it.
    """

    rule: UpdateRule
    rate: LearningRate
    source: Any
    options: UpdateOptions = NO_OPTIONS
    _step: Callable[[], Any] = dataclasses.field(default=lambda: 0, init=False)

    @property
    def needs_whole_rows(self) -> str | None:
        """The name of the rule or option that needs whole rows, or None."""
        if any(slot.by_row for slot in self.rule.slots().values()):
            return self.rule.name
        return next((n for n in WHOLE_ROWS if n in self.options.given()), None)

    def decay(self, step: tf.Tensor) -> tf.Tensor | None:
        """Returns each row's loss after `step` updates, float32, or None.

        As in Keras, the learning rate is without Adam's bias correction.
        """
        if not self.options.weight_decay:
            return None
        return self.rate.base(step) * self.options.weight_decay

    def follow(self, step: Callable[[], Any]) -> None:
        """Reads the number of updates from `step()`."""
        self._step = step

    def may_become(self, other: TableOptimizer) -> bool:
        """Whether two optimizers are equal and own their rates."""
        return (
            self.rule == other.rule
            and self.options == other.options
            and self.rate.owned
            and other.rate.owned
            and self.rate.formulas == other.rate.formulas
            and self.learning_rate == other.learning_rate
        )

    @property
    def learning_rate(self) -> float:
        """The given, assigned or scheduled rate, without bias correction.

        Assign it to change it.

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
        return self.rule.name
