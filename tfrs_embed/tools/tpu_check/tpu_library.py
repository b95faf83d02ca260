"""Requires the TensorFlow whose TPU kernels a check can use without libtpu."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.pass_process import OFFSETS


def require() -> None:
    """Raises a CheckError unless this is TensorFlow's TPU wheel, as known."""
    known = " or ".join(OFFSETS)
    install = f"pip install --no-deps tensorflow-tpu=={known}"
    if not has_kernels():
        raise CheckError(
            f"TensorFlow {tf.__version__} as installed has no kernels for "
            "TPUs. A check needs the wheel for TPUs, in an environment of its "
            f"own: {install}"
        )
    if tf.__version__ not in OFFSETS:
        raise CheckError(
            f"A check needs tensorflow-tpu {known}, found {tf.__version__}: "
            "which functions of libtpu its kernels call is known for those "
            f"versions only. In an environment of its own: {install}"
        )
