"""Backward passes that run, and the gradients that they were asked for.

Tables are updated in the backward pass, but only where somebody asks for the
gradient of the weight that stands for them. TensorFlow's tape calls the
backward function of every operation that leads to the target, whatever
gradients were asked for, and does not pass these on. So this module notes which
gradients each `tape.gradient` asks for, and the scale of its loss.

A backward function that is traced as part of a `tf.function`'s own gradient
runs in later passes. Such a pass sets a variable, a `Switch`, which the
function reads when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import strategies, weak_gradients
from tfrs_embed._tensorflow import (
    concrete_function,
    imperative_grad,
    mirrored_run,
)
from tfrs_embed.unmirrored import UnmirroredVariable

#: A `Switch`'s value where the tables are not to be updated.
OFF = 0.0
# The attribute of a replica's thread that says what its maker's thread had.
_UPDATES = "_tfrs_embed_updates"
# The attribute that marks graphs which tell of the switches that they get.
_NOTICES = "_tfrs_embed_notices_switches"


class _Thread(threading.local):
    """The state of a thread: its passes, and whether updates are allowed."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        # The graphs in which functions are being called.
        self.calling: list[Any] = []
        # A strategy's replicas have threads of their own.
        self.updates = getattr(threading.current_thread(), _UPDATES, True)


_thread = _Thread()


class Pass:
    """A call of `tape.gradient`, or of a function like it, while it runs.

    Args:
        owner: the `tf.GradientTape`, or None.
        tape: the record of the operations.
        sources: the tensors and variables' handles whose gradients are asked
            for.

    Attributes:
        graph: the graph that it is traced in; see `graph`.
        scales: the `LossScaleOptimizer`s that scaled its loss.
    """

    def __init__(self, owner: Any, tape: Any, sources: Sequence[Any]) -> None:
        self.owner = owner
        self.tape = tape
        self.graph = graph()
        self.scales: list[Any] = []
        self._sources = {id(source): i for i, source in enumerate(sources)}
        # The values that it gave to switches.
        self._values: dict[Switch, Any] = {}
        # A TPU's program has no access to a host's variables.
        self._in_tpu = strategies.in_tpu_replica()
        self._switches: list[Switch] = []
        # Flags that functions captured and nothing reads; reset in case a loss
        # scale remains.
        self._given: list[Switch] = []

    def asks_for(self, variable: tf.Variable) -> bool:
        """Whether it was asked for a variable's gradient."""
        return id(variable.handle) in self._sources

    def adopt(self, switch: Switch, lookup: Lookup | None) -> None:
        """Sets the switch that a function reads which the pass is to call.

        Switches of other functions are left alone: other threads' passes may
        be about to call these, and a graph is not to refer to other models.

        Args:
            switch: one of the variables that the function is given.
            lookup: the lookup whose gradient the function computes; None where
                the function is called in a branch or a loop.

        Raises:
            RuntimeError: a pass of the same tape has updated the tables with
                the lookup's gradient.
        """
        if self._in_tpu:
            return
        if switch not in _in_use:
            # A function that sets a scale is given all there are.
            self._given.append(switch)
            return
        known = switch in self._switches
        if self._updates(switch) and not (known and lookup is None):
            asked = _asked_of(self.owner, self.tape).setdefault(switch, set())
            if lookup in asked:
                raise too_often(switch.layer)
            asked.add(lookup)
        if not known:
            eager = self.graph == "eager"
            with tf.init_scope() if eager else self.graph.as_default():
                self._begin_with(switch)
                for optimizer in self.scales:
                    self._scale(switch, optimizer)

    def _begin_with(self, switch: Switch) -> None:
        self._switches.append(switch)
        if self.graph != "eager":
            # The graph calls a function that reads the layer's tables. A
            # gradient that somebody gives it must not keep it, and them.
            weak_gradients.move_all(self.graph)
        if not self._updates(switch):
            self._assign(switch, OFF)

    def scale(self, optimizer: Any) -> None:
        """Notes that the gradients that follow are of a scaled loss."""
        if any(optimizer is known for known in self.scales):
            return
        self.scales.append(optimizer)
        for switch in self._switches:
            self._scale(switch, optimizer)

    def _scale(self, switch: Switch, optimizer: Any) -> None:
        if self._updates(switch):
            self._assign(switch, tf.cast(optimizer.loss_scale, tf.float32))

    def end(self, gradients: Sequence[Any] | None) -> None:
        """Resets the switches that it, or a function that it called, set.

        Args:
            gradients: the sources' gradients; None if an error was raised.
        """
        around = [p for p in here() if p is not self]
        for switch in dict.fromkeys([*self._switches, *self._given]):
            if _functions_scale or switch in self._values:
                values = [p._values for p in around if switch in p._values]
                before = values[-1][switch] if values else 1.0
                with tf.control_dependencies(self._read(switch, gradients)):
                    switch.variable().assign(before)

    def _read(
        self, switch: Switch, gradients: Sequence[Any] | None
    ) -> list[tf.Tensor]:
        """Tensors that are computed after a function has read its switch.

        TensorFlow inlines the functions that a graph calls. Control inputs of
        the call don't wait for the operations of an inlined function.
        """
        if gradients is None or switch not in self._switches:
            return []
        place = self._sources.get(id(switch.weight.handle))
        of_weight = None if place is None else gradients[place]
        return [] if of_weight is None else [tf.identity(of_weight)]

    def _updates(self, switch: Switch) -> bool:
        return _thread.updates and self.asks_for(switch.weight)

    def _assign(self, switch: Switch, value: Any) -> None:
        switch.variable().assign(value)
        self._values[switch] = value


# A lookup in a function: the ids of the tensors that the function's backward
# pass takes from its forward pass. The tape keeps the tensors.
Lookup = tuple[int, ...]

# By tape: its record, and the lookups that its passes updated tables for, by
# their layers' switches.
_asked: weakref.WeakKeyDictionary[
    tf.GradientTape,
    tuple[Any, weakref.WeakKeyDictionary[Switch, set[Lookup | None]]],
] = weakref.WeakKeyDictionary()


def _asked_of(
    owner: Any, tape: Any
) -> weakref.WeakKeyDictionary[Switch, set[Lookup | None]]:
    known, asked = _asked.get(owner, (None, None)) if owner else (None, None)
    if asked is None or known is not tape:
        asked = weakref.WeakKeyDictionary()
        if owner is not None:
            _asked[owner] = tape, asked
    return asked


class Switch:
    """A variable by which a function's backward pass knows whether to update.

    Args:
        layer: the layer's name, for errors.
        weight: the weight whose gradient asks for the update.
        number: the number of local replicas.

    Attributes:
        variables: one for each local replica, so that none waits for another:
            the scale of the loss, 1 if it has none, or `OFF`.
    """

    def __init__(self, layer: str, weight: tf.Variable, number: int) -> None:
        self.layer = layer
        self.weight = weight
        with tf.init_scope(), tf.device("CPU:0"):
            self.variables = [
                UnmirroredVariable(1.0, trainable=False, name=f"backward_{i}")
                for i in range(number)
            ]
        with _lock:
            _all.add(self)
            for variable in self.variables:
                _of_handle[id(variable.handle)] = self

    def variable(self) -> tf.Variable:
        """The variable of the current replica."""
        context = tf.distribute.get_replica_context()
        if context is None or len(self.variables) == 1:
            return self.variables[0]
        return self.variables[int(context._local_replica_id)]

    def value(self) -> tf.Tensor:
        """Its value when the current function runs."""
        if self not in _in_use:
            with _lock:
                _in_use.add(self)
        return tf.convert_to_tensor(self.variable())


_all: weakref.WeakSet[Switch] = weakref.WeakSet()
# By the ids of their variables' handles, which they keep.
_of_handle: weakref.WeakValueDictionary[int, Switch] = (
    weakref.WeakValueDictionary()
)
# The switches that a function's backward pass reads.
_in_use: weakref.WeakSet[Switch] = weakref.WeakSet()
# Other threads add to them.
_lock = threading.Lock()
# Whether a function's backward pass sets them, too.
_functions_scale = False


def _members(switches: weakref.WeakSet[Switch]) -> list[Switch]:
    with _lock:
        return list(switches)


def _adopt(switch: Switch, graph: Any, lookup: Lookup | None = None) -> None:
    """Tells this thread's passes in a graph of a switch; see `Pass.adopt`."""
    for running in list(_thread.passes):
        if running.graph is graph:
            running.adopt(switch, lookup)


def _notice_switches(graph: Any) -> None:
    """Tells passes in a graph of the switches that its operations get.

    Args:
        graph: a graph that is being traced.
    """
    # One of TensorFlow 1 gets none.
    if hasattr(graph, _NOTICES) or not hasattr(graph, "capture"):
        return
    setattr(graph, _NOTICES, True)
    of_graph = weakref.ref(graph)
    capture = type(graph).capture

    # TensorFlow asks for it before it makes the operation.
    def noticing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        graph = of_graph()
        switch = _of_handle.get(id(tensor))
        if switch is not None:
            _adopt(switch, graph)
        return capture(graph, tensor, *args, **kwargs)

    graph.capture = noticing


def set_scale(gradient: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Sets the loss scale in a function's backward pass, until a pass ends.

    Args:
        gradient: the gradient that the function's backward pass begins with.
        scale: a scalar float32.

    Returns:
        The same gradient. What it reaches comes after the scale was set.
    """
    global _functions_scale
    _functions_scale = True
    for switch in _members(_all):
        variable = switch.variable()
        # What the pass doesn't ask for stays off.
        factor = tf.where(tf.equal(variable, OFF), OFF, scale)
        assigned = variable.assign(factor, read_value=False)
        with tf.control_dependencies([assigned]):
            # Not a constant: TensorFlow's graph optimizer may pass constants to
            # functions without waiting for their control inputs.
            read = variable.read_value()
            one = tf.where(tf.equal(read, OFF), 1.0, read / scale)
        gradient *= tf.cast(one, gradient.dtype)
    return gradient


def graph() -> Any:
    """Returns the graph being traced; a constant when executing eagerly."""
    if tf.executing_eagerly():
        return "eager"
    return tf.compat.v1.get_default_graph()


def too_often(layer: str) -> RuntimeError:
    """The error of a second update from one lookup.

    Args:
        layer: the layer's name.

    Returns:
        The error.
    """
    return RuntimeError(
        f"Layer '{layer}': the gradient of one lookup is taken a second time, "
        "by a persistent tape, or by several. Its tables are updated in the "
        "backward pass, and would be twice. Ask for the layer's gradients "
        "once, of the sum of all losses; other gradients can be taken as often "
        "as wanted if the layer's variables are not among the sources. See "
        "docs/gradients.md."
    )


def _of_accumulator(layer: str) -> NotImplementedError:
    """The error of a backward pass that runs while its function is called."""
    return NotImplementedError(
        f"Layer '{layer}' is called in a tf.function of its own, around which "
        "a tf.autodiff.ForwardAccumulator is open: it would run the function's "
        "backward pass, which updates the layer's tables. Open the accumulator "
        "in the function that calls the layer, or call the layer with "
        "training=False."
    )


def here() -> list[Pass]:
    """The passes that run in the current graph, the outermost first."""
    current = graph()
    return [p for p in _thread.passes if p.graph is current]


def all_passes() -> list[Pass]:
    """The passes that this thread runs, the outermost first."""
    return list(_thread.passes)


def updates_allowed() -> bool:
    """Whether this thread is outside of `no_updates`."""
    return _thread.updates


@contextlib.contextmanager
def no_updates() -> Iterator[None]:
    """Makes tables constants.

    Layers that are called inside look their features up, and no gradient
    reaches their tables; a `tape.gradient` inside updates none either. It
    holds for this thread, for the replicas of a `strategy.run` in it, and for a
    `tf.function` that is traced inside, for good.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> with tfrs_embed.no_updates(), tf.GradientTape() as tape:
        ...     vectors = layer(tf.constant([3, 5]))
        >>> tape.gradient(vectors, layer.trainable_variables)
        [None]

    Yields:
        Nothing.
    """
    before = _thread.updates
    _thread.updates = False
    try:
        yield
    finally:
        _thread.updates = before


def install() -> None:
    """Makes TensorFlow's tapes note what they are asked for; idempotent.

    Functions that they call tell them of the switches that they are given.
    The threads of replicas are made to take part in `no_updates`, too.
    """
    gradient = imperative_grad.imperative_grad
    if getattr(gradient, "notes_passes", False):
        return

    @functools.wraps(gradient)
    def noting(
        tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The caller's tape: `tape` is its record, of a class without weak
        # references.
        owner = sys._getframe(1).f_locals.get("self")
        if not isinstance(owner, tf.GradientTape):
            owner = None
        this = Pass(owner, tape, sources)
        _thread.passes.append(this)
        if this.graph != "eager":
            _notice_switches(this.graph)
        gradients = None
        try:
            gradients = gradient(tape, target, sources, *args, **kwargs)
            return gradients
        finally:
            _thread.passes.remove(this)
            this.end(gradients)

    noting.notes_passes = True  # type: ignore[attr-defined]
    imperative_grad.imperative_grad = noting

    call_flat = concrete_function.ConcreteFunction._call_flat

    @functools.wraps(call_flat)
    def calling(function: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        here = graph()
        if here == "eager" and not _thread.passes:
            return call_flat(function, tensor_inputs, captured_inputs)
        lookup = tuple(id(tensor) for tensor in captured_inputs)
        for tensor in lookup:
            switch = _of_handle.get(tensor)
            if switch is not None:
                _adopt(switch, here, lookup)
                if here in _thread.calling:
                    raise _of_accumulator(switch.layer)
        if here == "eager":
            return call_flat(function, tensor_inputs, captured_inputs)
        _thread.calling.append(here)
        try:
            return call_flat(function, tensor_inputs, captured_inputs)
        finally:
            _thread.calling.pop()

    concrete_function.ConcreteFunction._call_flat = calling

    kind = mirrored_run._MirroredReplicaThread
    make = kind.__init__

    @functools.wraps(make)
    def making(thread: Any, *args: Any, **kwargs: Any) -> None:
        make(thread, *args, **kwargs)
        setattr(thread, _UPDATES, _thread.updates)

    kind.__init__ = making
