"""Conversion of users' optimizers into table optimizers, and back.

Each rule names its classes in TensorFlow and Keras, whose settings are the
rule's fields. Settings that no rule has exactly raise an error.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_configs, keras_versions
from tfrs_embed.compat.arguments import choice
from tfrs_embed.optimizers.declared import OptimizerName, Regularized
from tfrs_embed.optimizers.learning_rate import (
    LearningRate,
    check_rate,
    restored,
    stored,
)
from tfrs_embed.optimizers.options import Limits, UpdateOptions
from tfrs_embed.optimizers.rules import (
    RULES,
    SGD,
    Adam,
    TableOptimizer,
    UpdateRule,
)

# The rules that are TensorFlow's optimizers, or this package's.
_OF_CLASS: dict[Any, type[UpdateRule]] = {
    rule.tpu or rule.declared: rule
    for rule in RULES
    if rule.tpu or rule.declared
}
# The rules of Keras's classes, those with fewer settings first.
_OF_KERAS: dict[str, list[type[UpdateRule]]] = {
    kind: [rule for rule in RULES if rule.keras == kind]
    for kind in dict.fromkeys(rule.keras for rule in RULES)
    if kind is not None
}
# Adam, whose weight decay has a default.
_OF_KERAS["AdamW"] = [Adam]
# The optimizers of Keras by their names, where TensorFlow has none.
_KERAS_NAMES = {"adamw": "AdamW", "rmsprop": "RMSprop"}


def convert(
    optimizer: Any, where: str, keras: Any = None
) -> TableOptimizer | None:
    """Converts a user's optimizer into a table optimizer, without variables.

    Args:
        optimizer: None; an `OptimizerName`: an optimizer of
            `tf.tpu.experimental.embedding` or `tfrs_embed.optimizers` with
            defaults; such an object; an optimizer of tf_keras or Keras 3 that
            is a rule's, also in a LossScaleOptimizer; or a
            `tfrs_embed.optimizers.Regularized`.
        where: begins error messages: "Table 'user'".
        keras: the Keras of the table's layer; None: unknown.

    Returns:
        The table optimizer, or None for None.

    Raises:
        ValueError: a setting that no update rule has exactly, an unknown name,
            or a rate that is negative or not finite.
        TypeError: another kind of object.
    """
    if optimizer is None or isinstance(optimizer, TableOptimizer):
        return optimizer
    source = optimizer
    if isinstance(optimizer, str):
        optimizer = _by_name(optimizer, where, keras)
        if type(optimizer) not in _OF_CLASS:
            # Its rate is read at each step.
            source = optimizer
    if isinstance(optimizer, Regularized):
        found = convert(optimizer.optimizer, where, keras)
        assert found is not None
        options = found.options.given()
        if options:
            raise ValueError(
                f"{where}: the optimizer in Regularized has {options} of its "
                "own; give all to Regularized."
            )
        return dataclasses.replace(
            found, source=source, options=optimizer.options
        )
    if type(optimizer) in _OF_CLASS:
        return _from_class(optimizer, where, source)
    own = keras_versions.keras_of(optimizer)
    if own is not None and own is (keras or own):
        scaling = own.mixed_precision.LossScaleOptimizer
        if isinstance(optimizer, scaling):
            return convert(optimizer.inner_optimizer, where, keras)
        kind = type(optimizer).__name__
        modules = own.optimizers, getattr(own.optimizers, "legacy", None)
        known = [getattr(module, kind, None) for module in modules]
        if kind in _OF_KERAS and type(optimizer) in known:
            return _from_keras(optimizer, kind, where)
    wanted = keras or own or keras_versions.default()
    raise TypeError(f"{where}: {_why_not(optimizer, own, wanted.__name__)}")


def _why_not(optimizer: Any, own: Any, keras: str) -> str:
    """Says why an object is no table's optimizer, for a table of a Keras."""
    if isinstance(optimizer, type):
        name = optimizer.__name__
        return (
            f"the optimizer must be an instance, got the class {name}; write "
            f"{name}()."
        )
    given = type(optimizer)
    if isinstance(optimizer, Mapping):
        return (
            f"the optimizer must be an object, got a {given.__name__}; make "
            f"one of Keras's config by {keras}.optimizers.deserialize(config)."
        )
    ours = [rule.declared.__name__ for rule in RULES if rule.declared]
    message = (
        f"{given.__module__}.{given.__name__} can't train a table; use "
        f"{_one_of([*_OF_KERAS])} of {keras}.optimizers, {TPU_OPTIMIZERS}, or "
        f"{_one_of(ours)} of tfrs_embed.optimizers."
    )
    if own is not None and own.__name__ != keras:
        names = {
            keras_versions.TF_KERAS: "tf_keras",
            keras_versions.KERAS_3: "Keras 3",
        }
        message += (
            f" This one is {names[own.__name__]}'s; the table is of a "
            f"{names[keras]} layer."
        )
    return message


def _by_name(name: str, where: str, keras: Any) -> Any:
    known = get_args(OptimizerName)
    if name.lower() not in known:
        momentum = "; momentum is that of keras.optimizers.SGD(momentum=0.9)"
        raise ValueError(
            f"{where}: unknown optimizer {name!r}; known are {sorted(known)}"
            f"{momentum if name.lower() == 'momentum' else ''}."
        )
    if name.lower() in _KERAS_NAMES:
        optimizers = (keras or keras_versions.default()).optimizers
        return getattr(optimizers, _KERAS_NAMES[name.lower()])()
    kinds = {kind.__name__.lower(): kind for kind in _OF_CLASS}
    return kinds[name.lower().replace("_", "")]()


def _one_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


#: TensorFlow's optimizers that are rules, for error messages.
TPU_OPTIMIZERS = (
    f"{_one_of([rule.tpu.__name__ for rule in RULES if rule.tpu])} of "
    "tf.tpu.experimental.embedding"
)
# Arguments of TF's optimizers that no update rule has, with neutral values.
_TPU_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "clip_weight_min": (None,),
    "clip_weight_max": (None,),
    "weight_decay_factor": (None, 0.0),
    "slot_variable_creation_fn": (None,),
    "lazy_adam": (True,),
}


def _from_class(optimizer: Any, where: str, source: Any) -> TableOptimizer:
    where = f"{where}: {type(optimizer).__name__}"
    for setting, neutral in _TPU_NEUTRAL.items():
        value = getattr(optimizer, setting, neutral[0])
        if value not in neutral:
            _refuse(where, setting, value)
    kind = _OF_CLASS[type(optimizer)]
    names = [field.name for field in dataclasses.fields(kind)]
    rule = _make(kind, {name: getattr(optimizer, name) for name in names})
    # Summing a row's gradients first changes nothing for SGD.
    summed = getattr(optimizer, "use_gradient_accumulation", True)
    if not summed and not isinstance(rule, SGD):
        _refuse(where, "use_gradient_accumulation", summed)
    return TableOptimizer(
        rule,
        LearningRate.convert(optimizer.learning_rate, where),
        source,
        UpdateOptions.check(where, clipvalue=_clipvalue(optimizer)),
    )


def _clipvalue(optimizer: Any) -> Any:
    """Returns the gradient limits of one of TF's optimizers, or None."""
    names = ("clip_gradient_min", "clip_gradient_max")
    low, high = (getattr(optimizer, name, None) for name in names)
    return None if low is None and high is None else (low, high)


def require_tpu(
    optimizer: TableOptimizer, where: str, options: Sequence[str] = ()
) -> None:
    """Raises a ValueError unless TPUs have an optimizer's rule and options.

    `options` are the names of the `UpdateOptions` that these TPUs have.
    """
    _tpu_class(optimizer.rule, where)
    for name, value in optimizer.options.given().items():
        if name not in options:
            raise ValueError(
                f"{where}: these TPUs have no {name}={value!r}; leave it out."
            )


def to_tpu(
    rule: UpdateRule, rate: Any, where: str, clipvalue: Limits | None = None
) -> Any:
    """Returns TensorFlow's optimizer of an update rule.

    `rate` is a number or a callable; `clipvalue` limits each number of a row's
    gradient. A rule that TPUs don't have is a ValueError.
    """
    optimizer = _tpu_class(rule, where)(
        rate, **dataclasses.asdict(rule), clipvalue=clipvalue
    )
    # TensorFlow's default is False, which newer protobufs refuse for an enum.
    if getattr(optimizer, "low_dimensional_packing_status", None) is False:
        optimizer.low_dimensional_packing_status = 0
    return optimizer


def _tpu_class(rule: UpdateRule, where: str) -> Any:
    if rule.tpu is None:
        raise ValueError(
            f"{where}: TPUs don't have the update rule {rule.name}; use "
            f"{TPU_OPTIMIZERS}, or an optimizer that has such a rule."
        )
    return rule.tpu


def _make(rule: type[UpdateRule], settings: Mapping[str, Any]) -> UpdateRule:
    """Makes a rule; settings get the types of its defaults."""
    defaults = dataclasses.asdict(rule())
    return rule(**{k: type(defaults[k])(v) for k, v in settings.items()})


# Arguments of Keras's optimizers that not every rule has.
_KERAS_FOREIGN = (
    "momentum",
    "nesterov",
    "centered",
    "amsgrad",
    "adaptive_epsilon",
    "l2_shrinkage_regularization_strength",
    "use_ema",
)
# Arguments that every table's optimizer can have.
_KERAS_OPTIONS = (
    *("clipvalue", "clipnorm", "global_clipnorm", "weight_decay"),
    "gradient_accumulation_steps",
)
# Attributes that exclude variables from weight decay, in either Keras.
_KERAS_EXCLUDED = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "_exclude_from_weight_decay_pattern",
)


def _is_legacy(optimizer: Any) -> bool:
    """Whether a Keras optimizer is one of tf_keras's legacy optimizers."""
    legacy = getattr(
        keras_versions.keras_of(optimizer).optimizers, "legacy", None
    )
    return isinstance(optimizer, getattr(legacy, "Optimizer", ()))


def _from_keras(optimizer: Any, kind: str, where: str) -> TableOptimizer:
    where = f"{where}: Keras {kind}"
    config = optimizer.get_config()
    # The settings that ask for something.
    asked = {}
    for name in (*_KERAS_FOREIGN, *_KERAS_OPTIONS):
        value = config.get(name, getattr(optimizer, name, None))
        # A method may have the same name.
        if value is not None and not callable(value) and np.any(value):
            asked[name] = value
    given = {name: asked.pop(name) for name in _KERAS_OPTIONS if name in asked}
    options = UpdateOptions.check(where, **given)
    for of_keras in _OF_KERAS[kind]:
        fields = [field.name for field in dataclasses.fields(of_keras)]
        refused = [setting for setting in asked if setting not in fields]
        if not refused:
            break
    else:
        _refuse(where, refused[0], asked[refused[0]])
    for excluded in _KERAS_EXCLUDED:
        value = getattr(optimizer, excluded, None)
        if value and options.weight_decay:
            _refuse(where, "exclude_from_weight_decay", value)
    transformers = getattr(optimizer, "gradient_transformers", None)
    if transformers:
        _refuse(where, "gradient_transformers", transformers)

    settings = of_keras.settings_of_keras(config, _is_legacy(optimizer), where)
    rule = _make(of_keras, {k: settings[k] for k in fields if k in settings})
    rate = rule.keras_rate(rate_of_keras(optimizer, where))
    return TableOptimizer(rule, rate, optimizer, options)


def rate_of_keras(optimizer: Any, where: str) -> LearningRate:
    """Returns a Keras optimizer's own rate: assigning it there takes effect.

    `optimizer` is not a LossScaleOptimizer. A negative or infinite rate is a
    ValueError.
    """
    legacy = _is_legacy(optimizer)

    def given() -> Any:
        if not legacy:
            return keras_versions.variable(optimizer._learning_rate)
        if not optimizer._hypers_created:
            # A traced function would take a plain number for a constant.
            with tf.init_scope():
                optimizer._create_hypers()
        return optimizer._hyper["learning_rate"]

    config = optimizer.get_config()
    number = config.get("learning_rate")
    if isinstance(number, numbers.Real):
        check_rate(float(number), where)
    rate = LearningRate(given)
    decay = float(config.get("decay") or 0.0)
    if not decay:
        return rate
    return rate.times(
        lambda step: 1.0 / (1.0 + decay * tf.cast(step, tf.float32)),
        f"1 / (1 + {decay} step)",
    )


def serialize(optimizer: Any, trained_by: TableOptimizer | None = None) -> Any:
    """Returns an optimizer of `convert` as JSON-able, for `get_config`.

    The learning rate assigned to `trained_by`, its table optimizer, is stored.
    A rate that is a callable or a variable is a ValueError.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, Regularized):
        config = {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in optimizer.options.given().items()
        }
        config["optimizer"] = serialize(optimizer.optimizer, trained_by)
        return {
            "kind": "tfrs_embed",
            "class_name": type(optimizer).__name__,
            "config": config,
        }
    if isinstance(optimizer, str) and optimizer.lower() in _KERAS_NAMES:
        if trained_by is None:
            return optimizer
        optimizer = trained_by.source
    given = optimizer
    if isinstance(optimizer, str):
        optimizer = _by_name(optimizer, "optimizer", None)
    if type(optimizer) not in _OF_CLASS:
        config = keras_versions.keras_of(optimizer).optimizers.serialize(
            optimizer
        )
        return {"kind": "keras", "config": config}
    assigned = _assigned_rate(optimizer, trained_by)
    if isinstance(given, str) and assigned is None:
        return given
    rule = _OF_CLASS[type(optimizer)]
    names = (*_ARGUMENTS, *(field.name for field in dataclasses.fields(rule)))
    config = {n: getattr(optimizer, n) for n in names if hasattr(optimizer, n)}
    limits = _clipvalue(optimizer)
    if limits is not None:
        config["clipvalue"] = list(limits)  # As JSON gives it back.
    rate = config["learning_rate"] if assigned is None else assigned
    name = type(optimizer).__name__
    config["learning_rate"] = stored(rate, name)
    kind = "tfrs_embed" if rule.tpu is None else "tpu"
    return {"kind": kind, "class_name": name, "config": config}


def _assigned_rate(
    optimizer: Any, trained_by: TableOptimizer | None
) -> float | None:
    """Returns the rate assigned instead of the given number, or None."""
    given = keras_versions.variable(optimizer.learning_rate)
    if trained_by is None or callable(given) or isinstance(given, tf.Variable):
        return None
    with tf.init_scope():
        rate = trained_by.learning_rate
    # It is kept in float32.
    return None if rate == np.float32(optimizer.learning_rate) else rate


def deserialize(config: Any, keras: Any, where: str) -> Any:
    """Returns the optimizer that `serialize` stored; `config` isn't changed.

    `keras` makes its Keras optimizer or schedule. `where` begins the ValueError
    of a name that is no optimizer's or schedule's.
    """
    if not isinstance(config, Mapping):
        return config
    stored = config["config"]
    if config["kind"] == "keras":
        return _keras_from_config(stored, keras, where)
    arguments = dict(stored)
    name = config["class_name"]
    if name == Regularized.__name__:
        inner = deserialize(arguments.pop("optimizer"), keras, where)
        return Regularized(inner, **arguments)
    if "clipvalue" in arguments:
        arguments["clipvalue"] = tuple(arguments["clipvalue"])
    rate = restored(arguments["learning_rate"], keras, where)
    kinds = {kind.__name__: kind for kind in _OF_CLASS}
    choice(name, tuple(kinds), where)
    return kinds[name](**{**arguments, "learning_rate": rate})


def _keras_from_config(config: Any, keras: Any, where: str) -> Any:
    """Returns the optimizer of `keras` that it has stored as `config`."""
    # SavedModels have the registered name: "Custom>Adam".
    name = config["class_name"].rpartition(">")[2]
    arguments = dict(config["config"])
    if "inner_optimizer" in arguments:
        inner = arguments.pop("inner_optimizer")
        inner = _keras_from_config(inner, keras, where)
        return keras.mixed_precision.LossScaleOptimizer(inner, **arguments)
    choice(name, tuple(_OF_KERAS), where)
    if "learning_rate" in arguments:
        rate = restored(arguments["learning_rate"], keras, where)
        arguments["learning_rate"] = rate
    # tf_keras's legacy optimizers don't store that they are legacy.
    of_keras_2 = keras.__name__ == keras_versions.TF_KERAS
    is_legacy = of_keras_2 and arguments.get("is_legacy_optimizer", True)
    return keras_configs.deserialize(
        {"class_name": name, "config": arguments},
        "optimizers.legacy" if is_legacy else "optimizers",
        keras,
        where,
    )


# Arguments that an equal optimizer needs besides its rule's settings.
_ARGUMENTS = (
    "learning_rate",
    "use_gradient_accumulation",
    "low_dimensional_packing_status",
    "allow_zero_accumulator",
)


def _refuse(where: str, setting: str, value: Any) -> None:
    raise ValueError(
        f"{where}: a table's update rule has no {setting}={value!r}; leave it "
        "at its default."
    )
