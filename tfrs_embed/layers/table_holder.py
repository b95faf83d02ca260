"""A layer's tables: their placement, variables and checkpoints."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.checkpoint import chain, slot_order
from tfrs_embed.checkpoint.names import in_graphs, in_saved_model
from tfrs_embed.compat import keras_versions, strategies
from tfrs_embed.compat.graphs import variables_at_once
from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs import placement, serialization
from tfrs_embed.configs.placement import Assignment, Placement, ShardingType
from tfrs_embed.configs.tables import EmbeddingSpec
from tfrs_embed.engines.engine import Engine, FixedBatches
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.gradients import loss_scale
from tfrs_embed.layers import keras_tables
from tfrs_embed.layers.base import Layer
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.layers.table_arguments import (
    TableArguments,
    convert_optimizers,
    from_config,
)
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.sparsecore import stacking as stackings
from tfrs_embed.storage.row_store import HOST
from tfrs_embed.storage.table_state import Tables, TableState

if TYPE_CHECKING:
    from tfrs_embed.distribution.handshake import Facts
    from tfrs_embed.storage.dynamic_table import DynamicTable
    from tfrs_embed.tools.monitoring.reports import StatisticsReport


def _takes_any_key(feature: Any) -> bool:
    """Whether a feature or its declaration has keys, none of them padding."""
    keys = getattr(feature.table, "keys", None)
    return keys is not None and feature.padding_value is None


class TableHolder(Layer):
    """Holds a configuration's tables, in engines and in Keras layers.

    Subclasses call `_place` at the end of their `__init__`.
    """

    #: The name of the argument with the feature configuration, if any.
    _FEATURES: ClassVar[str | None] = None
    #: The attributes in checkpoints, the same for all placements.
    _CHECKPOINTED: ClassVar[tuple[str, ...]] = ("tables", "step")
    #: The name of the engine's layer in Keras files.
    _ENGINE_NAME: ClassVar[str] = "tpu_embedding"
    #: Whether the model's optimizer trains small tables, in Keras layers.
    _KERAS_TRAINS: ClassVar[bool] = True
    _arguments: TableArguments

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._strategy = tf.distribute.get_strategy()
        # Patches optimizers, so that they tell the loss scale and their slots.
        loss_scale.install(self._keras)
        slot_order.install(self._keras)

    def _place(self, spec: EmbeddingSpec, arguments: TableArguments) -> None:
        """Places each table, and makes the engine and the Keras layers.

        Raises:
            ValueError: a table can't have the placement, or the dtype there,
                that it is configured with; or a feature's activations are
                ragged and have a regularizer.
        """
        for feature in spec.features:
            if self.activity_regularizer is not None and not feature.combined:
                raise ValueError(
                    f"{feature}: with combiner=None activations may be ragged, "
                    "which Keras's activity_regularizer doesn't take: add a "
                    "loss of their values to the model."
                )
        keyed = [f for f in spec.features if _takes_any_key(f)]
        if arguments.invalid_ids == "zero" and len(keyed) == len(spec.features):
            raise ValueError(
                f"Layer '{self.name}': invalid_ids='zero' has no meaning for "
                f"{spec.features[0]}: every key is valid in tables with "
                "DynamicKeys. A key that stands for padding is "
                "FeatureConfig(padding_value=...)."
            )
        # Imported here, as a program's start needs neither plans nor engines.
        from tfrs_embed.configs.plan_placements import with_plan

        spec = with_plan(
            spec, arguments.plan, self._strategy, arguments.optimizer
        )
        assigned = placement.assign(
            spec,
            arguments.size_threshold,
            self._strategy,
            arguments.given.get("embedding_feature"),
            self._KERAS_TRAINS,
        )
        self._spec = spec
        self._arguments = arguments
        large = [
            t
            for t in spec.tables
            if assigned[t.name].sharding is not ShardingType.KERAS
        ]
        # Small tables' too: a config must be valid for any placement.
        converted = convert_optimizers(
            spec.tables, arguments.optimizer, type(self).__name__, self._keras
        )
        stacking = stackings.read(arguments.given.get("table_stacking", "auto"))
        if stacking is not None:
            converted = stackings.unite_optimizers(
                stacking, spec.tables, converted
            )
        optimizers = {t.name: converted[t.name] for t in large}
        small = [t.name for t in spec.tables if t not in large]
        threshold = arguments.size_threshold
        if small and arguments.optimizer is None is not threshold:
            self._warn_of_training(small)
        self.supports_masking = any(
            f.max_sequence_length for f in spec.features
        )
        # Outputs and masks are computed from the ids together.
        self._compute_output_and_mask_jointly = True
        self._placement = placement.describe(
            spec, assigned, optimizers, arguments.sent_as
        )
        self._has_tables = False
        # Where a call works on ids; None: on the device of the model.
        self._device: str | None = None
        if all(table.on_host for table in spec.tables):
            self._device = HOST
        # Whether the workers have compared their first lookups.
        self._compared = False
        # The indices of features with ragged or sparse ids in the last call;
        # None: the layer wasn't called.
        self._ragged: set[int] | None = None
        self.tables = Tables()
        self._engine_layer: EngineLayer | None = None
        if large:
            self._engine_layer = self._engine_layer_class(
                self._make_engine(assigned, optimizers, stacking),
                name=self._ENGINE_NAME,
                dtype=self._dtype_policy,
                trainable=self.trainable,
            )
            for state in self._engine_layer.engine.states.values():
                self.tables.add(state)
        self._keras_layers: dict[str, Embedding] = {}
        for table in spec.tables:
            if table in large:
                continue
            layer = self._embedding_class(
                table.vocabulary_size,
                table.dim,
                embeddings_initializer=table.initializer,
                name=self._layer_name(table.name),
                dtype=self._dtype_policy,
                trainable=self.trainable,
            )
            self._keras_layers[in_saved_model(table.name)] = layer
            self.tables.add(TableState(table))
        hashed_by = {
            f.table.name: str(f) for f in spec.features if f.hashing is not None
        }
        for name, state in self.tables.items():
            state.belong_to(self, hashed_by.get(name))

    def _warn_of_training(self, small: list[str]) -> None:
        """Warns that the model trains small tables if the layer doesn't."""
        if self.trainable:
            warnings.warn(
                f"Layer '{self.name}': optimizer=None keeps large tables as "
                "they are, but the model's optimizer trains the small or "
                f"replicated tables {small}. trainable=False keeps all tables "
                "as they are. size_threshold=None says that the model's "
                "optimizer is to train them.",
                stacklevel=4,
            )

    def _make_engine(
        self,
        assigned: Mapping[str, Assignment],
        optimizers: dict[str, TableOptimizer | None],
        stacking: stackings.Groups | None,
    ) -> Engine:
        """Makes the engine for all tables that no Keras layer holds."""
        from tfrs_embed.engines import factory

        arguments, strategy = self._arguments, self._strategy
        given, device = arguments.given, None
        if tf.distribute.has_strategy():
            device = strategy.extended.worker_devices[0]
        features = [
            f for f in self._spec.features if f.table.name in optimizers
        ]
        options = EngineOptions(
            [lookup for f in features for lookup in f.lookups],
            optimizers,
            strategy,
            f"Layer '{self.name}'",
            pipelined=arguments.pipelined,
            device=device,
            batch_size=given.get("batch_size"),
            sparse_core_config=given.get("sparse_core_embedding_config"),
            stacking=stacking,
            communication_dtype=arguments.sent_as,
        )
        sharding = {name: each.sharding for name, each in assigned.items()}
        return factory.make_engine(options, sharding)

    def build(self, input_shape: Any = None) -> None:
        """Creates all tables, unless they wait for the size of a batch."""
        strategies.check(self.name, self._strategy)
        self._make_tables_if_ready()
        super().build(input_shape)

    @property
    def _engine(self) -> Engine | None:
        """The engine of the large tables; None if there are none."""
        layer = self._engine_layer
        return None if layer is None else layer.engine

    def _make_tables_if_ready(self) -> None:
        engine: Any = self._engine
        if not isinstance(engine, FixedBatches) or engine.can_build:
            self._ensure_tables()

    def _ensure_tables(self) -> None:
        """Creates the tables' variables unless they exist."""
        if self._has_tables:
            return
        if strategies.in_tpu_replica():
            # In cross-replica context: once for all replicas.
            tf.distribute.get_replica_context().merge_call(
                lambda _: self._make_tables()
            )
        else:
            self._make_tables()

    def _describe(self) -> Facts:
        """The facts about the tables that all workers must share."""
        from tfrs_embed.configs import descriptions

        spec, arguments = self._spec, self._arguments
        facts: Facts = {
            "": {
                "class": type(self).__name__,
                "invalid_ids": arguments.invalid_ids,
                "dtype": self.compute_dtype,
                "trainable": self.trainable,
                "communication_dtype": arguments.sent_as,
                "tables": [t.name for t in spec.tables],
                "features": [f.name for f in spec.features],
            },
            **descriptions.of_tables(
                spec.tables, self._engine.optimizers if self._engine else {}
            ),
            **descriptions.of_features(spec.features),
        }
        for entry in self._placement.tables:
            facts[f"Table '{entry.table}'"]["engine"] = entry.engine
        return facts

    def _make_tables(self) -> None:
        from tfrs_embed.distribution import handshake

        # First: workers create variables together, and workers that differ must
        # not allocate channels of collectives.
        handshake.compare_workers(
            self._strategy, f"Layer '{self.name}'", self._describe
        )
        with (
            tf.init_scope(),
            variables_at_once(),
            strategies.scope(self._strategy),
        ):
            if self._engine_layer is not None:
                self._engine_layer.ensure_built()
                # As an attribute, Keras would list it before the tables.
                self._track_trackable(
                    self._engine_layer.step, "step", overwrite=True
                )
                for state in self._engine_layer.engine.states.values():
                    state.step_restored()
            for table in self._spec.tables:
                layer = self._keras_layer(table.name)
                if layer is None:
                    continue
                if not layer.built:
                    with tf.name_scope(in_graphs(table.name)):
                        keras_tables.build(layer, table)
                variable = keras_versions.variable(layer.embeddings)
                self.tables[table.name].add("parameters", variable)
                slot_order.mark(layer.embeddings, table.name)
        self._has_tables = True

    def _keras_layer(self, table: str) -> Embedding | None:
        """The layer that holds a small table; None: the table is large."""
        return self._keras_layers.get(in_saved_model(table))

    @property
    def embedding_tables(self) -> dict[str, tf.Variable]:
        """All tables by name.

        Shapes are [vocabulary_size, dim]. Large tables are constants: only
        lookups train them, see docs/gradients.md.
        """
        self._ensure_tables()
        return {
            table.name: self.tables[table.name].table
            for table in self._spec.tables
        }

    def load_tables(self, tables: Mapping[str, Any]) -> None:
        """Sets the values of small and large tables.

        Their slots and the step keep their values.

        Args:
            tables: for each table's name an array, a tensor or a variable
                [vocabulary_size, dim] of numbers, or a Keras `Embedding` layer
                that has one. The layer's other tables keep their values. With
                several workers, the same on all.

        Raises:
            TypeError: a value is no array of numbers; no table is set.
            ValueError: there is no such table, or it has another shape, or a
                Keras layer has no table yet; no table is set.
        """
        from tfrs_embed.layers.table_values import check_values

        values = check_values(tables, self._spec.tables, self.name)
        known = self.embedding_tables
        for name, rows in values.items():
            with tf.init_scope(), tf.device("CPU:0"):
                rows = tf.cast(rows, known[name].dtype)
            known[name].assign(rows)

    def evict(self, table: str, count: int | None = None) -> int:
        """Takes rows from keys of a table with `DynamicKeys`.

        The table's eviction rule chooses the keys; see the table's own `evict`,
        in `tables`.

        Args:
            table: the table's name.
            count: the number of keys. None: the keys that have expired, by a
                `TimeToLive`.

        Returns:
            The number of keys of this process that lost their rows.

        Raises:
            ValueError: the table doesn't exist, or has no `DynamicKeys`, or no
                eviction rule; or the rule needs a count.
            RuntimeError: it is called in a function that is being traced.
        """
        dynamic = [t.name for t in self._spec.tables if t.keys is not None]
        if table not in dynamic:
            raise ValueError(
                f"Layer '{self.name}' has no table '{table}' with DynamicKeys; "
                f"its tables with them are {dynamic}."
            )
        self._ensure_tables()
        state: DynamicTable = cast(Any, self.tables[table])
        return state.evict(count)

    def statistics(
        self, sample: int | None = None, batches: Any = None
    ) -> StatisticsReport:
        """Measures the tables: norms, rows that were never updated, memory.

        `monitoring.TableMonitor` measures changes over time. With several
        workers each measures the rows that it holds.

        Args:
            sample: the approximate number of rows to read of a table; None:
                all, in blocks.
            batches: global batches of inputs, whose lookups are counted; None:
                no lookups are counted. See `monitoring.lookup_statistics`.

        Returns:
            The statistics; they print as a table.

        Raises:
            ValueError: the layer waits for a batch to make its tables, or the
                sample isn't an integer of at least 1, or a batch doesn't fit
                the layer.
            TypeError: ids of a batch are of a wrong kind.
        """
        # Imported here because training doesn't need it.
        from tfrs_embed.tools.monitoring.monitor import TableMonitor

        self._make_tables_if_ready()
        return TableMonitor(self, sample=sample).measure(batches=batches)

    def count_params(self) -> int:
        """The number of the tables' parameters: rows times dim.

        It excludes optimizers' slots, the step and the scalar weight that
        stands for large tables among the trainable weights.
        """
        return sum(t.vocabulary_size * t.dim for t in self._spec.tables)

    @property
    def table_optimizers(self) -> dict[str, TableOptimizer]:
        """The optimizers of tables that engines hold, by table name.

        Assigning an optimizer's `learning_rate` takes effect at the next step.
        """
        optimizers = self._engine.optimizers if self._engine else {}
        return {k: each for k, each in optimizers.items() if each is not None}

    @property
    def placement(self) -> Placement:
        """The placement of each table, with the reason; prints as a table."""
        on_cpus = self._engine_layer is not None and not is_tpu(self._strategy)
        return dataclasses.replace(
            self._placement,
            # Not cached: kernels may be compiled, or turned off, later.
            missing_kernels=kernels.missing() if on_cpus else None,
        )

    @property
    def step(self) -> Any:
        """The number of updates made, a scalar int64 variable, or like one.

        None without tables that an engine holds, or before these are made.
        """
        layer = self._engine_layer
        return layer.step if layer is not None and layer.built else None

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able.

        Raises:
            ValueError: an optimizer's learning rate can't be stored.
        """
        optimizers = self.table_optimizers
        of_layer = (
            optimizers[table.name]
            for table in self._spec.tables
            if table.optimizer is None and table.name in optimizers
        )
        config = super().get_config()
        keras = self._keras
        config.update(self._arguments.to_config(next(of_layer, None), keras))
        config["activity_regularizer"] = keras.regularizers.serialize(
            self.activity_regularizer
        )
        if self._FEATURES is not None:
            config[self._FEATURES] = serialization.features_to_config(
                self._spec, optimizers, keras
            )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableHolder:
        """Makes the layer from the result of `get_config`.

        No module is imported for what the config names.

        Raises:
            ValueError: an initializer, optimizer, schedule or regularizer isn't
                the Keras's, TensorFlow's, registered or imported; or a value is
                not as `get_config` stores it.
        """
        try:
            arguments = from_config(config, cls._keras)
            if cls._FEATURES is not None:
                arguments[cls._FEATURES] = serialization.features_from_config(
                    config[cls._FEATURES], cls._keras
                )
        except (
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
        ) as error:
            raise ValueError(
                f"{cls.__name__}: its config isn't as get_config makes it: "
                f"{error!r}"
            ) from error
        return cls(**arguments)

    def __reduce__(self) -> Any:
        """Refuses `pickle` and `copy`, which would lose the tables' values."""
        raise TypeError(
            f"Layer '{self.name}' can't be pickled or copied by itself. Pickle "
            "or save its model; or make an untrained layer by "
            "from_config(layer.get_config())."
        )

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

    def get_build_config(self) -> dict[str, Any]:
        """The features with ragged or sparse ids, if there are tables.

        Keras itself notes only the shapes of a model's inputs, and rebuilds it
        with dense inputs.
        """
        if not self._has_tables:
            return {}
        return {
            "ragged": None if self._ragged is None else sorted(self._ragged)
        }

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Creates all tables, from the result of `get_build_config`."""
        ragged = config.get("ragged")
        self._ragged = None if ragged is None else set(ragged)
        with tf.name_scope(in_graphs(self.name)):  # As in a call.
            self.build(None)

    def _checkpoint_adapter(self, path: str) -> Any:
        # TensorFlow calls this before it reads values. Checks the file, so that
        # errors of damaged files name it.
        if tf.io.gfile.exists(f"{path}.index"):
            chain.files_of(path)
        return super()._checkpoint_adapter(path)  # type: ignore[misc]

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            children = {
                k: v for k, v in children.items() if k in self._CHECKPOINTED
            }
        return children
