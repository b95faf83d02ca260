"""A pytest plugin: puts this package's layer in the place of another's.

A test that passes without having made the layer counts as failed, and so does
a run in which no test has passed with it.
"""

import ast
import fnmatch
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from absl import flags


def in_tfrs():
    """Puts PartialTPUEmbedding in TensorFlow Recommenders."""
    from tensorflow_recommenders.experimental.layers import embedding
    from tensorflow_recommenders.layers.embedding import tpu_embedding_layer

    from tfrs_embed import PartialTPUEmbedding

    class TPUEmbedding(PartialTPUEmbedding):
        """All tables are large."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{"size_threshold": 0, **kwargs})

    embedding.PartialTPUEmbedding = PartialTPUEmbedding
    embedding.partial_tpu_embedding.PartialTPUEmbedding = PartialTPUEmbedding
    tpu_embedding_layer.TPUEmbedding = TPUEmbedding
    return PartialTPUEmbedding


def in_keras_rs():
    """Puts Keras 3's DistributedEmbedding in keras_rs."""
    from tfrs_embed.keras3 import DistributedEmbedding

    return _in_keras_rs(DistributedEmbedding)


def in_keras_rs_of_tf_keras():
    """Puts tf_keras's DistributedEmbedding in keras_rs's tests."""
    import keras
    import tf_keras

    from tfrs_embed import DistributedEmbedding

    class Keras:
        """tf_keras, as far as it has what Keras 3 has."""

        def __getattr__(self, name):
            return getattr(tf_keras, name, None) or getattr(keras, name)

    _REPLACED["keras"] = Keras()
    return _in_keras_rs(DistributedEmbedding)


def _in_keras_rs(layer):
    import keras_rs
    from keras_rs.src.layers.embedding import distributed_embedding

    distributed_embedding.DistributedEmbedding = layer
    keras_rs.layers.DistributedEmbedding = layer
    return layer


def in_embed_reduce():
    """Puts Keras 3's Embedding in the place of keras_rs's EmbedReduce."""
    import keras
    from keras_rs.src.layers.embedding import embed_reduce
    from tfrs_embed.keras3 import Embedding

    @keras.saving.register_keras_serializable("upstream")
    class EmbedReduce(Embedding):
        """Takes the mean, unless it is told otherwise."""

        def __init__(self, *args, combiner="mean", **kwargs):
            super().__init__(*args, combiner=combiner, **kwargs)

    embed_reduce.EmbedReduce = EmbedReduce
    return EmbedReduce


def in_keras():
    """Puts Embedding in Keras 3."""
    import keras
    from tfrs_embed.keras3 import Embedding

    keras.layers.Embedding = keras.src.layers.Embedding = Embedding
    return Embedding


def in_tf_keras():
    """Puts Embedding in tf_keras."""
    import tf_keras

    from tfrs_embed import Embedding

    # In the repository these are one.
    tf_keras.backend.__getattr__ = functools.partial(
        getattr, tf_keras.src.backend
    )
    tf_keras.layers.Embedding = tf_keras.src.layers.Embedding = Embedding
    return Embedding


def in_tensorflow():
    """Puts TPUEmbeddingV2 in TensorFlow, and a chip in the place of a TPU."""
    from tensorflow.python.distribute import tpu_strategy
    from tensorflow.python.distribute.cluster_resolver import (
        tpu_cluster_resolver,
    )
    from tensorflow.python.eager import remote
    from tensorflow.python.tpu import tpu_embedding_v3
    from tfrs_embed.testing import EmulatedTPUStrategy

    from tfrs_embed import TPUEmbeddingV2
    from tfrs_embed.sparsecore.mid_level.on_tpu import TPUEmbeddingV2OnTPU

    def nothing(*args, **kwargs):
        pass

    tpu_cluster_resolver.TPUClusterResolver = nothing
    tpu_cluster_resolver.initialize_tpu_system = nothing
    remote.connect_to_cluster = nothing
    # It changes TensorFlow's own class, which must still be there.
    chip = EmulatedTPUStrategy("v5p-2")

    class TPUStrategy(tpu_strategy.TPUStrategyV2):
        def __new__(cls, *args, **kwargs):
            return chip

    tpu_strategy.TPUStrategy = TPUStrategy
    tpu_embedding_v3.TPUEmbeddingV2 = TPUEmbeddingV2
    return TPUEmbeddingV2OnTPU


SWAPS = {
    name.removeprefix("in_"): function
    for name, function in list(globals().items())
    if name.startswith("in_")
}
# What the tests' modules get in the place of a name of theirs.
_REPLACED = {}


def pytest_addoption(parser):
    parser.addoption(
        "--swap", choices=SWAPS, required=True, help="where the layer goes"
    )
    parser.addoption(
        "--source",
        metavar="FOLDER",
        type=Path,
        help="the repository with the modules that the wheel lacks",
    )
    parser.addoption(
        "--without-layer",
        metavar="REGEX",
        default="(?!)",
        help="tests that do not make the layer",
    )
    parser.addoption(
        "--leave-out",
        metavar="NAME",
        action="append",
        default=[],
        help="a test that is not run; * stands for any part of a name",
    )
    parser.addoption(
        "--mentioning",
        metavar="TEXT",
        default="",
        help="run only tests with this in their source",
    )
    parser.addoption(
        "--every", type=int, default=1, help="run each Nth test only"
    )


def pytest_configure(config):
    if config.option.source:
        sys.meta_path.append(_InRepository(config.option.source))
    layer = SWAPS[config.option.swap]()
    # Warnings at Python's exit would hide pytest's closing lines.
    tf.get_logger().setLevel("ERROR")
    config.pluginmanager.register(_Watch(layer, config.option.without_layer))


class _InRepository(importlib.abc.MetaPathFinder):
    """Finds a package's modules that its wheel lacks in its repository.

    Modules of tf_keras are in its wheel under another name.
    """

    def __init__(self, folder):
        self._folder = folder

    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        inner = f"tf_keras.src.{rest}"
        if package == "tf_keras" and not rest.startswith("src"):
            try:
                module = importlib.import_module(inner)
            except ModuleNotFoundError as error:
                if not inner.startswith(error.name):
                    raise
            else:
                return importlib.util.spec_from_loader(name, _Made(module))
        place = self._folder.joinpath(*name.split("."))
        if place.is_dir():
            spec = importlib.util.spec_from_loader(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        file = place.with_suffix(".py")
        if not file.exists():
            return None
        return importlib.util.spec_from_file_location(name, file)


class _Made(importlib.abc.Loader):
    """Loads a module that is there already, under another name."""

    def __init__(self, module):
        self._module = module

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        pass


def pytest_collection_modifyitems(config, items):
    # Run as programs, the tests' files do so.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["pytest"])
    names = {item.name for item in items}
    left_out = set()
    for pattern in config.option.leave_out:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise pytest.UsageError(f"There is no test {pattern}.")
        left_out.update(found)
    for item in items:
        for name, value in _REPLACED.items():
            setattr(item.module, name, value)
    text = config.option.mentioning
    chosen = [
        item
        for item in items
        if item.name not in left_out and (not text or text in _source(item))
    ]
    # Parameters mostly come in twos: an odd number mixes them.
    chosen = chosen[:: config.option.every]
    config.hook.pytest_deselected(
        items=[item for item in items if item not in chosen]
    )
    items[:] = chosen


def _source(item):
    """The source of a test, by its name: a parameter's follows the method's."""
    methods = _methods(item.path)
    names = [name for name in methods if item.name.startswith(name)]
    return methods[max(names, key=len)] if names else ""


@functools.cache
def _methods(path):
    """The source of each test in a file, by name; each that has a name."""
    text, found = path.read_text(), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            found[node.name] = found.get(node.name, "") + "\n".join(lines)
    return found


class _Watch:
    def __init__(self, layer, without_layer):
        self._layer = f"{layer.__module__}.{layer.__qualname__}"
        self._without_layer = re.compile(without_layer)
        self._made = 0
        self._passed = self._passed_with_layer = 0
        init = layer.__init__

        @functools.wraps(init)
        def counting_init(*args, **kwargs):
            self._made += 1
            init(*args, **kwargs)

        # Keras 3 reads the names of arguments, not through `wraps`.
        counting_init.__signature__ = inspect.signature(init)
        layer.__init__ = counting_init

    def pytest_runtest_setup(self):
        self._made = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.when == "call" and report.passed:
            if self._made:
                self._passed_with_layer += 1
            elif not self._without_layer.search(item.name):
                report.outcome = "failed"
                report.longrepr = f"{self._layer} was not made"
            self._passed += report.passed
        return report

    def pytest_sessionfinish(self, session):
        if not self._passed_with_layer and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"{self._passed_with_layer} of {self._passed} passed tests made "
            f"{self._layer}"
        )
