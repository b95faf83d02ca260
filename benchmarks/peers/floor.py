"""The machine's bound: the memory traffic that a step can't do without."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

import cases
import numpy as np

from peers import Runner

SOURCE = pathlib.Path(__file__).with_name("floor.cc")


def build():
    """Compiles the source and loads it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise FileNotFoundError("there is no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder, "floor.so")
        flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC"]
        subprocess.run(
            [compiler, *flags, str(SOURCE), "-o", str(library)], check=True
        )
        return ctypes.CDLL(str(library))


def make(case, form):
    library = build()
    [table], [_] = case.tables, case.features
    train = case.kind != "forward"
    updated = 1 + cases.SLOTS[case.optimizer] if train else 0
    # Not zeros: those have no memory of their own until they are written.
    arrays = [
        np.full((table.rows, table.dim), 0.1, np.float32)
        for _ in range(max(1, updated))
    ]
    pointers = ctypes.c_void_p * len(arrays)
    size = ctypes.c_int64
    threads = size(len(os.sched_getaffinity(0)))

    def prepare(batch):
        lookups = np.ascontiguousarray(batch[0].ravel())
        unique = np.unique(lookups)
        # Sorted ids would be kinder to memory than any lookup is.
        np.random.default_rng(0).shuffle(unique)
        return lookups, unique

    def step(inputs):
        lookups, unique = (
            (ids.ctypes.data_as(ctypes.c_void_p), size(ids.size))
            for ids in inputs
        )
        library.Step(
            pointers(*[a.ctypes.data for a in arrays]),
            size(updated),
            size(4 * table.dim),
            *lookups,
            *unique,
            threads,
        )
        return 0.0

    return Runner(prepare, step, None)
