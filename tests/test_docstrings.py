"""Public names' docstrings state a contract, in one form.

A summary; Args, or for a dataclass Attributes, with a line for each; Returns,
or Yields; Raises, with a line for each kind of error that the code raises
itself; an Example. ruff checks the form of the sections.
"""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest
import tf_keras

from documentation import public_names

NAMES = public_names()
#: What Keras calls has Keras's contract: see the sections of the class.
SEE_CLASS = ("call", "__call__")
_SECTION = re.compile(r"^(\w[\w ]*):\n((?:    .*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(
    r"^    (\*{0,2}[\w.]+(?:, [\w.]+)*)( \(.*\))?:", re.MULTILINE
)


def sections(docstring):
    """Each section's name, with the names that it describes."""
    text = inspect.cleandoc(docstring or "") + "\n"
    return {
        name: {
            entry.strip("*")
            for names, _ in _ENTRY.findall(body)
            for entry in names.split(", ")
        }
        for name, body in _SECTION.findall(text)
    }


def parameters(function):
    """The names of a function's parameters, without self or cls."""
    names = list(inspect.signature(function).parameters)
    return {n for n in names if n not in ("self", "cls", "_")}


def tree(function):
    """A function's syntax tree; None where there is no source."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return None  # dataclasses make some.
    return ast.parse(textwrap.dedent(source)).body[0]


def raised(function):
    """The kinds of errors that a function's own code raises."""
    found = set()
    waiting = [tree(function)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func)
            # Not one that something returns, or that is raised again.
            if kind[0].isupper() or "." in kind:
                found.add(kind)
        nested = ast.FunctionDef | ast.Lambda | ast.ClassDef
        waiting += [
            child
            for child in ast.iter_child_nodes(node or ast.Module())
            if not isinstance(child, nested)
        ]
    return found


def gives(function):
    """The section that says what a function gives: "Returns", "Yields"."""
    wanted = inspect.signature(function).return_annotation
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        return "Yields"
    return None if wanted in (None, "None") else "Returns"


def of_function(function, docstring):
    """What a function's docstring lacks."""
    has = sections(docstring)
    for name in sorted(parameters(function) - has.get("Args", set())):
        yield f"Args: {name}"
    if (section := gives(function)) and section not in has:
        yield section
    for kind in sorted(raised(function) - has.get("Raises", set())):
        yield f"Raises: {kind}"


def of_class(cls):
    """What a class's own docstring lacks."""
    has = sections(cls.__doc__)
    # A layer's docstring is that of its body.
    cls = [b for b in cls.__mro__ if vars(b).get("__doc__") is cls.__doc__][-1]
    described = has.get("Args", set()) | has.get("Attributes", set())
    wanted = set()
    if dataclasses.is_dataclass(cls):
        wanted = {field.name for field in dataclasses.fields(cls)}
    elif issubclass(cls, dict):  # A TypedDict.
        wanted = set(cls.__annotations__)
    elif "__init__" in vars(cls) and not getattr(cls, "_is_protocol", False):
        wanted = parameters(cls.__init__)
    for name in sorted(wanted - described):
        yield f"Args or Attributes: {name}"
    errors = set()
    for name in ("__new__", "__init__", "__post_init__"):
        if name in vars(cls) and not getattr(cls, "_is_protocol", False):
            errors |= raised(vars(cls)[name])
    if "call" in vars(cls):
        calls = parameters(cls.call)
        for name in sorted(calls - has.get("Call arguments", set())):
            yield f"Call arguments: {name}"
        if "Output shape" not in has:
            yield "Output shape"
        errors |= raised(cls.call)
    for kind in sorted(errors - has.get("Raises", set())):
        yield f"Raises: {kind}"


def members(cls):
    """A class's public methods and properties that this package defines.

    Yields:
        The name, the function, the docstring, and whether it is a property. An
        override of a method of this package has its docstring, unless it has
        more to say; one of Keras's or TensorFlow's keeps their contract.
    """
    seen = set()
    for i, owner in enumerate(cls.__mro__):
        ours = owner.__module__.startswith("tfrs_embed")
        for name, member in vars(owner).items() if ours else ():
            if name.startswith("_") or name in seen or name in SEE_CLASS:
                continue
            seen.add(name)
            functions = [
                f
                for f in (
                    member.fget if isinstance(member, property) else member,
                    getattr(member, "__func__", None),
                )
                if inspect.isfunction(inspect.unwrap(f) if f else f)
            ]
            if not functions:
                continue
            bases = [b for b in cls.__mro__[i + 1 :] if name in vars(b)]
            foreign = hasattr(tf_keras.callbacks.Callback, name) or any(
                not b.__module__.startswith("tfrs_embed") for b in bases
            )
            yield name, functions[-1], foreign, isinstance(member, property)


def lacks(name):
    """What a public name's docstrings lack."""
    value = NAMES[name]
    if not (value.__doc__ or "").strip():
        yield f"{name}: docstring"
        return
    if "Example" not in sections(value.__doc__):
        yield f"{name}: Example"
    if inspect.isfunction(value):
        for what in of_function(value, value.__doc__):
            yield f"{name}: {what}"
    if not inspect.isclass(value):
        return
    for what in of_class(value):
        yield f"{name}: {what}"
    for member, function, foreign, is_property in members(value):
        docstring = function.__doc__ or ""
        if not docstring and not foreign:
            yield f"{name}.{member}: docstring"
        elif is_property or foreign:
            has = sections(docstring).get("Raises", set())
            for kind in sorted(raised(function) - has):
                yield f"{name}.{member}: Raises: {kind}"
        elif docstring != "See the base class.":
            for what in of_function(function, docstring):
                yield f"{name}.{member}: {what}"


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_is_complete(name):
    assert list(lacks(name)) == []
