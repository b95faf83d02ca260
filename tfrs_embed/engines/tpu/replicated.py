"""Tables on TPUs without embedding hardware, held by `TPUEmbeddingV0`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import on_host
from tfrs_embed.engines.tpu.base import TPUEngine, new_rows
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.sample_matrix import SampleMatrix
from tfrs_embed.ops.update import PARAMETERS


class _Tables(tf.tpu.experimental.embedding.TPUEmbeddingV0):
    """TensorFlow's class with tables that Keras's optimizers don't see."""

    def _create_variables(self, table: Any, trainable: bool) -> Any:
        return super()._create_variables(table, trainable=False)


class ReplicatedEngine(TPUEngine):
    """Tables with a copy on every TensorCore.

    A compiled program can't select an unknown number of unique ids, so an
    update reads the whole table and sums a gradient of its size over the
    replicas: only for tables that fit on a TensorCore.
    """

    _options = ("clipvalue",)

    def _make_tables(self) -> dict[str, dict[str, Any]]:
        with tf.variable_creator_scope(_equal_on_all_replicas):
            self._embedding = _Tables(self._feature_configs(), None)
            self._embedding.build()
        made: dict[str, dict[str, Any]] = self._embedding._variables
        for name, state in self.states.items():
            blocks = [
                block for _, block in new_rows(state.spec, self._strategy)
            ]
            if blocks:
                made[name][PARAMETERS].assign(tf.concat(blocks, 0))
        return made

    def _read(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.states[name].table, ids)

    def _lookup(
        self, bags: Sequence[BaggedIds], training: bool
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        matrices = [
            on_host(SampleMatrix.of_bags, each, samples)
            for each, samples in zip(bags, self._padded(), strict=True)
        ]
        rows = self._embedding.embedding_lookup([m.ids for m in matrices])
        vectors = [m.combine(r) for m, r in zip(matrices, rows, strict=True)]
        return vectors, matrices, matrices[0].ids

    def _apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        replicas = tf.distribute.get_replica_context()
        for name, state in self.states.items():
            optimizer = self.optimizers[name]
            if optimizer is None:
                continue
            rows = state.spec.vocabulary_size
            total = tf.zeros([rows, state.spec.dim])
            uses = tf.zeros([rows])
            for feature, matrix, gradient in zip(
                self.features, residuals, gradients, strict=True
            ):
                if feature.table is not state.spec:
                    continue
                ids = tf.reshape(matrix.ids, [-1])
                per_id = gradient[:, None, :] * matrix.gains[:, :, None]
                total += tf.math.unsorted_segment_sum(
                    tf.reshape(per_id, [-1, state.spec.dim]), ids, rows
                )
                uses += tf.math.unsorted_segment_sum(
                    tf.reshape(matrix.mask, [-1]), ids, rows
                )
            total, uses = replicas.all_reduce(
                tf.distribute.ReduceOp.SUM, [total, uses]
            )
            old = {k: tf.convert_to_tensor(v) for k, v in state.slots.items()}
            table = tf.convert_to_tensor(state.table)
            new_table, new = optimizer.rule.update(
                self._rates[id(optimizer)],
                optimizer.options.clip_rows(total),
                table,
                old,
                tf.convert_to_tensor(self._step),
            )
            used = uses[:, None] > 0.0
            for key, value in {PARAMETERS: new_table, **new}.items():
                before = table if key == PARAMETERS else old[key]
                state.variables[key].assign(tf.where(used, value, before))


def _equal_on_all_replicas(
    make: Callable[..., tf.Variable], **kwargs: Any
) -> tf.Variable:
    kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return make(**kwargs)
