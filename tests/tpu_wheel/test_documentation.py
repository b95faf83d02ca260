"""Examples in docstrings that need TensorFlow's wheel for TPUs."""

import pytest

from documentation import IMPORTS, ON_TPU_WHEEL, run_example
from tfrs_embed.sparsecore.host_kernels import has_kernels


@pytest.mark.skipif(
    not has_kernels(), reason="needs the kernels of the tensorflow-tpu wheel"
)
def test_examples_run():
    names = dict(IMPORTS)
    for name in ON_TPU_WHEEL:
        run_example(name, names)
