"""What the layers that look features up in tables have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras

from tfrs_embed import descriptions, placement, serialization, strategies
from tfrs_embed.checkpoint import slot_order
from tfrs_embed.checkpoint.names import in_saved_model
from tfrs_embed.configs import (
    EmbeddingSpec,
    FeatureSpec,
    TableSpec,
    as_int,
)
from tfrs_embed.distribution import handshake
from tfrs_embed.engines import factory
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tables.state import Tables, TableState
from tfrs_embed.initial_values import initial_blocks
from tfrs_embed.layers.base import Layer
from tfrs_embed.layers.copies import copy_layer, copy_state
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.ops.bags import BaggedIds, held, to_bags
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.lookup import combine, gather_densely, reshape_output
from tfrs_embed.ops.samples import Matrix
from tfrs_embed.ops.tpu_inputs import require_given, require_known
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.placement import EngineKind, Placement, TableRoute
from tfrs_embed.serving import tables as served_tables
from tfrs_embed.serving.tables import ServedTables
from tfrs_embed.sparsecore.stacking import Stacking
from tfrs_embed.strategies import is_tpu, on_host

INVALID_IDS = ("error", "zero")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments that layers of tables share, as they were given.

    In an object of its own they are out of reach of Keras's tracking.

    Attributes:
        optimizer: of the tables that have none of their own.
        pipeline_execution_with_tensor_core: whether updates overlap the next
            step.
        size_threshold: number of rows above which a table is large, or None.
        sparse_core_embedding_config: a `SparseCoreEmbeddingConfig`, or None.
        embedding_feature: a TPU's embedding hardware to use instead of what it
            has, or None.
        invalid_ids: one of `INVALID_IDS`.
    """

    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    size_threshold: int | None
    sparse_core_embedding_config: Any
    embedding_feature: Any
    invalid_ids: str

    def __post_init__(self) -> None:
        """Checks the values."""
        threshold = check_integer(self.size_threshold, "size_threshold")
        object.__setattr__(self, "size_threshold", threshold)
        if self.invalid_ids not in INVALID_IDS:
            raise ValueError(
                f"invalid_ids must be one of {list(INVALID_IDS)}, got "
                f"{self.invalid_ids!r}."
            )


class TableLayer(Layer):
    """Holds a configuration's tables and looks its features up.

    A layer made of it says where each table goes, with `_place`, and calls
    `_lookup`.

    Args:
        **kwargs: those of every Keras layer.
    """

    #: The argument that is the feature configuration.
    _FEATURES: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._strategy = tf.distribute.get_strategy()

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

    def _place(
        self,
        spec: EmbeddingSpec,
        routes: Mapping[str, TableRoute],
        settings: Settings,
        batch_size: int | None = None,
        stacking: Stacking | None = None,
    ) -> None:
        """Makes the engines and Keras layers that will hold the tables.

        Args:
            spec: the configuration.
            routes: each table's route, by its name.
            settings: what is asked of all tables.
            batch_size: the largest batch of one replica, where features don't
                say, or None.
            stacking: which tables SparseCores hold as one; None: TensorFlow's
                choice.
        """
        self._spec = spec
        self._settings = settings
        self._batch_size = batch_size
        large = [
            t
            for t in spec.tables
            if routes[t.name].kind is not EngineKind.KERAS
        ]
        # Those of small tables too: a config is valid wherever its tables are.
        converted = _convert_optimizers(
            spec.tables, settings.optimizer, type(self).__name__
        )
        if stacking is not None:
            converted = stacking.check(spec.tables, converted)
        optimizers = {t.name: converted[t.name] for t in large}
        self._stacking = stacking
        self.supports_masking = any(
            f.max_sequence_length for f in spec.features
        )
        # Both come of one reading of the ids.
        self._compute_output_and_mask_jointly = True
        self._placement = placement.describe(spec, routes, optimizers)
        self._has_tables = False
        self.tables = Tables()
        self._engine_layer: EngineLayer | None = None
        if large:
            self._engine_layer = EngineLayer(
                self._make_engine(routes, optimizers),
                name="tpu_embedding",
                dtype=self._dtype_policy,
                trainable=self.trainable,
            )
            for state in self._engine_layer.engine.states.values():
                self.tables.add(state)
        self._keras_layers: dict[str, Embedding] = {}
        for table in spec.tables:
            if table in large:
                continue
            self._keras_layers[in_saved_model(table.name)] = Embedding(
                table.vocabulary_size,
                table.dim,
                embeddings_initializer=table.initializer,
                name=table.name,
                dtype=self._dtype_policy,
                trainable=self.trainable,
            )
            self.tables.add(TableState(table))

    def _make_engine(
        self,
        routes: Mapping[str, TableRoute],
        optimizers: dict[str, TableOptimizer | None],
    ) -> Engine:
        """Makes the engine for all tables that no Keras layer holds."""
        settings, strategy = self._settings, self._strategy
        return factory.make_engine(
            [f for f in self._spec.features if f.table.name in optimizers],
            optimizers,
            {name: route.kind for name, route in routes.items()},
            EngineOptions(
                strategy,
                f"Layer '{self.name}'",
                pipelined=settings.pipeline_execution_with_tensor_core,
                device=_device(strategy),
                batch_size=self._batch_size,
                sparse_core_config=settings.sparse_core_embedding_config,
                stacking=self._stacking,
            ),
        )

    def build(self, input_shape: Any = None) -> None:
        """Creates all tables, unless they wait for the size of a batch."""
        strategies.check(self.name, self._strategy)
        # A call with no features has no use for tables: see
        # `PartialTPUEmbedding.call`.
        if not (isinstance(input_shape, Mapping) and not input_shape):
            self._make_tables_if_ready()
        super().build(input_shape)

    def _make_tables_if_ready(self) -> None:
        if self._engine_layer is None or self._engine_layer.engine.can_build:
            self._ensure_tables()

    def _ensure_tables(self) -> None:
        """Creates the tables' variables if they aren't there yet."""
        if self._has_tables:
            return
        if is_tpu(self._strategy) and strategies.in_replica(self._strategy):
            # Once for all replicas, and where their variables are made.
            tf.distribute.get_replica_context().merge_call(
                lambda _: self._make_tables()
            )
        else:
            self._make_tables()

    def _describe(self) -> handshake.Facts:
        """What all workers must have in common."""
        spec, engine = self._spec, self._engine_layer
        facts: handshake.Facts = {
            "": {
                "class": type(self).__name__,
                "invalid_ids": self._settings.invalid_ids,
                "dtype": self.compute_dtype,
                "trainable": self.trainable,
                "tables": [t.name for t in spec.tables],
                "features": [f.name for f in spec.features],
            },
            **descriptions.of_tables(
                spec.tables, engine.engine.optimizers if engine else {}
            ),
            **descriptions.of_features(spec.features),
        }
        for entry in self._placement.tables:
            facts[f"Table '{entry.table}'"]["engine"] = entry.engine
        return facts

    def _make_tables(self) -> None:
        # First: variables of several workers are made together.
        handshake.shake_under(
            self._strategy, f"Layer '{self.name}'", self._describe
        )
        with tf.init_scope(), strategies.scope(self._strategy):
            if self._engine_layer is not None:
                self._engine_layer.ensure_built()
                # Not as an attribute: Keras would list it before the tables.
                self._track_trackable(
                    self._engine_layer.step, "step", overwrite=True
                )
            for table in self._spec.tables:
                layer = self._keras_layer(table.name)
                if layer is None:
                    continue
                if not layer.built:
                    with tf.name_scope(table.name):
                        _build(layer, table)
                self.tables[table.name].add("parameters", layer.embeddings)
                slot_order.mark(layer.embeddings, table.name)
            slot_order.install()
        self._has_tables = True

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
        features = [self._spec.features[i] for i in given]
        vectors = self._look_up_features(
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
        engine = self._engine_layer and self._engine_layer.engine
        if engine is not None and len(given) < len(features):
            there = [i in given for i in self._of_engine()]
            if any(there) and not all(there):
                strategies.refuse_in_xla(
                    f"Layer '{self.name}': calls with partial=True"
                )
                engine.require_all(there)

    def _of_engine(self) -> list[int]:
        """The places of the engine's features."""
        return [
            i
            for i, f in enumerate(self._spec.features)
            if self._keras_layer(f.table.name) is None
        ]

    def _look_up_features(
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
            return self._look_up_served(
                served, features, ids, weights, input_shapes
            )
        self._make_tables_if_ready()
        engine = self._engine_layer.engine if self._engine_layer else None
        in_tpu = is_tpu(self._strategy) and strategies.in_replica(
            self._strategy
        )
        if in_tpu:
            for feature, *both in zip(features, ids, weights, strict=True):
                for kind, each in zip(("ids", "weights"), both, strict=True):
                    require_given(f"{feature}: {kind}", each)
        bags = on_host(
            to_bags,
            features,
            ids,
            weights,
            self._settings.invalid_ids,
            engine and engine.consensus(bool(training)),
            bool(training),
            input_shapes,
        )
        if in_tpu:
            for feature, of_feature in zip(features, bags, strict=True):
                require_known(feature, of_feature)
        place = {id(feature): i for i, feature in enumerate(features)}
        outputs: list[Any] = [None] * len(ids)
        by_engine: list[int | None] = []
        if engine is not None:
            by_engine = [place.get(id(f)) for f in engine.features]
            its_bags = [None if i is None else bags[i] for i in by_engine]
            engine.observe_batch(its_bags)
        self._ensure_tables()
        if (
            self._engine_layer is not None
            and engine is not None
            and any(i is not None for i in by_engine)
        ):
            # What is left out takes part without an id: all replicas, and the
            # forward and backward pass, exchange the same tables' rows.
            found = self._engine_layer(
                [
                    BaggedIds.none(f) if b is None else b
                    for f, b in zip(engine.features, its_bags, strict=True)
                ],
                training=training,
            )
            for i, output in zip(by_engine, found, strict=True):
                if i is not None:
                    outputs[i] = output
        for i, feature in enumerate(features):
            layer = self._keras_layer(feature.table.name)
            if layer is not None:
                vectors = self._keras_vectors(layer.embeddings, bags[i])
                outputs[i] = tf.cast(
                    reshape_output(vectors, bags[i], feature.table.dim),
                    self.compute_dtype,
                )
        _mask(features, outputs, bags)
        return outputs

    def _compute_masks(self, ids: Sequence[Any]) -> Any:
        """The nesting of the given ids' masks, None for what is no sequence."""
        masks: list[tf.Tensor | None] = []
        for feature, each in zip(self._spec.features, ids, strict=True):
            mask = None
            if feature.max_sequence_length and each is not None:
                [bags] = on_host(
                    to_bags,
                    [feature],
                    [each],
                    [None],
                    self._settings.invalid_ids,
                )
                mask = on_host(held, bags)
            masks.append(mask)
        return self._spec.structure.pack(masks, [i is not None for i in ids])

    def _look_up_served(
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
            self._settings.invalid_ids,
            input_shapes=input_shapes,
        )
        outputs = []
        for feature, b in zip(features, bags, strict=True):
            state = self.tables[feature.table.name]
            vectors = combine(served.gather(self, state, b.ids), None, b)
            output = reshape_output(vectors, b, feature.table.dim)
            outputs.append(tf.cast(output, self.compute_dtype))
        _mask(features, outputs, bags)
        return outputs

    def _keras_layer(self, table: str) -> Embedding | None:
        """The layer that holds a small table; None: the table is large."""
        return self._keras_layers.get(in_saved_model(table))

    def _keras_vectors(self, table: tf.Variable, bags: BaggedIds) -> tf.Tensor:
        """Looks up in a small table; [count, dim]."""
        strategy = self._strategy
        # Half precision is summed in float32.
        wide = tf.float64 if table.dtype == tf.float64 else tf.float32
        if is_tpu(strategy) and bags.bag_size != 1:
            # A compiled program takes no number of ids that changes.
            known = bags.static_count
            count = bags.count if known is None else known
            matrix = on_host(Matrix.of, bags, count)
            return matrix.combine(tf.cast(tf.gather(table, matrix.ids), wide))
        workers = isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        )
        gather = gather_densely if workers else tf.gather
        return combine(tf.cast(gather(table, bags.ids), wide), None, bags)

    @property
    def embedding_tables(self) -> dict[str, tf.Variable]:
        """All tables by name, whatever holds them; deferred updates applied.

        Shapes are [vocabulary_size, dim].
        """
        self._ensure_tables()
        if tf.executing_eagerly():
            self.drain()
        return {
            table.name: self.tables[table.name].table
            for table in self._spec.tables
        }

    def load_tables(self, tables: Mapping[str, Any]) -> None:
        """Sets tables' values, wherever they are, small and large alike.

        Their slots and the step stay what they are. Deferred updates are
        applied before.

        Args:
            tables: for each table's name an array, a tensor or a variable
                [vocabulary_size, dim] of numbers, or a Keras `Embedding` layer
                that has one. The layer's other tables keep their values. With
                several workers, the same on all.

        Raises:
            TypeError: something is no numbers; then no table is set.
            ValueError: there is no such table, or it has another shape, or a
                Keras layer has none yet; then no table is set.
        """
        specs = {table.name: table for table in self._spec.tables}
        values = {}
        for name, value in tables.items():
            if name not in specs:
                raise ValueError(
                    f"Layer '{self.name}' has no table '{name}'; its tables "
                    f"are {list(specs)}."
                )
            values[name] = _rows_of(name, value)
            wanted = (specs[name].vocabulary_size, specs[name].dim)
            if values[name].shape != wanted:
                raise ValueError(
                    f"Table '{name}' has the shape {wanted}, and can't be "
                    f"given values of shape {tuple(values[name].shape)}."
                )
        known = self.embedding_tables
        for name, rows in values.items():
            with tf.init_scope(), tf.device("CPU:0"):
                rows = tf.cast(rows, known[name].dtype)
            known[name].assign(rows)

    def count_params(self) -> int:
        """The number of the tables' parameters: rows times dim.

        Optimizers' slots, the step and the scalar that stands for large tables
        among the trainable weights are none.
        """
        return sum(t.vocabulary_size * t.dim for t in self._spec.tables)

    def __repr__(self) -> str:
        """The tables, and where they are."""
        if not hasattr(self, "_keras_layers"):
            return super().__repr__()  # It is being made.
        tables = ", ".join(
            f"{t.table} [{t.rows}, {t.dim}] {t.engine}"
            for t in self._placement.tables[:4]
        )
        more = len(self._placement.tables) - 4
        return (
            f"<{type(self).__name__} '{self.name}': "
            f"{len(self._spec.features)} features, tables {tables}"
            f"{f' and {more} more' if more > 0 else ''}>"
        )

    @property
    def table_optimizers(self) -> dict[str, TableOptimizer]:
        """The engines' tables' optimizers by table name.

        Assigning an optimizer's `learning_rate` takes effect at the next step.
        """
        if self._engine_layer is None:
            return {}
        return {
            name: optimizer
            for name, optimizer in self._engine_layer.engine.optimizers.items()
            if optimizer is not None
        }

    @property
    def placement(self) -> Placement:
        """Where each table is and why; prints as a readable table."""
        return self._placement

    @property
    def step(self) -> Any:
        """The number of updates made, a scalar int64 variable, or like one.

        None without tables that an engine holds, or before these are made.
        """
        if self._engine_layer is None or not self._engine_layer.built:
            return None
        return self._engine_layer.step

    def drain(self) -> None:
        """Applies the updates that pipelining has deferred."""
        if self._engine_layer is not None:
            self._engine_layer.drain()

    def save_own_variables(self, store: Any) -> None:
        """Nothing: the tables' own layers store them."""

    def load_own_variables(self, store: Any) -> None:
        """Nothing: the tables' own layers load them."""

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able.

        Raises:
            ValueError: an optimizer's learning rate can't be stored.
        """
        settings = self._settings
        config = super().get_config()
        config.update(
            optimizer=conversion.serialize(
                settings.optimizer,
                next(
                    (
                        self.table_optimizers[table.name]
                        for table in self._spec.tables
                        if table.optimizer is None
                        and table.name in self.table_optimizers
                    ),
                    None,
                ),
            ),
            pipeline_execution_with_tensor_core=(
                settings.pipeline_execution_with_tensor_core
            ),
            size_threshold=settings.size_threshold,
            sparse_core_embedding_config=serialization.dataclass_to_config(
                settings.sparse_core_embedding_config
            ),
            embedding_feature=getattr(settings.embedding_feature, "name", None),
            invalid_ids=settings.invalid_ids,
            activity_regularizer=tf_keras.regularizers.serialize(
                self.activity_regularizer
            ),
        )
        config[self._FEATURES] = serialization.features_to_config(
            self._spec, self.table_optimizers
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableLayer:
        """Makes the layer of what `get_config` returned; leaves that alone."""
        config = dict(config)
        config[cls._FEATURES] = serialization.features_from_config(
            config[cls._FEATURES]
        )
        config["optimizer"] = conversion.deserialize(config["optimizer"])
        config["sparse_core_embedding_config"] = (
            serialization.sparse_core_from_config(
                config["sparse_core_embedding_config"]
            )
        )
        feature = config["embedding_feature"]
        if feature is not None:
            kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
            config["embedding_feature"] = kinds[feature]
        return cls(**config)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableLayer:
        """Copies the layer with its tables, slots and step.

        Raises:
            ValueError: an optimizer's learning rate can't be stored.
        """
        copied = copy_layer(self, self._strategy, memo)
        if self._has_tables:
            self.drain()
            copied.build(None)
            names = [table.name for table in self._spec.tables]
            copy_state(
                [(self.tables[name], copied.tables[name]) for name in names],
                (self.step, copied.step),
            )
        return copied

    def get_build_config(self) -> dict[str, Any]:
        """Nothing: the variables do not depend on the inputs."""
        return {}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Creates all tables."""
        self.build(None)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        if tf.executing_eagerly():
            self.drain()
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            # Tables and slots by name: the same keys whatever the route.
            children = {
                k: v for k, v in children.items() if k in ("tables", "step")
            }
        return children


def _mask(
    features: Sequence[FeatureSpec],
    outputs: Sequence[Any],
    bags: Sequence[BaggedIds],
) -> None:
    """Gives sequences their masks, as Keras passes them on."""
    for feature, output, b in zip(features, outputs, bags, strict=True):
        if feature.max_sequence_length:
            output._keras_mask = on_host(held, b)


def _rows_of(name: str, value: Any) -> tf.Tensor:
    """A table's values, on the host, of what `load_tables` takes."""
    if hasattr(value, "get_weights"):  # A layer, of whatever Keras.
        table = getattr(value, "embeddings", None)
        if table is None:
            raise ValueError(
                f"Table '{name}': layer '{value.name}' has no embeddings; it "
                "must be an Embedding layer that is built or was called."
            )
        value = table
    with tf.init_scope(), tf.device("CPU:0"):
        if hasattr(value, "numpy"):
            value = value.numpy()
        try:
            rows = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Table '{name}': {type(value).__name__} is no array of "
                f"numbers: {error}"
            ) from error
        if not (rows.dtype.is_floating or rows.dtype.is_integer):
            raise TypeError(
                f"Table '{name}': values must be numbers, got "
                f"{rows.dtype.name}."
            )
        return rows


def check_integer(
    value: Any, name: str, minimum: int | None = None
) -> int | None:
    """Checks an argument that is an integer or None.

    Args:
        value: the argument.
        name: its name.
        minimum: its least value, or None.

    Returns:
        The argument as Python's integer, or None.

    Raises:
        TypeError: it is something else.
        ValueError: it is below the minimum.
    """
    if value is None:
        return None
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer or None, got {value!r}.")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}.")
    return number


def _convert_optimizers(
    tables: Sequence[TableSpec], optimizer: Any, layer: str
) -> dict[str, TableOptimizer | None]:
    """Converts each table's optimizer: its own, else the layer's.

    Args:
        tables: the tables.
        optimizer: the layer's, in any form that `convert` takes.
        layer: the layer's class, for errors.

    Returns:
        The optimizers by table name. Tables that were given one object share
        what becomes of it.
    """
    converted: dict[int, TableOptimizer | None] = {}
    result = {}
    for table in tables:
        given = optimizer if table.optimizer is None else table.optimizer
        key = id(given)
        if table.optimizer is not None and isinstance(given, str):
            key = id(table)  # Equal names are not one object.
        if key not in converted:
            where = (
                f"{layer}'s optimizer"
                if table.optimizer is None
                else f"Table '{table.name}'"
            )
            converted[key] = conversion.convert(given, where)
        result[table.name] = converted[key]
    return result


def _build(layer: Embedding, table: TableSpec) -> None:
    """Creates a small table, with the checks that large ones have."""
    given = layer.embeddings_initializer

    def initializer(_: Any, dtype: Any = None, **__: Any) -> tf.Tensor:
        rows = tf.concat([rows for _, rows in initial_blocks(table)], 0)
        return tf.cast(rows, dtype or tf.float32)

    layer.embeddings_initializer = initializer
    try:
        layer.build(None)
    finally:
        # Keras stores it in a SavedModel, where it can't store ours.
        layer.embeddings_initializer = given


def _device(strategy: tf.distribute.Strategy) -> str | None:
    if tf.distribute.get_strategy() is strategy and (
        tf.distribute.has_strategy()
    ):
        return strategy.extended.worker_devices[0]
    return None
