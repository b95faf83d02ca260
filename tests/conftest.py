"""Set before anything imports tensorflow."""

import os

import pytest

# tensorflow_recommenders needs tf.keras to be Keras 2.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A test works on little data: more threads only cost.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")


@pytest.fixture(scope="session")
def needs_kernels():
    """Skips tests of the compiled kernels where there are none."""
    from tfrs_embed import kernels

    if not kernels.status().loaded:
        pytest.skip(str(kernels.status()))


@pytest.fixture(scope="module", params=["kernels", "tensorflow"])
def both_implementations(request):
    """Runs tests with the compiled kernels, then without.

    Of the module's scope, as what hypothesis repeats can't have fixtures of its
    own.
    """
    from tfrs_embed import kernels

    if request.param == "kernels":
        request.getfixturevalue("needs_kernels")
        yield
    else:
        with kernels.disabled():
            yield


@pytest.fixture(params=[True, False], ids=["soft", "hard"])
def soft_placement(request):
    """Whether a TPU's host may run what TPUs have no kernel for."""
    import tensorflow as tf

    # In a function that is traced TensorFlow has no default.
    tf.config.set_soft_device_placement(request.param)
    yield request.param
    tf.config.set_soft_device_placement(True)
