"""Tables in the host's memory, for a model whose dense part is on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import refuse_in_xla
from tfrs_embed.engines.engine import LookupCall
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.storage.row_store import HOST


class HostEngine(OneDeviceEngine):
    """Holds tables on a CPU, and looks up and updates them there.

    Combined vectors and their gradients are all that a GPU sends and gets.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(dataclasses.replace(options, device=HOST))

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        refuse_in_xla("Tables in the host's memory")
        with tf.device(HOST):
            return super().lookup(call)

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        with tf.device(HOST):
            super().apply_gradients(residuals, gradients)
