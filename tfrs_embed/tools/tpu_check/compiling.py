"""Compiles programs with libtpu, in another process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check import compile_programs
from tfrs_embed.tools.tpu_check.errors import CheckError, ending
from tfrs_embed.tools.tpu_check.lowering import Program

_NEEDED = ("jax", "libtpu")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's result for a program.

    Example:
        With the report of `check`'s example:

        >>> compiled = report.programs[0].compiled  # None without a compiler.
        >>> compiled is None or compiled.error is None
        True

    Attributes:
        error: why the compiler refuses the program; None: it accepts it, or
            could not be asked.
        seconds: how long the compilation took.
        not_checked: why the compiler gave no answer: jax can't read the
            program, or the compiler crashed. None: it gave one.
    """

    error: str | None
    seconds: float
    not_checked: str | None = None


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A Python that has jax and libtpu.

    Example:
        >>> tfrs_embed.tpu_check.Compiler("compiler/bin/python")
        Compiler(python='compiler/bin/python')

    Attributes:
        python: the path of the Python.
    """

    python: str

    @classmethod
    def find(cls) -> Compiler | None:
        """Finds jax and libtpu in this Python.

        Returns:
            This Python as the compiler; None if jax or libtpu is missing.
        """
        if all(importlib.util.find_spec(name) for name in _NEEDED):
            return cls(sys.executable)
        return None

    def compile(
        self, programs: Sequence[Program], tpu_slice: Slice
    ) -> tuple[str, list[Compiled]]:
        """Compiles programs.

        Args:
            programs: the programs; each must have a text in StableHLO.
            tpu_slice: the slice to compile for.

        Returns:
            The compiler's version, and the result for each program.

        Raises:
            CheckError: the Python can't be run, or has no jax and libtpu.
        """
        with tempfile.TemporaryDirectory(prefix="tpu-check-") as folder:
            paths = []
            for i, program in enumerate(programs):
                assert program.stablehlo is not None
                path = pathlib.Path(folder, f"{i}.stablehlo")
                path.write_text(program.stablehlo, encoding="utf-8")
                paths.append(str(path))
            results: list[Compiled] = []
            while len(results) < len(paths):
                version, found, crash = self._compile(
                    tpu_slice.name, paths[len(results) :]
                )
                results += found
                # The program that the compiler crashed on; then the others.
                if len(results) < len(paths):
                    text = f"the compiler crashed ({crash})"
                    results.append(Compiled(None, 0.0, text))
        return version, results

    def _compile(
        self, topology: str, paths: Sequence[str]
    ) -> tuple[str, list[Compiled], str]:
        """The version, the results before a crash, and how it has ended."""
        # -E: the other Python has packages of its own.
        command = [self.python, "-E", compile_programs.__file__]
        try:
            done = subprocess.run(
                [*command, topology, *paths], capture_output=True, text=True
            )
        except OSError as error:
            raise CheckError(
                f"the compiler's Python can't be run: {error}"
            ) from error
        end = ending(done.returncode, done.stderr)
        lines = [
            json.loads(line)
            for line in done.stdout.splitlines()
            # A compiler that crashes may leave a line without its end.
            if line.startswith("{") and line.endswith("}")
        ]
        if not lines:
            raise CheckError(
                f"the compiler in {self.python} can't be started ({end})"
            )
        return lines[0]["compiler"], [Compiled(**d) for d in lines[1:]], end
