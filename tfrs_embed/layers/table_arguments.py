"""The constructor arguments of layers of tables, checked and stored."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import tensorflow as tf

from tfrs_embed import serialization
from tfrs_embed.arguments import as_int, choice
from tfrs_embed.configs import TableSpec, by_optimizer
from tfrs_embed.distribution import wire
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.planner.plans import Plan
from tfrs_embed.types import InvalidIds

_INVALID_IDS: tuple[str, ...] = get_args(InvalidIds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableArguments:
    """The constructor arguments of a layer of tables, as given.

    Each layer has one object of a subclass, which adds the layer's own
    arguments. There they are out of reach of Keras's tracking.

    Attributes:
        optimizer: of the tables that have none of their own.
        pipeline_execution_with_tensor_core: whether updates overlap the next
            step.
        size_threshold: number of rows above which a table is large, or None.
        sparse_core_embedding_config: a `SparseCoreEmbeddingConfig`, or None.
        embedding_feature: a TPU's embedding hardware to use instead of what it
            has, or None.
        invalid_ids: one of `InvalidIds`.
        plan: a `Plan` of the tables' placements, or None.
        communication_dtype: the name of what rows and gradients are sent as;
            None: what the plan says.
    """

    optimizer: Any
    pipeline_execution_with_tensor_core: bool = False
    size_threshold: int | None = None
    sparse_core_embedding_config: Any = None
    embedding_feature: Any = None
    invalid_ids: str = "error"
    plan: Plan | None = None
    communication_dtype: Any = None

    def __post_init__(self) -> None:
        """Checks the values."""
        threshold = check_integer(self.size_threshold, "size_threshold")
        object.__setattr__(self, "size_threshold", threshold)
        choice(self.invalid_ids, _INVALID_IDS, "invalid_ids")
        if self.communication_dtype is None:
            return
        sent_as = wire.communication_dtype(self.communication_dtype)
        object.__setattr__(self, "communication_dtype", sent_as)
        if isinstance(self.plan, Plan):
            planned = self.plan.communication_dtype
            if planned != sent_as:
                raise ValueError(
                    f"communication_dtype='{sent_as}', but the plan is for "
                    f"rows and gradients that are sent as {planned}: give "
                    "tfrs_embed.plan the same."
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
        config = dict(vars(self))
        for name, (store, _) in _STORED.items():
            if config.get(name) is not None:
                config[name] = store(config[name])
        if "embedding_initializer" in config:
            config["embedding_initializer"] = (
                serialization.initializer_to_config(
                    config["embedding_initializer"], keras
                )
            )
        config["optimizer"] = conversion.serialize(self.optimizer, optimizer)
        return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyArguments(TableArguments):
    """The constructor arguments of a layer of one table of keys, as given.

    Attributes:
        embedding_initializer: of the rows.
        key_dtype: the keys' dtype.
        admission: which keys get rows; see `DynamicKeys`.
        when_full: what happens without a free row; see `DynamicKeys`.
    """

    embedding_initializer: Any
    key_dtype: tf.DType
    admission: Any
    when_full: str | None

    def to_config(
        self, optimizer: TableOptimizer | None, keras: Any
    ) -> dict[str, Any]:
        # Such layers lack the other arguments.
        config = super().to_config(optimizer, keras)
        lacking = {f.name for f in dataclasses.fields(TableArguments)}
        lacking -= {"optimizer", "communication_dtype"}
        return {k: v for k, v in config.items() if k not in lacking}


def from_config(config: Mapping[str, Any], keras: Any) -> dict[str, Any]:
    """A layer's arguments by name, of its config, which is not changed."""
    arguments = dict(config)
    for name, (_, restore) in _STORED.items():
        if arguments.get(name) is not None:
            arguments[name] = restore(arguments[name])
    if "embedding_initializer" in arguments:
        arguments["embedding_initializer"] = (
            serialization.initializer_from_config(
                config["embedding_initializer"], keras
            )
        )
    arguments["optimizer"] = conversion.deserialize(config["optimizer"], keras)
    return arguments


def _as_text(keys: Sequence[Any]) -> list[Any]:
    return [k.decode() if isinstance(k, bytes) else k for k in keys]


_RULE = (serialization.to_config, serialization.from_config)
_FEATURES = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
# How arguments that aren't None are stored in a config, and restored from it.
_STORED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "admission": _RULE,
    "eviction": _RULE,
    "eviction_policy": _RULE,
    "embedding_feature": (lambda feature: feature.name, _FEATURES.__getitem__),
    "initial_vocabulary": (_as_text, tuple),
    "key_dtype": (serialization.to_config, tf.as_dtype),
    "plan": (Plan.to_json, Plan.from_json),
    "sparse_core_embedding_config": (
        dataclasses.asdict,
        serialization.sparse_core_from_config,
    ),
    "table_stacking": (copy.deepcopy, copy.deepcopy),
}


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
    """Converts each table's optimizer: its own, else the layer's.

    Args:
        tables: the tables.
        optimizer: the layer's, in any form that `convert` takes.
        layer: the layer's class, for errors.
        keras: its Keras.

    Returns:
        The optimizers by table name. Tables that were given one object share
        what becomes of it.
    """
    result = {}
    for group in by_optimizer(tables, optimizer):
        own = group[0].optimizer
        converted = (
            conversion.convert(optimizer, f"{layer}'s optimizer", keras)
            if own is None
            else conversion.convert(own, f"Table '{group[0].name}'", keras)
        )
        result.update({table.name: converted for table in group})
    return result
