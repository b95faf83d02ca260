"""Compiles TPU programs with libtpu, in a Python that has jax and libtpu.

    python compile_programs.py TOPOLOGY FILE.stablehlo...

The script imports no TensorFlow: TensorFlow's wheel for TPUs and a newer libtpu
can't be in one process. It prints a line of JSON for the compiler, then the
fields of `compiling.Compiled` for each file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several processes may compile at once; only one could use TPUs.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# jax sets it, too.
_LIBRARY = os.environ.get("TPU_LIBRARY_PATH")


def main(arguments: list[str]) -> None:
    """Compiles each file and prints the results."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    topology, *paths = arguments
    client, options, devices = _connect(topology)
    print(json.dumps({"compiler": _version()}), flush=True)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        result: dict[str, Any] = {"error": None}
        start = time.perf_counter()
        with mlir.make_ir_context():
            try:
                module = ir.Module.parse(text)
            except Exception as unread:
                result["not_checked"] = f"jax can't read it: {_line(unread)}"
            else:
                try:
                    client.compile(
                        module,
                        executable_devices=devices,
                        compile_options=options,
                    )
                except Exception as refused:
                    result["error"] = _line(refused)
        result["seconds"] = round(time.perf_counter() - start, 2)
        print(json.dumps(result), flush=True)


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:2000]


def _connect(topology: str) -> tuple[Any, Any, Any]:
    import numpy as np
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    chips = [int(n) for n in topology.partition(":")[2].split("x")]
    arguments = {}
    if all(n == 1 for n in chips):
        arguments["chips_per_host_bounds"] = [1, 1, 1]
    devices = list(
        topologies.get_topology_desc(
            topology_name=topology, platform="tpu", **arguments
        ).devices
    )
    number = len(devices)
    options = xla_client.CompileOptions()
    options.num_replicas = number
    options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(number).reshape(number, 1)
    )
    return devices[0].client, options, xla_client.DeviceList(tuple(devices))


def _version() -> str:
    return f"libtpu {_LIBRARY or importlib.metadata.version('libtpu')}"


if __name__ == "__main__":
    main(sys.argv[1:])
