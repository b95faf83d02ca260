"""Tables with `DynamicKeys` on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.distribution import replicas
from tfrs_embed.engines.engine import LookupCall
from tfrs_embed.engines.norms import norm_factors
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.table_group import TableGroup, by_kind
from tfrs_embed.ops import concat_gradients
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds, split_by_bags
from tfrs_embed.ops.rounding import widen
from tfrs_embed.ops.update import GradientContributions, add_bags
from tfrs_embed.storage.dynamic_table import DynamicTable
from tfrs_embed.storage.key_rules import TRASH, rows_at_first
from tfrs_embed.storage.key_table import Found, Spilled
from tfrs_embed.storage.keyed_shard import KeyedShards
from tfrs_embed.storage.reservation import Request, Reservation, commit, reserve


class _Group(NamedTuple):
    """Tables of one width that are all trained, or all not."""

    group: TableGroup
    tables: KeyedShards
    trained: bool

    def split(
        self, rows: tf.Tensor, bags: Sequence[BaggedIds]
    ) -> dict[int, tf.Tensor]:
        """The rows of each feature's ids, by the feature's index."""
        parts = split_by_bags(rows, self.group.select(bags))
        return dict(zip(self.group.features, parts, strict=True))


class _Residuals(NamedTuple):
    """Each feature's bags of keys, and the rows of trained groups' keys."""

    bags: list[BaggedIds]
    reserved: list[tuple[_Group, Reservation]]


class DynamicEngine(OneDeviceEngine):
    """Holds tables with `DynamicKeys` on one device.

    Keys of untrained tables get no rows.
    """

    _State = DynamicTable
    _groups: list[_Group]

    def build(self) -> None:
        self._shard.trash = TRASH
        with tf.init_scope():
            self._shard.build(lambda table: rows_at_first(table, 1))
            self._moments.add(self._shard.store)
            shards = {}
            for name, state in self.states.items():
                assert isinstance(state, DynamicTable)
                [shards[name]] = state.expose(
                    self._name,
                    [self._shard.store],
                    replicas.of(self._strategy),
                    self._strategy,
                    self.step,
                )
        self._groups = []
        for tables in by_kind(
            lambda t: (t.dim, self.optimizers[t.name] is not None), self.tables
        ):
            group = TableGroup(tables, self.features, world=1, keyed=True)
            keyed = KeyedShards([shards[t.name] for t in tables])
            trained = self.optimizers[tables[0].name] is not None
            self._groups.append(_Group(group, keyed, trained))
        self._follow_step()

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        refuse_to_trace(self._name)
        bags, training = call.bags, call.training
        step = tf.convert_to_tensor(self.step) + 1
        found, trained, requests = [], [], []
        for group in self._groups:
            keys = group.group.keys(bags)
            table_of = group.group.table_of(bags)
            if training and group.trained:
                trained.append(group)
                requests.append(
                    Request(group.tables, keys, table_of, None, step)
                )
            else:
                there = group.tables.key_tables.look_up(keys, table_of)
                found.append((group, there))
        reserved = list(zip(trained, reserve(requests), strict=True))
        located = list(bags)
        rows = [*((g, f.rows) for g, f in found)]
        rows += [(g, r.rows) for g, r in reserved]
        for group, of_group in rows:
            for i, part in group.split(of_group, bags).items():
                located[i] = bags[i]._replace(ids=part)
        activations = self._shard.store.lookup(
            [f.table.name for f in self.features], located, training, call.dtype
        )
        if not training:
            activations = self._check_read(found, bags, activations)
        # Without `_check_read`, whose branch would prevent writing vectors into
        # a concatenation in place. No other thread changes rows in a training
        # step.
        return activations, _Residuals(list(bags), reserved)

    def _check_read(
        self,
        found: Sequence[tuple[_Group, Found]],
        bags: Sequence[BaggedIds],
        activations: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Reads again if rows were given to other keys meanwhile, or spilled.

        Returns each feature's vectors; zeros for a key without a row.
        """
        with tf.control_dependencies(graphs.here(activations)):
            changed = tf.add_n(
                [group.tables.key_tables.check(f)[1] for group, f in found]
                + [_num_spilled(f) for _, f in found if f.spilled is not None]
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
        self, found: Sequence[tuple[_Group, Found]], bags: Sequence[BaggedIds]
    ) -> list[tf.Tensor]:
        """Looks up features by vectors that are checked one by one."""
        activations: list[Any] = [None] * len(bags)
        for group, there in found:
            spilled: dict[int, Spilled] = {}
            if there.spilled is not None:
                keys, index, found_there = there.spilled
                indices = group.split(index, bags)
                spilled = {
                    i: Spilled(part, indices[i], found_there)
                    for i, part in group.split(keys, bags).items()
                }
            for i, rows in group.split(there.rows, bags).items():
                table = group.group.tables.index(self.features[i].table)
                version = there.versions[table : table + 1]
                vectors = group.tables.shards[table].read(
                    Found(rows, None, version, spilled.get(i))
                )
                activations[i] = lookup_ops.combine(
                    widen(vectors), None, bags[i]
                )
        return activations

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        bags, reserved = residuals
        made = concat_gradients.find(gradients)
        found = [rows.rows for _, rows in reserved]
        # Not if the loss or its gradient fails, or if there is no room for
        # another table's keys.
        with tf.control_dependencies(graphs.here([*made.matrices, *found])):
            committed = commit([rows for _, rows in reserved])
        contributions: dict[str, GradientContributions] = {}
        for (group, _), rows in zip(reserved, committed, strict=True):
            for i, part in group.split(rows, bags).items():
                name = self.features[i].table.name
                located = bags[i]._replace(ids=part)
                add_bags(contributions, name, located, gradients[i])
        self._shard.update(
            contributions, [*found, *committed], norm_factors(self.optimizers)
        )


def _num_spilled(found: Found) -> tf.Tensor:
    """The number of vectors that were in spills, a scalar int64."""
    assert found.spilled is not None
    return tf.shape(found.spilled.vectors, tf.int64)[0] - 1


def refuse_to_trace(name: str) -> None:
    """Raises an error in SavedModels, which have no keys."""
    if save_context.in_save_context():
        raise RuntimeError(
            f"{name} has tables with DynamicKeys, which only "
            "tfrs_embed.serving.export exports."
        )
