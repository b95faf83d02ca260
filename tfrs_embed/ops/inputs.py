"""Turns a call's ids and weights into bags: parse, validate, group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfrs_embed.compat import strategies
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops import hashed_rows
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.parsed_ids import ParsedIds, parse_ids
from tfrs_embed.ops.validation import UncheckedIds


@dataclasses.dataclass(frozen=True)
class CallInputs:
    """A call's features, with their ids and weights.

    Attributes:
        features: the features.
        ids: each feature's ids, integers, or strings if hashed: a Tensor (or a
            value that converts to one) of any rank, a RaggedTensor of rank 2,
            or a SparseTensor of rank 2 in row-major order.
        weights: each feature's weights or None: kind and shape as the ids, with
            the same row splits or indices.
        invalid_ids: "error", or "zero" to leave out ids outside [0,
            vocabulary_size).
        training: whether this is part of a training step.
        shapes: each feature's declared shape of ids, or None; empty: none is
            declared.
        places: the features' indices among the layer's.
    """

    features: Sequence[FeatureSpec]
    ids: Sequence[Any]
    weights: Sequence[Any]
    invalid_ids: str = "error"
    training: bool = False
    shapes: Sequence[InputShape | None] = ()
    places: Sequence[int] = ()

    @property
    def lookups(self) -> list[FeatureSpec]:
        """The features' lookups, one feature after the other."""
        return [each for feature in self.features for each in feature.lookups]


def to_bags(inputs: CallInputs) -> list[BaggedIds]:
    """Turns a call's ids into bags.

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
    return _parse(inputs, Checks()).validate()


def unchecked(inputs: CallInputs, consensus: Consensus) -> UncheckedIds:
    """Parses the ids of one of several replicas; see `to_bags`.

    `consensus` decides with the other replicas whether all ids are valid.
    """
    strategies.refuse_in_xla("Tables of several replicas")
    ids = _parse(inputs, Checks(consensus))
    ids.flatten()
    return ids


def _parse(inputs: CallInputs, checks: Checks) -> UncheckedIds:
    """Parses a call's ids, and collects conditions on their values."""
    parsed: list[ParsedIds] = []
    required, training = inputs.invalid_ids == "error", inputs.training
    shapes = inputs.shapes or [None] * len(inputs.features)
    for feature, ids, weights, shape in zip(
        inputs.features, inputs.ids, inputs.weights, shapes, strict=True
    ):
        if shape is not None:
            shape.require(feature, ids, checks)
        each = parse_ids(feature, ids, weights, checks)
        if shape is not None and each.max_bag_size is None:
            each.max_bag_size = shape.width
        if not required and each.is_number:
            each.may_be_absent = True
        parsed += hashed_rows.parts(each, required, checks, training)
    return UncheckedIds(parsed, checks, required, training)


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
