"""Parses ids and weights of any kind into one form, `ParsedIds`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.strategies import refuse_in_xla
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import bag_of_id, is_recorded
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.id_range import valid
from tfrs_embed.ops.input_checks import (
    as_integers,
    require_output_shape,
    require_splits,
    sparse_order,
    weights_like,
)
from tfrs_embed.ops.key_inputs import as_int64
from tfrs_embed.ops.tensors import to_tensor


@dataclasses.dataclass
class ParsedIds:
    """A feature's parsed ids, before they are grouped into bags.

    Attributes:
        feature: the feature.
        ids: n integers, of any shape until `flatten`.
        bag_ids, splits: as in `BaggedIds`.
        weights: float32, [n], or the values from which `kept` selects [n]; or
            None.
        shape: [rank], the bags' layout: a list if known when tracing, else an
            int32 tensor.
        static_shape: the layout as far as it is known when tracing.
        max_bag_size: the most ids of a bag, and every bag's number of ids if
            the bags are `even`; None: unknown.
        kept: [n], the ids' positions among the weights; None: all, in order.
        may_be_absent: whether ids may be absent: ids outside the table, -1
            among rows, and the padding among keys.
        padding_key: the key that is padding, a scalar int64, or None.
        are_rows: whether ids are rows already, by hashing or by a check, so
            that they aren't checked again.
        combined: whether the table's combiner makes one vector of a bag's ids.
            Else each id has a vector, which its weight multiplies.
        all_valid: as in `BaggedIds`.
    """

    feature: FeatureSpec
    ids: tf.Tensor
    bag_ids: tf.Tensor | None
    weights: tf.Tensor | None
    shape: Any
    static_shape: tf.TensorShape
    max_bag_size: int | None = 1
    kept: tf.Tensor | None = None
    splits: tf.Tensor | None = None
    may_be_absent: bool = False
    padding_key: tf.Tensor | None = None
    are_rows: bool = False
    combined: bool = False
    all_valid: tf.Tensor | None = None

    def flatten(self, shape: Any = (-1,)) -> None:
        """Reshapes the ids to [n]; features may share the shape, [-1]."""
        if self.ids.shape.rank != 1:
            self.ids = tf.reshape(self.ids, shape)

    @property
    def even(self) -> bool:
        """Whether every bag has `max_bag_size` ids."""
        return self.bag_ids is None and self.splits is None

    @property
    def is_number(self) -> bool:
        """Whether the ids are row numbers from the user, which need a check."""
        return self.feature.table.keys is None and not self.are_rows

    @property
    def learns(self) -> bool:
        """Whether a gradient tape records the weights."""
        return self.weights is not None and is_recorded(self.weights)

    def present(self) -> tf.Tensor:
        """Returns which ids are not absent, [n] bool."""
        if self.padding_key is not None:
            return tf.not_equal(self.ids, self.padding_key)
        if self.are_rows:
            return self.ids >= 0
        return valid(self.ids, self.feature.table.vocabulary_size)


def parse_ids(
    feature: FeatureSpec, ids: Any, weights: Any, checks: Checks
) -> ParsedIds:
    """Checks and parses a feature's ids and weights; see `to_bags`.

    The result is valid once `checks` hold.
    """
    if feature.table.storage is not None:
        refuse_in_xla(f"{feature}: tables in files")
    keys, padding = feature.table.keys, feature.padding_value
    if keys is not None:
        refuse_in_xla(f"{feature}: tables with DynamicKeys")
        ids = as_int64(feature, keys.dtype, ids, checks, padding == "")
    ids = to_tensor(ids, f"{feature}: ids")
    in_rows = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    ids = as_integers(feature, ids, checks)
    parse = _parse_rows if in_rows else _parse_dense
    parsed = parse(feature, ids, weights, checks)
    if keys is not None and padding is not None:
        constant = tf.constant(padding, keys.dtype)
        parsed.padding_key = as_int64(
            feature, keys.dtype, constant, checks, True
        )
        parsed.may_be_absent = True
    return parsed


def _parse_dense(
    feature: FeatureSpec, ids: Any, weights: Any, checks: Checks
) -> ParsedIds:
    weights = weights_like(feature, ids, weights, checks)
    static = ids.shape
    fixed = static.is_fully_defined()
    shape: Any = static.as_list() if fixed else tf.shape(ids)
    wanted = feature.output_shape
    length = feature.max_sequence_length
    if length and wanted is None and static.rank != 2:
        raise ValueError(
            f"{feature}: dense ids of a sequence (max_sequence_length={length})"
            f" must have the shape [batch, k], got {static}."
        )
    if length and static.rank == 2 and static[1] != length:
        return _parse_sequence(feature, ids, weights, checks)
    if weights is not None:
        weights = tf.reshape(weights, [-1])
    if wanted is None:
        return ParsedIds(feature, ids, None, weights, shape, static)
    rank = static.rank
    if rank is None or rank not in (len(wanted), len(wanted) + 1):
        hint = " tf.ensure_shape gives them a shape." if rank is None else ""
        raise ValueError(
            f"{feature}: dense ids must have output_shape {list(wanted)}, or "
            f"one more dimension to combine over; got {static}.{hint}"
        )
    outer, laid_out = shape[: len(wanted)], static[: len(wanted)]
    require_output_shape(feature, checks, outer, laid_out)
    laid_out = laid_out.merge_with(tf.TensorShape(wanted))
    # A sample with one id is a bag, too, where all samples are combined.
    several = rank > len(wanted)
    parsed = ParsedIds(feature, ids, None, weights, outer, laid_out)
    parsed.combined = several or (feature.by_sample and not length)
    if not several:
        return parsed
    # Bags of unknown length, or without ids, are not even.
    parsed.max_bag_size = static[-1] or None
    if parsed.max_bag_size is None:
        bags = tf.range(tf.reduce_prod(outer))
        parsed.bag_ids = tf.repeat(bags, shape[-1])
    return parsed


def _parse_sequence(
    feature: FeatureSpec, ids: tf.Tensor, weights: Any, checks: Checks
) -> ParsedIds:
    """Parses dense ids, [batch, k], as sequences of another length than k."""
    length = feature.max_sequence_length
    ids, static = ids[:, :length], ids.shape
    rows, width = tf.unstack(tf.shape(ids))
    laid_out = tf.TensorShape([static[0], length])
    shape: Any = [static[0], length]
    if static[0] is None:
        shape = tf.stack([rows, length])
    if feature.output_shape is not None:
        require_output_shape(feature, checks, shape, laid_out)
        laid_out = laid_out.merge_with(feature.output_shape)
    if weights is not None:
        weights = tf.ensure_shape(weights, static)[:, :length]
        weights = tf.reshape(weights, [-1])
    parsed = ParsedIds(feature, ids, None, weights, shape, laid_out)
    if ids.shape[1] != length:
        position = tf.range(rows)[:, None] * length + tf.range(width)
        parsed.bag_ids = tf.reshape(position, [-1])
    return parsed


def _parse_rows(
    feature: FeatureSpec,
    ids: tf.RaggedTensor | tf.SparseTensor,
    weights: Any,
    checks: Checks,
) -> ParsedIds:
    ragged = isinstance(ids, tf.RaggedTensor)
    _require_rows(feature, ids)
    row: Any = None
    column: Any = None
    splits = None
    rows = ids.shape[0]
    static = tf.TensorShape([rows])
    if ragged:
        splits = tf.cast(ids.row_splits, tf.int32)
        rows = tf.size(splits) - 1 if rows is None else rows
    else:
        row, column = tf.unstack(ids.indices, num=2, axis=1)
        row, column = tf.cast(row, tf.int32), tf.cast(column, tf.int32)
        if rows is None:
            refuse_in_xla(f"{feature}: sparse ids of an unknown number of rows")
            rows, _ = tf.unstack(tf.cast(ids.dense_shape, tf.int32), num=2)
        checks.require_together(sparse_order, None, (feature, ids))
    weights = weights_like(feature, ids, weights, checks)
    if not feature.combined:
        values = ids.values
        if ragged:
            require_splits(feature, ids, checks)
        fixed = values.shape.is_fully_defined()
        shape = values.shape.as_list() if fixed else tf.shape(values)
        return ParsedIds(feature, values, None, weights, shape, values.shape)
    parsed = ParsedIds(
        feature,
        ids.values,
        row,
        weights,
        [rows] if static[0] is not None else tf.expand_dims(rows, 0),
        static,
        max_bag_size=None,
        splits=splits,
        combined=True,
    )
    wanted, length = feature.output_shape, feature.max_sequence_length
    if wanted in (None, (None,)) and not length:
        return parsed
    wanted = wanted or (static[0], length)
    rows = tf.convert_to_tensor(rows)
    if _is_sequence(feature, wanted, static[0]):
        return _as_sequences(parsed, rows, column, wanted, checks)
    return _in_output_shape(parsed, rows, wanted, checks)


def _require_rows(
    feature: FeatureSpec, ids: tf.RaggedTensor | tf.SparseTensor
) -> None:
    """Requires ragged or sparse ids to be rows of ids."""
    if ids.shape.rank != 2:
        kind, layout = "sparse", "columns"
        if isinstance(ids, tf.RaggedTensor):
            kind, layout = "ragged", "None"
        hint = (
            " Look up ids.values, and put the vectors into the rows with "
            "ids.with_values(vectors)."
            if kind == "ragged"
            else " A sparse Input of rows has the shape [None]."
        )
        raise ValueError(
            f"{feature}: {kind} ids must have rank 2, [batch, {layout}], got "
            f"shape {ids.shape}.{hint}"
        )


def _as_sequences(
    parsed: ParsedIds,
    rows: tf.Tensor,
    column: tf.Tensor | None,
    wanted: tuple[int | None, ...],
    checks: Checks,
) -> ParsedIds:
    """Makes sequences, [batch, length], of ragged or sparse rows of ids.

    `column` has the ids' positions in their rows, of sparse ids.
    """
    feature, row = parsed.feature, parsed.bag_ids
    refuse_in_xla(f"{feature}: sequences of ragged or sparse ids")
    if row is None:
        row = bag_of_id(parsed.splits)
        column = tf.range(tf.size(row)) - tf.gather(parsed.splits, row)
    length = wanted[1] or 0
    static = parsed.static_shape + tf.TensorShape([length])
    shape = tf.stack([rows, length])
    require_output_shape(feature, checks, shape, static, wanted)
    kept = tf.where(tf.less(column, length))[:, 0]
    return ParsedIds(
        feature,
        tf.gather(parsed.ids, kept),
        tf.gather(row * length + column, kept),
        parsed.weights,
        shape,
        static.merge_with([wanted[0], length]),
        kept=None if parsed.weights is None else kept,
    )


def _in_output_shape(
    parsed: ParsedIds,
    rows: tf.Tensor,
    wanted: tuple[int | None, ...],
    checks: Checks,
) -> ParsedIds:
    """Fills output_shape with rows in order; infers one unknown dimension."""
    feature = parsed.feature
    shape = tf.stack([-1 if d is None else d for d in wanted])
    if sum(d is None for d in wanted) > 1:
        raise ValueError(
            f"{feature}: output_shape={list(wanted)} of ragged or sparse ids "
            "must not have more than one unknown dimension."
        )
    known = int(np.prod([d for d in wanted if d is not None]))
    if None in wanted:
        ok, need = rows % known == 0, f"a multiple of {known}"
        shape = tf.where(shape < 0, rows // known, shape)
    else:
        ok, need = tf.equal(rows, known), f"{known}"
    checks.require(
        ok,
        lambda: message(
            f"{feature}: output_shape={list(wanted)} needs {need} rows of "
            "ids, got ",
            rows,
            ".",
        ),
    )
    parsed.shape, parsed.static_shape = shape, tf.TensorShape(wanted)
    return parsed


def _is_sequence(
    feature: FeatureSpec,
    wanted: tuple[int | None, ...],
    static_rows: int | None,
) -> bool:
    """Whether each row is a sequence, of the output [batch, length]."""
    if len(wanted) != 2 or wanted[1] is None:
        return False
    if feature.sequences is not None:
        return feature.sequences
    if static_rows is None or wanted[0] is None:
        return True
    return static_rows != wanted[0] * wanted[1] or wanted[1] == 1
