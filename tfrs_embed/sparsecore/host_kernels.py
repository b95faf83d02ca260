"""Tells whether TensorFlow has SparseCores' host kernels (in its TPU wheel)."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import device_util, kernel_registry
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.compat.version import LIBTPU, TENSORFLOW_TPU

_OP = "ConvertToListOfSparseCoreCooTensors"


def has_kernels() -> bool:
    """Whether this TensorFlow has the kernels of SparseCore's host ops."""
    return bool(kernel_registry.get_registered_kernels_for_op(_OP).kernel)


def require_kernels(strategy: tf.distribute.Strategy) -> None:
    """Checks that this process can preprocess ids if a strategy needs it."""
    require_sparse_core_api()
    if has_kernels() or hasattr(strategy, "topology"):
        return  # An emulated slice uses numpy.
    device = strategy.extended.worker_devices[0]
    host = tf.DeviceSpec.from_string(device_util.get_host_for_device(device))
    if host.job not in (None, "localhost"):
        return  # Another machine's TensorFlow preprocesses the ids.
    raise RuntimeError(
        f"These TPUs have SparseCores, but TensorFlow {tf.__version__} as "
        "installed lacks their host operations. They are in the wheel for "
        "TPUs: pip uninstall tensorflow; pip install "
        f"tensorflow-tpu=={TENSORFLOW_TPU} libtpu=={LIBTPU}"
    )
