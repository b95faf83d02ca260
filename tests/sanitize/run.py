"""Compiles the kernels with sanitizers, and runs random cases on them.

    python tests/sanitize/run.py [--seconds 20]

AddressSanitizer and UndefinedBehaviorSanitizer watch the operations inside
TensorFlow. ThreadSanitizer can't: TensorFlow's own locks and threads are not
compiled with it, so it would take what they order for races. It watches
race.cc, which runs the same loops and steps on threads of its own.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from tfrs_embed.kernels import build, files

HERE = pathlib.Path(__file__).resolve().parent

MEMORY = [
    # -O1: with less, loops as they are used would not be tried.
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # TensorFlow is compiled without the types that the first asks for, and its
    # headers don't compile with the others. Null is an address like others.
    "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute",
]
THREADS = ["-O1", "-g1", "-fsanitize=thread"]

# Instruction sets, and numbers of TensorFlow's threads.
RUNS = [("", 8), ("avx2", 4), ("baseline", 3)]


def preload(compiler):
    """What must be loaded first: AddressSanitizer, and what it intercepts."""
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*compiler.split(), f"-print-file-name={name}"]
        paths.append(subprocess.check_output(command, text=True).strip())
    return ":".join(paths)


def run_race(program, seconds, seed):
    """Runs race.cc, with addresses that ThreadSanitizer expects if it may."""
    fixed = ["setarch", "-R"]
    try:
        subprocess.run([*fixed, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        fixed = []
    subprocess.run(
        [*fixed, str(program), str(seconds), str(seed)],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        check=True,
    )


def fuzz(compiler, library, seconds, seed):
    for loops, threads in RUNS:
        subprocess.run(
            [
                *(sys.executable, str(HERE / "fuzz.py"), str(library)),
                *("--seconds", str(seconds), "--seed", str(seed)),
            ],
            env={
                **os.environ,
                "LD_PRELOAD": preload(compiler),
                # Python and TensorFlow free little when they end.
                "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_NUM_INTRAOP_THREADS": str(threads),
                "TFRS_EMBED_LOOPS": loops,
                "TFRS_EMBED_KERNELS": "",
            },
            check=True,
        )
        seed += 1_000_000


def compile_race(compiler, scratch):
    """The program of race.cc with the loops of all instruction sets."""
    parts = ("rows.cc", "dispatch.cc")
    jobs = [
        job
        for job in build._compilations(scratch)
        if any(arg.endswith(parts) for arg in job)
    ]
    command = [*compiler.split(), *build._FLAGS, *THREADS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: build._run([*command, *job]), jobs))
    program = scratch / "race"
    keys = ("key_table.cc", "spill_file.cc")
    source = [
        f"-I{files.SOURCES}",
        str(HERE / "race.cc"),
        *(str(files.SOURCES / name) for name in keys),
    ]
    objects = [job[-1] for job in jobs]
    build._run([*command, *source, *objects, "-pthread", "-o", str(program)])
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=int, default=15, help="of each of three runs"
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="else another a run"
    )
    args = parser.parse_args()
    compiler = build.find_compiler()
    if compiler is None:
        sys.exit("No C++ compiler: install g++.")
    print(f"--seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        race = compile_race(compiler, scratch)
        run_race(race, args.seconds, args.seed)
        library = build.build(scratch / "kernels.so", MEMORY)
        fuzz(compiler, library, args.seconds, args.seed)


if __name__ == "__main__":
    main()
