"""The slots that Keras's optimizers have for a variable in a checkpoint."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator, Mapping

import tensorflow as tf

from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

#: Slots' names in tf_keras's new and legacy optimizers and in Keras 3's, and
#: in this package's rules.
KERAS_SLOTS = {
    **dict.fromkeys(("accumulator", "_accumulators"), "accumulators"),
    **dict.fromkeys(("linear", "_linears"), "linears"),
    **dict.fromkeys(("m", "momentum", "momentums", "_momentums"), "momenta"),
    **dict.fromkeys(("v", "velocity", "rms", "_velocities"), "velocities"),
}
_TRAINED, _VARIABLES = "_trainable_variables", "_variables"


class KerasSlots:
    """Finds the slots of all kinds of Keras's optimizers.

    Attributes:
        trained: the numbers of the variables that Keras 3's optimizers train.
    """

    def __init__(self, saved: SavedObjects) -> None:
        self._saved = saved
        self.trained: set[int] = set()
        # By variable: its optimizers, and slots by this package's names.
        self._optimizers: dict[int, set[int]] = collections.defaultdict(set)
        self._slots: dict[int, dict[str, list[int]]] = {}
        # By layer: variables that may count steps.
        self._counters: dict[str, list[Column]] = {}
        for optimizer, variable, name, slot in [
            *saved.slots,
            *self._listed_slots(),
            *self._slots_of_keras_3(),
        ]:
            self._optimizers[variable].add(optimizer)
            if name in KERAS_SLOTS and self._is_alike(slot, variable):
                slots = self._slots.setdefault(variable, {})
                slots.setdefault(KERAS_SLOTS[name], []).append(slot)

    def slots_of(self, variable: int) -> dict[str, int]:
        """A variable's slots, without those that several optimizers have."""
        slots = self._slots.get(variable, {})
        return {name: each[0] for name, each in slots.items() if not each[1:]}

    def add_table(
        self,
        found: Contents,
        layer: str,
        name: str,
        variable: int,
        own: Mapping[str, Column] | None = None,
        dtypes: Container[str] = ("float32",),
        of_keras: bool = False,
    ) -> None:
        """Adds the table of a variable, with its slots and steps.

        Without slots of Keras's, it has its `own`. Columns of `dtypes`, by
        name, keep them, and others become float32.
        """
        columns = self._saved.columns
        slots = {n: columns[s] for n, s in self.slots_of(variable).items()}
        parameters = columns[variable]
        dtype = parameters.dtype
        if dtype.name not in dtypes:
            found.notes.append(
                f"'{parameters.name}' is {dtype.name}, read as float32."
            )
            dtype = tf.float32
        taken = {PARAMETERS: parameters, **(slots or own or {})}
        taken = {n: column.as_dtype(dtype) for n, column in taken.items()}
        found.add(Table(layer, name, taken, of_keras=of_keras))
        if slots and own:
            found.notes.append(
                f"Table '{name}' was trained by Keras, whose slots were taken; "
                f"its own, {', '.join(own)}, are initial ones."
            )
        for slot, several in self._slots.get(variable, {}).items():
            if several[1:]:
                names = ", ".join(columns[each].name for each in several)
                found.notes.append(
                    f"'{parameters.name}' has {slot} more than once, none of "
                    f"which was taken: {names}."
                )
        counters = self._counters.setdefault(layer, [])
        for optimizer in self._optimizers[variable]:
            of_optimizer = self._saved.variables(optimizer)
            counters += [
                of_optimizer[each]
                for each in ("iter", "_iterations")
                if each in of_optimizer
            ]

    def add_steps(self, found: Contents) -> None:
        """Sets the steps of layers whose counters have one value."""
        for layer, counters in self._counters.items():
            steps = {int(counter.number()) for counter in counters}
            if len(steps) == 1:
                found.steps[layer] = steps.pop()
                found.taken |= {counter.name for counter in counters}

    def _is_alike(self, slot: int, variable: int) -> bool:
        """Whether a slot has the shape and the dtype of a variable."""
        columns = self._saved.columns
        if slot not in columns or variable not in columns:
            return False
        here, there = columns[slot], columns[variable]
        return (here.shape, here.dtype) == (there.shape, there.dtype)

    def _listed_slots(self) -> Iterator[tuple[int, int, str, int]]:
        """Slots of tf_keras's new optimizers: a list, by variables' names.

        A slot's name ends with "<slot>/<variable's name>". Yields what
        `SavedObjects.slots` has.
        """
        saved = self._saved
        by_name: dict[str, list[int]] = {}
        for variable, full_name in saved.full_names.items():
            by_name.setdefault(full_name, []).append(variable)
        for optimizer, children in enumerate(saved.nodes):
            listed = children.get(_VARIABLES)
            if listed is None or _TRAINED in children:
                continue
            for slot in saved.nodes[listed].values():
                parts = saved.full_names.get(slot, "").split("/")
                for i, name in enumerate(parts[:-1], 1):
                    for variable in by_name.get("/".join(parts[i:]), ()):
                        yield optimizer, variable, name, slot

    def _slots_of_keras_3(self) -> Iterator[tuple[int, int, str, int]]:
        """Slots of Keras 3's optimizers: a list of each kind, in one order.

        Yields what `SavedObjects.slots` has.
        """
        nodes = self._saved.nodes
        for optimizer, children in enumerate(nodes):
            if _TRAINED not in children or "_iterations" not in children:
                continue
            for place, variable in nodes[children[_TRAINED]].items():
                self.trained.add(variable)
                yield optimizer, variable, "", -1  # It may have no slots.
                for name in KERAS_SLOTS.keys() & children.keys():
                    slot = nodes[children[name]].get(place, -1)
                    yield optimizer, variable, name, slot
