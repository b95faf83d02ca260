"""How tables that are sharded by row are exchanged."""

from __future__ import annotations

from collections.abc import Iterable

from tfrs_embed.distribution.traffic import KEY, WORD

#: Bytes of a number of a row or a gradient, by what these are sent as.
ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def key_bytes(dim: int, row: int, gradient: int) -> int:
    """Bytes of a key, its row and its gradient, as they are sent.

    Args:
        dim: the table's width.
        row: the bytes of a number of a row.
        gradient: the bytes of a number of a gradient.
    """
    return KEY + (row + gradient) * dim


def vectors_are_less(
    bag_size: int, dim: int, world: int, element: int = 4, number: int = 4
) -> bool:
    """Whether bags are exchanged by vectors, and not by rows.

    By vectors a bag's ids, one vector and one gradient go to all replicas. By
    rows a key, a row and a gradient travel for each different id, which half of
    the ids are taken to be: how many are is not known when a step is traced.

    Args:
        bag_size: the ids of a bag.
        dim: the table's width.
        world: the number of replicas.
        element: the bytes of a number that is sent, of `ELEMENT_SIZES`.
        number: the bytes of a number of the table's rows; those of two are
            sent as they are.
    """
    by_vectors = world * (WORD * bag_size + 2 * element * dim)
    by_rows = bag_size / 2 * key_bytes(dim, min(element, number), element)
    return world > 1 and bag_size > 1 and by_vectors <= by_rows


def first_stage(world: int, on_host: int) -> int:
    """The size of the groups that exchange first; 1: there is one stage.

    Args:
        world: the number of replicas.
        on_host: how many of them a host has.

    Returns:
        That of a host; or more, where there are so many hosts that messages
        between them would be shorter than inside.
    """
    if on_host == 1 or on_host == world:
        return 1
    size = on_host
    while size * size < world and world % (2 * size) == 0:
        size *= 2
    return size


def first_ranks(tables: Iterable[str], world: int) -> dict[str, int]:
    """Spreads the tables' first rows, often the most frequent, over ranks.

    Args:
        tables: the names of an engine's tables, in its order.
        world: the number of replicas.

    Returns:
        The rank of the replica that has each table's row 0.
    """
    names = list(dict.fromkeys(tables))
    return {name: i * world // len(names) for i, name in enumerate(names)}
