"""Dataclasses as JSON, with every field of its type and no others."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def loads(text: str, cls: type[T], what: str) -> T:
    """Makes a dataclass from JSON; fields with defaults may be missing.

    Fields may be numbers, strings, bools, None, literals, tuples of these, and
    dataclasses.

    Args:
        text: the JSON, an object with the fields by name.
        cls: the dataclass.
        what: its name in errors: "plan".

    Raises:
        ValueError: the text is not JSON, or a field is missing, unknown, of a
            wrong type or refused; the error names its place.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"The {what} is not JSON: {error}.") from None
    return typing.cast(T, _decode(cls, value, what))


def dumps(value: Any) -> str:
    """Returns a dataclass as JSON, with all of its fields."""
    return json.dumps(dataclasses.asdict(value), indent=2, allow_nan=False)


_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
}


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        item, _ = typing.get_args(kind)
        return tuple(
            _decode(item, each, f"{where}[{i}]") for i, each in enumerate(value)
        )
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise _wrong(where, f"one of {list(allowed)}", value)
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        [kind] = (k for k in typing.get_args(kind) if k is not type(None))
        return _decode(kind, value, where)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _wrong(where, _NAMES[kind], value)
    return value


def _decode_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in value if name not in fields]:
        raise ValueError(
            f"{where} has the unknown fields {unknown}; its fields are "
            f"{list(fields)}."
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in value and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} lacks the fields {missing}.")
    kinds = typing.get_type_hints(cls)
    made = {
        name: _decode(kinds[name], each, f"{where}.{name}")
        for name, each in value.items()
    }
    try:
        return cls(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _wrong(where: str, wanted: str, value: Any) -> ValueError:
    text = json.dumps(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return ValueError(f"{where} must be {wanted}, got {text}.")
