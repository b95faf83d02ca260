"""The rows of a shard's evicted keys, in a file.

The kernels move rows there and back in training steps. Here they are read and
written between steps: to these callers, a row in the file has the number
`key_rules.SPILLED` plus its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.ops.update import PARAMETERS

_MOST_BYTES = 2**62


class SpillSettings(NamedTuple):
    """What a shard's spill is.

    Attributes:
        owner: as which errors know the table.
        storage: where the file is.
        variables: the rows in memory, "parameters" and slots, by name.
        device: where they are.
    """

    owner: str
    storage: FileStorage
    variables: Mapping[str, tf.Variable]
    device: str | None

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the operation that makes the keys.

        Raises:
            RuntimeError: there are no kernels for the device.
            OSError: the folder can't be made.
        """
        if kernels.operations(self.device) is None:
            status = kernels.status()
            raise RuntimeError(
                f"{self.owner} has a spill, which needs a CPU and the compiled "
                f"kernels. {'' if status.loaded else status.reason}"
            )
        folder = os.path.realpath(self.storage.folder)
        os.makedirs(folder, exist_ok=True)
        return {
            "spill_owner": self.owner,
            "spill_folder": folder,
            "spill_parts": [
                variable.dtype.size * variable.shape[1:].num_elements()
                for variable in self.variables.values()
            ],
            "spill_bytes": self.storage.max_bytes or _MOST_BYTES,
        }


class Spill:
    """The rows of a shard's evicted keys.

    `operations` are the kernels', and `handle` is the shard's keys.
    """

    def __init__(
        self, settings: SpillSettings, operations: Any, handle: tf.Tensor
    ) -> None:
        self.variables = settings.variables
        self._device = settings.device
        self._operations = operations
        self._handle = handle

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
