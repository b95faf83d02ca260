"""Declaration of tables with dynamic keys.

A table with `keys=DynamicKeys(...)` has vocabulary_size rows for keys of any
value. A training step gives rows to new keys that the admission rule lets in.
If no row is free, the eviction rule takes rows from other keys.
"""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import (
    choice,
    convert_fields,
    flag,
    integer,
    integer_or_none,
    number,
)
from tfrs_embed.configs.file_storage import FileStorage

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

#: The microseconds of each unit of time.
MICROSECONDS = {
    "days": 86_400_000_000,
    "hours": 3_600_000_000,
    "seconds": 1_000_000,
}
_SHORTEST, _LONGEST = 1_000, 100_000 * MICROSECONDS["days"]

_WHEN_FULL = ("evict", "grow", "error", None)


@dataclasses.dataclass(frozen=True)
class FrequencyAdmission:
    """Gives a row to a key after a number of occurrences.

    Occurrences in the global batches of training steps count, including the
    step that admits the key.

    Example:
        >>> tfrs_embed.FrequencyAdmission(3)
        FrequencyAdmission(threshold=3)

    Attributes:
        threshold: the number of occurrences, at least 1.

    Raises:
        ValueError: the threshold is not an integer >= 1.
    """

    threshold: int

    def __post_init__(self) -> None:
        convert_fields(self, "FrequencyAdmission", threshold=integer)


@dataclasses.dataclass(frozen=True)
class ProbabilisticAdmission:
    """Gives a row to a key with a probability at each of its occurrences.

    Keys without rows are not remembered. The draw depends only on the key and
    the step's number, so it is the same on any number of replicas.

    Example:
        >>> tfrs_embed.ProbabilisticAdmission(0.1)
        ProbabilisticAdmission(probability=0.1)

    Attributes:
        probability: above 0, at most 1.

    Raises:
        ValueError: the probability is out of its range.
        TypeError: it is no number.
    """

    probability: float

    def __post_init__(self) -> None:
        what = "ProbabilisticAdmission: probability"
        value = number(self.probability, what)
        if value > 1:
            raise ValueError(f"{what} must be at most 1, got {value}.")
        object.__setattr__(self, "probability", value)


@dataclasses.dataclass(frozen=True, repr=False)
class Span:
    """A number of steps, or a time; the base of rules that have one."""

    steps: int | None = None
    days: float | None = dataclasses.field(default=None, kw_only=True)
    hours: float | None = dataclasses.field(default=None, kw_only=True)
    seconds: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                f"{name} takes one of steps, days, hours and seconds, got "
                f"{given or 'none'}."
            )
        [(unit, value)] = given.items()
        if unit == "steps":
            convert_fields(self, name, steps=integer)
            return
        convert_fields(self, name, **{unit: number})
        if not _SHORTEST <= self.length <= _LONGEST:
            raise ValueError(
                f"{name}: {unit} must be from 0.001 seconds to 100,000 days, "
                f"got {value!r}."
            )

    def __repr__(self) -> str:
        [(unit, value)] = self._given().items()
        return f"{type(self).__name__}({unit}={value!r})"

    @property
    def by_time(self) -> bool:
        """Whether it is a time."""
        return self.steps is None

    @property
    def length(self) -> int:
        """The number of steps, or of microseconds."""
        if self.steps is not None:
            return self.steps
        [(unit, value)] = self._given().items()
        # Integers divide exactly what floats would overflow.
        return round(fractions.Fraction(value) * MICROSECONDS[unit])

    def _given(self) -> dict[str, Any]:
        units = ("steps", *MICROSECONDS)
        found = {unit: getattr(self, unit) for unit in units}
        return {k: v for k, v in found.items() if v is not None}


class TimeToLive(Span):
    """Lets keys expire that no training step used for some steps or some time.

    An expired key keeps its row until another key needs one: expired keys go
    first, before a table grows or a step fails. With `when_full="evict"` others
    follow, the longest unused first, or those that a second rule puts first:
    see `DynamicKeys`. The table's `evict()` evicts all expired keys.

    Take a time if steps come unevenly, or if the age of a key in days means
    something; steps if runs are to be repeated exactly. A table that counts in
    time reads the machine's clock once a step; checkpoints keep the times. If
    the clock jumps back, the table's time stands still until the clock has
    caught up.

    Example:
        >>> tfrs_embed.TimeToLive(steps=100_000)
        TimeToLive(steps=100000)
        >>> tfrs_embed.TimeToLive(days=30)
        TimeToLive(days=30.0)

    Attributes:
        steps: the number of steps, at least 1.
        days: the time in days.
        hours: the time in hours.
        seconds: the time in seconds, at least 0.001.

    Raises:
        ValueError: not exactly one of these is given, or it is out of range.
        TypeError: a time is no number.
    """


class DecayingFrequency(Span):
    """Evicts the least frequent keys first, where old uses count less.

    A key's frequency is halved, rounding down, at each multiple of the given
    number of steps or of the time. Keys of equal frequency go as with "lru".
    Frequencies are compared to seven digits.

    Take it in the place of "lfu", which is slow to forget formerly popular
    keys, if popularity changes: a good first half-life is the time in which
    about half of the popular keys change. Don't take it for a half-life of few
    steps, which is "lru" at more cost. Candidates of `FrequencyAdmission`, and
    the frequencies of keys that are not used, are as of their last use in
    checkpoints and reports.

    Example:
        >>> tfrs_embed.DecayingFrequency(steps=50_000)
        DecayingFrequency(steps=50000)
        >>> tfrs_embed.DecayingFrequency(days=7)
        DecayingFrequency(days=7.0)

    Attributes:
        steps: the half-life in steps, at least 1.
        days: the half-life in days.
        hours: the half-life in hours.
        seconds: the half-life in seconds, at least 0.001.

    Raises:
        ValueError: not exactly one of these is given, or it is out of range.
        TypeError: a time is no number.
    """


#: One rule of `DynamicKeys.eviction`.
EvictionRule = str | TimeToLive | DecayingFrequency


@dataclasses.dataclass(frozen=True)
class DynamicKeys:
    """The keys of a table that gives rows to new keys as they occur.

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
            `ProbabilisticAdmission`, or None: all, at their first occurrence.
        eviction: which keys go first: "lru", the longest unused; "lfu", the
            least frequent, and of these the longest unused; "score", those
            with the least scores that the program gives by the table's
            `score(keys, values)`, and of these the longest unused; a
            `DecayingFrequency`; a `TimeToLive`; None. Among equal keys the
            smallest goes. Or two rules, a `TimeToLive` and one of the others,
            such as `(TimeToLive(days=30), "lfu")`: expired keys go first, the
            longest unused first, then those that the second rule puts first.
        when_full: what a step does that needs more rows than there are: "evict"
            takes rows from other keys; "grow" doubles the rows, up to max_rows,
            and then evicts if there is an eviction rule; "error" fails and
            changes nothing. None: "evict" if there is an eviction rule, else
            "error".
        candidates: the most keys without rows that `FrequencyAdmission`
            remembers; the longest unseen is forgotten first. None: 4 for each
            row of vocabulary_size.
        max_rows: the most rows that "grow" makes. None: no limit.
        spill: a `FileStorage` for the rows, slots and counters of keys that are
            evicted: a key that comes back has what it had, instead of an
            initial row. The table's rows in memory are the most used ones; it
            takes some 64 bytes of memory for each key in the file. It needs
            kernels, and a CPU. None: what is evicted is gone.
        fallback_rows: how many rows, beside those of vocabulary_size, the keys
            without a row share, by a hash of the key. Lookups read these rows,
            and steps train them. A key that a step gives a row starts with a
            copy of its shared row. A multiple of the number of replicas. Not
            with a spill. None: keys without a row have zeros.
        keep_text: whether the text of string keys is kept in the host's memory,
            some 150 bytes for each key beside the text. `keys()`, `top_k` and
            `export_rows` then return strings. Each of several workers keeps the
            texts of its own keys.
        floor: a step that has to evict keys evicts so many that this share of
            the rows is in use afterwards, if keys that the step doesn't use are
            enough; above 0, at most 1. The steps that follow evict none, and
            cost less. None: a step evicts as few keys as it has to.

    Raises:
        ValueError: a value is out of its range, or two contradict each other.
        TypeError: a value is of the wrong kind.
    """

    dtype: Any = tf.int64
    admission: FrequencyAdmission | ProbabilisticAdmission | None = None
    eviction: EvictionRule | Sequence[EvictionRule] | None = "lru"
    when_full: str | None = None
    candidates: int | None = None
    max_rows: int | None = None
    spill: FileStorage | None = None
    fallback_rows: int | None = None
    keep_text: bool = False
    floor: float | None = None

    #: The end of errors about a full table.
    MORE_ROOM = "More rows make room."
    #: Whether a hash of a key decides its shard; if not, key % shards.
    MIXED = True

    def __post_init__(self) -> None:
        convert_fields(
            self,
            "DynamicKeys",
            dtype=as_key_dtype,
            candidates=integer_or_none,
            max_rows=integer_or_none,
            fallback_rows=integer_or_none,
        )
        if not isinstance(
            self.admission,
            (FrequencyAdmission, ProbabilisticAdmission, type(None)),
        ):
            raise TypeError(
                "DynamicKeys: admission must be a FrequencyAdmission, a "
                f"ProbabilisticAdmission or None, got {self.admission!r}."
            )
        self._check_eviction()
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
        if self.spill is not None:
            if not isinstance(self.spill, FileStorage):
                raise TypeError(
                    "DynamicKeys: spill must be a FileStorage or None, got "
                    f"{self.spill!r}."
                )
            if self.fallback_rows is not None:
                raise ValueError(
                    f"DynamicKeys: fallback_rows={self.fallback_rows} is for "
                    "keys that have lost their rows, and with a spill none "
                    "do. Leave one of them out."
                )
            self._require_evictions("a spill is for keys that are evicted")
        if self.floor is not None:
            value = number(self.floor, "DynamicKeys: floor")
            if value > 1:
                raise ValueError(
                    f"DynamicKeys: floor must be at most 1, got {value}."
                )
            object.__setattr__(self, "floor", value)
            self._require_evictions("a floor is for steps that evict")
        flag(self.keep_text, "DynamicKeys: keep_text")
        if self.keep_text and self.dtype != tf.string:
            raise ValueError(
                "DynamicKeys: keep_text=True is for dtype=tf.string, not "
                f"{self.dtype.name}: other keys are kept as they are."
            )

    def _require_evictions(self, why: str) -> None:
        """Requires that steps evict keys; `why` begins the error."""
        grows = self.when_full == "grow" and self.max_rows is None
        if self.eviction is None or self.when_full == "error" or grows:
            raise ValueError(
                f"DynamicKeys: {why}, and eviction={self.eviction!r}, "
                f"when_full='{self.when_full}', max_rows={self.max_rows} "
                "evicts none in a step."
            )

    @property
    def rules(self) -> tuple[EvictionRule, ...]:
        """The rules of `eviction` in their order."""
        if self.eviction is None:
            return ()
        if isinstance(self.eviction, tuple):
            return self.eviction
        return (self.eviction,)  # type: ignore[return-value]

    @property
    def by_time(self) -> bool:
        """Whether last uses are times; else they are steps."""
        return any(isinstance(r, Span) and r.by_time for r in self.rules)

    def _two_rules(self, rules: Sequence[Any]) -> tuple[EvictionRule, ...]:
        what = "DynamicKeys: eviction"
        checked = tuple(map(_checked_rule, rules))
        lives = [isinstance(rule, TimeToLive) for rule in checked]
        if lives != [True, False]:
            raise ValueError(
                f"{what} takes two rules if the first is a TimeToLive and the "
                f"second isn't, got {rules!r}."
            )
        spans = [rule for rule in checked if isinstance(rule, Span)]
        if len({span.by_time for span in spans}) == 2:
            raise ValueError(
                f"{what}: a table counts in steps or in time, and {rules!r} "
                "needs both."
            )
        return checked

    def _check_eviction(self) -> None:
        """Checks `eviction`, and sets `when_full`."""
        rule = self.eviction
        if isinstance(rule, (list, tuple)):
            rule = self._two_rules(rule)
        elif rule is not None:
            rule = _checked_rule(rule)
        object.__setattr__(self, "eviction", rule)
        choice(self.when_full, _WHEN_FULL, "DynamicKeys: when_full")
        if self.when_full is None:
            default = "error" if rule is None else "evict"
            object.__setattr__(self, "when_full", default)
        if self.when_full == "evict" and rule is None:
            raise ValueError(
                "DynamicKeys: when_full='evict' needs eviction='lru', 'lfu' or "
                "a TimeToLive, got None, which evicts nothing."
            )
        if self.when_full == "error" and rule is not None:
            last = self.rules[-1]
            if not isinstance(last, TimeToLive):
                raise ValueError(
                    f"DynamicKeys: eviction={last!r} would never evict "
                    "anything with when_full='error'. Leave one of them out."
                )


def _checked_rule(rule: Any) -> EvictionRule:
    """Returns one rule of `DynamicKeys.eviction`, a string in lower case."""
    what = "DynamicKeys: eviction"
    if isinstance(rule, str):
        return choice(rule.lower(), ("lru", "lfu", "score"), what)
    if isinstance(rule, (TimeToLive, DecayingFrequency)):
        return rule
    raise TypeError(
        f"{what} must be 'lru', 'lfu', 'score', a TimeToLive, a "
        f"DecayingFrequency, two of these, or None, got {rule!r}. A program "
        "with a rule of its own takes 'score' and calls the table's "
        "score(keys, values), or calls remove(keys)."
    )


class KeysOfShards(DynamicKeys):
    """`DynamicKeys` of a table whose rows are declared for each shard."""

    MORE_ROOM = "A larger max_vocabulary_size_per_gpu makes room."
    MIXED = False


def are_counted(keys: DynamicKeys) -> bool:
    """Whether a checkpoint holds each key's frequency and last use.

    Permanent keys of `All2AllDenseEmbedding` have none.
    """
    return not isinstance(keys, KeysOfShards) or not (
        keys.admission is None
        and keys.eviction is None
        and keys.when_full == "error"
    )


def as_key_dtype(
    value: Any, what: str, allowed: Sequence[tf.DType] = KEY_DTYPES
) -> tf.DType:
    """Returns a keys' dtype; raises a ValueError for others."""
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        names = [each.name for each in allowed]
        raise ValueError(f"{what} must be one of {names}, got {value!r}.")
    return dtype
