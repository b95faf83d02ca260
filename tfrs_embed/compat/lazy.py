"""Public names that are imported at their first use.

Each program imports `tfrs_embed`, and few need a planner, a report or an
export.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def import_later(
    package: str,
    modules: Mapping[str, Sequence[str]],
    submodules: Sequence[str] = (),
) -> None:
    """Gives a package a `__getattr__` and a `__dir__` of its public names.

    They are not in the package's text: type checkers would take any attribute
    of a package that has a `__getattr__` for right.

    Args:
        package: the package's name.
        modules: the names that are imported at their first use, by module.
        submodules: the package's public modules, imported in the same way.
    """
    this = sys.modules[package]
    module_of = {name: m for m, names in modules.items() for name in names}
    module_of |= {name: f"{package}.{name}" for name in submodules}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'"
            )
        module = importlib.import_module(module_of[name])
        value = module if name in submodules else getattr(module, name)
        setattr(this, name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*this.__all__, *submodules})

    vars(this).update(__getattr__=find, __dir__=list_names)
