"""The slots that Keras's optimizers have for a variable in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

import tensorflow as tf

from tfrs_embed.checkpoint.names import SUFFIX
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

#: Slots' names in tf_keras's new and legacy optimizers and in Keras 3's, and
#: in this package's rules.
KERAS_SLOTS = {
    **dict.fromkeys(("accumulator", "_accumulators"), "accumulators"),
    **dict.fromkeys(("linear", "_linears"), "linears"),
    **dict.fromkeys(("m", "momentum", "momentums", "_momentums"), "momenta"),
    **dict.fromkeys(("v", "velocity", "rms", "_velocities"), "velocities"),
}
_OPTIMIZER_SLOT = "/.OPTIMIZER_SLOT/"
_TRAINED, _ITERATIONS = "_trainable_variables", "_iterations"


@dataclasses.dataclass(frozen=True)
class Trained:
    """The paths of what optimizers have for a variable.

    Attributes:
        slots: the slots, by their names in this package.
        counters: variables that may count the optimizer's steps.
        notes: sentences on slots that were not taken.
    """

    slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class KerasSlots:
    """Finds the slots of all kinds of Keras's optimizers.

    Attributes:
        trained: by the number of a variable, Keras 3's optimizers that train
            it: their children, and the variable's position in each.
    """

    def __init__(self, saved: SavedObjects) -> None:
        self._saved = saved
        self._counters: dict[str, set[str]] = {}
        self.trained: dict[int, list[tuple[Mapping[str, int], str]]] = {}
        for children in saved.nodes:
            if children.keys() >= {_TRAINED, _ITERATIONS}:
                listed = saved.nodes[children[_TRAINED]]
                for place, variable in listed.items():
                    of_variable = self.trained.setdefault(variable, [])
                    of_variable.append((children, place))
        self._numbers = {
            path: number
            for number, path in saved.variables.items()
            if number in self.trained
        }

    def add_table(
        self,
        found: Contents,
        layer: str,
        name: str,
        path: str,
        trained: Trained,
        dtypes: Container[str] = ("float32",),
        of_keras: bool = False,
    ) -> None:
        """Adds the table of a variable, with its slots and steps.

        Columns of `dtypes`, by name, keep them, and others become float32.
        """
        paths = {PARAMETERS: path, **trained.slots}
        dtype = self._saved.columns[path].dtype
        if dtype.name not in dtypes:
            found.notes.append(f"'{path}' is {dtype.name}, read as float32.")
            dtype = tf.float32
        columns = {
            column: self._saved.columns[each].as_dtype(dtype)
            for column, each in paths.items()
        }
        found.tables.append(Table(layer, name, columns, of_keras=of_keras))
        found.taken.update(paths.values())
        found.notes += trained.notes
        self._counters.setdefault(layer, set()).update(trained.counters)

    def add_steps(self, found: Contents) -> None:
        """Sets the steps of layers whose counters have one value."""
        columns = self._saved.columns
        for layer, counters in self._counters.items():
            paths = {
                path
                for path in counters
                if path in columns
                and columns[path].shape == ()
                and columns[path].dtype.is_integer
            }
            steps = {int(columns[path].number()) for path in paths}
            if len(steps) == 1:
                found.steps[layer] = steps.pop()
                found.taken |= paths

    def of(self, path: str) -> Trained:
        """Finds the slots of the variable of a path."""
        number = self._numbers.get(path)
        return self._by_name(path) if number is None else self.by_number(number)

    def by_number(self, number: int) -> Trained:
        """Finds the slots of a variable in Keras 3's optimizers."""
        saved = self._saved
        path = saved.variables[number]
        optimizers = self.trained.get(number, [])
        if len(optimizers) != 1:
            note = (
                f"'{path}' is trained by {len(optimizers)} optimizers: its "
                "slots are not taken."
            )
            return Trained(notes=(note,) if optimizers else ())
        [(children, place)] = optimizers
        slots = {}
        for name, own in KERAS_SLOTS.items():
            listed = saved.nodes[children.get(name, number)]
            slot = saved.variables.get(listed.get(place, -1), "")
            if self._is_alike(slot, path):
                slots[own] = slot
        counter = saved.variables.get(children[_ITERATIONS], "")
        return Trained(slots, (counter,))

    def _is_alike(self, slot: str, path: str) -> bool:
        """Whether a slot has the shape and the dtype of a variable."""
        columns = self._saved.columns
        return slot in columns and (
            (columns[slot].shape, columns[slot].dtype)
            == (columns[path].shape, columns[path].dtype)
        )

    def _by_name(self, path: str) -> Trained:
        found: dict[str, list[str]] = {}
        optimizers, notes = set(), []
        for optimizer, slot, other in [
            *self._legacy_slots(path),
            *self._listed_slots(path),
        ]:
            if slot in KERAS_SLOTS and self._is_alike(other, path):
                found.setdefault(KERAS_SLOTS[slot], []).append(other)
                optimizers.add(optimizer)
        for slot, paths in found.items():
            if len(paths) > 1:
                notes.append(
                    f"'{path}' has {slot} more than once, none of which was "
                    f"taken: {', '.join(paths)}."
                )
        return Trained(
            {s: paths[0] for s, paths in found.items() if len(paths) == 1},
            tuple(
                f"{optimizer}/{name}"
                for optimizer in sorted(optimizers)
                for name in ("iter", "_iterations")
            ),
            tuple(notes),
        )

    def _legacy_slots(self, path: str) -> Iterator[tuple[str, str, str]]:
        """Slots of tf_keras's legacy optimizers: beside the variable's key.

        Yields:
            The optimizer's path, the slot's name, the slot's path.
        """
        beside = self._saved.keys[path].removesuffix(SUFFIX) + _OPTIMIZER_SLOT
        for other in self._saved.columns:
            if other.startswith(beside):
                optimizer, _, slot = other[len(beside) :].rpartition("/")
                yield optimizer, slot, other

    def _listed_slots(self, path: str) -> Iterator[tuple[str, str, str]]:
        """Slots of tf_keras's new optimizers: a list, by variables' names.

        Yields:
            The optimizer's path, the slot's name, the slot's path.
        """
        names = self._saved.full_names
        of_variable = "/" + names.get(path, "")
        for other in self._saved.columns:
            optimizer, listed, _ = other.rpartition("/_variables/")
            name = names.get(other, "")
            if listed and len(of_variable) > 1 and name.endswith(of_variable):
                slot = name[: -len(of_variable)].split("/")[-1]
                yield optimizer, slot, other
