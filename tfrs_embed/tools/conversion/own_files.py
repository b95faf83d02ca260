"""The tables of this package's layers in Keras's files.

In `.weights.h5`, and in a `.keras` file, which contains one, a layer is a group
by its class or attribute. The engine's tables are by name in a group below it.
In the older `.h5` each layer has a list of weights. Their names end with a
table's name and a variable's: "parameters", or a slot's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import h5py

from tfrs_embed.checkpoint.names import unescape
from tfrs_embed.checkpoint.rows import KEYS
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.own import RANKS, add_step, add_table

# In a group: its variables, by number or name, and the layer's name.
VARIABLES, NAME = "vars", "name"
_SLOTS = dict.fromkeys(slot for rule in RULES for slot in rule().slots())
_COLUMN = "|".join([PARAMETERS, *_SLOTS, *RANKS])
# A layer's group, its engine's attribute there, and the table's name.
_ENGINE = re.compile(
    rf"(?:(.*)/)?(tpu_embedding|_engine_layer)/{VARIABLES}/(.+)/({_COLUMN})"
)
_SMALL = re.compile(
    rf"(?:(.*)/)?(?:_keras_layers|keras_embedding_layers)/(.+)/{VARIABLES}/0"
)
_EMBEDDING = re.compile(rf"((?:.*/)?embedding(?:_\d+)?)/{VARIABLES}/0")
_CLASS = re.compile(r"(all2_all_dense|dynamic)_embedding(_\d+)?")
# Names of weights in an older file: of Keras 3, and of tf_keras.
_WEIGHT_3 = re.compile(rf"(?:.*/)?(tpu_embedding|engine)/(.+)_({_COLUMN})")
_WEIGHT_2 = re.compile(rf"(.+)/({_COLUMN})")
# The only table of All2AllDenseEmbedding and DynamicEmbedding.
_TABLE = "table"


def find(
    file: h5py.File, columns: Mapping[str, Column], found: Contents
) -> None:
    """Finds this package's tables in a file, whose variables are `columns`.

    A table's layer is a group in a `.weights.h5`, and the layer's name in an
    older file.
    """
    for group in (file, file.get("model_weights")):
        if group is not None and _listed(group, "layer_names"):
            _find_older(file, group, columns, found)
            return
    _find_engines(file, columns, found)
    _find_keras_layers(file, columns, found)


def _find_engines(
    file: h5py.File, columns: Mapping[str, Column], found: Contents
) -> None:
    of_tables: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in columns:
        if match := _ENGINE.fullmatch(path):
            layer, engine, table, name = match.groups()
            of_table = of_tables.setdefault((layer or "", engine, table), {})
            of_table[name] = path
    for (layer, engine, table), paths in of_tables.items():
        group = f"{layer}/{engine}" if layer else engine
        name = unescape(table)
        if name == _TABLE:
            told = file[f"{group}/{VARIABLES}"].attrs.get(NAME)
            match = _CLASS.fullmatch(layer.rpartition("/")[2])
            if told or engine == "tpu_embedding":
                by_key = told == "engine"
            elif match:
                by_key = match[1] != "dynamic"
            else:
                by_key = _guess(found, layer, paths)
            name = "" if by_key else _TABLE
        add_table(found, layer, name, paths, columns)
        add_step(found, layer, f"{group}/{VARIABLES}/step", columns)


def _guess(found: Contents, layer: str, names: Iterable[str]) -> bool:
    """Guesses whether a layer is an All2AllDenseEmbedding, with a note."""
    by_key = RANKS.keys() & set(names) <= {KEYS}
    here = layer.rpartition("/")[2]
    kinds = ["a DynamicEmbedding", "an All2AllDenseEmbedding"]
    this, other = reversed(kinds) if by_key else kinds
    option = f"{here}=table" if by_key else f"{here}/table="
    found.notes.append(
        f"The file doesn't tell of which class '{here}' is, and {this} is "
        f"assumed. If it is {other}, convert it with --table {option} ."
    )
    return by_key


def _find_keras_layers(
    file: h5py.File, columns: Mapping[str, Column], found: Contents
) -> None:
    """Finds the tables of Keras layers, this package's small tables too."""
    for path in columns:
        if match := _SMALL.fullmatch(path):
            group = path.removesuffix("/0")
            told = file[group].attrs.get(NAME)
            name = str(told or match[2])
            add_table(found, match[1] or "", name, {PARAMETERS: path}, columns)
            if told is None:
                found.notes.append(
                    f"The small table '{match[2]}' has the name of its Keras "
                    "layer; that of the table is not in the file."
                )
        elif match := _EMBEDDING.fullmatch(path):
            _add_embedding(found, match[1], path, columns)


def _add_embedding(
    found: Contents, layer: str, path: str, columns: Mapping[str, Column]
) -> None:
    """Adds the variable of a Keras Embedding layer."""
    column = columns.get(path)
    if column is not None and column.is_table:
        found.tables.append(
            Table(layer, "", {PARAMETERS: column}, of_keras=True)
        )
        found.taken.add(path)


def _find_older(
    file: h5py.File,
    group: h5py.Group,
    columns: Mapping[str, Column],
    found: Contents,
) -> None:
    """Finds the tables of an older file, whose layers `group` has."""
    classes = _classes(file)
    for layer in _listed(group, "layer_names"):
        of_tables: dict[str, dict[str, str]] = {}
        by_key = classes.get(layer) == "All2AllDenseEmbedding"
        step = ""
        for weight in _listed(group[layer], "weight_names"):
            path = group[layer][weight].name.lstrip("/")
            name = weight.removesuffix(":0").removeprefix(f"{layer}/")
            owner, _, last = name.rpartition("/")
            if match := _WEIGHT_3.fullmatch(name):
                by_key |= match[1] == "engine"
                of_tables.setdefault(match[2], {})[match[3]] = path
            elif match := _WEIGHT_2.fullmatch(name):
                of_tables.setdefault(match[1], {})[match[2]] = path
            elif name == "embeddings":
                _add_embedding(found, layer, path, columns)
            elif last == "embeddings":
                of_tables[owner] = {PARAMETERS: path}
            elif last == "step":
                step = path
        for table, paths in of_tables.items():
            single = [*of_tables] == [_TABLE] and KEYS in paths
            if single and not classes and not by_key:
                by_key = _guess(found, layer, paths)
            name = "" if table == _TABLE and by_key else table
            add_table(found, layer, name, paths, columns)
        if of_tables:
            add_step(found, layer, step, columns)


def _classes(file: h5py.File) -> dict[str, str]:
    """The classes of a model's layers by name; empty for a file of weights."""
    config = file.attrs.get("model_config")
    if config is None:
        return {}
    layers = json.loads(_text(config)).get("config", {}).get("layers", [])
    return {
        each.get("config", {}).get("name", ""): each.get(
            "class_name", ""
        ).rpartition(">")[2]
        for each in layers
    }


def _listed(group: h5py.Group, name: str) -> list[str]:
    """The names in an attribute, which Keras cuts into several if it is long.

    The attributes of "weight_names" are then "weight_names0" and so on.
    """
    parts = sorted(
        (
            each
            for each in group.attrs
            if each.startswith(name) and f"0{each[len(name) :]}".isdigit()
        ),
        key=lambda each: int(f"0{each[len(name) :]}"),
    )
    return [_text(each) for part in parts for each in group.attrs[part]]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
