"""Exports a model as a SavedModel that doesn't need this library."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.chain import Link
from tfrs_embed.compat import progress as tasks
from tfrs_embed.compat.arguments import flag
from tfrs_embed.compat.files import plain_path, remove_folder
from tfrs_embed.compat.private_tensorflow import fingerprinting_utils
from tfrs_embed.distribution.failures import raised_on_all_workers
from tfrs_embed.serving.applying import APPLY_DELTA, IDS, AppliedDeltas
from tfrs_embed.serving.delta import remember
from tfrs_embed.serving.functions import served_functions
from tfrs_embed.serving.graph import save_graph
from tfrs_embed.serving.key_filters import AgeLimit, KeyFilters
from tfrs_embed.serving.rows import DTYPES
from tfrs_embed.serving.tables import ServedTables
from tfrs_embed.serving.values import save_tables
from tfrs_embed.serving.workers import agreed, incomplete, strategy_of


def export(
    model: Any,
    path: str | os.PathLike[str],
    input_signature: Any = None,
    *,
    rows: str | None = None,
    signatures: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
    | None = None,
    updatable: bool = False,
    mapped: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    min_frequency: int | Mapping[str, int] | None = None,
    max_age: AgeLimit | None = None,
    max_keys: int | Mapping[str, int] | None = None,
) -> None:
    """Exports a model for serving.

    The SavedModel doesn't depend on where the model was trained: each table is
    one variable, [vocabulary_size, dim], and the graph has none of this
    library's operations, replicas, optimizers or slots. Tables are read and
    written in blocks, which take some 100 MB of memory for tables of any size.
    If the kernels are in use here (`tfrs_embed.kernels.status`), a process that
    loads their library before the model looks all features of a layer up by one
    kernel.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> movie = tf_keras.Input([], dtype=tf.int64, name="movie")
        >>> model = tf_keras.Model(movie, layer(movie))
        >>> tfrs_embed.serving.export(model, "models/ranking/1", rows="float16")
        >>> served = tf.saved_model.load("models/ranking/1")  # In any process.
        >>> served.serve(tf.constant([3, 5], tf.int64)).shape
        TensorShape([2, 8])

    The loaded model has `serve`, with the model's own arguments, and signatures
    for servers, whose inputs and outputs are named tensors. In signatures a
    ragged or sparse input is several tensors: "history_values" and
    "history_row_splits"; "history_indices", "history_values" and
    "history_dense_shape". Outputs are named by their keys in a dict, else by
    their Keras layers, else "output", "output_0" and so on. Characters other
    than letters, digits and underscores become underscores.

    The export is written to `path` + ".incomplete", and renamed at the end. An
    export that is replaced is renamed to `path` + ".replaced" just before, and
    removed just after. With several workers all must call this function; the
    chief writes, and the others return when the export is complete.

    Tables with `DynamicKeys` are exported with all of their keys, or with those
    that fulfil `min_frequency`, `max_age` and `max_keys`. Each of the three is
    a limit for all of these tables, or a mapping from tables' names, or
    "<layer>/<table>", to limits. Keys that are left out are unknown to the
    server. With `updatable` the deltas follow the same limits.

    Args:
        model: a built Keras model or layer, called with training=False. A model
            without a `call` is exported with the `signatures` alone; a model
            that isn't built too, if they include "serving_default".
        path: the folder to make, on a file system of `tf.io.gfile`.
        input_signature: the model's first argument, with a `tf.TensorSpec`,
            `tf.RaggedTensorSpec` or `tf.SparseTensorSpec` in place of each
            tensor, and without a list around a single tensor. The model is
            called with this argument alone. None: the inputs that a functional
            model declares, or the only argument of another model's first call,
            for batches of any size.
        rows: the dtype of the tables' rows: "float32", "bfloat16", "float16",
            "int8" or "int4". With "int8" and "int4" each row has a float32
            scale: the row's largest magnitude / 127, or / 7. A number is
            rounded to the nearest multiple of the scale, so the largest error
            is half of the scale. Two numbers of "int4" are one byte. Lookups
            always return float32. None: each table's own dtype.
        signatures: more signatures by name: each is a function, which may call
            this model and its layers, and a sequence of its arguments' specs.
            Inputs are named by their specs, or by the arguments. A function
            that reads other variables or lookup tables must be a `tf.Module`
            that has them, or its method. "serving_default" is the model itself,
            unless it is given here.
        updatable: whether the loaded model has `apply_delta(path)`, which
            applies a delta of `export_delta`, and a signature of this name: its
            input "path" is a scalar string, and its output "number" the number
            of the last delta that was applied. All tables of the model must
            track changes (`layer.tables[name].track_changes()`), except those
            that a Keras layer or a TPU holds, which are in each delta as a
            whole.
        mapped: whether the rows of tables are files in the SavedModel's folder
            `assets`, numbers row after row. A process that loads the kernels'
            library before the model maps the files into memory: it reads rows
            when they are first asked for, and processes share what was read.
            Other processes read the files when they load the model. For both
            the files must not change: replace them by new ones. What a delta
            changes is in the process's memory, and so is all of a table of keys
            once it has grown.
        overwrite: whether to replace a SavedModel at `path`. Servers read a
            model's folder once: for a model that is being served, export a new
            version to another folder.
        progress: whether to show progress, as `tfrs_embed.progress.set_mode`
            says.
        min_frequency: the least number of occurrences in training steps of the
            keys to export, an integer >= 1. Not of a table with
            eviction="score", which counts none.
        max_age: the largest number of steps since the last use of the keys to
            export, an integer >= 0; 0: the keys of the last step. Of a table
            whose eviction rule counts in time a `datetime.timedelta`.
        max_keys: the largest number of keys to export, an integer >= 1. Of the
            keys that fulfil the other conditions these are the ones that the
            table's eviction rule would evict last: with "lfu" the most
            frequent, with "score" those with the greatest scores, else the last
            used.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: the model isn't built, or its inputs are not known; a
            function calls a layer that isn't built; the model can't be called
            with the `input_signature`; an input or output has no name, or two
            have one name; `path` exists and is no empty folder, or with
            `overwrite` no SavedModel; `rows` is unknown; a table has values
            that can't be stored as `rows`; with `updatable` a signature is
            named "apply_delta"; or a limit of keys is out of its range, or for
            a table that the model doesn't have, that has no `DynamicKeys`, or
            that doesn't count how often and when its keys are used.
        RuntimeError: the export failed on another worker; or with `updatable` a
            table doesn't track changes.
    """
    path = plain_path(path, "export").rstrip("/")
    if rows is not None and rows not in DTYPES:
        raise ValueError(f"rows must be one of {list(DTYPES)}, got {rows!r}.")
    flag(updatable, "updatable")
    flag(mapped, "mapped")
    flag(overwrite, "overwrite")
    filters = KeyFilters(
        min_frequency=min_frequency, max_age=max_age, max_keys=max_keys
    )
    functions = served_functions(model, input_signature, signatures or {})
    strategy = strategy_of(model)
    writes = strategy.extended.should_checkpoint
    applied = _first_delta(functions, strategy) if updatable else None
    with contextlib.ExitStack() as stack:
        files = None
        if mapped:
            files = stack.enter_context(tempfile.TemporaryDirectory())
        tables = ServedTables(rows, updatable, files, filters)
        with raised_on_all_workers(strategy, "The export"):
            if writes:
                _require_free(path, overwrite)
                folder = stack.enter_context(incomplete(path, writes))
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
        with raised_on_all_workers(strategy, "The export"):
            # It reads variables of all workers, such as moving means.
            dense = save_graph(model, functions, tables, applied, folder)
            others: dict[str, tf.Tensor] = {}
            if applied is not None:
                # What changes from now on is in the first delta.
                remember(model, applied.link, tables, dense)
                others[IDS] = tf.constant([applied.link.id], tf.int64)
        with raised_on_all_workers(strategy, "The export"):
            # The last folder's name is often a version's number.
            name = "/".join(path.split("/")[-2:])
            with tasks.Task(
                "Exporting",
                f"tables of '{name}'",
                tables.nbytes,
                show=progress,
            ) as task:
                save_tables(tables, folder, writes, task.advance, others)
            if writes:
                fingerprinting_utils.write_fingerprint(folder)
                _require_free(path, overwrite)
                _move(folder, path)


def _first_delta(
    functions: Collection[str], strategy: tf.distribute.Strategy
) -> AppliedDeltas:
    """Returns the state of deltas that an updatable export begins with.

    Raises a ValueError if the model has a function with a delta's name.
    """
    if APPLY_DELTA in functions:
        raise ValueError(
            f"updatable=True makes the signature '{APPLY_DELTA}': give yours "
            "another name."
        )
    return AppliedDeltas(agreed(strategy, Link.first()))


def _require_free(path: str, overwrite: bool) -> None:
    """Raises an error if an export may not be written to a path."""
    if not tf.io.gfile.exists(path):
        return
    is_folder = tf.io.gfile.isdir(path)
    if is_folder and not tf.io.gfile.listdir(path):
        return
    if not overwrite:
        raise ValueError(
            f"'{path}' is there already: a model is exported to a new folder, "
            "or with overwrite=True in place of an export that is there."
        )
    if not is_folder or not tf.saved_model.contains_saved_model(path):
        raise ValueError(
            f"'{path}' is no SavedModel: overwrite=True replaces nothing else."
        )


def _move(folder: str, path: str) -> None:
    """Moves a complete export to its path, in place of an earlier one."""
    if not tf.io.gfile.exists(path):
        tf.io.gfile.rename(folder, path)
        return
    replaced = f"{path}.replaced"
    remove_folder(replaced)  # Left by an export that was killed here.
    tf.io.gfile.rename(path, replaced)
    tf.io.gfile.rename(folder, path)
    remove_folder(replaced)
