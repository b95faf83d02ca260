"""Compiles TPU programs with libtpu. Run in a Python that has jax and libtpu.

    python compile_programs.py TOPOLOGY FILE.stablehlo...

It stands alone, as TensorFlow's wheel for TPUs and a newer libtpu can't be in
one process. It prints a line of JSON for the compiler and one for each file.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Only one process at a time can have TPUs; any number can compile for them.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

#: Instructions that work on SparseCores.
_SPARSE = re.compile(
    r'custom_call_target="(SparseGather|SparseMapRow|PartitionCsr|'
    r'AllToAllDynamic)"'
)
_COLLECTIVE = re.compile(r" (all-reduce|all-to-all|all-gather)(?:-start)?\(")


def main(arguments: list[str]) -> None:
    """Compiles each file."""
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
        found["file"] = path
        found["seconds"] = round(time.perf_counter() - start, 2)
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
    found: dict[str, Any] = {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
    try:
        module = executable.hlo_modules()[0].to_string()
    except Exception:
        module = None  # jaxlib can't read that of a much newer libtpu.
    if module is not None:
        found["sparse_instructions"] = _counted(_SPARSE.findall(module))
        found["collectives"] = _counted(_COLLECTIVE.findall(module))
    try:
        analysis = executable.cost_analysis()
    except Exception:
        analysis = None
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    for key, name in (("flops", "flops"), ("bytes_accessed", "bytes accessed")):
        value = (analysis or {}).get(name, -1)
        found[key] = value if value >= 0 else None  # -1: it doesn't know.
    return found


def _version(client: Any) -> str:
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library is None:
        import libtpu

        library = libtpu.get_library_path()
    # The package's folder has its version beside it.
    package = pathlib.Path(library).parent
    for found in package.parent.glob("libtpu-*.dist-info"):
        return found.name.removesuffix(".dist-info").replace("-", " ", 1)
    return " ".join(client.platform_version.split())


def _counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


if __name__ == "__main__":
    main(sys.argv[1:])
