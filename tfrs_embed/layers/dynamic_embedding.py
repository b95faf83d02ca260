"""A layer of one table whose keys come and go."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed import configs
from tfrs_embed.arguments import named
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.dynamic_keys import DynamicKeys
from tfrs_embed.engines.tables.dynamic import DynamicTable
from tfrs_embed.layers import errors
from tfrs_embed.layers.table_arguments import KeyArguments, check_integer
from tfrs_embed.layers.table_layer import TableLayer
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.key_inputs import as_int64
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
        keras = self._front.keras
        with errors.of_layer(self.name):
            vocabulary = _Vocabulary(initial_vocabulary)
            keys = DynamicKeys(
                key_dtype or vocabulary.dtype,
                admission,
                eviction_policy,
                when_full,
                candidates,
                max_rows,
            )
            vocabulary.convert(keys.dtype)
            rows = check_integer(input_dim, "input_dim", 1)
            if rows is None:
                world = self._strategy.num_replicas_in_sync
                rows = vocabulary.rows(keys.dtype, world)
            if rows == 0:
                raise ValueError(
                    "give it an input_dim, or an initial vocabulary."
                )
            if rows < len(vocabulary.keys):
                raise ValueError(
                    f"an initial vocabulary of {len(vocabulary.keys)} keys "
                    f"needs as many rows, and input_dim is {rows}."
                )
            table = configs.TableConfig(
                _TABLE,
                rows,
                output_dim,
                keras.initializers.get(embedding_initializer),
                combiner=combiner,
                keys=keys,
            )
            arguments = _Arguments(
                output_dim=output_dim,
                initial_vocabulary=vocabulary.keys.tolist() or None,
                eviction_policy=keys.eviction,
                input_dim=rows,
                embedding_initializer=table.initializer,
                optimizer=optimizer,
                key_dtype=keys.dtype,
                combiner=table.combiner,
                admission=admission,
                when_full=keys.when_full,
                candidates=candidates,
                max_rows=max_rows,
                communication_dtype=communication_dtype,
            )
        self._vocabulary = vocabulary
        spec = configs.parse(
            configs.FeatureConfig("keys", table), keras, self.name
        )
        self._place(spec, arguments)

    @errors.without_input_dump
    def call(  # type: ignore[override]
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(KeyArguments):
    """The layer's arguments; see the class."""

    output_dim: int
    initial_vocabulary: list[Any] | None
    eviction_policy: Any
    input_dim: int
    combiner: str
    candidates: int | None
    max_rows: int | None


class _Vocabulary:
    """The keys that have rows from the beginning.

    Args:
        given: the keys as the layer is given them, or None.

    Attributes:
        keys: [n], integers, or strings as bytes.
        dtype: their dtype.

    Raises:
        ValueError: they have another shape, or one is there twice or empty.
        TypeError: they are no keys.
    """

    def __init__(self, given: Any) -> None:
        if hasattr(given, "numpy"):
            given = given.numpy()
        # As objects, Python's integers of any size stay what they are.
        keys = np.array([] if given is None else given, object)
        if keys.ndim != 1:
            raise ValueError(
                "initial_vocabulary must have the shape [n], got "
                f"{list(keys.shape)}."
            )
        kinds = {_kind(key) for key in keys}
        if None in kinds or len(kinds) > 1:
            raise TypeError(
                f"initial_vocabulary must be integers or strings, got "
                f"{keys.tolist()[:5]}."
            )
        if kinds == {tf.string}:
            keys[:] = [tf.compat.as_bytes(key) for key in keys]
            self.dtype = tf.string
        else:
            self.dtype = tf.as_dtype(getattr(given, "dtype", tf.int64))
        if b"" in keys.tolist():
            raise ValueError(
                "initial_vocabulary has an empty string, which is no key."
            )
        if len(set(keys.tolist())) < len(keys):
            raise ValueError("initial_vocabulary has keys twice.")
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
                f"initial_vocabulary is of {self.dtype.name}, and key_dtype is "
                f"{dtype.name}."
            )
        if dtype == tf.string:
            return
        for key in min(self.keys), max(self.keys):
            if not dtype.min <= key <= dtype.max:
                raise ValueError(
                    f"initial_vocabulary has {key}, which is no {dtype.name}."
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
        keys = as_int64(
            "initial_vocabulary", dtype, self.keys, Checks()
        ).numpy()
        return world * int(np.bincount(shards_of(keys, world)).max())


def _kind(key: Any) -> tf.DType | None:
    """What a key is, an integer of any dtype or a string; None: neither."""
    if isinstance(key, (str, bytes)):
        return tf.string
    integer = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
    return tf.int64 if integer else None
