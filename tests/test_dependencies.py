"""What the package imports stands in setup.py, and nothing else does."""

import ast
import pathlib
import re
import sys

import tfrs_embed

ROOT = pathlib.Path(tfrs_embed.__file__).parents[1]
OWN = ("tfrs_embed", "tfrs_embed_command")
#: Names on PyPI of what is imported by another one.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "google": "protobuf",
    "google_crc32c": "google-crc32c",
    "tf_keras": "tf-keras",
}


def imported(statements):
    """The packages that statements import as a module is imported."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            yield node.module.partition(".")[0]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue  # It may be called where there is such a package only.
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(
            node.test
        ):
            yield from imported(node.orelse)
        else:
            yield from imported(ast.iter_child_nodes(node))


def required():
    """The names in setup.py's install_requires."""
    setup = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    [values] = [
        keyword.value.elts
        for node in ast.walk(setup)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "install_requires"
    ]
    # A version may come from elsewhere.
    texts = [
        v.values[0].value if isinstance(v, ast.JoinedStr) else v.value
        for v in values
    ]
    return {re.match(r"[\w.-]+", text)[0] for text in texts}


def test_dependencies_are_those_that_are_imported():
    sources = [ROOT / "tfrs_embed_command.py"]
    sources += (ROOT / "tfrs_embed").rglob("*.py")
    assert len(sources) > 100
    found = {}
    for path in sources:
        for name in imported(ast.parse(path.read_text("utf-8")).body):
            if name not in sys.stdlib_module_names and name not in OWN:
                found.setdefault(DISTRIBUTIONS.get(name, name), path)
    assert set(found) == required(), found


def test_imports_are_seen_wherever_they_run():
    code = """
import a.b
if TYPE_CHECKING:
    import not_there
else:
    import c
try:
    from d.e import f
except ImportError:
    import g
class C:
    import h
    def method(self):
        import not_needed
"""
    assert list(imported(ast.parse(code).body)) == list("acdgh")
