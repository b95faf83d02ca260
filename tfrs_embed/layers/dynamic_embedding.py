"""A layer of one table whose keys come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed import configs, placement, serialization
from tfrs_embed.arguments import named
from tfrs_embed.distribution import wire
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.dynamic_keys import (
    DynamicKeys,
    rule_from_config,
    to_config,
)
from tfrs_embed.engines.tables.dynamic import DynamicTable
from tfrs_embed.layers import errors
from tfrs_embed.layers.table_arguments import TableArguments, check_integer
from tfrs_embed.layers.table_holder import TableHolder
from tfrs_embed.layers.table_layer import TableLayer
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.key_inputs import as_int64
from tfrs_embed.optimizers import conversion
from tfrs_embed.types import Combiner, LayerArguments, Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TABLE = "table"


class DynamicEmbedding(TableLayer):
    """Looks keys up in one table whose keys come and go.

    It has the words of `tf_keras.layers.experimental.DynamicEmbedding`, which
    TensorFlow's RFC 446 describes, on a table with `DynamicKeys`: a key gets a
    row in the first training step that sees it, and the key that occurred least
    loses its row to another when there is none left. No callback is needed.

    Example:
        >>> layer = tfrs_embed.DynamicEmbedding(
        ...     output_dim=2,
        ...     initial_vocabulary=["a", "b", "c", "d", "e"],
        ...     eviction_policy="lfu",
        ... )
        >>> layer(tf.constant([["a", "j"], ["c", "e"]])).shape
        TensorShape([2, 2, 2])
        >>> layer.table.size
        5

    Args:
        output_dim: width of a row.
        initial_vocabulary: keys that have rows from the beginning, [n]; None:
            none has.
        eviction_policy: "lfu", "lru", a `TimeToLive`, a function or None: the
            `eviction` of `DynamicKeys`.
        input_dim: the number of rows. None: that of the initial vocabulary; on
            several replicas so many more that each of its keys finds a row on
            its replica.
        embedding_initializer: initializer of the rows, as in Keras; it has to
            be one that makes rows by their keys, see docs/dynamic_tables.md.
            Without a seed, rows depend on the key and the layer's name.
        optimizer: trains the table, as in `PartialTPUEmbedding`.
        key_dtype: the keys' dtype. None: that of the initial vocabulary, or
            int64.
        combiner: how several keys of a row of ragged or sparse keys become one
            vector: "sum", "mean" or "sqrtn".
        admission: the `admission` of `DynamicKeys`.
        when_full: the `when_full` of `DynamicKeys`.
        candidates: the `candidates` of `DynamicKeys`.
        max_rows: the `max_rows` of `DynamicKeys`.
        communication_dtype: what rows and gradients are sent as between
            replicas, as in `PartialTPUEmbedding`.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: keys: a Tensor of any rank, a RaggedTensor or a SparseTensor of
            rank 2.
        weights: None, or weights of the kind and shape of the keys.
        training: as in `PartialTPUEmbedding`.

    Output shape:
        shape(keys) + [output_dim]; ragged and sparse keys give
        [batch, output_dim].

    Attributes:
        table: the table, with the methods of tables with `DynamicKeys`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: something is of a wrong kind.
        NotImplementedError: the strategy has no engine for the table.
    """

    @named
    def __init__(
        self,
        output_dim: int,
        initial_vocabulary: Any = None,
        eviction_policy: Any = "lfu",
        *,
        input_dim: int | None = None,
        embedding_initializer: Any = "uniform",
        optimizer: Optimizer = "adagrad",
        key_dtype: Any = None,
        combiner: Combiner = "mean",
        admission: Any = None,
        when_full: str | None = None,
        candidates: int | None = None,
        max_rows: int | None = None,
        communication_dtype: Any = "float32",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        where = f"Layer '{self.name}'"
        self._vocabulary = _Vocabulary(initial_vocabulary, where)
        input_dim = check_integer(input_dim, f"{where}: input_dim", 1)
        rows = len(self._vocabulary.keys) if input_dim is None else input_dim
        if rows < max(1, len(self._vocabulary.keys)):
            raise ValueError(
                f"{where}: give it an input_dim, or an initial vocabulary."
                if rows == 0
                else f"{where}: an initial vocabulary of "
                f"{len(self._vocabulary.keys)} keys needs as many rows, and "
                f"input_dim is {rows}."
            )
        keras = self._front.keras
        try:
            keys = DynamicKeys(
                key_dtype or self._vocabulary.dtype,
                admission,
                eviction_policy,
                when_full,
                candidates,
                max_rows,
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        self._vocabulary.convert(keys.dtype)
        if input_dim is None:
            world = self._strategy.num_replicas_in_sync
            rows = self._vocabulary.rows(keys.dtype, world)
        table = configs.TableConfig(
            _TABLE,
            rows,
            output_dim,
            keras.initializers.get(embedding_initializer),
            combiner=combiner,
            keys=keys,
        )
        arguments = TableArguments(
            optimizer=optimizer,
            pipeline_execution_with_tensor_core=False,
            size_threshold=None,
            sparse_core_embedding_config=None,
            embedding_feature=None,
            invalid_ids="error",
            plan=None,
            communication_dtype=wire.communication_dtype(communication_dtype),
        )
        spec = configs.parse(
            configs.FeatureConfig("keys", table), keras, self.name
        )
        routes = placement.route(spec, None, self._strategy)
        self._place(spec, routes, arguments)

    @errors.without_input_dump
    def call(
        self,
        inputs: Any,
        weights: Any = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Looks keys up; see the class."""
        return self._lookup([inputs], [weights], training)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """The shape of the output for dense keys of `input_shape`."""
        dim = self._spec.tables[0].dim
        return tf.TensorShape(input_shape) + tf.TensorShape([dim])

    @property
    def table(self) -> DynamicTable:
        """The table."""
        self._ensure_tables()
        state = self.tables[_TABLE]
        assert isinstance(state, DynamicTable)
        return state

    def _make_tables(self) -> None:
        super()._make_tables()
        if len(self._vocabulary.keys):
            state = self.tables[_TABLE]
            assert isinstance(state, DynamicTable)
            with tf.init_scope():
                # What a checkpoint brought is later than the first keys.
                if not state.size:
                    state.give_rows(self._vocabulary.keys)

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able.

        Raises:
            ValueError: the optimizer's learning rate can't be stored, or the
                eviction policy is a function.
        """
        keras = self._front.keras
        [table] = self._spec.tables
        assert table.keys is not None
        keys = to_config(table.keys)
        config = super(TableHolder, self).get_config()
        config.update(
            output_dim=table.dim,
            initial_vocabulary=self._vocabulary.to_config(),
            eviction_policy=keys["eviction"],
            input_dim=table.vocabulary_size,
            embedding_initializer=serialization.initializer_to_config(
                table.source.initializer, keras
            ),
            optimizer=conversion.serialize(
                self._arguments.optimizer, self.table_optimizers.get(_TABLE)
            ),
            key_dtype=keys["dtype"],
            combiner=table.combiner,
            admission=keys["admission"],
            when_full=keys["when_full"],
            candidates=keys["candidates"],
            max_rows=keys["max_rows"],
            communication_dtype=self._arguments.sent_as,
            activity_regularizer=keras.regularizers.serialize(
                self.activity_regularizer
            ),
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DynamicEmbedding:
        """Makes the layer of what `get_config` returned; leaves that alone."""
        keras = cls._front.keras
        arguments = dict(config)
        for name in ("eviction_policy", "admission"):
            arguments[name] = rule_from_config(arguments[name])
        arguments["embedding_initializer"] = (
            serialization.initializer_from_config(
                config["embedding_initializer"], keras
            )
        )
        arguments["optimizer"] = conversion.deserialize(
            config["optimizer"], keras
        )
        return cls(**arguments)


class _Vocabulary:
    """The keys that have rows from the beginning.

    Args:
        given: the keys as the layer is given them, or None.
        where: the layer, for errors.

    Attributes:
        keys: [n], integers, or strings as bytes.
        dtype: their dtype.

    Raises:
        ValueError: they have another shape, or one is there twice or empty.
        TypeError: they are no keys.
    """

    def __init__(self, given: Any, where: str) -> None:
        self._what = f"{where}: initial_vocabulary"
        if hasattr(given, "numpy"):
            given = given.numpy()
        # As objects, Python's integers of any size stay what they are.
        keys = np.array([] if given is None else given, object)
        if keys.ndim != 1:
            raise ValueError(
                f"{self._what} must have the shape [n], got {list(keys.shape)}."
            )
        kinds = {_kind(key) for key in keys}
        if None in kinds or len(kinds) > 1:
            raise TypeError(
                f"{self._what} must be integers or strings, got "
                f"{keys.tolist()[:5]}."
            )
        if kinds == {tf.string}:
            keys[:] = [tf.compat.as_bytes(key) for key in keys]
            self.dtype = tf.string
        else:
            self.dtype = tf.as_dtype(getattr(given, "dtype", tf.int64))
        if b"" in keys.tolist():
            raise ValueError(
                f"{self._what} has an empty string, which is no key."
            )
        if len(set(keys.tolist())) < len(keys):
            raise ValueError(f"{self._what} has keys twice.")
        self.keys = keys

    def convert(self, dtype: tf.DType) -> None:
        """Brings the keys to a table's dtype.

        Raises:
            TypeError: that is integers, and they are strings, or conversely.
            ValueError: it doesn't have all of them.
        """
        if not len(self.keys):
            return
        if (self.dtype == tf.string) != (dtype == tf.string):
            raise TypeError(
                f"{self._what} is of {self.dtype.name}, and key_dtype is "
                f"{dtype.name}."
            )
        if dtype == tf.string:
            return
        for key in min(self.keys), max(self.keys):
            if not dtype.min <= key <= dtype.max:
                raise ValueError(
                    f"{self._what} has {key}, which is no {dtype.name}."
                )
        self.keys = self.keys.astype(dtype.as_numpy_dtype)

    def rows(self, dtype: tf.DType, world: int) -> int:
        """The rows of a table over replicas, each of which has its keys' ones.

        Args:
            dtype: the table's dtype of keys.
            world: the number of replicas.
        """
        if world == 1:
            return len(self.keys)
        keys = as_int64(self._what, dtype, self.keys, Checks()).numpy()
        return world * int(np.bincount(shards_of(keys, world)).max())

    def to_config(self) -> list[Any] | None:
        """The keys, JSON-able."""
        keys = self.keys.tolist()
        texts = [k.decode() if isinstance(k, bytes) else k for k in keys]
        return texts or None


def _kind(key: Any) -> tf.DType | None:
    """What a key is, an integer of any dtype or a string; None: neither."""
    if isinstance(key, (str, bytes)):
        return tf.string
    integer = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
    return tf.int64 if integer else None
