"""The rows that keys without a row share, among the rows of variables."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfrs_embed.distribution import key_shards
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW, KeyRules


@dataclasses.dataclass(frozen=True)
class FallbackRows:
    """Finds the shared rows of keys, which are before the rows of keys.

    The operations on keys know no shared rows: keys' rows begin at `FIRST_ROW`
    there. Rows are [n] int64.

    Attributes:
        rules: those of the shard's keys.
        host: the device of the keys.
    """

    rules: KeyRules
    host: str

    @property
    def end(self) -> int:
        """The row after the last shared row."""
        return FIRST_ROW + self.rules.fallback_rows_here

    def of(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows that keys share as long as they have none, [n]."""
        rules = self.rules
        with tf.device(self.host):
            return FIRST_ROW + key_shards.shared_rows_of(
                keys, rules.fallback_rows, rules.world
            )

    def own(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows, as operations give them, as rows of variables."""
        if not self.rules.fallback_rows:
            return rows
        with tf.device(self.host):
            behind = rows + self.rules.fallback_rows_here
            return tf.where(rows < FIRST_ROW, rows, behind)

    def as_input(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows of variables as operations take them."""
        if not self.rules.fallback_rows:
            return rows
        with tf.device(self.host):
            before = rows - self.rules.fallback_rows_here
            none = tf.constant(ABSENT, tf.int64)
            return tf.where(rows < self.end, none, before)

    def own_or_shared(
        self,
        rows: tf.Tensor,
        keys: tf.Tensor,
        counts: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """As `own`, with the shared rows of keys that have none and count."""
        if not self.rules.fallback_rows:
            return rows
        with tf.device(self.host):
            shares = rows < FIRST_ROW
            if counts is not None:
                shares &= counts > 0
            return tf.where(shares, self.of(keys), self.own(rows))
