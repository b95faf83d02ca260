"""Exports a model as a SavedModel that serves it without this library."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.saved_model import (
    fingerprinting_utils,
    save_context,
)
from tensorflow.python.util import nest

from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving.names import rename_inputs
from tfrs_embed.serving.rows import FORMATS
from tfrs_embed.serving.signatures import Signature, named_outputs
from tfrs_embed.serving.tables import ServedTable, ServedTables

_DEFAULT = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def export(
    model: tf_keras.layers.Layer,
    path: str | os.PathLike[str],
    input_signature: Any = None,
    *,
    rows: str = "float32",
    signatures: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
    | None = None,
) -> None:
    """Exports a model for serving.

    The SavedModel is the same wherever the model was trained: each table is one
    variable, [vocabulary_size, dim], and the graph has none of this library's
    operations, replicas, optimizers or slots. Tables are read and written in
    blocks: exporting holds some 100 MB of them in memory, whatever their size.

    ```python
    tfrs_embed.serving.export(model, "models/ranking/1", rows="float16")
    served = tf.saved_model.load("models/ranking/1")  # Anywhere.
    served.serve({"movie": tf.constant([3, 5])})
    ```

    It has `serve`, which takes what the model takes, and signatures, whose
    inputs and outputs are tensors with names, for servers. Ragged and sparse
    inputs are several tensors there: "history_values" and
    "history_row_splits"; "history_indices", "history_values" and
    "history_dense_shape". Outputs have the names that they have in a dict, or
    their Keras layers', or "output", "output_0" and so on. In names, what is
    no letter, digit or underscore is an underscore.

    It is written to `path` + ".incomplete", which is renamed at the end. With
    several workers all of them must call this, and the chief writes; others
    return when it is done.

    Args:
        model: a built tf_keras model or layer. It is called with
            training=False. One without a `call` is exported with the
            `signatures` alone, as is one that isn't built if
            "serving_default" is among them.
        path: the folder to make, on a disk or wherever `tf.io.gfile` writes.
        input_signature: the model's inputs, with a `tf.TensorSpec`,
            `tf.RaggedTensorSpec` or `tf.SparseTensorSpec` in place of each
            tensor; it is called with these alone. None: what a functional
            model declares, and what another was first called with, further
            arguments too, for batches of any size. The names of these begin
            with the argument's: "weights_history_values". Keras doesn't know
            of arguments by keyword that hold anything but tensors, a None in
            a dict for one: they have their defaults.
        rows: the dtype of the tables' rows: "float32"; "float16"; or "int8",
            with a float32 scale for each row: the row's largest magnitude /
            127, half of which is the largest error. Lookups give float32
            whatever it is.
        signatures: more signatures by name, each a function, which may call
            this model and its layers, and a sequence of its arguments' specs.
            Inputs have the names of their specs, or of the arguments. Other
            variables and lookup tables that it reads must be a `tf.Module`'s,
            whose method it is or which is the function. "serving_default" is
            the model itself if it isn't given here.

    Raises:
        TypeError: something is of a wrong kind.
        ValueError: the model isn't built or its inputs are not known; a
            function calls a layer that isn't built; an input or output has no
            name, or another's; the path is there and isn't an empty folder;
            another `rows`; or a table's values can't be stored so.
        RuntimeError: another worker failed.
    """
    path = os.fspath(path).rstrip("/")
    if rows not in FORMATS:
        raise ValueError(f"rows must be one of {list(FORMATS)}, got {rows!r}.")
    functions = _functions(model, input_signature, signatures or {})
    tables = ServedTables(FORMATS[rows])
    strategy = _strategy(model)
    writes = strategy.extended.should_checkpoint
    with contextlib.ExitStack() as stack:
        with _together(strategy):
            if writes:
                _require_empty(path)
                folder = f"{path}.incomplete"
                _remove(folder)  # Of an export that was killed.
                stack.callback(_remove, folder)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            _save_graph(model, functions, tables, folder)
        for layer in tables.layers.values():
            if hasattr(layer, "drain"):
                layer.drain()
        with _together(strategy):
            _save_tables(tables, folder, writes)
            if writes:
                fingerprinting_utils.write_fingerprint(folder)
                _require_empty(path)
                _remove(path)
                tf.io.gfile.rename(folder, path)


class _Function:
    """A function to export, and what it takes.

    Args:
        name: the signature's name.
        function: the function.
        arguments: its arguments' specs.
        labels: what it calls its arguments.
        output_names: what to call outputs that are no dict's.
        bare: of how many arguments, the first, the inputs' names don't begin
            with the argument's; None: of a single one.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        labels: Sequence[str],
        output_names: Sequence[str] | None = None,
        bare: int | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._labels = labels
        self._output_names = output_names
        self._signature = Signature(name, arguments, labels, bare)

    @property
    def owner(self) -> Any:
        """What holds the variables of a function of an object, or None."""
        owner = getattr(self._function, "__self__", self._function)
        trackable = tf.__internal__.tracking.Trackable
        return owner if isinstance(owner, trackable) else None

    @property
    def renamed(self) -> dict[str, str]:
        """The names of inputs that TensorFlow has by another name, by that."""
        return self._signature.renamed

    def trace(self, tables: ServedTables) -> tuple[Any, Any]:
        """Traces it with the tables in place of the layers' own.

        Returns:
            The function that takes what the user's takes, and the concrete
            one that takes and returns named tensors.
        """

        def serve(*arguments: Any) -> Any:
            with tables.in_use():
                return self._function(*arguments)

        # They may be given by keyword too.
        serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    label, inspect.Parameter.POSITIONAL_OR_KEYWORD
                )
                for label in self._labels
            ]
        )
        served = tf.function(serve, input_signature=self._signature.arguments)

        @tf.function(autograph=False)
        def named(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = served(*self._signature.pack(tensors))
            return named_outputs(self._name, outputs, self._output_names)

        return served, named.get_concrete_function(**self._signature.tensors)


def _labels(function: Callable[..., Any], number: int) -> list[str]:
    """What a function calls its arguments."""
    if isinstance(function, tf_keras.layers.Layer):
        function = function.call
    parameters = list(inspect.signature(function).parameters.values())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in variadic]
    if len(names) < number:
        return [f"inputs_{i}" for i in range(number)]
    return names[:number]


def _functions(
    model: Any,
    input_signature: Any,
    signatures: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
) -> dict[str, _Function]:
    """Checks what is to be exported; returns it by the signatures' names."""
    if not isinstance(model, tf_keras.layers.Layer):
        raise TypeError(
            f"Only a tf_keras model or layer can be exported, got {model!r}."
        )
    functions = {}
    if _DEFAULT in signatures:
        pass
    elif type(model).call is not tf_keras.Model.call:
        functions[_DEFAULT] = _default(model, input_signature)
    elif not signatures or input_signature is not None:
        raise ValueError(
            f"'{model.name}' has no call method, so what it is to serve is not "
            "known: give export signatures, functions with the specs of their "
            "arguments, such as {'serving_default': (model.user_model, "
            "[tf.TensorSpec([None], tf.int64)])}."
        )
    for name, (function, arguments) in signatures.items():
        if not callable(function):
            raise TypeError(
                f"Signature '{name}' must be a function and its arguments' "
                f"specs, got {function!r}."
            )
        labels = _labels(function, len(arguments))
        functions[name] = _Function(name, function, arguments, labels)
    return functions


def _default(model: Any, input_signature: Any) -> _Function:
    """The model itself, as a function of what it takes."""
    if not model.built:
        raise ValueError(
            f"'{model.name}' can't be exported: it isn't built. Call it once, "
            "or train it; or give export signatures, 'serving_default' among "
            "them, which don't call it."
        )
    arguments: dict[str, Any] = {}
    if input_signature is None:
        given = model.save_spec() if hasattr(model, "save_spec") else None
        if given is None:
            raise ValueError(
                f"What '{model.name}' takes is not known, as only models "
                "that were called know it: give export an input_signature."
            )
        input_signature, arguments = _called_with(model, *given)
    names = list(arguments)
    first = "inputs"
    if first in names:
        first = next(iter(inspect.signature(model.call).parameters))

    def call(inputs: Any, *others: Any) -> Any:
        by_name = dict(zip(names, others, strict=True))
        return model(inputs, training=False, **by_name)

    return _Function(
        _DEFAULT,
        call,
        [input_signature, *arguments.values()],
        [first, *names],
        getattr(model, "output_names", None),
        bare=1,
    )


def _called_with(
    model: Any, positional: Sequence[Any], by_name: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What Keras knows of the call that a model was first called by.

    Args:
        model: the model.
        positional: specs of the arguments that had no name. None stands for
            whatever is no tensor.
        by_name: those of the others, of tensors only.

    Returns:
        The first argument's specs, and the others' by name.
    """
    first, *others = inspect.signature(model.call).parameters.values()
    names = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    inputs, *rest = positional
    if len(names) < len(rest):
        raise ValueError(
            f"'{model.name}' was called with {len(positional)} arguments, and "
            f"its call has names for {len(names) + 1}: give export an "
            "input_signature, which it is called with alone, or signatures."
        )
    arguments = {**dict(zip(names, rest, strict=False)), **by_name}
    arguments.pop("training", None)
    for name, argument in {first.name: inputs, **arguments}.items():
        for path, spec in nest.flatten_with_tuple_paths(argument):
            if not isinstance(spec, tf.TypeSpec):
                place = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"'{model.name}' was called with something that is no "
                    f"tensor as {name}{place}, which Keras doesn't remember: "
                    "give export an input_signature, which it is called with "
                    "alone, or signatures."
                )
    return inputs, arguments


def _strategy(model: Any) -> tf.distribute.Strategy:
    """The strategy that a model was made under."""
    for weight in model.weights:
        strategy = getattr(weight, "_distribute_strategy", None)
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


def _require_empty(path: str) -> None:
    if tf.io.gfile.exists(path) and (
        not tf.io.gfile.isdir(path) or tf.io.gfile.listdir(path)
    ):
        raise ValueError(
            f"'{path}' is there already: a model is exported to a new folder."
        )


def _remove(folder: str) -> None:
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)


class _Policy:
    """TensorFlow's default policy, as an object that no other export has.

    By it TensorFlow finds the traces of functions: one that the model calls and
    an earlier export traced would read the tables of that.
    """

    def _save_variable_devices(self) -> bool:
        return False

    def _expand_distributed_variables(self) -> bool:
        return False


def _save_graph(
    model: Any,
    functions: Mapping[str, _Function],
    tables: ServedTables,
    folder: str,
) -> None:
    """Writes all but the tables' values."""
    options = tf.saved_model.SaveOptions()
    options.experimental_variable_policy = _Policy()
    root: Any = tf.__internal__.tracking.AutoTrackable()
    concrete = {}
    # As TensorFlow traces what it saves: without replicas and kernels.
    with save_context.save_context(options):
        for name, function in functions.items():
            with _no_new_variables(name):
                served, concrete[name] = function.trace(tables)
            if name == _DEFAULT:
                root.serve = served
    by_layer: dict[str, dict[str, ServedTable]] = {n: {} for n in tables.layers}
    for table in tables:
        by_layer[table.layer][table.name] = table
    root.tables = by_layer
    roots = [model, *(f.owner for f in functions.values() if f.owner)]
    root.resources = _resources(roots, concrete.values(), tables)
    tf.saved_model.save(root, folder, concrete, options)
    renamed = {name: f.renamed for name, f in functions.items() if f.renamed}
    if renamed:
        rename_inputs(folder, renamed)


@contextlib.contextmanager
def _no_new_variables(signature: str) -> Iterator[None]:
    """Refuses variables, which would be served untrained."""

    def refuse(_: Any, **kwargs: Any) -> tf.Variable:
        raise ValueError(
            f"Signature '{signature}' calls what isn't built: it would make "
            f"the variable '{kwargs.get('name')}', which was never trained."
        )

    with tf.variable_creator_scope(refuse):
        yield


def _resources(
    roots: Iterable[Any], functions: Iterable[Any], tables: ServedTables
) -> list[Any]:
    """The variables and lookup tables that functions read, but for ours.

    Args:
        roots: what may hold them.
        functions: the functions, concrete.
        tables: ours.
    """
    owners: dict[int, Any] = {}
    for owner in itertools.chain.from_iterable(
        tf.train.TrackableView(root).descendants() for root in roots
    ):
        parts = getattr(owner, "values", None) if _is_variable(owner) else None
        for part in parts if isinstance(parts, tuple) else (owner,):
            for handle in ("handle", "resource_handle"):
                found = getattr(part, handle, None)
                if tf.is_tensor(found):
                    owners.setdefault(id(found), owner)
    ours = {id(v.handle) for t in tables for v in t.variables.values()}
    read: dict[int, Any] = {}
    for function in functions:
        by_handle = {id(v.handle): v for v in function.graph.variables}
        for captured, _ in function.graph.captures:
            key = id(captured)
            owner = owners.get(key, by_handle.get(key))
            if key not in ours and owner is not None:
                read[id(owner)] = owner
    return list(read.values())


def _is_variable(owner: Any) -> bool:
    return isinstance(owner, tf.Variable)


def _save_tables(tables: ServedTables, folder: str, writes: bool) -> None:
    """Writes the tables' values to where the graph restores them from."""
    variables = f"{folder}/variables/variables"
    keys = _keys(variables)
    writer = bundle.BundleWriter(f"{folder}/variables/tables")
    failed: Exception | None = None
    for table in tables:
        for name, variable in table.variables.items():
            if variable.shape[0] == 0:  # There will be no block.
                empty = tf.zeros(variable.shape, variable.dtype)
                writer.add(keys[table.layer, table.name, name], empty)
        for start, block in table.blocks():
            if not writes or failed is not None:
                continue  # Other workers need this one to read.
            try:
                for name, rows in block.items():
                    writer.add_rows(
                        keys[table.layer, table.name, name],
                        table.variables[name].shape,
                        start,
                        rows,
                    )
            except tf.errors.OpError as error:
                failed = error
    if failed is not None:
        raise failed
    if not writes:
        return
    parts = writer.finish()
    graph = f"{folder}/variables/graph"
    for file in tf.io.gfile.glob(f"{variables}.*"):
        tf.io.gfile.rename(file, graph + file[len(variables) :])
    bundle.merge([graph, *parts], variables)


def _keys(prefix: str) -> dict[tuple[str, ...], str]:
    """The checkpoint's key of each table's variable, by its path."""
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_OBJECT_GRAPH))
    keys = {}

    def visit(node: int, path: tuple[str, ...]) -> None:
        for attribute in graph.nodes[node].attributes:
            keys[path] = attribute.checkpoint_key
        for child in graph.nodes[node].children:
            visit(child.node_id, (*path, child.local_name))

    for child in graph.nodes[0].children:
        if child.local_name == "tables":
            visit(child.node_id, ())
    return keys
