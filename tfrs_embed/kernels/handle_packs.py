"""Many variables as one argument of a function.

TensorFlow passes each variable to a function as an argument of its own, in some
microseconds: for a thousand tables and slots longer than their lookups and
updates. So kernels take the handles of all variables of a shard in one tensor.

TensorFlow orders operations on a variable by its handle; `_resolve` tells it
which handles a pack has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import EagerTensor, auto_control_deps

# Packs by the id of a variable's handle, and of the packed tensor. A pack keeps
# these tensors, so their ids are not reused while it exists.
_of_handle: weakref.WeakValueDictionary[int, HandlePack] = (
    weakref.WeakValueDictionary()
)
_of_tensor: weakref.WeakValueDictionary[int, HandlePack] = (
    weakref.WeakValueDictionary()
)


class HandlePack:
    """The handles of variables in one tensor, as long as this object is kept.

    It packs nothing if the device isn't a CPU, without eager execution around
    the graph, or for a single variable.
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
    """Returns tensors of handles, and each variable's position in them."""
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
    """Adds packed handles to the resources that an operation reads or writes.

    The operation may be a call of a function. Returns whether any were added.
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
    """Returns a function's arguments that are handles in a tensor's pack."""
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
    """Returns the tensor for which an argument stands outside functions."""
    while not isinstance(tensor, EagerTensor):
        captures = getattr(tensor.graph, "captures", ())
        outer = [outer for outer, inner in captures if inner is tensor]
        if not outer:
            break
        tensor = outer[0]
    return tensor
