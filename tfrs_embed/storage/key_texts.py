"""The texts of a table's string keys, beside their fingerprints.

The replica that reads a string need not hold its key. So a shard that reserves
rows for new keys says which texts are wanted, and each lookup of a training
step that has one of these strings gives it, after all shards have reserved. A
text is kept once a commit has admitted its key, and lost with the key.

With several workers, the worker that holds a key keeps its text. The lookups of
a step tell each other which texts are wanted, and then send these.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.ops.key_inputs import fingerprints
from tfrs_embed.storage.row_store import HOST
from tfrs_embed.storage.text_exchange import (
    TextExchange,
    pack,
    texts_from,
    unpack,
)
from tfrs_embed.storage.wanted_keys import END, WantedKeys, are_among

# More lookups than a step makes, on all replicas of a process.
_LOOKUPS = 64
#: The text of a key whose text isn't known.
UNKNOWN = b""


class KeyTexts:
    """The texts of a table's keys with rows, of all shards of this process.

    Keys are int64, the fingerprints of their texts. Several threads may use it.

    Args:
        name: the table's name.
        most: how many keys that were reserved and never admitted are
            remembered, of steps that failed.
        exchange: sends texts between workers; None: there is one.

    Attributes:
        exchange: see the argument.
        wanted: the keys whose texts lookups look for.
    """

    def __init__(
        self, name: str, most: int, exchange: TextExchange | None = None
    ) -> None:
        self.exchange = exchange
        self.wanted = WantedKeys(name, exchange is None)
        self._lock = threading.RLock()
        self._most = most
        self._texts: dict[int, bytes] = {}
        # Keys with rows whose texts aren't known.
        self._unknown: set[int] = set()
        # Keys with rows on other workers, which may not know their texts.
        self._elsewhere: set[int] = set()
        # Keys that a step of this number has reserved rows for, with texts.
        self._reserved: dict[int, bytes] = {}
        self._step = 0
        self._bytes = 0

    def counts(self) -> dict[str, int]:
        """Returns the numbers of this process's keys and of texts' bytes.

        They are "keys", whose texts are known, "unknown" ones, and "bytes".
        """
        return {
            "keys": len(self._texts),
            "unknown": len(self._unknown),
            "bytes": self._bytes,
        }

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Returns the texts of int64 keys that this process knows, as bytes.

        Other keys have the text `UNKNOWN`.
        """
        with self._lock:
            found = [self._texts.get(k, UNKNOWN) for k in keys.ravel().tolist()]
        texts = np.empty(len(found), object)
        texts[:] = found
        return texts.reshape(keys.shape)

    def read(self, keys: np.ndarray) -> np.ndarray:
        """Returns the texts of keys, [n], of all workers, between steps.

        All workers must call it, with the same keys.
        """
        if self.exchange is None:
            return self.of(keys)
        return self.exchange.collect(keys, self.of)

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the texts of a tensor of keys, also in a function.

        All workers must call it, outside of replicas with the same keys.
        """
        exchange, this = self.exchange, weakref.ref(self)

        def texts() -> KeyTexts:
            found = this()
            if found is None:
                raise RuntimeError("The table of these keys is gone.")
            return found

        def own(keys: np.ndarray) -> np.ndarray:
            return texts().of(keys)

        def message(asked: np.ndarray) -> np.ndarray:
            asked = np.unique(asked)
            return pack(asked, texts().of(asked))

        flat = tf.reshape(keys, [-1])
        replica = exchange.running() if exchange is not None else None
        with tf.device(HOST):
            if exchange is None:
                found = _call(own, [flat], tf.string, [None])
            elif replica is None:
                found = tf.constant(self.read(flat.numpy()), tf.string)
            else:
                found = exchange.ask(
                    replica,
                    flat,
                    tf.constant(0, tf.int64),
                    lambda asked: _call(message, [asked], shape=[None]),
                    lambda got: _call(
                        texts_from, [got, flat], tf.string, [None]
                    ),
                    lambda: tf.fill([tf.size(flat)], ""),
                )
            found = tf.reshape(found, tf.shape(keys))
            return tf.ensure_shape(found, keys.shape)

    def reserve(self, keys: np.ndarray, step: int) -> None:
        """Wants the texts of keys that a step of a number may admit."""
        with self._lock:
            if step > self._step:
                # Their steps have failed.
                self.wanted.few.difference_update(self._reserved)
                self._step, self._reserved = step, {}
            texts, unknown, reserved = (
                self._texts,
                self._unknown,
                self._reserved,
            )
            new = [
                key
                for key in keys.tolist()
                if not (key in texts or key in unknown or key in reserved)
            ]
            reserved.update(dict.fromkeys(new, UNKNOWN))
            # Other shards, and other lookups of the step, reserve as many.
            most = self._most + _LOOKUPS * len(keys)
            while len(self._reserved) > most:
                key = next(iter(self._reserved))
                self.wanted.few.discard(key)
                del self._reserved[key]
            self.wanted.few.update(new)
            self._publish()

    def admit(self, keys: np.ndarray, gone: Iterable[int] = ()) -> None:
        """Keeps the texts of keys that a step has given rows.

        Keys that are `gone` have lost their rows before.
        """
        with self._lock:
            self.wanted.few.update(self._admit(keys, gone))
            self._publish()

    def add(
        self,
        keys: np.ndarray,
        elsewhere: np.ndarray,
        gone: Iterable[int],
        every: np.ndarray,
    ) -> None:
        """Does what `admit` does, between steps, on all workers.

        The keys `elsewhere` are given rows on other workers; `every` are those
        that have rows then, on all.
        """
        with self._lock:
            self._admit(keys, gone)
            if self._elsewhere:
                # Other workers may have evicted them.
                before = np.fromiter(self._elsewhere, np.int64)
                self._elsewhere = {*before[np.isin(before, every)].tolist()}
            self._elsewhere.update(elsewhere.tolist())
            self._publish(anew=True)

    def drop(self, keys: Iterable[int]) -> None:
        """Forgets the texts of keys that have lost their rows."""
        with self._lock:
            for key in keys:
                self._bytes -= len(self._texts.pop(key, UNKNOWN))
                self._unknown.discard(key)
                self._elsewhere.discard(key)
                self.wanted.few.discard(key)

    def keep_only(self, keys: np.ndarray, elsewhere: np.ndarray) -> None:
        """Says which keys have rows, here and on other workers.

        All workers must call it. Other keys lose their texts.
        """
        now = set(keys.tolist())
        with self._lock:
            self.drop((self._texts.keys() | self._unknown) - now)
            self._unknown |= now - self._texts.keys()
            self._elsewhere = set(elsewhere.tolist())
            self._publish(anew=True)

    def learn(self, keys: np.ndarray, texts: Iterable[bytes]) -> None:
        """Takes texts that are wanted, and keeps the first of each key.

        With several workers, all must call it with the same texts.
        """
        with self._lock:
            for key, text in zip(keys.tolist(), texts, strict=True):
                if text == UNKNOWN:
                    continue
                # Its worker has the text now, or the key has no row there.
                self._elsewhere.discard(key)
                if key in self._unknown:
                    self._unknown.remove(key)
                    self._keep(key, text)
                elif self._reserved.get(key) == UNKNOWN:
                    self._reserved[key] = text
                else:
                    continue
                self.wanted.few.discard(key)
            self._publish()

    def lacking(self, keys: np.ndarray) -> np.ndarray:
        """Returns which keys, [n], lack a text for longer than a step."""
        with self._lock:
            return np.array(
                [
                    key in self._unknown or key in self._elsewhere
                    for key in keys.tolist()
                ],
                bool,
            )

    def _admit(self, keys: np.ndarray, gone: Iterable[int]) -> set[int]:
        """Returns the keys whose texts aren't known."""
        self.drop(gone)
        lacking = set()
        for key in keys.tolist():
            text = self._reserved.pop(key, UNKNOWN)
            if key in self._texts:
                continue
            if text:
                self._keep(key, text)
            else:
                lacking.add(key)
        self._unknown |= lacking
        return lacking

    def _keep(self, key: int, text: bytes) -> None:
        self._texts[key] = text
        self._bytes += len(text)

    def _publish(self, anew: bool = False) -> None:
        self.wanted.publish(self._unknown, self._elsewhere, anew)


class _Learners:
    """The texts of a layer's tables, which learn from one lookup.

    TensorFlow keeps graphs, which must not keep the tables.
    """

    def __init__(self, tables: Sequence[KeyTexts]) -> None:
        self._references = [weakref.ref(table) for table in tables]

    def _tables(self) -> list[KeyTexts]:
        tables = (reference() for reference in self._references)
        return [table for table in tables if table is not None]

    def learn(self, keys: np.ndarray, texts: Iterable[bytes]) -> np.ndarray:
        """Gives the tables keys and their texts."""
        for table in self._tables():
            table.learn(keys, texts)
        return np.int64(len(keys))

    def learn_from(self, messages: np.ndarray) -> np.ndarray:
        """Gives the tables the keys and texts of [n, m] messages."""
        keys, texts = zip(*map(unpack, messages), strict=True)
        return self.learn(np.concatenate(keys), list(itertools.chain(*texts)))

    def message(
        self, keys: np.ndarray, texts: np.ndarray, asked: np.ndarray
    ) -> np.ndarray:
        """Returns a message with the texts that were asked for, or lack."""
        keys, first = np.unique(keys, return_index=True)
        wanted = np.isin(keys, asked)
        for table in self._tables():
            wanted |= table.lacking(keys)
        return pack(keys[wanted], texts[first][wanted])


def learn_texts(
    tables: Sequence[KeyTexts], vectors: Sequence[tf.Tensor], ids: Sequence[Any]
) -> tf.Tensor:
    """Gives tables the texts of a training lookup, once it has its vectors.

    All replicas must call it together.

    Args:
        tables: the texts of a layer's tables. A string has one fingerprint in
            all of them.
        vectors: what the lookup has found.
        ids: strings, tensors of any kind; none on a replica without features.

    Returns:
        A scalar that exists when the texts are there.
    """
    exchange, learners = tables[0].exchange, _Learners(tables)

    def nothing() -> tf.Tensor:
        return tf.constant(0, tf.int64)

    def among(lists: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the keys of `ids` that are in a list, and their texts."""
        flat = [tf.reshape(getattr(i, "values", i), [-1]) for i in ids]
        strings = tf.concat([*flat, tf.constant([], tf.string)], 0)
        keys = fingerprints(strings)
        found = are_among(keys, lists)
        return [tf.boolean_mask(each, found) for each in (keys, strings)]

    with tf.device(HOST), tf.control_dependencies(vectors):
        many, few = zip(*(table.wanted.read() for table in tables), strict=True)
        sizes = [tf.size(each, tf.int64) for each in many]
        others = tf.add_n(sizes) - len(many)
        keys = tf.concat([each[:-1] for each in few], 0)
        if exchange is None:
            return tf.cond(
                tf.size(keys, tf.int64) + others > 0,
                lambda: _call(learners.learn, among([*many, *few])),
                nothing,
            )
        replica = exchange.running()
        if replica is None:
            return nothing()  # Nothing is looked up there.

        def answer(asked: tf.Tensor) -> tf.Tensor:
            ended = tf.sort(tf.concat([asked, [END]], 0))
            inputs = [*among([*many, ended]), asked]
            return _call(learners.message, inputs, shape=[None])

        return exchange.ask(
            replica,
            keys if replica == 0 else keys[:0],  # Once for each process.
            others,
            answer,
            lambda messages: _call(learners.learn_from, [messages]),
            nothing,
        )


def _call(
    function: Callable[..., np.ndarray],
    inputs: list[tf.Tensor],
    kind: tf.DType = tf.int64,
    shape: Sequence[int | None] = (),
) -> tf.Tensor:
    """Calls a function of arrays where its inputs are.

    It isn't stateful: TensorFlow would order it after the calls of other
    replicas, which may wait for this one.
    """
    made = tf.numpy_function(function, inputs, kind, stateful=False)
    return tf.ensure_shape(made, shape)
