"""Code in the documentation that wants several replicas, or TPUs.

An emulated slice takes the place of the TPUs that a page's code looks for, and
two logical CPUs that of a machine's GPUs.
"""

from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy
from tfrs_embed.testing import EmulatedTPUStrategy

from documentation import (
    ON_SLICE,
    REPLICAS,
    SLICE,
    WORKERS,
    run_example,
    run_pages,
)

#: The slice with the CPUs that this process has.
NAME = "v5p-8"


@pytest.fixture
def on_slice(strategy):
    if not isinstance(strategy, EmulatedTPUStrategy):
        pytest.skip("needs an emulated slice")


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tpus_are_emulated(monkeypatch):
    """Makes TPUStrategy emulate the slice whose name a resolver is."""
    monkeypatch.setattr(tf.distribute, "TPUStrategy", EmulatedTPUStrategy)
    monkeypatch.setattr(
        tf.distribute.cluster_resolver, "TPUClusterResolver", lambda _: NAME
    )
    for module, function in (
        (tf.config, "experimental_connect_to_cluster"),
        (tf.tpu.experimental, "initialize_tpu_system"),
    ):
        monkeypatch.setattr(module, function, mock.Mock())


def _only(value):
    """A class that makes one value, again and again."""

    class Meta(type):
        def __call__(cls):
            return value

        def __instancecheck__(cls, other):
            return isinstance(other, type(value))

    return Meta("Only", (), {})


def test_pages_on_a_slice(on_slice, in_folder, tpus_are_emulated):
    assert len(run_pages(SLICE)) == 4


@pytest.mark.parametrize("name", ON_SLICE)
def test_examples_on_a_slice(on_slice, in_folder, name):
    run_example(name)


def test_pages_on_replicas(on_slice, in_folder, monkeypatch):
    cpus = tf.config.list_logical_devices("CPU")[:2]
    monkeypatch.setattr(mirrored_strategy, "all_local_devices", lambda: cpus)
    # A process can have one only, and these pages make one each.
    strategy = tf.distribute.MirroredStrategy()
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", _only(strategy))
    pages = [block.page for block in run_pages(REPLICAS)]
    assert pages == ["README.md", "docs/clusters.md"]


def test_pages_on_workers(strategy, in_folder):
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("needs workers")
    [block] = run_pages(WORKERS)
    assert "MultiWorkerMirroredStrategy" in block.code
