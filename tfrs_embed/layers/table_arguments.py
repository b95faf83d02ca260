"""The constructor arguments of layers of tables, checked and stored."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import tensorflow as tf

from tfrs_embed.compat import keras_configs
from tfrs_embed.compat.arguments import choice, flag, integer, integer_or_none
from tfrs_embed.configs import serialization
from tfrs_embed.configs.tables import TableSpec, by_optimizer
from tfrs_embed.configs.types import InvalidIds
from tfrs_embed.distribution import wire
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer

if TYPE_CHECKING:
    from tfrs_embed.configs.plan import Plan

_PIPELINED = "pipeline_execution_with_tensor_core"


# Checks of arguments by name; they take an argument and its name, and return
# what the layer keeps.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "batch_size": integer_or_none,
    "communication_dtype": lambda value, _: (
        None if value is None else wire.communication_dtype(value)
    ),
    "dynamic_input": flag,
    "embedding_vec_size": integer,
    "invalid_ids": lambda value, what: choice(
        value, get_args(InvalidIds), what
    ),
    "max_vocabulary_size_per_gpu": integer,
    "nnz_per_slot": integer,
    _PIPELINED: flag,
    # -1, as programs of TFRS say, makes all tables large, as 0 does.
    "size_threshold": functools.partial(integer_or_none, least=-1),
    "slot_num": integer,
    "table_stacking": lambda value, _: copy.deepcopy(value),
    "update_stats": flag,
    "use_hashtable": flag,
}


class TableArguments:
    """The constructor arguments of a layer of tables, checked.

    They are in an object of their own because Keras tracks layers' attributes.
    The features and the arguments of every Keras layer are not among them.

    Args:
        variables: the `locals()` of the layer's `__init__`, before it has any
            other variables than its arguments.

    Attributes:
        given: the arguments by name.
        optimizer: trains the tables that have no optimizer of their own.
        pipelined: whether SparseCores overlap updates with the next step.
        size_threshold: number of rows above which a table is large, or None; 0
            for layers without this argument.
        invalid_ids: one of `InvalidIds`.
        plan: a `Plan` of the tables' placements, or None.
        sent_as: the name of the dtype of rows and gradients between replicas.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        layer = variables["self"]
        others = ("self", "kwargs", "__class__", layer._FEATURES)
        given = {k: v for k, v in variables.items() if k not in others}
        for name, check in _CHECKS.items():
            if name in given:
                given[name] = check(given[name], name)
        if "embedding_initializer" in given:
            given["embedding_initializer"] = layer._keras.initializers.get(
                given["embedding_initializer"]
            )
        self.given = given
        self.optimizer = given["optimizer"]
        self.pipelined: bool = given.get(_PIPELINED, False)
        self.size_threshold: int | None = given.get("size_threshold", 0)
        self.invalid_ids: str = given.get("invalid_ids", "error")
        self.plan: Plan | None = given.get("plan")
        sent_as = given["communication_dtype"]
        planned = getattr(self.plan, "communication_dtype", None)
        if None not in (sent_as, planned) and sent_as != planned:
            raise ValueError(
                f"communication_dtype='{sent_as}', but the plan is for rows "
                f"and gradients that are sent as {planned}: give "
                "tfrs_embed.plan the same."
            )
        self.sent_as: str = sent_as or planned or "float32"

    def to_config(
        self, optimizer: TableOptimizer | None, keras: Any
    ) -> dict[str, Any]:
        """The arguments by name, JSON-able.

        `optimizer` is the conversion of the argument of this name, if any.
        Raises a ValueError if a learning rate can't be stored, or a rule is a
        function.
        """
        config = dict(self.given)
        for name, (store, _) in _stored(keras).items():
            if config.get(name) is not None:
                config[name] = store(config[name])
        config["optimizer"] = conversion.serialize(self.optimizer, optimizer)
        return config


def from_config(config: Mapping[str, Any], keras: Any) -> dict[str, Any]:
    """The arguments by name, from a layer's config, which is not changed."""
    arguments = dict(config)
    for name, (_, restore) in _stored(keras).items():
        if arguments.get(name) is not None:
            arguments[name] = restore(arguments[name])
    arguments["optimizer"] = conversion.deserialize(
        config["optimizer"], keras, "optimizer"
    )
    arguments["activity_regularizer"] = keras_configs.deserialize(
        config.get("activity_regularizer"),
        "regularizers",
        keras,
        "activity_regularizer",
    )
    return arguments


def _as_text(keys: Sequence[Any]) -> list[Any]:
    return [k.decode() if isinstance(k, bytes) else k for k in keys]


_RULE = (serialization.to_config, serialization.from_config)
_FEATURES = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


def _stored(
    keras: Any,
) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """For each argument, functions to store and to restore it in a config."""
    return {
        "admission": _RULE,
        "embedding_feature": (lambda each: each.name, _FEATURES.__getitem__),
        "embedding_initializer": (
            lambda each: serialization.initializer_to_config(
                each, keras, "embedding_initializer"
            ),
            lambda each: serialization.initializer_from_config(
                each, keras, "embedding_initializer"
            ),
        ),
        "eviction": _RULE,
        "eviction_policy": _RULE,
        "initial_vocabulary": (_as_text, tuple),
        "key_dtype": (serialization.to_config, tf.as_dtype),
        "plan": (lambda plan: plan.to_json(), _plan_from_json),
        "sparse_core_embedding_config": (
            dataclasses.asdict,
            serialization.sparse_core_from_config,
        ),
        "table_stacking": (copy.deepcopy, copy.deepcopy),
    }


def _plan_from_json(text: str) -> Plan:
    from tfrs_embed.configs.plan import Plan

    return Plan.from_json(text)


def convert_optimizers(
    tables: Sequence[TableSpec], optimizer: Any, layer: str, keras: Any
) -> dict[str, TableOptimizer | None]:
    """Converts each table's optimizer: its own, else that of the layer.

    Tables with the same optimizer object share its conversion. `layer` is the
    layer's class, for errors.
    """
    result = {}
    for group in by_optimizer(tables, optimizer):
        given, where = group[0].optimizer, f"Table '{group[0].name}'"
        if given is None:
            given, where = optimizer, f"{layer}'s optimizer"
        converted = conversion.convert(given, where, keras)
        if converted is not None:
            # Creates the rate's variable, before a replica may build the layer.
            converted.rate.given()
        result.update({table.name: converted for table in group})
    return result
