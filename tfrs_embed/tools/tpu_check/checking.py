"""Checks the TPU programs of a user's code, without a TPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import NoValuesError
from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check import advice, passes, tpu_library
from tfrs_embed.tools.tpu_check.bridge import bridge
from tfrs_embed.tools.tpu_check.compiling import Compiler
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.lowering import Program, lower
from tfrs_embed.tools.tpu_check.offline import offline
from tfrs_embed.tools.tpu_check.recording import (
    EndOfRecording,
    RecordedFunction,
    Recorder,
    recording,
)
from tfrs_embed.tools.tpu_check.report import (
    CheckedFunction,
    CheckedProgram,
    Report,
)
from tfrs_embed.tools.tpu_check.source_lines import locate


def check(
    program: Callable[[tf.distribute.TPUStrategy], Any],
    topology: str | Slice,
    *,
    compiler: Compiler | None = None,
) -> Report:
    """Checks that TensorFlow and libtpu accept the TPU programs of some code.

    The code runs as on a TPU VM, but functions with a TPU program are only
    traced, by TensorFlow's own `tf.distribute.TPUStrategy`, for the devices of
    the slice. The first call of such a function returns zeros; a second call
    with the same signature raises `tf.errors.OutOfRangeError`, which ends
    Keras's loops. Then TensorFlow's bridge makes TPU programs of the traced
    functions, TensorFlow's TPU kernels lower them, and libtpu compiles them.
    Tables, and other variables of 1 MiB or more, have no values and take no
    memory: code that reads such a table, for instance to save it, is stopped.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> def program(strategy):
        ...     with strategy.scope():
        ...         layer = tfrs_embed.PartialTPUEmbedding(
        ...             tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ...         )
        ...     @tf.function(autograph=False)
        ...     def lookup(ids):
        ...         return strategy.run(layer, (ids,))
        ...     lookup(tf.range(8))
        >>> report = tfrs_embed.tpu_check.check(program, "v5p:2x2x1")
        >>> print(report)
        v5p:2x2x1 (4 chips of 4 SparseCores): 1 program
        traced and lowered by TensorFlow 2.20.0: ok
        ...

    The check computes no numbers, measures no speed, and tests no transfers
    between a host and its TPUs.

    Args:
        program: the code, a function of the strategy.
        topology: a slice, "v5p:2x2x1" or "v5p-8".
        compiler: a Python with jax and libtpu; None: this one, if both are
            installed; else the programs are not compiled.

    Returns:
        The report.

    Raises:
        CheckError: TensorFlow refuses a program or crashes on it, or there is
            none. The message names the operation, and the code's lines that
            make it.
        ValueError: the slice does not exist.
        TypeError: `topology` is not a name.
        Exception: an error of the code itself.
    """
    tpu_slice = Slice.of(topology)
    tpu_library.require()
    compiler = compiler or Compiler.find()
    passes.start()  # While the code is traced.
    uses: list[advice.Use] = []
    with advice.noting(uses):
        recorder = _trace(program, tpu_slice)
    if not recorder.functions:
        raise CheckError(
            "the code called no tf.function with strategy.run in it: there is "
            "no TPU program to check."
        )
    found: list[tuple[str, list[Program]]] = []
    for recorded in recorder.functions:
        with _located(recorded):
            programs = lower(
                recorded.name,
                bridge(recorded, tpu_slice),
                tpu_slice.sparse_cores,
            )
            found.append((recorded.name, programs))
    ready = [p for _, of in found for p in of if p.stablehlo is not None]
    version, verdicts = None, {}
    if compiler is not None and ready:
        version, compiled = compiler.compile(ready, tpu_slice)
        verdicts = dict(zip(map(id, ready), compiled, strict=True))
    reason = None
    if version is None:
        reason = "no jax and libtpu in this Python, and no other was named"
        if not ready:
            reason = "only libtpu can lower the operations of embedding cores"
    return Report(
        tpu_slice,
        tuple(
            CheckedFunction(
                name,
                tuple(CheckedProgram(p, verdicts.get(id(p))) for p in of),
            )
            for name, of in found
        ),
        tf.__version__,
        version,
        reason,
        tuple(recorder.ended),
        recorder.ended_by,
        advice.warnings(recorder.functions, uses),
    )


def _trace(
    program: Callable[[tf.distribute.TPUStrategy], Any], tpu_slice: Slice
) -> Recorder:
    with offline(tpu_slice) as resolver, recording() as recorder:
        try:
            program(tf.distribute.TPUStrategy(resolver))
        except EndOfRecording:
            pass
        except NoValuesError as error:
            recorder.ended_by = str(error)
    return recorder


@contextmanager
def _located(recorded: RecordedFunction) -> Iterator[None]:
    """Adds the user's lines of an error's operations to the error."""
    try:
        yield
    except CheckError as error:
        places = locate(recorded, error.operations)
        if not places:
            raise
        text = "\n".join(f"  {place}" for place in places)
        raise CheckError(
            f"{error}\nOperations of these kinds:\n{text}"
        ) from error
