"""The graph of an exported model: a SavedModel without tables' values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.private_tensorflow import AutoTrackable, save_context
from tfrs_embed.serving.applying import (
    APPLY_DELTA,
    AppliedDeltas,
    DenseVariable,
)
from tfrs_embed.serving.functions import DEFAULT_SIGNATURE
from tfrs_embed.serving.signatures import ServedFunction
from tfrs_embed.serving.tables import ServedTables


class _Policy:
    """TensorFlow's default policy, as an object of one export.

    TensorFlow keeps functions' traces by this object. Without it a function
    that the model calls would be reused from an earlier export, with its
    tables.
    """

    def _save_variable_devices(self) -> bool:
        return False

    def _expand_distributed_variables(self) -> bool:
        return False


def save_graph(
    model: Any,
    functions: Mapping[str, ServedFunction],
    tables: ServedTables,
    applied: AppliedDeltas | None,
    folder: str,
) -> list[DenseVariable]:
    """Writes a SavedModel of `functions` to a folder, without tables' values.

    `tables` takes the tables that the functions read. With `applied` the model
    has a function that applies deltas. Returns the other variables that the
    functions read. Raises a ValueError if a filter of `tables` is for none of
    them.
    """
    options = tf.saved_model.SaveOptions()
    options.experimental_variable_policy = _Policy()
    root: Any = AutoTrackable()
    concrete = {}
    # TensorFlow traces in this context when it saves: no replicas, no kernels.
    with save_context.save_context(options):
        for name, function in functions.items():
            with _no_new_variables(name):
                served, concrete[name] = function.trace(tables)
            if name == DEFAULT_SIGNATURE:
                root.serve = served
    tables.require_filtered()
    root.tables = tables.by_layer
    roots = [model, *(f.owner for f in functions.values() if f.owner)]
    resources = _resources(roots, concrete.values(), tables)
    root.resources = [owner for owner, _ in resources]
    dense = [each for each in resources if isinstance(each[0], tf.Variable)]
    if applied is not None:
        root.applied = applied
        with save_context.save_context(options):
            root.apply_delta = applied.function(tables, dense)
            concrete[APPLY_DELTA] = root.apply_delta.get_concrete_function()
    tf.saved_model.save(root, folder, concrete, options)
    return dense


@contextlib.contextmanager
def _no_new_variables(signature: str) -> Iterator[None]:
    """Raises an error if a function makes a variable, which isn't trained."""

    def refuse(_: Any, **kwargs: Any) -> tf.Variable:
        raise ValueError(
            f"Signature '{signature}' calls a layer that isn't built. It would "
            f"make the variable '{kwargs.get('name')}', which isn't trained."
        )

    with tf.variable_creator_scope(refuse):
        yield


def _resources(
    roots: Iterable[Any], functions: Iterable[Any], tables: ServedTables
) -> list[DenseVariable]:
    """The variables and lookup tables that functions read, except `tables`.

    They are among the `roots`' descendants, or the functions' own variables.
    """
    owners: dict[int, Any] = {}
    for owner in itertools.chain.from_iterable(
        tf.train.TrackableView(root).descendants() for root in roots
    ):
        owner = keras_versions.variable(owner)
        is_variable = isinstance(owner, tf.Variable)
        parts: Any = getattr(owner, "values", None) if is_variable else None
        for part in parts if isinstance(parts, tuple) else (owner,):
            for handle in ("handle", "resource_handle"):
                found = getattr(part, handle, None)
                if tf.is_tensor(found):
                    owners.setdefault(id(found), owner)
    ours = {id(v.handle) for t in tables for v in t.variables.values()}
    read: dict[int, DenseVariable] = {}
    for function in functions:
        by_handle = {id(v.handle): v for v in function.graph.variables}
        for captured, _ in function.graph.captures:
            key = id(captured)
            owner = owners.get(key, by_handle.get(key))
            if key not in ours and owner is not None:
                read[id(owner)] = DenseVariable(owner, captured)
    return list(read.values())
