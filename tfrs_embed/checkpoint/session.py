"""One checkpoint being written, by one process or by several."""

from __future__ import annotations

import json
import traceback
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tfrs_embed.checkpoint.bundle import BundleWriter
from tfrs_embed.distribution.replicas import Replicas

#: Seconds that workers wait for each other to save.
TIMEOUT_S = 600
# What parts are in until TensorFlow merges them.
_TEMP = "_temp"


class Session:
    """What a process writes of a checkpoint.

    What only this process knows goes into its own checkpoint. What all workers
    hold a part of goes into the chief's, wherever the others save to.

    Args:
        prefix: what the paths of this process's parts begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._folder = prefix + _TEMP
        # A save that was killed may have left parts of as many slices.
        if tf.io.gfile.exists(self._folder):
            tf.io.gfile.rmtree(self._folder)
        self._own = BundleWriter(f"{self._folder}/part")
        self._shared: _Shared | None = None

    def writer(self, replicas: Replicas | None = None) -> BundleWriter:
        """Returns where to write to.

        Args:
            replicas: those that hold the parts of a table; None: this process
                has all of it. Asking for those of several workers the first
                time is a rendezvous: all must.
        """
        if replicas is None or replicas.workers == 1:
            return self._own
        if self._shared is None:
            self._shared = _Shared(replicas, self._folder)
        return self._shared.writer

    def finish(self) -> list[str]:
        """Writes what is left; returns the parts of this checkpoint."""
        parts = self._own.finish()
        if self._shared is not None:
            parts = parts + self._shared.finish()
        return parts

    def fail(self) -> None:
        """Tells the other workers that this one can't go on."""
        if self._shared is not None:
            self._shared.fail()


class _Shared:
    """The parts that all workers write into the chief's checkpoint.

    Args:
        replicas: the workers' replicas.
        folder: this worker's folder of parts; the chief's is used.
    """

    def __init__(self, replicas: Replicas, folder: str) -> None:
        self._replicas = replicas
        self._me = replicas.worker
        number = replicas.count_save()
        self._key = f"tfrs_embed/{replicas.group}/save/{number}"
        self._service: Any = context.context()
        folders = self._exchange(folder)
        for worker, theirs in enumerate(folders[1:], 1):
            # All raise it, as none may wait for another's rows.
            if theirs == folders[0]:
                raise ValueError(
                    f"Worker {worker} saves to the path of the chief, whose "
                    f"parts go to '{theirs}': give all workers but the chief a "
                    "path of their own."
                )
        folder = folders[0]
        self._folder = folder
        self.writer = BundleWriter(f"{folder}/worker-{self._me}")

    def _exchange(self, folder: str) -> list[str]:
        """Returns the folders of all workers."""
        self._service.set_config_key_value(f"{self._key}/to/{self._me}", folder)
        return [
            folder if worker == self._me else self._get(f"to/{worker}", worker)
            for worker in range(self._replicas.workers)
        ]

    def finish(self) -> list[str]:
        """Ends this worker's part; the chief waits for the others'.

        Returns:
            On the chief all parts, elsewhere none.

        Raises:
            RuntimeError: a worker failed, or its files are not to be seen.
        """
        mine = self.writer.finish()
        if self._me != 0:
            self._tell(mine)
            return []
        parts = list(mine)
        for worker in range(1, self._replicas.workers):
            theirs = json.loads(self._get(str(worker), worker))
            if isinstance(theirs, str):
                raise RuntimeError(
                    f"Worker {worker} could not save its part: {theirs}"
                )
            for part in theirs:
                if not tf.io.gfile.exists(f"{part}.index"):
                    raise RuntimeError(
                        f"Worker {worker} has saved its part as '{part}', "
                        "which can't be seen here: all workers need the folder "
                        "that the chief saves to, on a file system that they "
                        "share."
                    )
            parts += theirs
        return parts

    def fail(self) -> None:
        """Tells the chief that this worker can't go on."""
        if self._me != 0:
            self._tell(traceback.format_exc(limit=1))

    def _tell(self, what: Any) -> None:
        self._service.set_config_key_value(
            f"{self._key}/{self._me}", json.dumps(what)
        )

    def _get(self, name: str, worker: int) -> str:
        key = f"{self._key}/{name}"
        try:
            return self._service.get_config_key_value(key, TIMEOUT_S * 1000)
        except TypeError:  # TF before 2.19 has no timeout here.
            return self._service.get_config_key_value(key)
        except tf.errors.DeadlineExceededError:
            raise RuntimeError(
                f"Worker {worker} has not saved within {TIMEOUT_S} s of this "
                "one. All workers must save a sharded table at the same time."
            ) from None
