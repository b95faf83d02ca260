"""One embedding layer for tables of every size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from tfrs_embed import (
    configs,
    optimizer_conversion,
    optimizers,
    placement,
    serialization,
    strategies,
)
from tfrs_embed.engines.engine import Engine, Tables, TableState
from tfrs_embed.engines.initial_values import initial_blocks
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.sharded import ShardedEngine
from tfrs_embed.engines.tpu.embedding_cores import EmbeddingCoreEngine
from tfrs_embed.engines.tpu.replicated import ReplicatedEngine
from tfrs_embed.engines.tpu.sparse_core import SparseCoreEngine
from tfrs_embed.layers import errors
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.ops.bags import Bags, to_bags
from tfrs_embed.ops.lookup import (
    combine,
    gather_densely,
    reshape_output,
)
from tfrs_embed.ops.samples import Matrix
from tfrs_embed.placement import Placement, TablePlacement
from tfrs_embed.strategies import is_tpu, on_host

INVALID_IDS = ("error", "zero")


@tf_keras.saving.register_keras_serializable(package="tfrs_embed")
class PartialTPUEmbedding(tf_keras.layers.Layer):
    """Looks features up in tables, each placed by its size.

    Tables with more than `size_threshold` rows are large: an engine for the
    hardware holds them, and updates just the rows that a step touches, with
    the table's own optimizer. The others are Keras `Embedding` layers, trained
    by the model's optimizer. Shapes, combiners and errors are the same on both
    routes; `placement` says which table took which.

    ```python
    table = tfrs_embed.TableConfig("movie", 1_000_000, 64)
    layer = tfrs_embed.PartialTPUEmbedding(
        {"movie": tfrs_embed.FeatureConfig("movie", table)},
        optimizer=tf_keras.optimizers.Adagrad(0.05),
    )
    layer({"movie": tf.constant([3, 5])})["movie"]  # [2, 64]
    ```

    Args:
        feature_config: a `FeatureConfig`, of this library or of
            `tf.tpu.experimental.embedding`, or any nesting of dicts, lists and
            tuples of them. Features that name the same table object share it.
        optimizer: trains the large tables: a `tf_keras` SGD, Adagrad, Adam or
            Ftrl, whose learning rate is read at each step; a
            `tf.tpu.experimental.embedding` optimizer; or the name of one
            ("sgd", "adagrad", "adagrad_momentum", "adam", "ftrl"). A table's
            own optimizer wins over it. None: such tables have no slots and are
            not trained.
        pipeline_execution_with_tensor_core: whether the tables' updates overlap
            the next training step. Lookup i then sees the updates of steps 0
            to i - 2. Reading tables, saving, evaluating and `drain()` apply
            what is pending. On SparseCores that is so within a loop on the
            device, whose end applies it; see docs/tpu.md.
        batch_size: the largest batch of one replica, as in TFRS. Read on TPUs,
            whose tables are made for one where neither an output_shape nor the
            first call says more; elsewhere the inputs have theirs.
        size_threshold: number of rows above which a table is large. 0 makes
            every table large, None none.
        sparse_core_embedding_config: a
            `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`, as
            `tfrs_embed.sparsecore.compute_limits` makes it. Read on SparseCores
            only.
        embedding_feature: a `tf.tpu.experimental.HardwareFeature`'s
            EmbeddingFeature, to overrule what TPUs say they have: UNSUPPORTED
            keeps large tables replicated on them. Read on TPUs only.
        invalid_ids: what an id outside its table does: "error", or "zero": it
            counts as absent, so alone it gives a zero vector, and combiners
            leave it out.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: ids in the nesting of `feature_config`: integers of any dtype,
            each a Tensor of any rank, a RaggedTensor of rank 2, or a
            SparseTensor of rank 2 in row-major order.
        weights: None, or weights in the same nesting, each None or of the kind,
            shape, row splits or indices of its ids. They get no gradient.
        training: as in every Keras layer; it matters to pipelining only.

    Output shape:
        The nesting of `feature_config`; an empty dict gives an empty dict.
        Dense ids give shape(ids) + [dim]. Ragged and sparse ids give
        [batch, dim], combined by the table's combiner, or
        [batch, max_sequence_length, dim] for a sequence feature, zero padded.
        A feature's output_shape wins: output_shape + [dim], where dense ids of
        shape output_shape + [k] are combined over k. All in the layer's
        compute dtype.

    Raises:
        ValueError: a setting is out of range or can't be honoured, or two
            tables have one name.
        TypeError: something is of a wrong kind.
        NotImplementedError: large tables under a strategy that has no engine
            for them.
        RuntimeError: the layer is called under another strategy than it was
            made under; or SparseCores without TensorFlow's wheel for TPUs.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        size_threshold: int | None = 10_000,
        *,
        sparse_core_embedding_config: Any = None,
        embedding_feature: Any = None,
        invalid_ids: str = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self._supports_ragged_inputs = True
        _check_integer(size_threshold, "size_threshold")
        _check_integer(batch_size, "batch_size", minimum=1)
        if invalid_ids not in INVALID_IDS:
            raise ValueError(
                f"invalid_ids must be one of {list(INVALID_IDS)}, got "
                f"{invalid_ids!r}."
            )
        self._arguments = _Arguments(
            optimizer=optimizer,
            pipeline_execution_with_tensor_core=bool(
                pipeline_execution_with_tensor_core
            ),
            batch_size=batch_size,
            size_threshold=size_threshold,
            sparse_core_embedding_config=sparse_core_embedding_config,
            embedding_feature=embedding_feature,
            invalid_ids=invalid_ids,
        )
        self._spec = configs.parse(feature_config)
        self._strategy = tf.distribute.get_strategy()
        routes = placement.route(
            self._spec, size_threshold, self._strategy, embedding_feature
        )
        large = [
            t for t in self._spec.tables if routes[t.name][0] != placement.KERAS
        ]
        # Those of small tables too: a config is valid wherever its tables are.
        table_optimizers = _table_optimizers(self._spec.tables, optimizer)
        table_optimizers = {t.name: table_optimizers[t.name] for t in large}
        self._placement = _placement(self._spec, routes, table_optimizers)
        self._has_tables = False
        self.tables = Tables()
        self._engine_layer: EngineLayer | None = None
        if large:
            engine = self._make_engine(
                routes[large[0].name][0],
                [f for f in self._spec.features if f.table in large],
                table_optimizers,
            )
            self._engine_layer = EngineLayer(
                engine,
                name="tpu_embedding",
                dtype=self._dtype_policy,
            )
            for state in self._engine_layer.engine.states.values():
                self.tables.add(state)
        self._keras_layers: dict[str, Embedding] = {}
        for table in self._spec.tables:
            if table in large:
                continue
            self._keras_layers[table.name] = Embedding(
                table.vocabulary_size,
                table.dim,
                embeddings_initializer=table.initializer,
                name=table.name,
                dtype=self._dtype_policy,
            )
            self.tables.add(TableState(table))

    def _make_engine(
        self,
        kind: str,
        features: Sequence[configs.FeatureSpec],
        table_optimizers: dict[str, optimizers.TableOptimizer | None],
    ) -> Engine:
        arguments, strategy = self._arguments, self._strategy
        pipelined = arguments.pipeline_execution_with_tensor_core
        name = f"Layer '{self.name}'"
        if kind == placement.ONE_DEVICE:
            return OneDeviceEngine(
                features, table_optimizers, pipelined, _device(strategy)
            )
        if kind == placement.SHARDED:
            return ShardedEngine(
                features, table_optimizers, pipelined, strategy, name
            )
        on_tpu = (features, table_optimizers, strategy, name)
        if kind == placement.TPU_REPLICATED:
            return ReplicatedEngine(*on_tpu, arguments.batch_size)
        if kind == placement.EMBEDDING_CORE:
            return EmbeddingCoreEngine(
                *on_tpu, arguments.batch_size, pipelined=pipelined
            )
        return SparseCoreEngine(
            *on_tpu,
            arguments.batch_size,
            pipelined=pipelined,
            config=arguments.sparse_core_embedding_config,
        )

    def build(self, input_shape: Any = None) -> None:
        """Creates all tables, unless they wait for the size of a batch."""
        strategies.check(self.name, self._strategy)
        # A call with no features has no use for tables: see `call`.
        if not (isinstance(input_shape, Mapping) and not input_shape):
            self._make_tables_if_ready()
        super().build(input_shape)

    def _make_tables_if_ready(self) -> None:
        if self._engine_layer is None or self._engine_layer.engine.ready:
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

    def _make_tables(self) -> None:
        with tf.init_scope(), strategies.scope(self._strategy):
            if self._engine_layer is not None:
                self._engine_layer.ensure_built()
                self.step = self._engine_layer.step
            for name, layer in self._keras_layers.items():
                if not layer.built:
                    with tf.name_scope(name):
                        _build(layer, self.tables[name].spec)
                self.tables[name].add("parameters", layer.embeddings)
        self._has_tables = True

    @errors.plain
    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """Looks the features up; see the class."""
        strategies.check(self.name, self._strategy)
        spec = self._spec
        if (
            isinstance(inputs, Mapping)
            and not inputs
            and not weights
            and isinstance(spec.structure.template, dict)
        ):
            # TF-models' ranking task passes all its features by another way
            # and an empty dict to this layer. Tables made for it would be
            # trainable variables without gradients.
            return {}
        self._make_tables_if_ready()
        ids = spec.structure.flatten(inputs, "inputs")
        flat_weights = [None] * len(ids)
        if weights is not None:
            flat_weights = spec.structure.flatten(weights, "weights")
        engine = self._engine_layer and self._engine_layer.engine
        bags = on_host(
            to_bags,
            spec.features,
            ids,
            flat_weights,
            self._arguments.invalid_ids,
            engine and engine.consensus(),
            bool(training),
        )
        by_engine = [
            i
            for i, f in enumerate(spec.features)
            if f.table.name not in self._keras_layers
        ]
        if engine is not None:
            engine.expect([bags[i] for i in by_engine])
        self._ensure_tables()
        outputs: list[Any] = [None] * len(ids)
        if self._engine_layer is not None:
            found = self._engine_layer(
                [bags[i] for i in by_engine], training=training
            )
            for i, output in zip(by_engine, found, strict=True):
                outputs[i] = output
        for i, feature in enumerate(spec.features):
            layer = self._keras_layers.get(feature.table.name)
            if layer is not None:
                vectors = self._keras_vectors(layer.embeddings, bags[i])
                outputs[i] = tf.cast(
                    reshape_output(vectors, bags[i], feature.table.dim),
                    self.compute_dtype,
                )
        return spec.structure.pack(outputs)

    def _keras_vectors(self, table: tf.Variable, bags: Bags) -> tf.Tensor:
        """Looks up in a small table; [count, dim]."""
        strategy = self._strategy
        if is_tpu(strategy) and bags.per_bag != 1:
            # A compiled program takes no number of ids that changes.
            matrix = on_host(Matrix.of, bags, bags.count)
            return matrix.combine(tf.gather(table, matrix.ids))
        workers = isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        )
        gather = gather_densely if workers else tf.gather
        return combine(gather(table, bags.ids), None, bags)

    @property
    def tpu_embedding(self) -> EngineLayer | None:
        """The layer that holds the large tables, or None if there are none.

        Its `embedding_tables` maps the user's table configs to variables.
        """
        return self._engine_layer

    @property
    def keras_embedding_layers(self) -> dict[Any, Embedding]:
        """The Keras layers of the features with small tables.

        Keyed as the features are in a flat dict, else by the features' paths.
        Features that share a table share its layer.
        """
        structure = self._spec.structure
        flat = isinstance(structure.template, dict) and all(
            isinstance(node, int) for node in structure.template.values()
        )
        keys = structure.keys if flat else [f.name for f in self._spec.features]
        return {
            key: self._keras_layers[feature.table.name]
            for key, feature in zip(keys, self._spec.features, strict=True)
            if feature.table.name in self._keras_layers
        }

    @property
    def embedding_tables(self) -> dict[str, tf.Variable]:
        """All tables, of both routes, by name; pending updates applied.

        Shapes are [vocabulary_size, dim].
        """
        self._ensure_tables()
        if tf.executing_eagerly():
            self.drain()
        return {
            table.name: self.tables[table.name].table
            for table in self._spec.tables
        }

    @property
    def table_optimizers(self) -> dict[str, optimizers.TableOptimizer]:
        """The large tables' optimizers by table name.

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

    def drain(self) -> None:
        """Applies the updates that pipelining has put off."""
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
        arguments = self._arguments
        config = super().get_config()
        config.update(
            feature_config=serialization.features_to_config(self._spec),
            optimizer=optimizer_conversion.serialize(arguments.optimizer),
            pipeline_execution_with_tensor_core=(
                arguments.pipeline_execution_with_tensor_core
            ),
            batch_size=arguments.batch_size,
            size_threshold=arguments.size_threshold,
            sparse_core_embedding_config=serialization.dataclass_to_config(
                arguments.sparse_core_embedding_config
            ),
            embedding_feature=getattr(
                arguments.embedding_feature, "name", None
            ),
            invalid_ids=arguments.invalid_ids,
            activity_regularizer=tf_keras.regularizers.serialize(
                self.activity_regularizer
            ),
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PartialTPUEmbedding:
        """Makes the layer of what `get_config` returned; leaves that alone."""
        config = dict(config)
        config["feature_config"] = serialization.features_from_config(
            config["feature_config"]
        )
        config["optimizer"] = optimizer_conversion.deserialize(
            config["optimizer"]
        )
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


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The constructor's arguments, out of reach of Keras's tracking."""

    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    batch_size: int | None
    size_threshold: int | None
    sparse_core_embedding_config: Any
    embedding_feature: Any
    invalid_ids: str


def _build(layer: Embedding, table: configs.TableSpec) -> None:
    """Creates a small table, with the checks that large ones have."""
    given = layer.embeddings_initializer
    layer.embeddings_initializer = lambda *_, **__: tf.concat(
        [rows for _, rows in initial_blocks(table)], 0
    )
    try:
        layer.build(None)
    finally:
        # Keras stores it in a SavedModel, where it can't store ours.
        layer.embeddings_initializer = given


def _check_integer(value: Any, name: str, minimum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer or None, got {value!r}.")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}.")


def _table_optimizers(
    tables: Sequence[configs.TableSpec], optimizer: Any
) -> dict[str, optimizers.TableOptimizer | None]:
    """Each table's optimizer: its own, else the layer's.

    Tables that were given one object share what becomes of it.
    """
    converted: dict[int, optimizers.TableOptimizer | None] = {}
    result = {}
    for table in tables:
        given = optimizer if table.optimizer is None else table.optimizer
        key = id(given)
        if table.optimizer is not None and isinstance(given, str):
            key = id(table)  # Equal names are not one object.
        if key not in converted:
            where = (
                "PartialTPUEmbedding's optimizer"
                if table.optimizer is None
                else f"Table '{table.name}'"
            )
            converted[key] = optimizer_conversion.convert(given, where)
        result[table.name] = converted[key]
    return result


def _device(strategy: tf.distribute.Strategy) -> str | None:
    if tf.distribute.get_strategy() is strategy and (
        tf.distribute.has_strategy()
    ):
        return strategy.extended.worker_devices[0]
    return None


def _placement(
    spec: configs.EmbeddingSpec,
    routes: dict[str, tuple[str, str]],
    table_optimizers: dict[str, optimizers.TableOptimizer | None],
) -> Placement:
    entries = []
    for table in spec.tables:
        engine, reason = routes[table.name]
        optimizer = table_optimizers.get(table.name)
        slots = len(optimizer.rule.slots()) if optimizer else 0
        if engine == placement.KERAS:
            trained_by = "the model's"
        else:
            trained_by = "none" if optimizer is None else str(optimizer)
        size = table.vocabulary_size * table.dim * tf.float32.size
        entries.append(
            TablePlacement(
                table=table.name,
                rows=table.vocabulary_size,
                dim=table.dim,
                bytes=size * (1 + slots),
                features=tuple(
                    f.name for f in spec.features if f.table is table
                ),
                engine=engine,
                optimizer=trained_by,
                reason=reason,
            )
        )
    return Placement(tuple(entries))
