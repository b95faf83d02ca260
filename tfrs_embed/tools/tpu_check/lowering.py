"""From a TPU program in TensorFlow's operations to one in StableHLO.

TensorFlow's own kernels for TPUs do it, as when a TPU compiles the program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Collection
from typing import NamedTuple

from tfrs_embed.tools.tpu_check import tpu_library
from tfrs_embed.tools.tpu_check.bridge import Bridged, run_passes
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.slices import Slice

_INFERENCE = "tf-shape-inference"
_PASSES = (
    ",canonicalize,tf-shape-inference,canonicalize,"
    "xla-legalize-tf{device-type=XLA_TPU_JIT use-tf2xla-fallback=true "
    "legalize-chlo=true},"
    "xla-legalize-tf-communication,canonicalize,hlo-legalize-to-stablehlo"
)
_HEAD = "module attributes {tf.versions = {producer = 2000 : i32}} {\n"
# Attributes of arguments, which say where they come from.
_ATTRIBUTES = re.compile(r' \{(?:mhlo\.|tf\.)(?:[^{}"]|"[^"]*")*\}(?=[,)])')
_BOUNDS = re.compile(r"#mhlo\.type_extensions<bounds = \[([^\]]+)\]>")
_OP = re.compile(r'"tf\.(\w+)"')
_SPARSE_OP = re.compile(r'"tf\.(XlaSparseDense\w+)"')
_CALL = re.compile(r"custom_call @(SparseDense\w+)\((.*)$", re.MULTILINE)
_LIMIT = re.compile(r'_xla_(max_\w+_per_partition) = "(\d+)"')
_TABLE = re.compile(r"tensor<(\d+)x(\d+)xf32>")
_ARGUMENT = re.compile(
    r"%arg\d+: tensor<((?:[\d?]+x)*[a-z]+\d+)"
    r"(?:, #mhlo\.type_extensions<bounds = \[([^\]]*)\]>)?>"
)
#: Stands for a size that isn't known.
_STAND_IN = 8
_SIGNATURE = re.compile(r"func\.func (?:private )?@\w+\(")
# Operations of older TPUs' embedding cores: only libtpu can lower them.
_CORE_OP = re.compile(r'"tf\.(Xla(?:Recv|Send)TPUEmbedding\w+)"')
_DEDUPLICATION = re.compile(
    r'^ *(%\w+) = "tf\.XlaRecvTPUEmbeddingDeduplicationData\w*"'
)
_CORE_CALL = re.compile(
    r'(= )?"tf\.(\w+)"\(([^)]*)\) .* : \(([^)]*)\) -> (.*)$'
)


@dataclasses.dataclass(frozen=True)
class SparseCoreCall:
    """A call of the SparseCores in a program.

    Example:
        With the report of `check`'s example:

        >>> [call] = report.programs[0].program.calls
        >>> call.table, call.dim
        ('movie', 8)

    Attributes:
        operation: TensorFlow's operation.
        table: the stack of tables that it looks up or updates.
        rows: its rows on one chip, with padding.
        dim: its width.
        slots: the slots of its optimizer; None in a lookup.
        max_ids: the limit of ids.
        max_unique_ids: the limit of different ids.
    """

    operation: str
    table: str
    rows: int
    dim: int
    slots: int | None
    max_ids: int
    max_unique_ids: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the TPUs.

    Example:
        With the report of `check`'s example:

        >>> lookup = report.programs[0].program
        >>> lookup.name, len(lookup.calls)
        ('lookup', 1)

    Attributes:
        name: the function that it is part of, and its number there.
        calls: its calls of the SparseCores.
        argument_bytes: size of its arguments on one chip: tables, other
            variables, its part of the batch.
        buffer_bytes: size of the SparseCores' buffers of ids among that.
        unknown_shapes: the number of arguments whose shapes are known as the
            program runs only: it is compiled anew for each that comes. It was
            checked with 8 for each size that isn't known.
        collectives: how often it has each kind of operation between replicas.
        operations: how many operations of TensorFlow's it has of each kind.
        tensorflow: its text in TensorFlow's operations.
        stablehlo: its text in StableHLO; None where embedding cores take part,
            which only libtpu can lower: the rest was lowered without them.
    """

    name: str
    calls: tuple[SparseCoreCall, ...]
    argument_bytes: int
    buffer_bytes: int
    unknown_shapes: int
    collectives: collections.Counter[str]
    operations: collections.Counter[str]
    tensorflow: str
    stablehlo: str | None


def lower(bridged: Bridged, tpu_slice: Slice) -> list[Program]:
    """Lowers a function's programs.

    Args:
        bridged: the function after TensorFlow's bridge.
        tpu_slice: the slice.

    Returns:
        Its programs.

    Raises:
        CheckError: an operation can't be on a TPU, or is not as it must be
            there.
    """
    tpu_library.set_sparse_cores(tpu_slice.sparse_cores)
    programs = []
    for number, text in enumerate(bridged.programs):
        name = bridged.name
        if len(bridged.programs) > 1:
            name = f"{name}/{number}"
        programs.append(_lower(name, text))
    return programs


def _lower(name: str, text: str) -> Program:
    operations = collections.Counter(_OP.findall(text))
    calls = tuple(_calls(text))
    stablehlo: str | None = _to_stablehlo(name, _without_cores(text))
    assert stablehlo is not None
    _check_calls(name, calls, stablehlo)
    if _CORE_OP.search(text):
        stablehlo = None
    collectives = collections.Counter(
        {
            kind: operations[kind]
            for kind in (
                "CrossReplicaSum",
                "AllToAll",
                "XlaAllReduce",
                "CollectivePermute",
            )
            if operations[kind]
        }
    )
    arguments = _arguments(text)
    return Program(
        name,
        calls,
        sum(a.bytes for a in arguments),
        sum(a.bytes for a in arguments if a.bounded),
        sum(a.unknown for a in arguments),
        collectives,
        operations,
        text,
        stablehlo,
    )


def _to_stablehlo(name: str, text: str) -> str:
    head, body = text.split("\n", 1)
    head = _SIGNATURE.sub("func.func @main(", _ATTRIBUTES.sub("", head), 1)
    module = _BOUNDS.sub(r"#stablehlo.bounds<\1>", f"{head}\n{body}")
    inference = _INFERENCE
    arguments = _arguments(text)
    if any(argument.unknown for argument in arguments):
        shapes = ":".join(
            ",".join(map(str, argument.shape)) for argument in arguments
        )
        inference += f"{{input-arg-shapes={shapes}}}"
    lowered = run_passes(
        f"{_HEAD}{module}\n}}\n", inference + _PASSES, f"program '{name}'"
    )
    left = sorted(set(_OP.findall(lowered)))
    if left:
        raise CheckError(
            f"program '{name}': no TPU has a kernel for {', '.join(left)} as "
            "it stands there.",
            left,
        )
    return lowered


def _without_cores(text: str) -> str:
    """Replaces the operations of embedding cores by unknown calls.

    So the rest of the program can be lowered. The data that tell the cores
    which ids are equal have a type that no other operation takes: they are
    left out.
    """
    lines = []
    left_out = set()
    for line in text.splitlines():
        match = _DEDUPLICATION.match(line)
        if match is not None:
            left_out.add(match[1])
            continue
        if _CORE_OP.search(line):
            line = _CORE_CALL.sub(
                functools.partial(_unknown_call, left_out), line
            )
        lines.append(line)
    return "\n".join(lines)


def _unknown_call(left_out: Collection[str], call: re.Match[str]) -> str:
    equals, name, operands, types, results = call.groups(default="")
    kept = [
        (operand, kind)
        for operand, kind in zip(
            operands.split(", "), types.split(", "), strict=True
        )
        if operand and operand not in left_out
    ]
    names = ", ".join(operand for operand, _ in kept)
    kinds = ", ".join(kind for _, kind in kept)
    return (
        f'{equals}"stablehlo.custom_call"({names}) <{{call_target_name = '
        f'"{name}", has_side_effect = true}}> : ({kinds}) -> {results}'
    )


def _calls(text: str) -> list[SparseCoreCall]:
    found = []
    for line in text.splitlines():
        match = _SPARSE_OP.search(line)
        if match is None:
            continue
        rows, dim, slots = _table_shape(line)
        found.append(
            SparseCoreCall(
                match[1],
                _attribute(line, "table_name"),
                rows,
                dim,
                slots,
                int(_attribute(line, "max_ids_per_sparse_core")),
                int(_attribute(line, "max_unique_ids_per_sparse_core")),
            )
        )
    return found


def _attribute(line: str, name: str) -> str:
    match = re.search(rf'\b{name} = (?:"([^"]*)"|([^ ,}}]+))', line)
    assert match is not None, f"{name} in {line}"
    return match[1] if match[1] is not None else match[2]


def _table_shape(line: str) -> tuple[int, int, int | None]:
    """A call's rows and width, and its number of slots if it is an update."""
    operands, results = line.rpartition(" : (")[2].split(" -> ", 1)
    # An update's results are the table and its slots. A lookup's only operand
    # of two dimensions is the table.
    updates = "Grad" in line
    tables = _TABLE.findall(results if updates else operands)
    assert tables, line
    rows, dim = map(int, tables[0])
    return rows, dim, len(tables) - 1 if updates else None


class _Argument(NamedTuple):
    """An argument of a program.

    Attributes:
        shape: its shape; of a size that has a bound the bound.
        itemsize: the bytes of an element.
        bounded: whether a size has a bound: it is a buffer of ids.
        unknown: whether a size is known as it runs only. The runtime then
            compiles the program for each that comes.
    """

    shape: tuple[int, ...]
    itemsize: int
    bounded: bool
    unknown: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def _arguments(text: str) -> list[_Argument]:
    found = []
    for shape, bounds in _ARGUMENT.findall(text.split("\n", 1)[0]):
        *dims, dtype = shape.split("x")
        limits = iter(bounds.split(",") if bounds else ())
        sizes = [
            int(next(limits, _STAND_IN)) if n == "?" else int(n) for n in dims
        ]
        bits = int(re.sub(r"\D", "", dtype))
        found.append(
            _Argument(
                tuple(sizes),
                max(bits // 8, 1),
                bool(bounds),
                "?" in dims and not bounds,
            )
        )
    return found


def _check_calls(
    name: str, calls: tuple[SparseCoreCall, ...], stablehlo: str
) -> None:
    """Checks that no operation was lost; TensorFlow would raise no error."""
    lowered = _CALL.findall(stablehlo)
    limits = sorted(
        tuple(int(value) for _, value in sorted(_LIMIT.findall(rest)))
        for _, rest in lowered
    )
    expected = sorted((c.max_ids, c.max_unique_ids) for c in calls)
    if limits != expected:
        raise CheckError(
            f"program '{name}' has {len(calls)} calls of the SparseCores with "
            f"limits {expected}, but {len(lowered)} with {limits} when lowered."
        )
