"""Runs TensorFlow's passes over MLIR modules: the process of `passes.py`.

Each line of the input is a request, in JSON; each line of the output is the
result of one. A pass may crash, which then ends only this process.

TensorFlow's TPU kernels call libtpu through a table of pointers. Without libtpu
the table is empty, and a call would crash. The only function that the passes
call is supplied here.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from typing import Any

if __name__ == "__main__":
    # This folder's modules are not to be found before others of their names.
    del sys.path[0]

import tensorflow as tf

#: Where TpuTopology_MaybeAvailableSparseCoresPerLogicalDevice is in the table,
#: by the version of tensorflow-tpu. Found in the wheel's machine code.
OFFSETS = {"2.20.0": 0x190}
_TABLE = "_ZN15stream_executor3tpu8OpsApiFnEv"
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_sparse_cores = 0


def main() -> None:
    """Answers requests until the input ends."""
    # C++ code may print.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(_run(**json.loads(line))) + "\n")
        replies.flush()


def _run(text: str, pipeline: str, sparse_cores: int) -> str:
    """The module after the passes, or the text of an error."""
    _set_sparse_cores(sparse_cores)
    try:
        result: str = tf.mlir.experimental.run_pass_pipeline(text, pipeline)
    except tf.errors.OpError as error:
        return f"{error.message}"
    return result


def _set_sparse_cores(number: int) -> None:
    """Tells TensorFlow's kernels how many SparseCores a chip has."""
    global _sparse_cores
    _sparse_cores = number
    slot = _slot()
    if slot is not None:
        function = ctypes.cast(_sparse_cores_per_device, ctypes.c_void_p)
        slot.value = function.value


@functools.cache
def _slot() -> Any:
    """The function's entry in the table; None if libtpu has filled it."""
    folder = os.path.dirname(tf.__file__)
    library = ctypes.CDLL(os.path.join(folder, "libtensorflow_cc.so.2"))
    table = library[_TABLE]
    table.restype = ctypes.c_void_p
    slot = ctypes.c_void_p.from_address(table() + OFFSETS[tf.__version__])
    return None if slot.value else slot


@_FUNCTION
def _sparse_cores_per_device(result: int, _: int) -> int:
    # The result is an absl::StatusOr<int>: 1 is OK, then the value.
    ctypes.c_uint64.from_address(result).value = 1
    ctypes.c_int.from_address(result + 8).value = _sparse_cores
    return result


if __name__ == "__main__":
    main()
