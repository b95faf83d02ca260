"""Runs tests on the layers of Keras 3, in processes that have only that."""

import pytest

from plans import KERAS_3, MORE_KERAS_3
from processes import run


def run_on_keras_3(tests, strategy, folder):
    run(
        tests,
        strategy,
        TFRS_EMBED_TEST_KERAS="3",
        TFRS_EMBED_TEST_FOLDER=str(folder),
    )


@pytest.mark.parametrize("strategy", KERAS_3)
def test_keras_3(strategy, tmp_path):
    run_on_keras_3(KERAS_3[strategy], strategy, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("strategy", MORE_KERAS_3)
def test_more_of_keras_3(strategy, tmp_path):
    run_on_keras_3(MORE_KERAS_3[strategy], strategy, tmp_path)
