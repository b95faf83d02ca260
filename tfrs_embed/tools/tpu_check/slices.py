"""TPU slices by name: their chips, replicas and embedding hardware."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import tensorflow as tf

_Feature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


@dataclasses.dataclass(frozen=True)
class _Generation:
    """A generation of TPUs: the properties of its chips.

    Attributes:
        dims: dimensions of the chips' torus.
        counted: cores of a chip that the cloud's names count.
        replicas: replicas of a TPUStrategy that run on a chip.
        embedding: its embedding hardware.
        sparse_cores: SparseCores of a chip.
    """

    dims: int
    counted: int
    replicas: int
    embedding: Any
    sparse_cores: int = 0


_GENERATIONS = {
    "v2": _Generation(2, 2, 2, _Feature.V1),
    "v3": _Generation(2, 2, 2, _Feature.V1),
    "v4": _Generation(3, 2, 1, _Feature.V1),
    "v5e": _Generation(2, 1, 1, _Feature.UNSUPPORTED),
    "v5p": _Generation(3, 2, 1, _Feature.V2, 4),
    "v6e": _Generation(2, 1, 1, _Feature.V2, 2),
}
# The cloud's other names for v5e and v6e.
_ALIASES = {"v5litepod": "v5e", "v6": "v6e"}
_BY_CORES = re.compile(r"(v\d+[a-z]*)-(\d+)")
_BY_SHAPE = re.compile(r"(v\d+[a-z]*):(\d+(?:x\d+)+)")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice.

    Example:
        >>> tpu_slice = tfrs_embed.tpu_check.Slice.of("v6e-8")
        >>> tpu_slice.name, tpu_slice.chips
        ('v6e:2x4', 8)

    Attributes:
        generation: "v5p" and so on.
        shape: the chips in each dimension of their torus.
    """

    generation: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str | Slice) -> Slice:
        """Reads a slice's name.

        Args:
            name: by the shape of its torus of chips, "v5p:2x2x1", or as the
                cloud spells it, "v5p-8", which counts the cores of some
                generations.

        Returns:
            The slice.

        Raises:
            ValueError: there is no such slice.
            TypeError: not a name.
        """
        if isinstance(name, Slice):
            return name
        if not isinstance(name, str):
            raise TypeError(f"A slice is a name like 'v5p:2x2x1', got {name!r}")
        match = _BY_SHAPE.fullmatch(name) or _BY_CORES.fullmatch(name)
        kind = match and _ALIASES.get(match[1], match[1])
        if match is None or kind not in _GENERATIONS:
            raise ValueError(
                f"Unknown TPU slice {name!r}; slices are called "
                "'<generation>:<shape>', such as 'v5p:2x2x1', or "
                "'<generation>-<number>', such as 'v5p-8', with one of "
                f"{sorted(_GENERATIONS)}."
            )
        generation = _GENERATIONS[kind]
        if "x" in match[2]:
            shape = tuple(int(n) for n in match[2].split("x"))
        else:
            shape = _default_shape(name, int(match[2]), generation)
        if len(shape) != generation.dims:
            raise ValueError(
                f"TPU slice {name!r}: the chips of {kind} are in a torus of "
                f"{generation.dims} dimensions, not {len(shape)}."
            )
        chips = math.prod(shape)
        if chips < 1 or chips & (chips - 1):
            raise ValueError(
                f"TPU slice {name!r} has {chips} chips; only powers of two "
                "are supported."
            )
        return cls(kind, shape)

    @property
    def name(self) -> str:
        """The name by shape, which libtpu takes too."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """Replicas of a TPUStrategy on it."""
        return self.chips * _GENERATIONS[self.generation].replicas

    @property
    def sparse_cores(self) -> int:
        """SparseCores of each chip; 0: none."""
        return _GENERATIONS[self.generation].sparse_cores

    @property
    def embedding_feature(self) -> Any:
        """The embedding hardware of its chips."""
        return _GENERATIONS[self.generation].embedding

    def __str__(self) -> str:
        """The name and what the slice has."""
        chips = f"{self.chips} chip{'s' if self.chips > 1 else ''}"
        if self.sparse_cores:
            chips += f" of {self.sparse_cores} SparseCores"
        return f"{self.name} ({chips})"


def _default_shape(
    name: str, number: int, generation: _Generation
) -> tuple[int, ...]:
    """The shape that the cloud gives a slice with this number in its name."""
    if number < 1 or number % generation.counted:
        raise ValueError(
            f"TPU slice {name!r}: its name counts cores, of which a chip has "
            f"{generation.counted}; {number} is no multiple of that."
        )
    chips = number // generation.counted
    shape = [1] * generation.dims
    # As near to a cube as can be, the last dimensions longest; but four chips
    # lie in a plane.
    while math.prod(shape) < chips:
        low = min(shape)
        at = max(i for i, n in enumerate(shape) if n == low)
        if generation.dims == 3 and chips <= 4:
            at = shape.index(low)
        shape[at] *= 2
    if math.prod(shape) != chips:
        raise ValueError(
            f"TPU slice {name!r} has {chips} chips; only powers of two are "
            "supported."
        )
    return tuple(shape)
