"""Runs tests/strategies in processes that have several replicas."""

import pytest

from processes import ALL, run

STRATEGIES = ["mirrored:2", "mirrored:4", "workers:2", "workers:3"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_conformance(strategy):
    select = {
        # More replicas find little in the other tests that two don't.
        "mirrored:4": "optimizer",
        "workers:2": "optimizer or every_kind or pipelined",
        "workers:3": "optimizer",
    }
    run(
        ["test_sharded_conformance.py"],
        strategy,
        None if ALL else select.get(strategy),
    )


def test_conformance_without_kernels():
    run(
        ["test_sharded_conformance.py"],
        "mirrored:2",
        None if ALL else "optimizer or pipelined",
        TFRS_EMBED_KERNELS="off",
    )


@pytest.mark.parametrize(
    ("file", "strategy"),
    [
        ("test_sharded_keras.py", "mirrored:2"),
        ("test_sharded_keras.py", "workers:2"),
        ("test_sharded_models.py", "mirrored:2"),
    ],
)
def test_keras(file, strategy):
    run([file], strategy)


@pytest.mark.parametrize("strategy", ["mirrored:4", "workers:2"])
def test_mirrored_engine(strategy):
    # From three replicas on the order of a sum matters.
    select = "test_training" if strategy == "mirrored:4" else None
    run(["test_mirrored_engine.py"], strategy, select)


def test_gradients():
    # What one device's tests don't cover already.
    select = "penalty or persistent or updat" if not ALL else None
    run(["test_gradients_on_replicas.py"], "mirrored:2", select)


def test_distributed_embedding():
    run(["test_sharded_distributed.py"], "mirrored:2")


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:3"])
def test_errors(strategy):
    run(["test_sharded_errors.py"], strategy)


def test_workers_that_differ():
    run(["test_sharded_workers.py"], "workers:3")


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:2"])
def test_two_strategies(strategy):
    run(["test_sharded_notebook.py"], strategy)


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:3"])
def test_traffic(strategy):
    run(["test_sharded_traffic.py"], strategy)


@pytest.mark.parametrize(
    ("strategy", "select"),
    [("mirrored:2", "distributed or keys"), ("workers:2", "partial or keys")],
)
def test_serving(strategy, select, tmp_path):
    folder = {"TFRS_EMBED_TEST_FOLDER": str(tmp_path)}
    run(["test_serving_export.py"], strategy, select, **folder)


def test_limits():
    run(["test_sharded_limits.py"], "mirrored:12")


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:3"])
def test_all2all(strategy):
    run(["test_sharded_all2all.py"], strategy)
