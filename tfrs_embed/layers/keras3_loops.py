"""`fit` and `evaluate` of Keras 3 on replicas, also those of several workers.

They run Keras's own loops with other functions for the steps. Keras's step
takes the mean of all replicas' metrics, which fails on several workers; here
the states of metrics are added up. Replicas' losses are weighted with their
parts of a batch, so that batches needn't divide by the number of replicas.
"""

from __future__ import annotations

import contextlib
import copy
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfrs_embed.compat import keras_versions, private_keras_3
from tfrs_embed.compat.private_tensorflow import distribute_data
from tfrs_embed.distribution import failures, handshake
from tfrs_embed.layers import sparse_rows

_FILES_OF = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}

_TOGETHER = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
)

# More batches than there are.
_UNKNOWN = 2**62


def fit(
    model: keras.Model,
    data: tf.data.Dataset | tf.distribute.DistributedDataset,
    strategy: tf.distribute.Strategy,
    *,
    epochs: int = 1,
    callbacks: Any = None,
    validation_data: Any = None,
    verbose: int | str = "auto",
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_freq: int = 1,
    class_weight: dict[int, float] | None = None,
) -> keras.callbacks.History:
    """Trains a model of Keras 3 on the replicas of a strategy.

    Weights, losses and metrics are those of one device that trains on the same
    batches, up to rounding, also if the last batch is smaller; for losses that
    the model is compiled with, or that it or a layer has as attributes. Others
    count each replica's part alike. All workers of
    a `MultiWorkerMirroredStrategy` call it together, with equal arguments, and
    return equal histories. `steps_per_execution` is that of `compile`.

    Of several workers only the first one writes the files of ModelCheckpoint,
    BackupAndRestore, CSVLogger and TensorBoard. The others write theirs, as
    reading a sharded table takes all workers, to a folder that is removed. All
    workers must see the folder of BackupAndRestore.

    Example:
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 32)
        >>> with strategy.scope():
        ...     layer = tfrs_embed.keras3.PartialTPUEmbedding(
        ...         tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ...     )
        ...     model = keras.Sequential(
        ...         [
        ...             keras.Input([], dtype="int64"),
        ...             layer,
        ...             keras.layers.Dense(1),
        ...         ]
        ...     )
        ...     model.compile("adam", "mse")
        >>> data = tf.data.Dataset.from_tensor_slices(([3, 7, 9], [[0.0]] * 3))
        >>> history = tfrs_embed.keras3.fit(
        ...     model, data.batch(2), strategy, epochs=2, verbose=0
        ... )
        >>> list(history.history)
        ['loss']

    Args:
        model: the model, made and compiled inside `strategy.scope()`.
        data: global batches of (inputs, targets) or (inputs, targets, sample
            weights), which the strategy's auto-sharding divides among workers
            and replicas; or a dataset that the strategy has distributed. An
            epoch ends when no worker has a batch left: a worker or replica
            without one takes part with an empty one.
        strategy: a `MirroredStrategy` or `MultiWorkerMirroredStrategy`.
        epochs: the epoch to stop before.
        callbacks: a callback of Keras 3, a list of them, or None.
        validation_data: like `data`, to evaluate after epochs; None: nothing.
        verbose: 0, 1, 2 or "auto", as of `keras.Model.fit`.
        initial_epoch: the epoch to start with.
        steps_per_epoch: the batches of an epoch; None: all of the data.
        validation_steps: the batches of an evaluation; None: all.
        validation_freq: the epochs between evaluations.
        class_weight: by a class's number, the weight of its samples, as of
            `keras.Model.fit`; None: all weigh 1.

    Returns:
        The `keras.callbacks.History`, with a list for each metric.

    Raises:
        TypeError: the model or a callback isn't of Keras 3, or the data is no
            dataset.
        ValueError: the model isn't compiled, is compiled for XLA, or is of
            another strategy; a batch is smaller than the number of replicas;
            `train_step` returns a value that isn't a metric of the model.
        NotImplementedError: the strategy is of another kind.
        RuntimeError: another worker trains with other arguments, or begins with
            another epoch.
        tf.errors.UnavailableError: another worker has ended.
    """
    _check(model, strategy)
    listed = keras.tree.flatten(callbacks) if callbacks else []
    for each in listed:
        if not isinstance(
            each, (keras.callbacks.Callback, keras_versions.PlainCallback)
        ):
            raise TypeError(
                "keras3.fit takes callbacks of Keras 3, which are "
                f"keras.callbacks.Callback, got {each!r} of "
                f"{type(each).__module__}."
            )
    lengths: dict[str, Any] = {
        "epochs": epochs,
        "steps_per_epoch": steps_per_epoch,
        "validation_steps": validation_steps,
        "validation_freq": validation_freq,
    }
    settings = {
        **lengths,
        "steps_per_execution": model.steps_per_execution,
        "validation_data": validation_data is not None,
        # All workers stop, and read sharded tables, together.
        "callbacks": [
            type(each).__name__
            for each in listed
            if isinstance(each, _TOGETHER)
        ],
    }
    given = [_distribute(data, strategy, "data", class_weight)]
    if validation_data is not None:
        given.append(_distribute(validation_data, strategy, "validation_data"))
    _compare(model, strategy, settings)
    distributed, *validation = (_of_equal_lengths(d, strategy) for d in given)
    with _loop(model, distributed, strategy), _Files(strategy, listed) as files:
        return model.fit(
            distributed,
            callbacks=[*listed, _Start(strategy, files)],
            validation_data=validation[0] if validation else None,
            verbose=verbose,
            shuffle=False,  # Keras would remark on it.
            initial_epoch=initial_epoch,
            **lengths,
        )


def evaluate(
    model: keras.Model,
    data: tf.data.Dataset | tf.distribute.DistributedDataset,
    strategy: tf.distribute.Strategy,
    *,
    callbacks: Any = None,
    verbose: int | str = "auto",
    steps: int | None = None,
) -> dict[str, float]:
    """Evaluates a model of Keras 3 on the replicas of a strategy.

    Example:
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     inputs = keras.Input([2])
        ...     model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        ...     model.compile("adam", "mse", metrics=["mae"])
        >>> data = tf.data.Dataset.from_tensors((tf.ones([3, 2]), [[0.0]] * 3))
        >>> list(tfrs_embed.keras3.evaluate(model, data, strategy, verbose=0))
        ['loss', 'mae']

    Args:
        model: the model, as for `fit`.
        data: global batches, as for `fit`.
        strategy: the strategy, as for `fit`.
        callbacks: a callback of Keras 3, a list of them, or None.
        verbose: 0, 1, 2 or "auto", as of `keras.Model.evaluate`.
        steps: the batches to evaluate; None: all.

    Returns:
        The metrics of all samples of all workers, by name.

    Raises:
        TypeError: as `fit` does.
        ValueError: as `fit` does.
        NotImplementedError: as `fit` does.
        tf.errors.UnavailableError: another worker has ended.
    """
    _check(model, strategy)
    distributed = _distribute(data, strategy, "data")
    distributed = _of_equal_lengths(distributed, strategy)
    with _loop(model, distributed, strategy):
        return model.evaluate(
            distributed,
            callbacks=callbacks,
            verbose=verbose,
            steps=steps,
            return_dict=True,
        )


def _check(model: Any, strategy: Any) -> None:
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if not isinstance(strategy, kinds):
        raise NotImplementedError(
            "Keras 3 trains under a MirroredStrategy or a "
            f"MultiWorkerMirroredStrategy, got {type(strategy).__name__}."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"The model must be a keras.Model of Keras 3, got {model!r} of "
            f"{type(model).__module__}."
        )
    name = f"Model '{model.name}'"
    if not model.compiled:
        raise ValueError(f"{name} is not compiled: call compile() first.")
    inside = "Make and compile it inside `with strategy.scope():`."
    if model.distribute_strategy is not strategy:
        raise ValueError(
            f"{name} was not made in the scope of this strategy, but of "
            f"{type(model.distribute_strategy).__name__}. {inside}"
        )
    if model.optimizer._distribution_strategy is not strategy:
        raise ValueError(
            f"The optimizer of {name} was made outside of the scope of the "
            f"strategy. {inside}"
        )
    if model.jit_compile:
        raise ValueError(
            f"{name} is compiled with jit_compile=True, but XLA compiles no "
            "steps of several replicas: leave it out."
        )


def _compare(model: Any, strategy: Any, settings: dict[str, Any]) -> None:
    """Raises an error if another worker trains with other settings."""
    name = f"keras3.fit of Model '{model.name}'"
    handshake.compare_workers(strategy, name, lambda: {"": settings})


def _distribute(
    data: Any, strategy: Any, argument: str, class_weight: Any = None
) -> Any:
    """Returns the dataset, distributed; global batches must be large enough."""
    if isinstance(data, tf.distribute.DistributedDataset):
        if class_weight is not None:
            raise ValueError(
                "keras3.fit takes class_weight with a tf.data.Dataset only: "
                f"{argument} is distributed already. Give sample weights as "
                "the third part of its batches."
            )
        return data
    if not isinstance(data, tf.data.Dataset):
        raise TypeError(
            f"{argument} must be a tf.data.Dataset of global batches, or one "
            f"that the strategy has distributed, got {type(data).__name__}."
        )
    size = int(distribute_data.compute_batch_size(data))
    replicas = strategy.num_replicas_in_sync
    if 0 <= size < replicas:
        raise ValueError(
            f"The batches of {argument} have {size} samples, fewer than the "
            f"{replicas} replicas. A batch is the global one."
        )
    if class_weight is not None:
        data = private_keras_3.with_class_weights(data, class_weight)
    return strategy.experimental_distribute_dataset(sparse_rows.encode(data))


def _of_equal_lengths(data: Any, strategy: Any) -> Any:
    """Returns distributed data with the most batches that a worker has.

    Keras ends an epoch after the number of batches that the data has. It would
    leave a worker that has more than another one alone in its collectives.
    """
    own = int(data.cardinality)
    most = failures.largest_of_workers(strategy, own if own >= 0 else _UNKNOWN)
    if most == own or own < 0:
        return data
    data = copy.copy(data)
    data._cardinality = tf.data.UNKNOWN_CARDINALITY
    if most < _UNKNOWN:
        data._cardinality = most
    return data


@contextlib.contextmanager
def _loop(model: Any, data: Any, strategy: Any) -> Iterator[None]:
    """Prepares a model for Keras's loops."""
    # Of several replicas here, the first one's.
    spec = tf.nest.map_structure(
        lambda each: getattr(each, "_value_specs", (each,))[0],
        data.element_spec,
    )
    if not isinstance(model.train_function, _Steps):
        model.train_function = _Steps(model, strategy, model.train_step)
    if not isinstance(model.test_function, _Steps):
        model.test_function = _Steps(model, strategy, model.test_step)
    with private_keras_3.own_loop(model):
        private_keras_3.build(model, spec, strategy, sparse_rows.decode)
        private_keras_3.weigh_losses(model)
        yield


class _Steps:
    """Keras's `train_function` or `test_function`: steps on all replicas."""

    def __init__(self, model: Any, strategy: Any, step: Any) -> None:
        self._model, self._strategy, self._step = model, strategy, step
        self._names: list[str] = []
        self._execute: Any = self._execution
        if not model.run_eagerly:
            self._execute = tf.function(self._execution, autograph=False)

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        done, logs = self._execute(iterator)
        if not done:
            raise StopIteration
        return logs

    def _execution(self, iterator: Any) -> Any:
        """Makes up to `steps_per_execution` steps.

        Returns whether there was a batch, and the metrics of all replicas.
        """
        steps = self._model.steps_per_execution

        def run_next(step: Any, _: Any) -> Any:
            # Without a condition, what needs no batch would run at the end.
            batch = iterator.get_next_as_optional()

            def run() -> Any:
                self._strategy.run(self._replica_step, (batch.get_value(),))
                return step + 1, True

            return tf.cond(batch.has_value(), run, lambda: (step, False))

        if steps == 1:
            count, _ = run_next(0, True)
        else:
            count, _ = tf.while_loop(
                lambda step, more: more & (step < steps), run_next, (0, True)
            )
        # Outside of replicas this adds up the states of all of them.
        results = self._model.get_metrics_result()
        return count > 0, {name: results[name] for name in self._names}

    def _replica_step(self, batch: Any) -> None:
        batch = sparse_rows.decode(batch)
        with private_keras_3.weighted(_share(batch)):
            logs = self._step(batch)
        metrics = self._model.get_metrics_result()
        if not isinstance(logs, dict) or not logs.keys() <= metrics.keys():
            raise ValueError(
                f"A step of Model '{self._model.name}' must return a dict of "
                f"its metrics, some of {list(metrics)}, as only their states "
                f"can be added up over replicas, got {logs!r}. Make the values "
                "keras.metrics.Mean metrics of the model."
            )
        self._names = list(logs)


def _share(batch: Any) -> Any:
    """This replica's part of a batch's samples."""
    first = tf.nest.flatten(batch)[0]
    context: Any = tf.distribute.get_replica_context()
    if first.shape[0] is not None:  # All have equally many.
        return tf.constant(1 / context.num_replicas_in_sync)
    own = tf.cast(tf.shape(first)[0], tf.float32)
    return own / context.all_reduce(tf.distribute.ReduceOp.SUM, own)


class _Start(keras.callbacks.Callback):
    """Compares workers when their callbacks have begun."""

    def __init__(self, strategy: Any, files: Any) -> None:
        super().__init__()
        self._strategy, self._files = strategy, files

    def on_train_begin(self, logs: Any = None) -> None:
        begun = {"the first epoch": self.model._initial_epoch}
        _compare(self.model, self._strategy, begun)
        self._files.move(keras.callbacks.BackupAndRestore)


class _Files:
    """Gives callbacks of all workers but the first files of their own."""

    def __init__(self, strategy: Any, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._first = strategy.extended.should_checkpoint
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def __enter__(self) -> _Files:
        self._folder = tempfile.TemporaryDirectory()
        # A backup is read before.
        for kind in _FILES_OF.keys() - {keras.callbacks.BackupAndRestore}:
            self.move(kind)
        return self

    def __exit__(self, *_: Any) -> None:
        for callback, attributes in self._before:
            vars(callback).update(attributes)
        self._folder.cleanup()

    def move(self, kind: type) -> None:
        """Moves the paths of callbacks of one class."""
        for number, callback in enumerate(self._callbacks):
            if self._first or not isinstance(callback, kind):
                continue
            path = str(getattr(callback, _FILES_OF[kind]))
            folder = pathlib.Path(self._folder.name, str(number))
            folder.mkdir()
            moved = str(folder / pathlib.Path(path).name)
            paths = {
                name: value
                for name, value in vars(callback).items()
                if isinstance(value, str) and value.startswith(path)
            }
            self._before.append((callback, paths))
            for name, value in paths.items():
                setattr(callback, name, moved + value.removeprefix(path))
