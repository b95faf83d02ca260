"""Tables on one device, looked up and updated row by row in TF ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.engine import Engine, TableState, initial_value
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops import update as update_ops
from tfrs_embed.ops.bags import Bags
from tfrs_embed.optimizers import TableOptimizer


class _Step(ResourceVariable):
    """The number of updates made.

    Restoring it drops the pending update: that belonged to the tables that are
    being replaced.
    """

    pending: _Pending | None = None

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        if self.pending is not None:
            self.pending.exists.assign(False)
        return super()._restore_from_tensors(restored_tensors)


class _Pending(tf.__internal__.tracking.AutoTrackable):
    """The update that a pipelined step has put off to the next one.

    Args:
        states: the tables.
        num_rates: the number of optimizers.
    """

    def __init__(self, states: dict[str, TableState], num_rates: int) -> None:
        super().__init__()
        self.exists = _variable(tf.constant(False), "pending")
        self.rates = _variable(tf.zeros([num_rates]), "pending_rates")
        self.ids = {}
        self.gradients = {}
        for name, state in states.items():
            self.ids[name] = _variable(
                tf.zeros([0], _id_dtype(state)),
                f"{name}/pending_ids",
                shape=[None],
            )
            self.gradients[name] = _variable(
                tf.zeros([0, state.spec.dim]),
                f"{name}/pending_gradients",
                shape=[None, state.spec.dim],
            )


class OneDeviceEngine(Engine):
    """Holds each table in one variable on one device.

    A step reads and writes the rows it touches and nothing else, whatever the
    size of the tables.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.
        pipelined: whether updates overlap the next step, as on SparseCore:
            lookup i sees the updates of steps 0 to i - 2, and the update of
            step i - 1 runs beside the dense part of step i.
        device: where the variables live; None: where TF places them.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        pipelined: bool = False,
        device: str | None = None,
    ) -> None:
        super().__init__(features, optimizers)
        self._pipelined = pipelined
        self._device = device
        self._step: tf.Variable | None = None
        self.pending: _Pending | None = None
        # Tables that share an optimizer share its rate.
        self._distinct = list(
            {id(o): o for o in optimizers.values() if o is not None}.values()
        )

    def build(self) -> None:
        """See the base class."""
        with tf.init_scope(), tf.device(self._device):
            for name, state in self.states.items():
                rows = initial_value(state.spec)
                state.add("parameters", _variable(rows, f"{name}/parameters"))
                optimizer = self.optimizers[name]
                slots = optimizer.rule.slots() if optimizer else {}
                for slot, value in slots.items():
                    filled = tf.fill(rows.shape, value)
                    state.add(slot, _variable(filled, f"{name}/{slot}"))
            self._step = _variable(tf.constant(0, tf.int64), "step", kind=_Step)
            if self._pipelined:
                self.pending = _Pending(self.states, len(self._distinct))
                self._step.pending = self.pending
        for optimizer in self._distinct:
            optimizer.follow(lambda: self.step)

    @property
    def step(self) -> tf.Variable:
        """See the base class."""
        return self._step

    def lookup(
        self, bags: Sequence[Bags], training: bool
    ) -> tuple[list[tf.Tensor], Any]:
        """See the base class."""
        if not training:
            self.drain()
        activations = []
        for feature, b in zip(self.features, bags, strict=True):
            table = self.states[feature.table.name].table
            # A gather from the variable reads rows; anything else would read,
            # and copy, the whole table.
            rows = tf.gather(table, b.ids)
            activations.append(lookup_ops.combine(rows, None, b))
        if training:
            # After the lookups, and not at all if the ids are bad.
            with tf.control_dependencies([b.ids for b in bags]):
                self.drain()
        return activations, bags

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """See the base class."""
        rates = [
            o.rate.at(tf.convert_to_tensor(self.step)) for o in self._distinct
        ]
        for name, state in self.states.items():
            if self.optimizers[name] is None:
                continue
            mine = [
                i for i, f in enumerate(self.features) if f.table is state.spec
            ]
            ids, rows = update_ops.row_gradients(
                [gradients[i] for i in mine], [residuals[i] for i in mine]
            )
            if self.pending is None:
                self._update(name, rates, ids, rows)
            else:
                self.pending.ids[name].assign(ids)
                self.pending.gradients[name].assign(rows)
        # What doesn't depend on the ids must not change either if they are bad.
        with tf.control_dependencies([b.ids for b in residuals]):
            self.step.assign_add(1)
            if self.pending is not None:
                self.pending.rates.assign(tf.stack(rates))
                self.pending.exists.assign(True)

    def drop_pending(self) -> None:
        """See the base class."""
        if self.pending is not None:
            self.pending.exists.assign(False)

    def drain(self) -> None:
        """See the base class."""
        pending = self.pending
        if pending is None:
            return

        def apply() -> tf.Operation:
            rates = tf.unstack(pending.rates, num=len(self._distinct))
            for name in self.states:
                if self.optimizers[name] is not None:
                    self._update(
                        name,
                        rates,
                        tf.convert_to_tensor(pending.ids[name]),
                        tf.convert_to_tensor(pending.gradients[name]),
                    )
            pending.exists.assign(False)
            return tf.no_op()

        tf.cond(pending.exists, apply, tf.no_op)

    def _update(
        self,
        name: str,
        rates: Sequence[tf.Tensor],
        ids: tf.Tensor,
        gradients: tf.Tensor,
    ) -> None:
        """Updates the rows `ids`, unique, of a table and of its slots."""
        state, optimizer = self.states[name], self.optimizers[name]
        assert optimizer is not None
        rate = rates[[o is optimizer for o in self._distinct].index(True)]
        rows, slots = optimizer.rule.update(
            rate,
            gradients,
            tf.gather(state.table, ids),
            {k: tf.gather(v, ids) for k, v in state.slots.items()},
        )
        update_ops.scatter_update(state.table, ids, rows)
        for slot, variable in state.slots.items():
            update_ops.scatter_update(variable, ids, slots[slot])


def _id_dtype(state: TableState) -> tf.DType:
    big = state.spec.vocabulary_size > tf.int32.max
    return tf.int64 if big else tf.int32


def _variable(
    value: tf.Tensor,
    name: str,
    shape: Any = None,
    kind: type = ResourceVariable,
) -> tf.Variable:
    # The class itself, so that a strategy does not mirror the variable; Keras
    # wants to see that it was made in the strategy's scope all the same.
    strategy = (
        tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    )
    return kind(
        value,
        trainable=False,
        name=name,
        shape=shape,
        distribute_strategy=strategy,
    )
