"""SparseCores' device ops, emulated for all chips of a slice together.

Each replica calls an op as a chip does. A merge call gets the buffers and the
tables' shards of all replicas, and returns each replica's result.
"""

from __future__ import annotations

import dataclasses
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
from tfrs_embed.sparsecore.deferred_update import DeferredUpdate, Update
from tfrs_embed.tools.testing.emulated_merge import merge

_Tables = dict[str, tf.Tensor]
_BUFFERS = (
    "row_pointers",
    "sorted_sample_ids",
    "sorted_token_ids",
    "sorted_gains",
)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one chip's call of an op.

    Attributes:
        buffers: the four buffers of ids.
        tables: the chip's shards of the stack's parameters and slots.
        gradients: in an update, the gradients of the chip's activations.
        rate: in an update, the chip's learning rate.
    """

    buffers: Sequence[tf.Tensor]
    tables: _Tables
    gradients: Any = None
    rate: Any = None


def _lookup(
    embedding_table: Any,
    input_size: int,
    quantization_config_low: float,
    quantization_config_high: float,
    quantization_config_num_buckets: int,
    **op: Any,
) -> tf.Tensor:
    quantization = None
    if quantization_config_num_buckets:
        quantization = tf.tpu.experimental.embedding.QuantizationConfig(
            quantization_config_num_buckets,
            quantization_config_low,
            quantization_config_high,
        )

    def merged(strategy: Any, calls: Sequence[_Call]) -> list[tf.Tensor]:
        table = tf.concat([call.tables[PARAMETERS] for call in calls], 0)
        results = []
        for chip, entries in enumerate(_decode(strategy, calls, input_size)):
            with tf.device(strategy.extended.worker_devices[chip]):
                rows = tf.gather(table, entries.row)
                results.append(
                    device.activations(entries, rows, input_size, quantization)
                )
        return results

    table = tf.convert_to_tensor(embedding_table)
    return merge(merged, _Call(_buffers(op), {PARAMETERS: table}))


@dataclasses.dataclass(frozen=True)
class _UpdateOp:
    """An op that updates a table.

    Attributes:
        rule: the update rule.
        slots: the rule's names of the op's arguments for slots, in the order of
            the op's results.
        names: the op's names of the rule's fields that have others.
    """

    rule: type[UpdateRule]
    slots: Mapping[str, str]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, embedding: Any, **op: Any) -> Any:
        tables = {PARAMETERS: op["embedding_table"]}
        tables |= {name: op[key] for key, name in self.slots.items()}
        call = _Call(
            _buffers(op),
            tables,
            op["activation_gradients"],
            op["learning_rate"],
        )
        settings = {
            field.name: op[self.names.get(field.name, field.name)]
            for field in dataclasses.fields(self.rule)
            if not field.name.startswith("initial_")
        }
        rule = self.rule(**settings)
        late = _pipelined() and pipelining.in_loop()

        def merged(strategy: Any, calls: Sequence[_Call]) -> list[Any]:
            gradients = [call.gradients for call in calls]
            entries = _decode(strategy, calls, gradients[0].shape[0])
            with tf.device(strategy.extended.worker_devices[0]):
                change = Update(
                    *device.row_gradients(entries, gradients),
                    tf.stack([call.rate for call in calls]),
                )
            if late:
                stack = op["table_name"]
                deferred = _deferred(embedding, stack, change)
                pipelining.around_loop(
                    lambda: _drain(strategy, embedding, stack, rule)
                )
                before = deferred.take()
                deferred.put(change)
                change = before
            shards = [call.tables for call in calls]
            shards = _apply(strategy, rule, change, shards)
            names = [PARAMETERS, *self.slots.values()]
            results = [
                tuple(tables[name] for name in names) for tables in shards
            ]
            return results if self.slots else [table for (table,) in results]

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
    topology = strategy.topology
    entries = []
    for chip, call in enumerate(calls):
        rows = call.tables[PARAMETERS].shape[0] // topology.sparse_cores
        with tf.device(strategy.extended.worker_devices[chip]):
            entries.append(device.decode(call.buffers, topology, samples, rows))
    return entries


def _apply(
    strategy: Any, rule: UpdateRule, change: Update, shards: Sequence[_Tables]
) -> list[_Tables]:
    """Returns each chip's tables after an update."""
    updated = []
    for chip, tables in enumerate(shards):
        with tf.device(strategy.extended.worker_devices[chip]):
            size = tables[PARAMETERS].shape[0]
            rows = change.rows - chip * size
            own = tf.where((rows >= 0) & (rows < size))[:, 0]
            rows = tf.gather(rows, own)
            before = {k: tf.gather(v, rows) for k, v in tables.items()}
            parameters, slots = rule.update(
                change.rate[chip],
                tf.gather(change.gradients, own),
                before.pop(PARAMETERS),
                before,
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


def _deferred(embedding: Any, stack: str, change: Update) -> DeferredUpdate:
    stacks = _all_deferred.setdefault(embedding, {})
    if stack not in stacks:
        chips = change.rate.shape[0]
        with tf.init_scope():
            stacks[stack] = DeferredUpdate(change.gradients.shape[1], (chips,))
    return stacks[stack]


def _drain(strategy: Any, embedding: Any, stack: str, rule: UpdateRule) -> None:
    """Applies a stack's deferred update."""
    change = _all_deferred[embedding][stack].take()
    variables = embedding.variables[stack]
    names = [PARAMETERS, *rule.slots()]
    shards = [
        {name: variables[name].values[chip].read_value() for name in names}
        for chip in range(strategy.topology.chips)
    ]
    shards = _apply(strategy, rule, change, shards)
    for chip, tables in enumerate(shards):
        for name, table in tables.items():
            variables[name].values[chip].assign(table)


#: Replacements for functions of `gen_xla_ops`.
COPIES: dict[str, Callable[..., Any]] = {
    "tpu_copy_with_dynamic_shape": lambda tensors, *_: tensors,
    "tpu_annotate_tensors_with_dynamic_shape": lambda tensors, *_: tensors,
}
LOOKUPS: dict[str, Callable[..., Any]] = {
    "xla_sparse_dense_matmul_with_static_buffer_size": _lookup,
}

_NAME = "xla_sparse_dense_matmul_grad_with_{}_and_static_buffer_size"

#: Replacements whose first argument is the embedding.
UPDATES: dict[str, Callable[..., Any]] = {
    _NAME.format("sgd"): _UpdateOp(SGD, {}),
    _NAME.format("adagrad"): _UpdateOp(
        Adagrad, {"accumulator": "accumulators"}
    ),
    _NAME.format("adagrad_momentum"): _UpdateOp(
        AdagradMomentum,
        {"accumulator": "accumulators", "momenta": "momenta"},
        {"momentum": "beta1"},
    ),
    _NAME.format("adam"): _UpdateOp(
        Adam,
        {"momenta": "momenta", "velocity": "velocities"},
        {
            "beta_1": "beta1",
            "beta_2": "beta2",
            "sum_inside_sqrt": "use_sum_inside_sqrt",
        },
    ),
    _NAME.format("ftrl"): _UpdateOp(
        FTRL, {"accumulator": "accumulators", "linear": "linears"}
    ),
}
