"""Runs tests on emulated slices, "tpu:<chips>x<SparseCores>"."""

import pytest

from plans import SLICES
from processes import run


@pytest.mark.parametrize("strategy", SLICES)
def test_slices(strategy, tmp_path):
    run(SLICES[strategy], strategy, TFRS_EMBED_TEST_FOLDER=str(tmp_path))
