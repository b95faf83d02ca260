"""Objects that Keras configs describe, made without importing a module.

A config may come from a stranger's file. tf_keras's `deserialize` imports any
module that a config names, in safe mode too, and some classes of tf_keras
deserialize values of their own configs (Constant its value, an optimizer its
rate). So this module looks a name up among objects of one kind, and checks the
objects nested in a config before tf_keras reads them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.private_tensorflow import init_ops, init_ops_v2

# The base class of each kind. A kind is the path of its module in a Keras.
_BASES = {
    "initializers": "Initializer",
    "regularizers": "Regularizer",
    "constraints": "Constraint",
    "optimizers": "Optimizer",
    "optimizers.legacy": "Optimizer",
    "optimizers.schedules": "LearningRateSchedule",
}
# The base classes of TensorFlow's initializers, without and with partitions.
_OF_TENSORFLOW = (init_ops.Initializer, init_ops_v2.Initializer)
# The most numbers of an array in a config: some 300 MB of JSON.
_MOST_NUMBERS = 2**24
# The class names of arrays in configs.
_ARRAYS = ("__numpy__", "__tensor__")


def require_small(initializer: Any, where: str) -> None:
    """Raises a NotImplementedError if a config can't hold an initializer.

    TensorFlow and Keras keep the array of a constant one as `value`.
    """
    require_few(
        np.size(getattr(initializer, "value", 0)),
        "an initializer",
        where,
        "Assign them to the table when the layer is built, as with "
        "load_tables; weights and checkpoints are saved without configs.",
    )


def require_few(size: int, holder: str, where: str, instead: str) -> None:
    """Raises a NotImplementedError for numbers that a config can't hold.

    `holder` has `size` numbers; `instead` ends the error.
    """
    if size > _MOST_NUMBERS:
        raise NotImplementedError(
            f"{where}: a layer's config holds at most {_MOST_NUMBERS:,} "
            f"numbers of {holder}, and this one has {size:,}. {instead}"
        )


def deserialize(config: Any, kind: str, keras: Any, where: str) -> Any:
    """Makes the object that a Keras stored as a config, unless it is unsafe.

    A class is one of the Keras's public classes of the kind, a subclass of the
    kind's base in a module that the program has imported (for initializers
    also the other Keras's and TensorFlow's), or registered: by
    `register_keras_serializable` or as one of `custom_objects`. A function must
    be registered. Lambdas are left to the Keras, which refuses them in its safe
    mode.

    Args:
        config: a dict with "class_name" and "config", which isn't changed; or a
            registered name. Another string is returned as it is: Keras looks it
            up among its own names. So are None, and objects of the program.
        kind: the path of the kind's module in a Keras: "initializers".
        keras: the Keras that has stored the object.
        where: begins error messages: "Table 'user'".

    Raises:
        ValueError: the config names nothing of this kind, or its values, or
            objects nested in them, can't be taken.
    """
    if isinstance(config, str):
        if keras.saving.get_registered_object(config) is None:
            return config
        config = {"class_name": config, "config": {}}
    if not isinstance(config, Mapping):
        if isinstance(config, (list, bool, int, float)):
            raise _refused(where, config, kind, keras)
        return config  # It isn't of JSON, but the program's own object.
    name = config.get("class_name")
    if not isinstance(name, str):
        raise _refused(where, config, kind, keras)
    inner = config.get("config")
    if name == "__lambda__":
        return keras.saving.deserialize_keras_object(
            {"class_name": name, "config": inner}
        )
    found = _find(config, kind, keras)
    if found is None:
        raise _refused(where, config, kind, keras)
    is_class: bool = isinstance(found, type)
    if not is_class:
        return found
    owner = keras_versions.keras_of_class(found) or keras
    # Classes of these packages don't read arrays in configs of all formats.
    package = found.__module__.partition(".")[0]
    with_arrays = package in ("tensorflow", keras_versions.TF_KERAS)
    try:
        arguments = _checked(inner or {}, owner, where, with_arrays)
        # Keras registers classes that have only `get_config`, too.
        has_method = hasattr(found, "from_config")
        made = (
            found.from_config(arguments) if has_method else found(**arguments)
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{where}: {keras.__name__}'s {name} can't be made of the config "
            f"{inner!r:.120}: {error}"
        ) from error
    if not _is_of(type(made), kind, keras) and not callable(made):
        raise _refused(where, config, kind, keras)
    return made


def _find(config: Mapping[str, Any], kind: str, keras: Any) -> Any:
    """Returns the class or function that a config names, or None."""
    name, module = config["class_name"], config.get("module")
    registered = config.get("registered_name", name)
    if name == "function":
        registered = config.get("config")
    found = None
    if isinstance(registered, str):
        found = keras.saving.get_registered_object(registered)
    if found is not None:
        # The program's own functions and classes need not have Keras's base.
        of_keras = isinstance(found, type) and keras_versions.keras_of_class(
            found
        )
        own = not of_keras and not kind.startswith("optimizers")
        return found if own or _is_of(found, kind, keras) else None
    if module in (None, *(f"{each}.{kind}" for each in keras_versions.NAMES)):
        holder = operator.attrgetter(kind)(keras)
    else:
        holder = sys.modules.get(module) if isinstance(module, str) else None
    # Not by getattr, which a module may have as a function that imports.
    found = getattr(holder, "__dict__", {}).get(name)
    return found if _is_of(found, kind, keras) else None


def _is_of(found: Any, kind: str, keras: Any) -> bool:
    """Whether a value is a class of the kind, of a Keras or TensorFlow."""
    bases = [getattr(operator.attrgetter(kind)(keras), _BASES[kind])]
    if kind == "initializers":  # A table takes those of either Keras.
        bases.extend(
            each.initializers.Initializer for each in keras_versions.loaded()
        )
        bases.extend(_OF_TENSORFLOW)
    return isinstance(found, type) and issubclass(found, tuple(bases))


def _checked(value: Any, keras: Any, where: str, with_arrays: bool) -> Any:
    """Returns a copy of a config, as Keras writes into what it reads.

    Objects nested in it for which tf_keras would import a module are a
    ValueError. `with_arrays` makes arrays of the dicts that stand for them.
    """
    if isinstance(value, (list, tuple)):
        items = [_checked(each, keras, where, with_arrays) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, Mapping):
        return value
    name = value.get("class_name")
    if name in _ARRAYS and "config" in value:
        stored = value["config"]
        if not with_arrays:
            return {"class_name": name, "config": dict(stored)}
        dtype = tf.as_dtype(stored["dtype"]).as_numpy_dtype
        return np.array(stored["value"], dtype)
    if "class_name" in value and keras.__name__ == keras_versions.TF_KERAS:
        named = isinstance(name, str)
        if not named or not any(_find(value, kind, keras) for kind in _BASES):
            raise _refused(where, value, "objects in configs", keras)
    return {
        key: _checked(each, keras, where, with_arrays)
        for key, each in value.items()
    }


def _refused(where: str, config: Any, kind: str, keras: Any) -> ValueError:
    name = keras.__name__
    return ValueError(
        f"{where}: {config!r:.120} isn't one of {name}'s {kind}. A class or "
        f"function of your own must be registered, by "
        f"{name}.saving.register_keras_serializable or custom_objects, or be a "
        "class of an imported module with Keras's base class; nothing is "
        "imported for a config."
    )
