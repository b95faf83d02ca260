"""Turns a call's ids and weights into bags: parse, validate, group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfrs_embed.compat import strategies
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops import hashed_rows
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Checks, Consensus, EarlyLookup
from tfrs_embed.ops.grouping import Layouts, group
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.parsed_ids import ParsedIds, parse_ids
from tfrs_embed.ops.validation import flatten, guard, validate


@dataclasses.dataclass(frozen=True)
class UncheckedIds:
    """A call's parsed ids, whose validity replicas have yet to agree on.

    Attributes:
        parsed: the ids of each feature's `bagged` features.
        checks: the conditions that have to hold.
        layouts: the layouts of bags.
    """

    parsed: Sequence[ParsedIds]
    checks: Checks
    layouts: Layouts

    def bags(self) -> list[BaggedIds]:
        """Groups the ids as they are to be looked up, without weights."""
        bags = group(self.parsed, self.layouts, bare=True)
        return [
            bag.one_by_one() if each.learns else bag
            for bag, each in zip(bags, self.parsed, strict=True)
        ]

    def agree(self, early: EarlyLookup | None) -> tuple[list[BaggedIds], Any]:
        """Returns the bags, and what `early.finish` returns, of valid ids."""
        agreed = guard(self.parsed, self.checks, early)
        begun = early.finish(*agreed) if early else None
        return group(self.parsed, self.layouts), begun


def to_bags(
    features: Sequence[FeatureSpec],
    ids: Sequence[Any],
    weights: Sequence[Any],
    invalid_ids: str = "error",
    training: bool = False,
    input_shapes: Sequence[InputShape | None] | None = None,
) -> list[BaggedIds]:
    """Turns a call's ids into bags.

    Args:
        features: the features.
        ids: each feature's ids, integers, or strings if hashed: a Tensor (or a
            value that converts to one) of any rank, a RaggedTensor of rank 2,
            or a SparseTensor of rank 2 in row-major order.
        weights: each feature's weights or None: kind and shape as the ids, with
            the same row splits or indices.
        invalid_ids: "error", or "zero" to leave out ids outside [0,
            vocabulary_size).
        training: whether this is part of a training step.
        input_shapes: each feature's declared shape of ids, or None.

    Returns:
        The bags of each feature's `bagged` features, feature after feature. In
        a traced function they exist only if all ids are valid.

    Raises:
        TypeError: ids or weights of a wrong dtype or kind.
        ValueError: ids or weights of a wrong rank or static shape.
        tf.errors.InvalidArgumentError: wrong values; raised at once when
            executing eagerly, else by the running graph.
        NotImplementedError: XLA can't compile it; see `ops.xla`.
    """
    checks, layouts = Checks(), Layouts()
    parsed = _parse(
        features, ids, weights, invalid_ids, training, input_shapes, checks
    )
    validate(parsed, invalid_ids, checks, training, layouts)
    return group(parsed, layouts)


def unchecked(
    consensus: Consensus,
    features: Sequence[FeatureSpec],
    ids: Sequence[Any],
    weights: Sequence[Any],
    invalid_ids: str = "error",
    training: bool = False,
    input_shapes: Sequence[InputShape | None] | None = None,
) -> UncheckedIds:
    """Parses the ids of one of several replicas; see `to_bags`.

    `consensus` decides with the other replicas whether all ids are valid.
    """
    strategies.refuse_in_xla("Tables of several replicas")
    checks, layouts = Checks(consensus), Layouts()
    parsed = _parse(
        features, ids, weights, invalid_ids, training, input_shapes, checks
    )
    flatten(parsed, invalid_ids, checks, training, layouts)
    return UncheckedIds(parsed, checks, layouts)


def _parse(
    features: Sequence[FeatureSpec],
    ids: Sequence[Any],
    weights: Sequence[Any],
    invalid_ids: str,
    training: bool,
    input_shapes: Sequence[InputShape | None] | None,
    checks: Checks,
) -> list[ParsedIds]:
    """Parses a call's ids, and collects conditions on their values."""
    parsed: list[ParsedIds] = []
    shapes = input_shapes or [None] * len(features)
    for feature, feature_ids, feature_weights, input_shape in zip(
        features, ids, weights, shapes, strict=True
    ):
        if input_shape is not None:
            input_shape.require(feature, feature_ids, checks)
        each = parse_ids(feature, feature_ids, feature_weights, checks)
        if input_shape is not None and each.max_bag_size is None:
            each.max_bag_size = input_shape.width
        if invalid_ids == "zero" and each.is_number:
            each.may_be_absent = True
        parsed += hashed_rows.parts(each, invalid_ids, checks, training)
    return parsed


def lookup_bags(
    features: Sequence[FeatureSpec], bags: Sequence[BaggedIds]
) -> list[BaggedIds]:
    """Selects the bags of the features' lookups from those of `to_bags`."""
    bagged = [(f, each) for f in features for each in f.bagged]
    return [
        b
        for (feature, each), b in zip(bagged, bags, strict=True)
        if each in feature.lookups
    ]


def first_bags(
    features: Sequence[FeatureSpec], bags: Sequence[BaggedIds]
) -> list[BaggedIds]:
    """Returns the bags whose layout each feature's activations have."""
    rest = iter(bags)
    of_features = [[next(rest) for _ in f.bagged] for f in features]
    return [first for first, *_ in of_features]
