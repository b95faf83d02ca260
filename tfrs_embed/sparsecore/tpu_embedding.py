"""TensorFlow's TPUEmbeddingV2, pipelined where the TPU compiler can do it."""

from __future__ import annotations

from typing import Any

from tfrs_embed.compat.private_tensorflow import tpu_embedding_v3
from tfrs_embed.sparsecore import pipelining


class TPUEmbeddingV2InLoops(tpu_embedding_v3.TPUEmbeddingV2):
    """Pipelines the steps of loops; other steps run one after another.

    TensorFlow marks every lookup and update for pipelining. The TPU compiler
    then refuses a function in which they are not in one loop: a training step
    outside of loops, as with Keras's steps_per_execution=1; Keras's `predict`,
    whose first step is outside of its loop; a `tf.function` that a loop calls.
    """

    #: Whether the next call is part of a training step.
    training = True

    @property
    def _pipelining(self) -> bool:
        return self._asked and self.training and pipelining.directly_in_loop()

    @_pipelining.setter
    def _pipelining(self, asked: Any) -> None:
        self._asked = bool(asked)
        if asked:
            pipelining.retrace_in_loops()
