"""SASRec (Kang & McAuley 2018): which item comes next, by self-attention.

Histories come as a ragged tensor, and what the embedding layer, the norms and
the dense layers compute, they compute for the ids that there are. Attention
compares each pair of a history's items: for that alone histories are padded, to
the longest of the batch.

The model is trained by a softmax over all items, or over some that are drawn,
in place of the paper's single negative (Klenitskiy & Vasilev 2023). Items to
choose from are a second feature of the histories' table: output weights are
lookups too, so they work, and train, wherever the table is.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras
from tf_keras import layers

import tfrs_embed


class SASRec(tf_keras.Model):
    """Scores of all items, for what comes next in each history.

    Args:
        items: their number; ids are below it.
        optimizer: the table's.
        dim: the width of an item's vector.
        length: how many of a history's last items are read.
        blocks: the number of blocks of attention.
        heads: the number of heads of each.
        dropout: the part that is dropped in training.
        negatives: how many items a step draws to compare the next one with;
            None: all are compared.
        size_threshold: rows above which the table is sharded over replicas;
            None: it never is.
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
        super().__init__()
        self.items, self.length, self.negatives = items, length, negatives
        table = tfrs_embed.TableConfig(
            "items",
            items,
            dim,
            initializer=tf_keras.initializers.TruncatedNormal(stddev=0.02),
        )
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.FeatureConfig(name, table, combiner=None)
                for name in ("history", "choice")
            },
            optimizer,
            size_threshold=size_threshold,
        )
        # From place 0, before the first item, to that after the last of
        # training's, whose state predicts nothing.
        self.places = layers.Embedding(length + 2, dim)
        self.dropout = layers.Dropout(dropout)
        self.blocks = [Block(dim, heads, dropout) for _ in range(blocks)]
        self.norm = layers.LayerNormalization(epsilon=1e-6)

    def call(
        self, history: tf.RaggedTensor, training: bool = False
    ) -> tf.Tensor:
        """Returns scores of what comes next; in training adds the loss.

        Args:
            history: ids [batch, None], the oldest first. The last `length` are
                read, in training one more.
            training: whether each item of a history is to be predicted from
                those before it.

        Returns:
            Scores [batch, items]; in training of the items drawn.
        """
        # One more in training, to be predicted: so the state after `length`
        # items, which predictions are made from, is trained.
        length = self.length + 1 if training else self.length
        history = history[:, -length:]
        choice = self.choice(history.dtype, training)
        vectors = self.embeddings(
            {"history": history, "choice": choice}, training=training
        )
        states = self.read(vectors["history"], training)
        return self.scores(states, history, vectors, choice, training)

    def choice(self, dtype: tf.DType, training: bool) -> tf.Tensor:
        """Returns the items to choose from: all, or in training those drawn."""
        if training and self.negatives is not None:
            return tf.random.uniform(
                [self.negatives], maxval=self.items, dtype=dtype
            )
        return tf.range(self.items, dtype=dtype)

    def scores(
        self,
        states: tf.RaggedTensor,
        history: tf.RaggedTensor,
        vectors: dict[str, tf.Tensor],
        choice: tf.Tensor,
        training: bool,
    ) -> tf.Tensor:
        """Returns scores of what comes next; in training adds the loss.

        Args:
            states: what `read` returns.
            history: the ids that were read.
            vectors: those of the history and of the choice.
            choice: the items to choose from.
            training: see `call`.
        """
        if training:
            self.add_loss(
                next_item_loss(
                    states[:, :-1].values,
                    vectors["history"].values,
                    vectors["choice"],
                    history.values[:, None] == choice,
                )
            )
        last = states[:, -1:].values
        return tf.matmul(last, vectors["choice"], transpose_b=True)

    def read(self, vectors: tf.RaggedTensor, training: bool) -> tf.RaggedTensor:
        """Returns a state before each item and after the last one.

        Args:
            vectors: those of each history's items, [batch, None, dim].
            training: whether to drop parts.

        Returns:
            States, [batch, None, dim], one more than items in each row.
        """
        rows, place = self.with_start(vectors)
        x = self.dropout(rows.values + self.places(place.values), training)
        for block in self.blocks:
            x = block(rows.with_values(x), training=training)
        return rows.with_values(self.norm(x))

    def with_start(
        self, vectors: tf.RaggedTensor
    ) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
        """Returns scaled vectors, behind a row of zeros, and their places."""
        dim = vectors.shape[-1]
        start = tf.zeros([vectors.nrows(), 1, dim], vectors.dtype)
        rows = tf.concat([start, vectors * dim**0.5], axis=1)
        return rows, tf.ragged.range(rows.row_lengths())


class Block(layers.Layer):
    """Causal self-attention within each row, and two dense layers.

    Args:
        dim: the width of vectors.
        heads: the number of heads.
        dropout: the part that is dropped in training.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._supports_ragged_inputs = True
        self.attention = layers.MultiHeadAttention(
            heads, dim // heads, dropout=dropout
        )
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in "12"]
        self.feed = tf_keras.Sequential(
            [
                layers.Dense(dim, activation="relu"),
                layers.Dropout(dropout),
                layers.Dense(dim),
                layers.Dropout(dropout),
            ]
        )

    def call(self, rows: tf.RaggedTensor, training: bool = False) -> tf.Tensor:
        """Returns the new values [ids, dim] of rows [batch, None, dim]."""
        padded = rows.with_values(self.norms[0](rows.values)).to_tensor()
        # Padding comes after all items: what is causal does not see it.
        seen = self.attention(
            padded, padded, use_causal_mask=True, training=training
        )
        seen = tf.RaggedTensor.from_tensor(seen, lengths=rows.row_lengths())
        x = rows.values + seen.values
        return x + self.feed(self.norms[1](x), training=training)


def next_item_loss(
    states: tf.Tensor, right: tf.Tensor, choice: tf.Tensor, same: tf.Tensor
) -> tf.Tensor:
    """Returns the mean cross-entropy of the right items.

    Args:
        states: [n, dim].
        right: the vector of each state's right item, [n, dim].
        choice: vectors of the others, [choice, dim].
        same: whether an "other" is the right one, [n, choice]: it is left out.

    Returns:
        A scalar; 0 of no states.
    """
    of_right = tf.reduce_sum(states * right, axis=1)
    others = tf.matmul(states, choice, transpose_b=True)
    # Not minus infinity, of whose exponentials alone there is no gradient.
    others = tf.where(same, -1e9, others)
    losses = tf.nn.softplus(tf.reduce_logsumexp(others, axis=1) - of_right)
    return tf.math.divide_no_nan(
        tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype)
    )
