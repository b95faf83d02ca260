"""Runs tests that need several replicas, in processes that have them."""

import pytest

from plans import MORE_REPLICAS, REPLICAS
from processes import run


@pytest.mark.parametrize("strategy", REPLICAS)
def test_strategies(strategy, tmp_path):
    run(REPLICAS[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))


@pytest.mark.more
@pytest.mark.parametrize("strategy", MORE_REPLICAS)
def test_more_of_strategies(strategy, tmp_path):
    run(MORE_REPLICAS[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))


@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:2"])
def test_two_strategies_and_the_documentation(strategy):
    files = ("test_sharded_notebook.py", "test_documentation.py")
    run({f"strategies/{file}": None for file in files}, strategy)
