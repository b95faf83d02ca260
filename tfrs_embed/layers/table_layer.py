"""Looks up a configuration's features, in all tables of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions, strategies
from tfrs_embed.compat.arguments import flag
from tfrs_embed.compat.private_tensorflow import record
from tfrs_embed.compat.strategies import on_host
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec
from tfrs_embed.engines.engine import FixedBatches
from tfrs_embed.layers import errors, hashed_features
from tfrs_embed.layers.base import ChangeIds
from tfrs_embed.layers.engine_layer import LearnTexts
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.layers.table_holder import TableHolder
from tfrs_embed.ops.backend import SERVED_TABLES
from tfrs_embed.ops.bags import BaggedIds, position_mask
from tfrs_embed.ops.embedding_lookup import lookup_table
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.inputs import (
    CallInputs,
    first_bags,
    lookup_bags,
    to_bags,
    unchecked,
)
from tfrs_embed.ops.lookup import activations
from tfrs_embed.ops.tensors import to_tensor
from tfrs_embed.ops.tpu_inputs import require_given, require_known

if TYPE_CHECKING:
    from tfrs_embed.engines.joint_decisions import JointDecisions
    from tfrs_embed.serving.tables import ServedTables


class TableLayer(TableHolder):
    """Holds a configuration's tables and looks its features up."""

    def keras_inputs(
        self, ragged: Iterable[str] = (), strings: Iterable[str] = ()
    ) -> Any:
        """Makes the inputs of a functional model, of the layer's own Keras.

        Each has its feature's name, "user_id" for "user/id". Ids are int64, or
        of the `dtype` of a table's `DynamicKeys`. An input has the feature's
        `input_shape`. Without one, features with `max_sequence_length` or
        `combiner=None` have ragged inputs, and others have an id for each
        vector of the `output_shape`, by default one for each example.

        Example:
            >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     {"movie": movies, "seen": movies}, "adagrad"
            ... )
            >>> inputs = layer.keras_inputs(ragged=["seen"])
            >>> inputs["movie"].shape, inputs["seen"].shape
            (TensorShape([None]), TensorShape([None, None]))
            >>> vectors = layer(inputs)

        Args:
            ragged: names of features whose examples have any number of ids:
                nothing in a feature's config says so.
            strings: names of features with `hashing` whose ids are strings.

        Returns:
            Inputs in the nesting of the features.

        Raises:
            ValueError: no feature has one of the names.
        """
        ragged, strings, inputs = [*ragged], [*strings], {}
        names = [feature.name for feature in self._spec.features]
        for name in (*ragged, *strings):
            if name not in names:
                raise ValueError(f"{name!r} is none of the features {names}.")
        for i, feature in enumerate(self._spec.features):
            name, declared = feature.name, feature.input_shape
            several = feature.max_sequence_length or not feature.combined
            rows = name in ragged or bool(several and declared is None)
            shape = declared or feature.output_shape or [None]
            inputs[i] = self._keras.Input(
                [None] if rows else shape[1:],
                # Keras 3's names have no "/", and none is the layer's own.
                name=None if name == self.name else name.replace("/", "_"),
                dtype="string" if name in strings else feature.id_dtype.name,
                ragged=rows,
            )
        return self._spec.structure.pack(inputs)

    def _place(self, spec: EmbeddingSpec, arguments: TableArguments) -> None:
        super()._place(spec, arguments)
        # `call` sets the masks, unless a subclass has a method for them.
        own = type(self).compute_mask is TableLayer.compute_mask
        self._compute_output_and_mask_jointly = own
        self.supports_masking = not own or any(
            feature.may_mask for feature in spec.features
        )

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        structure, changed = self._spec.structure, {}
        for i, ids in enumerate(structure.flatten(inputs, "inputs", True)):
            if ids is not None:
                feature = self._spec.features[i]
                dtype, ragged = feature.id_dtype, self._is_ragged(i)
                changed[i] = change(ids, f"{feature}: ids", dtype, ragged)
        return structure.pack(changed)

    def _note_kinds(self, ids: Mapping[int, Any]) -> None:
        """Notes which features' ids, by index, are ragged or sparse."""
        of_rows = {
            i
            for i, each in ids.items()
            if isinstance(each, (tf.RaggedTensor, tf.SparseTensor))
        }
        ragged = (self._ragged or set()) - set(ids) | of_rows
        if ragged != self._ragged:
            self._ragged = ragged

    def _is_ragged(self, place: int) -> bool | None:
        """Whether a feature's ids are ragged; None: unknown."""
        if self._ragged is not None:
            return place in self._ragged
        feature = self._spec.features[place]
        # Dense ids then have outputs of the same shape.
        alike = feature.output_shape is not None or feature.max_sequence_length
        return False if alike else None

    def _flatten(
        self, inputs: Any, weights: Any, partial: bool
    ) -> tuple[list[Any], list[Any]]:
        """Each feature's ids and weights in a call; None if left out."""
        structure = self._spec.structure
        ids = structure.flatten(inputs, "inputs", partial)
        if weights is None:
            return ids, [None] * len(ids)
        return ids, structure.flatten(weights, "weights", partial)

    def _input_shapes(
        self, features: Sequence[FeatureSpec]
    ) -> Sequence[InputShape | None]:
        """The shapes that features' ids must have; None, or empty: any."""
        return ()

    @errors.without_input_dump
    def call(
        self,
        inputs: Any,
        weights: Any = None,
        training: bool | None = None,
        *,
        partial: bool = False,
    ) -> Any:
        """Looks the features up; see the class."""
        served = SERVED_TABLES.get()
        if served is not None:
            training = False
        elif training is None and record.could_possibly_record():
            # Loops such as TFRS's don't pass `training`. The gradient updates
            # the tables, so the call is part of a training step.
            training = True
        called = self._read(inputs, weights, flag(partial, "partial"), training)
        strategies.check(self.name, self._strategy)
        features = called.features
        self._note_kinds(dict(zip(called.places, called.ids, strict=True)))
        beside_rows: Any = contextlib.nullcontext()
        if served is None and self._device is not None:
            beside_rows = tf.device(self._device)
        with beside_rows:
            if served is None:
                bags, found = self._lookup(called, training)
            else:
                bags, found = self._lookup_served(called, served)
            strategy = self._strategy if served is None else None
            outputs = hashed_features.compose(features, bags, found, strategy)
        if self._compute_output_and_mask_jointly:
            masks = _masks(features, bags)
            for output, mask in zip(outputs, masks, strict=True):
                if mask is not None:
                    # Keras passes the mask to the next layers.
                    output._keras_mask = mask
        return self._pack(called, map(_in_rows, features, called.ids, outputs))

    if TYPE_CHECKING:
        # Type checkers see Keras's `__call__` as Any.
        __call__ = call

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shapes of the outputs, in the nesting of the features.

        Tables are neither needed nor made.

        Args:
            input_shape: the shapes of ids, in the nesting of the features,
                which may be left out. Ids of a feature are taken for ragged
                where the last call had ragged or sparse ones, else for dense.
        """

        def placeholder(
            shape: Any, _: str, dtype: tf.DType, ragged: bool | None
        ) -> Any:
            if ragged and len(shape) == 2:
                return tf.compat.v1.ragged.placeholder(dtype, 1, [])
            return tf.compat.v1.placeholder(dtype, shape)

        with tf.Graph().as_default():
            ids = self._map_ids(placeholder, input_shape)
            called = self._read(ids, None, partial=True)
            features, lookups = called.features, called.lookups
            bags = checked_bags(called)
            vectors = [
                tf.compat.v1.placeholder(tf.float32, [None, each.table.dim])
                for each in lookups
            ]
            found = activations(
                vectors, lookup_bags(features, bags), lookups, tf.float32
            )
            outputs = hashed_features.compose(features, bags, found, None)
            rows = map(_in_rows, features, called.ids, outputs)
            return self._pack(
                called, [self._as_shape(each.shape) for each in rows]
            )

    def prefetch(
        self,
        dataset: tf.data.Dataset,
        inputs: Callable[..., Any] | None = None,
        batches: int = 2,
    ) -> tf.data.Dataset:
        """Reads rows of tables in files ahead of the steps that use them.

        Numbers don't change by it. It must be the last transformation, but may
        be followed by `strategy.experimental_distribute_dataset`. Workers read
        ahead the rows that they hold, of their own batches.

        Example:
            >>> table = tfrs_embed.TableConfig(
            ...     "movie", 20_000, 8, storage=tfrs_embed.FileStorage("files")
            ... )
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
            ... )
            >>> movies = tf.data.Dataset.from_tensors([3, 5])
            >>> for batch in layer.prefetch(movies):
            ...     vectors = layer(batch)

        Args:
            dataset: batches of what the model takes.
            inputs: returns the layer's inputs, from an element's components.
                None: they are the element, or the first of its components.
            batches: the number of batches to read ahead.

        Returns:
            A dataset of the same batches.

        Raises:
            ValueError: no table is in files; or ids don't fit the layer.
        """
        self._ensure_tables()
        if not any(table.has_files for table in self._spec.tables):
            raise ValueError(
                f"Layer '{self.name}' has no table with a FileStorage: there "
                "is nothing to read ahead."
            )

        def read_ahead(*element: Any) -> Any:
            given = element[0] if inputs is None else inputs(*element)
            called = self._read(given, None, partial=True)
            bags = lookup_bags(called.features, checked_bags(called))
            begun = []
            for lookup, each in zip(called.lookups, bags, strict=True):
                if lookup.table.has_files:
                    state = self.tables[lookup.table.name]
                    begun += state.read_ahead(each.ids)
            with tf.control_dependencies(begun):
                whole = tf.nest.map_structure(
                    tf.identity, element, expand_composites=True
                )
            return whole if len(whole) > 1 else whole[0]

        return dataset.map(read_ahead).prefetch(batches)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the positions that hold an id.

        Calling the layer sets these Keras masks already, unless a subclass has
        a `compute_mask` of its own, which Keras calls.

        Args:
            inputs: ids, as the layer is called with them.
            mask: not read.

        Returns:
            The nesting of the features: [batch, max_sequence_length] bool for a
            sequence feature; [batch, ...] bool for vectors [batch, ..., dim] of
            a feature with a padding_value; None for others. None alone if no
            feature can have a mask.
        """
        if not self.supports_masking:
            return None
        called = self._read(inputs, None, partial=True)
        return self._pack(called, _masks(called.features, checked_bags(called)))

    def _pack(self, inputs: CallInputs, values: Iterable[Any]) -> Any:
        """Nests values of the features that a call has."""
        return self._spec.structure.pack(
            dict(zip(inputs.places, values, strict=True))
        )

    def _read(
        self,
        inputs: Any,
        weights: Any,
        partial: bool,
        training: bool | None = False,
    ) -> CallInputs:
        """Selects a call's features; checks whether others may be absent."""
        ids, weights = self._flatten(inputs, weights, partial)
        features, engine = self._spec.features, self._engine
        given = [i for i, n in enumerate(ids) if n is not None or not partial]
        if not given:
            raise ValueError(
                f"Layer '{self.name}': a call with partial=True needs ids for "
                f"at least one of {[f.name for f in features]}."
            )
        for i, feature in enumerate(features):
            if i not in given and weights[i] is not None:
                raise ValueError(f"{feature}: weights without ids.")
        if engine is not None and len(given) < len(features):
            there = [
                i in given
                for i, f in enumerate(features)
                if self._keras_layer(f.table.name) is None
                for _ in f.lookups
            ]
            if isinstance(engine, FixedBatches) and any(there):
                engine.require_all(there)
        chosen = [features[i] for i in given]
        return CallInputs(
            chosen,
            [ids[i] for i in given],
            [weights[i] for i in given],
            self._arguments.invalid_ids,
            bool(training),
            self._input_shapes(chosen),
            given,
        )

    def _lookup(
        self, inputs: CallInputs, training: bool | None
    ) -> tuple[list[BaggedIds], list[tf.Tensor]]:
        """Looks features up in the layer's tables.

        Returns the result of `to_bags`, and the activations of the lookups.
        """
        engine: Any = self._engine
        self._ensure_tables(only_if_ready=True)
        together = engine.together if engine is not None else None
        # Engines compare lookups themselves.
        alone = engine is None and not self._compared
        if alone and strategies.in_replica(self._strategy):
            self._compared = True
            # Imported here: most programs need no comparison of workers.
            from tfrs_embed.distribution import handshake

            what = f"a lookup of Layer '{self.name}'"
            handshake.compare_actions(self._strategy, what)
        all_bags, begun = _bags_and_begun(inputs, together)
        of_lookups = lookup_bags(inputs.features, all_bags)
        bags = dict(zip(map(id, inputs.lookups), of_lookups, strict=True))
        features = engine.features if engine is not None else []
        its_bags = [bags.get(id(each)) for each in features]
        if isinstance(engine, FixedBatches):
            engine.observe_batch(its_bags)
        # Tables whose sizes depend on the first batch are made now.
        self._ensure_tables()
        found: dict[int, tf.Tensor] = {}
        if self._engine_layer is not None and any(
            b is not None for b in its_bags
        ):
            # Absent features take part without ids: all replicas, and the
            # forward and backward pass, exchange the same tables' rows.
            given = [
                BaggedIds.none(f) if b is None else b
                for f, b in zip(features, its_bags, strict=True)
            ]
            outputs = self._engine_layer.call(
                given, training, begun, self._learn_texts(inputs)
            )
            found = dict(zip(map(id, features), outputs, strict=True))
        for lookup in inputs.lookups:
            layer = self._keras_layer(lookup.table.name)
            if layer is not None:
                table, b = (
                    keras_versions.variable(layer.embeddings),
                    bags[id(lookup)],
                )
                vectors = lookup_table(table, b, self._strategy)
                [found[id(lookup)]] = activations(
                    [vectors], [b], [lookup], self.compute_dtype
                )
        return all_bags, [found[id(lookup)] for lookup in inputs.lookups]

    def _learn_texts(self, inputs: CallInputs) -> LearnTexts | None:
        """Returns what gives tables that keep texts those of a step's keys."""
        if not inputs.training:
            return None
        assert self._engine_layer is not None
        states = self._engine_layer.engine.states
        # All of them: other replicas may have other features.
        kept = {
            name: state.key_texts
            for name, state in states.items()
            if state.key_texts is not None
        }
        if not kept:
            return None
        # Imported here, as few tables keep texts.
        from tfrs_embed.storage.key_texts import learn_texts

        given = [
            to_tensor(ids, f"{feature}: ids")
            for feature, ids in zip(inputs.features, inputs.ids, strict=True)
            if feature.table.name in kept
        ]
        return lambda vectors: learn_texts([*kept.values()], vectors, given)

    def _lookup_served(
        self, inputs: CallInputs, served: ServedTables
    ) -> tuple[list[BaggedIds], list[tf.Tensor]]:
        """Looks features up as an exported model does; see `_lookup`."""
        if not self._has_tables:
            raise ValueError(
                f"Layer '{self.name}' can't be exported: it has no tables yet. "
                "Call it once, or train it."
            )
        all_bags = checked_bags(inputs)
        bags = lookup_bags(inputs.features, all_bags)
        states = [self.tables[each.table.name] for each in inputs.lookups]
        vectors = served.lookup(self, states, bags)
        return all_bags, activations(
            vectors, bags, inputs.lookups, self.compute_dtype
        )


def checked_bags(inputs: CallInputs) -> list[BaggedIds]:
    """Checks ids and weights on the host, and groups them into bags."""
    return _bags_and_begun(inputs, None)[0]


def _bags_and_begun(
    inputs: CallInputs, together: JointDecisions | None
) -> tuple[list[BaggedIds], Any]:
    """Checks ids; begins a lookup while replicas agree on their validity.

    Returns the bags, and what has begun; see `LookupCall`.
    """
    training = inputs.training
    consensus = together.consensus(training) if together else None
    features = inputs.features
    in_tpu = strategies.in_tpu_replica()
    if in_tpu:
        for feature, *both in zip(
            features, inputs.ids, inputs.weights, strict=True
        ):
            hashed_features.require_for_tpu(feature, both[0])
            for kind, each in zip(("ids", "weights"), both, strict=True):
                require_given(f"{feature}: {kind}", each)
    if consensus is not None:
        assert together is not None
        parsed = unchecked(inputs, consensus)
        return parsed.agree(together.begin(parsed, training))
    bags = on_host(to_bags, inputs)
    if in_tpu:
        bagged = [each for feature in features for each in feature.bagged]
        for feature, its_bags in zip(bagged, bags, strict=True):
            require_known(feature, its_bags)
    return bags, None


def _in_rows(feature: FeatureSpec, ids: Any, vectors: tf.Tensor) -> Any:
    """Returns the activations of a call, from those of its checked ids.

    If the feature isn't combined, vectors of ragged and sparse ids get the rows
    of the ids.
    """
    if feature.combined:
        return vectors
    ids = to_tensor(ids, f"{feature}: ids")
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_values(vectors)
    if not isinstance(ids, tf.SparseTensor):
        return vectors
    with tf.control_dependencies([vectors]):  # The indices are checked then.
        return tf.RaggedTensor.from_value_rowids(
            vectors, ids.indices[:, 0], ids.dense_shape[0], validate=False
        )


def _masks(
    features: Sequence[FeatureSpec], bags: Sequence[BaggedIds]
) -> list[tf.Tensor | None]:
    """The masks of features with positions; None for other features."""
    first = first_bags(features, bags)
    return [
        on_host(position_mask, b)
        if f.may_mask and (b.static_shape.rank or 0) > 1
        else None
        for f, b in zip(features, first, strict=True)
    ]
