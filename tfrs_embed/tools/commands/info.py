"""The command `tfrs-embed info`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat.version import __version__
from tfrs_embed.tools.command_line import FINE

# TensorFlow's wheels; only one of them should be installed.
_TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "tf-nightly",
    "tf-nightly-cpu",
)
_OTHERS = ("tf-keras", "keras", "keras-rs", "numpy", "tensorflow-recommenders")
# The variables whose values are shown: settings of this package and TensorFlow.
# No others: secrets may begin with TF_, too, as Terraform's TF_VAR_... do.
_VARIABLES = """
  TFRS_EMBED_KERNELS TFRS_EMBED_LOOPS TFRS_EMBED_PROGRESS TF_CONFIG
  TF_USE_LEGACY_KERAS TF_CPP_MIN_LOG_LEVEL TF_CPP_MAX_VLOG_LEVEL TF_CPP_VMODULE
  TF_NUM_INTEROP_THREADS TF_NUM_INTRAOP_THREADS TF_OVERRIDE_GLOBAL_THREADPOOL
  TF_SYNC_ON_FINISH TF_ENABLE_ONEDNN_OPTS TF_ONEDNN_USE_SYSTEM_ALLOCATOR
  TF_SET_ONEDNN_FPMATH_MODE TF_ENABLE_ZENDNN_OPTS TF_DETERMINISTIC_OPS
  TF_CUDNN_DETERMINISTIC TF_CUDNN_USE_AUTOTUNE TF_MATMUL_AUTOTUNE_ENABLE
  TF_FORCE_GPU_ALLOW_GROWTH TF_FORCE_UNIFIED_MEMORY TF_GPU_ALLOCATOR
  TF_GPU_HOST_MEM_LIMIT_IN_MB TF_DEVICE_MIN_SYS_MEMORY_IN_MB
  TF_PER_DEVICE_MEMORY_LIMIT_MB TF_GPU_THREAD_COUNT TF_GPU_THREAD_MODE
  TF_CPU_ALLOCATOR_USE_BFC TF_CPU_BFC_MEM_LIMIT_IN_MB TF_ENABLE_COND_V2
  TF_ENABLE_CONTROL_FLOW_V2 TF_ENABLE_WHILE_V2 TF_XLA_FLAGS
  TF_FUNCTION_JIT_COMPILE_DEFAULT TF_XLA_BRIDGE TF_GRPC_DEFAULT_OPTIONS
  TF_GRPC_REUSE_PORT TF_DATA_EXPERIMENT_OPT_IN TF_DATA_EXPERIMENT_OPT_OUT
"""
_LEGACY = "TF_USE_LEGACY_KERAS"
# Linux's names of the instruction sets that make lookups faster.
_INSTRUCTION_SETS = """
  sse4_2 avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16
  avx512_vnni amx_bf16 amx_tile asimd sve sve2 bf16
"""


def run(args: argparse.Namespace) -> int:
    """Runs the command, and returns the process's exit status.

    `args.environment` has the variables that the command began with.
    """
    print(json.dumps(gather(args.environment), indent=2))
    return FINE


def gather(environment: Mapping[str, str]) -> dict[str, Any]:
    """Describes the machine and the installed packages.

    Args:
        environment: the environment variables.

    Returns:
        A description as JSON has it, with None for unknown values.
    """
    devices = _devices()  # Loading the kernels starts TensorFlow's runtime.
    return {
        "versions": _versions(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "devices": devices,
        "tf.keras": {**_tf_keras(), _LEGACY: environment.get(_LEGACY)},
        "kernels": dataclasses.asdict(kernels.status()),
        "environment": {
            name: environment[name]
            for name in sorted(_VARIABLES.split())
            if name in environment
        },
    }


def _versions() -> dict[str, str | None]:
    wheels = {name: _version(name) for name in _TENSORFLOWS}
    return {
        "tfrs_embed": __version__,
        "python": platform.python_version(),
        **({k: v for k, v in wheels.items() if v} or {"tensorflow": None}),
        "tensorflow imported": tf.__version__,
        "tensorflow build": tf.version.GIT_VERSION,
        **{name: _version(name) for name in _OTHERS},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    fields = _cpuinfo()
    name = fields.get("model name") or platform.processor() or None
    has = (fields.get("flags") or fields.get("Features") or "").split()
    usable = getattr(os, "sched_getaffinity", None)
    return {
        "name": name,
        "machine": platform.machine(),
        "instruction_sets": [s for s in _INSTRUCTION_SETS.split() if s in has],
        "cores": os.cpu_count(),
        "usable_cores": len(usable(0)) if usable else os.cpu_count(),
    }


def _cpuinfo() -> dict[str, str]:
    """Returns the fields of the first processor, on Linux."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # On Windows.
        return None


def _devices() -> list[dict[str, Any]]:
    found = []
    for device in tf.config.list_physical_devices():
        facts = {"name": device.name, "type": device.device_type}
        if device.device_type == "GPU":
            details = tf.config.experimental.get_device_details(device)
            facts |= {name: str(value) for name, value in details.items()}
        found.append(facts)
    return found


def _tf_keras() -> dict[str, str | None]:
    """Returns the package and version of tf.keras, or the import's error."""
    try:
        package = str(tf.keras.__name__).partition(".")[0]
        version = str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError) as error:
        return {"version": None, "error": str(error)}
    return {"package": package, "version": version}
