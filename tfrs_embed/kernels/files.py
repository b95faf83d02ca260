"""The files of the compiled kernels, and the TensorFlow of each.

A build fits one TensorFlow release, patch releases included: there is no common
C++ interface, and the C interface has neither TensorFlow's threads nor, in its
wheels, locks of variables. So a build's file name is derived from everything it
was made from, and other files are never loaded. A wheel has a build for each
patch release of its time.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import tensorflow as tf

# Links are not followed: Bazel's tests have links to the sources, and Bazel's
# build beside them.
FOLDER = Path(__file__).absolute().parent
SOURCES = FOLDER / "cc"

# The builds of a wheel, for several TensorFlows.
FROM_WHEEL = FOLDER / "from_wheel"


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
    return f"kernels-tf{tf.__version__}-{platform.machine()}-"


def find_build() -> Path | None:
    """Returns the build that fits, or None."""
    name = file_name()
    # Someone compiled the first one's on purpose. Bazel makes the last one.
    for folder in (FOLDER, FROM_WHEEL, FOLDER / "compiled"):
        if (folder / name).is_file():
            return folder / name
    return None


def older_than(build: Path) -> list[Path]:
    """Returns builds of older sources beside a new one."""
    alike = build.parent.glob(f"{_fits_alike()}*.so")
    return [path for path in alike if path.name != build.name]
