"""Conditions on tensors' values, checked before any table is touched.

All conditions of a call are collected, each with a function that words its
error. One branch checks them together and guards every tensor of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfrs_embed.compat import strategies
from tfrs_embed.ops.bags import bag_of_id, concat, num_rows, split

#: The two arguments of `Checks.require`.
Condition = tuple[tf.Tensor, Callable[[], tf.Tensor]]


def message(*parts: Any) -> tf.Tensor:
    """Joins strings and tensors into an error's text, a scalar string."""
    return tf.strings.join(
        [
            part
            if isinstance(part, str) or part.dtype == tf.string
            else tf.strings.format("{}", part)
            for part in parts
        ]
    )


def first(values: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
    """Returns the first value where the mask is true, or zeros."""
    return tf.reduce_sum(tf.gather_nd(values, tf.where(where)[:1]), 0)


class FeatureValues:
    """Values of several features, concatenated, of one dtype and rank.

    One operation on all of them traces faster than one for each feature.

    Attributes:
        values: all values, [sum of n, ...].
        lengths: each part's length, [features] int32.
    """

    def __init__(
        self, features: Sequence[Any], parts: Sequence[tf.Tensor]
    ) -> None:
        self.parts = parts
        self._names = [str(feature) for feature in features]
        # Concatenated outside of the branch that words the error, so that the
        # branch has one input instead of one per part.
        self.values = concat(parts)
        self.lengths = num_rows(parts)

    def feature_of_row(self) -> tf.Tensor:
        """Returns the number of each value's feature, [sum of n] int32."""
        if len(self.parts) == 1:
            return tf.zeros(tf.shape(self.parts[0])[:1], tf.int32)
        return bag_of_id(tf.concat([[0], tf.cumsum(self.lengths)], 0))

    def part(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the values of a feature by its number, [n, ...]."""
        begin = tf.cumsum(self.lengths, exclusive=True)[number]
        return self.values[begin : begin + self.lengths[number]]

    def name(self, number: tf.Tensor) -> tf.Tensor | str:
        """Returns a feature's name by its number."""
        # On TPUs features are checked one by one, and constant texts would not
        # reach the host; see `Checks.require_together`.
        one = len(self._names) == 1
        return self._names[0] if one else tf.gather(self._names, number)


class EarlyLookup(NamedTuple):
    """The first part of a lookup whose ids are not known to be valid yet.

    Attributes:
        tensors: the tensors that the rest of the lookup takes.
        sizes: scalars int64, of which the lookup needs the largest of all
            replicas'.
        facts: facts that must be equal on all replicas, for the consensus.
        finish: takes the tensors, and the largest sizes, [sizes] int64, which
            in a traced function exist only if the ids of all replicas are
            valid; returns a value for the rest of the lookup.
    """

    tensors: list[tf.Tensor]
    sizes: list[tf.Tensor]
    facts: Any
    finish: Callable[[list[tf.Tensor], tf.Tensor], Any]


class Consensus(Protocol):
    """Lets replicas decide together whether conditions hold.

    If one replica stopped alone, the others would wait for it forever. The one
    implementation is `distribution.consensus.ReplicaConsensus`.
    """

    def agree(
        self, ok: tf.Tensor, early: EarlyLookup | None = None
    ) -> tuple[tf.Tensor, Any]: ...

    def text(self, text: tf.Tensor) -> tf.Tensor: ...


class Checks:
    """Collects a call's conditions, for one or several replicas.

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
        """Adds a condition; eagerly, raises its InvalidArgumentError at once.

        Args:
            ok: bool, a scalar; in a graph, of any length.
            text: returns the error's text, as `message` does. It may be called
                although this condition holds, if another one failed.
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
        """Adds conditions on a feature, checked for several features at once.

        Args:
            conditions: takes items and returns their conditions.
            key: items with equal keys are checked at once.
            item: the feature's.
        """
        self._together.setdefault((conditions, key), []).append(item)
        # TensorFlow's TPU bridge moves checks to the host without their texts'
        # constants.
        if tf.executing_eagerly() or strategies.in_tpu_replica():
            self._join()

    def _join(self) -> None:
        """Turns the items of `require_together` into conditions."""
        for (conditions, _), items in self._together.items():
            for condition in conditions(items):
                self.require(*condition)
        self._together = {}

    def hold(self) -> tf.Tensor:
        """Returns whether all conditions hold, a scalar bool, for XLA."""
        self._join()
        return tf.reduce_all(_in_row([tf.constant(True), *self._oks()]))

    def guard(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, which then exist only if all conditions hold."""
        return self.guard_with(tensors)[0]

    def guard_with(
        self,
        tensors: Sequence[tf.Tensor],
        early: EarlyLookup | None = None,
        dtypes: Sequence[tf.DType] = (),
    ) -> tuple[list[tf.Tensor], Any]:
        """Guards tensors, and the tensors of `early` after them.

        The first tensors are cast to the dtypes once the conditions hold. Also
        returns the largest of all replicas' sizes of `early`; None without
        a consensus.
        """
        self._join()
        tensors = [*tensors, *(early.tensors if early else [])]
        dtypes = [*dtypes, *(t.dtype for t in tensors[len(dtypes) :])]
        if not self._checks and self.consensus is None:
            return [
                t if t.dtype == dtype else tf.cast(t, dtype)
                for t, dtype in zip(tensors, dtypes, strict=True)
            ], None
        # Vectors of one dtype go through the branch as one: hundreds of inputs
        # and outputs would take most of the tracing time.
        vectors: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.shape.rank == 1:
                vectors.setdefault((tensor.dtype, dtypes[i]), []).append(i)
        groups = [places for places in vectors.values() if len(places) > 2]
        joined = {i for places in groups for i in places}
        groups += [[i] for i in range(len(tensors)) if i not in joined]
        guarded, longest = self._guard(
            [concat([tensors[i] for i in places]) for places in groups], early
        )
        found: dict[int, tf.Tensor] = {}
        for places, each in zip(groups, guarded, strict=True):
            whole = tf.cast(each, dtypes[places[0]])
            parts = [whole]
            if len(places) > 1:
                parts = split(
                    whole,
                    [tensors[i] for i in places],
                    ids=whole.dtype != each.dtype,
                )
            for i, part in zip(places, parts, strict=True):
                part.set_shape(tensors[i].shape)
                found[i] = part
        return [found[i] for i in range(len(tensors))], longest

    def _guard(
        self, tensors: Sequence[tf.Tensor], early: EarlyLookup | None
    ) -> tuple[list[tf.Tensor], Any]:
        consensus, longest = self.consensus, None
        oks = self._oks() or [tf.constant(True)]
        ok = tf.reduce_all(_in_row(oks))
        if consensus is not None:
            ok, longest = consensus.agree(ok, early)

        def fail() -> list[tf.Tensor]:
            texts = [text() for _, text in self._checks]
            bad = [~tf.reduce_all(each) for each in self._oks()]
            if consensus is not None:
                # If all conditions hold here, another replica has the text.
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

        # The tensors go through the branch, not beside it: Grappler assumes
        # that later operations succeed, infers shapes from them, and would
        # fold the check to true.
        guarded = tf.cond(ok, lambda: [tf.identity(t) for t in tensors], fail)
        for after, before in zip(guarded, tensors, strict=True):
            after.set_shape(before.shape)
        return guarded, longest

    def _oks(self) -> list[tf.Tensor]:
        return [ok for ok, _ in self._checks]


def _in_row(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates scalars and vectors into one vector."""
    if all(v.shape.rank == 0 for v in values):
        return tf.stack(values)
    return tf.concat([tf.reshape(v, [-1]) for v in values], 0)
