"""Rows of ids that are hashed, or that may be padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.hashing import Hash, PrefixNGrams, QuotientRemainder
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops import backend
from tfrs_embed.ops.checks import Checks, first, message
from tfrs_embed.ops.id_range import valid
from tfrs_embed.ops.parsed_ids import ParsedIds


def parts(
    parsed: ParsedIds, required: bool, checks: Checks, training: bool
) -> list[ParsedIds]:
    """Splits a feature's ids into the ids of its `bagged` features.

    Ids of a feature with padding become rows, -1 for absent ids. A hashed
    feature gives such rows of each lookup. If an id's rows are multiplied, the
    first part has the ids' positions, and each id is a bag of its own in the
    others. With `required`, ids outside of tables are an error, else absent.
    """
    feature = parsed.feature
    hashing = feature.hashing
    if feature.table.keys is not None or (
        hashing is None and feature.padding_value is None
    ):
        return [parsed]
    absent = padding(feature, parsed.ids)
    if feature.num_ids is not None:
        absent = _out_of_range(feature, parsed.ids, absent, required, checks)
    made = rows(feature, parsed.ids, absent, training)
    # Hashing makes no other -1.
    may_be_absent = feature.padding_value is not None or (
        not required and feature.num_ids is not None
    )
    parsed = dataclasses.replace(
        parsed, may_be_absent=may_be_absent, are_rows=True
    )
    if hashing is None or not hashings.multiplies(hashing):
        return [
            dataclasses.replace(parsed, feature=f, ids=each)
            for f, each in zip(feature.bagged, made, strict=True)
        ]
    static = parsed.ids.shape
    shape = (
        static.as_list() if static.is_fully_defined() else tf.shape(parsed.ids)
    )
    places = tf.reshape(tf.range(tf.size(parsed.ids)), shape)
    places = tf.ensure_shape(places, static)
    if absent is not None:
        places = tf.where(absent, -1, places)
    first, *others = feature.bagged
    return [
        dataclasses.replace(parsed, feature=first, ids=places),
        *(
            ParsedIds(
                f,
                each,
                None,
                None,
                shape,
                static,
                may_be_absent=may_be_absent,
                are_rows=True,
            )
            for f, each in zip(others, made, strict=True)
        ),
    ]


def rows(
    feature: FeatureSpec,
    ids: tf.Tensor,
    absent: tf.Tensor | None = None,
    training: bool = False,
) -> list[tf.Tensor]:
    """Returns the rows of a feature's ids, integers or, hashed, strings.

    The result has for each of the feature's lookups int64 of the ids' shape, -1
    where `absent` is true. `training` tells whether this is part of a training
    step, which is never exported.
    """
    hashing, size = feature.hashing, feature.table.vocabulary_size

    def hash_ids(buckets: int, *salts: Any) -> list[tf.Tensor]:
        return backend.operations(None, training).hash_ids(ids, buckets, salts)

    if hashing is None:
        made = [tf.cast(ids, tf.int64)]
    elif isinstance(hashing, QuotientRemainder):
        collisions = hashings.num_collisions(hashing, size)
        if hashing.hashed:
            [category] = hash_ids(hashing.num_categories, hashing.salt)
        else:
            category = tf.cast(ids, tf.int64)
        made = [category % collisions, collisions + category // collisions]
    elif isinstance(hashing, PrefixNGrams):
        # Other ids become absent, but a CPU's gather would fail at them.
        items = len(hashing.codes) - 1
        known = tf.clip_by_value(tf.cast(ids, tf.int64), 0, items)
        found = tf.gather(tf.constant(hashing.rows), known)
        made = tf.unstack(found, hashing.codes.shape[1], -1)
    elif isinstance(hashing, Hash):
        made = hash_ids(hashing.buckets or size, hashing.salt)
    else:
        salts: Any = hashing.salts
        made = hash_ids(hashing.buckets or size, *salts)
    if absent is None:
        return made
    nothing = tf.constant(-1, tf.int64)
    return [tf.where(absent, nothing, each) for each in made]


def padding(feature: FeatureSpec, ids: tf.Tensor) -> tf.Tensor | None:
    """Returns which ids are padding, bool of their shape; None: none can be.

    Raises:
        TypeError: ids are integers and the padding value is a string, or vice
            versa.
    """
    value = feature.padding_value
    if value is None or ids.shape.num_elements() == 0:
        return None  # Empty lists have any dtype.
    strings = ids.dtype == tf.string
    if strings != isinstance(value, str):
        raise TypeError(
            f"{feature}: ids of {ids.dtype.name} can't have "
            f"padding_value={value!r}."
        )
    if not strings and not ids.dtype.min <= value <= ids.dtype.max:
        return None
    return tf.equal(ids, tf.constant(value, ids.dtype))


def _out_of_range(
    feature: FeatureSpec,
    ids: tf.Tensor,
    absent: tf.Tensor | None,
    required: bool,
    checks: Checks,
) -> tf.Tensor:
    """Returns which ids are absent: padding, or not a category or a row."""
    hashing, count = feature.hashing, feature.num_ids
    assert count is not None
    allowed = f"valid ids are 0 to {count - 1}"
    if isinstance(hashing, QuotientRemainder):
        allowed = f"its QuotientRemainder has num_categories={count}, {allowed}"
        allowed += ". With hashed=True any are."
    elif isinstance(hashing, PrefixNGrams):
        allowed = f"its PrefixNGrams has codes of {count} items, {allowed}."
    else:
        allowed = f"the table has {count} rows, {allowed} and "
        allowed += f"padding_value={feature.padding_value}."
    inside = valid(ids, count)
    wrong = tf.logical_not(inside)
    if absent is not None:
        wrong = wrong & tf.logical_not(absent)
    if required:
        checks.require(
            tf.logical_not(tf.reduce_any(wrong)),
            lambda: message(
                f"{feature}: id ",
                first(tf.reshape(ids, [-1]), tf.reshape(wrong, [-1])),
                f" is out of range; {allowed}",
            ),
        )
    return wrong if absent is None else wrong | absent
