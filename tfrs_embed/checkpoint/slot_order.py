"""Checks that a Keras optimizer's slots are restored for the right variables.

Keras's optimizers, except tf_keras's legacy ones, save slots by the positions
of the variables that they train. Which variables a layer has depends on
`size_threshold` and on the tables' optimizers. With other settings TensorFlow
would restore a variable's slots into another's, silently where their shapes are
equal. So an optimizer that trains a layer's variables saves their positions,
and compares them in a restore.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice
from tfrs_embed.checkpoint.rows import CheckpointValue, Save
from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.optimizers import missing_settings

_ATTRIBUTE = "_tfrs_embed_slots_of"
_CHILD = "tfrs_embed_order"


def mark(variable: tf.Variable, name: str) -> None:
    """Makes optimizers that train a variable save its position and name."""
    setattr(variable, _ATTRIBUTE, name)


class SavedOrder(Trackable, CheckpointValue):
    """The positions of layers' variables among those that an optimizer trains.

    Attributes:
        places: the variables' names and shapes, by position as a string.
        tracked: whether the optimizer tracks this object. A pending restore is
            checked when it is attached; attaching must not raise.
        refused: the error of the last restore.
    """

    optional = True

    def __init__(self, optimizer: Any) -> None:
        self.name = optimizer.name
        self.places: dict[str, Any] = {}
        self.tracked = False
        self.refused: ValueError | None = None
        self._optimizer = optimizer

    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        # The first variable is the number of iterations.
        if len(self._optimizer.variables) > 1:
            return [TensorSlice(key, json.dumps(self.places))]
        return []

    def check(self, key: str, reader: BundleReader) -> None:
        from tfrs_embed.compat import strict_json  # Only a restore needs it.

        where = f"'{key}' in '{reader.prefix}'"
        there = strict_json.parse(reader.read(key).numpy(), where)
        self.refused = None
        if there != self.places:
            self.refused = ValueError(
                f"The optimizer '{self.name}' can't be restored from "
                f"'{reader.prefix}': slots are saved by the positions of the "
                "variables that the optimizer trains. In the checkpoint these "
                f"are {_text(there)}; here {_text(self.places)}. Restore with "
                "the size_threshold, the table optimizers and the rows of the "
                "model that was saved. Or restore into a model that is not "
                "compiled and save that: its checkpoint has no optimizer."
            )
            if self.tracked:
                raise self.refused

    def restore(self, key: str, reader: BundleReader) -> None:
        """Does nothing: `check` has compared the positions."""

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        # Programs that load a SavedModel have not registered this saver.
        self.exporting = save_type == "savedmodel"
        return children

    def _maybe_initialize_trackable(self) -> None:
        super()._maybe_initialize_trackable()
        # TensorFlow calls this also when it finds the object for a restore.
        self.exporting = False

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        object_map[self] = self  # It never changes.


def _text(places: Any) -> str:
    try:
        each = [f"{n} {shape} at {i}" for i, (n, shape) in places.items()]
    except (AttributeError, TypeError, ValueError):
        return repr(places)  # No such object wrote it.
    return ", ".join(each) or "none of the tables"


@functools.cache
def install(keras: Any) -> None:
    """Makes the new optimizers of a Keras save their variables' positions.

    They also warn, when they are built, of settings that don't reach tables;
    and those of Keras 3 sum repeated rows in gradients of tables.
    """
    own = keras.__name__ == keras_versions.TF_KERAS
    method = "_build_index_dict" if own else "build"
    [owner] = [
        kind
        for kind in keras.optimizers.Optimizer.__mro__
        if method in vars(kind)
    ]
    build = getattr(owner, method)

    @functools.wraps(build)
    def build_and_track(self: Any, var_list: Sequence[Any]) -> None:
        build(self, var_list)
        missing_settings.warn(self, var_list)
        if not own:
            # It imports Keras 3.
            from tfrs_embed.optimizers import repeated_rows

            repeated_rows.sum_for(self, var_list)
        names = [getattr(each, _ATTRIBUTE, None) for each in var_list]
        places = {
            str(i): [name, var_list[i].shape.as_list()]
            for i, name in enumerate(names)
            if name is not None
        }
        # After a build that was refused there is one already.
        order = self._lookup_dependency(_CHILD)
        if order is None:
            if not places and _CHILD not in self._deferred_dependencies:
                # No layer's variable is trained, and a pending checkpoint has
                # no positions.
                return
            order = SavedOrder(self)
        order.places = places
        # Keras keeps the children that it was first asked for.
        kept = getattr(self, "_coalesced_children", None)
        if kept is not None:
            kept[_CHILD] = order
        self._track_trackable(order, _CHILD)
        order.tracked = True
        if order.refused is not None:
            # Keras 3 has set `built`, and made no slots.
            self.built = False
            raise order.refused

    setattr(owner, method, build_and_track)
