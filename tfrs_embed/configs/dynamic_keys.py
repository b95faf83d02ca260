"""The declaration of tables whose keys come and go.

A table with `keys=DynamicKeys(...)` has rows for as many keys as its
vocabulary_size says, of any value. A training step gives rows to keys that it
sees first, if the admission rule lets them in, and takes rows away from others,
as the eviction rule says, where there are none left.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import (
    choice,
    integer,
    integer_or_none,
    named_fields,
)

#: The dtypes that keys may have.
KEY_DTYPES = (
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.string,
)
#: Candidates per row, unless `candidates` says how many there may be.
CANDIDATES_PER_ROW = 4

_WHEN_FULL = ("evict", "grow", "error", None)


@named_fields
@dataclasses.dataclass(frozen=True)
class FrequencyAdmission:
    """Gives a row to a key once it has occurred so many times.

    Occurrences are counted over the global batches of training steps, those of
    the step that admits the key among them.

    Example:
        >>> tfrs_embed.FrequencyAdmission(3)
        FrequencyAdmission(threshold=3)

    Attributes:
        threshold: the number of occurrences, at least 1.

    Raises:
        ValueError: the threshold is no integer >= 1.
    """

    threshold: int

    def __post_init__(self) -> None:
        value = integer(self.threshold, "FrequencyAdmission: threshold")
        object.__setattr__(self, "threshold", value)


@named_fields
@dataclasses.dataclass(frozen=True)
class ProbabilisticAdmission:
    """Gives a row to a key with some probability at each of its occurrences.

    Nothing is remembered of keys without rows. The draw depends on the key and
    the number of the step alone, so that it is the same on any number of
    replicas.

    Example:
        >>> tfrs_embed.ProbabilisticAdmission(0.1)
        ProbabilisticAdmission(probability=0.1)

    Attributes:
        probability: above 0, at most 1.

    Raises:
        ValueError: the probability is none.
    """

    probability: float

    def __post_init__(self) -> None:
        value: Any = self.probability
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or not 0 < value <= 1:
            raise ValueError(
                "ProbabilisticAdmission: probability must be a number above 0 "
                f"and at most 1, got {value!r}."
            )
        object.__setattr__(self, "probability", float(value))


@named_fields
@dataclasses.dataclass(frozen=True)
class TimeToLive:
    """Lets keys expire that no training step has used for so many steps.

    A key that has expired keeps its row until another key needs one: expired
    keys are the first to go, before a table grows or a step fails. With
    `when_full="evict"` others follow, the one that was used longest ago first.
    `evict()` of the table evicts all that have expired.

    Example:
        >>> tfrs_embed.TimeToLive(steps=100_000)
        TimeToLive(steps=100000)

    Attributes:
        steps: the number of steps, at least 1.

    Raises:
        ValueError: it is no integer >= 1.
    """

    steps: int

    def __post_init__(self) -> None:
        value = integer(self.steps, "TimeToLive: steps")
        object.__setattr__(self, "steps", value)


#: Rates keys for `evict`: (keys [n] int64, last_used [n] int64, frequency [n]
#: int64) -> [n] numbers; those with the least go.
Score = Callable[[Any, Any, Any], Any]


@named_fields
@dataclasses.dataclass(frozen=True)
class DynamicKeys:
    """The keys of a table that gives rows to keys as these come.

    Example:
        >>> items = tfrs_embed.TableConfig(
        ...     "items",
        ...     1_000_000,
        ...     32,
        ...     keys=tfrs_embed.DynamicKeys(
        ...         dtype=tf.string,
        ...         admission=tfrs_embed.FrequencyAdmission(3),
        ...         eviction="lfu",
        ...     ),
        ... )
        >>> items.keys.when_full
        'evict'

    Attributes:
        dtype: the keys' dtype, an integer one or `tf.string`. Strings are known
            by their 64-bit fingerprints (`tf.fingerprint`).
        admission: which keys get rows: a `FrequencyAdmission`, a
            `ProbabilisticAdmission`, or None: all, at first sight.
        eviction: which keys go first: "lru", those used longest ago; "lfu",
            those that occurred least, and of these those used longest ago; a
            `TimeToLive`; None. Of keys that are equal in that, the least goes.
            A function of (keys, last_used, frequency) rates keys where the
            table's `evict` is called, and in no step.
        when_full: what happens if a step needs more rows than there are:
            "evict", other keys lose theirs; "grow", the number of rows is
            doubled, up to max_rows, and after that keys are evicted if there is
            an eviction rule; "error", the step fails and changes nothing. None:
            "evict" if there is an eviction rule for steps, else "error".
        candidates: how many keys without rows `FrequencyAdmission` remembers at
            most; the one that was seen longest ago is forgotten first. None:
            4 for each row of vocabulary_size.
        max_rows: the most rows that "grow" makes. None: as many as needed.

    Raises:
        ValueError: a value is out of its range, or two contradict each other.
        TypeError: a value is of the wrong kind.
    """

    dtype: Any = tf.int64
    admission: FrequencyAdmission | ProbabilisticAdmission | None = None
    eviction: str | TimeToLive | Score | None = "lru"
    when_full: str | None = None
    candidates: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        dtype = as_key_dtype(self.dtype, "DynamicKeys: dtype")
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(
            self.admission,
            (FrequencyAdmission, ProbabilisticAdmission, type(None)),
        ):
            raise TypeError(
                "DynamicKeys: admission must be a FrequencyAdmission, a "
                f"ProbabilisticAdmission or None, got {self.admission!r}."
            )
        self._check_eviction()
        for field in ("candidates", "max_rows"):
            value = getattr(self, field)
            value = integer_or_none(value, f"DynamicKeys: {field}")
            object.__setattr__(self, field, value)
        if self.candidates is not None and not isinstance(
            self.admission, FrequencyAdmission
        ):
            raise ValueError(
                f"DynamicKeys: candidates={self.candidates} is for "
                f"admission=FrequencyAdmission(...), not {self.admission}."
            )
        if self.max_rows is not None and self.when_full != "grow":
            raise ValueError(
                f"DynamicKeys: max_rows={self.max_rows} is for "
                f"when_full='grow', not '{self.when_full}'."
            )

    def _check_eviction(self) -> None:
        """Checks the eviction rule, and what it means for full tables."""
        given = self.eviction
        rule = given.lower() if isinstance(given, str) else given
        is_function = callable(rule) and not isinstance(rule, type)
        is_rule = rule is None or isinstance(rule, TimeToLive)
        if isinstance(rule, str):
            is_rule = rule in ("lru", "lfu")
        if not (is_rule or is_function):
            kind = ValueError if isinstance(rule, str) else TypeError
            raise kind(
                "DynamicKeys: eviction must be 'lru', 'lfu', a TimeToLive, a "
                f"function or None, got {given!r}."
            )
        object.__setattr__(self, "eviction", rule)
        choice(self.when_full, _WHEN_FULL, "DynamicKeys: when_full")
        if self.when_full is None:
            default = "evict" if self.evicts_in_steps else "error"
            object.__setattr__(self, "when_full", default)
        if self.when_full == "evict" and not self.evicts_in_steps:
            rule = "None" if self.eviction is None else "a function"
            raise ValueError(
                "DynamicKeys: when_full='evict' needs eviction='lru', 'lfu' or "
                f"a TimeToLive, got {rule}, which evicts nothing in a step."
            )
        if self.when_full == "error" and isinstance(self.eviction, str):
            raise ValueError(
                f"DynamicKeys: eviction='{self.eviction}' would never evict "
                "anything with when_full='error'. Leave one of them out."
            )

    @property
    def evicts_in_steps(self) -> bool:
        """Whether the eviction rule is one that steps can follow."""
        return isinstance(self.eviction, (str, TimeToLive))


class KeysOfShards(DynamicKeys):
    """`DynamicKeys` of a table whose rows are declared for each shard.

    Each shard has so many rows, whatever the number of shards.
    """

    #: The argument that declares them, for errors.
    ROWS = "max_vocabulary_size_per_gpu"


def are_counted(keys: DynamicKeys) -> bool:
    """Whether a checkpoint holds how often and when each key was used.

    It doesn't for keys that stay, in a layer that has always had such keys.
    """
    return not isinstance(keys, KeysOfShards) or not (
        keys.admission is None
        and keys.eviction is None
        and keys.when_full == "error"
    )


def as_key_dtype(
    value: Any, what: str, allowed: Sequence[tf.DType] = KEY_DTYPES
) -> tf.DType:
    """Returns a dtype that keys may have; raises a ValueError for others."""
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        names = [each.name for each in allowed]
        raise ValueError(f"{what} must be one of {names}, got {value!r}.")
    return dtype
