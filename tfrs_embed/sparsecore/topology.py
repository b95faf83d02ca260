"""The shape of a TPU slice with SparseCores."""

from __future__ import annotations

import dataclasses
import operator
import re

import tensorflow as tf

from tfrs_embed.compat.arguments import as_int

#: SparseCores of a chip, and TensorCores that its name counts, by generation.
_GENERATIONS = {"v5p": (4, 2), "v6e": (2, 1)}
_NAME = re.compile(r"(v\d+[a-z]*)-(\d+)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and their SparseCores.

    Example:
        >>> topology = tfrs_embed.sparsecore.Topology.of("v5p-8")
        >>> topology.chips, topology.sparse_cores, topology.shards
        (4, 4, 16)

    Attributes:
        chips: number of chips; each is one replica of a strategy.
        sparse_cores: SparseCores of each chip.
        name: what it was called, "v5p-8" or "4 chips x 4 SparseCores".
    """

    chips: int
    sparse_cores: int
    name: str

    @property
    def shards(self) -> int:
        """SparseCores of all chips: the parts a table is split into."""
        return self.chips * self.sparse_cores

    @classmethod
    def of(cls, topology: str | tuple[int, int] | Topology) -> Topology:
        """Reads a topology.

        Args:
            topology: a slice's name as the cloud spells it, "v5p-8" (4 chips of
                4 SparseCores: v5p counts TensorCores, of which a chip has two)
                or "v6e-4" (4 chips of 2); or a pair (chips,
                sparse_cores_per_chip).

        Returns:
            The topology.

        Raises:
            ValueError: an unknown generation, a number of chips that is no
                power of two, or SparseCores per chip other than 1, 2 or 4.
            TypeError: neither a name nor a pair.
        """
        if isinstance(topology, Topology):
            return topology
        if isinstance(topology, str):
            chips, sparse_cores = _read(topology)
            name = topology
        else:
            try:
                chips, sparse_cores = topology
            except (TypeError, ValueError):
                raise TypeError(
                    "A topology is a slice's name, such as 'v5p-8', or a pair "
                    f"(chips, sparse_cores_per_chip); got {topology!r}."
                ) from None
            name = f"{chips} chips x {sparse_cores} SparseCores"
        if as_int(chips) is None or as_int(sparse_cores) is None:
            raise TypeError(
                f"Topology {topology!r}: chips and SparseCores per chip must "
                "be integers."
            )
        chips, sparse_cores = map(operator.index, (chips, sparse_cores))
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
        return cls(chips, sparse_cores, name)


def of_strategy(strategy: tf.distribute.Strategy) -> Topology:
    """The slice of a TPUStrategy whose chips have SparseCores."""
    hardware = strategy.extended.tpu_hardware_feature
    # TensorFlow's class takes 4 where the hardware does not say.
    cores = hardware.num_embedding_devices_per_chip or 4
    return Topology.of((strategy.num_replicas_in_sync, cores))


def _read(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in _GENERATIONS:
        raise ValueError(
            f"Unknown topology {name!r}; slices with SparseCores are called "
            f"'<generation>-<number>', with one of {sorted(_GENERATIONS)}."
        )
    sparse_cores, cores = _GENERATIONS[match[1]]
    number = int(match[2])
    if number % cores:
        raise ValueError(
            f"Topology {name!r}: {match[1]} counts TensorCores, of which a "
            f"chip has {cores}; {number} is no multiple of it."
        )
    return number // cores, sparse_cores
