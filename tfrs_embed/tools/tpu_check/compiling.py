"""Compiles programs with libtpu, in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfrs_embed.tools.tpu_check import compile_programs
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.lowering import Program
from tfrs_embed.tools.tpu_check.slices import Slice

_NEEDED = ("jax", "libtpu")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's verdict on a program.

    Example:
        With the report of `check`'s example:

        >>> compiled = report.programs[0].compiled  # None without a compiler.
        >>> compiled is None or compiled.error is None
        True

    Attributes:
        error: the reason to refuse the program; None: it is accepted.
        seconds: how long it took.
        flops: the operations on floating-point numbers that it counts on the
            TensorCore; None if it doesn't say.
        bytes_accessed: the bytes that it counts as read and written; None if it
            doesn't say.
        temporary_bytes: the memory for intermediate results, by this
            compilation; a run's may differ.
        sparse_instructions: how often it has each kind of instruction for
            SparseCores; None where its text can't be read.
    """

    error: str | None
    seconds: float
    flops: float | None = None
    bytes_accessed: float | None = None
    temporary_bytes: int | None = None
    sparse_instructions: Mapping[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A Python that has jax and libtpu.

    Example:
        >>> tfrs_embed.tpu_check.Compiler("compiler/bin/python")
        Compiler(python='compiler/bin/python', library=None)

    Attributes:
        python: its path.
        library: the path of another libtpu.so than its own, or None.
    """

    python: str
    library: str | None = None

    @classmethod
    def find(cls) -> Compiler | None:
        """Finds jax and libtpu in this Python.

        Returns:
            This Python as the compiler; None if it lacks one of them.
        """
        if all(importlib.util.find_spec(name) for name in _NEEDED):
            return cls(sys.executable)
        return None

    def compile(
        self, programs: Sequence[Program], tpu_slice: Slice
    ) -> tuple[str, list[Compiled]]:
        """Compiles programs.

        Args:
            programs: the programs; each has a text in StableHLO.
            tpu_slice: the slice.

        Returns:
            The compiler's version, and its verdict on each program.

        Raises:
            CheckError: there is no such compiler, or it ended.
        """
        with tempfile.TemporaryDirectory(prefix="tpu-check-") as folder:
            paths = []
            for i, program in enumerate(programs):
                assert program.stablehlo is not None
                path = pathlib.Path(folder, f"{i}.stablehlo")
                path.write_text(program.stablehlo, encoding="utf-8")
                paths.append(str(path))
            version, lines = self._run([tpu_slice.name, *paths], len(paths))
        return version, [
            Compiled(
                line.get("error"),
                line["seconds"],
                line.get("flops"),
                line.get("bytes_accessed"),
                line.get("temporary_bytes"),
                line.get("sparse_instructions"),
            )
            for line in lines
        ]

    def _run(
        self, arguments: list[str], number: int
    ) -> tuple[str, list[dict[str, Any]]]:
        environment = {
            key: value
            for key, value in os.environ.items()
            # Those of a program that has TPUs, or of this one's packages.
            if key != "PYTHONPATH"
        }
        if self.library is not None:
            environment["TPU_LIBRARY_PATH"] = self.library
        command = [self.python, compile_programs.__file__, *arguments]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True
            )
        except OSError as error:
            raise CheckError(
                f"the compiler's Python can't be run: {error}"
            ) from error
        lines = [
            json.loads(line)
            for line in done.stdout.splitlines()
            if line.startswith("{")
        ]
        if done.returncode or len(lines) != number + 1:
            raise CheckError(
                f"the compiler in {self.python} ended with exit code "
                f"{done.returncode} after {max(len(lines) - 1, 0)} of "
                f"{number} programs:\n{done.stderr[-2000:].strip()}"
            )
        return lines[0]["compiler"], lines[1:]
