"""What programs do with gradients beside training: on any embedding.

Each scenario takes a `Program` and a batch, and is a step of it. Losses are
sums over the batch, so that replicas' shares of it add up.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_under_test import NUMBER, keras

ROWS, DIM = 20, 4
BATCH = 8


@dataclasses.dataclass
class Program:
    """An embedding, a dense layer on it, and the optimizer of both.

    Attributes:
        look_up: gives ids' vectors.
        embedding: the variables that ask for the table's gradient.
        optimizer: applies gradients.
        wrap: makes the forward pass a function of its own, or doesn't.
    """

    look_up: Callable[[Any], tf.Tensor]
    embedding: Callable[[], list[tf.Variable]]
    optimizer: Any
    wrap: Callable[[Any], Any] = lambda function: function

    def __post_init__(self):
        self.head = tf.Variable(
            np.linspace(-1, 1, DIM)[:, None], dtype=tf.float32
        )
        self.other = tf.Variable(
            np.linspace(1, 2, DIM)[:, None], dtype=tf.float32
        )
        self.second = keras.optimizers.SGD(0.1)
        self.vectors = self.wrap(lambda ids: self.look_up(ids))
        self.predict = self.wrap(
            lambda ids, x: tf.matmul(tf.tanh(self.look_up(ids)) * x, self.head)
        )

    @property
    def variables(self):
        return [*self.embedding(), self.head]

    def build(self):
        """Tells Keras 3's optimizers of all that they will train."""
        if NUMBER == 3:
            self.optimizer.build(self.variables)

    def apply(self, gradients, variables):
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))


def train(p, ids, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(p.predict(ids, x) ** 2)
    p.apply(tape.gradient(loss, p.variables), p.variables)


def train_the_head(p, ids, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(p.predict(ids, x) ** 2)
    p.apply(tape.gradient(loss, [p.head]), [p.head])


def saliency(p, ids, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        prediction = p.predict(ids, x)
    p.head.assign_add(
        0.0 * tf.reduce_sum(tape.gradient(prediction, x)) + p.head
    )


def penalty(p, ids, x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            prediction = p.predict(ids, x)
        slope = inner.gradient(prediction, x)
        loss = tf.reduce_sum(prediction**2) + tf.reduce_sum(slope**2)
    p.apply(outer.gradient(loss, p.variables), p.variables)


def persistent_tape(p, ids, x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        prediction = p.predict(ids, x)
        loss = tf.reduce_sum(prediction**2)
    tape.gradient(prediction, x)
    head = tape.gradient(loss, [p.head])
    embedding = tape.gradient(loss, p.embedding())
    p.apply([*embedding, *head], p.variables)


def jacobian(p, ids, x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        prediction = p.predict(ids, x)
        loss = tf.reduce_sum(prediction**2)
    rows = tape.jacobian(prediction, p.head)
    gradients = tape.gradient(loss, p.variables)
    gradients[-1] += tf.reduce_sum(rows, [0, 1])
    p.apply(gradients, p.variables)


def recompute(p, ids, x):
    @tf.recompute_grad
    def forward(x):
        return tf.matmul(tf.tanh(p.look_up(ids)) * x, p.head)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(x) ** 2)
    p.apply(tape.gradient(loss, p.variables), p.variables)


def accumulation(p, ids, x):
    with tf.GradientTape() as tape:
        vectors = p.vectors(ids)
    of_vectors, of_head = [], []
    for some, xs in zip(tf.split(vectors, 2), tf.split(x, 2), strict=True):
        with tf.GradientTape() as part:
            part.watch(some)
            output = tf.matmul(tf.tanh(some) * xs, p.head)
            loss = tf.reduce_sum(output**2)
        gradient, head = part.gradient(loss, [some, p.head])
        of_vectors.append(gradient)
        of_head.append(head)
    embedding = tape.gradient(
        vectors, p.embedding(), output_gradients=tf.concat(of_vectors, 0)
    )
    p.apply([*embedding, tf.add_n(of_head)], p.variables)


def two_optimizers(p, ids, x):
    with tf.GradientTape() as first, tf.GradientTape() as second:
        vectors = p.vectors(ids)
        one = tf.reduce_sum(tf.matmul(vectors * x, p.head) ** 2)
        two = tf.reduce_sum(tf.matmul(vectors * x, p.other) ** 2)
    gradients = first.gradient(one, p.variables)
    others = second.gradient(two, [p.other])
    p.apply(gradients, p.variables)
    p.second.apply_gradients(zip(others, [p.other], strict=True))


def stop_recording(p, ids, x):
    with tf.GradientTape() as tape:
        with tape.stop_recording():
            still = p.vectors(ids)
        output = tf.matmul(tf.tanh(still) * x, p.head)
        loss = tf.reduce_sum(output**2)
    p.apply(tape.gradient(loss, [p.head]), [p.head])
    train(p, ids, x)


def gather_vectors(p, ids, x):
    with tf.GradientTape() as tape:
        vectors = p.vectors(ids)
        twice = tf.repeat(tf.range(tf.shape(vectors)[0]), 2)
        vectors = tf.gather(vectors, twice)
        loss = tf.reduce_sum(tf.matmul(vectors, p.head) ** 2)
    p.apply(tape.gradient(loss, p.variables), p.variables)


def in_a_branch(p, ids, x):
    def step():
        train(p, ids, x)
        return 0

    tf.cond(tf.reduce_sum(x) > -1e9, step, lambda: 0)


SCENARIOS = [
    train,
    train_the_head,
    saliency,
    penalty,
    persistent_tape,
    jacobian,
    recompute,
    accumulation,
    two_optimizers,
    stop_recording,
    gather_vectors,
    in_a_branch,
]


def batches(count, size=BATCH, seed=0):
    """Pairs of ids [size] int32, with duplicates, and x [size, DIM]."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, ROWS, size).astype(np.int32),
            rng.normal(size=(size, DIM)).astype(np.float32),
        )
        for _ in range(count)
    ]


def initial():
    """The table that all begin with."""
    return np.random.default_rng(1).normal(size=(ROWS, DIM)).astype("f4")


@functools.cache
def expected(scenario, count, size=BATCH):
    """The variables after `batches(count, size)` on Keras's Embedding.

    Keras 3's doesn't add up the gradients of a row, so there it is a product.
    """
    layer = keras.layers.Embedding(ROWS, DIM)
    layer.build(None)
    layer.set_weights([initial()])
    [table] = layer.trainable_variables
    program = Program(
        layer
        if NUMBER == 2
        else lambda ids: tf.matmul(tf.one_hot(ids, ROWS), table.value),
        lambda: [table],
        optimizer(legacy=True),
    )
    program.build()
    for ids, x in batches(count, size):
        scenario(program, tf.constant(ids), tf.constant(x))
    return layer.get_weights()[0], program.head.numpy(), program.other.numpy()


def optimizer(legacy=False):
    """Adagrad: two updates are never one."""
    kind = keras.optimizers
    return (kind.legacy if legacy and NUMBER == 2 else kind).Adagrad(0.1)
