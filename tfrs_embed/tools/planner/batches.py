"""Reads batches of ids in any form as arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.hashing import QuotientRemainder
from tfrs_embed.configs.tables import FeatureSpec
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
        last = min(first + size, self.samples)
        splits = self.splits[first : last + 1]
        return dataclasses.replace(
            self,
            values=self.values[splits[0] : splits[-1]],
            splits=splits - splits[0],
        )


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
        ValueError: an id is out of its table, or there is no batch dimension.
        TypeError: `value` is of another type, or ids are no integers.
    """
    where = f"{where}: {feature}"
    if isinstance(value, tf.RaggedTensor):
        bags = _ragged(value, where)
    elif isinstance(value, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
        bags = _sparse(value)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(row, (list, tuple, np.ndarray)) for row in value
    ):
        bags = _lists(value, where)
    else:
        bags = _dense(value, feature, where)
    if feature.max_sequence_length:
        bags = _sequences(bags, feature.max_sequence_length)
    _check(bags.values, feature, where, in_range)
    return [bags] if feature.hashing is None else _hashed(bags, feature)


def _ragged(value: tf.RaggedTensor, where: str) -> Bags:
    outer = np.asarray(value.row_splits, np.int64)
    inner = 1
    splits = outer
    nested = value.values
    while isinstance(nested, tf.RaggedTensor):
        # A bag is an innermost row.
        rows = np.diff(splits)
        inner = int(rows.max(initial=1))
        splits = np.asarray(nested.row_splits, np.int64)[splits]
        nested = nested.values
    values = np.asarray(nested)
    if values.ndim != 1:
        raise ValueError(
            f"{where}: ids of a ragged tensor must end with the ragged "
            f"dimension, got the shape {value.shape}."
        )
    return Bags(values, splits, inner, True)


def _sparse(value: Any) -> Bags:
    indices = np.asarray(value.indices, np.int64)
    shape = np.asarray(value.dense_shape, np.int64)
    order = np.argsort(indices[:, 0], kind="stable")
    lengths = np.bincount(indices[:, 0], minlength=int(shape[0]))
    splits = np.concatenate([[0], np.cumsum(lengths)])
    values = np.asarray(value.values)[order]
    return Bags(values, splits, math.prod(shape[1:-1]), True)


def _lists(value: Any, where: str) -> Bags:
    rows = []
    for i, row in enumerate(value):
        array = np.asarray(row) if len(row) else np.zeros(0, np.int64)
        if array.ndim != 1:
            raise ValueError(
                f"{where}: sample {i} must be a list of ids, got {row!r}."
            )
        rows.append(array)
    lengths = [len(row) for row in rows]
    filled = [row for row in rows if len(row)] or rows[:1]
    splits = np.cumsum([0, *lengths], dtype=np.int64)
    return Bags(np.concatenate(filled), splits, 1, len(set(lengths)) > 1)


def _dense(value: Any, feature: FeatureSpec, where: str) -> Bags:
    array = np.asarray(value)
    if array.dtype == object and not _has_strings(array):
        raise TypeError(
            f"{where}: ids must be an array, a tensor, a list of ids or a list "
            f"of lists of ids, got {type(value).__name__}."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{where}: ids have no batch dimension, got {value!r}."
        )
    combined = array.ndim == (
        2 if feature.output_shape is None else len(feature.output_shape) + 1
    )
    per_sample = math.prod(array.shape[1:])
    bags = math.prod(array.shape[1:-1]) if combined else per_sample
    splits = np.arange(array.shape[0] + 1, dtype=np.int64) * per_sample
    return Bags(array.reshape(-1), splits, bags, False)


def _sequences(bags: Bags, length: int) -> Bags:
    """The first `length` ids of each sample, each a bag."""
    position = np.arange(bags.values.size) - np.repeat(
        bags.splits[:-1], np.diff(bags.splits)
    )
    lengths = np.minimum(np.diff(bags.splits), length)
    ragged = bool((lengths < length).any())
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return Bags(bags.values[position < length], splits, length, ragged)


def _hashed(bags: Bags, feature: FeatureSpec) -> list[Bags]:
    """The rows of a hashed feature's lookups."""
    values = bags.values
    if not values.size:
        return [bags] * len(feature.lookups)
    if values.dtype.kind in "US":
        values = values.astype(object)
    ids = tf.constant(values, tf.string if values.dtype == object else None)
    absent = hashed_rows.padding(feature, ids)
    there = np.ones(len(values), bool) if absent is None else ~absent.numpy()
    splits = np.concatenate([[0], np.cumsum(there)])[bags.splits]
    kept = dataclasses.replace(
        bags, splits=splits, ragged=bags.ragged or not there.all()
    )
    if hashings.multiplies(feature.hashing):
        # Each id has a vector.
        lengths = np.diff(splits)
        kept = dataclasses.replace(
            kept,
            bags_per_sample=int(lengths.max(initial=1)),
            ragged=len(set(lengths)) > 1,
        )
    return [
        dataclasses.replace(kept, values=rows.numpy()[there])
        for rows in hashed_rows.rows(feature, ids)
    ]


def _has_strings(array: np.ndarray) -> bool:
    return all(isinstance(each, (str, bytes)) for each in array.flat)


def _check(
    values: np.ndarray, feature: FeatureSpec, where: str, in_range: bool
) -> None:
    if not values.size:
        return
    table, hashing = feature.table, feature.hashing
    any_id = hashing is not None and hashings.takes_any_id(hashing)
    integers = values.dtype.kind in "iu"
    strings = values.dtype.kind in "SU" or (
        values.dtype == object and _has_strings(values)
    )
    if table.keys is not None and table.keys.dtype == tf.string:
        wanted, valid = "keys must be strings", strings
    elif any_id:
        wanted = "ids must be integers or strings"
        valid = integers or strings
    else:
        wanted, valid = "ids must be integers", integers
    if not valid:
        raise TypeError(f"{where}: {wanted}, got {values.dtype}.")
    if table.keys is not None or any_id or not in_range:
        return
    count = (
        hashing.num_categories
        if isinstance(hashing, QuotientRemainder)
        else table.vocabulary_size
    )
    outside = (values < 0) | (values >= count)
    if hashing is not None and hashing.padding_value is not None:
        outside &= values != hashing.padding_value
    wrong = values[outside]
    if wrong.size:
        raise ValueError(f"{where}: id {wrong[0]} is not in [0, {count}).")
