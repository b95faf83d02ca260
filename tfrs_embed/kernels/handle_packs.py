"""Many variables as one argument of a function.

In each call TensorFlow hands a function every variable that it uses as an
argument of its own. Each takes some microseconds: with a thousand tables and
their slots that is longer than their lookups and updates. So the kernels take
the handles of all variables of a shard in one tensor.

Other operations on these variables use the variable's own handle. TensorFlow
keeps operations on a variable in the order they were written in, and finds them
by the handle; so this module tells it which handles a pack has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import EagerTensor, auto_control_deps

# By the id of a variable's handle, and by that of the tensor of all of them. A
# pack keeps these tensors, so their ids are nobody else's while it is here.
_of_handle: weakref.WeakValueDictionary[int, HandlePack] = (
    weakref.WeakValueDictionary()
)
_of_tensor: weakref.WeakValueDictionary[int, HandlePack] = (
    weakref.WeakValueDictionary()
)


class HandlePack:
    """Variables' handles side by side, as long as this object is kept.

    Args:
        variables: variables of one device. They are left alone if it isn't a
            CPU, in a graph without eager execution around it, and if there is
            only one.
    """

    def __init__(self, variables: Iterable[tf.Variable]) -> None:
        handles = [v.handle for v in variables]
        if len(handles) < 2 or not all(
            isinstance(handle, EagerTensor) for handle in handles
        ):
            return
        if "CPU" not in handles[0].device:
            return  # Where there are no kernels to give it to.
        self.handles = handles
        self.places = {id(h): place for place, h in enumerate(handles)}
        with tf.init_scope(), tf.device(handles[0].device):
            self.tensor = tf.stack(handles)
        _of_tensor[id(self.tensor)] = self
        _of_handle.update(dict.fromkeys(self.places, self))


def arguments(
    variables: Iterable[tf.Variable],
) -> tuple[list[tf.Tensor], list[int]]:
    """Gives variables' handles as a kernel takes them.

    Args:
        variables: the variables.

    Returns:
        Tensors of handles, and each variable's place in all of them together.
    """
    tensors: list[tf.Tensor] = []
    starts: dict[int, int] = {}
    places = []
    size = 0
    for variable in variables:
        handle = variable.handle
        pack = _of_handle.get(id(handle))
        tensor = pack.tensor if pack else handle
        if id(tensor) not in starts:
            starts[id(tensor)] = size
            tensors.append(tensor)
            size += len(pack.handles) if pack else 1
        within = pack.places[id(handle)] if pack else 0
        places.append(starts[id(tensor)] + within)
    return tensors, places


@auto_control_deps.register_acd_resource_resolver
def _resolve(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Adds handles that are in packs to the resources that an operation uses.

    Args:
        op: the operation, which may be a call of a function.
        reads: the set of the resources that it only reads.
        writes: the set of the others.

    Returns:
        Whether there are any to add.
    """
    added = False
    for resources in (reads, writes):
        for tensor in list(resources):
            # A variable's handle is a scalar.
            if tensor.shape.rank != 1:
                continue
            for handle in _handles_in(tensor):
                if handle not in resources:
                    resources.add(handle)
                    added = True
    return added


def _handles_in(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The arguments of a tensor's function that are handles in that pack."""
    captures = getattr(tensor.graph, "captures", ())
    outermost = {id(inner): _outermost(outer) for outer, inner in captures}
    pack = _of_tensor.get(id(outermost.get(id(tensor))))
    if pack is None:
        return []
    return [
        inner
        for _, inner in captures
        if id(outermost[id(inner)]) in pack.places
    ]


def _outermost(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that an argument stands for, outside of all functions."""
    while not isinstance(tensor, EagerTensor):
        captures = getattr(tensor.graph, "captures", ())
        outer = [outer for outer, inner in captures if inner is tensor]
        if not outer:
            break
        tensor = outer[0]
    return tensor
