"""Sends the texts of keys between workers.

TensorFlow's collectives send no strings. A message is a vector of int64: the
number of its keys, the keys, the lengths of their texts in bytes, and the bytes
of all texts, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.wanted_keys import END


class TextExchange:
    """Sends the texts of one layer's keys between workers.

    Args:
        replicas: the replicas of all workers.
        name: the table's name.
    """

    def __init__(self, replicas: Replicas, name: str) -> None:
        self._replicas = replicas
        self._where = f"Table '{name}': the texts of its keys"
        self._channel = replicas.allocate(4)
        self._gather = Gathering(
            replicas, f"read the texts of keys of table '{name}'"
        )

    def running(self) -> int | None:
        """Returns the local replica that is running; None: outside of any."""
        return self._replicas.current(self._where)

    def ask(
        self,
        replica: int,
        keys: tf.Tensor,
        others: tf.Tensor,
        answer: Callable[[tf.Tensor], tf.Tensor],
        use: Callable[[tf.Tensor], tf.Tensor],
        otherwise: Callable[[], tf.Tensor],
    ) -> tf.Tensor:
        """Asks all replicas for the texts of keys, in a step.

        All replicas must call together. If none of them asks for a text, that
        is one collective of 16 bytes.

        Args:
            replica: the local replica that calls.
            keys: [n] int64; n may differ between replicas.
            others: scalar int64, the number of other keys whose texts this
                replica may send unasked.
            answer: returns this replica's message about the keys of all
                replicas, [m] int64, padded with `END`.
            use: returns the result, given the messages of all replicas,
                [world, k] int64, padded with zeros.
            otherwise: returns the result if no replica asks.
        """
        replicas, channel = self._replicas, self._channel
        sizes = tf.stack([tf.size(keys, tf.int64), others])
        most = replicas.max(replica, sizes, channel)

        def exchange() -> tf.Tensor:
            capacity, bucket = bucket_of(most[0])
            padding = [[0, capacity - tf.size(keys)]]
            padded = tf.pad(keys, padding, constant_values=END)
            message = answer(
                replicas.gather(replica, padded, channel + 1, bucket)
            )
            size = tf.size(message)
            longest = replicas.max(
                replica, tf.cast(size, tf.int64)[None], channel + 2
            )
            capacity, bucket = bucket_of(longest[0])
            padded = tf.pad(message, [[0, capacity - size]])
            messages = replicas.gather(replica, padded, channel + 3, bucket)
            return use(tf.reshape(messages, [replicas.world, capacity]))

        return tf.cond(tf.reduce_any(most > 0), exchange, otherwise)

    def collect(
        self,
        keys: np.ndarray,
        texts_of: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Returns the texts of keys, [n] of bytes, between steps.

        All workers must call with the same keys. `texts_of` returns the texts
        that this worker knows, and empty ones.
        """
        nothing = [np.zeros([1], np.int64)] * (self._replicas.local - 1)
        messages = self._gather([pack(keys, texts_of(keys)), *nothing])
        return texts_from(messages, keys)


def pack(keys: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Returns a message about the keys, [n], whose texts are not empty."""
    lengths = np.fromiter(map(len, texts), np.int64, len(keys))
    known = lengths > 0
    content = b"".join(texts)
    padded = content.ljust(-(-len(content) // 8) * 8, b"\0")
    count = np.array([np.sum(known)], np.int64)
    numbers = np.frombuffer(padded, np.int64)
    return np.concatenate([count, keys[known], lengths[known], numbers])


def unpack(message: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
    """Returns the keys of a message, [n] int64, and their texts."""
    count = int(message[0])
    lengths = message[1 + count : 1 + 2 * count]
    content = message[1 + 2 * count :].tobytes()
    ends = np.cumsum(lengths)
    texts = [
        content[start:end]
        for start, end in zip(
            (ends - lengths).tolist(), ends.tolist(), strict=True
        )
    ]
    return message[1 : 1 + count], texts


def texts_from(
    messages: Sequence[np.ndarray] | np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Returns the texts of keys, [n] of bytes, empty if no message has one."""
    found: dict[int, bytes] = {}
    for message in messages:
        of_message, texts = unpack(message)
        found.update(zip(of_message.tolist(), texts, strict=True))
    result = np.empty(len(keys), object)
    result[:] = [found.get(key, b"") for key in keys.tolist()]
    return result
