"""The files of the compiled kernels, and the TensorFlow of each.

A build fits one TensorFlow release, patch releases included: there is no common
C++ interface, and the C interface has neither TensorFlow's threads nor, in its
wheels, locks of variables. So a build's file name is derived from everything it
was made from, and other files are never loaded. A wheel has a build for each
patch release of its time.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import tensorflow as tf

# Links are not followed: Bazel's tests have links to the sources, and Bazel's
# build beside them.
_HERE = Path(__file__).absolute().parent
SOURCES = _HERE / "cc"

# The builds of a wheel, for several TensorFlows.
FROM_WHEEL = _HERE / "from_wheel"

_PREFIX = "kernels-"


def folders() -> list[Path]:
    """Returns the folders for builds, the preferred one first."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [_HERE, Path(cache) / "tfrs_embed"]


def _searched() -> list[Path]:
    """Returns the folders to search for builds; Bazel makes the last one.

    The package's folder comes before a wheel's builds, as someone compiled its
    build on purpose; the cache comes after, as its builds may be old.
    """
    package, cache = folders()
    return [package, FROM_WHEEL, cache, _HERE / "compiled"]


def file_name() -> str:
    """Returns the name of the build for this machine and TensorFlow."""
    digest = hashlib.sha256(tf.version.GIT_VERSION.encode())
    # Other flags for the same sources of TensorFlow give other classes.
    for flag in tf.sysconfig.get_compile_flags():
        if flag.startswith("-D"):
            digest.update(flag.encode())
    sources = [p for p in SOURCES.iterdir() if p.suffix in (".cc", ".h")]
    for source in [*sorted(sources), SOURCES.with_name("build.py")]:
        digest.update(source.read_bytes())
    return f"{_fits_alike()}{digest.hexdigest()[:12]}.so"


def _fits_alike() -> str:
    """Returns the prefix of builds' names for this machine and TensorFlow."""
    return f"{_PREFIX}tf{tf.__version__}-{platform.machine()}-"


def find() -> Path | None:
    """Returns the build that fits, or None."""
    name = file_name()
    for folder in _searched():
        if (folder / name).is_file():
            return folder / name
    return None


def others() -> list[Path]:
    """Returns builds that don't fit."""
    name = file_name()
    return [
        path
        for folder in _searched()
        if folder.is_dir()
        for path in sorted(folder.glob(f"{_PREFIX}*.so"))
        if path.name != name
    ]


def of_wheel() -> list[str]:
    """Returns the TensorFlows for which the wheel has builds."""
    names = [path.name for path in FROM_WHEEL.glob(f"{_PREFIX}tf*.so")]
    return sorted(n.removeprefix(f"{_PREFIX}tf").split("-")[0] for n in names)


def replaced_by(build: Path) -> list[Path]:
    """Returns builds of older sources beside a new one."""
    alike = build.parent.glob(f"{_fits_alike()}*.so")
    return [path for path in alike if path.name != build.name]
