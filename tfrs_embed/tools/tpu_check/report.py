"""The result of a check, as data and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfrs_embed.compat.text_table import value_table
from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check.compiling import Compiled
from tfrs_embed.tools.tpu_check.lowering import Program, SparseCoreCall


@dataclasses.dataclass(frozen=True)
class CheckedProgram:
    """A program of the TPUs, and the compiler's result.

    Example:
        With the report of `check`'s example:

        >>> [checked] = report.programs
        >>> checked.program.name
        'lookup'

    Attributes:
        program: the program.
        compiled: the result of libtpu's compiler; None: it was not compiled.
    """

    program: Program
    compiled: Compiled | None = None


@dataclasses.dataclass(frozen=True)
class CheckedFunction:
    """A `tf.function` that runs on TPUs.

    Example:
        With the report of `check`'s example:

        >>> [function] = report.functions
        >>> function.name, len(function.programs)
        ('lookup', 1)

    Attributes:
        name: the function's name.
        programs: the function's programs. A pipelined loop has five: the first
            step's lookup and dense part, the second step's lookup, the loop's
            body, and two for the updates that are left at the loop's end.
    """

    name: str
    programs: tuple[CheckedProgram, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check; prints as a readable report.

    Example:
        With the report of `check`'s example:

        >>> report.slice.chips, report.refused
        (4, [])

    Attributes:
        slice: the slice.
        functions: the functions that run on the slice.
        tensorflow: the version of TensorFlow that traced and lowered them.
        compiler: the compiler and its version; None: nothing was compiled.
        not_compiled: why nothing was compiled, or None.
        ended: names of functions whose second call stopped a loop of the code.
        ended_by: another error that stopped the code, or None.
        warnings: sentences about what TPUs accept and training loses: ids that
            may be dropped, a step that updates no table.
    """

    slice: Slice
    functions: tuple[CheckedFunction, ...]
    tensorflow: str
    compiler: str | None
    not_compiled: str | None
    ended: tuple[str, ...]
    ended_by: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def programs(self) -> list[CheckedProgram]:
        """The programs of all functions."""
        return [p for f in self.functions for p in f.programs]

    @property
    def refused(self) -> list[CheckedProgram]:
        """The programs that the compiler refuses."""
        return [p for p in self.programs if p.compiled and p.compiled.error]

    @property
    def not_checked(self) -> list[CheckedProgram]:
        """The programs that did not reach the compiler, or crashed it."""
        return [
            p for p in self.programs if p.compiled and p.compiled.not_checked
        ]

    def __str__(self) -> str:
        number = len(self.programs)
        many = "s" if number != 1 else ""
        lines = [
            f"{self.slice}: {number} program{many}",
            f"traced and lowered by TensorFlow {self.tensorflow}: ok",
        ]
        if self.compiler is None:
            lines.append(f"not compiled: {self.not_compiled}")
        else:
            verdicts = [
                f"{len(found)} of {number} {verdict}"
                for found, verdict in (
                    (self.refused, "REFUSED"),
                    (self.not_checked, "not checked"),
                )
                if found
            ]
            verdict = ", ".join(verdicts) or "ok"
            lines.append(f"compiled by {self.compiler}: {verdict}")
        programs = [_program_row(checked) for checked in self.programs]
        lines += ["", *value_table(programs)]
        calls = [c for p in self.programs for c in p.program.calls]
        # Only updates have the number of slots.
        calls.sort(key=lambda call: call.slots is not None)
        stacks = {call.table: _stack_row(call) for call in calls}
        if stacks:
            lines += ["", *value_table([*stacks.values()])]
        if self.warnings:
            lines += ["", *(f"warning: {each}" for each in self.warnings)]
        for checked in self.refused:
            assert checked.compiled is not None
            error = checked.compiled.error
            lines += ["", f"REFUSED {checked.program.name}: {error}"]
        for checked in self.not_checked:
            assert checked.compiled is not None
            error = checked.compiled.not_checked
            lines += ["", f"NOT CHECKED {checked.program.name}: {error}"]
        if self.ended:
            text = "The code was stopped at the second call of "
            lines += ["", f"{text}{', '.join(self.ended)}."]
        if self.ended_by is not None:
            lines += ["", f"The code was stopped: {self.ended_by}"]
        return "\n".join(lines)


def _program_row(checked: CheckedProgram) -> dict[str, Any]:
    program = checked.program
    updates = sum(c.slots is not None for c in program.calls)
    return {
        "program": program.name,
        "lookups": len(program.calls) - updates,
        "updates": updates,
        "collectives": sum(program.collectives.values()),
        "argument_bytes": program.argument_bytes,
        "buffer_bytes": program.buffer_bytes,
        "unknown_shapes": program.unknown_shapes,
        "compiled": _verdict(checked.compiled),
    }


def _verdict(compiled: Compiled | None) -> str:
    if compiled is None:
        return "no"
    if compiled.not_checked:
        return "not checked"
    return "REFUSED" if compiled.error else f"in {compiled.seconds:.1f} s"


def _stack_row(call: SparseCoreCall) -> dict[str, Any]:
    copies = 1 + (call.slots or 0)
    return {
        "stack of tables": call.table,
        "rows": call.rows,
        "dim": call.dim,
        "slots": call.slots,
        "table and slot bytes": call.rows * call.dim * 4 * copies,
        "max_ids": call.max_ids,
        "max_unique_ids": call.max_unique_ids,
    }
