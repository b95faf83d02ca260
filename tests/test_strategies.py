"""Runs tests that need several replicas, in processes that have them."""

import pytest

from process_tiers import starts
from run_in_processes import run, run_process

REPLICAS = ("mirrored", "workers")


@pytest.mark.parametrize("process", starts("test", *REPLICAS))
def test_strategies(process, tmp_path):
    run_process(process, "test", tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("process", starts("more", *REPLICAS))
def test_more_of_strategies(process, tmp_path):
    run_process(process, "more", tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["mirrored:2", "workers:2"])
def test_two_strategies_and_the_documentation(strategy):
    files = ("test_sharded_notebook.py", "test_documentation.py")
    run([f"strategies/{file}" for file in files], strategy)
