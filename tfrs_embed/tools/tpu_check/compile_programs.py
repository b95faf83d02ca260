"""Compiles TPU programs with libtpu, in a Python that has jax and libtpu.

    python compile_programs.py TOPOLOGY FILE.stablehlo...

The script imports no TensorFlow: TensorFlow's wheel for TPUs and a newer libtpu
can't be in one process. It prints a line of JSON for the compiler, then the
fields of `compiling.Compiled` for each file.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several processes may compile at once; only one could use TPUs.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

#: Instructions of SparseCores.
_SPARSE = re.compile(
    r'custom_call_target="(SparseGather|SparseMapRow|PartitionCsr|'
    r'AllToAllDynamic)"'
)


def main(arguments: list[str]) -> None:
    """Compiles each file and prints the results."""
    topology, *paths = arguments
    client, options, devices = _connect(topology)
    print(json.dumps({"compiler": _version(client)}), flush=True)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        start = time.perf_counter()
        try:
            found = _compile(client, options, devices, text)
        except Exception as error:
            found = {"error": re.sub(r"\s+", " ", str(error))[:2000]}
        seconds = round(time.perf_counter() - start, 2)
        found = {"error": None, "seconds": seconds, **found}
        print(json.dumps(found), flush=True)


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


def _compile(
    client: Any, options: Any, devices: Any, text: str
) -> dict[str, Any]:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        executable = client.compile(
            ir.Module.parse(text),
            executable_devices=devices,
            compile_options=options,
        )
    memory = executable.get_compiled_memory_stats()
    found: dict[str, Any] = {"temporary_bytes": memory.temp_size_in_bytes}
    try:
        module = executable.hlo_modules()[0].to_string()
    except Exception:
        pass  # jaxlib can't read the module of a much newer libtpu.
    else:
        found["sparse_instructions"] = dict(
            collections.Counter(sorted(_SPARSE.findall(module)))
        )
    try:
        analysis = executable.cost_analysis()
    except Exception:
        analysis = {}
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else {}
    for key, name in (("flops", "flops"), ("bytes_accessed", "bytes accessed")):
        value = analysis.get(name, -1)
        found[key] = value if value >= 0 else None  # -1: unknown.
    return found


def _version(client: Any) -> str:
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library is None:
        import libtpu

        library = libtpu.get_library_path()
    # The folder beside the package's has the version in its name.
    package = pathlib.Path(library).parent
    for found in package.parent.glob("libtpu-*.dist-info"):
        return found.name.removesuffix(".dist-info").replace("-", " ", 1)
    return " ".join(client.platform_version.split())


if __name__ == "__main__":
    main(sys.argv[1:])
