"""Reads batches of ids in any form as arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec
from tfrs_embed.ops import hashed_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Bags:
    """The ids of a feature in a batch, or in a part of one.

    Attributes:
        values: all ids, [n].
        splits: the first id of each sample, and n, [samples + 1] int64.
        bags_per_sample: the most bags of a sample.
        ragged: whether bags may differ in the number of their ids.
    """

    values: np.ndarray
    splits: np.ndarray
    bags_per_sample: int
    ragged: bool

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.splits) - 1

    @property
    def bags(self) -> int:
        """The number of bags."""
        return self.samples * self.bags_per_sample

    def part(self, rank: int, replicas: int) -> Bags:
        """A replica's samples: as many as the others', or fewer at the end."""
        size = -(-self.samples // replicas)
        first = min(rank * size, self.samples)
        splits = self.splits[first : first + size + 1]
        return dataclasses.replace(
            self,
            values=self.values[splits[0] : splits[-1]],
            splits=splits - splits[0],
        )


def read_batches(
    spec: EmbeddingSpec,
    given: Any,
    what: str = "batches_or_hotness",
    in_range: bool = True,
) -> Iterator[dict[FeatureSpec, Bags]]:
    """Yields, for each global batch, the ids of each lookup.

    `what` is the argument's name, for errors; `in_range`: whether ids must be
    in their tables.

    Raises:
        ValueError: there are no batches, or a batch has no samples or an id
            outside of its table.
        TypeError: these are no batches.
    """
    if isinstance(given, Mapping):
        given = [given]
    if (
        tf.is_tensor(given)
        or isinstance(given, (np.ndarray, str, bytes))
        or not isinstance(given, Iterable)
    ):
        hotness = "a number, a dict with a number for each feature, or "
        raise TypeError(
            f"{what} must be {hotness * ('hotness' in what)}a list or dataset "
            f"of global batches, got {type(given).__name__}."
        )
    index = -1
    for index, batch in enumerate(given):
        where = f"batches[{index}]"
        if isinstance(batch, Mapping):
            leaves = by_feature(spec, batch, what)
        else:
            leaves = spec.structure.flatten(batch, where)
        found: dict[FeatureSpec, Bags] = {}
        for feature, leaf in zip(spec.features, leaves, strict=True):
            each = read(leaf, feature, where, in_range)
            found |= zip(feature.lookups, each, strict=True)
        if not any(bags.samples for bags in found.values()):
            raise ValueError(f"{where} has no samples.")
        yield found
    if index < 0:
        raise ValueError(f"{what} has no batches.")


def by_feature(
    spec: EmbeddingSpec, given: Mapping[Any, Any], what: str
) -> list[Any]:
    """A dict's values in the order of features, by name or as nested."""
    for names in (
        [f.name for f in spec.features],
        [f.source.name for f in spec.features],
    ):
        if len(set(names)) == len(names) and set(names) == set(given):
            return [given[name] for name in names]
    if not isinstance(spec.structure.template, Mapping):
        raise ValueError(
            f"{what} has the keys {list(given)}; the features are "
            f"{[f.name for f in spec.features]}."
        )
    return spec.structure.flatten(given, what)


def count_hot_rows(
    spec: EmbeddingSpec, batches: Iterable[Mapping[FeatureSpec, Bags]]
) -> dict[str, tuple[int, ...]]:
    """Finds the most frequent rows of tables whose `hot_rows` is a number.

    Returns the `hot_rows` most frequent ids, or fewer, by the table's name; of
    equally frequent ids the lower. Each batch has the ids of each lookup.
    """
    wanted = {t: t.hot_rows for t in spec.tables if isinstance(t.hot_rows, int)}
    counts = {t: np.zeros(t.vocabulary_size, np.int64) for t in wanted}
    for batch in batches:
        for feature, bags in batch.items():
            if feature.table in counts:
                ids = bags.values.astype(np.int64)
                np.add.at(counts[feature.table], ids, 1)
    found = {}
    for table, number in wanted.items():
        ids = np.flatnonzero(counts[table])
        order = np.argsort(-counts[table][ids], kind="stable")
        found[table.name] = tuple(ids[order[:number]].tolist())
    return found


def read(
    value: Any, feature: FeatureSpec, where: str, in_range: bool = True
) -> list[Bags]:
    """Reads the ids, or rows, of each of a feature's lookups.

    Args:
        value: a numpy array or a dense, ragged or sparse tensor; a list of ids;
            or a list with a list of ids for each sample. Dense ids of one
            dimension more than the feature's output_shape, or of two dimensions
            if there is no output_shape, are combined over the last one.
        feature: the feature.
        where: the value's place, for errors.
        in_range: whether ids must be in their table.

    Raises:
        ValueError: an id is out of its table, or the shape is wrong.
        TypeError: `value` is of another type, or ids are no integers.
    """
    where = f"{where}: {feature}"
    bags = _bags(value, feature, where)
    if feature.max_sequence_length:
        bags = _sequences(bags, feature.max_sequence_length)
    elif not feature.combined:
        bags = _alone(bags)
    if bags.values.size:
        _check(bags.values, feature, where, in_range)
    if feature.hashing is None and feature.padding_value is None:
        return [bags]
    return _rows(bags, feature)


def _bags(value: Any, feature: FeatureSpec, where: str) -> Bags:
    if isinstance(value, tf.compat.v1.SparseTensorValue):
        value = tf.SparseTensor(*value)
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        if value.shape.rank != 2:
            raise ValueError(
                f"{where}: ragged and sparse ids must have rank 2, got shape "
                f"{value.shape}."
            )
        if isinstance(value, tf.SparseTensor):
            value = tf.sparse.reorder(value)
            value = tf.RaggedTensor.from_value_rowids(
                value.values, value.indices[:, 0], value.dense_shape[0]
            )
        splits = value.row_splits.numpy().astype(np.int64)
        return Bags(value.values.numpy(), splits, 1, True)
    lists = value if isinstance(value, (list, tuple)) else ()
    try:
        lengths = [np.size(row) for row in lists]
        if len(set(lengths)) > 1:
            rows = [np.ravel(row) for row in lists if np.size(row)]
            splits = np.cumsum([0, *lengths], dtype=np.int64)
            return Bags(np.concatenate(rows), splits, 1, True)
        array = np.asarray(value)
    except ValueError as error:  # A sample has lists of several lengths.
        raise ValueError(f"{where}: {error}") from None
    if array.ndim == 0:
        raise ValueError(
            f"{where}: ids have no batch dimension, got {value!r}."
        )
    combined = array.ndim == (
        2 if feature.output_shape is None else len(feature.output_shape) + 1
    )
    per_sample = math.prod(array.shape[1:])
    bags = math.prod(array.shape[1:-1]) if combined else per_sample
    splits = np.arange(len(array) + 1, dtype=np.int64) * per_sample
    return Bags(array.reshape(-1), splits, bags, False)


def _sequences(bags: Bags, length: int) -> Bags:
    """The first `length` ids of each sample, each a bag."""
    sizes = np.diff(bags.splits)
    position = np.arange(bags.values.size) - np.repeat(bags.splits[:-1], sizes)
    lengths = np.minimum(sizes, length)
    ragged = bool((lengths < length).any())
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return Bags(bags.values[position < length], splits, length, ragged)


def _alone(bags: Bags) -> Bags:
    """The same ids, each with a vector of its own."""
    lengths = np.diff(bags.splits)
    return dataclasses.replace(
        bags,
        bags_per_sample=int(lengths.max(initial=1)),
        ragged=len(set(lengths)) > 1,
    )


def _rows(bags: Bags, feature: FeatureSpec) -> list[Bags]:
    """The rows of a feature's lookups, or its keys, without padding."""
    values = bags.values
    if not values.size:
        return [bags] * len(feature.lookups)
    ids = tf.constant(values.tolist() if values.dtype.kind in "US" else values)
    absent = hashed_rows.padding(feature, ids)
    there = np.ones(len(values), bool) if absent is None else ~absent.numpy()
    splits = np.concatenate([[0], np.cumsum(there)])[bags.splits]
    kept = dataclasses.replace(
        bags, splits=splits, ragged=bags.ragged or not there.all()
    )
    if feature.hashing is None:
        return [dataclasses.replace(kept, values=values[there])]
    if hashings.multiplies(feature.hashing):
        kept = _alone(kept)
    return [
        dataclasses.replace(kept, values=rows.numpy()[there])
        for rows in hashed_rows.rows(feature, ids)
    ]


def _check(
    values: np.ndarray, feature: FeatureSpec, where: str, in_range: bool
) -> None:
    table, count = feature.table, feature.num_ids
    of_strings = table.keys is not None and table.keys.dtype == tf.string
    integers = values.dtype.kind in "iu"
    strings = values.dtype.kind in "SUO" and all(
        isinstance(each, (str, bytes)) for each in values.flat
    )
    if not (strings if of_strings else integers or (count is None and strings)):
        wanted = "integers or strings" if count is None else "integers"
        raise TypeError(
            f"{where}: ids must be {'strings' if of_strings else wanted}, got "
            f"{values.dtype}."
        )
    if table.keys is not None or count is None or not in_range:
        return
    outside = (values < 0) | (values >= count)
    if feature.padding_value is not None:
        outside &= values != feature.padding_value
    wrong = values[outside]
    if wrong.size:
        raise ValueError(f"{where}: id {wrong[0]} is not in [0, {count}).")
