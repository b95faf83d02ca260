"""Paths of objects and of tables' variables in a checkpoint's object graph."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from tfrs_embed.checkpoint.names import in_key
from tfrs_embed.ops.update import PARAMETERS

#: Attributes of TFRS's layers, and of the mid-level API on SparseCores.
TPU_EMBEDDING = "_tpu_embedding"
KERAS_LAYERS = "_keras_embedding_layers"
LAYOUTS = "_sparse_core_table_layouts"

#: Each object's children: numbers of objects by name.
Nodes = Sequence[Mapping[str, int]]


def paths(nodes: Nodes) -> dict[int, str]:
    """Each object's path by its number, as TensorFlow makes keys of paths."""
    found = {0: ""} if nodes else {}
    waiting = collections.deque(found)
    while waiting:
        owner = waiting.popleft()
        for name, number in nodes[owner].items():
            if number not in found:
                found[number] = _join(found[owner], in_key(name))
                waiting.append(number)
    return found


def of_tables(nodes: Nodes, paths_: Mapping[int, str]) -> dict[int, str]:
    """The paths of tables' variables, by their numbers.

    A path goes through the layer nearest to the root, and ends as in the
    checkpoint of a layer. In a SavedModel, and in a checkpoint of TensorFlow's
    mid-level API, the variable's key may be another path. `paths_` are those of
    the objects, the root's first.
    """
    found: dict[int, str] = {}
    for owner, path in paths_.items():
        for name, number in _of_layer(nodes, owner):
            found.setdefault(number, _join(path, name))
    return found


def _of_layer(nodes: Nodes, owner: int) -> Iterator[tuple[str, int]]:
    """The variables of an object's tables: their paths in it, their numbers."""
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
    # The mid-level API itself. Stacks have their layouts beside them.
    if "_variables" in children and LAYOUTS not in children:
        for table, of_table in nodes[children["_variables"]].items():
            if PARAMETERS in nodes[of_table]:
                for name, number in nodes[of_table].items():
                    slot = "" if name == PARAMETERS else name
                    name = in_key("/".join(filter(None, (table, slot))))
                    yield f"{TPU_EMBEDDING}/{name}", number


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
