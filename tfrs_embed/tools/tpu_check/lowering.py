"""Lowers TPU programs from TensorFlow's operations to StableHLO.

TensorFlow's own TPU kernels do it, as when a TPU compiles the program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.passes import run_passes
from tfrs_embed.tools.tpu_check.rewriting import (
    with_lengths,
    with_plain_booleans,
    with_updates,
)

# The runtime's passes for TPUs, in its order: CreateConvertMlirToXlaHloPipeline
# in tensorflow/compiler/mlir/tf2xla/api/v1/compile_mlir_util.cc. Lists, stacks
# and arrays of tensors become buffers. Left out are two passes that Python has
# no name for, of random numbers' devices and of collectives that TPUs lack.
_PASSES = ",".join(
    [
        "tf-functional-control-flow-to-regions",
        "inline",
        "func.func(tf-drop-while-shape-invariant)",
        "func.func(tf-replicate-tensor-list-init-ops)",
        "func.func(canonicalize)",
        "sccp",
        "tf-guarantee-all-funcs-one-use",
        "tf-shape-inference",
        "sccp",
        "tf-tensor-list-ops-decomposition",
        "tf-stack-ops-decomposition",
        "tf-tensor-array-ops-decomposition",
        "func.func(tf-device-decompose-resource-ops)",
        "tf-promote-resources-to-args",
        "symbol-dce",
        "func.func(mhlo-sink-constants-to-control-flow)",
        "tf-shape-inference",
        "stablehlo-legalize-to-hlo",
        "func.func(tf-lower-quantized)",
        "xla-legalize-tf{device-type=XLA_TPU_JIT use-tf2xla-fallback=true "
        "legalize-chlo=true}",
        "func.func(canonicalize)",
        "tf-shape-inference",
        "xla-legalize-tf-communication",
        "inline",
        "func.func(mhlo-sink-constants-to-control-flow)",
        "canonicalize",
        "hlo-legalize-to-stablehlo",
    ]
)
_HEAD = "module attributes {tf.versions = {producer = 2000 : i32}} {\n"
# Attributes that say where an argument comes from.
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
_COLLECTIVES = (
    "CrossReplicaSum",
    "AllToAll",
    "XlaAllReduce",
    "CollectivePermute",
)
#: Replaces a size that is unknown until the program runs.
_STAND_IN = 8
_SIGNATURE = re.compile(r"func\.func (?:private )?@\w+\(")
_LISTS = ("TensorListLength", "TensorListFromTensor")
# Operations of embedding cores (v2 to v4): only libtpu can lower them.
_CORE_OP = re.compile(r'"tf\.(Xla(?:Recv|Send)TPUEmbedding\w+)"')
_DEDUPLICATION = re.compile(
    r'^ *(%\w+) = "tf\.XlaRecvTPUEmbeddingDeduplicationData\w*"'
)
_CORE_CALL = re.compile(
    r'(= )?"tf\.(\w+)"\(([^)]*)\) .* : \(([^)]*)\) -> (.*)$'
)


@dataclasses.dataclass(frozen=True)
class SparseCoreCall:
    """A lookup or an update on SparseCores in a program.

    Example:
        With the report of `check`'s example:

        >>> [call] = report.programs[0].program.calls
        >>> call.table, call.dim
        ('movie', 8)

    Attributes:
        operation: TensorFlow's operation.
        table: the stack of tables.
        rows: the stack's rows on one chip, padding included.
        dim: the width of a row.
        slots: the number of the optimizer's slots; None in a lookup.
        max_ids: the limit of ids.
        max_unique_ids: the limit of unique ids.
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
        name: the function's name, and the program's number in the function.
        calls: the lookups and updates on SparseCores.
        argument_bytes: bytes of the arguments on one chip: tables, other
            variables, its part of the batch.
        buffer_bytes: bytes of the SparseCores' buffers of ids, which are
            arguments too.
        unknown_shapes: the number of arguments whose shapes are unknown until
            the program runs: the runtime compiles the program for each shape.
            The check used 8 for each unknown size.
        collectives: the number of operations between replicas, by kind.
        operations: the number of TensorFlow's operations, by kind.
        tensorflow: the program's text in TensorFlow's operations.
        stablehlo: the program's text in StableHLO. None if it uses embedding
            cores, which only libtpu can lower; the rest was lowered.
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


def lower(
    name: str, programs: Sequence[str], sparse_cores: int
) -> list[Program]:
    """Lowers a function's programs to StableHLO; raises CheckErrors.

    `sparse_cores` is the number of a chip.
    """
    several = len(programs) > 1
    return [
        _lower(f"{name}/{i}" if several else name, text, sparse_cores)
        for i, text in enumerate(programs)
    ]


def _lower(name: str, text: str, sparse_cores: int) -> Program:
    operations = collections.Counter(_OP.findall(text))
    calls = tuple(_calls(text))
    stablehlo = _to_stablehlo(name, _without_cores(text), sparse_cores)
    _check_calls(name, calls, stablehlo)
    arguments = _arguments(text)
    return Program(
        name,
        calls,
        sum(a.bytes for a in arguments),
        sum(a.bytes for a in arguments if a.bounded),
        sum(a.unknown for a in arguments),
        collections.Counter(
            {kind: n for kind, n in operations.items() if kind in _COLLECTIVES}
        ),
        operations,
        text,
        None if _CORE_OP.search(text) else stablehlo,
    )


def _to_stablehlo(name: str, text: str, sparse_cores: int) -> str:
    head, body = text.split("\n", 1)
    head = _SIGNATURE.sub("func.func @main(", _ATTRIBUTES.sub("", head), 1)
    module = _BOUNDS.sub(r"#stablehlo.bounds<\1>", f"{head}\n{body}")
    module = with_updates(with_lengths(module))
    pipeline = _PASSES
    arguments = _arguments(text)
    if any(a.unknown for a in arguments):
        shapes = ":".join(",".join(map(str, a.shape)) for a in arguments)
        pipeline = f"tf-shape-inference{{input-arg-shapes={shapes}}},{_PASSES}"
    try:
        lowered = run_passes(
            f"{_HEAD}{module}\n}}\n",
            pipeline,
            f"program '{name}'",
            "the lowering by TensorFlow's TPU kernels",
            sparse_cores,
        )
    except CheckError as error:
        if not any(kind in _LISTS for kind in error.operations):
            raise
        raise CheckError(
            f"{error} The check knows no loop's lists of other loops' lists; "
            "a TPU's runtime does. So whether a TPU takes it is unknown.",
            error.operations,
        ) from None
    left = sorted(set(_OP.findall(lowered)))
    if left:
        raise CheckError(
            f"program '{name}': no TPU has a kernel for {', '.join(left)} with "
            "these inputs.",
            left,
        )
    return with_plain_booleans(lowered)


def _without_cores(text: str) -> str:
    """Replaces the operations of embedding cores by unknown calls.

    Then the rest of the program can be lowered. Deduplication data are left
    out, as no other operation accepts their type.
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
    """The rows, the width and, in an update, the number of slots of a call."""
    operands, results = line.rpartition(" : (")[2].split(" -> ", 1)
    # An update returns the table and its slots. The only operand of a lookup
    # with two dimensions is the table.
    updates = "Grad" in line
    tables = _TABLE.findall(results if updates else operands)
    assert tables, line
    rows, dim = map(int, tables[0])
    return rows, dim, len(tables) - 1 if updates else None


class _Argument(NamedTuple):
    """An argument of a program.

    Attributes:
        shape: the shape; a bound replaces the size it belongs to.
        itemsize: bytes of an element.
        bounded: whether a size has a bound: the argument is a buffer of ids.
        unknown: whether a size is unknown until the program runs.
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
    """Checks that no SparseCore call was lost: TensorFlow raises no error."""
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
