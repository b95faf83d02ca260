"""HSTU (Zhai et al. 2024): which item comes next, by pointwise attention.

Attention has no softmax: what a state sees is weighted by the SiLU of a product
and of two biases, one by how many items lie between, one by how much time does.
A gate by the state itself takes the place of the dense layers. Table, loss and
ragged histories are those of sasrec.py.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras
from sasrec import SASRec
from tf_keras import layers

#: Seconds are told apart by their power of two; 2**29 are 17 years.
TIME_BUCKETS = 30


class HSTU(SASRec):
    """Scores of all items, for what comes next in each history.

    Args:
        items: see `SASRec`.
        optimizer: see `SASRec`.
        dim: see `SASRec`.
        length: see `SASRec`.
        blocks: the number of `PointwiseBlock`s.
        heads: the number of heads of each.
        dropout: see `SASRec`.
        negatives: see `SASRec`.
        size_threshold: see `SASRec`.
    """

    def __init__(
        self,
        items: int,
        optimizer: tf_keras.optimizers.Optimizer,
        dim: int = 64,
        length: int = 50,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.3,
        negatives: int | None = None,
        size_threshold: int | None = 0,
    ) -> None:
        super().__init__(
            items,
            optimizer,
            dim,
            length,
            0,
            heads,
            dropout,
            negatives,
            size_threshold,
        )
        self.blocks = [
            PointwiseBlock(dim, heads, dropout, length + 2)
            for _ in range(blocks)
        ]

    def call(
        self, inputs: dict[str, tf.RaggedTensor], training: bool = False
    ) -> tf.Tensor:
        """Returns scores of what comes next; in training adds the loss.

        Args:
            inputs: "history" is what `SASRec` takes, ids [batch, None]; "time"
                has the second of each id.
            training: see `SASRec.call`.

        Returns:
            See `SASRec.call`.
        """
        length = self.length + 1 if training else self.length
        history = inputs["history"][:, -length:]
        time = tf.cast(inputs["time"][:, -length:], tf.int64)
        choice = self.choice(history.dtype, training)
        vectors = self.embeddings(
            {"history": history, "choice": choice}, training=training
        )
        states = self.read_with_times(vectors["history"], time, training)
        return self.scores(states, history, vectors, choice, training)

    def read_with_times(
        self, vectors: tf.RaggedTensor, time: tf.RaggedTensor, training: bool
    ) -> tf.RaggedTensor:
        """Returns a state before each item and after the last one.

        Args:
            vectors: those of each history's items, [batch, None, dim].
            time: the second of each item, [batch, None].
            training: whether to drop parts.

        Returns:
            States, [batch, None, dim], one more than items in each row.
        """
        rows, place = self.with_start(vectors)
        x = self.dropout(rows.values + self.places(place.values), training)
        # A state is as old as the last item that it has seen; the first one has
        # seen none, and is as long ago as buckets reach.
        start = tf.fill([time.nrows(), 1], tf.cast(-(2**31), time.dtype))
        time = tf.concat([start, time], axis=1).to_tensor()
        passed = tf.cast(time[:, :, None] - time[:, None, :], tf.float32)
        bucket = tf.math.log(1.0 + tf.maximum(passed, 0.0)) / tf.math.log(2.0)
        bucket = tf.minimum(tf.cast(bucket, tf.int32), TIME_BUCKETS - 1)
        for block in self.blocks:
            x = block(rows.with_values(x), bucket, training=training)
        return rows.with_values(self.norm(x))


class PointwiseBlock(layers.Layer):
    """Causal pointwise attention within each row, and a gate.

    Args:
        dim: the width of vectors.
        heads: the number of heads.
        dropout: the part that is dropped in training.
        length: the most states of a row.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float, length: int
    ) -> None:
        super().__init__()
        self._supports_ragged_inputs = True
        self.dim, self.heads, self.length = dim, heads, length
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in "12"]
        self.project = layers.Dense(4 * dim, activation="swish")
        self.dropout = layers.Dropout(dropout)
        self.out = layers.Dense(dim)
        self.of_places = self.add_weight("of_places", [length, heads])
        self.of_times = self.add_weight("of_times", [TIME_BUCKETS, heads])

    def call(
        self,
        rows: tf.RaggedTensor,
        bucket: tf.Tensor,
        training: bool = False,
    ) -> tf.Tensor:
        """Returns the new values [ids, dim] of rows [batch, None, dim].

        Args:
            rows: the states.
            bucket: the time between each two states of a row, as a bucket,
                [batch, states, states].
            training: whether to drop parts.
        """
        x = self.project(self.norms[0](rows.values))
        gate, padded = x[:, : self.dim], x[:, self.dim :]
        padded = rows.with_values(padded).to_tensor()
        batch, states = tf.unstack(tf.shape(padded)[:2])
        split = tf.reshape(
            padded, [batch, states, 3, self.heads, self.dim // self.heads]
        )
        value, query, key = tf.unstack(split, axis=2)
        place = tf.range(states)
        apart = place[:, None] - place
        # Padding comes after all items: what is causal does not see it.
        causal = tf.cast(apart >= 0, x.dtype)
        bias = tf.gather(self.of_places, tf.maximum(apart, 0))
        bias += tf.gather(self.of_times, bucket)
        weights = tf.einsum("bihd,bjhd->bijh", query, key) + bias
        weights = tf.nn.silu(weights) * causal[:, :, None] / self.length
        seen = tf.einsum("bijh,bjhd->bihd", weights, value)
        seen = tf.reshape(seen, [batch, states, self.dim])
        seen = tf.RaggedTensor.from_tensor(seen, lengths=rows.row_lengths())
        gated = self.dropout(self.norms[1](seen.values) * gate, training)
        return rows.values + self.out(gated)
