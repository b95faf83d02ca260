"""Arguments by name: an error for a misspelt one says what was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Names that every Keras layer takes, and some that its configs may have.
_KERAS = (
    "name",
    "dtype",
    "trainable",
    "activity_regularizer",
    "input_shape",
    "batch_input_shape",
    "input_dim",
    "batch_size",
    "weights",
    "dynamic",
    "implementation",
)
# Those of them that an error may suggest.
_SUGGESTED = _KERAS[:4]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named(init: F) -> F:
    """Checks the names that a class's `__init__` or `__new__` is given.

    Args:
        init: the method. If it takes any names, they are those of Keras layers.

    Returns:
        The method, with a TypeError for an unknown name, and that before one
        for an argument that is missing.
    """
    known, more = names(init)

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = self if isinstance(self, type) else type(self)
        allowed = (*known, *_KERAS) if more else known
        require_known(
            cls.__name__,
            [k for k in kwargs if k not in allowed],
            (*known, *_SUGGESTED) if more else known,
        )
        return init(self, *args, **kwargs)

    # Keras 3 asks for it in a way that doesn't look behind wrappers.
    checking.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return checking  # type: ignore[return-value]


def named_fields(cls: type[T]) -> type[T]:
    """Checks the names that a dataclass is given, as `named`."""
    cls.__init__ = named(cls.__init__)  # type: ignore[method-assign]
    return cls


def names(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a method's arguments, and whether it takes any others."""
    _, *parameters = inspect.signature(function).parameters.values()
    return (
        [p.name for p in parameters if p.kind not in _VARIADIC],
        any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def require_known(
    where: str, unknown: Iterable[str], known: Sequence[str]
) -> None:
    """Requires that there are no unknown names.

    Args:
        where: whose arguments they are.
        unknown: the unknown names.
        known: the known ones.

    Raises:
        TypeError: there is one.
    """
    for name in unknown:
        near = difflib.get_close_matches(name.lower(), known, n=1) or [
            k for k in known if name and (name in k or k in name)
        ]
        meant = f"; did you mean '{near[0]}'?" if near else "."
        raise TypeError(
            f"{where} has no argument '{name}'{meant} Its arguments are "
            f"{', '.join(known)}."
        )
