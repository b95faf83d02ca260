"""TPU slices by name: chips, replicas and embedding hardware."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import tensorflow as tf

_Feature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


@dataclasses.dataclass(frozen=True)
class _Generation:
    """The properties of one generation's chips.

    Attributes:
        dims: dimensions of the chips' torus.
        counted: cores per chip that the cloud's names count.
        replicas: replicas of a TPUStrategy per chip.
        embedding: the embedding hardware.
        sparse_cores: SparseCores per chip.
        one_host: the largest number of chips that share one host.
    """

    dims: int
    counted: int
    replicas: int
    embedding: Any
    sparse_cores: int = 0
    one_host: int = 4


_GENERATIONS = {
    "v2": _Generation(2, 2, 2, _Feature.V1),
    "v3": _Generation(2, 2, 2, _Feature.V1),
    "v4": _Generation(3, 2, 1, _Feature.V1),
    "v5e": _Generation(2, 1, 1, _Feature.UNSUPPORTED, one_host=8),
    "v5p": _Generation(3, 2, 1, _Feature.V2, 4),
    "v6e": _Generation(2, 1, 1, _Feature.V2, 2, one_host=8),
}
# The cloud's other names for v5e and v6e.
_ALIASES = {"v5litepod": "v5e", "v6": "v6e"}
_NAME = re.compile(r"(v\d+[a-z]*)(?:-(\d+)|:(\d+(?:x\d+)+))")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice.

    Example:
        >>> tpu_slice = tfrs_embed.tpu_check.Slice.of("v6e-8")
        >>> tpu_slice.name, tpu_slice.chips
        ('v6e:2x4', 8)

    Attributes:
        generation: "v5p" and so on.
        shape: the number of chips in each dimension of the torus.
    """

    generation: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str | Slice) -> Slice:
        """Reads a slice's name.

        Args:
            name: the generation and the shape of the torus of chips,
                "v5p:2x2x1"; or the cloud's name, "v5p-8", which counts the
                cores of some generations.

        Returns:
            The slice.

        Raises:
            ValueError: the slice does not exist.
            TypeError: `name` is not a string.
        """
        if isinstance(name, Slice):
            return name
        if not isinstance(name, str):
            raise TypeError(f"A slice is a name like 'v5p:2x2x1', got {name!r}")
        match = _NAME.fullmatch(name)
        kind = match and _ALIASES.get(match[1], match[1])
        if match is None or kind not in _GENERATIONS:
            raise ValueError(
                f"Unknown TPU slice {name!r}; slices are called "
                "'<generation>:<shape>', such as 'v5p:2x2x1', or "
                "'<generation>-<number>', such as 'v5p-8', with one of "
                f"{sorted(_GENERATIONS)}."
            )
        generation = _GENERATIONS[kind]
        if match[3]:
            shape = tuple(map(int, match[3].split("x")))
            chips = math.prod(shape)
            if len(shape) != generation.dims:
                raise ValueError(
                    f"TPU slice {name!r}: the chips of {kind} are in a torus "
                    f"of {generation.dims} dimensions, not {len(shape)}."
                )
        else:
            chips, rest = divmod(int(match[2]), generation.counted)
            if rest or not chips:
                raise ValueError(
                    f"TPU slice {name!r}: its name counts cores, of which a "
                    f"chip has {generation.counted}; {match[2]} is no multiple "
                    "of that."
                )
            shape = _default_shape(chips, generation.dims)
        if chips < 1 or chips & (chips - 1):
            raise ValueError(
                f"TPU slice {name!r} has {chips} chips; only powers of two "
                "are supported."
            )
        return cls(kind, shape)

    @property
    def name(self) -> str:
        """The name with the shape, which libtpu accepts as well."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """The number of chips."""
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """The number of hosts; each of several has four chips."""
        alone = self.chips <= _GENERATIONS[self.generation].one_host
        return 1 if alone else self.chips // 4

    @property
    def replicas(self) -> int:
        """The number of replicas of a TPUStrategy on the slice."""
        return self.chips * _GENERATIONS[self.generation].replicas

    @property
    def sparse_cores(self) -> int:
        """The number of SparseCores per chip; 0 if the chips have none."""
        return _GENERATIONS[self.generation].sparse_cores

    @property
    def embedding_feature(self) -> Any:
        """The chips' embedding hardware, an `EmbeddingFeature`."""
        return _GENERATIONS[self.generation].embedding

    def __str__(self) -> str:
        chips = f"{self.chips} chip{'s' if self.chips > 1 else ''}"
        if self.sparse_cores:
            chips += f" of {self.sparse_cores} SparseCores"
        return f"{self.name} ({chips})"


def _default_shape(chips: int, dims: int) -> tuple[int, ...]:
    """The shape that the cloud gives a slice of a power of two of chips.

    The shape is nearly a cube whose last dimensions are the longest; but up to
    four chips lie in a plane.
    """
    shape = [1] * dims
    while math.prod(shape) < chips:
        shortest = [i for i, n in enumerate(shape) if n == min(shape)]
        shape[shortest[0 if dims == 3 and chips <= 4 else -1]] *= 2
    return tuple(shape)
