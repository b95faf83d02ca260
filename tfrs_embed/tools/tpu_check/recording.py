"""Records the functions with TPU programs that a user's code calls.

The functions are traced and not run: a call returns zeros in the shapes of its
results. Other code runs as usual, on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tfrs_embed.compat.graphs import operations
from tfrs_embed.compat.private_tensorflow import concrete_function

#: The operation that TPUStrategy.run adds to each graph with a TPU program.
_MARK = "TPUReplicateMetadata"


class EndOfRecording(tf.errors.OutOfRangeError):
    """Ends a training loop; Keras takes OutOfRangeError for the data's end."""

    def __init__(self, name: str) -> None:
        super().__init__(
            None, None, f"{name} was called again; its program is recorded."
        )


@dataclasses.dataclass(frozen=True)
class RecordedFunction:
    """A ConcreteFunction with TPU programs, and its name in Python.

    Functions of one name are numbered.
    """

    name: str
    function: Any


class Recorder:
    """Records each traced function once."""

    def __init__(self) -> None:
        self.functions: list[RecordedFunction] = []
        #: Names of functions whose second call stopped the code.
        self.ended: list[str] = []
        #: The text of another error that stopped the code, or None.
        self.ended_by: str | None = None

    def add(self, function: Any) -> None:
        """Records a called ConcreteFunction; raises at its second call."""
        for known in self.functions:
            if known.function is function:
                if known.name not in self.ended:
                    self.ended.append(known.name)
                raise EndOfRecording(known.name)
        name = _name(function)
        taken = sum(_name(f.function) == name for f in self.functions)
        # Two functions may have one name; one may have been traced twice.
        if taken:
            name = f"{name}_{taken + 1}"
        self.functions.append(RecordedFunction(name, function))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Records the functions with TPU programs that are called within."""
    recorder = Recorder()
    call_flat = concrete_function.ConcreteFunction._call_flat

    def record_or_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or not _has_program(function):
            return call_flat(function, *args, **kwargs)
        recorder.add(function)
        return function.function_type.pack_output(
            [_zeros(output) for output in function.graph.outputs]
        )

    with mock.patch.object(
        concrete_function.ConcreteFunction, "_call_flat", record_or_call
    ):
        yield recorder


def _has_program(function: Any) -> bool:
    """Whether a function, or a function that it calls, has a TPU program."""
    return any(op.type == _MARK for op in operations(function.graph))


def _zeros(output: tf.Tensor) -> tf.Tensor:
    if output.dtype == tf.variant:
        return tf.raw_ops.OptionalNone()  # It ends the loops of Keras 3.
    # Code may read the first element of an unknown size.
    sizes = [] if output.shape.rank is None else output.shape.as_list()
    return tf.zeros([1 if n is None else n for n in sizes], output.dtype)


def _name(function: Any) -> str:
    """The Python name of a traced function."""
    name = function.name.decode()
    return name.removeprefix("__inference_").rpartition("_")[0]
