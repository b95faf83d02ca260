"""Compiled kernels for the CPU, and their status.

They replace TensorFlow operations in `tfrs_embed.ops`, with the same numbers,
in a fraction of the time. The wheels for Linux on x86-64 contain them;
elsewhere `python -m tfrs_embed.kernels.build` compiles them. The environment
variable TFRS_EMBED_KERNELS=off disables them.

Example:
    >>> tfrs_embed.kernels.status().loaded
    True
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.kernels import files

__all__ = ["Status", "disabled", "status"]

_BUILD = "python -m tfrs_embed.kernels.build"


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the compiled kernels are in use, and why.

    Example:
        >>> status = tfrs_embed.kernels.status()
        >>> print(status.reason)
        Kernels in use: ...

    Attributes:
        loaded: whether they are in use.
        reason: why, in one sentence.
        path: their file, or None.
        loops: the instruction set in use: "avx512" (from Ice Lake and Zen 4
            on), "avx2" or "baseline" (SSE2, or NEON on Arm); None if not
            loaded.
        origin: "wheel" for the installed wheel's file, "compiled" for one
            compiled for this installation; None if not loaded.
    """

    loaded: bool
    reason: str
    path: str | None = None
    loops: str | None = None
    origin: str | None = None

    def __str__(self) -> str:
        return self.reason


def status() -> Status:
    """The compiled kernels' status: whether they are in use, and why.

    The first call loads them, which starts TensorFlow's runtime: configure
    devices before it.

    Example:
        >>> print(tfrs_embed.kernels.status())
        Kernels in use: ...

    Returns:
        The status.
    """
    return _load()[0]


def missing() -> str | None:
    """Returns why there are no kernels and how to get them; else None.

    It loads none, so devices can still be configured. With GPUs nothing is
    missing.
    """
    if tf.config.get_visible_devices("GPU"):
        return None
    return _why_none(files.find_build())


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Uses only TensorFlow's operations, in code traced or run inside.

    It is for comparisons, and for exports that TensorFlow Lite is to convert;
    saved models never depend on the kernels.

    Example:
        >>> with tfrs_embed.kernels.disabled():
        ...     rows = tfrs_embed.embedding_lookup(tf.ones([9, 2]), [3, 5])
        >>> rows.shape
        TensorShape([2, 2])

    Yields:
        Nothing.
    """
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


_disabled = 0


def are_disabled() -> bool:
    """Whether the code runs in `disabled`."""
    return _disabled > 0


def operations(device: str | None, elsewhere: bool = False) -> Any:
    """Returns the kernels' operations; None: TensorFlow's are to be used.

    Args:
        device: the rows' device; None or empty: TensorFlow chooses.
        elsewhere: whether the graph is for another process, whose devices are
            not known.
    """
    if _disabled:
        return None
    if elsewhere:
        return _load()[1]
    if save_context.in_save_context():
        return None
    if device and "CPU" not in device.upper():
        return None
    if not device and tf.config.list_logical_devices("GPU"):
        return None
    found, module = _load()
    if module is None:
        logging.log_first_n(logging.INFO, "tfrs_embed: %s", 1, found.reason)
    return module


@functools.cache
def _load() -> tuple[Status, Any]:
    path = files.find_build()
    reason = _why_none(path)
    if reason is not None:
        return Status(False, reason), None
    assert path is not None, "Without one there is a reason."
    try:
        module = tf.load_op_library(str(path))
        with tf.init_scope():  # The first caller may be tracing a function.
            loops = module.tfrs_embed_loops().numpy().decode()
    except (tf.errors.OpError, AttributeError) as error:
        reason = f"No kernels: {path} does not load: {error}"
        return Status(False, reason), None
    origin = "wheel" if path.parent == files.FROM_WHEEL else "compiled"
    came = "came with the wheel" if origin == "wheel" else "compiled here"
    reason = f"Kernels in use: {path} ({loops}; {came})."
    return Status(True, reason, str(path), loops, origin), module


def _why_none(path: Path | None) -> str | None:
    """Returns why no build is loaded; None: one is."""
    if os.environ.get("TFRS_EMBED_KERNELS", "").lower() in ("off", "0"):
        return "Kernels are off: TFRS_EMBED_KERNELS says so."
    if path is not None:
        return None
    # Another build of TensorFlow may have other C++ classes.
    return (
        f"No kernels: none are compiled for this TensorFlow, {tf.__version__} "
        f"({tf.version.GIT_VERSION}), and this release; run {_BUILD}."
    )
