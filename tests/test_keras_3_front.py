"""Runs tests on the layers of Keras 3, in processes that have only that."""

import pytest

from plans import KERAS_3
from processes import run


@pytest.mark.parametrize("strategy", KERAS_3)
def test_keras_3(strategy, tmp_path):
    run(
        KERAS_3[strategy],
        strategy,
        TFRS_EMBED_TEST_KERAS="3",
        TFRS_EMBED_TEST_FOLDER=str(tmp_path),
    )
