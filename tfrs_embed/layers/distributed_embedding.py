"""keras_rs's embedding layer, on every strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import strategies
from tfrs_embed.compat.arguments import flag
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.configs.types import InvalidIds, LayerArguments, Optimizer
from tfrs_embed.engines.engine import FixedBatches
from tfrs_embed.layers.base import ChangeIds
from tfrs_embed.layers.declared_shapes import with_output_shape
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.layers.table_layer import TableLayer, checked_bags
from tfrs_embed.ops.input_shapes import InputShape
from tfrs_embed.ops.inputs import lookup_bags
from tfrs_embed.ops.tensors import ids_to_tensor, to_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfrs_embed.configs.plan import Plan

# The key that marks a result of `preprocess`.
_PREPROCESSED = "preprocessed_inputs"


class DistributedEmbedding(TableLayer):
    """Looks features up in tables that train themselves, wherever they are.

    It has the configurations and the calls of
    `keras_rs.layers.DistributedEmbedding`. Every table is trained by its own
    optimizer, row by row, not by that of `model.compile`: on one device,
    sharded or copied over the replicas of a GPU cluster, or on SparseCores.

    Example:
        >>> movies = tfrs_embed.TableConfig(
        ...     "movies", 20_000, 64, optimizer="adam"
        ... )
        >>> layer = tfrs_embed.DistributedEmbedding(
        ...     {
        ...         "movie": tfrs_embed.FeatureConfig(
        ...             "movie", movies, (2,), (2, 64)
        ...         ),
        ...         "history": tfrs_embed.FeatureConfig(
        ...             "history", movies, (2, 50), (2, 64)
        ...         ),
        ...     }
        ... )
        >>> vectors = layer({"movie": [3, 5], "history": [[3, 7, 8], [5]]})
        >>> vectors["history"].shape
        TensorShape([2, 64])

    A table's `placement` is one of these; `layer.placement` has the result,
    with reasons:

    - "auto": tables with more than `size_threshold` rows are sharded by row
      over the replicas of a MirroredStrategy or MultiWorkerMirroredStrategy, or
      go to the embedding hardware of TPUs. Smaller ones, and all on one device,
      are on the default device.
    - "host": the host's memory, on one replica;
    - "replicated", or "default_device": the device of the rest of the model;
      with several replicas each has a copy.
    - "row", or "sharded": sharded by row; "column": the columns over some
      replicas; "table": whole on one. One replica has the whole table. An error
      on TPUs.
    - "sparsecore": on SparseCores. An error elsewhere.

    Args:
        feature_configs: a `FeatureConfig`, of this library, of
            `keras_rs.layers` or of `tf.tpu.experimental.embedding`, or any
            nesting of dicts, lists and tuples of them. Features with the same
            table object share it. A `TableConfig` in a `FeatureConfig`'s place
            stands for `FeatureConfig(table=...)`.
        table_stacking: the tables that SparseCores hold as one: "auto": those
            of one width and optimizer; None: none; a list of names: those
            tables and no others; a list of such lists. Checked everywhere, read
            on SparseCores only.
        update_stats: whether `preprocess(..., training=True)` measures its
            batches, and raises the limits of SparseCores to their needs.
        optimizer: trains tables that have none of their own; see
            `PartialTPUEmbedding`.
        pipeline_execution_with_tensor_core: see `PartialTPUEmbedding`.
        size_threshold: number of rows above which a table is large. 0 makes
            every table large, None none.
        sparse_core_embedding_config: see `PartialTPUEmbedding`. Its limits are
            by stack, and overrule the tables' max_ids_per_partition.
        embedding_feature: see `PartialTPUEmbedding`.
        invalid_ids: see `PartialTPUEmbedding`.
        plan: the result of `tfrs_embed.plan` for these tables and this number
            of replicas. It places each table, and overrules size_threshold and
            the table's own placement. Not read on one replica.
        communication_dtype: see `PartialTPUEmbedding`.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: ids in the nesting of `feature_configs`, or the result of
            `preprocess`. Each [batch] or [batch, k] integers of any dtype, or
            strings for a feature with `hashing`: a Tensor, RaggedTensor or
            SparseTensor, a numpy array, also one of arrays of several lengths,
            or Python lists.
        weights: None, or weights in the same nesting, each None or of the kind,
            shape, row lengths or indices of its ids. They get no gradient.
        training: see `PartialTPUEmbedding`.
        partial: see `PartialTPUEmbedding`.

    Output shape:
        The nesting of `feature_configs`, each [batch, dim]: the ids of a sample
        are combined by the table's combiner; dim is the table's width, or the
        width that the feature's `hashing` gives. With an output_shape of more
        dimensions, [batch, ..., dim], dense ids are [batch, ..., k], and ragged
        and sparse ids have a row for each vector. A sequence feature gives
        [batch, max_sequence_length, dim], with a Keras mask of the positions
        that hold an id. With combiner=None ids are not combined: ragged and
        sparse ones, and lists of rows, give a RaggedTensor [batch, None, dim],
        dense ones their shape + [dim]. All in the layer's compute dtype.

    Raises:
        ValueError: a setting is out of range or not supported, or two tables
            have one name.
        TypeError: an argument is of a wrong kind.
        NotImplementedError: no engine for the tables supports the strategy.
        RuntimeError: the layer is called under another strategy than it was
            made under; or SparseCores without TensorFlow's wheel for TPUs.
    """

    _FEATURES = "feature_configs"
    _KERAS_TRAINS = False

    def __init__(
        self,
        feature_configs: Any,
        *,
        table_stacking: Any = "auto",
        update_stats: bool = False,
        optimizer: Optimizer = "adam",
        pipeline_execution_with_tensor_core: bool = False,
        size_threshold: int | None = 10_000,
        sparse_core_embedding_config: Any = None,
        embedding_feature: Any = None,
        invalid_ids: InvalidIds = "error",
        plan: Plan | None = None,
        communication_dtype: Any = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        arguments = TableArguments(locals())
        spec = parse(feature_configs, self._keras)
        template = spec.structure.template
        if isinstance(template, dict) and _PREPROCESSED in template:
            raise ValueError(
                f"No feature may have the name '{_PREPROCESSED}', which marks "
                "results of preprocess."
            )
        replicas = self._strategy.num_replicas_in_sync
        features = tuple(with_output_shape(f, replicas) for f in spec.features)
        self._place(dataclasses.replace(spec, features=features), arguments)

    def _prepare(self, inputs: Any) -> Any:
        # Keras would convert each number of a list to a tensor.
        if _is_preprocessed(inputs):
            return inputs
        structure = self._spec.structure
        ids = structure.flatten(inputs, "inputs", True)
        return structure.pack(
            {
                i: self._to_tensor(i, each)
                for i, each in enumerate(ids)
                if each is not None
            }
        )

    def _to_tensor(self, place: int, ids: Any) -> Any:
        """Converts a feature's ids; a list of rows is ragged if uncombined.

        Else it would be dense if the rows have one length, and so would be
        the feature's activations.
        """
        feature = self._spec.features[place]
        rows = isinstance(ids, (list, tuple)) and all(
            isinstance(row, (list, tuple, np.ndarray)) for row in ids
        )
        ragged = True if rows and not feature.combined else None
        what = f"{feature}: ids"
        ids = ids_to_tensor(ids, what, feature.id_dtype, ragged)
        return to_tensor(ids, what, ragged=ragged)

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        if not _is_preprocessed(inputs):
            return super()._map_ids(change, inputs)
        # Weights are left out here.
        ids = super()._map_ids(change, inputs[_PREPROCESSED]["inputs"])
        return {_PREPROCESSED: {"inputs": ids}}

    @tf.autograph.experimental.do_not_convert
    def preprocess(
        self,
        inputs: Any,
        weights: Any = None,
        training: bool = False,
        *,
        partial: bool = False,
    ) -> dict[str, Any]:
        """Converts a batch's ids and weights to tensors, and checks them.

        Calls don't need it. In an input pipeline it takes work off the training
        step, and reports bad input at its source.

        Args:
            inputs: a global batch's ids, as the layer is called with them.
            weights: their weights.
            training: whether the batch is for training. With `update_stats` the
                limits of SparseCores are then raised to the needs of the batch.
                Functions that were traced before keep theirs, so measure before
                training.
            partial: whether features may be left out. The result then needs a
                call with partial=True.

        Returns:
            The layer's `inputs`, with weights, also for a tf.data.Dataset.

        Raises:
            TypeError: ids or weights of a wrong dtype or kind.
            ValueError: ids or weights of a wrong shape.
            tf.errors.InvalidArgumentError: invalid values.
            RuntimeError: it should measure a batch, and is traced.
        """
        called = self._read(inputs, weights, flag(partial, "partial"))
        bags = checked_bags(called)
        if training and self._arguments.given["update_stats"]:
            if not tf.executing_eagerly():
                raise RuntimeError(
                    f"Layer '{self.name}' has update_stats set, but can't "
                    "measure batches in a tf.function or in tf.data's map: "
                    "call preprocess eagerly, or without training=True."
                )
            if len(called.places) < len(self._spec.features):
                raise ValueError(
                    f"Layer '{self.name}' has update_stats set: batches for "
                    "training=True need all features."
                )
            engine: Any = self._engine
            if isinstance(engine, FixedBatches):
                engine.raise_limits(lookup_bags(called.features, bags))
        result = {"inputs": self._pack(called, called.ids)}
        if any(w is not None for w in called.weights):
            result["weights"] = self._pack(called, called.weights)
        return {_PREPROCESSED: result}

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """All tables' values by name.

        With several workers all of them must call it.

        Returns:
            Tensors [vocabulary_size, dim] float32 on the host.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            return {
                name: tf.constant(table.numpy())
                for name, table in self.embedding_tables.items()
            }

    def set_embedding_tables(self, tables: Mapping[str, Any]) -> None:
        """Sets tables' values; see `load_tables`.

        Args:
            tables: see `load_tables`.
        """
        self.load_tables(tables)

    def _flatten(
        self, inputs: Any, weights: Any, partial: bool
    ) -> tuple[list[Any], list[Any]]:
        if _is_preprocessed(inputs):
            if weights is not None:
                raise ValueError(
                    "The result of preprocess has weights already; don't give "
                    "the layer others."
                )
            given = inputs[_PREPROCESSED]
            inputs, weights = given["inputs"], given.get("weights")
        ids, flat = super()._flatten(inputs, weights, partial)
        for i, feature in enumerate(self._spec.features):
            if partial and ids[i] is None:
                continue
            ids[i] = self._to_tensor(i, ids[i])
            if flat[i] is not None:
                # Weights are ragged if the ids are, even with rows of one
                # length.
                ragged = isinstance(ids[i], tf.RaggedTensor) or None
                what = f"{feature}: weights"
                flat[i] = to_tensor(flat[i], what, np.float32, ragged)
        return ids, flat

    def _input_shapes(
        self, features: Sequence[FeatureSpec]
    ) -> Sequence[InputShape | None]:
        # The declared batch size is the global one.
        inside = strategies.in_replica(self._strategy)
        parts = self._strategy.num_replicas_in_sync if inside else 1
        shapes = [feature.input_shape for feature in features]
        return [
            InputShape((each[0] and each[0] // parts, *each[1:]))
            if each
            else None
            for each in shapes
        ]


def _is_preprocessed(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and _PREPROCESSED in inputs
