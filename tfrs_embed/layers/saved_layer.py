"""What files and checkpoints hold of a layer of tables."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.names import in_graphs
from tfrs_embed.configs import serialization
from tfrs_embed.configs.tables import EmbeddingSpec
from tfrs_embed.engines.engine import Engine
from tfrs_embed.layers.base import Layer
from tfrs_embed.layers.table_arguments import TableArguments, from_config
from tfrs_embed.optimizers.rules import TableOptimizer


class SavedLayer(Layer):
    """The config of a layer of tables, and its objects in checkpoints."""

    #: The name of the argument with the feature configuration, if any.
    _FEATURES: ClassVar[str | None] = None
    #: The attributes in checkpoints, the same for all placements.
    _CHECKPOINTED: ClassVar[tuple[str, ...]] = ("tables", "step")

    # Set by subclasses.
    _arguments: TableArguments
    _spec: EmbeddingSpec
    _has_tables: bool
    _engine: Engine | None
    # The indices of features with ragged or sparse ids in the last call; None:
    # the layer wasn't called.
    _ragged: set[int] | None = None

    @property
    def table_optimizers(self) -> dict[str, TableOptimizer]:
        """The optimizers of tables that engines hold, by table name.

        Assigning an optimizer's `learning_rate` takes effect at the next step.
        """
        optimizers = self._engine.optimizers if self._engine else {}
        return {k: each for k, each in optimizers.items() if each is not None}

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able.

        Raises:
            ValueError: an optimizer's learning rate can't be stored.
        """
        optimizers = self.table_optimizers
        of_layer = (
            optimizers[table.name]
            for table in self._spec.tables
            if table.optimizer is None and table.name in optimizers
        )
        config = super().get_config()
        keras = self._keras
        config.update(self._arguments.to_config(next(of_layer, None), keras))
        config["activity_regularizer"] = keras.regularizers.serialize(
            self.activity_regularizer
        )
        if self._FEATURES is not None:
            config[self._FEATURES] = serialization.features_to_config(
                self._spec, optimizers, keras
            )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedLayer:
        """Makes the layer from the result of `get_config`.

        No module is imported for what the config names.

        Raises:
            ValueError: an initializer, optimizer, schedule or regularizer isn't
                the Keras's, TensorFlow's, registered or imported; or a value is
                not as `get_config` stores it.
        """
        try:
            arguments = from_config(config, cls._keras)
            if cls._FEATURES is not None:
                arguments[cls._FEATURES] = serialization.features_from_config(
                    config[cls._FEATURES], cls._keras
                )
        except (
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
        ) as error:
            raise ValueError(
                f"{cls.__name__}: its config isn't as get_config makes it: "
                f"{error!r}"
            ) from error
        return cls(**arguments)

    def __reduce__(self) -> Any:
        """Refuses `pickle` and `copy`, which would lose the tables' values."""
        raise TypeError(
            f"Layer '{self.name}' can't be pickled or copied by itself. Pickle "
            "or save its model; or make an untrained layer by "
            "from_config(layer.get_config())."
        )

    def get_build_config(self) -> dict[str, Any]:
        """The features with ragged or sparse ids, if there are tables.

        Keras itself notes only the shapes of a model's inputs, and rebuilds it
        with dense inputs.
        """
        if not self._has_tables:
            return {}
        return {
            "ragged": None if self._ragged is None else sorted(self._ragged)
        }

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Creates all tables, from the result of `get_build_config`."""
        ragged = config.get("ragged")
        self._ragged = None if ragged is None else set(ragged)
        with tf.name_scope(in_graphs(self.name)):  # As in a call.
            self.build(None)

    def _checkpoint_adapter(self, path: str) -> Any:
        # TensorFlow calls this before it reads values. Checks the file, so that
        # errors of damaged files name it.
        if tf.io.gfile.exists(f"{path}.index"):
            chain.files_of(path)
        return super()._checkpoint_adapter(path)  # type: ignore[misc]

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            children = {
                k: v for k, v in children.items() if k in self._CHECKPOINTED
            }
        return children
