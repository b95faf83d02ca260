"""Groups of some of a strategy's replicas, which exchange by themselves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.distribution.replicas import Group, Replicas


class Subgroups:
    """The replicas in groups of one size.

    It stands in for `Replicas` where a replica has to do with its group alone.
    A replica's place in its group is called its rank there.

    Args:
        replicas: the replicas.
        size: the size of a group, which divides the number of replicas.
        neighbours: whether a group is of neighbouring ranks; else it is of
            every (world / size)-th.
    """

    def __init__(
        self, replicas: Replicas, size: int, *, neighbours: bool
    ) -> None:
        self._replicas = replicas
        self.devices = replicas.devices
        self.sent = replicas.sent
        self.world = size
        number = replicas.world // size
        first_key = replicas.allocate_groups(number)
        self.ranks: list[int] = []
        self._groups: list[Group] = []
        for rank in replicas.ranks:
            group, place = (
                divmod(rank, size)
                if neighbours
                else (rank % number, rank // number)
            )
            self.ranks.append(place)
            self._groups.append(Group(first_key + group, size))
        # For each local replica, the places of its group's replicas in the
        # order of TensorFlow's ranks, which on GPUs follow their interconnect.
        self._places = (
            replicas.gather_numbers(self.ranks, self._groups)
            if size > 1
            else []
        )

    def allocate(self, channels: int) -> int:
        """Reserves collective channels; see `Replicas.allocate`."""
        return self._replicas.allocate(channels)

    def all_to_all(
        self, replica: int, values: tf.Tensor, channel: int, bucket: Any = 0
    ) -> tf.Tensor:
        """Exchanges values in a replica's group; see `Replicas.all_to_all`."""
        if self.world == 1:
            return values
        places = self._places[replica]
        ordered = places == list(range(self.world))
        if not ordered:
            values = tf.gather(values, places)
        sent = self._replicas.all_to_all(
            replica, values, channel, bucket, self._groups[replica]
        )
        if ordered:
            return sent
        by_place = [places.index(place) for place in range(self.world)]
        return tf.gather(sent, by_place)
