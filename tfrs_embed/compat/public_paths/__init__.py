"""Import paths of public modules whose files are in a room of the library.

Python finds these modules as `tfrs_embed.<name>`: `tfrs_embed/__init__.py` adds
this folder to the package's `__path__`. Each puts the module that it names into
`sys.modules` in its own place, so both paths lead to one module object.
"""

import importlib
import sys


def lead(path: str, module: str) -> None:
    """Makes `path` another import path of a module.

    Args:
        path: the `__name__` of the module that calls this.
        module: the module's own path.
    """
    sys.modules[path] = importlib.import_module(module)
