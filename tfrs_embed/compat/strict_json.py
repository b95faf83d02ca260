"""JSON that anybody may have written, and dataclasses as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

# So many lists and objects may be within each other.
_DEEPEST = 100


def parse(text: str | bytes, what: str) -> Any:
    """Returns the value of JSON that anybody may have written.

    Args:
        text: the JSON; bytes are UTF-8.
        what: its name in errors: "The plan".

    Raises:
        ValueError: the text is not JSON or not UTF-8; has a number beyond 64
            bits, NaN or an infinite one, or a field of an object twice; or
            nests more than 100 lists and objects.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_float,
        )
        _check_depth(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{what} is not JSON: {error}.") from None
    return value


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for vs in inner for v in vs if isinstance(v, dict | list)]
    if level:
        raise ValueError(f"more than {_DEEPEST} levels of lists and objects")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, times)] = collections.Counter(n for n, _ in pairs).most_common(
            1
        )
        raise ValueError(f"an object has the field {name!r} {times} times")
    return found


def _integer(text: str) -> int:
    # Longer ones are slow, or refused by Python with an error of its own.
    number = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{_shorten(text)} has more than 64 bits")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{_shorten(text)} is no finite number")
    return number


def loads(text: str | bytes, cls: type[T], what: str) -> T:
    """Makes a dataclass from JSON; fields with defaults may be missing.

    Fields may be numbers, strings, bools, None, literals, tuples of these, and
    dataclasses.

    Args:
        text: the JSON, an object with the fields by name.
        cls: the dataclass.
        what: its name in errors: "plan".

    Raises:
        ValueError: the text is not JSON that `parse` takes, or a field is
            missing, unknown, of a wrong type or refused; the error names its
            place.
    """
    return typing.cast(T, _decode(cls, parse(text, f"The {what}"), what))


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
    unknown = [name for name in value if name not in fields]
    if unknown:
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
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _wrong(where: str, wanted: str, value: Any) -> ValueError:
    return ValueError(
        f"{where} must be {wanted}, got {_shorten(json.dumps(value))}."
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
