"""Exports a model as a SavedModel that serves it without this library."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import kerases
from tfrs_embed.compat import progress as tasks
from tfrs_embed.compat.private_tensorflow import fingerprinting_utils
from tfrs_embed.serving.functions import served_functions
from tfrs_embed.serving.graph import save_graph
from tfrs_embed.serving.rows import DTYPES
from tfrs_embed.serving.tables import ServedTables
from tfrs_embed.serving.values import save_tables


def export(
    model: Any,
    path: str | os.PathLike[str],
    input_signature: Any = None,
    *,
    rows: str | None = None,
    signatures: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
    | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Exports a model for serving.

    The SavedModel is the same wherever the model was trained: each table is one
    variable, [vocabulary_size, dim], and the graph has none of this library's
    operations, replicas, optimizers or slots. Tables are read and written in
    blocks: exporting holds some 100 MB of them in memory, whatever their size.

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

    It has `serve`, which takes what the model takes, and signatures, whose
    inputs and outputs are tensors with names, for servers. Ragged and sparse
    inputs are several tensors there: "history_values" and
    "history_row_splits"; "history_indices", "history_values" and
    "history_dense_shape". Outputs have the names that they have in a dict, or
    their Keras layers', or "output", "output_0" and so on. In names, what is
    no letter, digit or underscore is an underscore.

    It is written to `path` + ".incomplete", which is renamed at the end. An
    export that is replaced is renamed to `path` + ".replaced" just before, and
    removed just after. With several workers all of them must call this, and the
    chief writes; others return when it is done.

    Args:
        model: a built Keras model or layer. It is called with
            training=False. One without a `call` is exported with the
            `signatures` alone, as is one that isn't built if
            "serving_default" is among them.
        path: the folder to make, on a disk or wherever `tf.io.gfile` writes.
        input_signature: the model's inputs, with a `tf.TensorSpec`,
            `tf.RaggedTensorSpec` or `tf.SparseTensorSpec` in place of each
            tensor; it is called with these alone. A model that is called with
            one tensor has one spec, without a list around it. None: what a
            functional model declares, and what another was first called with,
            further arguments too, for batches of any size. The names of these
            begin with the argument's: "weights_history_values". Keras doesn't
            know of arguments by keyword that hold anything but tensors, a None
            in a dict for one: they have their defaults.
        rows: the dtype of the tables' rows: "float32"; "bfloat16"; "float16";
            or "int8",
            with a float32 scale for each row: the row's largest magnitude /
            127, half of which is the largest error. Lookups give float32
            whatever it is. None: each table's own.
        signatures: more signatures by name, each a function, which may call
            this model and its layers, and a sequence of its arguments' specs.
            Inputs have the names of their specs, or of the arguments. Other
            variables and lookup tables that it reads must be a `tf.Module`'s,
            whose method it is or which is the function. "serving_default" is
            the model itself if it isn't given here.
        overwrite: whether to replace a SavedModel that is at `path`. Servers
            read a model's folder once: give a model that is being served a new
            version's folder instead.
        progress: whether to show how much of the tables is written, as
            `tfrs_embed.progress.set_mode` says.

    Raises:
        TypeError: something is of a wrong kind.
        ValueError: the model isn't built or its inputs are not known; a
            function calls a layer that isn't built; the model can't be called
            with the `input_signature`; an input or output has no name, or
            another's; the path is there and isn't an empty folder, or with
            `overwrite` holds no SavedModel; another `rows`; or a table's values
            can't be stored so.
        RuntimeError: another worker failed.
    """
    path = os.fspath(path).rstrip("/")
    if rows is not None and rows not in DTYPES:
        raise ValueError(f"rows must be one of {list(DTYPES)}, got {rows!r}.")
    functions = served_functions(model, input_signature, signatures or {})
    tables = ServedTables(rows)
    strategy = _strategy(model)
    writes = strategy.extended.should_checkpoint
    with contextlib.ExitStack() as stack:
        with _together(strategy):
            if writes:
                _require_free(path, overwrite)
                folder = f"{path}.incomplete"
                _remove(folder)  # Of an export that was killed.
                stack.callback(_remove, folder)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            save_graph(model, functions, tables, folder)
        for layer in tables.layers.values():
            layer.drain()
        with _together(strategy):
            # The last folder's name is often that of a version.
            name = "/".join(path.split("/")[-2:])
            with tasks.Task(
                "Exporting",
                f"tables of '{name}'",
                tables.nbytes,
                show=progress,
            ) as task:
                save_tables(tables, folder, writes, task.advance)
            if writes:
                fingerprinting_utils.write_fingerprint(folder)
                _require_free(path, overwrite)
                _move(folder, path)


def _strategy(model: Any) -> tf.distribute.Strategy:
    """The strategy that a model was made under."""
    for weight in model.weights:
        variable = kerases.variable(weight)
        strategy = getattr(variable, "_distribute_strategy", None)
        if strategy is not None:
            return strategy
    return tf.distribute.get_strategy()


@contextlib.contextmanager
def _together(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Fails on all workers, if what is done here fails on one of them."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):

        @tf.function(autograph=False)
        def count_failed() -> tf.Tensor:
            def failed() -> tf.Tensor:
                replica: Any = tf.distribute.get_replica_context()
                return replica.all_reduce("sum", tf.constant(int(bool(error))))

            return strategy.experimental_local_results(strategy.run(failed))[0]

        if int(count_failed()) and error is None:
            error = RuntimeError("The export failed on another worker.")
    if error is not None:
        raise error


def _require_free(path: str, overwrite: bool) -> None:
    """Requires a path that an export may take."""
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
    """Gives a complete export its path; what is there goes."""
    if not tf.io.gfile.exists(path):
        tf.io.gfile.rename(folder, path)
        return
    replaced = f"{path}.replaced"
    _remove(replaced)  # Of an export that was killed here.
    tf.io.gfile.rename(path, replaced)
    tf.io.gfile.rename(folder, path)
    _remove(replaced)


def _remove(folder: str) -> None:
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)
