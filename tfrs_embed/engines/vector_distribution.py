"""Features whose vectors travel between replicas, and not their tables' rows.

Tables are sharded by row: each shard gets all replicas' bags, and answers with
the sums of those rows that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.distribution import vector_exchange
from tfrs_embed.distribution.alike import Facts
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.vector_exchange import (
    VectorExchange,
    VectorsReceived,
)
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.traffic import Sent
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import GradientContributions


class VectorDistribution:
    """Sends bags to all shards, and adds up the vectors that come back.

    Args:
        name: whose tables these are, for errors.
        features: all features of the engine.
        replicas: the replicas.
        shards: those of this process's replicas.
        first_ranks: the ranks that have the tables' rows 0, by name.
        wire: what vectors and gradients are sent as.
    """

    def __init__(
        self,
        name: str,
        features: Sequence[FeatureSpec],
        replicas: Replicas,
        shards: Sequence[Shard],
        first_ranks: Mapping[str, int],
        wire: Wire,
    ) -> None:
        self._name = name
        self._features = tuple(features)
        self._world = replicas.world
        self._shards = shards
        self._first_ranks = first_ranks
        self._wire = wire
        channel = replicas.allocate(vector_exchange.CHANNELS)
        self._exchange = VectorExchange(replicas, channel, wire)

    def facts(
        self,
        mine: Sequence[int],
        bags: Sequence[BaggedIds],
        weighted: Sequence[bool],
    ) -> Facts:
        """What replicas must share for their messages of bags to fit.

        Args:
            mine: the places of the features that are exchanged by vectors.
            bags: the bags of all features.
            weighted: which of all features have weights.
        """
        values = [0] * len(bags)
        for i in mine:
            values[i] = 2 * (bags[i].bag_size or 0) + weighted[i]
        return Facts(values, self._unlike)

    def _unlike(self, feature: tf.Tensor, facts: tf.Tensor) -> tf.Tensor:
        """Says that replicas differ in the bags of a feature."""

        def said(rank: tf.Tensor) -> tf.Tensor:
            fact = facts[rank]
            size = tf.strings.as_string(fact // 2)
            known = tf.strings.join(
                [
                    size,
                    " ids in each bag, ",
                    tf.where(fact % 2 > 0, "with weights", "without weights"),
                ]
            )
            return tf.where(
                fact > 0, known, "another number of ids, or one not known"
            )

        one, other = tf.argmax(facts), tf.argmin(facts)
        names = [str(feature) for feature in self._features]
        return tf.strings.join(
            [
                f"{self._name}: all replicas must give a feature bags of the "
                "same number of ids when tracing, or all of an unknown one. ",
                tf.gather(names, feature),
                " has ",
                said(one),
                " on the replica of rank ",
                tf.strings.as_string(one),
                ", and ",
                said(other),
                " on that of rank ",
                tf.strings.as_string(other),
                ".",
            ]
        )

    def look_up(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        mine: Sequence[int],
        most: tf.Tensor,
        training: bool,
        activations: list[Any],
    ) -> tuple[VectorsReceived, Sent]:
        """Looks features up, and writes their vectors to `activations`.

        Args:
            replica: the local replica.
            bags: the bags of all features.
            mine: the places of those that are looked up.
            most: scalar int64, the most bags that one has on any replica.
            training: whether this is part of a training step.
            activations: those of all features.

        Returns:
            The bags that this replica was asked for, and what it has sent.
        """
        shard = self._shards[replica]
        tables = [self._features[i].table for i in mine]
        columns = [self._columns(i, bags[i]) for i in mine]
        received = self._exchange.send_bags(
            replica,
            [bags[i] for i in mine],
            columns,
            tables,
            self._first_ranks,
            most,
            shard.device,
            training,
        )
        sums = shard.lookup(
            [t.name for t in tables], received.bags, training, self._wire.dtype
        )
        found = self._exchange.send_vectors(
            replica, received, sums, [bags[i].count for i in mine]
        )
        least, ids = [], []
        for i, table, its_columns, vectors in zip(
            mine, tables, columns, found, strict=True
        ):
            activations[i] = bags[i].scaled(vectors)
            numbers = self._wire.size * self._world * table.dim
            size = 4 * its_columns.width + numbers
            least.append(size * tf.cast(bags[i].count, tf.int64))
            ids.append(tf.size(bags[i].ids, tf.int64))
        sent = (self._world - 1) * self._wire.size * received.floats
        return received, Sent(
            2, 4 * received.words + sent, tf.add_n(least), tf.add_n(ids)
        )

    def add_gradients(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        mine: Sequence[int],
        received: VectorsReceived,
        gradients: Sequence[tf.Tensor],
        contributions: dict[str, GradientContributions],
    ) -> Sent:
        """Adds features' contributions to those of their tables.

        Args:
            replica: the local replica.
            bags: the bags of all features.
            mine: the places of those that were looked up.
            received: what `look_up` returned.
            gradients: those of all features' vectors.
            contributions: those to this replica's shard, by table.

        Returns:
            What this replica has sent.
        """
        got = self._exchange.send_gradients(
            replica, received, [bags[i].scaled(gradients[i]) for i in mine]
        )
        for i, b, gradient in zip(mine, received.bags, got, strict=True):
            table = self._features[i].table.name
            of_table = contributions.get(table, GradientContributions([], []))
            contributions[table] = GradientContributions(
                [*of_table.bags, b], [*of_table.gradients, gradient]
            )
        return Sent(1, self._wire.size * received.floats)

    def _columns(self, feature: int, bags: BaggedIds) -> BagColumns:
        assert bags.bag_size is not None
        return BagColumns(
            bags.bag_size,
            self._features[feature].table.vocabulary_size > tf.int32.max,
            bags.weights is not None,
        )
