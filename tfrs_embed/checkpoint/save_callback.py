"""Checkpoints while Keras trains, and `fit` that continues from them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.fit_position import FitPosition
from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import integer_or_none


class SaveCallback(keras_versions.PlainCallback):
    """A callback of tf_keras or Keras 3 that saves checkpoints in `fit`.

    It saves every `every_steps` steps, or else at the end of each epoch; and
    when training ends. With a
    `FitPosition` that was restored, `fit` continues where the checkpoint was
    saved, with the next batch. In the last step of an epoch it saves after the
    epoch's end, so put it last in the list of callbacks: their work at the
    epoch's end is then done when it saves.

    In several workers all must have the callback, and save in the same steps.

    Example:
        >>> model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> checkpoint = tf.train.Checkpoint(model=model)
        >>> manager = tf.train.CheckpointManager(checkpoint, "saved", 3)
        >>> save = tfrs_embed.checkpoint.SaveCallback(manager, every_steps=2)
        >>> data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), [1.0, 2.0]))
        >>> _ = model.fit(data.repeat(5), callbacks=[save], verbose=0)
        >>> [path.rpartition("/")[2] for path in manager.checkpoints]
        ['ckpt-1', 'ckpt-2', 'ckpt-3']

    Args:
        manager: an object with a method `save()`, such as a
            `tf.train.CheckpointManager`.
        position: a `FitPosition` in the manager's checkpoint; None: `fit`
            starts as its arguments say.
        every_steps: the number of steps between two checkpoints; None: those
            of an epoch.

    Raises:
        TypeError: `manager` has no method `save`, or `position` is no
            `FitPosition`.
        ValueError: `every_steps` is not positive, or the manager's checkpoint
            doesn't contain `position`.
    """

    def __init__(
        self,
        manager: Any,
        position: FitPosition | None = None,
        *,
        every_steps: int | None = None,
    ) -> None:
        if not callable(getattr(manager, "save", None)):
            raise TypeError(
                "SaveCallback's manager must have a method save(), got "
                f"{manager!r}."
            )
        if position is not None:
            _check_position(position, manager)
        self._manager = manager
        self._position = position
        self._every_steps = integer_or_none(every_steps, "every_steps")
        self._train: Any = None
        self._wrapped: Any = None
        self._before: tuple[str, Any] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes `fit` begin at a restored position.

        Raises:
            ValueError: the position is after the end of an epoch, or a model
                of Keras 3 was restored before it was built.
        """
        self._unwrap()
        self._begin = self._since = self._until = 0
        self._resumes = self._counted = False
        position = self._position
        if position is None:
            return
        if not position._begin_fit():
            position.steps = 0
            return
        if self._of_keras_3() and not self._model.built:
            raise ValueError(
                f"Model '{self._model.name}' was not built before it was "
                "restored, and Keras 3 would train other variables: call the "
                "model, then restore it."
            )
        self._counted = self._steps is None and position.steps > 0
        self._steps = self._steps or position.steps or None
        if self._steps is not None and position.step > self._steps:
            raise ValueError(
                f"The restored position is step {position.step} of an epoch; "
                f"here an epoch has {self._steps} steps. Continue with the "
                "dataset and the steps_per_epoch that were saved."
            )
        self._resumes, self._until = True, position.step
        self._start_at(position.epoch, position.step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._end_start()
        position = self._position
        if position is None:
            return
        if not self._resumes:
            position.epoch, position.step = epoch, 0
        self._unwrap()
        resumes, self._resumes = self._resumes, False
        self._wrap(position, resumes)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._begin < self._until:
            return
        end = self._steps_until(batch)
        self._since += end - self._begin
        if self._position is not None:
            self._position.step = end
        if end != self._steps and self._due():
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        position, self._until, self._counted = self._position, 0, False
        if position is not None:
            stopped = self._model.stop_training
            if self._steps is None and not stopped:
                self._steps = position.steps = position.step
            # Training that was stopped within an epoch can be continued there.
            if not stopped or position.step == self._steps:
                position.epoch, position.step = epoch + 1, 0
        if self._due() or not self._every_steps:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        self._end_start()
        self._unwrap()
        if self._since:
            self._save()

    def _due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return bool(self._every_steps and self._since >= self._every_steps)

    def _save(self) -> None:
        self._manager.save()
        self._since = 0

    def _start_at(self, epoch: int, step: int) -> None:
        """Makes `fit`, which has begun, start at a step of an epoch."""
        if self._of_keras_3():
            # Keras 3 counts an epoch's steps from 0: `_wrap` skips them.
            self._set("_initial_epoch", epoch)
            self._counted = False
            return
        if self._steps in (None, step):
            # tf_keras needs a step, also if no batch is left: `_wrap` skips it.
            step = max(step - 1, 0)
        self._set("_training_state", _Start(epoch, step))

    def _of_keras_3(self) -> bool:
        return bool(
            keras_versions.keras_of(self._model).__name__
            == keras_versions.KERAS_3
        )

    def _set(self, name: str, value: Any) -> None:
        self._before = name, getattr(self._model, name)
        setattr(self._model, name, value)

    def _end_start(self) -> None:
        """Undoes `_start_at`: `fit` has read it."""
        if self._before is not None:
            setattr(self._model, *self._before)
            self._before = None

    def _wrap(self, position: FitPosition, resumes: bool) -> None:
        """Gets the iterator of the epoch from its first training step.

        Steps that were finished before the restored checkpoint are skipped: no
        batch is taken, and nothing is trained.
        """
        model, train = self._model, self._model.train_function

        def step(iterator: Any) -> Any:
            model.train_function = train
            if self._counted and self._begin == self._steps:
                # A step without a batch changes Adam's `iterations`: tf_keras
                # makes one at the end of the first epoch only.
                raise StopIteration
            position._follow(iterator, resumes)
            if self._begin < self._until:
                model.train_function = step
                return {"loss": 0.0, **model.get_metrics_result()}
            if self._begin != position.step:
                raise ValueError(
                    f"The restored position is step {position.step} of an "
                    "epoch, in which no step of this fit begins: continue with "
                    "the steps_per_execution that was saved."
                )
            logs = train(iterator)
            if self._counted:
                model.train_function = step
            return logs

        model.train_function, self._wrapped, self._train = step, step, train

    def _unwrap(self) -> None:
        """Undoes `_wrap`, if no training step has."""
        if self._wrapped and self._model.train_function is self._wrapped:
            self._model.train_function = self._train
        self._wrapped = self._train = None


class _Start:
    """Tells tf_keras where `fit` starts, in place of its own backups."""

    def __init__(self, epoch: int, step: int) -> None:
        self._at = epoch, step

    def maybe_load_initial_counters_from_ckpt(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Returns the epoch and the step."""
        return self._at


def _check_position(position: Any, manager: Any) -> None:
    if not isinstance(position, FitPosition):
        raise TypeError(
            f"SaveCallback's position must be a FitPosition, got {position!r}."
        )
    checkpoint = getattr(manager, "checkpoint", None)
    if checkpoint is None:
        return
    saved = tf.train.TrackableView(checkpoint).descendants()
    if not any(each is position for each in saved):
        raise ValueError(
            "The manager's checkpoint doesn't contain the position. Make it a "
            "part: tf.train.Checkpoint(model=model, position=position)."
        )
