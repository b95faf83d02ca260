"""Runs tests that need several replicas, in processes that have them.

Each strategy has one process, or one for each worker, for all of its files:
starting TensorFlow takes longer than many tests.
"""

import pytest

from processes import ALL, run

CONFORMANCE = "conformance/test_conformance.py"

#: Each strategy's files, and what is run in them.
PLANS = {
    "mirrored:2": {
        CONFORMANCE: None,
        "strategies/test_sharded_keras.py": None,
        "strategies/test_sharded_models.py": None,
        "strategies/test_sharded_distributed.py": None,
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_serving_export.py": "distributed or keys",
        # What one device's tests don't cover already.
        "strategies/test_gradients_on_replicas.py": (
            None if ALL else "penalty or persistent or updat"
        ),
    },
    "mirrored:4": {
        # More replicas find little in the other tests that two don't; from
        # three on, the order of a sum matters.
        CONFORMANCE: None if ALL else "many_optimizers and not tensorflow",
        "strategies/test_mirrored_engine.py": "test_training",
    },
    "workers:2": {
        CONFORMANCE: None
        if ALL
        else "(many_optimizers or sharded-adagrad-mean-weighted-all_kinds or"
        " pipelined or (pending and sgd)) and not tensorflow",
        "strategies/test_sharded_keras.py": None,
        "strategies/test_mirrored_engine.py": None,
        "strategies/test_serving_export.py": "partial or keys",
    },
    "workers:3": {
        CONFORMANCE: None if ALL else "many_optimizers and not tensorflow",
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_sharded_workers.py": None,
    },
    "mirrored:12": {"strategies/test_sharded_limits.py": None},
}


@pytest.mark.parametrize("strategy", PLANS)
def test_strategies(strategy, tmp_path):
    run(PLANS[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:2"])
def test_two_strategies_and_the_documentation(strategy):
    files = ("test_sharded_notebook.py", "test_documentation.py")
    run({f"strategies/{file}": None for file in files}, strategy)
