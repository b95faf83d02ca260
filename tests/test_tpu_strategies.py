"""Runs tests on emulated slices, "tpu:<chips>x<SparseCores>"."""

import pytest

from plans import MORE_SLICES, SLICES
from processes import run


@pytest.mark.parametrize("strategy", SLICES)
def test_slices(strategy, tmp_path):
    run(SLICES[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))


@pytest.mark.more
@pytest.mark.parametrize("strategy", MORE_SLICES)
def test_more_slices(strategy, tmp_path):
    run(MORE_SLICES[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))
