"""The tables of this package's layers in Keras's files.

In `.weights.h5`, and in a `.keras` file, which has one, a layer is a group by
its class or attribute, with its engine's tables by name in a group below it. In
the older `.h5` each layer has a list of weights, whose names end with a table's
name and "parameters", a slot or the like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import h5py
import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.names import unescape
from tfrs_embed.checkpoint.rows import KEYS
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.tools.conversion.contents import Column, Table
from tfrs_embed.tools.conversion.own import RANKS

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
_BY_KEY = re.compile(r"all2_all_dense_embedding(_\d+)?")
_DYNAMIC = re.compile(r"dynamic_embedding(_\d+)?")
# Names of weights in an older file: of Keras 3, and of tf_keras.
_WEIGHT_3 = re.compile(rf"(?:.*/)?(tpu_embedding|engine)/(.+)_({_COLUMN})")
_WEIGHT_2 = re.compile(rf"(.+)/({_COLUMN})")
# All2AllDenseEmbedding and DynamicEmbedding call their only table so.
_TABLE = "table"


class OwnTables:
    """Finds this package's tables in a file, as it is made.

    Args:
        file: the file.
        datasets: its datasets by path.

    Attributes:
        tables: what was found. Each table's layer is a group in a
            `.weights.h5`, and in an older file the layer's name.
        steps: the number of updates by the tables' `layer`.
        taken: the paths of the datasets that these are.
        notes: what a reader should know.
    """

    def __init__(
        self, file: h5py.File, datasets: Mapping[str, h5py.Dataset]
    ) -> None:
        self.tables: list[Table] = []
        self.steps: dict[str, int] = {}
        self.taken: set[str] = set()
        self.notes: list[str] = []
        self._file = file
        self._datasets = datasets
        groups = [g for g in (file, file.get("model_weights")) if g is not None]
        older = [group for group in groups if _listed(group, "layer_names")]
        if older:
            self._find_older(older[0])
        else:
            self._find_engines()
            self._find_layers()

    def _find_engines(self) -> None:
        found: dict[tuple[str, str, str], dict[str, str]] = {}
        for path in self._datasets:
            if match := _ENGINE.fullmatch(path):
                layer, engine, table, name = match.groups()
                of_table = found.setdefault((layer or "", engine, table), {})
                of_table[name] = path
        for (layer, engine, table), paths in found.items():
            name = unescape(table)
            if name == _TABLE and self._is_by_key(layer, engine, paths):
                name = ""
            self._add(layer, name, paths)
            group = f"{layer}/{engine}" if layer else engine
            self._add_step(layer, f"{group}/{VARIABLES}/step")

    def _is_by_key(self, layer: str, engine: str, names: Iterable[str]) -> bool:
        """Whether a layer with a table "table" is an All2AllDenseEmbedding."""
        group = f"{layer}/{engine}" if layer else engine
        told = self._file[f"{group}/{VARIABLES}"].attrs.get(NAME)
        last = layer.rpartition("/")[2]
        if told or engine == "tpu_embedding":
            return told == "engine"
        if _BY_KEY.fullmatch(last) or _DYNAMIC.fullmatch(last):
            return bool(_BY_KEY.fullmatch(last))
        return self._guess(layer, names)

    def _guess(self, layer: str, names: Iterable[str]) -> bool:
        """Guesses whether it is one, where the file doesn't tell."""
        by_key = RANKS.keys() & set(names) <= {KEYS}
        here = layer.rpartition("/")[2]
        kinds = ["a DynamicEmbedding", "an All2AllDenseEmbedding"]
        this, other = reversed(kinds) if by_key else kinds
        option = f"{here}=table" if by_key else f"{here}/table="
        self.notes.append(
            f"The file doesn't tell of which class '{here}' is, and {this} is "
            f"assumed. If it is {other}, convert it with --table {option} ."
        )
        return by_key

    def _find_layers(self) -> None:
        """Finds the tables that Keras layers hold, small ones of ours too."""
        for path in self._datasets:
            if match := _SMALL.fullmatch(path):
                layer, group = match[1] or "", path.removesuffix("/vars/0")
                told = self._file[f"{group}/{VARIABLES}"].attrs.get(NAME)
                name = str(told or match[2])
                self._add(layer, name, {PARAMETERS: path})
                if told is None:
                    self.notes.append(
                        f"The small table '{match[2]}' has the name of its "
                        "Keras layer; that of the table is not in the file."
                    )
            elif match := _EMBEDDING.fullmatch(path):
                self._add(match[1], "", {PARAMETERS: path}, of_keras=True)

    def _find_older(self, group: h5py.Group) -> None:
        classes = _classes(self._file)
        for layer in _listed(group, "layer_names"):
            found: dict[str, dict[str, str]] = {}
            by_key = classes.get(layer) == "All2AllDenseEmbedding"
            step = ""
            for weight in _listed(group[layer], "weight_names"):
                path = group[layer][weight].name.lstrip("/")
                name = weight.removesuffix(":0").removeprefix(f"{layer}/")
                *parts, last = name.split("/")
                if match := _WEIGHT_3.fullmatch(name):
                    by_key |= match[1] == "engine"
                    found.setdefault(match[2], {})[match[3]] = path
                elif match := _WEIGHT_2.fullmatch(name):
                    found.setdefault(match[1], {})[match[2]] = path
                elif name == "embeddings":
                    self._add(layer, "", {PARAMETERS: path}, of_keras=True)
                elif last == "embeddings":
                    found["/".join(parts)] = {PARAMETERS: path}
                elif last == "step":
                    step = path
            for table, paths in found.items():
                single = [*found] == [_TABLE] and KEYS in paths
                if single and not classes and not by_key:
                    by_key = self._guess(layer, paths)
                name = "" if table == _TABLE and by_key else table
                self._add(layer, name, paths)
            if found and step:
                self._add_step(layer, step)

    def _add(
        self,
        layer: str,
        name: str,
        paths: Mapping[str, str],
        of_keras: bool = False,
    ) -> None:
        columns, parts = {}, {}
        for each in (PARAMETERS, *paths):
            dataset = self._datasets.get(paths.get(each, ""))
            if dataset is None or each in columns:
                continue
            if dataset.ndim == RANKS.get(each) and dataset.dtype == np.int64:
                parts[each] = _numbers(dataset)
            elif dataset.ndim in (1, 2) and dataset.dtype.kind == "f":
                columns[each] = rows(dataset)
        if PARAMETERS in columns and len(columns[PARAMETERS].shape) == 2:
            keys = parts.pop(KEYS, None)
            self.tables.append(
                Table(layer, name, columns, keys, parts, of_keras=of_keras)
            )
            self.taken |= set(paths.values())

    def _add_step(self, layer: str, path: str) -> None:
        dataset = self._datasets.get(path)
        if dataset is not None and not dataset.shape:
            self.steps[layer] = int(dataset[()])
            self.taken.add(path)


def rows(dataset: h5py.Dataset) -> Column:
    """A dataset, [rows, dim] or [rows], as a column of a table."""

    def read(start: int, size: int) -> np.ndarray:
        return np.asarray(dataset[start : start + size], np.float32)

    known = dataset.dtype.name in DTYPES
    dtype = tf.as_dtype(dataset.dtype.name) if known else tf.float32
    return Column(dataset.shape, read, dtype)


def _numbers(dataset: h5py.Dataset) -> Column:
    def read(start: int, size: int) -> np.ndarray:
        return np.asarray(dataset[start : start + size], np.int64)

    return Column(dataset.shape, read, tf.int64)


def _classes(file: h5py.File) -> dict[str, str]:
    """The classes of a model's layers by their names; empty: it is weights."""
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

    Args:
        group: the group that has it.
        name: its name.
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
