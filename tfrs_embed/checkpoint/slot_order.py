"""Refuses to give one variable another's slots.

Keras's optimizers save slots by the position of the variables that they train;
only tf_keras's legacy ones don't. `size_threshold`, and whether a table has an
optimizer, decide which variables these are: under another, TensorFlow would
restore a variable's slots into another's, silently where their shapes are
equal. So an optimizer that trains a layer's variables saves where they were,
and compares.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rows import Saved
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.compat import kerases
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.optimizers import unreached

_ATTRIBUTE = "_tfrs_embed_slots_of"
_CHILD = "tfrs_embed_order"


def mark(variable: tf.Variable, name: str) -> None:
    """Has optimizers that train a variable save its position.

    Args:
        variable: the variable.
        name: what it is, whatever else the optimizer trains.
    """
    setattr(variable, _ATTRIBUTE, name)


class SavedOrder(Trackable, Saved):
    """Where layers' variables are among those that an optimizer trains.

    Attributes:
        places: by position, as JSON has it, a variable's name and shape.
        tracked: whether the optimizer has it. A pending restore is checked
            when it is attached; attaching must not raise.
        refused: what was wrong with the last restore.

    Args:
        optimizer: the optimizer.
    """

    optional = True

    def __init__(self, optimizer: Any) -> None:
        self.name = optimizer.name
        self.places: dict[str, Any] = {}
        self.tracked = False
        self.refused: ValueError | None = None
        self._optimizer = optimizer

    def save(self, key: str, session: Session) -> None:
        # The first is the number of iterations.
        if len(self._optimizer.variables) > 1:
            session.writer().add(key, json.dumps(self.places))

    def check(self, key: str, reader: BundleReader) -> None:
        there = json.loads(reader.read(key).numpy())
        self.refused = None
        if there != self.places:
            self.refused = ValueError(
                f"The optimizer '{self.name}' can't be restored from "
                f"'{reader.prefix}': it keeps slots by the position of the "
                f"variables that it trains. There it has {_text(there)}; here "
                f"{_text(self.places)}. Restore under the size_threshold, the "
                "table optimizers and the rows that it was saved with. Or "
                "restore into a model that is not compiled and save that: its "
                "checkpoint has no optimizer."
                f"{self._legacy()}"
            )
            if self.tracked:
                raise self.refused

    def _legacy(self) -> str:
        """What else helps, if there is something."""
        if kerases.of(self._optimizer).__name__ != kerases.TF_KERAS:
            return ""
        return " tf_keras.optimizers.legacy's keep slots by variable."

    def restore(self, key: str, reader: BundleReader) -> None:
        """Does nothing: there is only something to check."""

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        # SavedModels are loaded where nothing of this is registered.
        self.exporting = save_type == "savedmodel"
        return children

    def _maybe_initialize_trackable(self) -> None:
        super()._maybe_initialize_trackable()
        # TensorFlow calls this as it finds the object for a restore, too.
        self.exporting = False

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        object_map[self] = self  # It never changes.


def _text(places: dict[str, Any]) -> str:
    return (
        ", ".join(
            f"{name} {shape} at {place}"
            for place, (name, shape) in places.items()
        )
        or "none of the tables"
    )


@functools.cache
def install(keras: Any) -> None:
    """Has a Keras's new optimizers save the order that they are built with.

    As they are built, they warn of settings that don't reach tables.

    Args:
        keras: tf_keras or Keras 3.
    """
    own = keras.__name__ == kerases.TF_KERAS
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
        unreached.warn(self, var_list)
        places = {
            str(i): [name, variable.shape.as_list()]
            for i, variable in enumerate(var_list)
            if (name := getattr(variable, _ATTRIBUTE, None)) is not None
        }
        # A build that was refused has one already.
        order = self._lookup_dependency(_CHILD)
        if order is None:
            if not places and _CHILD not in self._deferred_dependencies:
                # No layer's variable is trained, here or where a pending
                # checkpoint was saved.
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
            # Keras 3 has noted that it is built, but not made the slots.
            self.built = False
            raise order.refused

    setattr(owner, method, build_and_track)
