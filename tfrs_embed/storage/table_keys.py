"""The keys of a table on all shards, and where their rows are.

The row of a key depends on the order of requests and on the number of replicas.
Users and checkpoints therefore see keys, counters, rows and slots sorted by
key.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FREQUENCY,
    LAST_TIME,
    LAST_USED,
    SCORE,
    TEXT,
)
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution import key_shards
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.storage import clock, key_scores
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.key_rules import (
    ABSENT,
    KeyRules,
    LiveKeys,
    eviction_order,
)
from tfrs_embed.storage.key_texts import KeyTexts
from tfrs_embed.storage.keyed_shard import KeyedShard

#: How far after the clock's time a restored time may be: clocks of machines
#: differ.
_DAY = 86_400_000_000
_SECOND = 1_000_000


class TableKeys:
    """A table's keys, counters and rows, of this process's shards.

    A `KeyedVariable` reads and writes each part. A restore first reads and
    checks keys, counters and candidates, which `take` keeps. `restore_keys`
    then replaces all keys. Rows and slots follow.

    Args:
        table: the table.
        shards: this process's shards.
        replicas: the replicas that share the table.
        step: the engine's number of updates.

    Attributes:
        names: "parameters" and the slots' names.
        by_rank: this process's shards, with their ranks.
        owner: the table, for errors.
        rules: when keys of each shard get and lose rows.
        step: the engine's number of updates.
        counters: the names of the parts that are counters of keys with rows,
            [n]: the frequency, int64, or the score, float32; and the step or
            time of the last use, int64.
        source: the checkpoint from which new keys were last taken.
        num_taken: the number of these keys.
        texts: the texts of this process's keys; None: they aren't kept.
    """

    texts: KeyTexts | None = None

    def __init__(
        self,
        table: TableSpec,
        shards: Sequence[KeyedShard],
        replicas: Replicas,
        step: Any,
    ) -> None:
        self.names = tuple(shards[0].variables)
        self.shards = tuple(shards)
        self.by_rank = list(zip(replicas.ranks, shards, strict=True))
        layer = f" of layer '{table.owner}'" if table.owner else ""
        self.owner = f"Table '{table.name}'{layer}"
        self.replicas = replicas
        self.gather = Gathering(replicas, f"read the keys of {self.owner}")
        self.source: str | None = None
        self.num_taken = 0
        self._declared: Any = table.keys
        self.rules = shards[0].rules
        self.counters = (
            SCORE if self.rules.scored else FREQUENCY,
            LAST_TIME if self.rules.by_time else LAST_USED,
        )
        self.step = step
        # With several workers: the keys with rows that were last written, and
        # the moment afterwards.
        self._written = np.zeros([0], np.int64)
        self._written_at: list[tuple[int, ...]] = []
        # Keys that were taken and not yet restored, in the checkpoint's order,
        # with counters, candidates and texts by name, and whether counters are
        # times.
        self._taken: (
            tuple[np.ndarray, Mapping[str, np.ndarray], bool] | None
        ) = None
        # The largest restored step of last use, until `count_from_step`, and
        # whether steps were made of times.
        self._newest = 0
        self._made_of_times = False
        self._has_step = False

    def shards_of(self, keys: np.ndarray) -> np.ndarray:
        """Returns keys' shards, [n] int64, as [n] int32."""
        return key_shards.shards_of(
            keys, self.replicas.world, self._declared.MIXED
        )

    def numbers(self, name: str) -> list[int]:
        """Returns each shard's number of `KeyNumbers`; all workers call it."""
        here = [getattr(s.key_table.numbers(), name) for s in self.shards]
        return self.gather.numbers(here)

    def moment(self) -> list[tuple[int, ...]]:
        """Returns numbers that change when keys here get or lose rows.

        It waits, up to a second, until all commits are published.
        """
        end, tables = time.monotonic() + 1, [s.key_table for s in self.shards]
        while True:
            found = [table.numbers() for table in tables]
            published = not any(each.unpublished for each in found)
            if published or time.monotonic() > end:
                return [(each.size, *each.total[:2]) for each in found]
            time.sleep(0.001)

    def require_moment(self, before: list[tuple[int, ...]], what: str) -> None:
        """Requires that the keys have not changed, if there is one worker.

        One of several workers may not stop alone.

        Raises:
            RuntimeError: the keys have changed.
        """
        if self.replicas.workers == 1 and self.moment() != before:
            raise RuntimeError(
                f"{self.owner}: another thread gave rows to other keys while "
                f"{what}. Do it between steps, in the thread that trains."
            )

    def require_room(self, keys: np.ndarray) -> None:
        """Requires room for all keys, [n] int64.

        Raises:
            ValueError: a shard has no room for all of its keys.
        """
        shortage = self._shortage(keys)
        if shortage:
            raise ValueError(
                f"{self.owner} has no room for {len(keys)} keys: {shortage}. "
                f"{self._declared.MORE_ROOM} "
                "To restore a part of a checkpoint's keys, those that the "
                "table would evict last, use "
                "tfrs_embed.checkpoint.growing_tables(shrink=True)."
            )

    def _shortage(self, keys: np.ndarray) -> str:
        """Names the fullest of the keys' shards if it lacks room; else ""."""
        world, room = self.replicas.world, self.rules.room
        sizes = np.bincount(self.shards_of(keys), minlength=world)
        fullest = int(np.argmax(sizes))
        if sizes[fullest] <= room:
            return ""
        return (
            f"shard {fullest} of {world} would hold {sizes[fullest]} of "
            f"them, and has at most {room} rows"
        )

    def replace(
        self, keys: np.ndarray, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Replaces all keys, [n] int64; returns which found room, [n] bool.

        Those find room that are evicted last. `known` has counters,
        candidates and texts by name. Missing counters are zeros.
        """
        zeros = np.zeros(len(keys), np.int64)
        counters = (known.get(n, zeros) for n in (FREQUENCY, LAST_USED))
        given = LiveKeys(keys, None, *counters)
        now = max(
            clock.moment(self.rules.by_time, self.step),
            int(given.last_used.max(initial=0)),
        )
        candidates = known.get(CANDIDATES, np.zeros([0, 3], np.int64))
        shard_of = self.shards_of(keys)
        room = self.rules.room
        if np.any(np.bincount(shard_of) > room):
            order = eviction_order(self.rules, given, now)
            for rank in range(self.replicas.world):
                mine = order[shard_of[order] == rank]
                shard_of[mine[: max(0, len(mine) - room)]] = -1
        shard_of_candidate = self.shards_of(candidates[:, 0])
        for rank, shard in self.by_rank:
            shard.replace(
                given.select(shard_of == rank),
                candidates[shard_of_candidate == rank],
                now,
            )
        kept: np.ndarray = shard_of >= 0
        if self.texts is not None:
            is_here = np.isin(shard_of, self.replicas.ranks)
            self.texts.keep_only(keys[is_here], keys[kept & ~is_here])
            if TEXT in known:
                self.texts.learn(keys, known[TEXT])
        if self.replicas.workers > 1:
            self._written, self._written_at = np.sort(keys[kept]), self.moment()
        return kept

    def add(self, keys: np.ndarray) -> None:
        """Gives rows to those of unique keys, [n] int64, that have none.

        With several workers, all must call it with the same keys. A ValueError
        if there is no room for them.
        """
        live = self.gather([shard.live().keys for shard in self.shards])
        every = np.union1d(np.concatenate(live), keys)
        self.require_room(every)
        shard_of = self.shards_of(keys)
        for rank, shard in self.by_rank:
            shard.add(
                keys[shard_of == rank],
                clock.moment(self.rules.by_time, self.step),
            )
        if self.texts is not None:
            is_here = np.isin(shard_of, self.replicas.ranks)
            gone = [
                key
                for shard in self.shards
                if shard.texts is not None
                for key in shard.texts.take_gone()
            ]
            self.texts.add(keys[is_here], keys[~is_here], gone, every)

    def keys_to_write_for(self) -> np.ndarray:
        """Returns the keys to which written rows belong, ascending.

        Raises:
            RuntimeError: with several workers, keys came after the last write
                of keys.
        """
        if self.replicas.workers == 1:
            return np.sort(np.concatenate([s.live().keys for s in self.shards]))
        # Not a collective: the other workers may not be restoring.
        if self.moment() != self._written_at:
            raise RuntimeError(
                f"{self.owner} has been given keys since they were "
                "written: write the keys before their rows."
            )
        return self._written

    def write_for(self, name: str, keys: np.ndarray, values: Any) -> None:
        """Sets a part, [n, ...], of unique keys; skips keys without a row."""
        for shard, places, rows in self.located(keys):
            if name in self.counters:
                live, field = shard.live(), field_of(name)
                known = getattr(live, field)
                given = as_counter(name, values[places])
                known[np.searchsorted(live.rows, rows)] = given
                shard.set_known(**{field: known})
                continue
            mine = values
            if len(places) < len(keys):
                mine = tf.gather(values, places)
            shard.write_some(name, rows, tf.cast(mine, tf.float32))

    def score(self, keys: np.ndarray, scores: np.ndarray, marks: bool) -> None:
        """Does what `KeyedShard.score` does, on this process's shards."""
        shard_of = self.shards_of(keys)
        for rank, shard in self.by_rank:
            mine = shard_of == rank
            shard.score(keys[mine], scores[mine], marks)

    def without_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns those of keys, [n] int64, that have no row.

        With several workers, all must call it with the same keys.
        """
        shard_of, here = self.shards_of(keys), []
        for rank, shard in self.by_rank:
            mine = keys[shard_of == rank]
            here.append(mine[shard.find(mine) == ABSENT])
        return np.concatenate(self.gather(here))

    def located(
        self, keys: np.ndarray
    ) -> Iterator[tuple[KeyedShard, np.ndarray, np.ndarray]]:
        """Yields each shard, the indices of keys with rows there, the rows."""
        shard_of = self.shards_of(keys)
        for rank, shard in self.by_rank:
            places = np.flatnonzero(shard_of == rank)
            rows = shard.find(keys[places])
            found = rows != ABSENT
            yield shard, places[found], rows[found]

    def take(
        self,
        keys: np.ndarray,
        known: Mapping[str, np.ndarray],
        source: str,
        by_time: bool = False,
    ) -> None:
        """Keeps keys of a checkpoint, and what is known, for `restore_keys`.

        `known` has the frequency, the last use and candidates by name;
        `by_time` says whether moments of use are times.

        Raises:
            ValueError: a shard has no room for its own.
        """
        evicts = self.rules.evicts and LAST_USED in known
        if not evicts and not growth.may_shrink():
            self.require_room(keys)
        self._taken = keys, known, by_time
        self.source, self.num_taken = source, len(keys)

    def restore_keys(self) -> None:
        """Replaces all keys by those taken, once; resets rows and slots."""
        if self._taken is None:
            return
        keys, known, by_time = self._taken
        self._taken = None
        self._made_of_times = by_time and not self.rules.by_time
        if by_time != self.rules.by_time:
            known = _in_unit_of(self.rules, known)
        kept = self.replace(keys, known)
        chief = self.replicas.worker == 0
        if chief and not kept.all() and not growth.may_shrink():
            warnings.warn(
                f"{self.owner} leaves out {np.sum(~kept)} of {len(keys)} keys "
                f"of '{self.source}': {self._shortage(keys)}. "
                f"These are the keys that eviction={self._declared.eviction!r} "
                "evicts first. More rows make room for all keys.",
                UserWarning,
                stacklevel=2,
            )
        self._newest = _newest(known)
        if self._has_step:
            self.count_from_step()

    def count_from_step(self) -> None:
        """Shifts restored steps of last use back, to this layer's step.

        A table that is restored without its layer keeps its new layer's step,
        which may be smaller. Call it after the step was restored, if one is.
        Steps that were made of times are shifted to this layer's step.
        """
        self._has_step = True
        if self.rules.by_time:
            return
        later = int(np.asarray(self.step)) - self._newest
        if not self._made_of_times:
            later = min(0, later)
        self._newest, self._made_of_times = 0, False
        if later == 0:
            return
        for shard in self.shards:
            shard.set_known(
                last_used=shard.live().last_used + later,
                candidates=shard.integers(CANDIDATES) + np.array([0, 0, later]),
            )


def require_past(times: np.ndarray, what: str) -> None:
    """Requires times that are at most a day after the clock's time.

    Errors name the table as `what`.

    Raises:
        ValueError: a time is later.
    """
    newest, now = int(times.max(initial=0)), clock.now()
    if newest > now + _DAY:
        raise ValueError(
            f"{what}: a key was used at {newest / _SECOND:,.0f} seconds since "
            "1970, which is more than a day after this machine's clock, "
            f"{now / _SECOND:,.0f}. One of the two is wrong."
        )


def _in_unit_of(
    rules: KeyRules, known: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns counters and candidates with times for steps, or the reverse.

    A step counts as a second. The newest moment becomes the time now, or step
    0, which `count_from_step` shifts to the layer's step. No key expires by it.
    """
    newest, last = _newest(known), clock.moment(rules.by_time, 0)

    def convert(moments: np.ndarray) -> np.ndarray:
        # Without overflows, whatever the file has.
        longest = 2**40 if rules.by_time else 2**62
        ages = newest - np.maximum(moments, max(newest - longest, -(2**63)))
        ages = ages * _SECOND if rules.by_time else ages // _SECOND
        return last - np.minimum(ages, rules.ttl or ages)

    converted = dict(known)
    if LAST_USED in known:
        converted[LAST_USED] = convert(known[LAST_USED])
    if CANDIDATES in known:
        converted[CANDIDATES] = known[CANDIDATES].copy()
        converted[CANDIDATES][:, 2] = convert(known[CANDIDATES][:, 2])
    return converted


def field_of(counter: str) -> str:
    """Returns the field of `LiveKeys` that a counter's part is."""
    fields = {LAST_TIME: LAST_USED, SCORE: FREQUENCY}
    return fields.get(counter, counter)


def as_counter(part: str, values: np.ndarray) -> np.ndarray:
    """Returns a part's values as those of its field of `LiveKeys`."""
    return key_scores.as_numbers(values) if part == SCORE else values


def of_counter(part: str, values: np.ndarray) -> np.ndarray:
    """Returns a part's values, made of those of its field of `LiveKeys`."""
    return key_scores.as_scores(values) if part == SCORE else values


def _newest(known: Mapping[str, np.ndarray]) -> int:
    """Returns the newest moment of use among counters and candidates, or 0."""
    seen = known.get(LAST_USED, np.zeros([0], np.int64))
    if CANDIDATES in known:
        seen = np.append(seen, known[CANDIDATES][:, 2])
    return int(seen.max(initial=0))
