"""The public names and their signatures, one a line.

    python tests/public_names.py > tests/public_names.txt

The lines are the same on every Python and TensorFlow: only what this library
defines is among them, without annotations, and a default that isn't a plain
value is `Ellipsis`.
"""

import importlib
import inspect
import pathlib

from tfrs_embed.compat import public_paths

_PLAIN = (bool, int, float, str, type(None))
#: The packages of public names that have no short path.
_PACKAGES = ("checkpoint", "kernels", "optimizers", "serving", "sparsecore")


def modules():
    """The public modules' names."""
    [folder] = public_paths.__path__
    paths = [path.stem for path in pathlib.Path(folder).glob("*.py")]
    names = sorted({*_PACKAGES, *paths} - {"__init__"})
    return ["tfrs_embed", *(f"tfrs_embed.{name}" for name in names)]


def lines():
    """A line for each public name, and for each public method of a class."""
    for module_name in modules():
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            yield from _lines_of(f"{module_name}.{name}", getattr(module, name))


def _lines_of(name, value):
    if inspect.isclass(value):
        made = value.__init__
        own = getattr(made, "__module__", "").startswith("tfrs_embed")
        signature = _signature(made, method=True) if own else ""
        yield f"class {name}{signature}"
        members = {}
        for base in reversed(value.__mro__):
            if base.__module__.startswith("tfrs_embed."):
                members.update(vars(base))
        for member, given in sorted(members.items()):
            if not member.startswith("_"):
                yield from _line_of_member(f"{name}.{member}", given)
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    else:
        yield name


def _line_of_member(name, given):
    static = isinstance(given, staticmethod)
    if isinstance(given, (classmethod, staticmethod)):
        given = given.__func__
    if inspect.isfunction(given):
        yield f"{name}{_signature(given, method=not static)}"
    elif isinstance(given, property):
        yield f"{name}: property"


def _signature(function, method=False):
    parameters = list(inspect.signature(function).parameters.values())[method:]
    stable = [
        p.replace(annotation=p.empty, default=_default(p.default))
        for p in parameters
    ]
    return str(inspect.Signature(stable))


def _default(value):
    plain = value is inspect.Parameter.empty or isinstance(value, _PLAIN)
    return value if plain else ...


if __name__ == "__main__":
    print("\n".join(lines()))
