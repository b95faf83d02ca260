"""The constructor arguments of layers of tables, checked and stored."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import tensorflow as tf

from tfrs_embed.compat.arguments import as_int, choice
from tfrs_embed.configs import serialization
from tfrs_embed.configs.tables import TableSpec, by_optimizer
from tfrs_embed.configs.types import InvalidIds
from tfrs_embed.distribution import wire
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer

if TYPE_CHECKING:
    from tfrs_embed.configs.plan import Plan

_INVALID_IDS: tuple[str, ...] = get_args(InvalidIds)


class TableArguments:
    """The constructor arguments of a layer of tables, checked.

    Each layer has one such object, in which they are out of reach of Keras's
    tracking.

    Args:
        **given: the layer's arguments by name, but for its features and those
            that every Keras layer has.

    Attributes:
        given: the arguments by name, checked.
        optimizer: of the tables that have none of their own.
        pipelined: whether updates overlap the next step.
        size_threshold: number of rows above which a table is large, or None; 0
            for layers without this argument.
        invalid_ids: one of `InvalidIds`.
        plan: a `Plan` of the tables' placements, or None.
        communication_dtype: the name of what rows and gradients are sent as;
            None: what the plan says.
    """

    def __init__(self, **given: Any) -> None:
        self.given = given
        if "size_threshold" in given:
            threshold = check_integer(given["size_threshold"], "size_threshold")
            given["size_threshold"] = threshold
        if given.get("communication_dtype") is not None:
            sent_as = wire.communication_dtype(given["communication_dtype"])
            given["communication_dtype"] = sent_as
        self.optimizer = given["optimizer"]
        self.pipelined: bool = given.get(
            "pipeline_execution_with_tensor_core", False
        )
        self.size_threshold: int | None = given.get("size_threshold", 0)
        self.invalid_ids: str = given.get("invalid_ids", "error")
        self.plan: Plan | None = given.get("plan")
        self.communication_dtype: str | None = given["communication_dtype"]
        choice(self.invalid_ids, _INVALID_IDS, "invalid_ids")
        if self.communication_dtype and self.plan is not None:
            planned = getattr(self.plan, "communication_dtype", None)
            if planned not in (None, self.communication_dtype):
                raise ValueError(
                    f"communication_dtype='{self.communication_dtype}', but "
                    "the plan is for rows and gradients that are sent as "
                    f"{planned}: give tfrs_embed.plan the same."
                )

    @property
    def sent_as(self) -> str:
        """The name of the dtype that rows and gradients are sent as."""
        if self.communication_dtype is not None:
            return self.communication_dtype
        return "float32" if self.plan is None else self.plan.communication_dtype

    def to_config(
        self, optimizer: TableOptimizer | None, keras: Any
    ) -> dict[str, Any]:
        """The arguments by name, JSON-able.

        Args:
            optimizer: what `optimizer` was converted to, for a table that it
                trains; None if there is none.
            keras: the layer's Keras.

        Raises:
            ValueError: an optimizer's learning rate can't be stored, or a rule
                is a function.
        """
        config = dict(self.given)
        for name, (store, _) in _stored(keras).items():
            if config.get(name) is not None:
                config[name] = store(config[name])
        config["optimizer"] = conversion.serialize(self.optimizer, optimizer)
        return config


def from_config(config: Mapping[str, Any], keras: Any) -> dict[str, Any]:
    """A layer's arguments by name, of its config, which is not changed."""
    arguments = dict(config)
    for name, (_, restore) in _stored(keras).items():
        if arguments.get(name) is not None:
            arguments[name] = restore(arguments[name])
    arguments["optimizer"] = conversion.deserialize(config["optimizer"], keras)
    return arguments


def _as_text(keys: Sequence[Any]) -> list[Any]:
    return [k.decode() if isinstance(k, bytes) else k for k in keys]


_RULE = (serialization.to_config, serialization.from_config)
_FEATURES = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


def _stored(
    keras: Any,
) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """How arguments that aren't None are stored in a config, and restored."""
    return {
        "admission": _RULE,
        "embedding_feature": (lambda each: each.name, _FEATURES.__getitem__),
        "embedding_initializer": (
            lambda each: serialization.initializer_to_config(each, keras),
            lambda each: serialization.initializer_from_config(each, keras),
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


def check_integer(
    value: Any, name: str, minimum: int | None = None
) -> int | None:
    """Returns an argument that is an integer or None, of Python's type.

    Raises:
        TypeError: it is something else.
        ValueError: it is below the minimum.
    """
    if value is None:
        return None
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer or None, got {value!r}.")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}.")
    return number


def convert_optimizers(
    tables: Sequence[TableSpec], optimizer: Any, layer: str, keras: Any
) -> dict[str, TableOptimizer | None]:
    """Converts each table's optimizer: its own, else that of the layer.

    Tables that were given one object share what becomes of it. `layer` is the
    layer's class, for errors.
    """
    result = {}
    for group in by_optimizer(tables, optimizer):
        given, where = group[0].optimizer, f"Table '{group[0].name}'"
        if given is None:
            given, where = optimizer, f"{layer}'s optimizer"
        converted = conversion.convert(given, where, keras)
        if converted is not None:
            # Makes the rate's variable: the layer may be built in a replica.
            converted.rate.given()
        result.update({table.name: converted for table in group})
    return result
