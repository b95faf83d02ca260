"""The position of a running `model.fit` in its input, as a part of checkpoints.

Keras makes the iterator after `on_train_begin`, so the iterator becomes a child
of the position when `fit` takes its first batch; TensorFlow then restores the
iterator's state, which was pending until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice, message_of
from tfrs_embed.checkpoint.rows import CheckpointValue, Save
from tfrs_embed.compat.private_tensorflow import Trackable

_CHILD = "input"
_NUMBERS = "numbers"
# The name that TensorFlow gives to an iterator's state.
_STATE = "_STATE"
_INSTEAD = (
    " Use a tf.data.Dataset of TensorFlow's own operations, on one device: no "
    "generator, no py_function, no random operation in map. Or train without a "
    "position: SaveCallback(manager) saves at the end of each epoch, and "
    "fit(initial_epoch=...) goes on from there. See docs/checkpoints.md."
)


class FitPosition(Trackable):
    """The epoch, the step and the input iterator of a running `model.fit`.

    Make it a child of the checkpoint and give it to a `SaveCallback`, which
    keeps it up to date. A program that is killed is simply started again: the
    same `fit` continues with the batch after the last one of the restored
    checkpoint. Works for models of tf_keras and of Keras 3.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ... )
        >>> model = tf_keras.Sequential([layer, tf_keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> position = tfrs_embed.checkpoint.FitPosition()
        >>> checkpoint = tf.train.Checkpoint(model=model, position=position)
        >>> manager = tf.train.CheckpointManager(checkpoint, "run", 3)
        >>> _ = manager.restore_or_initialize()
        >>> ids, labels = tf.range(80), tf.zeros([80])
        >>> dataset = tf.data.Dataset.from_tensor_slices((ids, labels))
        >>> dataset = dataset.shuffle(80, seed=1).batch(8)
        >>> save = tfrs_embed.checkpoint.SaveCallback(
        ...     manager, position, every_steps=4
        ... )
        >>> _ = model.fit(dataset, epochs=2, callbacks=[save], verbose=0)
        >>> position.epoch, position.step
        (2, 0)

    Attributes:
        epoch: the number of finished epochs, an int.
        step: the number of finished steps of the next epoch, an int.
        steps: the number of steps in an epoch, where only the end of the first
            epoch tells; else 0.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.steps = 0
        self._input: _Input | None = None
        self._restored = False
        self._numbers = _Numbers(self)

    def _begin_fit(self) -> bool:
        """Returns whether a new `fit` continues from a restored position."""
        self._input = None
        restored, self._restored = self._restored, False
        return restored

    def _follow(self, iterator: Any, resumes: bool) -> None:
        """Saves an iterator from now on; a pending state is restored first.

        Args:
            iterator: the iterator of `fit`, before its first batch is taken.
            resumes: whether `fit` continues here from a restored position.

        Raises:
            ValueError: the iterator can't be saved, or the state in the
                checkpoint is of another dataset.
        """
        last = self._input
        if last is not None and iterator is last.iterator:
            return  # It goes on in the next epoch, with `steps_per_epoch`.
        if not isinstance(iterator, tf.data.Iterator):
            raise ValueError(
                "FitPosition can't save the input of fit: a strategy "
                f"distributes it, as a {type(iterator).__name__}.{_INSTEAD}"
            )
        try:
            self._input = _Input(iterator)
        except tf.errors.OpError as error:
            raise ValueError(
                "FitPosition can't save the input of fit: "
                f"{message_of(error)}{_INSTEAD}"
            ) from error
        try:
            if last is not None:
                self._input.renew(last.start)
            self._handle_deferred_dependencies(_CHILD, self._input)
            if resumes and self.step == 0:
                self._input.renew_at_end()
        except tf.errors.OpError as error:
            raise ValueError(
                "The input of fit can't be restored: the checkpoint's is of "
                f"another dataset than this one. {message_of(error)}"
            ) from error

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        children[_NUMBERS] = self._numbers
        if self._input is not None:
            children[_CHILD] = self._input
        return children

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A restored state waits for the iterator of the next `fit`.
        return self._numbers if name == _NUMBERS else None

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise ValueError(
            "A checkpoint with a FitPosition can't be saved with "
            "experimental_enable_async_checkpoint: TensorFlow copies only the "
            "iterator of its first save."
        )


class _Numbers(Trackable, CheckpointValue):
    """The epoch, the step and the steps of a position, int64 [3]."""

    name = "the position of fit"
    # Checkpoints that were saved without a position can be restored.
    optional = True

    def __init__(self, position: FitPosition) -> None:
        self._position = position

    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        position = self._position
        numbers = [position.epoch, position.step, position.steps]
        return [TensorSlice(key, np.array(numbers, np.int64))]

    def check(self, key: str, reader: BundleReader) -> None:
        if reader.shapes[key] != [3] or reader.dtypes[key] != tf.int64:
            raise ValueError(
                f"'{key}' of '{reader.prefix}' is no position of fit: it is "
                f"{reader.dtypes[key].name} of the shape {reader.shapes[key]}."
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        position = self._position
        numbers = reader.read(key).numpy()
        position.epoch, position.step, position.steps = map(int, numbers)
        position._restored = True


class _Input(Trackable):
    """An iterator, and its state before the first batch of its epoch.

    The next epoch's iterator begins with the next seeds of the dataset's
    shuffles. Only the first state is sure to have these seeds: near the end of
    the data an iterator lets its shuffles go. Keras may take seeds in between.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.start = self._now()

    def renew(self, start: tf.Tensor) -> None:
        """Makes the iterator one of the epoch after the one of a state."""
        self._set(start)
        # A new iterator takes the next seeds.
        self.start = _Input(iter(self.iterator._dataset)).start
        self._set(self.start)

    def renew_at_end(self) -> None:
        """Makes an iterator without a next batch one of the next epoch."""
        now = self._now()
        if self.iterator.get_next_as_optional().has_value():
            self._set(now)
        else:
            self.renew(self.start)

    def _now(self) -> tf.Tensor:
        return self.iterator._serialize_to_tensors()[_STATE]

    def _set(self, state: tf.Tensor) -> None:
        self.iterator._restore_from_tensors({_STATE: state})

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"start": self.start, "now": self._now()}

    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        self.start = tensors["start"]
        self._set(self.start)
        self._set(tensors["now"])
