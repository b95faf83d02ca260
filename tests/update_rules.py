"""A row for each update rule, from which all tests take what they need of it.

The formulas are those of one row, in numpy and float64, with nothing taken from
the library: they are the reference.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Rule(NamedTuple):
    """What tests know of an update rule.

    Attributes:
        update: takes the reference's table, with the number of its earlier
            updates, a row's number, its gradient, the learning rate, and the
            rule's settings with their defaults.
        slots: the slots' first values; a string is the setting that says it.
        cases: settings for each way through the formula, by names of tests.
        by_row: the slots that have one number for each row.
    """

    update: Callable[..., None]
    slots: Mapping[str, float | str]
    cases: Mapping[str, Mapping[str, Any]]
    by_row: tuple[str, ...] = ()


def _sgd(table, i, g, rate):
    table.rows[i] -= rate * g


def _adagrad(table, i, g, rate, initial_accumulator_value=0.1):
    a = table.slots["accumulators"]
    a[i] += g**2
    table.rows[i] -= rate * g / np.sqrt(a[i])


def _adagrad_momentum(
    table,
    i,
    g,
    rate,
    momentum=0.0,
    use_nesterov=False,
    exponent=2.0,
    beta2=1.0,
    epsilon=1e-10,
):
    a, m = table.slots["accumulators"], table.slots["momenta"]
    a[i] = a[i] + g**2 if beta2 == 1 else beta2 * a[i] + (1 - beta2) * g**2
    s = (a[i] + epsilon) ** (-1 / exponent) * g
    m[i] = momentum * m[i] + s
    table.rows[i] -= rate * (momentum * m[i] + s if use_nesterov else m[i])


def _adam(
    table,
    i,
    g,
    rate,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    sum_inside_sqrt=True,
):
    m, v = table.slots["momenta"], table.slots["velocities"]
    m[i] = beta_1 * m[i] + (1 - beta_1) * g
    v[i] = beta_2 * v[i] + (1 - beta_2) * g**2
    if sum_inside_sqrt:
        table.rows[i] -= rate * m[i] / np.sqrt(v[i] + epsilon**2)
    else:
        table.rows[i] -= rate * m[i] / (np.sqrt(v[i]) + epsilon)


def _ftrl(
    table,
    i,
    g,
    rate,
    learning_rate_power=-0.5,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    beta=0.0,
    initial_accumulator_value=0.1,
    multiply_linear_by_learning_rate=False,
):
    a, linear = table.slots["accumulators"], table.slots["linears"]
    p, w = learning_rate_power, table.rows[i]
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    new = a[i] + g**2
    d = new**-p - a[i] ** -p
    if multiply_linear_by_learning_rate:
        linear[i] += rate * g - d * w
        bound = rate * l1
        denominator = new**-p + 2 * rate * l2 + beta
    else:
        linear[i] += g - d * w / rate
        bound = l1
        denominator = (new**-p + beta) / rate + 2 * l2
    a[i] = new
    table.rows[i] = (
        np.clip(linear[i], -bound, bound) - linear[i]
    ) / denominator


def _momentum(table, i, g, rate, momentum=0.0, nesterov=False):
    m = table.slots["momenta"]
    m[i] = momentum * m[i] - rate * g
    table.rows[i] += momentum * m[i] - rate * g if nesterov else m[i]


def _rmsprop(table, i, g, rate, rho=0.9, epsilon=1e-7):
    v = table.slots["velocities"]
    v[i] = rho * v[i] + (1 - rho) * g**2
    table.rows[i] -= rate * g / np.sqrt(v[i] + epsilon)


def _row_wise_adagrad(
    table, i, g, rate, initial_accumulator_value=0.0, epsilon=1e-8
):
    a = table.slots["accumulators"]
    a[i] += np.mean(g**2)
    table.rows[i] -= rate * g / (np.sqrt(a[i]) + epsilon)


def _row_wise_adam(table, i, g, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
    """FBGEMM's partial_rowwise_adam for GPUs (genscript/optimizers.py)."""
    number = table.updates + 1
    momentum1, momentum2 = table.slots["momenta"], table.slots["velocities"]
    momentum2[i] = np.mean(g * g) * (1 - beta_2) + momentum2[i] * beta_2
    v_hat = momentum2[i] / (1 - beta_2**number)
    momentum1[i] = momentum1[i] * beta_1 + g * (1 - beta_1)
    m_hat = momentum1[i] / (1 - beta_1**number)
    table.rows[i] -= rate * (m_hat / (np.sqrt(v_hat) + epsilon))


#: By the names of their classes in tfrs_embed.optimizers.rules.
RULES = {
    "SGD": Rule(_sgd, {}, {"sgd": {}}),
    "Adagrad": Rule(
        _adagrad,
        {"accumulators": "initial_accumulator_value"},
        {"adagrad": {"initial_accumulator_value": 0.2}},
    ),
    "AdagradMomentum": Rule(
        _adagrad_momentum,
        {"accumulators": 0.0, "momenta": 0.0},
        {
            "adagrad_momentum_plain": {"momentum": 0.8, "epsilon": 1e-3},
            "adagrad_momentum": {
                "momentum": 0.8,
                "use_nesterov": True,
                "exponent": 3.0,
                "beta2": 0.9,
                "epsilon": 1e-3,
            },
        },
    ),
    "Adam": Rule(
        _adam,
        {"momenta": 0.0, "velocities": 0.0},
        {
            "adam": {"epsilon": 1e-3},
            "adam_outside": {
                "beta_1": 0.7,
                "beta_2": 0.8,
                "sum_inside_sqrt": False,
            },
        },
    ),
    "FTRL": Rule(
        _ftrl,
        {"accumulators": "initial_accumulator_value", "linears": 0.0},
        {
            "ftrl": {
                "l1_regularization_strength": 0.01,
                "l2_regularization_strength": 0.02,
                "beta": 0.1,
            },
            "ftrl_linear": {
                "learning_rate_power": -0.6,
                "l1_regularization_strength": 0.01,
                "l2_regularization_strength": 0.02,
                "beta": 0.1,
                "multiply_linear_by_learning_rate": True,
            },
        },
    ),
    "Momentum": Rule(
        _momentum,
        {"momenta": 0.0},
        {
            "momentum": {"momentum": 0.8},
            "momentum_nesterov": {"momentum": 0.8, "nesterov": True},
        },
    ),
    "RMSprop": Rule(
        _rmsprop,
        {"velocities": 0.0},
        {"rmsprop": {"rho": 0.8, "epsilon": 1e-3}},
    ),
    "RowWiseAdagrad": Rule(
        _row_wise_adagrad,
        {"accumulators": "initial_accumulator_value"},
        {
            "row_wise_adagrad": {
                "initial_accumulator_value": 0.2,
                "epsilon": 1e-3,
            }
        },
        by_row=("accumulators",),
    ),
    "RowWiseAdam": Rule(
        _row_wise_adam,
        {"momenta": 0.0, "velocities": 0.0},
        {
            "row_wise_adam": {
                "beta_1": 0.7,
                "beta_2": 0.8,
                "epsilon": 1e-2,
            }
        },
        by_row=("velocities",),
    ),
}

#: The name of the rule and the settings of each case, by the case's name.
CASES = {
    name: (rule, settings)
    for rule, row in RULES.items()
    for name, settings in row.cases.items()
}
