"""Supplies the one function of libtpu that lowering calls, without libtpu.

TensorFlow's TPU kernels call libtpu through a table of pointers. Without libtpu
the table is empty, and a call would crash the process.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import tensorflow as tf

from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.tools.tpu_check.errors import CheckError

#: Where TpuTopology_MaybeAvailableSparseCoresPerLogicalDevice is in the table,
#: by the version of tensorflow-tpu. Found in the wheel's machine code.
_OFFSETS = {"2.20.0": 0x190}
_TABLE = "_ZN15stream_executor3tpu8OpsApiFnEv"
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


def require() -> None:
    """Raises a CheckError unless this is TensorFlow's TPU wheel, as known."""
    known = " or ".join(_OFFSETS)
    install = f"pip install --no-deps tensorflow-tpu=={known}"
    if not has_kernels():
        raise CheckError(
            f"TensorFlow {tf.__version__} as installed has no kernels for "
            "TPUs. A check needs the wheel for TPUs, in an environment of its "
            f"own: {install}"
        )
    if tf.__version__ not in _OFFSETS:
        raise CheckError(
            f"A check needs tensorflow-tpu {known}, found {tf.__version__}: "
            "which functions of libtpu its kernels call is known for those "
            f"versions only. In an environment of its own: {install}"
        )


@functools.cache
def _slot() -> Any:
    """The function's entry in the table; None if libtpu has filled it."""
    folder = os.path.dirname(tf.__file__)
    library = ctypes.CDLL(os.path.join(folder, "libtensorflow_cc.so.2"))
    table = library[_TABLE]
    table.restype = ctypes.c_void_p
    slot = ctypes.c_void_p.from_address(table() + _OFFSETS[tf.__version__])
    return None if slot.value else slot


_sparse_cores = 0


@_FUNCTION
def _sparse_cores_per_device(result: int, _: int) -> int:
    # The result is an absl::StatusOr<int>: 1 is OK, then the value.
    ctypes.c_uint64.from_address(result).value = 1
    ctypes.c_int.from_address(result + 8).value = _sparse_cores
    return result


def set_sparse_cores(number: int) -> None:
    """Tells TensorFlow's kernels how many SparseCores a chip has."""
    global _sparse_cores
    _sparse_cores = number
    slot = _slot()
    if slot is not None:
        function = ctypes.cast(_sparse_cores_per_device, ctypes.c_void_p)
        slot.value = function.value
