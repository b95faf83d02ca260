"""The files of the compiled kernels, and the TensorFlow that each is for.

A build fits one TensorFlow: there is no C++ interface that releases share, and
the C interface has neither TensorFlow's threads nor, in its wheels, locks of
variables. So a build's file name says all that it was made from, and a file of
another name is never loaded. That holds for patch releases of one TensorFlow
too: a wheel has a build for each of those that there were when it was made.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import tensorflow as tf

# Links are not followed: a test that Bazel runs has links to the sources, and
# the build that Bazel made beside them.
_HERE = Path(__file__).absolute().parent
SOURCES = _HERE / "cc"

# Builds that the wheel of a release brought, for several TensorFlows.
FROM_WHEEL = _HERE / "from_wheel"

_PREFIX = "kernels-"


def folders() -> list[Path]:
    """The folders that builds are put into, the preferred one first."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [_HERE, Path(cache) / "tfrs_embed"]


def _searched() -> list[Path]:
    """The folders that builds are looked for in; Bazel makes the last one.

    Where a wheel has brought a build, another one is in the package's own
    folder only if somebody has compiled it on purpose. In the cache it may be
    there since before.
    """
    package, cache = folders()
    return [package, FROM_WHEEL, cache, _HERE / "compiled"]


def file_name() -> str:
    """The file name of the build that fits this machine and TensorFlow."""
    digest = hashlib.sha256(tf.version.GIT_VERSION.encode())
    # Who compiles the same sources of TensorFlow may have other classes.
    for flag in tf.sysconfig.get_compile_flags():
        if flag.startswith("-D"):
            digest.update(flag.encode())
    sources = [p for p in SOURCES.iterdir() if p.suffix in (".cc", ".h")]
    for source in [*sorted(sources), SOURCES.with_name("build.py")]:
        digest.update(source.read_bytes())
    return f"{_fits_alike()}{digest.hexdigest()[:12]}.so"


def _fits_alike() -> str:
    """The beginning of the names of builds for this machine and TensorFlow."""
    return f"{_PREFIX}tf{tf.__version__}-{platform.machine()}-"


def find() -> Path | None:
    """The build that fits, if there is one."""
    name = file_name()
    for folder in _searched():
        if (folder / name).is_file():
            return folder / name
    return None


def others() -> list[Path]:
    """Builds that don't fit."""
    name = file_name()
    return [
        path
        for folder in _searched()
        if folder.is_dir()
        for path in sorted(folder.glob(f"{_PREFIX}*.so"))
        if path.name != name
    ]


def of_wheel() -> list[str]:
    """The TensorFlows that the wheel brought builds for, if it did."""
    names = [path.name for path in FROM_WHEEL.glob(f"{_PREFIX}tf*.so")]
    return sorted(n.removeprefix(f"{_PREFIX}tf").split("-")[0] for n in names)


def replaced_by(build: Path) -> list[Path]:
    """Builds beside a new one that are of older sources."""
    alike = build.parent.glob(f"{_fits_alike()}*.so")
    return [path for path in alike if path.name != build.name]
