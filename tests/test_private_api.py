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


#: Prints what is another function in TensorFlow or a Keras, after the import
#: and after a step of a layer and a `keras3.fit`.
PATCHES = """
import inspect
import json
import sys
import tensorflow as tf
KERAS = sys.argv[1]
__import__(KERAS)

def functions():
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not name.startswith(("tensorflow.python.", f"{KERAS}.src.")):
            continue
        for key, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == name:
                for attribute, function in vars(value).items():
                    if inspect.isfunction(function):
                        found[f"{name}.{key}.{attribute}"] = function
            elif inspect.isfunction(value):
                found[f"{name}.{key}"] = value
    return found

before, hooks = functions(), list(sys.meta_path)

def changed():
    now = functions()
    return sorted(k for k, f in before.items() if now.get(k) is not f)

import tfrs_embed
# wrapt has the only one, which calls the library when a Keras is imported.
added = [hook for hook in sys.meta_path if hook not in hooks]
assert {type(hook).__module__ for hook in added} <= {"wrapt.importer"}
imported = changed()
if KERAS == "keras":
    from tfrs_embed import keras3 as layers
else:
    layers = tfrs_embed
layer = layers.PartialTPUEmbedding(
    tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 100, 4)),
    "sgd",
    size_threshold=9,
)
layers.Embedding(10, 4)(tf.constant([1]))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(layer(tf.constant([1])))
tape.gradient(loss, layer.trainable_variables)
if KERAS == "keras":
    import keras
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([2, 2]), tf.ones([2, 1])))
    layers.fit(model, data, strategy, verbose=0)
print("CHANGED", json.dumps([imported, changed()]))
"""

#: The functions of each Keras, and TensorFlow's, that are patched. `apply` of
#: Keras 3's optimizers on TensorFlow is another class's there.
PATCHED = {
    "tf_keras": {"gradient", "get_scaled_loss", "_build_index_dict"},
    "keras": {
        "gradient",
        "build",
        "scale_loss",
        "_all_reduce_sum_gradients",
        "_maybe_symbolic_build",
        "make_predict_function",
        "reduce_values",
        "scale_loss_for_distribution",
        "unscale_loss_for_distribution",
    },
}


@pytest.mark.parametrize("name", ["tf_keras", "keras"])
def test_what_is_patched_is_what_the_page_of_gradients_lists(name):
    done = subprocess.run(
        [sys.executable, "-c", PATCHES, name],
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
    imported, made = json.loads(found)
    assert imported == []
    page = set(re.findall(r"`([\w.]+)`", gradients.__doc__))
    patched = {each.rpartition(".")[2] for each in made}
    assert patched - {each.rpartition(".")[2] for each in page} == set()
    assert patched == PATCHED[name]
