"""JSON that anybody may have written, and dataclasses as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

from tfrs_embed.compat.arguments import choice

T = TypeVar("T")


def parse(text: str | bytes, what: str) -> Any:
    """Returns the value of JSON that anybody may have written.

    Args:
        text: the JSON.
        what: its name in errors: "The plan".

    Raises:
        ValueError: the text is not JSON; has a number beyond 64 bits, NaN or
            an infinite one, or a field of an object twice; or nests deeper than
            Python's parser goes.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{what} is not JSON: {error}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice!r} twice")
    return found


def _integer(text: str) -> int:
    # Longer ones are slow, or refused by Python with an error of its own.
    number = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{text:.60} has more than 64 bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.60} is no finite number")
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
}


def _decode(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    arguments = typing.get_args(kind)
    if types.NoneType in arguments:
        return None if value is None else _decode(arguments[0], value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        items = enumerate(value)
        return tuple(
            _decode(arguments[0], v, f"{where}[{i}]") for i, v in items
        )
    if arguments:  # A Literal's.
        return choice(value, arguments, where)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
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
    required = (
        n for n, f in fields.items() if f.default is dataclasses.MISSING
    )
    missing = [name for name in required if name not in value]
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
    return ValueError(f"{where} must be {wanted}, got {json.dumps(value):.60}.")
