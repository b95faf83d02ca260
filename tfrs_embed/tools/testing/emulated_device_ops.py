"""SparseCores' device ops, emulated for all chips of a slice together.

Each replica calls an op as a chip does. A merge call gets the buffers and the
tables' shards of all replicas, and returns each replica's result.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import ops, tpu_embedding_v3
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    UpdateRule,
)
from tfrs_embed.sparsecore import device, pipelining
from tfrs_embed.sparsecore.topology import Topology
from tfrs_embed.tools.testing.deferred_update import DeferredUpdate, Update
from tfrs_embed.tools.testing.emulated_merge import merge

_Tables = dict[str, tf.Tensor]
_BUFFERS = (
    "row_pointers",
    "sorted_sample_ids",
    "sorted_token_ids",
    "sorted_gains",
)
# The rules' names of the ops' arguments for slots, in the order of results.
_SLOTS = {
    "accumulator": "accumulators",
    "momenta": "momenta",
    "velocity": "velocities",
    "linear": "linears",
}
# The ops' names of the rules' fields that have others.
_SETTINGS = {
    "momentum": "beta1",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "sum_inside_sqrt": "use_sum_inside_sqrt",
}


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one chip's call of an op.

    Attributes:
        buffers: the four buffers of ids.
        tables: the chip's shards of the stack's parameters and slots.
        gradients: in an update, the gradients of the chip's activations.
    """

    buffers: Sequence[tf.Tensor]
    tables: _Tables
    gradients: Any = None


def _lookup(
    embedding_table: Any,
    input_size: int,
    quantization_config_low: float,
    quantization_config_high: float,
    quantization_config_num_buckets: int,
    **op: Any,
) -> tf.Tensor:
    def merged(strategy: Any, calls: Sequence[_Call]) -> list[tf.Tensor]:
        table = tf.concat([call.tables[PARAMETERS] for call in calls], 0)
        entries = _decode(strategy.topology, calls, input_size)
        rows = tf.gather(table, entries.row)
        if quantization_config_num_buckets:
            rows = device.quantize(
                rows,
                quantization_config_low,
                quantization_config_high,
                quantization_config_num_buckets,
            )
        samples = len(calls) * input_size
        found = device.activations(entries, rows, samples)
        return tf.split(found, len(calls))

    table = tf.convert_to_tensor(embedding_table)
    return merge(merged, _Call(_buffers(op), {PARAMETERS: table}))


def _update(rule: type[UpdateRule], embedding: Any, **op: Any) -> Any:
    slots = {key: name for key, name in _SLOTS.items() if key in op}
    names = [PARAMETERS, *slots.values()]
    tables = [op["embedding_table"], *(op[key] for key in slots)]
    call = _Call(
        _buffers(op),
        dict(zip(names, tables, strict=True)),
        op["activation_gradients"],
    )
    settings = {
        field.name: op[_SETTINGS.get(field.name, field.name)]
        for field in dataclasses.fields(rule)
        if not field.name.startswith("initial_")
    }
    made = rule(**settings)
    late = _pipelined() and pipelining.in_loop()

    def merged(strategy: Any, calls: Sequence[_Call]) -> list[Any]:
        samples = call.gradients.shape[0]
        change = Update(
            *device.row_gradients(
                _decode(strategy.topology, calls, samples),
                tf.concat([each.gradients for each in calls], 0),
            ),
            op["learning_rate"],
        )
        if late:
            stack = op["table_name"]
            deferred = _deferred(embedding, stack, change)
            pipelining.around_loop(lambda: _drain(embedding, stack, made))
            before = deferred.take()
            deferred.put(change)
            change = before
        after = _apply(made, change, [each.tables for each in calls])
        if not slots:
            return [each[PARAMETERS] for each in after]
        return [tuple(each[name] for name in names) for each in after]

    return merge(merged, call)


def _pipelined() -> bool:
    """Whether TensorFlow has marked the op for pipelining with other steps."""
    context = ops.get_default_graph()._get_control_flow_context()
    while context is not None:
        if isinstance(context, tpu_embedding_v3.EmbeddingPipeliningContext):
            mode = tpu_embedding_v3._PIPELINE_MODE_BACKWARD
            return context._enable and context._mode.s == mode.encode()
        context = context.outer_context
    return False


def _buffers(op: Mapping[str, Any]) -> list[tf.Tensor]:
    return [op[name] for name in _BUFFERS]


def _decode(
    topology: Topology, calls: Sequence[_Call], samples: int
) -> device.Entries:
    """The entries of all chips; each chip has `samples` samples."""
    rows = calls[0].tables[PARAMETERS].shape[0] // topology.sparse_cores
    of_chips = []
    for chip, call in enumerate(calls):
        entries = device.decode(call.buffers, topology, samples, rows)
        first = chip * samples
        of_chips.append(entries._replace(sample=entries.sample + first))
    return device.Entries(
        *(tf.concat(each, 0) for each in zip(*of_chips, strict=True))
    )


def _apply(
    rule: UpdateRule, change: Update, shards: Sequence[_Tables]
) -> list[_Tables]:
    """Returns each chip's tables after an update."""
    tables = {
        name: tf.concat([shard[name] for shard in shards], 0)
        for name in shards[0]
    }
    before = {k: tf.gather(v, change.rows) for k, v in tables.items()}
    parameters, slots = rule.update(
        change.rate, change.gradients, before.pop(PARAMETERS), before
    )
    after = {PARAMETERS: parameters, **slots}
    index = change.rows[:, tf.newaxis]
    updated = {
        name: tf.tensor_scatter_nd_update(table, index, after[name])
        for name, table in tables.items()
    }
    parts = {k: tf.split(v, len(shards)) for k, v in updated.items()}
    return [
        {k: v[chip] for k, v in parts.items()} for chip in range(len(shards))
    ]


#: Each embedding's deferred updates, by stack.
_all_deferred: weakref.WeakKeyDictionary[Any, dict[str, DeferredUpdate]] = (
    weakref.WeakKeyDictionary()
)


def _deferred(embedding: Any, stack: str, change: Update) -> DeferredUpdate:
    stacks = _all_deferred.setdefault(embedding, {})
    if stack not in stacks:
        with tf.init_scope():
            stacks[stack] = DeferredUpdate(change.gradients.shape[1])
    return stacks[stack]


def _drain(embedding: Any, stack: str, rule: UpdateRule) -> None:
    """Applies a stack's deferred update."""
    variables = embedding.variables[stack]
    shards = [
        dict(zip(variables, of_chip, strict=True))
        for of_chip in zip(*(v.values for v in variables.values()), strict=True)
    ]
    change = _all_deferred[embedding][stack].take()
    before = [{k: v.read_value() for k, v in each.items()} for each in shards]
    for shard, after in zip(shards, _apply(rule, change, before), strict=True):
        for name, table in after.items():
            shard[name].assign(table)


#: Replacements for functions of `gen_xla_ops`.
COPIES: dict[str, Callable[..., Any]] = {
    "tpu_copy_with_dynamic_shape": lambda tensors, *_: tensors,
    "tpu_annotate_tensors_with_dynamic_shape": lambda tensors, *_: tensors,
}
LOOKUPS: dict[str, Callable[..., Any]] = {
    "xla_sparse_dense_matmul_with_static_buffer_size": _lookup,
}

_RULES: dict[str, type[UpdateRule]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "adagrad_momentum": AdagradMomentum,
    "adam": Adam,
    "ftrl": FTRL,
}
#: Replacements whose first argument is the embedding.
UPDATES: dict[str, Callable[..., Any]] = {
    f"xla_sparse_dense_matmul_grad_with_{name}_and_static_buffer_size": (
        functools.partial(_update, rule)
    )
    for name, rule in _RULES.items()
}
