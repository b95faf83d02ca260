"""Compiles the kernels for a wheel, by the Python of one TensorFlow.

    python tools/wheels/compile.py FOLDER

It prints the file, which it makes if it isn't there; the package is on
PYTHONPATH. The kernels ask for no newer system than they must, and contain no
path of this machine. Patch releases of which the compiler sees the same are
compiled once.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

from tfrs_embed.kernels import build, files

HERE = Path(__file__).resolve().parent
RECIPE = ("compile.py", "old_symbols.cc", "old_symbols.h")

FLAGS = [
    *("-include", str(HERE / "old_symbols.h")),
    # The names of sources are in TensorFlow's messages.
    f"-ffile-prefix-map={tf.sysconfig.get_include()}/=",
    f"-ffile-prefix-map={files.SOURCES}/=tfrs_embed/kernels/cc/",
]
LINK_FLAGS = [
    str(HERE / "old_symbols.cc"),
    "-Wl,--strip-all",  # Of symbols that only debuggers need.
]


def digest():
    """A hash of all that the compiler sees, and of the compiler.

    TensorFlow's headers come preprocessed: most of those that a patch release
    changes are not included, and its version is in none that is.
    """
    compiler = build.find_compiler()
    if compiler is None:
        sys.exit("No C++ compiler: install g++, or set CXX.")
    command = [*compiler.split(), *FLAGS, "-std=c++17", "-O3", "-DNDEBUG"]
    command += ["-w", "-DEIGEN_USE_THREADS", f"-I{files.SOURCES}"]
    command += [*tf.sysconfig.get_compile_flags(), "-E", "-P", "-xc++", "-"]
    sources = [p for p in files.SOURCES.iterdir() if p.suffix in (".cc", ".h")]
    sources.sort()
    unit = "".join(f'#include "{p.name}"\n' for p in sources)
    done = subprocess.run(
        command, input=unit.encode(), check=True, stdout=subprocess.PIPE
    )
    result = hashlib.sha256(done.stdout)
    macros = [f for f in tf.sysconfig.get_compile_flags() if f[:2] != "-I"]
    version = subprocess.check_output([*compiler.split(), "--version"])
    result.update(f"{macros} {compiler}".encode() + version)
    recipe = [HERE / name for name in RECIPE]
    for source in [*sources, Path(build.__file__), *recipe]:
        result.update(source.read_bytes())
    return result.hexdigest()[:12]


def main():
    folder = Path(sys.argv[1]) / digest()
    path = folder / files.file_name()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        [same, *_] = [*folder.glob("kernels-*.so"), None]
        if same:
            shutil.copyfile(same, path)
        else:
            build.build(path, FLAGS, LINK_FLAGS)
    print(path)


if __name__ == "__main__":
    main()
