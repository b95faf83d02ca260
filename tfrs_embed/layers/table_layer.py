"""Lookups of a configuration's features, whatever holds their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed import strategies
from tfrs_embed._tensorflow import record
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.distribution import handshake
from tfrs_embed.engines.engine import FixedBatches
from tfrs_embed.layers import hashed_features, keras_tables
from tfrs_embed.layers.base import ChangeIds
from tfrs_embed.layers.table_holder import TableHolder
from tfrs_embed.ops.bags import BaggedIds, position_mask
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.inputs import first_bags, lookup_bags, to_bags
from tfrs_embed.ops.lookup import combine, reshape_output
from tfrs_embed.ops.tpu_inputs import require_given, require_known
from tfrs_embed.serving import tables as served_tables
from tfrs_embed.serving.tables import ServedTables
from tfrs_embed.strategies import is_tpu, on_host


class TableLayer(TableHolder):
    """Holds a configuration's tables and looks its features up.

    A layer made of it says where each table goes, with `_place`, and calls
    `_lookup`.

    Args:
        **kwargs: those of every Keras layer.
    """

    if TYPE_CHECKING:
        # To a type checker Keras's own is Any.
        def __call__(
            self,
            inputs: Any,
            weights: Any = None,
            *,
            training: bool | None = None,
            partial: bool = False,
        ) -> Any:
            """Looks the features up; see the class."""

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        features, structure = self._spec.features, self._spec.structure
        given = structure.flatten(inputs, "inputs", partial=True)
        changed = [
            None if ids is None else change(ids, _dtype(f), self._is_ragged(i))
            for i, (f, ids) in enumerate(zip(features, given, strict=True))
        ]
        return structure.pack(changed, [ids is not None for ids in given])

    def _lookup(
        self,
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool | None,
        input_shapes: Sequence[InputShape | None] | None = None,
        partial: bool = False,
    ) -> Any:
        """Looks the features up.

        Args:
            ids: each feature's ids.
            weights: each feature's weights, or None.
            training: whether this is a training step.
            input_shapes: what shape each feature's ids must have.
            partial: whether features whose ids are None are left out.

        Returns:
            The features' nesting of their activations in their output shapes,
            in the layer's compute dtype; without those that are left out.
        """
        strategies.check(self.name, self._strategy)
        given = [
            i for i in range(len(ids)) if not partial or ids[i] is not None
        ]
        self._check_given(given, weights)
        self._note_kinds({i: ids[i] for i in given})
        features = [self._spec.features[i] for i in given]
        vectors = self._lookup_features(
            features,
            [ids[i] for i in given],
            [weights[i] for i in given],
            training,
            input_shapes and [input_shapes[i] for i in given],
        )
        outputs: list[Any] = [None] * len(ids)
        for i, vector in zip(given, vectors, strict=True):
            outputs[i] = vector
        present = [i in given for i in range(len(ids))]
        return self._spec.structure.pack(outputs, present)

    def _check_given(self, given: list[int], weights: Sequence[Any]) -> None:
        """Checks what a call leaves out, by the features that it has."""
        features = self._spec.features
        if not given:
            raise ValueError(
                f"Layer '{self.name}': a call with partial=True needs ids for "
                f"at least one of {[f.name for f in features]}."
            )
        for i, feature in enumerate(features):
            if i not in given and weights[i] is not None:
                raise ValueError(f"{feature}: weights without ids.")
        engine = self._engine_layer.engine if self._engine_layer else None
        if engine is not None and len(given) < len(features):
            there = [i in given for i in self._engine_features()]
            if any(there) and not all(there):
                strategies.refuse_in_xla(
                    f"Layer '{self.name}': calls with partial=True"
                )
                if isinstance(engine, FixedBatches):
                    engine.require_all(there)

    def _engine_features(self) -> list[int]:
        """The index of the feature that each of the engine's belongs to."""
        return [
            i
            for i, f in enumerate(self._spec.features)
            if self._keras_layer(f.table.name) is None
            for _ in f.lookups
        ]

    def _lookup_features(
        self,
        features: Sequence[FeatureSpec],
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool | None,
        input_shapes: Sequence[InputShape | None] | None,
    ) -> list[tf.Tensor]:
        """Looks some of the features up, or all; see `_lookup`."""
        served = served_tables.current()
        if served is not None:
            return self._lookup_served(
                served, features, ids, weights, input_shapes
            )
        if (
            training is None
            and self._engine_layer is not None
            and self._engine_layer.engine.gives_rows
        ):
            # Such a call is a training step: its gradient updates the tables.
            training = record.could_possibly_record()
        self._make_tables_if_ready()
        if self._engine_layer is None and not self._compared:
            # Engines do so themselves.
            self._compared = True
            handshake.compare_actions_under(
                self._strategy, f"a lookup of Layer '{self.name}'"
            )
        engine = self._engine_layer.engine if self._engine_layer else None
        consensus = None
        if engine is not None and engine.together is not None:
            consensus = engine.together.consensus(bool(training))
        all_bags = self._to_bags(
            features, ids, weights, training, input_shapes, consensus
        )
        lookups = [each for feature in features for each in feature.lookups]
        bags = lookup_bags(features, all_bags)
        found = self._lookup_in_engine(
            lookups, bags, training, consensus and consensus.begun
        )
        for i, lookup in enumerate(lookups):
            layer = self._keras_layer(lookup.table.name)
            if layer is not None:
                vectors = keras_tables.lookup(
                    self._front.variable(layer.embeddings),
                    bags[i],
                    self._strategy,
                )
                found[i] = tf.cast(
                    reshape_output(vectors, bags[i], lookup.table.dim),
                    self.compute_dtype,
                )
        outputs = hashed_features.compose(
            features, all_bags, found, self._strategy
        )
        _mask(features, outputs, all_bags)
        return outputs

    def _to_bags(
        self,
        features: Sequence[FeatureSpec],
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool | None,
        input_shapes: Sequence[InputShape | None] | None,
        consensus: Consensus | None,
    ) -> list[BaggedIds]:
        """Checks ids and weights where the layer is called; see `_lookup`."""
        in_tpu = is_tpu(self._strategy) and strategies.in_replica(
            self._strategy
        )
        if in_tpu:
            for feature, *both in zip(features, ids, weights, strict=True):
                hashed_features.require_for_tpu(feature, both[0])
                for kind, each in zip(("ids", "weights"), both, strict=True):
                    require_given(f"{feature}: {kind}", each)
        bags = on_host(
            to_bags,
            features,
            ids,
            weights,
            self._arguments.invalid_ids,
            consensus,
            bool(training),
            input_shapes,
        )
        if in_tpu:
            bagged = [each for feature in features for each in feature.bagged]
            for feature, its_bags in zip(bagged, bags, strict=True):
                require_known(feature, its_bags)
        return bags

    def _lookup_in_engine(
        self,
        features: Sequence[FeatureSpec],
        bags: Sequence[BaggedIds],
        training: bool | None,
        begun: Any,
    ) -> list[Any]:
        """Looks up the features that the engine has.

        Creates all tables, if it wasn't known before what they need.

        Args:
            features: the lookups of the call's features.
            bags: their bags.
            training: whether this is a training step.
            begun: what the consensus on the bags has begun of the lookup.

        Returns:
            The features' activations; None for those of Keras layers.
        """
        outputs: list[Any] = [None] * len(features)
        if self._engine_layer is None:
            self._ensure_tables()
            return outputs
        engine = self._engine_layer.engine
        index = {id(feature): i for i, feature in enumerate(features)}
        by_engine = [index.get(id(f)) for f in engine.features]
        its_bags = [None if i is None else bags[i] for i in by_engine]
        if isinstance(engine, FixedBatches):
            engine.observe_batch(its_bags)
        self._ensure_tables()
        if all(i is None for i in by_engine):
            return outputs
        # Features that are left out take part without ids: all replicas, and
        # the forward and backward pass, exchange the same tables' rows.
        found = self._engine_layer.look_up(
            [
                BaggedIds.none(f) if b is None else b
                for f, b in zip(engine.features, its_bags, strict=True)
            ],
            training,
            begun,
        )
        for i, output in zip(by_engine, found, strict=True):
            if i is not None:
                outputs[i] = output
        return outputs

    def _compute_masks(self, ids: Sequence[Any]) -> Any:
        """The nesting of the given ids' masks, None for what is no sequence."""
        masks: list[tf.Tensor | None] = []
        for feature, each in zip(self._spec.features, ids, strict=True):
            mask = None
            if feature.max_sequence_length and each is not None:
                bags, *_ = on_host(
                    to_bags,
                    [feature],
                    [each],
                    [None],
                    self._arguments.invalid_ids,
                )
                mask = on_host(position_mask, bags)
            masks.append(mask)
        return self._spec.structure.pack(masks, [i is not None for i in ids])

    def _lookup_served(
        self,
        served: ServedTables,
        features: Sequence[FeatureSpec],
        ids: Sequence[Any],
        weights: Sequence[Any],
        input_shapes: Sequence[InputShape | None] | None,
    ) -> list[tf.Tensor]:
        """Looks features up as an exported model does; see `_lookup`."""
        if not self._has_tables:
            raise ValueError(
                f"Layer '{self.name}' can't be exported: it has no tables yet. "
                "Call it once, or train it."
            )
        bags = to_bags(
            features,
            ids,
            weights,
            self._arguments.invalid_ids,
            input_shapes=input_shapes,
        )
        found = []
        for lookup, b in zip(
            [each for feature in features for each in feature.lookups],
            lookup_bags(features, bags),
            strict=True,
        ):
            state = self.tables[lookup.table.name]
            vectors = combine(served.gather(self, state, b.ids), None, b)
            output = reshape_output(vectors, b, lookup.table.dim)
            found.append(tf.cast(output, self.compute_dtype))
        outputs = hashed_features.compose(features, bags, found, None)
        _mask(features, outputs, bags)
        return outputs


def _dtype(feature: FeatureSpec) -> tf.DType:
    """A dtype of ids that the feature takes."""
    keys = feature.table.keys
    return tf.int64 if keys is None else keys.dtype


def _mask(
    features: Sequence[FeatureSpec],
    outputs: Sequence[Any],
    bags: Sequence[BaggedIds],
) -> None:
    """Gives sequences their masks, as Keras passes them on.

    Args:
        features: the features.
        outputs: their activations.
        bags: what `to_bags` returned for them.
    """
    firsts = first_bags(features, bags)
    for feature, output, b in zip(features, outputs, firsts, strict=True):
        if feature.max_sequence_length:
            output._keras_mask = on_host(position_mask, b)
