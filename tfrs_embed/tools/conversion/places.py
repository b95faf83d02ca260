"""The places of tables' variables among the objects of a checkpoint."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from tfrs_embed.checkpoint.names import in_key
from tfrs_embed.ops.update import PARAMETERS

#: Attributes of TFRS's layers, and of the mid-level API on SparseCores.
TPU_EMBEDDING = "_tpu_embedding"
KERAS_LAYERS = "_keras_embedding_layers"
LAYOUTS = "_sparse_core_table_layouts"

#: The children of each object, as numbers of objects by name.
Nodes = Sequence[Mapping[str, int]]


def paths(nodes: Nodes) -> dict[int, str]:
    """The objects' paths, by number, as TensorFlow makes keys of them.

    Args:
        nodes: the objects.
    """
    found = {0: ""} if nodes else {}
    waiting = collections.deque(found)
    while waiting:
        owner = waiting.popleft()
        for name, number in nodes[owner].items():
            if number not in found:
                found[number] = _join(found[owner], in_key(name))
                waiting.append(number)
    return found


def of_tables(
    nodes: Nodes, paths_: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Says which variables are tables', and their paths by their layers.

    In a SavedModel, and in TensorFlow's mid-level API, a variable's key may be
    another path.

    Args:
        nodes: the objects.
        paths_: their paths, the root's first.

    Yields:
        An object's number, once, and its path: that of the layer nearest to
        the root, in which the variable is where layers' checkpoints have it.
    """
    done = set()
    for owner, path in paths_.items():
        for name, number in _of_layer(nodes, owner):
            if number not in done:
                done.add(number)
                yield number, _join(path, name)


def _of_layer(nodes: Nodes, owner: int) -> Iterator[tuple[str, int]]:
    """Variables of an object's tables by their paths in it."""
    children = nodes[owner]
    for holder in ("table", TPU_EMBEDDING):
        if holder in children:
            for name, number in nodes[children[holder]].items():
                yield f"{holder}/{in_key(name)}", number
    for holder in ("tables", KERAS_LAYERS):
        if holder in children:
            for table, of_table in nodes[children[holder]].items():
                for name, number in nodes[of_table].items():
                    yield f"{holder}/{in_key(table)}/{in_key(name)}", number
    # Of the mid-level API itself. Stacks have their layouts beside them.
    if "_variables" in children and LAYOUTS not in children:
        for table, of_table in nodes[children["_variables"]].items():
            if PARAMETERS in nodes[of_table]:
                for name, number in nodes[of_table].items():
                    slot = "" if name == PARAMETERS else name
                    name = in_key("/".join(filter(None, (table, slot))))
                    yield f"{TPU_EMBEDDING}/{name}", number


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
