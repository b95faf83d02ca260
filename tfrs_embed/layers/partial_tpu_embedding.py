"""One embedding layer for tables of every size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.types import InvalidIds, LayerArguments, Optimizer
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.engine_layer import EngineLayer
from tfrs_embed.layers.table_arguments import TableArguments
from tfrs_embed.layers.table_layer import TableLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfrs_embed.configs.plan import Plan


class PartialTPUEmbedding(TableLayer):
    """Looks features up in tables, each placed by its size.

    Tables with more than `size_threshold` rows are large: an engine for the
    hardware holds them, and updates just the rows that a step touches, with
    the table's own optimizer or the layer's. The others are Keras `Embedding`
    layers, trained by the model's optimizer, unless their `TableConfig` has an
    optimizer: an engine then holds them, too. Shapes, combiners and errors are
    the same for all; `placement` says which table is where.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": table},
        ...     optimizer=tf_keras.optimizers.Adagrad(0.05),
        ... )
        >>> layer({"movie": tf.constant([3, 5])})["movie"].shape
        TensorShape([2, 64])

    Args:
        feature_config: a `FeatureConfig`, of this library, of
            `keras_rs.layers` or of `tf.tpu.experimental.embedding`, or any
            nesting of dicts, lists and tuples of them. Features with the same
            table object share it. A `TableConfig` in a `FeatureConfig`'s place
            stands for `FeatureConfig(table=...)`.
        optimizer: trains the large tables that have none of their own: a Keras
            optimizer such as SGD, Adagrad, Adam, AdamW, Ftrl or RMSprop, whose
            learning rate is read at each step; a
            `tf.tpu.experimental.embedding` optimizer, or one of
            `tfrs_embed.optimizers`; or the name of one, such as "adagrad" (see
            `tfrs_embed.types.OptimizerName`). None: such tables have no slots
            and are not trained; a warning names small tables, which the model's
            optimizer trains. `trainable=False` keeps all tables as they are.
        pipeline_execution_with_tensor_core: whether SparseCores overlap the
            tables' updates with the next training step, within a loop on the
            device. Lookup i of the loop then sees its updates of steps 0 to
            i - 2; see docs/tpu.md. Read on TPUs only.
        batch_size: the largest batch of one replica, as in TFRS. TPUs make
            tables for it where neither an output_shape nor the first call
            gives a size; other devices don't read it.
        size_threshold: number of rows above which a table is large. 0 or -1
            makes every table large, None no table. It is not read for tables
            whose `TableConfig` has an optimizer.
        sparse_core_embedding_config: a
            `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`, as
            `tfrs_embed.sparsecore.compute_limits` makes it. Read on SparseCores
            only.
        embedding_feature: the EmbeddingFeature, of
            `tf.tpu.experimental.HardwareFeature`, to assume instead of the
            TPU's own: UNSUPPORTED keeps large tables replicated. Read on TPUs
            only.
        invalid_ids: the treatment of an id outside its table: "error", or
            "zero": it counts as absent, so alone it gives a zero vector, and
            combiners leave it out.
        plan: the result of `tfrs_embed.plan` for these tables and this number
            of replicas. It places each table, and overrules size_threshold and
            the table's own placement. Tables that it replicates, without an
            optimizer of their own, are Keras layers, which the model's
            optimizer trains. Not read on one replica.
        communication_dtype: the dtype that rows, vectors and gradients are sent
            as, of tables that are spread over replicas or copied to them:
            "float32", "bfloat16" or "float16". Tables, slots and sums stay
            float32. docs/scaling.md has the error. Not read on one replica, on
            TPUs, and for tables of Keras layers. None: the plan's, or float32
            without a plan.
        **kwargs: `name`, `dtype`, `trainable`, `activity_regularizer`, as in
            every Keras layer.

    Call arguments:
        inputs: ids in the nesting of `feature_config`: integers of any dtype,
            or strings for a feature with `hashing`, each a Tensor of any rank,
            a RaggedTensor of rank 2, or a SparseTensor of rank 2 in row-major
            order.
        weights: None, or weights in the same nesting, each None or of the kind,
            shape, row splits or indices of its ids. They get no gradient.
        training: as in every Keras layer. None: True where a tape records the
            call. False: tables that an engine holds are constants without a
            gradient; see docs/gradients.md.
        serving_config: None. `tfrs.layers.embedding.TPUEmbedding` looks up on
            CPUs by another config here, which is an error.
        partial: whether `inputs` may leave features out: keys of dicts, or
            None in place of entries of lists and tuples. The outputs leave out
            the same features. Tables without a feature in the call are neither
            read nor updated.

    Output shape:
        The nesting of `feature_config`; an empty dict gives an empty dict.
        `dim` is the table's width, or the width that the feature's `hashing`
        gives. Dense ids give shape(ids) + [dim]. Ragged and sparse ids give
        [batch, dim], combined by the table's combiner. Sequence features, of
        ragged, sparse or dense ids [batch, k], give
        [batch, max_sequence_length, dim], zero padded and cut, with a Keras
        mask of the positions that hold an id. Ragged and sparse ids of features
        with combiner=None give a RaggedTensor [batch, None, dim].
        A feature's output_shape overrules this: output_shape + [dim], where
        dense ids of shape output_shape + [k] are combined over k. All in the
        layer's compute dtype.

    Raises:
        ValueError: a setting is out of range or not supported, or two tables
            have one name.
        TypeError: an argument is of a wrong kind.
        NotImplementedError: no engine for large tables supports the strategy.
        RuntimeError: the layer is called under another strategy than it was
            made under; or SparseCores without TensorFlow's wheel for TPUs.
    """

    _FEATURES = "feature_config"

    def __init__(
        self,
        feature_config: Any,
        optimizer: Optimizer,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        size_threshold: int | None = 10_000,
        *,
        sparse_core_embedding_config: Any = None,
        embedding_feature: Any = None,
        invalid_ids: InvalidIds = "error",
        plan: Plan | None = None,
        communication_dtype: Any = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        arguments = TableArguments(locals())
        self._place(parse(feature_config, self._keras), arguments)

    if not TYPE_CHECKING:  # The base class has the types.

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            given = {
                **dict(zip(("inputs", "weights"), args, strict=False)),
                **kwargs,
            }
            if kwargs.pop("serving_config", None) is not None:
                raise NotImplementedError(
                    f"Layer '{self.name}': serving_config is not available. A "
                    "model is served by tfrs_embed.serving.export, on CPUs too,"
                    " and partial=True looks up a part of the features; other "
                    "lengths and shapes are those of a second feature of the "
                    "table."
                )
            inputs = given.get("inputs")
            if (
                isinstance(inputs, Mapping)
                and not inputs
                and not given.get("weights")
                and not given.get("partial")
                and isinstance(self._spec.structure.template, dict)
            ):
                # The ranking task of TF-models passes all its features another
                # way, and an empty dict to this layer. Tables made for it would
                # be trainable variables without gradients.
                return {}
            return super().__call__(*args, **kwargs)

    @property
    def tpu_embedding(self) -> EngineLayer | None:
        """The layer that holds the large tables, or None if there are none.

        Its `embedding_tables` maps the user's table configs to variables.
        """
        return self._engine_layer

    @property
    def keras_embedding_layers(self) -> dict[Any, Embedding]:
        """The Keras layers of the features with small tables.

        Keys are those of a flat dict of features, else the features' paths.
        Features that share a table share its layer.
        """
        template = self._spec.structure.template
        flat = isinstance(template, dict) and all(
            isinstance(node, int) for node in template.values()
        )
        keys = template if flat else [f.name for f in self._spec.features]
        layers = {
            key: self._keras_layer(feature.table.name)
            for key, feature in zip(keys, self._spec.features, strict=True)
        }
        return {key: each for key, each in layers.items() if each is not None}
