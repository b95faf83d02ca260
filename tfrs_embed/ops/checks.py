"""Conditions on the values of tensors, checked before anything depends on them.

A condition that only the running graph can decide is collected here with a
function that words the error. All of a call's conditions are then checked by
one branch, which costs a few reductions when all is well, and every tensor of
the call is made to wait for it: when one feature is bad, no table is touched.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import strategies
from tfrs_embed.ops.bags import concat, num_rows

#: Whether something holds, and a function that words the error if it doesn't;
#: see `Checks.require`.
Condition = tuple[tf.Tensor, Callable[[], tf.Tensor]]


def message(*parts: Any) -> tf.Tensor:
    """Joins strings and tensors into the text of an error.

    Args:
        *parts: strings, and tensors; numbers are printed as `tf.print` does.

    Returns:
        A scalar string tensor.
    """
    return tf.strings.join(
        [
            part
            if isinstance(part, str) or part.dtype == tf.string
            else tf.strings.format("{}", part)
            for part in parts
        ]
    )


def first(values: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
    """Returns the first of the values that `where` marks; if none, zeros."""
    return tf.reduce_sum(tf.gather_nd(values, tf.where(where)[:1]), 0)


class Consensus(abc.ABC):
    """Lets replicas decide together whether conditions hold.

    Where one of them stopped alone, the others would wait for it forever.

    Attributes:
        begun: what was begun by `prepare`, once it is prepared; None: nothing.
    """

    begun: Any

    @abc.abstractmethod
    def holds(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether `ok`, a scalar bool, is true on all replicas."""

    @abc.abstractmethod
    def text(self, text: tf.Tensor) -> tf.Tensor:
        """The replicas' texts, scalar strings: the first not empty."""

    @abc.abstractmethod
    def prepare(
        self,
        features: Sequence[Any],
        bags: Sequence[Any],
        weighted: Sequence[bool],
    ) -> list[tf.Tensor]:
        """Begins a lookup before it is known whether its ids are valid.

        So what replicas have to agree on for it is found by the same decision.

        Args:
            features: the features of the call.
            bags: their bags, without weights and scales; ids may be out of
                range.
            weighted: which of them have weights.

        Returns:
            Tensors that `prepared` gets, guarded by all conditions.
        """

    @abc.abstractmethod
    def prepared(self, tensors: Sequence[tf.Tensor]) -> None:
        """Takes what `prepare` returned, once all conditions guard it."""


class Checks:
    """Collects a call's conditions.

    Args:
        consensus: with whom to decide whether they hold.

    Attributes:
        consensus: that.

    Raises:
        NotImplementedError: inside tf.vectorized_map.
    """

    def __init__(self, consensus: Consensus | None = None) -> None:
        if strategies.in_pfor():
            raise NotImplementedError(
                "Ids can't be looked up inside tf.vectorized_map, whose parts "
                "can't be checked one by one. Call the layer once with all "
                "ids: it takes tensors of any rank, and maps each id by itself."
            )
        self.consensus = consensus
        self._checks: list[Condition] = []
        self._together: dict[Any, list[Any]] = {}

    def require(self, ok: tf.Tensor, text: Callable[[], tf.Tensor]) -> None:
        """Adds a condition.

        Args:
            ok: a scalar bool tensor; in a graph, one of any length.
            text: called where any condition failed, this one or another;
                returns the error's text, as `message` makes it.

        Raises:
            tf.errors.InvalidArgumentError: when executing eagerly, at once.
        """
        if self.consensus is not None or not tf.executing_eagerly():
            self._checks.append((ok, text))
        elif not bool(ok):
            raise tf.errors.InvalidArgumentError(
                None, None, text().numpy().decode()
            )

    def require_together(
        self,
        conditions: Callable[[Sequence[Any]], list[Condition]],
        key: Any,
        item: Any,
    ) -> None:
        """Adds conditions on a feature that are checked for several at once.

        Args:
            conditions: takes items, and returns what they have to fulfil.
            key: items of one key can be checked at once.
            item: the feature's.

        Raises:
            tf.errors.InvalidArgumentError: when executing eagerly, at once.
        """
        self._together.setdefault((conditions, key), []).append(item)
        # TensorFlow's bridge for TPUs leaves constants of the texts behind when
        # it moves a check to the host.
        if tf.executing_eagerly() or strategies.in_tpu_replica():
            self._join()

    def _join(self) -> None:
        """Requires what several features have to fulfil."""
        for (conditions, _), items in self._together.items():
            for condition in conditions(items):
                self.require(*condition)
        self._together = {}

    def hold(self) -> tf.Tensor:
        """Returns whether all conditions hold, for code that can't raise.

        Returns:
            A scalar bool.

        Raises:
            NotImplementedError: that is to be decided with others.
        """
        if self.consensus is not None:
            strategies.refuse_in_xla("Tables of several replicas")
        self._join()
        return tf.reduce_all(_in_row([tf.constant(True), *self._oks()]))

    def guard(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, which now exist only if all conditions hold.

        Raises:
            NotImplementedError: inside XLA, which drops what raises.
        """
        strategies.refuse_in_xla("Checks that raise an error as they run")
        self._join()
        if not self._checks and self.consensus is None:
            return list(tensors)
        # Hundreds of tensors would be hundreds of inputs and outputs of a
        # branch, which are most of the time that tracing takes.
        vectors: dict[tf.DType, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.shape.rank == 1:
                vectors.setdefault(tensor.dtype, []).append(i)
        groups = [places for places in vectors.values() if len(places) > 2]
        joined = {i for places in groups for i in places}
        groups += [[i] for i in range(len(tensors)) if i not in joined]
        guarded = self._guard(
            [concat([tensors[i] for i in places]) for places in groups]
        )
        found: dict[int, tf.Tensor] = {}
        for places, whole in zip(groups, guarded, strict=True):
            parts = [whole]
            if len(places) > 1:
                lengths = num_rows([tensors[i] for i in places])
                parts = tf.split(whole, lengths, num=len(places))
            for i, part in zip(places, parts, strict=True):
                part.set_shape(tensors[i].shape)
                found[i] = part
        return [found[i] for i in range(len(tensors))]

    def _guard(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        consensus = self.consensus
        oks = self._oks() or [tf.constant(True)]
        ok = tf.reduce_all(_in_row(oks))
        if consensus is not None:
            ok = consensus.holds(ok)

        def fail() -> list[tf.Tensor]:
            texts = [text() for _, text in self._checks]
            bad = [~tf.reduce_all(each) for each in self._oks()]
            if consensus is not None:
                # Where all of this replica's hold the text is another's.
                texts.append("")
                bad.append(True)
            text = tf.gather(texts, tf.argmax(tf.cast(bad, tf.int32)))
            if consensus is not None:
                text = consensus.text(text)
            failed = tf.debugging.Assert(False, [text])
            with tf.control_dependencies([failed]):
                kinds = {(t.shape.rank, t.dtype) for t in tensors}
                empty = {
                    kind: tf.zeros([0] * kind[0], kind[1]) for kind in kinds
                }
                return [empty[t.shape.rank, t.dtype] for t in tensors]

        # The tensors go through the branch, not just beside it: Grappler
        # assumes that all operations succeed, so that it would take a shape
        # that a later one demands for known, and the check for true.
        guarded = tf.cond(ok, lambda: [tf.identity(t) for t in tensors], fail)
        for after, before in zip(guarded, tensors, strict=True):
            after.set_shape(before.shape)
        return guarded

    def _oks(self) -> list[tf.Tensor]:
        return [ok for ok, _ in self._checks]


def _in_row(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Scalars and vectors as one vector."""
    if all(v.shape.rank == 0 for v in values):
        return tf.stack(values)
    return tf.concat([tf.reshape(v, [-1]) for v in values], 0)
