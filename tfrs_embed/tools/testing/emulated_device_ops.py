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
from tfrs_embed.tools.testing.deferred_update import DeferredUpdate, StackUpdate
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
        results = []
        for chip, entries in enumerate(_decode(strategy, calls, input_size)):
            with tf.device(strategy.extended.worker_devices[chip]):
                rows = tf.gather(table, entries.row)
                if quantization_config_num_buckets:
                    rows = device.quantize(
                        rows,
                        quantization_config_low,
                        quantization_config_high,
                        quantization_config_num_buckets,
                    )
                results.append(device.activations(entries, rows, input_size))
        return results

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
        of_chips = [
            entries._replace(sample=entries.sample + chip * samples)
            for chip, entries in enumerate(_decode(strategy, calls, samples))
        ]
        with tf.device(strategy.extended.worker_devices[0]):
            joined = [tf.concat(e, 0) for e in zip(*of_chips, strict=True)]
            rows, sums = device.row_gradients(
                device.Entries(*joined),
                tf.concat([each.gradients for each in calls], 0),
            )
        change = StackUpdate(rows, sums, op["learning_rate"])
        if late:
            stack = op["table_name"]
            deferred = _deferred(embedding, stack, change)
            pipelining.around_loop(
                lambda: _drain(strategy, embedding, stack, made)
            )
            before = deferred.take()
            deferred.put(change)
            change = before
        after = _apply(strategy, made, change, [c.tables for c in calls])
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
    strategy: Any, calls: Sequence[_Call], samples: int
) -> list[device.Entries]:
    """Each chip's entries, on its device."""
    topology = strategy.topology
    entries = []
    for chip, call in enumerate(calls):
        rows = call.tables[PARAMETERS].shape[0] // topology.sparse_cores
        with tf.device(strategy.extended.worker_devices[chip]):
            entries.append(device.decode(call.buffers, topology, samples, rows))
    return entries


def _apply(
    strategy: Any,
    rule: UpdateRule,
    change: StackUpdate,
    shards: Sequence[_Tables],
) -> list[_Tables]:
    """Returns each chip's tables after an update, made on its device."""
    updated = []
    for chip, tables in enumerate(shards):
        with tf.device(strategy.extended.worker_devices[chip]):
            size = tables[PARAMETERS].shape[0]
            rows = change.rows - chip * size
            own = tf.where((rows >= 0) & (rows < size))[:, 0]
            rows = tf.gather(rows, own)
            before = {k: tf.gather(v, rows) for k, v in tables.items()}
            parameters, slots = rule.update(
                change.rate,
                tf.gather(change.gradients, own),
                before.pop(PARAMETERS),
                before,
                tf.constant(0, tf.int64),  # No rule of TPUs counts updates.
            )
            after = {PARAMETERS: parameters, **slots}
            updated.append(
                {
                    name: tf.tensor_scatter_nd_update(
                        table, rows[:, tf.newaxis], after[name]
                    )
                    for name, table in tables.items()
                }
            )
    return updated


#: Each embedding's deferred updates, by stack.
_all_deferred: weakref.WeakKeyDictionary[Any, dict[str, DeferredUpdate]] = (
    weakref.WeakKeyDictionary()
)


def _deferred(
    embedding: Any, stack: str, change: StackUpdate
) -> DeferredUpdate:
    stacks = _all_deferred.setdefault(embedding, {})
    if stack not in stacks:
        with tf.init_scope():
            stacks[stack] = DeferredUpdate(change.gradients.shape[1])
    return stacks[stack]


def _drain(strategy: Any, embedding: Any, stack: str, rule: UpdateRule) -> None:
    """Applies a stack's deferred update."""
    variables = embedding.variables[stack]
    shards = [
        dict(zip(variables, of_chip, strict=True))
        for of_chip in zip(*(v.values for v in variables.values()), strict=True)
    ]
    change = _all_deferred[embedding][stack].take()
    before = [{k: v.read_value() for k, v in each.items()} for each in shards]
    for shard, after in zip(
        shards, _apply(strategy, rule, change, before), strict=True
    ):
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
