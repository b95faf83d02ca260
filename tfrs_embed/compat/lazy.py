"""Public names that are imported when a program first asks for them.

Each start of a program imports `tfrs_embed`, and no training step needs a
planner, a report or an export.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def importer(
    package: str,
    modules: Mapping[str, Sequence[str]],
    submodules: Sequence[str] = (),
) -> Callable[[str], Any]:
    """Makes the function `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        modules: public names by the module that defines them.
        submodules: public modules of the package.

    Returns:
        A function that imports the module of a public name and returns the
        name's value. It raises an AttributeError for any other name.
    """
    module_of = {name: m for m, names in modules.items() for name in names}
    module_of |= {name: f"{package}.{name}" for name in submodules}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'"
            )
        module = importlib.import_module(module_of[name])
        value = module if name in submodules else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find
