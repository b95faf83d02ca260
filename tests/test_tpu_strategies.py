"""Runs tests on emulated slices, "tpu:<chips>x<SparseCores>"."""

import pytest

from process_tiers import starts
from run_in_processes import run_process


@pytest.mark.parametrize("process", starts("test", "tpu"))
def test_slices(process, tmp_path):
    run_process(process, "test", tmp_path)


def param(process):
    """A process; `make test-tpu-wheel` runs the largest one, by its name."""
    largest = process == "tpu:4x4"
    return pytest.param(process, marks=pytest.mark.nightly if largest else ())


@pytest.mark.more
@pytest.mark.parametrize("process", list(map(param, starts("more", "tpu"))))
def test_more_slices(process, tmp_path):
    run_process(process, "more", tmp_path)
