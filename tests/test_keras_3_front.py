"""Runs tests on the layers of Keras 3, in processes that have only that.

What the layers of tf_keras are tested for in the same files is code that both
share.
"""

import pytest

from process_tiers import starts
from run_in_processes import run_process


@pytest.mark.parametrize("process", starts("test", "keras:3"))
def test_keras_3(process, tmp_path):
    run_process(process, "test", tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("process", starts("more", "keras:3"))
def test_more_of_keras_3(process, tmp_path):
    run_process(process, "more", tmp_path)
