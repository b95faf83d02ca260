"""The layers of Keras 3, and loops for replicas, on its TensorFlow backend.

Since TensorFlow 2.16 `tf.keras` is Keras 3, unless a program sets
TF_USE_LEGACY_KERAS. Models of Keras 3 take these layers. Models of tf_keras,
and of tensorflow_recommenders, which is made for tf_keras, take the layers of
`tfrs_embed` itself. Configurations and the keys of checkpoints are the same for
both, and one program may have both.

Example:
    >>> import keras
    >>> movies = tfrs_embed.TableConfig("movies", 20_000, 32)
    >>> layer = tfrs_embed.keras3.PartialTPUEmbedding(
    ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
    ... )
    >>> movie = keras.Input([], dtype="int64", name="movie")
    >>> model = keras.Model(movie, keras.layers.Dense(1)(layer(movie)))
    >>> model.compile("adam", "mse")
    >>> history = model.fit(np.array([3, 7]), np.array([0.0, 1.0]), verbose=0)

Under a MirroredStrategy large tables are sharded. On several workers Keras 3's
own `fit` doesn't work; `tfrs_embed.keras3.fit` does. TPUs need tf_keras.

Other differences from the layers of tf_keras:

* A layer's weights are `keras.Variable`s. The non-trainable ones include tables
  and slots, so `get_weights`, `set_weights`, `summary` and EarlyStopping know
  them.
* Optimizers of tables are those of `keras.optimizers`.
* Models with these layers are compiled without `jit_compile`: "auto" leaves it
  off, and True does too, with a warning of Keras's.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import slot_order
from tfrs_embed.checkpoint.names import escape, in_graphs
from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.private_keras_3 import (
    Reducing,
    creating_variables,
    gives_value,
    refuse_loops,
    replace_methods,
    traces_shapes,
)
from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.compat.version import OLDEST_KERAS_3
from tfrs_embed.layers import (
    all2all_dense_embedding,
    distributed_embedding,
    dynamic_embedding,
    embedding,
    engine_layer,
    partial_tpu_embedding,
)
from tfrs_embed.layers.keras3_loops import evaluate, fit
from tfrs_embed.optimizers import repeated_rows
from tfrs_embed.storage.composite import CompositeVariable

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicEmbedding",
    "Embedding",
    "PartialTPUEmbedding",
    "evaluate",
    "fit",
]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


if _minor(keras.__version__) < _minor(OLDEST_KERAS_3):
    raise ImportError(
        f"tfrs_embed.keras3 needs Keras {OLDEST_KERAS_3} or newer, but the "
        f"package keras here is {keras.__version__}: pip install 'keras>="
        f"{OLDEST_KERAS_3}'. All TensorFlows that tfrs_embed supports take it."
    )
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfrs_embed.keras3 needs Keras 3 on TensorFlow, but its backend is "
        f"{keras.backend.backend()}: set the environment variable "
        "KERAS_BACKEND=tensorflow before keras is imported."
    )


def _name_of(table: str) -> str:
    """A layer's name that Keras 3 and graphs allow, made of a table's name."""
    parts = escape(table, "/.%>").split("%")
    return ">".join(in_graphs(part) for part in parts)


_WORKERS = tf.distribute.MultiWorkerMirroredStrategy


class _Layer(keras.layers.Layer):
    """A Keras 3 layer that is given ids, and gets tensors unconverted."""

    _keras = keras
    _layer_name = staticmethod(_name_of)
    _traces_shapes = staticmethod(traces_shapes)
    _as_shape = tuple

    def __init__(self, **kwargs: Any) -> None:
        _check_strategy(type(self).__name__, kwargs.get("name"))
        super().__init__(autocast=False, **kwargs)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.supports_jit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tf.distribute.get_strategy(), _WORKERS):
            refuse_loops()
        args, kwargs = keras.tree.map_structure(_to_tensor, (args, kwargs))
        return super().__call__(*args, **kwargs)

    def load_own_variables(self, store: Any) -> None:
        keras_versions.check_store(store)
        super().load_own_variables(store)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The symbolic outputs of a call with symbolic inputs.

        Keras's own method takes ragged tensors for dense ones.
        """

        @tf.function(autograph=False)
        def call(args: Any, kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        if not self.built:
            self.build(None)
        traced = call.get_concrete_function(
            *keras.tree.map_structure(
                lambda each: (
                    keras_versions.spec(each) if _is_symbolic(each) else each
                ),
                (args, kwargs),
            )
        )
        return tf.nest.map_structure(
            lambda output: keras.KerasTensor(
                output.shape,
                output.dtype.name,
                ragged=isinstance(
                    output, (tf.RaggedTensor, tf.RaggedTensorSpec)
                ),
            ),
            traced.structured_outputs,
        )

    def _set_mask_metadata(self, inputs: Any, outputs: Any, *rest: Any) -> None:
        # Layers of tables set masks in `call`; Keras would compute them again.
        # A subclass's own method needs ids, which symbolic tensors don't have.
        joint = getattr(self, "_compute_output_and_mask_jointly", None)
        symbolic = map(_is_symbolic, keras.tree.flatten(inputs))
        if joint is None or not (joint or any(symbolic)):
            super()._set_mask_metadata(inputs, outputs, *rest)

    def _add_variable(self, name: str, **kwargs: Any) -> Any:
        # Not deferred: gradients in replicas need TensorFlow's variable.
        with creating_variables(), tf.init_scope():
            return self.add_weight(name=name, autocast=False, **kwargs)


class _TableVariable(keras.Variable):
    """A table, a slot or the step, as Keras lists it among a layer's weights.

    `variable` is a `tf.Variable`, or an object like one.
    """

    def __init__(self, name: str, variable: Any) -> None:
        self._variable = variable
        super().__init__(
            initializer=lambda shape, dtype=None: variable,
            shape=tuple(variable.shape),
            dtype=variable.dtype.name,
            trainable=False,
            autocast=False,
            name=_name_of(name),
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # The variable itself, not a copy.
        self._value = self._variable

    def _validate_shape(self, shape: Any) -> Any:
        # Tables of keys have an unknown number of rows.
        return tuple(shape)

    @property
    def shape(self) -> tf.TensorShape:
        """The shape; for a table of keys with its current number of keys."""
        shape = self._variable.shape
        if shape.is_fully_defined():
            return shape
        if not tf.executing_eagerly():
            return _OpenShape(shape)
        return _OpenShape(self._variable.current_shape)

    def assign(self, value: Any) -> Any:
        if self._variable.shape.is_fully_defined():
            return super().assign(value)
        self._variable.assign(value)
        return value


class _TableInParts(_TableVariable):
    """A table, a slot or the step, whose value is in several variables.

    A SavedModel has these variables, and none of the whole value.
    """

    @property
    def _should_act_as_resource_variable(self) -> bool:
        raise AttributeError  # TensorFlow asks whether there is such a name.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self._variable._export_to_saved_model_graph(*args, **kwargs)

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        return self._variable._trackable_children(*args, **kwargs)


class _OpenShape(tf.TensorShape):
    """A shape that equals those of any number of rows.

    Keras compares shapes before it sets a weight's value.
    """

    def __eq__(self, other: object) -> bool:
        return tf.TensorShape([None, *self[1:]]).is_compatible_with(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tf.TensorShape.__hash__


class EngineLayer(engine_layer.EngineLayer, _Layer):
    """The layer around an engine as a layer of Keras 3."""

    def _list_weights(self, variables: list[tuple[str, Any]]) -> None:
        with creating_variables():
            for name, variable in variables:
                parts = isinstance(variable, CompositeVariable)
                kind = _TableInParts if parts else _TableVariable
                self._track_variable(kind(name, variable))

    def call(self, *args: Any, **kwargs: Any) -> list[tf.Tensor]:
        if any(map(gives_value, self.weights)):
            raise NotImplementedError(
                f"Tables {sorted(self.engine.states)}: stateless_call can't "
                "look up other values than those of the tables' variables, "
                "which an engine holds. Assign these values, and call the "
                "layer or the model itself."
            )
        return super().call(*args, **kwargs)


def _to_tensor(value: Any) -> Any:
    """Converts arrays and numbers; Keras refuses mixtures."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value
    if isinstance(value, (np.ndarray, np.number, float)) or (
        isinstance(value, int) and not isinstance(value, bool)
    ):
        return tf.convert_to_tensor(value)
    return value


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor)


def _check_strategy(kind: str, name: str | None) -> None:
    """Raises under a strategy that Keras 3 can't train with."""
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, _WORKERS):
        replace_methods(strategy, Reducing)
    elif is_tpu(strategy):
        raise NotImplementedError(
            f"{kind}{f' {name!r}' if name else ''}: Keras 3 doesn't train "
            f"under {type(strategy).__name__}; tf_keras does. Take the layer "
            "of tfrs_embed itself, in a model of tf_keras."
        )


_register = keras_versions.register(keras)


@_register
class Embedding(embedding.Embedding, _Layer):
    """`tfrs_embed.Embedding` as a layer of Keras 3.

    Example:
        >>> layer = tfrs_embed.keras3.Embedding(1000, 16, combiner="mean")
        >>> layer(tf.ragged.constant([[1, 2, 2], [], [7]])).shape
        TensorShape([3, 16])
    """

    def _add_variable(self, name: str, **kwargs: Any) -> Any:
        table = super()._add_variable(name, **kwargs)
        slot_order.install(keras)
        repeated_rows.mark(table)
        return table

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        if self.mask_zero and _is_symbolic(inputs):
            return keras.ops.not_equal(inputs, 0)
        return super().compute_mask(inputs, mask)


@_register
class PartialTPUEmbedding(partial_tpu_embedding.PartialTPUEmbedding, _Layer):
    """`tfrs_embed.PartialTPUEmbedding` as a layer of Keras 3.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 32)
        >>> layer = tfrs_embed.keras3.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies),
        ...     keras.optimizers.Adagrad(0.1),
        ... )
        >>> layer([7, 42]).shape
        TensorShape([2, 32])
    """


@_register
class DistributedEmbedding(distributed_embedding.DistributedEmbedding, _Layer):
    """`tfrs_embed.DistributedEmbedding` as a layer of Keras 3.

    It takes the configurations of `keras_rs.layers` as they are.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 32)
        >>> layer = tfrs_embed.keras3.DistributedEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}
        ... )
        >>> layer({"movie": [[7, 42], [3, 3]]})["movie"].shape
        TensorShape([2, 32])
    """


@_register
class DynamicEmbedding(dynamic_embedding.DynamicEmbedding, _Layer):
    """`tfrs_embed.DynamicEmbedding` as a layer of Keras 3.

    Example:
        >>> layer = tfrs_embed.keras3.DynamicEmbedding(16, input_dim=1000)
        >>> layer(tf.constant([2**60, -3])).shape
        TensorShape([2, 16])
    """


@_register
class All2AllDenseEmbedding(
    all2all_dense_embedding.All2AllDenseEmbedding, _Layer
):
    """`tfrs_embed.All2AllDenseEmbedding` as a layer of Keras 3.

    Example:
        >>> layer = tfrs_embed.keras3.All2AllDenseEmbedding(
        ...     max_vocabulary_size_per_gpu=10_000,
        ...     embedding_vec_size=16,
        ...     slot_num=3,
        ...     nnz_per_slot=2,
        ... )
        >>> keys = tf.constant([[[7, 7], [-1, 5], [2**60, 0]]], tf.int64)
        >>> layer(keys, training=True).shape
        TensorShape([1, 3, 2, 16])
    """


_Layer._embedding_class = Embedding
_Layer._engine_layer_class = EngineLayer
