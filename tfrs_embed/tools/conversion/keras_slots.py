"""The slots that Keras's optimizers have for a variable in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.tools.conversion.objects import VALUE, Objects, Variables

#: The slots of the optimizers of either Keras, tf_keras's new and legacy, and
#: rules' names of them. Keras 3's are lists, in the order of the variables that
#: an optimizer trains.
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
    """What optimizers have for a variable.

    Attributes:
        slots: the slots' paths, by their names here.
        counters: the paths of what may count the optimizer's steps.
        notes: sentences on what was not taken.
    """

    slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class KerasSlots:
    """Finds slots, those of all of Keras's kinds of optimizers.

    Args:
        reader: the checkpoint.
        variables: the variables' shapes and dtypes by path.
        objects: the checkpoint's objects.
    """

    def __init__(
        self, reader: BundleReader, variables: Variables, objects: Objects
    ) -> None:
        self._reader = reader
        self._variables = variables
        self._objects = objects
        #: By a variable's number, Keras 3's optimizers that train it, as their
        #: children, and its place among the variables that each trains.
        self.trained: dict[int, list[tuple[Mapping[str, int], str]]] = {}
        for children in objects.nodes:
            if children.keys() >= {_TRAINED, _ITERATIONS}:
                listed = objects.nodes[children[_TRAINED]]
                for place, variable in listed.items():
                    of_variable = self.trained.setdefault(variable, [])
                    of_variable.append((children, place))
        self._numbers = {
            path: number
            for number, path in objects.variables.items()
            if number in self.trained
        }

    def of(self, path: str) -> Trained:
        """Finds a variable's slots.

        Args:
            path: the variable's path.
        """
        number = self._numbers.get(path)
        return (
            self._by_name(path) if number is None else self.of_keras_3(number)
        )

    def of_keras_3(self, number: int) -> Trained:
        """Finds a variable's slots in Keras 3's optimizers.

        Args:
            number: the variable's number among the objects.
        """
        path = self._objects.variables[number]
        optimizers = self.trained.get(number, [])
        if len(optimizers) != 1:
            note = (
                f"'{path}' is trained by {len(optimizers)} optimizers: none's "
                "slots are taken."
            )
            return Trained(notes=(note,) if optimizers else ())
        [(children, place)] = optimizers
        slots = {}
        for name, own in KERAS_SLOTS.items():
            listed = self._objects.nodes[children.get(name, number)]
            slot = self._objects.variables.get(listed.get(place, -1), "")
            if self._variables.get(slot) == self._variables[path]:
                slots[own] = slot
        counter = self._objects.variables.get(children[_ITERATIONS], "")
        return Trained(slots, (counter,))

    def _by_name(self, path: str) -> Trained:
        found: dict[str, list[str]] = {}
        optimizers, notes = set(), []
        for optimizer, slot, other in [
            *self._legacy_slots(path),
            *self._listed_slots(path),
        ]:
            same = self._variables[other] == self._variables[path]
            if slot in KERAS_SLOTS and same:
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
        """Of tf_keras's legacy optimizers, which are beside the variable."""
        key = path + VALUE
        in_file = self._objects.renamed.get(key, key).removesuffix(VALUE)
        beside = in_file + _OPTIMIZER_SLOT
        for other in self._variables:
            if other.startswith(beside):
                optimizer, _, slot = other[len(beside) :].rpartition("/")
                yield optimizer, slot, other

    def _listed_slots(self, path: str) -> Iterator[tuple[str, str, str]]:
        """Of tf_keras's optimizers, in a list by the variables' names."""
        names = self._objects.full_names
        of_variable = "/" + names.get(path + VALUE, "")
        for other in self._variables:
            optimizer, listed, _ = other.rpartition("/_variables/")
            name = names.get(other + VALUE, "")
            if listed and len(of_variable) > 1 and name.endswith(of_variable):
                slot = name[: -len(of_variable)].split("/")[-1]
                yield optimizer, slot, other

    def step(self, counters: set[str]) -> tuple[int | None, set[str]]:
        """The number of steps that optimizers have made.

        Args:
            counters: the paths of what may count them.

        Returns:
            The number, None if there is none, or several; and the paths of
            those that count it.
        """
        found = {
            path
            for path in counters
            if self._reader.shapes.get(path + VALUE) == []
            and self._reader.dtypes[path + VALUE].is_integer
        }
        steps = {int(self._reader.read(path + VALUE)) for path in found}
        return (steps.pop(), found) if len(steps) == 1 else (None, set())
