"""The constructor arguments of layers of tables, checked and stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import serialization
from tfrs_embed.arguments import as_int, choice
from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution import wire
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.planner.plans import Plan

INVALID_IDS = ("error", "zero")


@dataclasses.dataclass(frozen=True)
class TableArguments:
    """The constructor arguments that layers of tables share, as given.

    Each layer has one object with all of its arguments, of this class or one
    made of it. There they are out of reach of Keras's tracking.

    Attributes:
        optimizer: of the tables that have none of their own.
        pipeline_execution_with_tensor_core: whether updates overlap the next
            step.
        size_threshold: number of rows above which a table is large, or None.
        sparse_core_embedding_config: a `SparseCoreEmbeddingConfig`, or None.
        embedding_feature: a TPU's embedding hardware to use instead of what it
            has, or None.
        invalid_ids: one of `INVALID_IDS`.
        plan: a `Plan` of the tables' placements, or None.
        communication_dtype: the name of what rows and gradients are sent as;
            None: what the plan says.
    """

    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    size_threshold: int | None
    sparse_core_embedding_config: Any
    embedding_feature: Any
    invalid_ids: str
    plan: Plan | None
    communication_dtype: Any

    def __post_init__(self) -> None:
        """Checks the values."""
        threshold = check_integer(self.size_threshold, "size_threshold")
        object.__setattr__(self, "size_threshold", threshold)
        choice(self.invalid_ids, INVALID_IDS, "invalid_ids")
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

    def to_config(self, optimizer: TableOptimizer | None) -> dict[str, Any]:
        """The arguments by name, JSON-able.

        Args:
            optimizer: what `optimizer` was converted to, for a table that it
                trains; None if there is none.

        Raises:
            ValueError: an optimizer's learning rate can't be stored.
        """
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        config.update(
            optimizer=conversion.serialize(self.optimizer, optimizer),
            sparse_core_embedding_config=serialization.dataclass_to_config(
                self.sparse_core_embedding_config
            ),
            embedding_feature=getattr(self.embedding_feature, "name", None),
            plan=None if self.plan is None else self.plan.to_json(),
        )
        return config

    @staticmethod
    def from_config(config: Mapping[str, Any], keras: Any) -> dict[str, Any]:
        """Arguments by name, of a config with what `to_config` returned.

        Args:
            config: the config; its other entries are left as they are.
            keras: the layer's Keras.
        """
        arguments = dict(config)
        arguments["optimizer"] = conversion.deserialize(
            config["optimizer"], keras
        )
        arguments["sparse_core_embedding_config"] = (
            serialization.sparse_core_from_config(
                config["sparse_core_embedding_config"]
            )
        )
        # Files of older versions have none.
        if arguments.get("plan") is not None:
            arguments["plan"] = Plan.from_json(arguments["plan"])
        feature = config["embedding_feature"]
        if feature is not None:
            kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
            arguments["embedding_feature"] = kinds[feature]
        return arguments


def check_integer(
    value: Any, name: str, minimum: int | None = None
) -> int | None:
    """Checks an argument that is an integer or None.

    Args:
        value: the argument.
        name: its name.
        minimum: its least value, or None.

    Returns:
        The argument as Python's integer, or None.

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
    converted: dict[int, TableOptimizer | None] = {}
    result = {}
    for table in tables:
        given = optimizer if table.optimizer is None else table.optimizer
        key = id(given)
        if table.optimizer is not None and isinstance(given, str):
            key = id(table)  # Equal names are not one object.
        if key not in converted:
            where = (
                f"{layer}'s optimizer"
                if table.optimizer is None
                else f"Table '{table.name}'"
            )
            converted[key] = conversion.convert(given, where, keras)
        result[table.name] = converted[key]
    return result
