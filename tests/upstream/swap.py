"""A pytest plugin: puts this package's layer in TensorFlow Recommenders.

A test that passes without having made the layer counts as failed, and so does
a run in which no test has passed with it.
"""

import functools
import re

import pytest
import tensorflow as tf
from tensorflow_recommenders.experimental.layers import embedding

import tfrs_embed


def pytest_addoption(parser):
    parser.addoption(
        "--without-layer",
        metavar="REGEX",
        default="(?!)",
        help="tests that do not make the layer",
    )
    parser.addoption(
        "--every", type=int, default=1, help="run each Nth test only"
    )


def pytest_configure(config):
    embedding.PartialTPUEmbedding = tfrs_embed.PartialTPUEmbedding
    embedding.partial_tpu_embedding.PartialTPUEmbedding = (
        tfrs_embed.PartialTPUEmbedding
    )
    # Warnings at Python's exit would hide pytest's closing lines.
    tf.get_logger().setLevel("ERROR")
    config.pluginmanager.register(_Watch(config.option.without_layer))


def pytest_collection_modifyitems(config, items):
    # Parameters mostly come in twos: an odd number mixes them.
    chosen = items[:: config.option.every]
    config.hook.pytest_deselected(
        items=[item for item in items if item not in chosen]
    )
    items[:] = chosen


class _Watch:
    def __init__(self, without_layer):
        self._without_layer = re.compile(without_layer)
        self._made = 0
        self._passed = self._passed_with_layer = 0
        layer = tfrs_embed.PartialTPUEmbedding
        init = layer.__init__

        @functools.wraps(init)
        def counting_init(*args, **kwargs):
            self._made += 1
            init(*args, **kwargs)

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
                report.longrepr = "tfrs_embed.PartialTPUEmbedding was not made"
            self._passed += report.passed
        return report

    def pytest_sessionfinish(self, session):
        if not self._passed_with_layer and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"{self._passed_with_layer} of {self._passed} passed tests made "
            "tfrs_embed.PartialTPUEmbedding"
        )
