"""TensorFlow's TPUEmbeddingV2, pipelined where its compiler can do it."""

from __future__ import annotations

from typing import Any

from tensorflow.python.tpu import tpu_embedding_v3

from tfrs_embed.sparsecore import pipelining


class TPUEmbeddingV2InLoops(tpu_embedding_v3.TPUEmbeddingV2):
    """Pipelines steps in loops, and makes others one after the other.

    TensorFlow marks what is to be pipelined wherever it is, and its compiler
    then refuses functions in which that is not in one loop: a training step
    outside of any, as with Keras's steps_per_execution of 1; Keras's `predict`,
    whose first step is outside of its loop; a `tf.function` that a loop calls.
    """

    #: Whether what is called next is part of a training step.
    training = True

    @property
    def _pipelining(self) -> bool:
        return self._asked and self.training and pipelining.directly_in_loop()

    @_pipelining.setter
    def _pipelining(self, asked: Any) -> None:
        self._asked = bool(asked)
        if asked:
            pipelining.retrace_in_loops()
