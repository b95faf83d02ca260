"""The result of a check, as data and as text."""

from __future__ import annotations

import collections
import dataclasses

from tfrs_embed.compat.text_table import format_bytes, text_table
from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check.compiling import Compiled
from tfrs_embed.tools.tpu_check.lowering import Program

#: The number of kinds of host operations that are named.
_NAMED = 4


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
        host_operations: the number of operations that run on the host in the
            traced steps of a replica, by kind.
    """

    name: str
    programs: tuple[CheckedProgram, ...]
    host_operations: collections.Counter[str]


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
    """

    slice: Slice
    functions: tuple[CheckedFunction, ...]
    tensorflow: str
    compiler: str | None
    not_compiled: str | None
    ended: tuple[str, ...]
    ended_by: str | None = None

    @property
    def programs(self) -> list[CheckedProgram]:
        """The programs of all functions."""
        return [p for f in self.functions for p in f.programs]

    @property
    def refused(self) -> list[CheckedProgram]:
        """The programs that the compiler refuses."""
        return [p for p in self.programs if p.compiled and p.compiled.error]

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
            refused = len(self.refused)
            verdict = f"{refused} of {number} REFUSED" if refused else "ok"
            lines.append(f"compiled by {self.compiler}: {verdict}")
        for function in self.functions:
            lines += ["", *_function_lines(function)]
        lines += _sparse_core_lines(self)
        for checked in self.refused:
            assert checked.compiled is not None
            error = checked.compiled.error
            lines += ["", f"REFUSED {checked.program.name}: {error}"]
        if self.ended:
            names = ", ".join(self.ended)
            lines += [
                "",
                f"The code was stopped at the second call of {names}.",
            ]
        if self.ended_by is not None:
            lines += ["", f"The code was stopped: {self.ended_by}"]
        return "\n".join(lines)


def _function_lines(function: CheckedFunction) -> list[str]:
    host = function.host_operations
    text = f"{function.name}: on the host {sum(host.values())} operations"
    if host:
        common = [f"{n} {kind}" for kind, n in host.most_common(_NAMED)]
        if len(host) > _NAMED:
            common.append(f"{len(host) - _NAMED} other kinds")
        text += f" ({', '.join(common)})"
    rows = [_program_cells(checked) for checked in function.programs]
    if any(p.compiled for p in function.programs):
        for row, checked in zip(rows, function.programs, strict=True):
            row.update(_compiled_cells(checked.compiled))
    lines = [list(row.values()) for row in rows]
    return [text, *text_table(list(rows[0]), lines, ("program", "compiled"))]


def _program_cells(checked: CheckedProgram) -> dict[str, str]:
    program = checked.program
    updates = sum(c.slots is not None for c in program.calls)
    return {
        "program": program.name,
        "lookups": str(len(program.calls) - updates),
        "updates": str(updates),
        "collectives": str(sum(program.collectives.values())),
        "arguments": format_bytes(program.argument_bytes),
        "buffers of ids": format_bytes(program.buffer_bytes),
        "unknown shapes": str(program.unknown_shapes),
    }


def _compiled_cells(compiled: Compiled | None) -> dict[str, str]:
    flops = accessed = ""
    if compiled is None:
        verdict = "not by this libtpu"
    elif compiled.error:
        verdict = "REFUSED"
    else:
        verdict = f"in {compiled.seconds:.1f} s"
        flops = accessed = "?"
        if compiled.flops is not None:
            flops = f"{compiled.flops:.3g}"
        if compiled.bytes_accessed is not None:
            accessed = format_bytes(compiled.bytes_accessed)
    return {
        "compiled": verdict,
        "TensorCore FLOPs": flops,
        "bytes accessed": accessed,
    }


def _sparse_core_lines(report: Report) -> list[str]:
    """The stacks of tables, with limits and memory."""
    calls = [c for p in report.programs for c in p.program.calls]
    # Only updates have the number of slots.
    calls.sort(key=lambda call: call.slots is not None)
    stacks = sorted({call.table: call for call in calls}.items())
    if not stacks:
        return []
    sizes = [c.rows * c.dim * 4 * (1 + (c.slots or 0)) for _, c in stacks]
    rows = [
        {
            "stack of tables": name,
            "rows of a chip": f"{call.rows:,}",
            "dim": str(call.dim),
            "slots": "" if call.slots is None else str(call.slots),
            "table and slots of a chip": format_bytes(size),
            "max_ids": str(call.max_ids),
            "max_unique_ids": str(call.max_unique_ids),
        }
        for (name, call), size in zip(stacks, sizes, strict=True)
    ]
    many = "s" if len(stacks) > 1 else ""
    total = [f"{len(stacks)} stack{many}", "", "", "", format_bytes(sum(sizes))]
    lines = [list(row.values()) for row in rows]
    left = ("stack of tables",)
    return ["", *text_table(list(rows[0]), lines, left, [*total, "", ""])]
