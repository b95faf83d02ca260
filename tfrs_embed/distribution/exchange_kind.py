"""Which exchange tables that are sharded by row use."""

from __future__ import annotations

from collections.abc import Iterable

from tfrs_embed.distribution.traffic import KEY, WORD

#: Bytes of a number of a row or a gradient, by what these are sent as.
ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def key_bytes(dim: int, row: int, gradient: int) -> int:
    """Returns the bytes of a key, its row and its gradient.

    `row` and `gradient` are the bytes of one of their numbers.
    """
    return KEY + (row + gradient) * dim


def vectors_are_less(
    bag_size: int, dim: int, world: int, element: int = 4, number: int = 4
) -> bool:
    """Whether bags cost fewer bytes exchanged by vectors than by rows.

    By vectors, a bag's ids, one vector and one gradient go to all replicas. By
    rows, a key, a row and a gradient are sent per unique id. While tracing, the
    number of unique ids is unknown; half of the ids are assumed.

    Args:
        bag_size: the ids of a bag.
        dim: the table's width.
        world: the number of replicas.
        element: the bytes of a number sent, of `ELEMENT_SIZES`.
        number: the bytes of a number of the table's rows; rows of two bytes are
            sent as they are.
    """
    by_vectors = world * (WORD * bag_size + 2 * element * dim)
    by_rows = bag_size / 2 * key_bytes(dim, min(element, number), element)
    return world > 1 and bag_size > 1 and by_vectors <= by_rows


def first_stage(world: int, on_host: int) -> int:
    """Returns the size of the groups that exchange first; 1: one stage.

    That is the number of replicas on a host; or more, if there are so many
    hosts that messages between hosts would be shorter than inside.
    """
    if on_host == 1 or on_host == world:
        return 1
    size = on_host
    while size * size < world and world % (2 * size) == 0:
        size *= 2
    return size


def first_ranks(tables: Iterable[str], world: int) -> dict[str, int]:
    """Returns the rank of the replica that has each table's row 0.

    Row 0 is often the most frequent, so the ranks are spread evenly.
    """
    names = list(dict.fromkeys(tables))
    return {name: i * world // len(names) for i, name in enumerate(names)}
