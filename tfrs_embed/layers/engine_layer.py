"""The layer around an engine: its place in a model's gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import slot_order
from tfrs_embed.checkpoint.names import escape, in_saved_model
from tfrs_embed.checkpoint.rows import other_slot
from tfrs_embed.compat import graphs, keras_versions, strategies
from tfrs_embed.compat.custom_gradients import custom_gradient
from tfrs_embed.compat.private_tensorflow import record
from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.engines.engine import Engine, LookupCall
from tfrs_embed.gradients import passes
from tfrs_embed.gradients.table_update import GradientUpdate, Lookup
from tfrs_embed.layers.base import Layer
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.lookup import activations, combine
from tfrs_embed.optimizers import missing_settings
from tfrs_embed.storage.table_state import Tables

#: Takes texts once vectors are looked up; returns a tensor that says so.
LearnTexts = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class EngineLayer(Layer):
    """Looks up an engine's tables, and trains them in the backward pass.

    The tables are not trainable variables: Keras would make dense or
    all-reduced gradients of them. Instead the lookup is a custom gradient of
    one scalar trainable weight. Where that weight's gradient is asked for, the
    backward pass hands the activations' gradients to the engine; the weight's
    own gradient is zero. Without a table that has an optimizer, nothing is
    trained.
    """

    def __init__(self, engine: Engine, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.engine = engine
        self._refusal = ""
        self.tables = Tables(list(engine.states.values()))
        self._update: GradientUpdate | None = None
        self._learns = any(o is not None for o in engine.optimizers.values())
        passes.install()

    @property
    def embedding_tables(self) -> dict[Any, tf.Variable]:
        """The tables by the user's own table configs.

        Shapes are [vocabulary_size, dim].
        """
        self.ensure_built()
        return {
            state.spec.source: state.table
            for state in self.engine.states.values()
        }

    def ensure_built(self) -> None:
        if not self.built:
            self.build(None)

    if TYPE_CHECKING:
        #: Takes names and variables; Keras lists these among the weights.
        _list_weights: Any

    def build(self, input_shape: Any = None) -> None:
        """Creates the tables, their slots and the scalar weight."""
        states = self.engine.states
        self.engine.build()
        variables = [
            (f"{name}_{key}", variable)
            for name, state in states.items()
            for key, variable in state.variables.items()
        ]
        self._list_weights([*variables, ("step", self.engine.step)])
        self.step = self.engine.step
        for name, optimizer in self.engine.optimizers.items():
            rate = optimizer and optimizer.rate.variable
            if rate is not None:
                self._track_trackable(
                    rate, f"{in_saved_model(name)}_learning_rate"
                )
        if self._learns:
            self.gradient_trigger = self._add_variable(
                "gradient_trigger",
                shape=(),
                initializer="zeros",
                dtype="float32",
            )
            slot_order.mark(self.gradient_trigger, "gradient_trigger")
            missing_settings.mark(
                self.gradient_trigger, self.name, self.engine.optimizers
            )
            self._update = GradientUpdate(
                self.name,
                self.engine,
                keras_versions.variable(self.gradient_trigger),
            )
            this = weakref.ref(self)
            for name, state in states.items():
                if self.engine.optimizers[name] is not None:
                    state.table.on_read = functools.partial(
                        _watched, this, state.spec
                    )
        super().build(input_shape)

    def call(
        self,
        bags: Sequence[BaggedIds],
        training: bool | None = None,
        begun: Any = None,
        learn_texts: LearnTexts | None = None,
    ) -> list[tf.Tensor]:
        """Looks up the features.

        Args:
            bags: each feature's bags.
            training: whether this is a training step. False: the tables are
                constants.
            begun: the part of the lookup that is done; see `LookupCall`.
            learn_texts: takes the texts of new keys, after the lookup and
                before the update; None: no table keeps texts.

        Returns:
            Each feature's activations in its output shape, in the layer's
            compute dtype.
        """
        dtype, features = tf.as_dtype(self.compute_dtype), self.engine.features
        learn = [b.learns for b in bags]
        asked = [
            b.one_by_one() if learns else b
            for b, learns in zip(bags, learn, strict=True)
        ]
        sent_as = tf.float32 if any(learn) else dtype
        call = LookupCall(asked, bool(training), sent_as, begun)
        if not self._is_variable(training):
            vectors, _ = self.engine.lookup(call._replace(training=False))
            return _combine_rest(vectors, learn, bags, features, dtype)

        lookup = Lookup()
        # TensorFlow keeps graphs with a custom gradient forever. They must not
        # keep the tables.
        this = weakref.ref(self) if lookup.graph != "eager" else lambda: self

        @custom_gradient
        def lookup_vectors(trigger: tf.Tensor) -> Any:
            vectors, residuals = self.engine.lookup(call)
            learned = [] if learn_texts is None else [learn_texts(vectors)]

            def backward(*gradients: Any) -> tf.Tensor:
                layer = this()
                if layer is None:
                    raise RuntimeError(
                        "The layer that looked these features up is gone."
                    )
                with tf.control_dependencies(graphs.capture(learned)):
                    return layer._differentiate(
                        lookup, residuals, gradients, trigger
                    )

            outputs = vectors
            if not any(learn):
                outputs = activations(vectors, bags, features, dtype)
            return _after_all(vectors, outputs), backward

        outputs = lookup_vectors(keras_versions.variable(self.gradient_trigger))
        lookup.ended = True
        outputs = tf.nest.flatten(outputs)
        if not any(learn):
            return outputs
        return _combine_rest(outputs, learn, bags, features, dtype)

    def _is_variable(self, training: Any) -> bool:
        """Whether a call's gradient may update the tables."""
        constant = training is not None and tf.get_static_value(training)
        return (
            self._learns
            and self.trainable
            and passes.updates_allowed()
            and (training is None or constant is None or bool(constant))
        )

    def _differentiate(self, *args: Any) -> tf.Tensor:
        assert self._update is not None
        return self._update.differentiate(*args)

    def save_own_variables(self, store: Any) -> None:
        """Stores tables and slots by name.

        HDF5 has no bfloat16: such rows are stored as float32. A layer that
        isn't built stores nothing.
        """
        if not self.built:
            return
        for state in self.engine.states.values():
            for name, variable in state.variables.items():
                value = variable.numpy()
                if variable.dtype == tf.bfloat16:
                    value = value.astype(np.float32)
                store[_store_key(state.spec.name, name)] = value
        store["step"] = self.engine.step.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables that `save_own_variables` stored, of any dtype.

        Raises:
            ValueError: a table or a slot is missing, of another shape, or not
                in the HDF5 file itself; or a table has no room for its keys; or
                the layer isn't built. Then nothing has changed.
        """
        if not self.built:
            if "step" in store:
                raise ValueError(
                    f"Layer '{self.name}' isn't built, so it has no tables to "
                    "load: call its model once before its weights are loaded."
                )
            return
        try:
            keras_versions.check_store(store)
            found = []
            for state in self.engine.states.values():
                for name, variable in state.variables.items():
                    value = _stored(store, state.spec.name, name, variable)
                    if state.spec.keys is not None:
                        variable.check_value(value)
                    found.append((variable, value))
        except ValueError as error:
            # Keras 3 tries again with other, empty paths of the file, and shows
            # the last error.
            if not self._refusal or "step" in store:
                self._refusal = str(error)
            raise ValueError(self._refusal) from None
        for variable, value in found:
            dtype = variable.dtype.as_numpy_dtype
            variable.assign(np.asarray(value).astype(dtype, copy=False))
        self.engine.step.assign(store["step"])


def _watched(
    layer: Callable[[], EngineLayer | None], table: TableSpec, value: tf.Tensor
) -> tf.Tensor:
    """Returns a table's value; to train by it is an error."""
    this = layer()
    if (
        this is None
        or not record.could_possibly_record()
        or not this._is_variable(None)
    ):
        return value
    update = this._update
    assert update is not None
    lookup = Lookup()

    @custom_gradient
    def read(trigger: tf.Tensor, value: tf.Tensor) -> Any:
        def backward(gradient: Any) -> Any:
            refused = update.refuse_read(
                lookup, table.name, table.vocabulary_size, trigger
            )
            # A program may watch the table itself.
            return refused, gradient

        return tf.identity(value), backward

    output = read(keras_versions.variable(this.gradient_trigger), value)
    lookup.ended = True
    return output


def _combine_rest(
    vectors: Sequence[tf.Tensor],
    learn: Sequence[bool],
    bags: Sequence[BaggedIds],
    features: Sequence[FeatureSpec],
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Returns activations; combines vectors of ids whose weights learn.

    Engines look such ids up one by one: TensorFlow then has the gradient of
    their weights.
    """
    combined = [
        combine(v, None, b) if learns else v
        for v, b, learns in zip(vectors, bags, learn, strict=True)
    ]
    return activations(combined, bags, features, dtype)


def _after_all(
    vectors: Sequence[tf.Tensor], outputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns outputs that exist once all vectors are looked up.

    Grappler drops an update's control inputs where another path implies them,
    then bypasses the IdentityN of a custom gradient, by which that path may
    have gone from one feature to another. A feature whose gradient depends on
    no value or shape was so looked up after the update, in a function without
    kernels (TensorFlow 2.16 to 2.21; 2026-11).
    """
    if (
        tf.executing_eagerly()
        or strategies.in_tpu_replica()
        or len({id(v.op) for v in vectors}) < 2
    ):
        return outputs
    with tf.control_dependencies([tf.group(*vectors)]):
        return [tf.identity(output) for output in outputs]


def _stored(store: Any, table: str, name: str, variable: Any) -> Any:
    """Finds a table's variable in a Keras file, without reading it."""
    try:
        value = store[_store_key(table, name)]
    except KeyError:
        raise ValueError(
            f"Table '{table}': the file has no {name} of it. The file was "
            "saved by a layer without this table, or with another optimizer."
        ) from None
    here = tf.TensorShape(variable.shape)
    if here.is_compatible_with(value.shape):
        return value
    raise ValueError(
        f"Table '{table}': its {name} have the shape {here} here, and "
        f"{value.shape} in the file."
        f"{other_slot(here.as_list(), value.shape)}"
    )


def _store_key(table: str, variable: str) -> str:
    """The key of a table's variable in a Keras file, which is HDF5.

    In HDF5 a slash separates groups, and a dot is a group itself.
    """
    group = escape(table, "/\0")
    if group in ("step", "."):  # The step is stored beside the tables.
        group = f"%{ord(group[0]):02X}{group[1:]}"
    return f"{group}/{variable}"
