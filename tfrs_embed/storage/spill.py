"""The rows of a shard's evicted keys, in a file.

The kernels move rows there and back in training steps. Here they are read and
written between steps: to these callers, a row in the file has the number
`key_rules.SPILLED` plus its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.ops.update import PARAMETERS

_MOST_BYTES = 2**62


class Spill:
    """The rows of a shard's evicted keys.

    Args:
        owner: the table, for errors.
        storage: where the file is.
        variables: the rows in memory, "parameters" and slots, by name.
        device: where they are.
    """

    def __init__(
        self,
        owner: str,
        storage: FileStorage,
        variables: Mapping[str, tf.Variable],
        device: str | None,
    ) -> None:
        self.variables = variables
        self._owner = owner
        self._storage = storage
        self._device = device
        self._operations: Any = None
        self._handle: Any = None

    def operations(self) -> Any:
        """Returns the kernels.

        Raises:
            RuntimeError: there are no kernels for the device.
        """
        operations = kernels.operations(self._device)
        if operations is None:
            status = kernels.status()
            raise RuntimeError(
                f"{self._owner} has a spill, which needs a CPU and the "
                f"compiled kernels. {'' if status.loaded else status.reason}"
            )
        return operations

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the operation that makes the keys.

        Raises:
            OSError: the folder can't be made.
        """
        folder = os.path.realpath(self._storage.folder)
        os.makedirs(folder, exist_ok=True)
        return {
            "spill_owner": self._owner,
            "spill_folder": folder,
            "spill_parts": [
                variable.dtype.size * variable.shape[1:].num_elements()
                for variable in self.variables.values()
            ],
            "spill_bytes": self._storage.max_bytes or _MOST_BYTES,
        }

    def open(self, operations: Any, handle: tf.Tensor) -> None:
        """Uses the kernels, on the handle of the keys that were made."""
        self._operations, self._handle = operations, handle

    @property
    def parameters(self) -> tf.Variable:
        """The rows in memory."""
        return self.variables[PARAMETERS]

    @property
    def dim(self) -> int:
        """The width of a row."""
        [dim] = self.parameters.shape[1:]
        return int(dim)

    def find(self, keys: Any) -> tf.Tensor:
        """Returns the keys' rows, [n] int64; `ABSENT` for those not there."""
        return self._run("find_spilled", keys)

    def read(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns rows of the parameters or a slot."""
        found: np.ndarray = self._run(
            "read_spilled", rows, **self._part(name)
        ).numpy()
        return found

    def write(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Sets rows; the values are [n, ...], or one scalar for all."""
        part = self._part(name)
        shape = [len(rows), *part["row"]]
        values = tf.broadcast_to(tf.cast(values, part.pop("T")), shape)
        self._run("write_spilled", rows, values, **part)

    def read_ahead(self, keys: tf.Tensor) -> tf.Operation:
        """Begins to read the rows of keys, [n] int64."""
        return self._run("read_ahead_spilled", keys)

    def fetch(
        self, keys: tf.Tensor, rows: tf.Tensor, parameters_only: bool
    ) -> None:
        """Gives keys' rows in memory what is here, for keys that are here."""
        memory = [v.handle for v in self.variables.values()]
        if parameters_only:
            memory = memory[:1]
        self._run("fetch_spilled", keys, rows, memory)

    def _part(self, name: str) -> dict[str, Any]:
        variable = self.variables[name]
        return {
            "part": [*self.variables].index(name),
            "row": variable.shape[1:],
            "T": variable.dtype,
        }

    def _run(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        operation = getattr(self._operations, f"tfrs_embed_key_tables_{name}")
        with tf.device(self._device):
            return operation([self._handle], *inputs, **attributes)
