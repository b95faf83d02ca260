"""Tests that need a strategy: collected in a process that has one."""

import os

collect_ignore_glob = (
    [] if os.environ.get("TFRS_EMBED_TEST_STRATEGY") else ["test_*.py"]
)
