"""Tables whose keys come and go, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed import graphs
from tfrs_embed._tensorflow import save_context
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.distribution import replicas
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tables.dynamic import DynamicTable
from tfrs_embed.engines.tables.key_rules import TRASH, rows_at_first
from tfrs_embed.engines.tables.key_table import Found
from tfrs_embed.engines.tables.keyed_shard import KeyedShard
from tfrs_embed.engines.tables.reservation import (
    Request,
    Reservation,
    commit,
    reserve,
)
from tfrs_embed.ops import concat_gradients
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds, split_by_bags
from tfrs_embed.ops.rounding import widen
from tfrs_embed.ops.update import GradientContributions
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.strategies import refuse_in_xla


class _Residuals(NamedTuple):
    """The results of a lookup that its update needs.

    Attributes:
        bags: each feature's bags of keys.
        reserved: the rows of each trained table's keys, feature after feature.
    """

    bags: list[BaggedIds]
    reserved: dict[str, Reservation]


class EngineOfKeys(Engine):
    """What engines of tables with `DynamicKeys` have in common."""

    _State = DynamicTable
    states: dict[str, Any]

    @property
    def has_whole_tables(self) -> bool:
        return False

    @property
    def gives_rows(self) -> bool:
        return True


class DynamicEngine(EngineOfKeys, OneDeviceEngine):
    """Holds each table on one device, and gives its rows to keys.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained: its keys get no rows.
        options: the other arguments.

    Raises:
        NotImplementedError: the updates are to be pipelined.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        refuse_pipelining(options)
        super().__init__(features, optimizers, options)
        self._shard.trash = TRASH
        self._rows: dict[str, KeyedShard] = {}

    def build(self) -> None:
        with tf.init_scope():
            self._shard.build(lambda table: rows_at_first(table, 1))
            for name, state in self.states.items():
                [self._rows[name]] = state.expose(
                    self._name,
                    [self._shard.store(name)],
                    replicas.of(self._strategy),
                    self._strategy,
                    self.step,
                )
        self._follow_step()

    def lookup(
        self,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType = tf.float32,
        begun: Any = None,
    ) -> tuple[list[tf.Tensor], Any]:
        refuse_to_trace(self._name)
        step = tf.convert_to_tensor(self.step) + 1
        located = list(bags)
        requests = {
            name: Request(
                self._rows[name],
                _concat([bags[i].ids for i in mine]),
                None,
                step,
            )
            for name, mine in self._places().items()
        }
        reserved = {}
        if training:
            trained = [n for n in requests if self.optimizers[n] is not None]
            rows = reserve([requests[n] for n in trained])
            reserved = dict(zip(trained, rows, strict=True))
        found = {
            name: self._rows[name].key_table.look_up(request.keys)
            for name, request in requests.items()
            if name not in reserved
        }
        for name, mine in self._places().items():
            rows = (reserved if name in reserved else found)[name].rows
            for i, part in _split(rows, bags, mine).items():
                located[i] = bags[i]._replace(ids=part)
        activations = self._shard.lookup(
            [f.table.name for f in self.features], located, training, dtype
        )
        if not training:
            activations = self._check_read(found, bags, activations)
        # Vectors that went through a branch could not be written to their
        # places in a concatenation at once: a training step relies on being the
        # only one.
        return activations, _Residuals(list(bags), reserved)

    def _check_read(
        self,
        found: Mapping[str, Found],
        bags: Sequence[BaggedIds],
        activations: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Reads again if rows were given to other keys while they were read.

        Args:
            found: the rows of each table's keys.
            bags: each feature's bags of keys.
            activations: each feature's vectors, as they were read.

        Returns:
            Each feature's vectors; that of a key without a row is zeros.
        """
        with tf.control_dependencies(graphs.here(activations)):
            changed = tf.add_n(
                [self._rows[n].key_table.check(*f)[1] for n, f in found.items()]
            )
        checked: list[tf.Tensor] = tf.cond(
            changed > 0,
            lambda: [
                tf.reshape(tf.cast(mended, read.dtype), tf.shape(read))
                for mended, read in zip(
                    self._read_again(found, bags), activations, strict=True
                )
            ],
            lambda: [tf.identity(a) for a in activations],
        )
        for after, before in zip(checked, activations, strict=True):
            after.set_shape(before.shape)
        return checked

    def _read_again(
        self,
        found: Mapping[str, Found],
        bags: Sequence[BaggedIds],
    ) -> list[tf.Tensor]:
        """Looks up features by vectors that are checked one by one."""
        activations: list[Any] = [None] * len(bags)
        for name, mine in self._places().items():
            vectors = widen(self._rows[name].read(found[name]))
            for i, part in _split(vectors, bags, mine).items():
                activations[i] = lookup_ops.combine(part, None, bags[i])
        return activations

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        bags, reserved = residuals
        made = concat_gradients.find(gradients)
        found = [each.rows for each in reserved.values()]
        # Not in a step whose loss, or its gradient, fails, nor where there is
        # no room for another table's keys.
        with tf.control_dependencies(graphs.here([*made.matrices, *found])):
            committed = commit(list(reserved.values()))
        contributions = {}
        for name, rows in zip(reserved, committed, strict=True):
            mine = self._places()[name]
            parts = _split(rows, bags, mine)
            contributions[name] = GradientContributions(
                [bags[i]._replace(ids=parts[i]) for i in mine],
                [gradients[i] for i in mine],
            )
        self._shard.update(
            contributions, [*found, *committed], self._norms.factors()
        )

    def _places(self) -> dict[str, list[int]]:
        """The places of each table's features among all."""
        return {
            name: [
                i for i, f in enumerate(self.features) if f.table is state.spec
            ]
            for name, state in self.states.items()
        }


def refuse_pipelining(options: EngineOptions) -> None:
    """Refuses to pipeline the updates of tables with keys.

    Raises:
        NotImplementedError: they are to be.
    """
    if options.pipelined:
        raise NotImplementedError(
            f"{options.name}: tables with DynamicKeys can't be pipelined: a "
            "key's row has to be there before the next step looks it up. Leave "
            "pipeline_execution_with_tensor_core out."
        )


def refuse_to_trace(name: str) -> None:
    """Refuses lookups where a key's row can't be found.

    Args:
        name: whose tables these are.

    Raises:
        NotImplementedError: inside XLA.
        RuntimeError: in a SavedModel, where the keys are not.
    """
    refuse_in_xla("Tables with DynamicKeys")
    if save_context.in_save_context():
        raise RuntimeError(
            f"{name} has tables with DynamicKeys, which only "
            "tfrs_embed.serving.export exports."
        )


def _concat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def _split(
    rows: tf.Tensor, bags: Sequence[BaggedIds], places: Sequence[int]
) -> dict[int, tf.Tensor]:
    """The rows of each feature's ids, by the feature's place."""
    parts = split_by_bags(rows, [bags[i] for i in places])
    return dict(zip(places, parts, strict=True))
