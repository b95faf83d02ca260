"""A pytest plugin: puts this package's layer in the place of another's.

A test that passes without having made the layer counts as failed, and so does
a run in which no test has passed with it.
"""

import functools
import inspect
import re

import pytest
import tensorflow as tf


def in_tfrs():
    """Puts PartialTPUEmbedding in TensorFlow Recommenders."""
    from tensorflow_recommenders.experimental.layers import embedding

    from tfrs_embed import PartialTPUEmbedding

    embedding.PartialTPUEmbedding = PartialTPUEmbedding
    embedding.partial_tpu_embedding.PartialTPUEmbedding = PartialTPUEmbedding
    return PartialTPUEmbedding


def in_keras_rs():
    """Puts Keras 3's DistributedEmbedding in keras_rs."""
    import keras_rs
    from keras_rs.src.layers.embedding import distributed_embedding
    from tfrs_embed.keras3 import DistributedEmbedding

    distributed_embedding.DistributedEmbedding = DistributedEmbedding
    keras_rs.layers.DistributedEmbedding = DistributedEmbedding
    return DistributedEmbedding


SWAPS = {"tfrs": in_tfrs, "keras_rs": in_keras_rs}


def pytest_addoption(parser):
    parser.addoption(
        "--swap", choices=SWAPS, required=True, help="where the layer goes"
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
        help="a test that is not run",
    )
    parser.addoption(
        "--every", type=int, default=1, help="run each Nth test only"
    )


def pytest_configure(config):
    layer = SWAPS[config.option.swap]()
    # Warnings at Python's exit would hide pytest's closing lines.
    tf.get_logger().setLevel("ERROR")
    config.pluginmanager.register(_Watch(layer, config.option.without_layer))


def pytest_collection_modifyitems(config, items):
    left_out = set(config.option.leave_out)
    unknown = left_out - {item.name for item in items}
    if unknown:
        raise pytest.UsageError(f"There are no tests {sorted(unknown)}.")
    chosen = [item for item in items if item.name not in left_out]
    # Parameters mostly come in twos: an odd number mixes them.
    chosen = chosen[:: config.option.every]
    config.hook.pytest_deselected(
        items=[item for item in items if item not in chosen]
    )
    items[:] = chosen


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
