"""Compiles the kernels for the TensorFlow that is installed.

    python -m tfrs_embed.kernels.build

It needs a C++17 compiler: $CXX, or g++, clang++ or c++. The result fits any
processor of this kind: the loops over rows are compiled for several instruction
sets, of which the machine that runs them picks one.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import tensorflow as tf

import tfrs_embed_command
from tfrs_embed.compat import progress
from tfrs_embed.kernels import files

_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC"),
    # Let loops with roots and divisions be vectorized; no result changes.
    *("-fno-math-errno", "-fno-trapping-math"),
    # Contracted products would round otherwise than TensorFlow's operations.
    "-ffp-contract=off",
]

_X86 = {
    "avx2": ["-mavx2"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        "-mprefer-vector-width=512",
    ],
}

# Seconds of a core for each file: g++ 12 on x86-64.
_SECONDS = {
    "rows_baseline": 50.0,
    "rows_avx512": 42.0,
    "rows_avx2": 37.0,
    "unit_0": 22.0,
    "unit_1": 22.0,
    "dispatch": 0.1,
}

# Sources that don't include TensorFlow's headers.
_WITHOUT_TENSORFLOW = ("dispatch.cc", "rows.cc")


class BuildError(RuntimeError):
    """The kernels can't be compiled; the text says why."""


def find_compiler() -> str | None:
    """The command of a C++ compiler, or None."""
    given = os.environ.get("CXX")
    for command in [given] if given else ["g++", "clang++", "c++"]:
        if command and shutil.which(command.split()[0]):
            return command
    return None


def build(
    output: Path | None = None,
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
) -> Path:
    """Compiles the kernels.

    Args:
        output: the file to write, or the folder; None: the package's
            folder, in place of older builds.
        flags: more flags for the compiler.
        link_flags: more flags for linking.

    Returns:
        The file.

    Raises:
        BuildError: no compiler, an error of the compiler, or a folder that
            can't be written to.
    """
    compiler = find_compiler()
    if compiler is None:
        given = os.environ.get("CXX")
        raise BuildError(
            f"No C++ compiler: CXX is {given!r}, which is not found."
            if given
            else "No C++ compiler: install g++, or set CXX to the command of "
            "one."
        )
    command = [*compiler.split(), *_FLAGS, *flags]
    with tempfile.TemporaryDirectory() as scratch:
        jobs = _compilations(Path(scratch))
        result = Path(scratch) / files.file_name()
        objects = [job[-1] for job in jobs]
        libraries = tf.sysconfig.get_link_flags()
        linked = [*objects, *link_flags, *libraries, "-o", str(result)]
        _compile(command, jobs)
        _run([*command, "-shared", *linked])
        return _install(result, output)


def _compile(command: list[str], jobs: list[list[str]]) -> None:
    """Runs the compilers, and shows how much is done and the time left."""
    # The longest file first.
    most = max(_SECONDS.values())
    jobs.sort(key=lambda job: -_SECONDS.get(Path(job[-1]).stem, most))
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        with progress.Task(
            "Compiling", "the kernels", len(jobs), "files"
        ) as task:
            running = [pool.submit(_run, [*command, *job]) for job in jobs]
            for done in task.count(as_completed(running)):
                done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _compilations(scratch: Path) -> list[list[str]]:
    """The compilers' arguments; the last one is the file that each writes."""
    # Without NDEBUG the sizes of some of TensorFlow's classes would differ.
    headers = ["-w", "-DNDEBUG", *tf.sysconfig.get_compile_flags()]
    # The copies that TensorFlow's training_op_helpers.h makes need threads.
    headers += ["-DEIGEN_USE_THREADS", f"-I{files.SOURCES}"]
    alone = ["-Wall", "-Wextra"]
    sources = [
        source.name
        for source in sorted(files.SOURCES.glob("*.cc"))
        if source.name not in _WITHOUT_TENSORFLOW
    ]
    jobs = []
    # TensorFlow's headers take longer to compile than all of these sources, so
    # that there are only two units of them.
    for number in range(2):
        unit = scratch / f"unit_{number}.cc"
        includes = [f'#include "{name}"\n' for name in sources[number::2]]
        unit.write_text("".join(includes), encoding="utf-8")
        jobs.append((unit.stem, str(unit), headers))
    jobs.append(("dispatch", "dispatch.cc", alone))
    loops: dict[str, list[str]] = {"baseline": []}
    if platform.machine() in ("x86_64", "AMD64"):
        loops.update(_X86)
    for name, flags in loops.items():
        named = [f"-DTFRS_LOOPS=tfrs_loops_{name}", f'-DTFRS_NAME="{name}"']
        jobs.append((f"rows_{name}", "rows.cc", [*alone, *flags, *named]))
    return [
        [*flags, "-c", str(files.SOURCES / source), "-o", f"{scratch / job}.o"]
        for job, source, flags in jobs
    ]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def _install(result: Path, output: Path | None) -> Path:
    """Puts the file in its place at once, whoever may be reading the old."""
    place = files.FOLDER / result.name
    if output is not None:
        place = output / result.name if output.is_dir() else output
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system, at a name that nobody can know before.
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            Path(shutil.copy(result, scratch)).replace(place)
    except OSError as error:
        raise BuildError(f"Can't write {place}: {error}") from error
    for old in files.older_than(place) if output is None else []:
        old.unlink(missing_ok=True)
    return place


def run(args: argparse.Namespace) -> int:
    """Compiles the kernels, unless there is a build that fits.

    Args:
        args: the arguments.

    Returns:
        The process's exit status: 1 if they can't be compiled.
    """
    found = files.find_build()
    if found and args.output is None and not args.force:
        print(f"The kernels are built: {found}")
        return 0
    print(
        f"Compiling the kernels for TensorFlow {tf.__version__}; two cores "
        "take one to two minutes ...",
        flush=True,
    )
    try:
        built = build(args.output)
    except BuildError as error:
        reason = str(error)
        if "\n" in reason:  # The compiler's own words.
            print(reason, file=sys.stderr)
            reason = "the compiler failed; see above."
        print(f"error: {reason}", file=sys.stderr)
        if not args.if_possible:
            return 1
        print(
            "No kernels: tfrs_embed will use TensorFlow's operations, which "
            "are slower and give the same numbers."
        )
        return 0
    print(f"Built {built}")
    return 0


def main(argv: Sequence[str] = ()) -> int:
    """Runs `tfrs-embed kernels build` with the arguments `argv`."""
    parser = tfrs_embed_command.make_parser()
    return run(parser.parse_args(["kernels", "build", *argv]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
