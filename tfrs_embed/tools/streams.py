"""Batches of a stream as a `tf.data.Dataset`, whose state is a position.

A step of the dataset is a function from a position to a batch and the position
after it. TensorFlow saves the position with the iterator. What the function
keeps in memory, streams that are open, changes no batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.structure import Structure

#: Streams that stay open: one that is read, and one whose iterator is gone.
_OPEN_STREAMS = 2

_END = object()


def stream_dataset(
    open_stream: Callable[[str], Iterator[tuple[Any, str]]],
    element_spec: Any,
    *,
    start: str = "",
) -> tf.data.Dataset:
    """Returns a dataset of a stream's batches that continues where it ended.

    A position is a text that says where in the stream the next batch begins:
    the offsets of a log, a file's name and a line, a time. It is the state of
    the dataset's iterator. Checkpoints of the iterator, and of
    `tfrs_embed.checkpoint.FitPosition`, contain it, and a program that is
    killed and started again reads on from there: each batch is trained on
    exactly once, also those that `prefetch` has read ahead. From a position the
    stream must yield all that is behind it, in batches of any size.

    One function of Python makes all batches: `prefetch` at the end lets it run
    beside training steps. A save then waits for the batch that is being read:
    leave `prefetch` out where the stream may stand still for long. A stream
    without an end needs `fit(steps_per_epoch=...)`.

    Example:
        >>> log = [3, 1, 4, 1, 5, 9, 2, 6]
        >>> def open_log(position):
        ...     for at in range(int(position or 0), len(log), 2):
        ...         yield {"movie": log[at : at + 2]}, str(at + 2)
        >>> spec = {"movie": tf.TensorSpec([None], tf.int64)}
        >>> dataset = tfrs_embed.data.stream_dataset(open_log, spec)
        >>> iterator = iter(dataset)
        >>> next(iterator)["movie"].numpy(), next(iterator)["movie"].numpy()
        (array([3, 1]), array([4, 1]))
        >>> path = tf.train.Checkpoint(iterator=iterator).save("stream")
        >>> later = iter(dataset)
        >>> _ = tf.train.Checkpoint(iterator=later).read(path)
        >>> next(later)["movie"].numpy()
        array([5, 9])

    Args:
        open_stream: a function from a position to an iterator of pairs: a
            batch, and the position after it. It is called for the first batch,
            and wherever reading doesn't go on at the end of the last batch. A
            generator is closed when it is no longer needed.
        element_spec: what a batch is: a `tf.TensorSpec`, `tf.RaggedTensorSpec`
            or `tf.SparseTensorSpec`, or a dict, list or tuple of them. Batches
            have arrays, lists or tensors in their places; for a
            `tf.RaggedTensorSpec` also lists of lists, which take longer.
        start: the position of the first batch.

    Returns:
        The dataset. Its iterators raise `tf.errors.InvalidArgumentError` for a
        batch that is not as `element_spec` says, and for a position that is no
        text; what the stream raises is in the message of an error of
        TensorFlow.

    Raises:
        TypeError: `open_stream` is no function, `start` no text, or
            `element_spec` has something else in it.
    """
    if not callable(open_stream):
        raise TypeError(
            "open_stream must be a function from a position to an iterator of "
            f"batches and positions, got {open_stream!r}."
        )
    if not isinstance(start, str):
        raise TypeError(f"start must be a text, got {start!r}.")
    reader = _Reader(open_stream, element_spec)

    def read(position: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, Any]:
        # TensorFlow saves iterators of functions without state only.
        more, position, *parts = tf.numpy_function(
            reader.read,
            [position],
            [tf.bool, tf.string, *(part.dtype for part in reader.parts)],
            stateful=False,
        )
        more, position = (
            tf.ensure_shape(more, []),
            tf.ensure_shape(position, []),
        )
        return position, (more, *parts)

    endless = tf.data.Dataset.from_tensors(0).repeat()
    batches = endless.scan(tf.constant(start), read)
    batches = batches.take_while(lambda more, *_: more)
    batches = batches.map(lambda _, *parts: reader.pack(parts))
    # TensorFlow would read ahead by itself, and a save wait for that read.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return batches.with_options(options)


class _Reader:
    """Reads the batch at a position.

    Attributes:
        parts: the specs of a batch's dense tensors.
    """

    def __init__(self, open_stream: Any, element_spec: Any) -> None:
        self._open_stream = open_stream
        self._structure, self._specs = Structure.split(
            element_spec,
            lambda spec: isinstance(
                spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
            ),
            "TensorSpec",
        )
        self.parts = tf.nest.flatten(self._specs, expand_composites=True)
        self._lock = threading.Lock()
        self._open: dict[str, Iterator[tuple[Any, str]]] = {}

    def read(self, at: bytes) -> list[Any]:
        """Returns whether there is a batch, the position after it, its parts.

        Raises:
            TypeError: the stream has yielded no pair, or no text as position.
            ValueError: the batch is not as the specs say.
        """
        position = at.decode()
        with self._lock:
            stream = self._open.pop(position, None)
        if stream is None:
            stream = iter(self._open_stream(position))
        pair = next(stream, _END)
        if pair is _END:
            empty = [np.zeros([], p.dtype.as_numpy_dtype) for p in self.parts]
            return [False, at, *map(_bytes_for_objects, empty)]
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(
                "The stream must yield pairs of a batch and the position after "
                f"it, and has at '{position}' {type(pair).__name__}."
            )
        batch, after = pair
        if not isinstance(after, str):
            raise TypeError(
                f"The position after the batch at '{position}' must be a text, "
                f"got {after!r}."
            )
        where = f"The batch at '{position}'"
        values = self._structure.flatten(batch, where)
        with tf.device("CPU:0"):
            tensors = [
                _tensor(value, spec, f"{where}['{path}']" if path else where)
                for value, spec, path in zip(
                    values, self._specs, self._structure.paths, strict=True
                )
            ]
        with self._lock:
            self._open[after] = stream
            closed = list(self._open)[:-_OPEN_STREAMS]
            streams = [self._open.pop(position) for position in closed]
        for stream in streams:
            if hasattr(stream, "close"):
                stream.close()
        parts = tf.nest.flatten(tensors, expand_composites=True)
        return [True, after.encode(), *(part.numpy() for part in parts)]

    def pack(self, parts: tuple[tf.Tensor, ...]) -> Any:
        """Returns the batch that has these dense tensors."""
        parts = tuple(
            tf.ensure_shape(part, spec.shape)
            for part, spec in zip(parts, self.parts, strict=True)
        )
        tensors = tf.nest.pack_sequence_as(
            self._specs, parts, expand_composites=True
        )
        return self._structure.pack(dict(enumerate(tensors)))


def _bytes_for_objects(array: np.ndarray) -> np.ndarray:
    """Returns an array of which TensorFlow makes a tensor of its dtype."""
    return np.array(b"") if array.dtype == object else array


def _tensor(value: Any, spec: Any, where: str) -> Any:
    """Returns a value as the tensor that its spec says."""
    try:
        if isinstance(spec, tf.TensorSpec):
            tensor = tf.convert_to_tensor(value, spec.dtype)
        elif isinstance(spec, tf.RaggedTensorSpec) and not tf.is_tensor(value):
            tensor = tf.ragged.constant(
                value,
                spec.dtype,
                spec.ragged_rank,
                row_splits_dtype=spec.row_splits_dtype,
            )
        else:
            tensor = value
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} must be {spec}: {error}") from error
    if not spec.is_compatible_with(tensor):
        raise ValueError(f"{where} must be {spec}, got {tensor}.")
    # Arrays of numpy are cast without a check.
    if (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype.is_integer
        and not np.array_equal(np.asarray(value), tensor.numpy())
    ):
        raise ValueError(
            f"{where} has values that {spec.dtype.name} can't have."
        )
    return tensor
