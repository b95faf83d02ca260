"""Models as other people write them: TPUs take their programs, too.

They come from papers and libraries, with Keras's own layers and loops, and are
not written for a comparison with one device, as `promises.py` is.
"""

import functools

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras
from promises import BATCH, STEPS, V2, Promise
from tf_keras import layers

import tfrs_embed

ITEMS, USERS, LENGTH, DIM = 1_000, 300, 12, 16
rng = np.random.default_rng(0)


def embeddings(*names, length=0, **options):
    """A layer with a table for each name; `length`: sequences of "history"."""
    tables = {
        "item": tfrs_embed.TableConfig("item", ITEMS, DIM),
        "user": tfrs_embed.TableConfig("user", USERS, DIM),
    }
    return tfrs_embed.PartialTPUEmbedding(
        {
            name: tfrs_embed.FeatureConfig(
                name,
                tables["user" if name == "user" else "item"],
                max_sequence_length=length if name == "history" else 0,
            )
            for name in names
        },
        tf_keras.optimizers.Adagrad(0.1),
        batch_size=BATCH,
        size_threshold=0,
        **options,
    )


def batch(*names):
    """One batch of ids."""
    histories = tf.ragged.constant(
        [rng.integers(0, ITEMS, 2 + i).tolist() for i in range(BATCH)],
        dtype=tf.int64,
    )
    return {
        name: histories
        if name == "history"
        else tf.constant(rng.integers(0, USERS, BATCH))
        for name in names
    }


def labels(low=0, high=2, dtype=np.float32):
    return rng.integers(low, high, BATCH).astype(dtype)


def distribute(strategy, batch):
    """Batches without end."""
    return strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors(batch).repeat(),
        tf.distribute.InputOptions(experimental_fetch_to_device=False),
    )


def fit(make, *names, label=labels, loss="bce", optimizer="adam", extra=None):
    """A promise's `run`: fit and evaluate of a model that `make` makes."""

    def run(strategy, _):
        with strategy.scope():
            model = make()
            if isinstance(model, tfrs.Model):
                model.compile(optimizer, steps_per_execution=2)
            else:
                model.compile(optimizer, _loss(loss), steps_per_execution=2)
        inputs = batch(*names)
        if extra is not None:
            inputs = extra(inputs)
        data = inputs if label is None else (inputs, label())
        data = distribute(strategy, data)
        model.fit(data, steps_per_epoch=STEPS, verbose=0)
        model.evaluate(data, steps=2, verbose=0)

    return run


def _loss(name):
    if name == "bce":
        return tf_keras.losses.BinaryCrossentropy(from_logits=True)
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def ranking(interaction=None):
    """TFRS's own model for CTR, DLRM's interaction by default."""
    return tfrs.experimental.models.Ranking(
        embeddings("user", "item"),
        bottom_stack=tfrs.layers.blocks.MLP([32, DIM], "relu"),
        feature_interaction=interaction and interaction(),
        top_stack=tfrs.layers.blocks.MLP([32, 1], "sigmoid"),
    )


def criteo(inputs):
    return {
        "dense_features": tf.random.uniform([BATCH, 13]),
        "sparse_features": inputs,
    }


def crosses():
    """DCN v2: two crosses, and a stack of low rank."""
    return tf_keras.Sequential(
        [
            layers.Concatenate(),
            tfrs.layers.feature_interaction.MultiLayerDCN(
                projection_dim=8, num_layers=2
            ),
            tfrs.layers.feature_interaction.Cross(projection_dim=8),
        ]
    )


class TwoTowers(tfrs.Model):
    """TFRS's retrieval, measured against a corpus."""

    def __init__(self):
        super().__init__()
        self.embeddings = embeddings("user", "item")
        self.query = tf_keras.Sequential(
            [layers.Dense(32, "relu"), layers.Dense(DIM)]
        )
        self.candidate = layers.Dense(DIM)
        corpus = tfrs.layers.factorized_top_k.BruteForce(k=10)
        corpus.index(
            tf.random.normal([ITEMS, DIM]), tf.range(ITEMS, dtype=tf.int64)
        )
        self.task = tfrs.tasks.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(corpus, ks=(1, 10)),
            batch_metrics=[
                tf_keras.metrics.TopKCategoricalAccuracy(3, name="batch_top_3")
            ],
            temperature=0.1,
            num_hard_negatives=4,
            remove_accidental_hits=True,
        )

    def compute_loss(self, inputs, training=False):
        vectors = self.embeddings(inputs, training=training)
        return self.task(
            self.query(vectors["user"]),
            self.candidate(vectors["item"]),
            candidate_ids=inputs["item"],
            compute_metrics=not training,
        )


class MMoE(tf_keras.Model):
    """Experts for several tasks (Ma et al. 2018), in a loop of one's own."""

    def __init__(self, experts=4, tasks=("click", "buy")):
        super().__init__()
        self.embeddings = embeddings("user", "item")
        self.experts = [layers.Dense(24, "relu") for _ in range(experts)]
        self.gates = [layers.Dense(experts, "softmax") for _ in tasks]
        self.towers = [
            tf_keras.Sequential(
                [layers.Dense(8, "relu"), layers.Dense(1, name=t)]
            )
            for t in tasks
        ]

    def call(self, ids, training=None):
        vectors = self.embeddings(ids, training=training)
        x = tf.concat([vectors["user"], vectors["item"]], -1)
        experts = tf.stack([expert(x) for expert in self.experts], axis=1)
        return [
            tower(tf.einsum("be,bed->bd", gate(x), experts))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]


def mmoe(strategy, _):
    with strategy.scope():
        model = MMoE()
        optimizer = tf_keras.optimizers.legacy.Adam(1e-3)
        seen = tf_keras.metrics.Mean("loss")
    data = iter(
        distribute(strategy, (batch("user", "item"), labels(), labels()))
    )

    def step(inputs):
        ids, *targets = inputs
        with tf.GradientTape() as tape:
            losses = [
                tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], logits)
                for y, logits in zip(
                    targets, model(ids, training=True), strict=True
                )
            ]
            loss = tf.nn.compute_average_loss(
                tf.add_n(losses), global_batch_size=BATCH
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        seen.update_state(loss)

    @tf.function
    def train(iterator):
        for _ in tf.range(STEPS):
            strategy.run(step, (next(iterator),))

    train(data)


class SASRec(tf_keras.Model):
    """Self-attention over a history (Kang & McAuley 2018), causal."""

    def __init__(self, blocks=2):
        super().__init__()
        self.embeddings = embeddings("history", length=LENGTH)
        self.places = layers.Embedding(LENGTH, DIM)
        self.attention = [
            layers.MultiHeadAttention(2, DIM // 2, dropout=0.1)
            for _ in range(blocks)
        ]
        self.feed = [layers.Dense(DIM, "relu") for _ in range(blocks)]
        self.norms = [layers.LayerNormalization() for _ in range(2 * blocks)]
        self.out = layers.Dense(ITEMS)

    def call(self, ids, training=None):
        x = self.embeddings(ids, training=training)["history"]
        there = tf.reduce_any(x != 0.0, -1)
        x += self.places(tf.range(LENGTH))
        for i, attention in enumerate(self.attention):
            y = self.norms[2 * i](x)
            x += attention(
                y,
                x,
                attention_mask=there[:, None],
                use_causal_mask=True,
                training=training,
            )
            x += self.feed[i](self.norms[2 * i + 1](x))
        last = tf.cast(
            tf.reduce_sum(tf.cast(there, tf.int32), -1) - 1, tf.int32
        )
        return self.out(tf.gather(x, tf.maximum(last, 0), batch_dims=1))


class Recurrent(tf_keras.Model):
    """A history read by recurrent layers."""

    def __init__(self, *recurrent, outputs=1):
        super().__init__()
        self.embeddings = embeddings("history", length=LENGTH)
        self.recurrent = list(recurrent)
        self.out = layers.Dense(outputs)

    def call(self, ids, training=None):
        x = self.embeddings(ids, training=training)["history"]
        for layer in self.recurrent:
            x = layer(x, training=training)
        return self.out(x)


def gru4rec():
    """Hidasi et al. 2016: which item comes next."""
    return Recurrent(
        layers.GRU(32, return_sequences=True), layers.GRU(32), outputs=ITEMS
    )


def lstm():
    return Recurrent(
        layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
        layers.RNN(layers.LSTMCell(16, recurrent_dropout=0.1)),
    )


class Scanned(tf_keras.Model):
    """tf.scan, tf.map_fn and a loop with a TensorArray over a history."""

    def __init__(self):
        super().__init__()
        self.embeddings = embeddings("history", "item", length=LENGTH)
        self.mix = layers.Dense(DIM, "tanh")
        self.mix.build([None, DIM])  # Its variables are not made in a loop.
        self.out = layers.Dense(1)

    def call(self, ids, training=None):
        vectors = self.embeddings(ids, training=training)
        history, item = vectors["history"], vectors["item"]
        steps = tf.transpose(history, [1, 0, 2])
        mean = tf.scan(lambda m, x: 0.9 * m + 0.1 * self.mix(x), steps)[-1]
        near = tf.map_fn(
            lambda pair: tf.linalg.matvec(
                pair[0], tf.nn.softmax(tf.linalg.matvec(pair[0], pair[1])), True
            ),
            (history, item),
            fn_output_signature=tf.float32,
        )
        array = tf.TensorArray(tf.float32, LENGTH, element_shape=[BATCH, DIM])
        _, _, array = tf.while_loop(
            lambda i, *_: i < LENGTH,
            lambda i, state, array: (
                i + 1,
                self.mix(state + steps[i]),
                array.write(i, state * steps[i]),
            ),
            (0, tf.zeros([BATCH, DIM]), array),
            maximum_iterations=LENGTH,
        )
        products = tf.reduce_sum(array.stack(), 0)
        return self.out(tf.concat([mean, near, products], -1))


def accumulate(strategy, _):
    """Gradients of the dense part, summed over steps before they are used."""
    with strategy.scope():
        layer = embeddings("user", "item")
        dense = tf_keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])
        dense.build([None, 2 * DIM])
        optimizer = tf_keras.optimizers.legacy.Adam(1e-3)
        sums = [
            tf.Variable(
                tf.zeros(v.shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for v in dense.trainable_variables
        ]
    data = iter(distribute(strategy, (batch("user", "item"), labels())))

    def micro_step(inputs):
        ids, y = inputs
        with tf.GradientTape() as tape:
            vectors = layer(ids, training=True)
            logits = dense(tf.concat([vectors["user"], vectors["item"]], -1))
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], logits)
            )
        kept = dense.trainable_variables
        gradients = tape.gradient(loss, [*kept, *layer.trainable_variables])
        for total, gradient in zip(sums, gradients, strict=False):
            total.assign_add(gradient)

    def update():
        pairs = zip(sums, dense.trainable_variables, strict=True)
        optimizer.apply_gradients([(s / STEPS, v) for s, v in pairs])
        for total in sums:
            total.assign(tf.zeros_like(total))

    @tf.function
    def train(iterator):
        for _ in tf.range(STEPS):
            strategy.run(micro_step, (next(iterator),))
        strategy.run(update)

    train(data)


Model = functools.partial(Promise, hardware=V2)
next_item = functools.partial(labels, 0, ITEMS, np.int64)
MODELS = [
    Model("DLRM: TFRS's `Ranking`", fit(ranking, "user", "item", extra=criteo)),
    Model(
        "DCN v2 in TFRS's `Ranking`",
        fit(functools.partial(ranking, crosses), "user", "item", extra=criteo),
    ),
    Model(
        "two towers: TFRS's `Retrieval`, `FactorizedTopK`",
        fit(TwoTowers, "user", "item", label=None),
    ),
    Model("MMoE, a loop of one's own", mmoe),
    Model("SASRec", fit(SASRec, "history", label=next_item, loss="classes")),
    Model("GRU4Rec", fit(gru4rec, "history", label=next_item, loss="classes")),
    Model("LSTM, bidirectional, and `RNN`", fit(lstm, "history")),
    Model(
        "`tf.scan`, `tf.map_fn`, `TensorArray`", fit(Scanned, "history", "item")
    ),
    Model("gradient accumulation", accumulate),
]
