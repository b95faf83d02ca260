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
    head = [
        "program",
        "lookups",
        "updates",
        "collectives",
        "arguments",
        "buffers of ids",
        "shapes as they come",
    ]
    compiled = any(p.compiled for p in function.programs)
    if compiled:
        head += ["compiled", "TensorCore FLOPs", "bytes accessed"]
    lines = []
    for checked in function.programs:
        program = checked.program
        updates = sum(c.slots is not None for c in program.calls)
        line = [
            program.name,
            str(len(program.calls) - updates),
            str(updates),
            str(sum(program.collectives.values())),
            format_bytes(program.argument_bytes),
            format_bytes(program.buffer_bytes),
            str(program.unknown_shapes),
        ]
        if compiled:
            line += _compiled_cells(checked.compiled)
        lines.append(line)
    return [text, *text_table(head, lines, ("program", "compiled"))]


def _compiled_cells(compiled: Compiled | None) -> list[str]:
    if compiled is None:
        return ["not by this libtpu", "", ""]
    if compiled.error:
        return ["REFUSED", "", ""]
    flops, accessed = compiled.flops, compiled.bytes_accessed
    return [
        f"in {compiled.seconds:.1f} s",
        "?" if flops is None else f"{flops:.3g}",
        "?" if accessed is None else format_bytes(accessed),
    ]


def _sparse_core_lines(report: Report) -> list[str]:
    """The stacks of tables, with limits and memory."""
    calls = [c for p in report.programs for c in p.program.calls]
    # Only updates have the number of slots.
    calls.sort(key=lambda call: call.slots is not None)
    stacks = {call.table: call for call in calls}
    if not stacks:
        return []
    head = (
        "stack of tables",
        "rows of a chip",
        "dim",
        "slots",
        "table and slots of a chip",
        "max_ids",
        "max_unique_ids",
    )
    lines = []
    total = 0
    for name, call in sorted(stacks.items()):
        size = call.rows * call.dim * 4 * (1 + (call.slots or 0))
        total += size
        lines.append(
            (
                name,
                f"{call.rows:,}",
                str(call.dim),
                "" if call.slots is None else str(call.slots),
                format_bytes(size),
                str(call.max_ids),
                str(call.max_unique_ids),
            )
        )
    many = "s" if len(stacks) > 1 else ""
    last = (f"{len(stacks)} stack{many}", "", "", "", format_bytes(total))
    return ["", *text_table(head, lines, (head[0],), (*last, "", ""))]
