"""tests/MAP.md names all modules of the package, all tests and helpers."""

import ast
import functools
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent
PACKAGE = TESTS.parent / "tfrs_embed"
ACROSS = "Across the packages"
HELPERS = "Helpers"


def _rows(section):
    """Returns the two cells of each row of a section's table."""
    cells = re.findall(r"^\| (.*) \| (.*) \|$", section, re.M)
    return [row for row in cells if row[0] not in ("modules", "module")]


def _sections():
    text = (TESTS / "MAP.md").read_text("utf-8")
    parts = re.split(r"^## (.*)\n", text, flags=re.M)[1:]
    return {n: _rows(t) for n, t in zip(parts[::2], parts[1::2], strict=True)}


SECTIONS = _sections()
#: The modules of each package, `folder/name` in folders of the package.
MODULES = {
    folder.parent.name: sorted(
        path.relative_to(folder.parent).with_suffix("").as_posix()
        for path in folder.parent.rglob("*.py")
        if path.name != "__init__.py"
    )
    for folder in PACKAGE.glob("*/__init__.py")
}
TEST_FILES = {p.relative_to(TESTS).as_posix() for p in TESTS.rglob("test_*.py")}


def _code(cell):
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def _tests_of(package):
    """Returns the test files of each module, by the rows of the package."""
    found = {}
    for cell, tests in SECTIONS[package]:
        # A folder, and "others", are modules that no row above has named.
        modules = MODULES[package] if cell in ("all", "others") else []
        for name in _code(cell):
            inside = [m for m in MODULES[package] if m.startswith(name)]
            modules = modules + (inside if name.endswith("/") else [name])
        for module in modules:
            found.setdefault(module, _code(tests))
    return found


def test_each_package_has_a_section():
    assert {*SECTIONS} == {*MODULES, ACROSS, HELPERS}


@pytest.mark.parametrize("package", sorted(MODULES))
def test_each_module_of_a_package_has_tests(package):
    assert {*_tests_of(package)} == {*MODULES[package]}
    assert all(_tests_of(package).values())


def test_each_test_file_is_in_a_row():
    rows = [row for n, rows in SECTIONS.items() if n != HELPERS for row in rows]
    assert {test for _, cell in rows for test in _code(cell)} == TEST_FILES


def test_each_helper_has_a_row():
    modules = {
        path.relative_to(TESTS).with_suffix("").as_posix()
        for path in TESTS.rglob("*.py")
    }
    tests = {name.removesuffix(".py") for name in TEST_FILES}
    named = [name for cell, _ in SECTIONS[HELPERS] for name in _code(cell)]
    assert {*named} == modules - tests


def _imported(path):
    """Returns `(package, module)` of the package's modules in its imports."""
    names = set()
    for node in ast.walk(ast.parse((TESTS / path).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [
        name.split(".") for name in names if name.startswith("tfrs_embed.")
    ]
    found = set()
    for _, package, *rest in parts:
        for end in range(1, len(rest) + 1):
            if "/".join(rest[:end]) in MODULES.get(package, ()):
                found.add((package, "/".join(rest[:end])))
    return found


def test_a_module_has_one_of_the_tests_that_import_it():
    importers = {}
    for path in TEST_FILES:
        for module in _imported(path):
            importers.setdefault(module, set()).add(path)
    assert len(importers) > 50
    missing = {
        module: sorted(tests)
        for module, tests in importers.items()
        if not tests & {*_tests_of(module[0])[module[1]]}
    }
    assert not missing
