"""Where a traced function's operations would run on a GPU, without one.

TensorFlow's stock wheel for Linux registers its kernels for GPUs whether there
is a GPU or not. An operation that has none for its dtypes runs on the host, and
kernels say which of their arguments are in the host's memory. Each tensor that
is made in one memory and used in the other is a copy, in every step.

Branches that raise an error are left out: a conditional's with an Assert.
"""

import dataclasses
import functools
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

#: Inputs and outputs of functions, and what only passes values on.
STRUCTURAL = {"Identity", "IdentityN", "NoOp", "Placeholder", "_Arg", "_Retval"}
CONDITIONALS = {"If", "StatelessIf", "Case", "StatelessCase"}
#: Dtypes that are in no GPU's memory.
OF_HOST = {tf.string, tf.resource, tf.variant}


class Where(NamedTuple):
    """A value: what makes it, whether in a GPU's memory, and its dtype."""

    maker: str
    on_gpu: bool | None  # None: a constant, which is where it is used.
    dtype: tf.DType


@dataclasses.dataclass
class Placement:
    """What a step does where.

    Attributes:
        on_gpu: the number of operations that have kernels for GPUs.
        on_host: the names of the others, by kind.
        down: values copied from the GPU to the host, by what made them.
        up: the same, from the host to the GPU.
        collectives: the dtype of each that replicas take part in.
    """

    on_gpu: int = 0
    on_host: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    down: dict[str, tf.DType] = dataclasses.field(default_factory=dict)
    up: dict[str, tf.DType] = dataclasses.field(default_factory=dict)
    collectives: dict[str, tf.DType] = dataclasses.field(default_factory=dict)


def placement(function, host, hosted=()):
    """Returns the placement of a concrete function.

    Args:
        function: as it is traced, before TensorFlow optimizes it.
        host: the CPU where what is placed there is to be, "CPU:0"; other CPUs
            stand for GPUs. None: all do.
        hosted: variables in the host's memory.
    """
    graph = function.graph
    handles = {id(variable.handle) for variable in hosted}
    inside = {i.op.name for e, i in graph.captures if id(e) in handles}
    walk = _Walk(graph.as_graph_def(), host, inside)
    walk.nodes(walk.graph.node, "", {})
    return walk.found


@functools.cache
def _kernels(op):
    found = kernels.get_registered_kernels_for_op(op).kernel
    return [k for k in found if k.device_type in ("GPU", "DEFAULT")]


def kernel(node):
    """The kernel for GPUs that takes a node's dtypes, or None."""
    for each in _kernels(node.op):
        for constraint in each.constraint:
            value = node.attr[constraint.name]
            allowed = constraint.allowed_values.list.type
            types = [value.type] if value.type else value.list.type
            if not set(types) <= set(allowed):
                break
        else:
            return each
    return None


def _arguments(definitions, node):
    """Pairs of an argument's name and dtype, one for each tensor."""
    found = []
    for each in definitions:
        if each.type_list_attr:
            types = node.attr[each.type_list_attr].list.type
        else:
            one = each.type or node.attr[each.type_attr].type
            number = node.attr[each.number_attr].i if each.number_attr else 1
            types = [one] * number
        found += [(each.name, tf.DType(t)) for t in types]
    return found


def _called(node):
    for _, value in sorted(node.attr.items()):
        if value.HasField("func"):
            yield value.func.name
        yield from (f.name for f in value.list.func)


class _Walk:
    def __init__(self, graph, host, hosted):
        self.graph = graph
        self.host = host
        self.hosted = hosted
        self.functions = {f.signature.name: f for f in graph.library.function}
        self.found = Placement()

    @functools.cache  # noqa: B019
    def raises(self, name):
        """Whether a function has an Assert."""
        nodes = self.functions[name].node_def
        return any(
            n.op == "Assert" or any(map(self.raises, self.calls(n)))
            for n in nodes
        )

    def calls(self, node):
        return [f for f in _called(node) if f in self.functions]

    def nodes(self, nodes, scope, values):
        """Walks over nodes in a function, given its arguments by name."""
        by_name = {node.name: node for node in nodes}
        done = set()

        def visit(name):
            stack = [name]
            while stack:
                node = by_name.get(stack[-1])
                if node is None or node.name in done:
                    stack.pop()
                    continue
                inputs = [i.split(":")[0] for i in node.input if i[0] != "^"]
                left = [i for i in inputs if i in by_name and i not in done]
                if left and node.op not in ("Merge", "NextIteration"):
                    stack += left
                    continue
                stack.pop()
                done.add(node.name)
                self.node(node, scope, values)

        for node in nodes:
            visit(node.name)

    def inputs(self, node, values):
        for name in node.input:
            if name[0] != "^":
                yield values.get(name) or values.get(name.split(":")[0])

    def node(self, node, scope, values):
        given = list(self.inputs(node, values))
        functions = self.calls(node)
        if functions:
            outputs = self.call(node, functions, given, f"{scope}{node.name}/")
        else:
            outputs = self.operation(node, given, scope)
        for i, (_, value) in enumerate(outputs):
            values[f"{node.name}:{i}"] = value
            if i == 0:
                values[node.name] = value
        # In functions, outputs are numbered by argument.
        numbers = {}
        for name, value in outputs:
            number = numbers.setdefault(name, 0)
            values[f"{node.name}:{name}:{number}"] = value
            numbers[name] += 1

    def call(self, node, functions, given, scope):
        """Walks over what a node calls; returns its outputs."""
        if node.op in CONDITIONALS:
            self.use(given[0], on_gpu=False)
            given = given[1:]
            functions = [f for f in functions if not self.raises(f)]
        outputs = []
        for name in functions:
            function = self.functions[name]
            arguments = {
                each.name: value
                for each, value in zip(
                    function.signature.input_arg, given, strict=False
                )
            }
            self.nodes(function.node_def, scope, arguments)
            outputs = [
                ("output", arguments.get(function.ret[each.name]))
                for each in function.signature.output_arg
            ]
        return outputs

    def operation(self, node, given, scope):
        definition = op_def_registry.get(node.op)
        outputs = _arguments(definition.output_arg, node)
        name = scope + node.name
        if node.op == "Const":
            return [(n, Where(name, None, t)) for n, t in outputs]
        if node.op in STRUCTURAL:
            if given:
                return [
                    (n, g) for (n, _), g in zip(outputs, given, strict=False)
                ]
            # Arguments of the step: integers of 32 bits are on the host.
            return [
                (n, Where(name, t not in OF_HOST | {tf.int32}, t))
                for n, t in outputs
            ]
        if given and all(value and value.on_gpu is None for value in given):
            # TensorFlow computes it once.
            return [(n, Where(name, None, t)) for n, t in outputs]
        inputs = _arguments(definition.input_arg, node)
        if node.op.startswith("Collective"):
            self.found.collectives[f"{node.op} {name}"] = inputs[0][1]
        here = self.host is not None and self.host in node.device
        # Reading a variable is an operation of no device.
        here |= any(value and value.maker in self.hosted for value in given)
        found = None if here else kernel(node)
        if found is None:
            self.found.on_host.setdefault(node.op, []).append(name)
            hosted = None
        else:
            self.found.on_gpu += 1
            hosted = set(found.host_memory_arg)
        for (argument, dtype), value in zip(inputs, given, strict=False):
            if dtype not in OF_HOST:
                self.use(value, hosted is not None and argument not in hosted)
        return [
            (
                argument,
                Where(
                    f"{name}:{i}",
                    hosted is not None
                    and argument not in hosted
                    and dtype not in OF_HOST,
                    dtype,
                ),
            )
            for i, (argument, dtype) in enumerate(outputs)
        ]

    def use(self, value, on_gpu):
        if value is None or value.on_gpu in (None, on_gpu):
            return
        copies = self.found.up if on_gpu else self.found.down
        copies[value.maker] = value.dtype
