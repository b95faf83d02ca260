"""A table spread over replicas, looked up by keys of any value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed import configs, placement, strategies
from tfrs_embed._tensorflow import record
from tfrs_embed.arguments import named
from tfrs_embed.checkpoint.index import check_files
from tfrs_embed.checkpoint.names import in_graphs
from tfrs_embed.distribution import handshake
from tfrs_embed.engines import factory
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.layers import errors
from tfrs_embed.layers.base import ChangeIds, Layer
from tfrs_embed.layers.copies import copy_layer, copy_state
from tfrs_embed.layers.key_arguments import KeyArguments
from tfrs_embed.layers.keys import checked_shape, to_bags
from tfrs_embed.monitoring.monitor import TableMonitor
from tfrs_embed.monitoring.reports import StatisticsReport
from tfrs_embed.ops.lookup import reshape_output
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.placement import EngineKind
from tfrs_embed.serving import tables as served_tables
from tfrs_embed.strategies import is_tpu
from tfrs_embed.types import LayerArguments, Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class All2AllDenseEmbedding(Layer):
    """Looks keys up in one table that is spread over the replicas.

    The arguments and shapes are those of the layer of this name in NVIDIA's
    Sparse Operation Kit. Each replica looks up its own part of the batch. A
    key's row is on the replica that a hash of the key says, or, without
    `use_hashtable`, on replica key % replicas; keys, rows and gradients are
    exchanged all to all. Gradients are summed over the replicas. With one
    replica, and with no strategy, nothing is exchanged.

    With `use_hashtable` keys have any value: the table is one with
    `DynamicKeys`. A key gets a row in the first step that updates the table; a
    lookup for training gives it its initial values already. Elsewhere a key
    without a row gives zeros. A step whose keys don't all find room is an error
    on all replicas, and changes nothing. Without `use_hashtable` the key is the
    row.

    Example:
        >>> layer = tfrs_embed.All2AllDenseEmbedding(
        ...     max_vocabulary_size_per_gpu=10_000,
        ...     embedding_vec_size=16,
        ...     slot_num=3,
        ...     nnz_per_slot=2,
        ...     optimizer=tf_keras.optimizers.Adagrad(0.05),
        ... )
        >>> keys = tf.constant([[[7, 7], [-1, 5], [2**60, 0]]], tf.int64)
        >>> with tf.GradientTape() as tape:
        ...     vectors = layer(keys, training=True)
        ...     loss = tf.reduce_sum(vectors)
        >>> vectors.shape
        TensorShape([1, 3, 2, 16])
        >>> gradients = tape.gradient(loss, layer.trainable_variables)
        >>> layer.size
        5

    Args:
        max_vocabulary_size_per_gpu: rows on each replica, on whatever device.
        embedding_vec_size: width of a row.
        slot_num: number of slots of a sample.
        nnz_per_slot: number of keys of a slot.
        dynamic_input: whether the inputs are any number of keys in a row;
            `slot_num` and `nnz_per_slot` are then not read.
        use_hashtable: whether keys have any value; if not, keys are 0 to
            max_vocabulary_size_per_gpu * replicas - 1.
        key_dtype: the dtype of the inputs: int32, int64, uint32 or uint64.
        embedding_initializer: initializer of the rows, as in Keras; None:
            uniform in [-0.05, 0.05]. With `use_hashtable` it has to be one that
            makes rows by their keys, see docs/dynamic_tables.md. Without a
            seed, rows then depend on the key and the layer's name.
        optimizer: trains the table, as in `PartialTPUEmbedding`; None: it is
            not trained, and no key gets a row.
        admission: which keys get rows, as in `DynamicKeys`.
        eviction: which keys lose theirs first, as in `DynamicKeys`. None: none
            does.
        when_full: "evict", "grow" or "error", as in `DynamicKeys`; None:
            "evict" if there is an eviction rule, else "error".
        communication_dtype: what rows and gradients are sent as between
            replicas, as in `PartialTPUEmbedding`.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: keys, a Tensor of `key_dtype`.
        training: whether this is part of a training step. None: whether the
            call is on a gradient tape. False: the table is a constant, which
            has no gradient.

    Input shape:
        [batch, slot_num, nnz_per_slot]; with `dynamic_input` [k].

    Output shape:
        The input's shape + [embedding_vec_size], in the layer's compute dtype.

    Attributes:
        table: the table, whose `variables` a checkpoint holds as
            `<layer>/table/<name>`, whatever the number of replicas: rows as
            "parameters", and the optimizer's slots. With `use_hashtable` these
            are of the keys that have rows, which are in "keys", ascending and
            int64 (those of uint64 have the same bits). The table then has the
            methods of a table with `DynamicKeys`.
        step: the number of updates made.

    Raises:
        ValueError: an argument is out of range, or inputs of another shape.
        TypeError: something is of a wrong kind, or inputs of another dtype.
        NotImplementedError: the strategy has no collectives for it.
        RuntimeError: the layer is called under another strategy than it was
            made under.
        tf.errors.InvalidArgumentError: a key is out of range, or there is no
            room for it.
    """

    @named
    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = tf.int64,
        embedding_initializer: Any = None,
        *,
        optimizer: Optimizer = "adagrad",
        admission: Any = None,
        eviction: Any = None,
        when_full: str | None = None,
        communication_dtype: Any = "float32",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        self._where = f"Layer '{self.name}'"
        self._arguments = KeyArguments(
            where=self._where,
            max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
            embedding_vec_size=embedding_vec_size,
            slot_num=slot_num,
            nnz_per_slot=nnz_per_slot,
            dynamic_input=dynamic_input,
            use_hashtable=use_hashtable,
            key_dtype=key_dtype,
            embedding_initializer=embedding_initializer,
            optimizer=optimizer,
            admission=admission,
            eviction=eviction,
            when_full=when_full,
            communication_dtype=communication_dtype,
            keras=self._front.keras,
        )
        self._strategy = tf.distribute.get_strategy()
        self._check_support()
        feature = self._feature()
        table_optimizer = conversion.convert(
            optimizer, self._where, self._front.keras
        )
        self._engine = self._make_engine(feature, table_optimizer)
        self._engine_layer = self._front.engine_layer(
            self._engine,
            name="engine",
            dtype=self._dtype_policy,
            trainable=self.trainable,
        )
        self._has_table = False
        self.table: TableState = self._engine.states[feature.table.name]

    def _feature(self) -> configs.FeatureSpec:
        """The one feature and its table, in the engines' terms."""
        arguments = self._arguments
        initializer = arguments.embedding_initializer
        if initializer is None:
            initializers = self._front.keras.initializers
            initializer = initializers.RandomUniform(-0.05, 0.05)
        rows = arguments.max_vocabulary_size_per_gpu
        table = configs.TableConfig(
            "table",
            rows * self._strategy.num_replicas_in_sync,
            arguments.embedding_vec_size,
            initializer=initializer,
            keys=arguments.keys(),
        )
        spec = configs.parse(
            configs.FeatureConfig("keys", table), owner=self.name
        )
        [feature] = spec.features
        return feature

    def _make_engine(
        self,
        feature: configs.FeatureSpec,
        optimizer: TableOptimizer | None,
    ) -> Engine:
        several = self._strategy.num_replicas_in_sync > 1
        if feature.table.keys is not None:
            kind = EngineKind.DYNAMIC_SHARDED if several else EngineKind.DYNAMIC
        elif several:
            kind = EngineKind.SHARDED
        else:
            kind = EngineKind.ONE_DEVICE
        table = feature.table.name
        return factory.make_engine(
            [feature],
            {table: optimizer},
            {table: kind},
            EngineOptions(
                self._strategy,
                self._where,
                communication_dtype=self._arguments.communication_dtype,
            ),
        )

    def statistics(self, sample: int | None = None) -> StatisticsReport:
        """Measures the table; see `PartialTPUEmbedding.statistics`.

        Args:
            sample: about how many rows to read; None: all, in blocks.

        Returns:
            The statistics; they print as a table.

        Raises:
            ValueError: the sample is below 1.
            TypeError: the sample is no integer.
        """
        self._ensure_table()
        return TableMonitor(self, sample=sample).measure()

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        strategies.check(self.name, self._strategy)
        self._ensure_table()
        super().build(input_shape)

    def _ensure_table(self) -> None:
        """Creates the table's variables if they aren't there yet."""
        if self._has_table:
            return
        handshake.compare_workers_under(
            self._strategy, self._where, self._describe
        )
        with (
            self._front.creating(),
            tf.init_scope(),
            strategies.scope(self._strategy),
        ):
            self._engine_layer.ensure_built()
        self.step = self._engine_layer.step
        self.table.step_restored()
        self._has_table = True

    if TYPE_CHECKING:
        # To a type checker Keras's own is Any.
        def __call__(
            self, inputs: Any, *, training: bool | None = None
        ) -> tf.Tensor:
            """Looks keys up; see the class."""

    def _describe(self) -> handshake.Facts:
        """The facts, besides the table, that all workers must share."""
        arguments = self._arguments
        return {
            "": {
                "class": type(self).__name__,
                "dtype": self.compute_dtype,
                "trainable": self.trainable,
                "slot_num": arguments.slot_num,
                "nnz_per_slot": arguments.nnz_per_slot,
                "dynamic_input": arguments.dynamic_input,
                "use_hashtable": arguments.use_hashtable,
                "key_dtype": arguments.key_dtype.name,
            }
        }

    @errors.without_input_dump
    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Looks keys up; see the class."""
        strategies.check(self.name, self._strategy)
        self._ensure_table()
        if training is None:
            # Such a call is a training step: its gradient updates the table.
            training = record.could_possibly_record()
        bags = to_bags(
            inputs,
            bool(training),
            self._arguments,
            self._engine,
            self._where,
        )
        served = served_tables.current()
        if served is not None:
            vectors = served.gather(self, self.table, bags.ids)
            dim = self._arguments.embedding_vec_size
            output = reshape_output(vectors, bags, dim)
            return tf.cast(output, self.compute_dtype)
        [output] = self._engine_layer.look_up([bags], training)
        return output

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """The shape of the output for keys of `input_shape`."""
        shape = checked_shape(
            tf.TensorShape(input_shape), self._arguments, self._where
        )
        return shape + tf.TensorShape([self._arguments.embedding_vec_size])

    @property
    def table_optimizer(self) -> TableOptimizer | None:
        """The table's optimizer, or None if it is not trained.

        Assigning its `learning_rate` takes effect at the next step.
        """
        [optimizer] = self._engine.optimizers.values()
        return optimizer

    @property
    def sizes(self) -> dict[int, int]:
        """The number of keys that have rows, of each shard of this process.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        return self._keyed_engine("sizes").local_key_counts()

    @property
    def size(self) -> int:
        """The number of keys that have rows, of all shards.

        With several workers it is a collective: all of them must ask.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        return sum(self._keyed_engine("size").key_counts())

    @property
    def load(self) -> float:
        """How full the fullest shard is, from 0 to 1.

        A step that needs more than 1 is an error, unless the table evicts or
        grows. With several workers it is a collective: all of them must ask.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        engine = self._keyed_engine("load")
        return max(engine.key_counts()) / (engine.key_capacity or 1)

    def _keyed_engine(self, what: str) -> Any:
        if not self._arguments.use_hashtable:
            raise AttributeError(
                f"{self._where} has no {what}: with use_hashtable=False every "
                "key has its row."
            )
        self._ensure_table()
        return self._engine

    def save_own_variables(self, store: Any) -> None:
        """Nothing: the engine's own layer stores them."""

    def load_own_variables(self, store: Any) -> None:
        """Nothing: the engine's own layer loads them."""

    def __repr__(self) -> str:
        """The table's shape on each replica, and what its keys are."""
        if not hasattr(self, "_arguments"):
            return super().__repr__()  # It is being made.
        arguments = self._arguments
        keys = "any keys" if arguments.use_hashtable else "keys are rows"
        return (
            f"<All2AllDenseEmbedding '{self.name}': "
            f"[{arguments.max_vocabulary_size_per_gpu}, "
            f"{arguments.embedding_vec_size}] on each replica, {keys}>"
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able.

        Raises:
            ValueError: the optimizer's learning rate can't be stored.
        """
        config = super().get_config()
        keras = self._front.keras
        config.update(self._arguments.to_config(self.table_optimizer, keras))
        config["activity_regularizer"] = keras.regularizers.serialize(
            self.activity_regularizer
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> All2AllDenseEmbedding:
        """Makes the layer of what `get_config` returned; leaves that alone."""
        return cls(**KeyArguments.from_config(config, cls._front.keras))

    def __deepcopy__(self, memo: dict[int, Any]) -> All2AllDenseEmbedding:
        """Copies the layer with its table, slots and step.

        Raises:
            ValueError: the optimizer's learning rate can't be stored.
        """
        copied = copy_layer(self, self._strategy, memo)
        if self._has_table:
            copied.build(None)
            copy_state([(self.table, copied.table)], (self.step, copied.step))
        return copied

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        return change(inputs, self._arguments.key_dtype, False)

    def get_build_config(self) -> dict[str, Any]:
        """Whether there is a table; it does not depend on the inputs."""
        return {"has_table": True} if self._has_table else {}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Creates the table."""
        with tf.name_scope(in_graphs(self.name)):  # As in a call.
            self.build(None)

    def _check_support(self) -> None:
        strategy = self._strategy
        parameter_server = tf.distribute.experimental.ParameterServerStrategy
        if (
            is_tpu(strategy)
            or isinstance(strategy, parameter_server)
            or (
                strategy.num_replicas_in_sync > 1
                and not placement.can_shard(strategy)
            )
        ):
            raise NotImplementedError(
                f"{self._where} needs one replica, a MirroredStrategy or a "
                f"MultiWorkerMirroredStrategy, not {type(strategy).__name__}."
            )

    def _checkpoint_adapter(self, path: str) -> Any:
        # TensorFlow asks for it before it reads a value.
        check_files(path)
        return super()._checkpoint_adapter(path)  # type: ignore[misc]

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            # The same keys whatever holds the table.
            children = {
                k: v for k, v in children.items() if k in ("table", "step")
            }
        return children
