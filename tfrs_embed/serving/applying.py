"""The function of an exported model that applies deltas to it.

It has TensorFlow's own operations alone. All that can fail, reading and
checking, comes before the first write. A request that runs meanwhile may find
some rows of before and some of after.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.chain import HEADER, Link
from tfrs_embed.checkpoint.names import in_key, key_of
from tfrs_embed.compat.private_tensorflow import (
    Trackable,
    UninitializedVariable,
)
from tfrs_embed.serving import updates
from tfrs_embed.serving.tables import ServedTables

# A loaded model's functions take what TensorFlow makes a tensor of.
tf.register_tensor_conversion_function(
    os.PathLike,
    lambda path, dtype=None, name=None, as_ref=False: tf.constant(
        os.fspath(path), dtype, name=name
    ),
)

#: The ids of an updatable export and of the deltas it was given, [n] int64.
IDS = key_of("applied/ids")
#: The name of the function, and of its signature.
APPLY_DELTA = "apply_delta"


class DenseVariable(NamedTuple):
    """A variable of an exported model that is no table.

    Attributes:
        variable: the model's variable.
        handle: the resource that the exported functions read.
    """

    variable: Any
    handle: tf.Tensor


def part_name(layer: str, table: str, name: str) -> str:
    """The name of a table's part in a delta."""
    return "/".join(["tables", in_key(layer), in_key(table), name])


def dense_name(number: int) -> str:
    """The name of a dense variable in a delta."""
    return f"dense/{number}"


class AppliedDeltas(Trackable):
    """The deltas that an exported model was given.

    Args:
        link: the export's place in a chain.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._ids = UninitializedVariable(
            trainable=False, name="ids", shape=[None], dtype=tf.int64
        )
        self._track_trackable(self._ids, "ids")

    def function(
        self, tables: ServedTables, variables: Sequence[DenseVariable]
    ) -> Any:
        """Makes the function that applies a delta to tables and variables."""

        @tf.function(
            input_signature=[tf.TensorSpec([], tf.string, "path")],
            autograph=False,
        )
        def apply_delta(path: tf.Tensor) -> dict[str, tf.Tensor]:
            # Serialises concurrent calls: otherwise two calls could apply
            # deltas with the same number.
            mutex = tf.raw_ops.MutexV2(
                shared_name=f"{APPLY_DELTA}_{self.link.chain}"
            )
            lock = tf.raw_ops.MutexLock(mutex=mutex)
            with tf.control_dependencies([lock]):
                ids = self._ids.read_value()
            header = _read(path, {HEADER: tf.TensorSpec([5], tf.string)})
            numbers = tf.strings.to_number(header[HEADER][:4], tf.int64)
            link = Link(*tf.unstack(numbers))
            present = tf.size(ids, tf.int64) - 1

            def apply() -> tf.Tensor:
                written = _write(path, tables, variables)
                with tf.control_dependencies(written):
                    self._ids.assign(
                        tf.concat([ids, [link.id]], 0), read_value=False
                    )
                return tf.identity(link.number)

            with tf.control_dependencies(_check_link(path, link, ids)):
                number = tf.cond(link.number > present, apply, lambda: present)
            with tf.control_dependencies([number]):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
                return {"number": tf.identity(number)}

        return apply_delta


def _read(
    path: tf.Tensor, specs: dict[str, tf.TensorSpec]
) -> dict[str, tf.Tensor]:
    """Reads tensors of a delta at once; other shapes are an error."""
    values = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=list(specs),
        shape_and_slices=[""] * len(specs),
        dtypes=[spec.dtype for spec in specs.values()],
    )
    return {
        name: tf.ensure_shape(value, spec.shape)
        for (name, spec), value in zip(specs.items(), values, strict=True)
    }


def _write(
    path: tf.Tensor, tables: ServedTables, variables: Sequence[DenseVariable]
) -> list[tf.Operation]:
    """Reads and checks a delta's values, then writes them."""
    owners = {
        (layer, name): table
        for layer, its_tables in tables.by_layer.items()
        for name, table in its_tables.items()
    }
    specs = {
        part_name(*owner, part): spec
        for owner, table in owners.items()
        for part, spec in updates.parts_of(table).items()
    }
    for i, (variable, _) in enumerate(variables):
        specs[dense_name(i)] = tf.TensorSpec(variable.shape, variable.dtype)
    found = _read(path, specs)
    made = [
        updates.make(
            path,
            table,
            {n: found[part_name(*owner, n)] for n in updates.parts_of(table)},
        )
        for owner, table in owners.items()
    ]
    checks = [check for update in made for check in update.checks]
    written: list[tf.Operation] = []
    with tf.control_dependencies([*found.values(), *checks]):
        for update in made:
            written += update.write()
        for i, (_, handle) in enumerate(variables):
            value = found[dense_name(i)]
            written.append(
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            )
    return written


def _check_link(
    path: tf.Tensor, link: Link, ids: tf.Tensor
) -> list[tf.Operation]:
    """Checks that a delta is of this model, and the next or an earlier one."""
    present = tf.size(ids, tf.int64) - 1
    before = tf.minimum(link.number, present)
    of_model = updates.require(
        link.chain == ids[0],
        *(path, " is a delta of another model, or of another export of it."),
    )
    number, base, last, place = (
        tf.strings.as_string(n)
        for n in (link.number, link.number - 1, present, before)
    )
    with tf.control_dependencies([of_model]):
        in_order = updates.require(
            link.number <= present + 1,
            *(path, " is delta number ", number, ", which builds on number "),
            *(base, ". The last that was applied is number ", last, "."),
        )
    with tf.control_dependencies([in_order]):
        expected = tf.where(link.number > present, link.since, link.id)
        of_chain = updates.require(
            ids[before] == expected,
            *(path, " is delta number ", number, " of another chain: the "),
            *("number ", place, " that was applied is another one."),
        )
    return [of_model, in_order, of_chain]
