"""The constructor arguments of a layer of keys, checked and stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed import serialization
from tfrs_embed.arguments import flag, integer
from tfrs_embed.distribution import wire
from tfrs_embed.dynamic_keys import (
    KeysOfShards,
    rule_from_config,
    to_config,
)
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer

KEY_DTYPES = (tf.int32, tf.int64, tf.uint32, tf.uint64)


@dataclasses.dataclass(frozen=True)
class KeyArguments:
    """The arguments of a layer of keys, out of reach of Keras's tracking.

    Args:
        where: the layer, for errors.
        keras: its Keras.
    """

    max_vocabulary_size_per_gpu: int
    embedding_vec_size: int
    slot_num: int
    nnz_per_slot: int
    dynamic_input: bool
    use_hashtable: bool
    key_dtype: tf.DType
    embedding_initializer: Any
    optimizer: Any
    admission: Any
    eviction: Any
    when_full: Any
    communication_dtype: Any
    where: dataclasses.InitVar[str]
    keras: dataclasses.InitVar[Any]

    def __post_init__(self, where: str, keras: Any) -> None:
        """Checks the values."""
        for field, check in _CHECKS.items():
            value = check(getattr(self, field), field, where)
            object.__setattr__(self, field, value)
        initializer = _initializer(self.embedding_initializer, where, keras)
        object.__setattr__(self, "embedding_initializer", initializer)
        self._check_keys(where)

    def _check_keys(self, where: str) -> None:
        names = ("admission", "eviction", "when_full")
        given = [name for name in names if getattr(self, name) is not None]
        if given and not self.use_hashtable:
            raise ValueError(
                f"{where}: with use_hashtable=False every key has its row: "
                f"{', '.join(given)} can't be honoured."
            )
        try:
            self.keys()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error

    def keys(self) -> KeysOfShards | None:
        """How keys come and go; None: they are the rows' numbers."""
        if not self.use_hashtable:
            return None
        return KeysOfShards(
            self.key_dtype,
            self.admission,
            self.eviction,
            self.when_full,
        )

    @property
    def keys_shape(self) -> tf.TensorShape:
        """The shape that keys must have, as far as it is known."""
        if self.dynamic_input:
            return tf.TensorShape([None])
        return tf.TensorShape([None, self.slot_num, self.nnz_per_slot])

    @property
    def keys_shape_text(self) -> str:
        """The same for errors, with the arguments that it comes from."""
        if self.dynamic_input:
            return "[k], as dynamic_input=True says"
        return (
            f"[batch, slot_num={self.slot_num}, "
            f"nnz_per_slot={self.nnz_per_slot}]"
        )

    def to_config(
        self, optimizer: TableOptimizer | None, keras: Any
    ) -> dict[str, Any]:
        """The arguments by name, JSON-able.

        Args:
            optimizer: what `optimizer` was converted to.
            keras: the layer's Keras.

        Raises:
            ValueError: the optimizer's learning rate can't be stored.
        """
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        config.update(
            key_dtype=self.key_dtype.name,
            embedding_initializer=serialization.initializer_to_config(
                self.embedding_initializer, keras
            ),
            optimizer=conversion.serialize(self.optimizer, optimizer),
        )
        keys = self.keys()
        if keys is not None:
            stored = to_config(keys)
            config.update(
                admission=stored["admission"], eviction=stored["eviction"]
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
        for name in ("admission", "eviction"):
            arguments[name] = rule_from_config(arguments.get(name))
        arguments["embedding_initializer"] = (
            serialization.initializer_from_config(
                config["embedding_initializer"], keras
            )
        )
        arguments["optimizer"] = conversion.deserialize(
            config["optimizer"], keras
        )
        return arguments


def _positive(value: Any, field: str, where: str) -> int:
    return integer(value, f"{where}: {field}")


def _flag(value: Any, field: str, where: str) -> bool:
    return flag(value, f"{where}: {field}")


def _initializer(value: Any, where: str, keras: Any) -> Any:
    try:
        return keras.initializers.get(value)
    except (TypeError, ValueError) as error:
        text = f"{where}: embedding_initializer: {error}"
        raise type(error)(text) from error


def _key_dtype(value: Any, field: str, where: str) -> tf.DType:
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in KEY_DTYPES:
        raise ValueError(
            f"{where}: {field} must be one of "
            f"{[d.name for d in KEY_DTYPES]}, got {value!r}."
        )
    return dtype


def _communication_dtype(value: Any, field: str, where: str) -> str:
    try:
        return wire.communication_dtype(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


_CHECKS = {
    "max_vocabulary_size_per_gpu": _positive,
    "embedding_vec_size": _positive,
    "slot_num": _positive,
    "nnz_per_slot": _positive,
    "dynamic_input": _flag,
    "use_hashtable": _flag,
    "key_dtype": _key_dtype,
    "communication_dtype": _communication_dtype,
}
