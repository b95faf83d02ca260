"""Saves and restores tables as a part of TensorFlow's checkpoints.

A saver that is registered with TensorFlow writes tables in blocks, on the
workers that hold them, without the memory for a second table. Values have the
keys that TensorFlow would give them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.names import key_of
from tfrs_embed.checkpoint.rows import CheckpointValue, Save
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.compat import progress
from tfrs_embed.compat.private_tensorflow import registration, save_context

_ATTRIBUTE = "_tfrs_embed_saved"
# TensorFlow adds both to the paths that it gives to savers.
_PACKAGE, _NAME = "tfrs_embed", "table"


def mark(variable: Any, saved: CheckpointValue) -> None:
    """Makes `saved` save and restore a variable, or an object like one."""
    if isinstance(variable, CheckpointValue):
        return
    setattr(variable, _ATTRIBUTE, saved)
    # Keras's `model.export` writes variables without their owners, so the
    # variable itself must tell `saved` that TensorFlow writes a SavedModel.
    children_of = variable._trackable_children

    def children(save_type: str = "checkpoint", **kwargs: Any) -> Any:
        saved.exporting = save_type == "savedmodel"
        return children_of(save_type, **kwargs)

    variable._trackable_children = children


def marked(variable: Any) -> CheckpointValue | None:
    """The value of an object that is one or is marked, else None."""
    if issubclass(type(variable), CheckpointValue):
        return variable
    # Called for all objects of all checkpoints: __getattr__ may do anything.
    try:
        attributes = object.__getattribute__(variable, "__dict__")
    except AttributeError:
        return None
    return attributes.get(_ATTRIBUTE)


def _applies(trackable: Any) -> bool:
    saved = marked(trackable)
    # Programs that load a SavedModel have not registered this saver.
    return (
        saved is not None
        and not saved.exporting
        and not save_context.in_save_context()
    )


def _save(trackables: Mapping[str, Any], file_prefix: tf.Tensor) -> list[str]:
    # With variables on several devices TensorFlow saves in a function.
    with tf.init_scope():
        prefix = _text(file_prefix)
        found = _by_key(trackables)
        total = sum(saved.nbytes for saved in found.values())
        with progress.Task("Saving", _what(prefix), total) as task:
            file = chain.being_written()
            session = Session(prefix, _checkpoint_of(prefix), task.advance)
            save = Save()
            if file is not None:
                session.writer().add(chain.HEADER, file.link.header())
                file.found.update(found)
                save = Save(file.changed)
            table: Any = None
            for key, saved in found.items():
                if saved.table is not table:
                    # A table's values are neighbours: TensorFlow lists objects
                    # breadth first. Those of the last table are saved.
                    table = saved.table
                    save.shared.clear()
                writer = session.writer(saved.replicas)
                for each in saved.slices(key, save):
                    writer.add(*each)
            return [tf.constant(part) for part in session.finish()]


def _restore(trackables: Mapping[str, Any], merged_prefix: tf.Tensor) -> None:
    with tf.init_scope():
        reader = chain.read(_text(merged_prefix))
        found = {
            key: saved
            for key, saved in _by_key(trackables).items()
            if key in reader.shapes or not saved.optional
        }
        # Keys are restored before their rows.
        found = dict(sorted(found.items(), key=lambda f: f[1].order))
        for key, saved in found.items():
            if key not in reader.shapes:
                raise ValueError(
                    f"'{saved.name}' can't be restored: the checkpoint "
                    f"'{reader.prefix}' has no '{key}'. Under several workers "
                    "only the chief's checkpoint holds sharded tables."
                )
        total = sum(map(reader.nbytes, found))
        with progress.Task("Restoring", _what(reader.prefix), total) as task:
            reader.progress = task.advance
            for key, saved in found.items():
                saved.check(key, reader)
            for key, saved in found.items():
                saved.restore(key, reader)
            for table in {s.table for s in found.values()}:
                if table is not None:
                    table.restored(reader.prefix)


def _by_key(trackables: Mapping[str, Any]) -> dict[str, CheckpointValue]:
    found = ((key_of(n), marked(t)) for n, t in trackables.items())
    return {key: saved for key, saved in found if saved is not None}


def _what(prefix: str) -> str:
    """The name of a checkpoint's tables in progress bars."""
    return f"tables of '{os.path.basename(_checkpoint_of(prefix))}'"


def _checkpoint_of(prefix: str) -> str:
    """The checkpoint's path, without what TensorFlow adds for this saver."""
    return prefix.removesuffix(f"-{_PACKAGE}.{_NAME}")


def _text(prefix: Any) -> str:
    value = tf.get_static_value(tf.convert_to_tensor(prefix))
    if value is None:
        raise NotImplementedError(
            "Tables can't be saved or restored in a tf.function that is given "
            "the path."
        )
    return value.decode()


registration.register_checkpoint_saver(
    package=_PACKAGE,
    name=_NAME,
    predicate=_applies,
    save_fn=_save,
    restore_fn=_restore,
)
