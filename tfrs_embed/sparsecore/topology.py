"""The number of chips and SparseCores of a TPU slice."""

from __future__ import annotations

import dataclasses
import operator

import tensorflow as tf

from tfrs_embed.sparsecore.slices import Slice


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and their SparseCores.

    Example:
        >>> topology = tfrs_embed.sparsecore.Topology.of("v5p-8")
        >>> topology.chips, topology.sparse_cores, topology.shards
        (4, 4, 16)

    Attributes:
        chips: number of chips; each is one replica of a strategy.
        sparse_cores: SparseCores per chip.
        name: the given name, "v5p-8", or "4 chips x 4 SparseCores".
    """

    chips: int
    sparse_cores: int
    name: str = dataclasses.field(compare=False)

    @property
    def shards(self) -> int:
        """SparseCores of all chips: the number of shards of a table."""
        return self.chips * self.sparse_cores

    @classmethod
    def of(cls, topology: str | tuple[int, int] | Topology) -> Topology:
        """Reads a topology.

        Args:
            topology: a slice's name: the cloud's, "v5p-8" (4 chips of 4
                SparseCores: v5p counts TensorCores, two per chip) or "v6e-4"
                (4 chips of 2), or by shape, "v5p:2x2x1"; or a pair (chips,
                sparse_cores_per_chip).

        Returns:
            The topology.

        Raises:
            ValueError: an unknown generation or one without SparseCores, a
                number of chips that is no power of two, or SparseCores per
                chip other than 1, 2 or 4.
            TypeError: neither a name nor a pair of integers.
        """
        if isinstance(topology, Topology):
            return topology
        if isinstance(topology, str):
            tpu_slice = Slice.of(topology)
            if not tpu_slice.sparse_cores:
                raise ValueError(
                    f"Topology {topology!r}: {tpu_slice.generation} has no "
                    "SparseCores; v5p and v6e have."
                )
            return cls(tpu_slice.chips, tpu_slice.sparse_cores, topology)
        try:
            chips, sparse_cores = map(operator.index, topology)
        except (TypeError, ValueError):
            raise TypeError(
                "A topology is a slice's name, such as 'v5p-8', or a pair of "
                f"integers (chips, sparse_cores_per_chip); got {topology!r}."
            ) from None
        if chips < 1 or chips & (chips - 1):
            raise ValueError(
                f"Topology {topology!r}: {chips} chips; tables are sharded "
                "over a power of two of them."
            )
        if sparse_cores not in (1, 2, 4):
            raise ValueError(
                f"Topology {topology!r}: {sparse_cores} SparseCores per chip; "
                "TensorFlow knows chips with 1, 2 or 4."
            )
        name = f"{chips} chips x {sparse_cores} SparseCores"
        return cls(chips, sparse_cores, name)


def of_strategy(strategy: tf.distribute.Strategy) -> Topology:
    """The topology of a TPUStrategy whose chips have SparseCores."""
    hardware = strategy.extended.tpu_hardware_feature
    # TensorFlow's class uses 4 if the hardware does not say.
    cores = hardware.num_embedding_devices_per_chip or 4
    return Topology.of((strategy.num_replicas_in_sync, cores))
