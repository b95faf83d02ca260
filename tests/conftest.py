"""What is set before anything imports tensorflow, and fixtures.

Tests that need several replicas run in processes of their own, as TensorFlow's
devices are set before its first operation. tests/run_in_processes.py starts
these, and names the strategy in an environment variable. Under several workers
each of them runs the same tests in the same order, and asserts about its own
replicas.
"""

import gc
import os
import re
import sys

import pytest

import process_tiers
from nightly_flag import ALL

if os.environ.get("TFRS_EMBED_TEST_KERAS", "2") == "3":
    os.environ["TF_USE_LEGACY_KERAS"] = "0"
else:
    # tensorflow_recommenders needs tf.keras to be Keras 2.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Tests compare float32 closely. On a GPU matrix products would have TF32's 10
# bits. Set for the processes that a test starts, too.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A test works on little data: more threads only cost.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

STRATEGY_NAME = os.environ.get("TFRS_EMBED_TEST_STRATEGY", "")
KIND, _, COUNT = STRATEGY_NAME.partition(":")
#: This process's name in process_tiers.PROCESSES.
PROCESS = process_tiers.process_of(
    STRATEGY_NAME, os.environ.get("TFRS_EMBED_TEST_KERAS", "2")
)
#: The tiers whose tests this process runs; none: all that it collects.
RUN_TIERS = os.environ.get("TFRS_EMBED_TEST_TIER", "").split()


def make_strategy():
    import tensorflow as tf

    if KIND == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if KIND == "tpu":
        from tfrs_embed.testing import EmulatedTPUStrategy

        chips, sparse_cores = COUNT.split("x")
        return EmulatedTPUStrategy((int(chips), int(sparse_cores)))
    # "gpus:2" cuts the first GPU into two, each with so many MiB of memory.
    name, memory = ("GPU", 2048) if KIND == "gpus" else ("CPU", None)
    device = tf.config.list_physical_devices(name)[0]
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration(memory)] * int(COUNT)
    )
    return tf.distribute.MirroredStrategy(
        [f"{name}:{i}" for i in range(int(COUNT))]
    )


# Before the tests are imported, which may make tensors.
STRATEGY = make_strategy() if KIND else None


# Each of their tests runs many in processes of its own.
LONG = (
    "test_checkpoint_matrix.py",
    "test_keras_3_front.py",
    "test_strategies.py",
    "test_tpu_strategies.py",
    "test_emulated",  # A test of tpu_wheel/test_promises.py.
)

# What Keras 3 raises in place of making one.
NO_LEGACY_OPTIMIZERS = "`keras.optimizers.legacy` is not supported in Keras 3"


def _runs_here(item):
    """Whether a test is of this run: of its tier, and not only of nightly."""
    if ALL:
        return not RUN_TIERS or process_tiers.tier_of(item, PROCESS) is not None
    if any(
        process_tiers.holds(mark, item) for mark in item.iter_markers("nightly")
    ):
        return False
    return not RUN_TIERS or process_tiers.tier_of(item, PROCESS) in RUN_TIERS


def _is_asked_for(item, config):
    """Whether a test is named by the command line, and not only its file."""
    name = item.nodeid.partition("::")[2]
    for argument in config.args:
        path, _, wanted = argument.partition("::")
        path = (config.invocation_params.dir / path).resolve()
        if (
            wanted
            and path == item.path.resolve()
            and re.match(rf"{re.escape(wanted)}($|\[|::|@)", name)
        ):
            return True
    return False


def pytest_collection_modifyitems(config, items):
    """Leaves out what this run doesn't run, and begins with what takes longest.

    What is asked for by its full name runs anyhow. No worker waits at the end
    for what has begun first.
    """
    asked = {item for item in items if _is_asked_for(item, config)}
    others = [item for item in items if item not in asked]
    process_tiers.check(others, PROCESS)
    left_out = {item for item in others if not _runs_here(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(
        key=lambda item: (
            item.path.name not in LONG
            and getattr(item, "originalname", None) not in LONG
        )
    )


def pytest_collection_finish():
    """Searches for garbage seldom, and never among TensorFlow's modules.

    Tracing makes many objects, most of which stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionfinish():
    """Leaves all garbage to the end of the process.

    Where no test has imported hypothesis, its plugin does so now, and it
    collects garbage: that of many models took it two minutes.
    """
    gc.freeze()


def _skip_what_is_not_there(error):
    """Skips a test that needs what this TensorFlow, or Keras, doesn't have."""
    from tfrs_embed.compat.strategies import (
        NO_SPARSE_CORES,
        has_sparse_core_api,
    )

    if not has_sparse_core_api() and NO_SPARSE_CORES in str(error):
        pytest.skip(NO_SPARSE_CORES)
    if NO_LEGACY_OPTIMIZERS in str(error):
        pytest.skip(NO_LEGACY_OPTIMIZERS)


# Rather than a mark: such a test must come as far as the error that says so.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    try:
        return (yield)
    except (RuntimeError, ImportError) as error:
        _skip_what_is_not_there(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except (RuntimeError, ImportError) as error:
        _skip_what_is_not_there(error)
        raise


@pytest.fixture(autouse=True)
def _seed():
    """Random numbers that are the same in each run of a test.

    A test that only fails with a few initial values would fail for a change
    that has nothing to do with it.
    """
    # Importing it takes seconds, and some files do without.
    if tf := sys.modules.get("tensorflow"):
        tf.keras.utils.set_random_seed(1)


@pytest.fixture(scope="session")
def strategy():
    """The strategy of this process: one, as a second would share its keys."""
    import tensorflow as tf

    return STRATEGY or tf.distribute.get_strategy()


@pytest.fixture(scope="session")
def needs_kernels():
    """Skips tests of the compiled kernels where none would run."""
    from tfrs_embed import kernels
    from training_helpers import ON_GPU

    if ON_GPU:
        pytest.skip("a GPU has no use for kernels")
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


@pytest.fixture(params=["kernels", "tensorflow"])
def each_implementation(request):
    """For a test alone: others of its file have tables in files."""
    if request.param == "kernels":
        yield request.getfixturevalue("needs_kernels")
        return
    from tfrs_embed import kernels

    with kernels.disabled():
        yield


@pytest.fixture
def files_folder(request, tmp_path):
    """A folder for tables in files, which need the kernels."""
    if "files" in request.node.callspec.params.values():
        request.getfixturevalue("needs_kernels")
    return tmp_path
