"""Writes one checkpoint, in one process or in several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleWriter, message_of
from tfrs_embed.distribution import key_value_store, long_waits
from tfrs_embed.distribution.replicas import Replicas

#: Seconds that workers wait for each other to save.
TIMEOUT_S = 600
# The end of the folder of the parts, until TensorFlow merges them.
_TEMP = "_temp"


class Session:
    """Writes a process's part of the checkpoint whose path is `checkpoint`.

    Values that only this process has go into its own checkpoint. Values of
    which all workers have a part go into the chief's. The paths of parts begin
    with `prefix`. `progress` is called with numbers of bytes written.
    """

    def __init__(
        self,
        prefix: str,
        checkpoint: str,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = prefix + _TEMP
        self._progress = progress
        self._own = BundleWriter(f"{self._folder}/part", progress)
        from tfrs_embed.compat.files import remove_folder  # A save needs it.

        # A save that was killed may have left parts.
        try:
            remove_folder(self._folder)
            _remove_parts(checkpoint + _TEMP)
        except tf.errors.OpError as error:
            self._own.fail(error)
        self._shared: _Shared | None = None

    def writer(self, replicas: Replicas | None = None) -> BundleWriter:
        """Returns the writer for a table on `replicas`; None: on this process.

        The first call for several workers waits for all of them.
        """
        if replicas is None or replicas.workers == 1:
            return self._own
        if self._shared is None:
            self._shared = self._begin(replicas)
        return self._shared.writer

    def _begin(self, replicas: Replicas) -> _Shared:
        """Exchanges the workers' folders; returns the writer to the chief's."""
        number, me = replicas.count("saves"), replicas.worker
        prefix = f"tfrs_embed/{replicas.group}/save"
        key = f"{prefix}/{number}"
        with long_waits.together(replicas, "save sharded tables"):
            folders = _exchange(replicas, f"{key}/to", self._folder)
        for worker, theirs in enumerate(folders[1:], 1):
            # All workers raise the error: none may wait for another's rows.
            if theirs == folders[0]:
                raise ValueError(
                    f"Worker {worker} saves to the path of the chief, whose "
                    f"parts go to '{theirs}': give all workers but the chief a "
                    "path of their own."
                )
        # All workers have read the texts of the previous save.
        for name in ("to", "done"):
            key_value_store.remove(f"{prefix}/{number - 1}/{name}/{me}")
        writer = BundleWriter(f"{folders[0]}/worker-{me}", self._progress)
        return _Shared(replicas, key, writer)

    def finish(self) -> list[str]:
        """Writes what is left; returns the parts of this checkpoint.

        The parts of tables on several workers belong to the chief's checkpoint.
        Workers then wait for each other, and all raise an error if one failed:
        a tf.errors.OpError, or on other workers a RuntimeError.
        """
        if self._shared is None:
            return self._own.finish()
        replicas, key, writer = self._shared
        parts: list[str] = []
        error: tf.errors.OpError | None = None
        done: list[str] | str
        try:
            parts = self._own.finish()
            done = writer.finish()
        except tf.errors.OpError as e:
            error, done = e, f"{type(e).__name__}: {message_of(e)}"
        texts = _exchange(replicas, f"{key}/done", json.dumps(done))
        if error is not None:
            raise error
        all_done = [json.loads(text) for text in texts]
        for worker, theirs in enumerate(all_done):
            if isinstance(theirs, str):
                raise RuntimeError(
                    f"Worker {worker} could not save its part: {theirs}"
                )
        if replicas.worker != 0:
            return parts
        for worker, theirs in enumerate(all_done):
            check_seen(worker, theirs)
            parts = parts + theirs
        return parts


class _Shared(NamedTuple):
    """A save of all workers into the chief's checkpoint."""

    replicas: Replicas
    key: str  # Of the texts that workers exchange.
    writer: BundleWriter  # Writes this worker's parts.


def _exchange(replicas: Replicas, key: str, text: str) -> list[str]:
    """Sends a text to all workers, and returns all workers' texts."""
    key_value_store.send(f"{key}/{replicas.worker}", text)
    try:
        return [
            key_value_store.receive(
                replicas, f"{key}/{worker}", worker, TIMEOUT_S
            )
            for worker in range(replicas.workers)
        ]
    except key_value_store.WaitTimeoutError as late:
        raise RuntimeError(
            f"Worker {late.worker} has not saved within {TIMEOUT_S} s of this "
            "one. All workers must save a sharded table at the same time."
        ) from None


def _remove_parts(folder: str) -> None:
    """Removes the parts that TensorFlow left in a folder, if there is one.

    TensorFlow, which saves after this library, would overwrite some of the
    parts only. It removes the folder if it is empty in the end.
    """
    if not tf.io.gfile.isdir(folder):
        return
    for name in tf.io.gfile.listdir(folder):
        if re.match(r"part-\d{5}-of-\d{5}\.", name):
            tf.io.gfile.remove(f"{folder}/{name}")


def check_seen(worker: int, parts: Sequence[str]) -> None:
    """Raises a RuntimeError if this process can't see a worker's parts."""
    for part in parts:
        if not tf.io.gfile.exists(f"{part}.index"):
            raise RuntimeError(
                f"Worker {worker} has saved its part as '{part}', which the "
                "chief can't see: the chief must save to a folder on a file "
                "system that all workers share."
            )
