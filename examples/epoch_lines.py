"""A line per epoch in place of Keras's progress bars."""

from __future__ import annotations

import time

import tensorflow as tf


class EpochLines(tf.keras.callbacks.Callback):
    """Prints each epoch's time and RMSEs, that of the test if there is one.

    Args:
        epochs: their number.
    """

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs = logs or {}
        line = (
            f"epoch {epoch + 1:{len(str(self.epochs))}}/{self.epochs}: "
            f"{time.perf_counter() - self.start:.1f} s, rmse {logs['rmse']:.4f}"
        )
        if "val_rmse" in logs:
            line += f", test rmse {logs['val_rmse']:.4f}"
        print(line, flush=True)
