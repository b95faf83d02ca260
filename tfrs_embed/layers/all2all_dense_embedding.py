"""A table spread over replicas, looked up by keys of any value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs import tables as configs
from tfrs_embed.configs.dynamic_keys import KeysOfShards, as_key_dtype
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.configs.types import LayerArguments, Optimizer
from tfrs_embed.layers import errors
from tfrs_embed.layers.base import ChangeIds
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.layers.table_layer import TableLayer
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.table_state import TableState

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfrs_embed.storage.dynamic_table import DynamicTable

KEY_DTYPES = (tf.int32, tf.int64, tf.uint32, tf.uint64)
_TABLE = "table"


class All2AllDenseEmbedding(TableLayer):
    """Looks keys up in one table that is spread over the replicas.

    The arguments and shapes are those of the layer of this name in NVIDIA's
    Sparse Operation Kit. Each replica looks up its own part of the batch. A
    key's row is on replica key % replicas; keys, rows and gradients are
    exchanged all to all. Gradients are summed over the replicas. With one
    replica, and with no strategy, nothing is exchanged.

    With `use_hashtable` keys have any value: the table is one with
    `DynamicKeys`. A key gets a row in the first step that updates the table; a
    lookup for training returns its initial values before. Otherwise a key
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
        max_vocabulary_size_per_gpu: rows on each replica, also on CPUs.
        embedding_vec_size: width of a row.
        slot_num: number of slots of a sample.
        nnz_per_slot: number of keys of a slot.
        dynamic_input: whether the inputs are any number of keys in a row;
            `slot_num` and `nnz_per_slot` are then not read.
        use_hashtable: whether keys have any value; if not, keys are 0 to
            max_vocabulary_size_per_gpu * replicas - 1.
        key_dtype: the dtype of the inputs: int32, int64, uint32 or uint64.
        embedding_initializer: initializer of the rows, as in Keras; None:
            uniform in [-0.05, 0.05]. With `use_hashtable` it must be able to
            make rows by their keys, see docs/dynamic_tables.md. Without a
            seed, rows then depend on the key and the layer's name.
        optimizer: trains the table, as in `PartialTPUEmbedding`; None: the
            table is not trained, and no key gets a row.
        admission: which keys get rows, as in `DynamicKeys`.
        eviction: which keys lose their rows first, as in `DynamicKeys`. None:
            none.
        when_full: "evict", "grow" or "error", as in `DynamicKeys`; None:
            "evict" if there is an eviction rule, else "error".
        communication_dtype: the dtype that rows and gradients are sent as, as
            in `PartialTPUEmbedding`.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: keys, a Tensor of `key_dtype`.
        training: whether this is part of a training step. None: whether the
            call is on a gradient tape. False: the table is a constant without
            a gradient.

    Input shape:
        [batch, slot_num, nnz_per_slot]; with `dynamic_input` [k].

    Output shape:
        The input's shape + [embedding_vec_size], in the layer's compute dtype.

    Attributes:
        table: the table, whose `variables` a checkpoint holds as
            `<layer>/table/<name>`, for any number of replicas: rows as
            "parameters", and the optimizer's slots. With `use_hashtable` they
            have a row for each key in "keys", ascending and int64 (those of
            uint64 have the same bits), and the table has the methods of a table
            with `DynamicKeys`.
        step: the number of updates made.

    Raises:
        ValueError: an argument is out of range, or inputs of another shape.
        TypeError: an argument is of a wrong kind, or inputs of another dtype.
        NotImplementedError: the strategy has no collectives for it.
        RuntimeError: the layer is called under another strategy than it was
            made under.
        tf.errors.InvalidArgumentError: a key is out of range, or there is no
            room for it.
    """

    _CHECKPOINTED = (_TABLE, "step")
    _COMPARED = (
        *("slot_num", "nnz_per_slot", "dynamic_input"),
        *("use_hashtable", "key_dtype"),
    )
    # Conversions of checkpoint files use this name.
    _ENGINE_NAME = "engine"

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
        if is_tpu(self._strategy):
            raise NotImplementedError(
                f"Layer '{self.name}' needs one replica, a MirroredStrategy or "
                "a MultiWorkerMirroredStrategy, not "
                f"{type(self._strategy).__name__}."
            )
        with errors.of_layer(self.name):
            arguments = TableArguments(locals())
            given = arguments.given
            dtype = as_key_dtype(key_dtype, "key_dtype", KEY_DTYPES)
            given["key_dtype"] = dtype
            rules = {
                n: given[n] for n in ("admission", "eviction", "when_full")
            }
            asked = [name for name, rule in rules.items() if rule is not None]
            keys = KeysOfShards(dtype, **rules) if use_hashtable else None
            if asked and keys is None:
                raise ValueError(
                    "with use_hashtable=False every key has its row: "
                    f"{', '.join(asked)} must be left out."
                )
            dim = given["embedding_vec_size"]
            replicas = self._strategy.num_replicas_in_sync
            table = configs.TableConfig(
                _TABLE,
                given["max_vocabulary_size_per_gpu"] * replicas,
                dim,
                given["embedding_initializer"]
                or self._keras.initializers.RandomUniform(-0.05, 0.05),
                keys=keys,
            )
        slots = (given["slot_num"], given["nnz_per_slot"])
        shape = (None, *(() if dynamic_input else slots), dim)
        feature = configs.FeatureConfig(self.name, table, output_shape=shape)
        spec = parse(feature, self._keras, self.name)
        self._place(spec, arguments)
        self.table: TableState = self.tables[_TABLE]

    @errors.without_input_dump
    def call(  # type: ignore[override]
        self, inputs: Any, training: bool | None = None
    ) -> tf.Tensor:
        """Looks keys up; see the class."""
        rows = isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
        keys = inputs if rows else tf.convert_to_tensor(inputs)
        dtype = self._arguments.given["key_dtype"]
        if rows or keys.dtype != dtype:
            kind = type(keys).__name__ if rows else "Tensor"
            raise TypeError(
                f"Layer '{self.name}': keys must be a Tensor of key_dtype="
                f"{dtype.name}, got a {kind} of {keys.dtype.name}."
            )
        return super().call(keys, training=training)

    if TYPE_CHECKING:
        # Type checkers see Keras's `__call__` as Any.
        __call__ = call  # type: ignore[assignment]

    def _input_shapes(
        self, features: Sequence[FeatureSpec]
    ) -> Sequence[InputShape | None]:
        return [InputShape(each.output_shape or ()) for each in features]

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        dtype = self._arguments.given["key_dtype"]
        return change(inputs, f"Layer '{self.name}': keys", dtype, False)

    @property
    def table_optimizer(self) -> TableOptimizer | None:
        """The table's optimizer, or None if the table is not trained.

        Assigning its `learning_rate` takes effect at the next step.
        """
        return self.table_optimizers.get(_TABLE)

    @property
    def sizes(self) -> dict[int, int]:
        """The number of keys that have rows, of each shard of this process.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        keys = self._keys("sizes").built("sizes")
        return {r: s.key_table.numbers().size for r, s in keys.by_rank}

    @property
    def size(self) -> int:
        """The number of keys that have rows, of all shards.

        With several workers it is a collective: all of them must call it.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        return self._keys("size").size

    @property
    def load(self) -> float:
        """The share of rows in use, 0 to 1, of the fullest shard.

        A step that needs more than 1 is an error, unless the table evicts or
        grows. With several workers it is a collective: all of them must call
        it.

        Raises:
            AttributeError: `use_hashtable` is False.
        """
        keys = self._keys("load").built("load")
        return max(keys.numbers("size")) / max(keys.numbers("capacity"))

    def _keys(self, what: str) -> DynamicTable:
        if self._spec.tables[0].keys is None:
            raise AttributeError(
                f"Layer '{self.name}' has no {what}: with use_hashtable=False "
                "every key has its row."
            )
        self._ensure_tables()
        return cast("DynamicTable", self.table)
