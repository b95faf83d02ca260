"""Table optimizers: SparseCore's update rules with their learning rates.

A rule is a formula on the rows that were looked up. `g` is a row's gradient
summed over the global batch. The formulas are those of
`tensorflow/core/protobuf/tpu/optimization_parameters.proto` as SparseCore
applies them: a row that was not looked up keeps its values and slots.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrs_embed.optimizers.learning_rate import LearningRate

Slots = dict[str, tf.Tensor]


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

    def may_become(self, other: TableOptimizer) -> bool:
        """Whether nothing but itself tells it from another optimizer.

        The rules and rates are equal, and nobody holds anything that would
        change one's rate and not the other's.
        """
        return (
            self.rule == other.rule
            and self.rate.owned
            and other.rate.owned
            and self.rate.formulas == other.rate.formulas
            and self.learning_rate == other.learning_rate
        )

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
