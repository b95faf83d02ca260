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

import tensorflow as tf

from tfrs_embed.kernels import build, files

HERE = pathlib.Path(__file__).resolve().parent

MEMORY = [
    "-DTFRS_ONE_WIDTH",
    # -O1: with less, loops as they are used would not be tried.
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # TensorFlow is compiled without the types that the first asks for, and its
    # headers don't compile with the others. Null is an address like others.
    "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute",
]
THREADS = ["-DTFRS_ONE_WIDTH", "-O1", "-g1", "-fsanitize=thread"]

ASAN_OPTIONS = [
    # Python and TensorFlow free little when they end.
    *("detect_leaks=0", "detect_odr_violation=0"),
    # Calls that are drawn may ask for any memory.
    *("allocator_may_return_null=1", "max_allocation_size_mb=1024"),
]

# Instruction sets, and numbers of TensorFlow's threads.
RUNS = [("", 8), ("baseline", 3)]

# The loops take the longest to compile, and those for AVX2 are the same C++ as
# the baseline's. Threads share out work in the same way for all.
X86 = ["avx2", "avx512"]
NOT_IN_RACE = ["rows_avx2", "rows_avx512", "unit_0", "unit_1"]


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
    last = library.with_name("last_call")
    for loops, threads in RUNS:
        done = subprocess.run(
            [
                *(sys.executable, str(HERE / "fuzz.py"), str(library)),
                *("--seconds", str(seconds), "--seed", str(seed)),
                *("--last", str(last)),
            ],
            env={
                **os.environ,
                "LD_PRELOAD": preload(compiler),
                "ASAN_OPTIONS": ":".join(ASAN_OPTIONS),
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_NUM_INTRAOP_THREADS": str(threads),
                "TFRS_EMBED_LOOPS": loops,
                "TFRS_EMBED_KERNELS": "",
            },
        )
        if done.returncode:
            text = last.read_text() if last.exists() else "none"
            sys.exit(f"Exit status {done.returncode}. The last call: {text}")
        seed += 1_000_000


def compilations(compiler, folder, flags, without):
    """The commands of the compiler by the objects that they make."""
    folder.mkdir()
    command = [*compiler.split(), *build._FLAGS, *flags]
    return {
        job[-1]: [*command, *job]
        for job in build._compilations(folder)
        if pathlib.Path(job[-1]).stem not in without
    }


def compile_both(compiler, scratch):
    """Returns the library for fuzz.py, and the program of race.cc."""
    memory = compilations(compiler, scratch / "memory", MEMORY, ["rows_avx2"])
    race = compilations(compiler, scratch / "race", THREADS, NOT_IN_RACE)
    commands = [*memory.values(), *race.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build._run, commands))
    library, program = scratch / "kernels.so", scratch / "race_program"
    shared = ["-shared", *tf.sysconfig.get_link_flags()]
    # Nothing is missing where there are no such loops.
    one = [f"-Wl,--defsym=tfrs_loops_{n}=tfrs_loops_baseline" for n in X86]
    sources = [HERE / "race.cc"]
    sources += [files.SOURCES / n for n in ("key_table.cc", "spill_file.cc")]
    alone = [f"-I{files.SOURCES}", *map(str, sources), "-pthread"]
    for output, flags, objects, rest in (
        (library, MEMORY, memory, [*shared, one[0]]),
        (program, THREADS, race, [*alone, *one]),
    ):
        command = [*compiler.split(), *build._FLAGS, *flags]
        build._run([*command, *objects, *rest, "-o", str(output)])
    return library, program


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
        begin = time.monotonic()
        library, race = compile_both(compiler, scratch)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        run_race(race, args.seconds, args.seed)
        fuzz(compiler, library, args.seconds, args.seed)


if __name__ == "__main__":
    main()
