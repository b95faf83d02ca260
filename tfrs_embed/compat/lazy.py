"""Public names that are imported at their first use.

Each program imports `tfrs_embed`, and few need a planner, a report or an
export.
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
    """Makes a package's `__getattr__`, which imports public names.

    `modules` has the names by their modules, `submodules` the package's public
    modules.
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
