"""A layer's tables: their variables, and what users do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.checkpoint import slot_order
from tfrs_embed.checkpoint.names import in_graphs, in_saved_model
from tfrs_embed.compat import keras_versions, strategies
from tfrs_embed.compat.arguments import share
from tfrs_embed.compat.graphs import variables_at_once
from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs.placement import Placement
from tfrs_embed.configs.tables import EmbeddingSpec
from tfrs_embed.engines.engine import FixedBatches
from tfrs_embed.gradients import loss_scale
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.layers.saved_layer import SavedLayer
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.storage.row_store import HOST
from tfrs_embed.storage.table_state import Tables, TableState

if TYPE_CHECKING:
    from tfrs_embed.storage.dynamic_table import DynamicTable
    from tfrs_embed.tools.monitoring import StatisticsReport


class TableHolder(SavedLayer):
    """Holds a configuration's tables, in engines and in Keras layers.

    Subclasses call `_place` at the end of their `__init__`.
    """

    #: The name of the engine's layer in Keras files.
    _ENGINE_NAME: ClassVar[str] = "tpu_embedding"
    #: Whether the model's optimizer trains small tables, in Keras layers.
    _KERAS_TRAINS: ClassVar[bool] = True
    #: The arguments that all workers must share, beside those of all layers.
    _COMPARED: ClassVar[tuple[str, ...]] = ()

    #: Arguments of Keras's `Embedding`, and what has their place.
    _ELSEWHERE: ClassVar[dict[str, str]] = {
        "mask_zero": "FeatureConfig(padding_value=0) masks id 0",
        "input_length": "sequences get a length by FeatureConfig("
        "max_sequence_length=); other shapes are those of the ids",
        "weights": "layer.load_tables sets the tables' values",
    }

    def __init__(self, **kwargs: Any) -> None:
        for argument, way in self._ELSEWHERE.items():
            given = kwargs.pop(argument, None)
            if given is not None and given is not False:
                raise TypeError(
                    f"{type(self).__name__} takes no argument '{argument}': "
                    f"{way}."
                )
        super().__init__(**kwargs)
        self._strategy = tf.distribute.get_strategy()
        # Patches optimizers, so that they tell the loss scale and their slots.
        loss_scale.install(self._keras)
        slot_order.install(self._keras)

    def _place(self, spec: EmbeddingSpec, arguments: TableArguments) -> None:
        """Places each table, and makes the engine and the Keras layers.

        See `placed_tables.place` for errors.
        """
        # Imported here, as a program's start needs neither plans nor engines.
        from tfrs_embed.layers import placed_tables

        placed = placed_tables.place(self, spec, arguments)
        spec, engine = placed.spec, placed.engine
        self._spec, self._engine, self._placed = spec, engine, placed
        self._arguments = arguments
        self._has_tables = False
        # Where a call works on ids; None: on the device of the model.
        alone = all(table.on_host for table in spec.tables)
        self._device = HOST if alone else None
        # Whether the workers have compared their first lookups.
        self._compared = False
        kind: Any = {"dtype": self._dtype_policy, "trainable": self.trainable}
        self.tables = Tables()
        self._engine_layer: EngineLayer | None = None
        if engine is not None:
            self._engine_layer = self._engine_layer_class(
                engine, name=self._ENGINE_NAME, **kind
            )
            for state in engine.states.values():
                self.tables.add(state)
        self._keras_layers: dict[str, Embedding] = {}
        for table in placed.small:
            layer = self._embedding_class(
                table.vocabulary_size,
                table.dim,
                embeddings_initializer=table.initializer,
                name=self._layer_name(table.name),
                **kind,
            )
            self._keras_layers[in_saved_model(table.name)] = layer
            self.tables.add(TableState(table))
        hashed_by = {
            f.table.name: str(f) for f in spec.features if f.hashing is not None
        }
        for name, state in self.tables.items():
            state.belong_to(self, hashed_by.get(name))

    def build(self, input_shape: Any = None) -> None:
        """Creates all tables, unless they wait for the size of a batch."""
        strategies.check(self.name, self._strategy)
        self._ensure_tables(only_if_ready=True)
        super().build(input_shape)

    def _ensure_tables(self, only_if_ready: bool = False) -> None:
        """Creates the tables' variables unless they exist.

        `only_if_ready` leaves out tables that wait for the size of a batch.
        """
        engine: Any = self._engine
        waits = isinstance(engine, FixedBatches) and not engine.can_build
        if self._has_tables or (waits and only_if_ready):
            return
        if strategies.in_tpu_replica():
            # In cross-replica context: once for all replicas.
            tf.distribute.get_replica_context().merge_call(
                lambda _: self._make_tables()
            )
        else:
            self._make_tables()

    def _make_tables(self) -> None:
        from tfrs_embed.distribution import handshake
        from tfrs_embed.layers import placed_tables

        # First: workers create variables together, and workers that differ must
        # not allocate channels of collectives.
        handshake.compare_workers(
            self._strategy,
            f"Layer '{self.name}'",
            lambda: placed_tables.facts(self, self._placed, self._arguments),
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
                    if state.spec.keys is not None:
                        cast(Any, state).step_restored()
            for table in self._placed.small:
                layer = self._keras_layers[in_saved_model(table.name)]
                if not layer.built:
                    with tf.name_scope(in_graphs(table.name)):
                        placed_tables.build_small(layer, table)
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

    def load_tables(
        self,
        tables: Mapping[str, Any],
        rows: Mapping[str, Any] | None = None,
    ) -> None:
        """Sets the values of small and large tables.

        Their slots and the step keep their values; slots of another layer's
        table come with it.

        Example:
            >>> old, new = ["b", "c", "a"], ["a", "b", "d"]
            >>> table = tfrs_embed.TableConfig("word", 3, 2)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("word", table), "adagrad"
            ... )
            >>> layer.build()
            >>> vectors = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
            >>> place = {word: row for row, word in enumerate(old)}
            >>> layer.load_tables(
            ...     {"word": vectors},
            ...     rows={"word": [place.get(word, -1) for word in new]},
            ... )
            >>> layer(tf.constant([0, 1])).numpy().tolist()
            [[3.0, 3.0], [1.0, 1.0]]

        Args:
            tables: for each table's name an array, a tensor or a variable
                [vocabulary_size, dim] of numbers, a Keras `Embedding` layer
                that has one, or a table of another layer, `other.tables[name]`.
                The layer's other tables keep their values. With several
                workers, the same on all.
            rows: for tables whose rows have another order than the values, or
                another number, such as after a vocabulary was sorted anew:
                [vocabulary_size] integers, the row of the values for each row
                here; -1: the row stays as it is.

        Raises:
            TypeError: a value is no array of numbers; no table is set.
            ValueError: there is no such table, or it has another shape, or a
                Keras layer has no table yet, or rows are out of range; no table
                is set.
        """
        from tfrs_embed.layers import table_values

        self._ensure_tables()
        values = table_values.check_values(
            tables, self.tables, rows or {}, self.name
        )
        for name, of_table in values.items():
            table_values.load(self.tables[name], of_table)

    def assign_moving_average(self, other: Any, rate: float) -> None:
        """Moves all tables towards those of another layer.

        Each row becomes rate * row + (1 - rate) * the other's row: target
        networks and averages of weights (Polyak & Juditsky, "Acceleration of
        Stochastic Approximation by Averaging", 1992) are kept so. A table with
        `DynamicKeys` gets the other's keys: new ones with the other's rows.
        Slots stay. It works in blocks on the devices that hold the tables if
        both layers place them alike, else through the host. Call it eagerly,
        between steps; with several workers, all of them.

        Example:
            >>> table = tfrs_embed.TableConfig("movie", 20_000, 2, "zeros")
            >>> feature = tfrs_embed.FeatureConfig("movie", table)
            >>> layer, average = (
            ...     tfrs_embed.PartialTPUEmbedding(feature, "sgd", name=name)
            ...     for name in ("layer", "average")
            ... )
            >>> layer.build()
            >>> layer.tables["movie"].assign([7], [[1, 2]])
            >>> average.build()
            >>> average.assign_moving_average(layer, rate=0.5)
            >>> average(tf.constant([7])).numpy().tolist()
            [[0.5, 1.0]]

        Args:
            other: a layer with tables of the same names.
            rate: the share of this layer's own rows, in [0, 1].

        Raises:
            TypeError: the rate is not a number.
            ValueError: it is not in [0, 1]; the tables' names, shapes or keys
                differ; a table isn't made yet, or has rows of two bytes; or
                there is no room for keys. Then nothing has changed.
        """
        # Imported here, as few programs average tables.
        from tfrs_embed.storage import moving_average

        rate = share(rate, f"Layer '{self.name}': rate")
        moving_average.check(self, other)
        for name, table in self.tables.items():
            moving_average.average(table, other.tables[name], rate)

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
        from tfrs_embed.tools.monitoring import TableMonitor

        self._ensure_tables(only_if_ready=True)
        return TableMonitor(self, sample=sample).measure(batches=batches)

    def count_params(self) -> int:
        """The number of the tables' parameters: rows times dim.

        It excludes optimizers' slots, the step and the scalar weight that
        stands for large tables among the trainable weights.
        """
        return sum(t.vocabulary_size * t.dim for t in self._spec.tables)

    @property
    def placement(self) -> Placement:
        """The placement of each table, with the reason; prints as a table."""
        on_cpus = self._engine_layer is not None and not is_tpu(self._strategy)
        return dataclasses.replace(
            self._placed.placement,
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

    def gradient_norm(self) -> tf.Tensor:
        """Returns the norm of the large tables' gradient in the last update.

        It is `tf.linalg.global_norm` of the gradients that the tables would
        have as variables: of the loss without its scale, summed over ids that
        occur several times and over replicas, before the tables' optimizers
        clip or accumulate it. Frozen tables have no part in it, nor have small
        tables, whose gradients are the model's. In a step, call it after the
        gradient is taken. A layer that is called twice in a step makes two
        updates.

        Updates measure the norm from this method's first call on. Make that
        call eagerly, before functions that train are traced, and on all
        workers.

        Example:
            >>> table = tfrs_embed.TableConfig("movie", 20_000, 2, "ones")
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("movie", table), "sgd"
            ... )
            >>> layer.build()
            >>> assert np.isnan(layer.gradient_norm())
            >>> with tf.GradientTape() as tape:
            ...     loss = tf.reduce_sum(layer(tf.constant([7, 7])))
            >>> _ = tape.gradient(loss, layer.trainable_variables)
            >>> float(layer.gradient_norm()) == np.sqrt(8, dtype=np.float32)
            True

        Returns:
            A scalar float32, equal on all replicas. NaN: there was no update
            yet, or the last one didn't measure it.

        Raises:
            NotImplementedError: a TPU holds tables.
            RuntimeError: it is called for the first time in a function that is
                being traced, or another worker does something else.
        """
        self._ensure_tables()
        if self._engine is None:
            return tf.zeros([])
        square = self._engine.gradient_squares()
        return tf.cast(tf.sqrt(square), tf.float32)
