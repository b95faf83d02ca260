"""TensorFlow's private API is used by way of one module, and is there."""

import ast
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import tensorflow as tf

import tfrs_embed
from tfrs_embed import gradients
from tfrs_embed.compat import private_tensorflow as _tensorflow
from tfrs_embed.compat import version

PACKAGE = pathlib.Path(tfrs_embed.__file__).parent
TESTS = pathlib.Path(__file__).parent
ROOM = PACKAGE / "compat" / "private_tensorflow.py"
ROOM_OF_KERAS_3 = PACKAGE / "compat" / "private_keras_3.py"
PRIVATE = ("tensorflow.python", "tensorflow.core", "tf_keras.src")
PRIVATE_OF_KERAS_3 = ("keras.src",)
FILES = sorted(PACKAGE.rglob("*.py"))


def tree(path):
    return ast.parse(path.read_text("utf-8"))


def imports(nodes):
    """The modules, and modules with names, that code imports."""
    for node in ast.walk(nodes):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias) for alias in node.names)


def taken():
    """What the library takes: (name in `_tensorflow`, attribute or None)."""
    found = set()
    for path in FILES:
        nodes = tree(path)
        names = {
            alias.asname or alias.name: alias.name
            for module, alias in imports(nodes)
            if module == "tfrs_embed.compat.private_tensorflow"
        }
        found |= {(name, None) for name in names.values()}
        found |= {
            (names[node.value.id], node.attr)
            for node in ast.walk(nodes)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        }
    return sorted(found, key=str)


TAKEN = taken()
#: What came later than the oldest TensorFlow, which SparseCores need.
SINCE = {
    ("tpu_embedding_v3", "_clone_feature_config"): (2, 17),
    (
        "tpu_embedding_v3",
        "_stack_tables_with_same_table_dim_and_optimizer",
    ): (2, 17),
}


def minor(text):
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.parametrize(("name", "attribute"), TAKEN)
def test_what_is_taken_is_there(name, attribute):
    found = getattr(_tensorflow, name)
    since = SINCE.get((name, attribute), (0,))
    there = attribute is None or hasattr(found, attribute)
    assert there == (minor(tf.__version__) >= since)


def test_nothing_is_listed_that_nobody_takes():
    listed = {
        alias.asname or alias.name
        for module, alias in imports(tree(ROOM))
        if module.startswith(PRIVATE)
    }
    # Those that it makes others of.
    within = {n.id for n in ast.walk(tree(ROOM)) if isinstance(n, ast.Name)}
    assert listed
    assert listed <= {name for name, _ in TAKEN} | within


def test_only_one_module_imports_private_modules():
    for path in FILES:
        for module, alias in imports(tree(path)):
            where = path, module, alias.name
            assert path == ROOM or not module.startswith(PRIVATE), where
            assert path == ROOM_OF_KERAS_3 or not module.startswith(
                PRIVATE_OF_KERAS_3
            ), where
        if path != ROOM:
            assert "tf.__internal__" not in path.read_text("utf-8"), path


def test_autograph_can_read_all_that_steps_may_run():
    # AutoGraph leaves a function with one of these as it is, and warns.
    unread = (ast.NamedExpr, ast.Match)
    for path in FILES:
        if "tools" not in path.relative_to(PACKAGE).parts:
            found = [n for n in ast.walk(tree(path)) if isinstance(n, unread)]
            assert not found, (path, [node.lineno for node in found])


def test_this_tensorflow_is_one_that_is_promised():
    oldest = minor(version.OLDEST_TENSORFLOW)
    newest = minor(version.NEWEST_TENSORFLOW)
    assert oldest <= minor(tf.__version__) <= newest


def test_a_tensorflow_that_lacks_something_is_named(monkeypatch):
    util = sys.modules["tensorflow.python.util"]
    monkeypatch.delattr(util, "nest")
    monkeypatch.setitem(sys.modules, "tensorflow.python.util.nest", None)
    with pytest.raises(ImportError, match="A new TensorFlow") as error:
        runpy.run_path(str(ROOM))
    assert tf.__version__ in str(error.value)


#: The paths that the page of gradients lists, and what they begin with.
LISTED = re.findall(
    r"^    ((context|tensorflow|tf_keras|keras)\.\S+)$", gradients.__doc__, re.M
)


@pytest.mark.more
@pytest.mark.parametrize("name", ["tf_keras", "keras"])
def test_what_is_patched_is_what_the_page_of_gradients_lists(name):
    done = subprocess.run(
        [sys.executable, TESTS / "changed_attributes.py", name],
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGE.parent),
            "TF_USE_LEGACY_KERAS": "1" if name == "tf_keras" else "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = done.stdout.partition("CHANGED ")[2]
    assert found, done.stderr[-3000:]
    imported, trained, asked, registries = map(set, json.loads(found))
    assert imported == set()
    listed = {
        path for path, of in LISTED if of in (name, "context", "tensorflow")
    }
    # Operations are registered where there are kernels.
    assert registries <= listed
    assert asked == listed - {path for path in listed if is_registry(path)}
    # What only some programs ask for.
    assert {path.rpartition(".")[2] for path in asked - trained} == {
        "configure_coordination_service",
        "make_function_context",
    }
    assert len([path for path, _ in LISTED if not is_registry(path)]) <= 9


def is_registry(path):
    last = path.rpartition(".")[2]
    return last.isupper() or last.endswith(("_cache", "_registry"))
