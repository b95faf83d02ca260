"""A layer of one table with `DynamicKeys`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.arguments import integer_or_none
from tfrs_embed.configs import tables as configs
from tfrs_embed.configs.dynamic_keys import DynamicKeys, as_key_dtype
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.types import Combiner, LayerArguments, Optimizer
from tfrs_embed.layers import errors
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.layers.table_layer import TableLayer
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.key_inputs import as_int64

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfrs_embed.storage.dynamic_table import DynamicTable

_TABLE = "table"


class DynamicEmbedding(TableLayer):
    """Looks keys up in one table whose keys come and go.

    Its arguments are those of `tf_keras.layers.experimental.DynamicEmbedding`,
    which TensorFlow's RFC 446 describes, and its table has `DynamicKeys`: a key
    gets a row in the first training step that sees it; when all rows are taken,
    the key that occurred least loses its row. No callback is needed.

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
            no keys.
        eviction_policy: the `eviction` of `DynamicKeys`, such as "lfu", "lru"
            or a `TimeToLive`.
        input_dim: the number of rows. None: the number of initial keys, on one
            replica.
        embedding_initializer: initializer of the rows, as in Keras; it must be
            able to make rows by their keys, see docs/dynamic_tables.md.
            Without a seed, rows depend on the key and the layer's name.
        optimizer: trains the table, as in `PartialTPUEmbedding`.
        key_dtype: the keys' dtype. None: that of the initial vocabulary, or
            int64.
        combiner: combines a row of ragged or sparse keys to one vector: "sum",
            "mean" or "sqrtn". None: each key has a vector of its own.
        admission: the `admission` of `DynamicKeys`.
        when_full: the `when_full` of `DynamicKeys`.
        candidates: the `candidates` of `DynamicKeys`.
        max_rows: the `max_rows` of `DynamicKeys`.
        communication_dtype: the dtype that rows and gradients are sent as, as
            in `PartialTPUEmbedding`.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: keys: a Tensor of any rank, a RaggedTensor or a SparseTensor of
            rank 2.
        weights: None, or weights of the kind and shape of the keys.
        training: as in `PartialTPUEmbedding`.

    Output shape:
        shape(keys) + [output_dim]; ragged and sparse keys give
        [batch, output_dim], and with combiner=None a RaggedTensor
        [batch, None, output_dim].

    Attributes:
        table: the table, with the methods of tables with `DynamicKeys`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of a wrong kind.
        NotImplementedError: no engine for the table supports the strategy.
    """

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
        combiner: Combiner | None = "mean",
        admission: Any = None,
        when_full: str | None = None,
        candidates: int | None = None,
        max_rows: int | None = None,
        communication_dtype: Any = "float32",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        with errors.of_layer(self.name):
            arguments = TableArguments(locals())
            vocabulary, dtype = _read(initial_vocabulary, key_dtype)
            rules = admission, eviction_policy, when_full, candidates, max_rows
            keys = DynamicKeys(dtype, *rules)
            rows = integer_or_none(input_dim, "input_dim")
            if rows is None and self._strategy.num_replicas_in_sync == 1:
                rows = len(vocabulary)
            if not rows:
                raise ValueError(
                    "give it an input_dim; without one it needs initial keys, "
                    "and one replica."
                )
            if rows < len(vocabulary):
                raise ValueError(
                    f"an initial vocabulary of {len(vocabulary)} keys "
                    f"needs as many rows, and input_dim is {rows}."
                )
            table = configs.TableConfig(
                _TABLE,
                rows,
                output_dim,
                arguments.given["embedding_initializer"],
                combiner="mean" if combiner is None else combiner,
                keys=keys,
            )
            arguments.given.update(
                initial_vocabulary=vocabulary.tolist() or None,
                eviction_policy=keys.eviction,
                input_dim=rows,
                key_dtype=keys.dtype,
                when_full=keys.when_full,
            )
        self._vocabulary = vocabulary
        feature = configs.FeatureConfig(
            "keys", table, combiner=None if combiner is None else "table"
        )
        spec = parse(feature, self._keras, self.name)
        self._place(spec, arguments)

    @property
    def table(self) -> DynamicTable:
        """The table."""
        self._ensure_tables()
        return cast("DynamicTable", self.tables[_TABLE])

    def _make_tables(self) -> None:
        super()._make_tables()
        if len(self._vocabulary):
            with tf.init_scope():
                # A restored checkpoint overrules the initial keys.
                if not self.table.size:
                    self.table.give_rows(self._vocabulary)


def _read(vocabulary: Any, key_dtype: Any) -> tuple[Any, tf.DType]:
    """Checks an initial vocabulary, and finds the keys' dtype.

    The keys are [n] numbers of that dtype, or strings.
    """
    if hasattr(vocabulary, "numpy"):
        vocabulary = vocabulary.numpy()
    # dtype object keeps Python's integers of any size.
    keys = np.array([] if vocabulary is None else vocabulary, object)
    where = "initial_vocabulary"
    if keys.ndim != 1:
        raise TypeError(
            f"{where} must be [n] integers or strings, got {vocabulary!r:.80}."
        )
    if any(isinstance(key, (str, bytes)) for key in keys):
        own = tf.string
    else:
        own = tf.as_dtype(getattr(vocabulary, "dtype", tf.int64))
    dtype = as_key_dtype(key_dtype or own, "key_dtype")
    with tf.init_scope():
        numbers = as_int64(where, dtype, keys.tolist(), Checks(), True)
    if len(np.unique(numbers)) < len(keys) or {"", b""} & {*keys.flat}:
        raise ValueError(
            f"{where} has an empty string, which is no key, or a key twice."
        )
    return keys.astype(dtype.as_numpy_dtype), dtype
