"""The texts of a table's string keys, beside their fingerprints.

The replica that reads a string need not hold its key. So a shard that reserves
rows for new keys says which texts are wanted, and each lookup of a training
step that has one of these strings gives it, after all shards have reserved. A
text is kept once a commit has admitted its key, and lost with the key.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.ops.key_inputs import fingerprints
from tfrs_embed.storage.row_store import HOST

# So many keys are added to the wanted ones without sorting all of these.
_FEW = 1024
# The end of wanted keys, so that each key has a place among them.
_END = np.int64(tf.int64.max)
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
    """

    def __init__(self, name: str, most: int) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._texts: dict[int, bytes] = {}
        # Keys with rows whose texts aren't known.
        self._unknown: set[int] = set()
        # Keys that a step of this number has reserved rows for, with texts.
        self._reserved: dict[int, bytes] = {}
        self._step = 0
        self._bytes = 0
        # What lookups look for, ascending: keys of many texts that aren't
        # known, which are rarely sorted anew; and those added since.
        self._many = np.zeros([0], np.int64)
        self._few: set[int] = set()
        with tf.device(HOST):
            self._wanted = [
                make_variable(
                    tf.constant([_END]), f"{name}/{kind}", shape=[None]
                )
                for kind in ("wanted_texts", "new_texts")
            ]

    def __len__(self) -> int:
        """The number of keys whose texts are known."""
        return len(self._texts)

    @property
    def unknown(self) -> int:
        """The number of keys with rows whose texts aren't known."""
        return len(self._unknown)

    @property
    def nbytes(self) -> int:
        """The bytes of the known texts."""
        return self._bytes

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Returns texts of int64 keys, `UNKNOWN` for unknown ones, as bytes."""
        with self._lock:
            found = [self._texts.get(k, UNKNOWN) for k in keys.ravel().tolist()]
        texts = np.empty(len(found), object)
        texts[:] = found
        return texts.reshape(keys.shape)

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the texts of a tensor of keys, also in a function."""
        this = weakref.ref(self)

        def call(keys: np.ndarray) -> np.ndarray:
            texts = this()
            if texts is None:
                raise RuntimeError("The table of these keys is gone.")
            return texts.of(keys)

        with tf.device(HOST):
            made = tf.numpy_function(call, [keys], tf.string, stateful=False)
            return tf.ensure_shape(made, keys.shape)

    def reserve(self, keys: np.ndarray, step: int) -> None:
        """Wants the texts of keys that a step of a number may admit."""
        with self._lock:
            if step > self._step:
                # Their steps have failed.
                self._few.difference_update(self._reserved)
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
                self._few.discard(key)
                del self._reserved[key]
            self._want(new)

    def admit(self, keys: np.ndarray, gone: Iterable[int] = ()) -> None:
        """Keeps the texts of keys that have rows now, not of those `gone`."""
        with self._lock:
            self._drop(gone)
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
            self._want(lacking)

    def drop(self, keys: Iterable[int]) -> None:
        """Forgets the texts of keys that have lost their rows."""
        with self._lock:
            self._drop(keys)

    def keep_only(self, keys: np.ndarray) -> None:
        """Says which keys have rows; others lose their texts."""
        now = set(keys.tolist())
        with self._lock:
            self._drop((self._texts.keys() | self._unknown) - now)
            lacking = now - self._texts.keys() - self._unknown
            self._unknown |= lacking
            self._want(lacking)

    def learn(self, keys: np.ndarray, texts: Iterable[bytes]) -> None:
        """Takes texts that are wanted, and keeps the first of each key."""
        with self._lock:
            for key, text in zip(keys.tolist(), texts, strict=True):
                if text == UNKNOWN:
                    continue
                if key in self._unknown:
                    self._unknown.remove(key)
                    self._keep(key, text)
                elif self._reserved.get(key) == UNKNOWN:
                    self._reserved[key] = text
                else:
                    continue
                self._few.discard(key)
            self._want(())

    def learn_after(self, vectors: Sequence[tf.Tensor], ids: Any) -> tf.Tensor:
        """Takes wanted texts from a training lookup, once it has its vectors.

        `ids` are its strings, a tensor of any kind. Returns a scalar that
        exists when that is done.
        """
        strings = tf.reshape(getattr(ids, "values", ids), [-1])
        with tf.device(HOST), tf.control_dependencies(vectors):
            wanted = [
                tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.int64)
                for v in self._wanted
            ]
            number = tf.add_n([tf.size(each) for each in wanted])
            this = weakref.ref(self)

            def call(keys: np.ndarray, texts: np.ndarray) -> np.ndarray:
                # TensorFlow keeps graphs.
                texts_of_table = this()
                if texts_of_table is not None:
                    texts_of_table.learn(keys, texts)
                return np.int64(len(keys))

            def learn() -> tf.Tensor:
                keys = fingerprints(strings)
                asked = tf.zeros_like(keys, tf.bool)
                for each in wanted:
                    found = tf.gather(each, tf.searchsorted(each, keys))
                    asked |= tf.equal(found, keys)
                some = [tf.boolean_mask(v, asked) for v in (keys, strings)]
                # Not stateful: TensorFlow would order it after the calls of
                # other replicas, which may wait for this one.
                made = tf.numpy_function(call, some, tf.int64, stateful=False)
                return tf.ensure_shape(made, [])

            none = tf.constant(len(wanted))
            return tf.cond(
                number > none, learn, lambda: tf.constant(0, tf.int64)
            )

    def _keep(self, key: int, text: bytes) -> None:
        self._texts[key] = text
        self._bytes += len(text)

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._bytes -= len(self._texts.pop(key, UNKNOWN))
            self._unknown.discard(key)
            self._few.discard(key)

    def _want(self, keys: Iterable[int]) -> None:
        """Adds keys to those that lookups look for."""
        self._few.update(keys)
        lately = len(self._few & self._unknown)
        others = len(self._many) - len(self._unknown) + lately
        if lately > _FEW or others > max(_FEW, len(self._many) // 4):
            self._many = np.sort(np.fromiter(self._unknown, np.int64))
            self._few = {k for k in self._few if k not in self._unknown}
            self._assign(0, self._many)
        self._assign(1, np.sort(np.fromiter(self._few, np.int64)))

    def _assign(self, number: int, keys: np.ndarray) -> None:
        # By eager operations, also while a graph runs: TensorFlow would order
        # a graph's reads and writes across replicas.
        with tf.init_scope(), tf.device(HOST):
            tf.raw_ops.AssignVariableOp(
                resource=self._wanted[number].handle,
                value=tf.constant(np.append(keys, _END)),
            )
