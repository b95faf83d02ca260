"""Runs pytest on the files named in argv: the `main` of `pytest_test`."""

import os
import sys

import pytest

if __name__ == "__main__":
    args = ["-p", "no:cacheprovider"]
    if os.environ.get("XML_OUTPUT_FILE"):  # Where Bazel looks for the report.
        args.append("--junitxml=" + os.environ["XML_OUTPUT_FILE"])
    if os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        args += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    sys.exit(pytest.main(args + sys.argv[1:]))
