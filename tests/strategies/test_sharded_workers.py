"""Workers whose layers differ in anything that decides numbers.

After an error nothing is left behind, so that all of it runs in one process.
"""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import on
from tfrs_embed.distribution import handshake

pytestmark = on("workers:3", tier="more")

TPU = tf.tpu.experimental.embedding
ADAM = tf_keras.optimizers.Adam
NORMAL = tf_keras.initializers.RandomNormal
DECAY = tf_keras.optimizers.schedules.ExponentialDecay


def one_rate():
    return 0.5


def another_rate():
    return 0.25


def rows(shape, dtype=None, value=0.0):
    return tf.fill(shape, value)


def partial(optimizer="sgd", layer=None, table=None, feature=None):
    """A layer with a large table and a small one."""
    layer = {"size_threshold": 20, **(layer or {})}
    table = {"combiner": "sum", "initializer": "zeros", **(table or {})}
    movies = tfrs_embed.TableConfig("movies", 50, 3, **table)
    genres = tfrs_embed.TableConfig("genres", 9, 3, **table)
    return tfrs_embed.PartialTPUEmbedding(
        {
            "movie": tfrs_embed.FeatureConfig("movie", movies, **feature or {}),
            "genre": tfrs_embed.FeatureConfig("genre", genres),
        },
        optimizer,
        name="layer",
        **layer,
    )


def keyed(**kwargs):
    arguments = {"slot_num": 2, "nnz_per_slot": 3, **kwargs}
    return tfrs_embed.All2AllDenseEmbedding(10, 4, name="layer", **arguments)


def adam(**kwargs):
    return functools.partial(partial, ADAM(**kwargs))


def rate(value):
    return functools.partial(partial, TPU.SGD(value))


def initial(initializer):
    return functools.partial(partial, table={"initializer": initializer})


MOVIES = "Table 'movies': "
RATE = MOVIES + "optimizer.learning_rate"
RULE = MOVIES + "optimizer.rule"
# What worker 0 makes, what the others make, and what the error says of it.
DIFFERENT = {
    "beta": (
        lambda: adam(beta_1=0.9),
        lambda: adam(beta_1=0.8),
        (RULE + ".beta_1", "0.9", "0.8"),
    ),
    "rate": (lambda: rate(0.1), lambda: rate(0.2), (RATE, "0.1", "0.2")),
    "Keras rate": (
        lambda: adam(learning_rate=0.1),
        lambda: adam(learning_rate=0.2),
        (RATE, "0.1", "0.2"),
    ),
    "decay": (
        lambda: functools.partial(partial, tf_keras.optimizers.legacy.SGD()),
        lambda: functools.partial(
            partial, tf_keras.optimizers.legacy.SGD(decay=0.5)
        ),
        (
            MOVIES + "optimizer.learning_rate is multiplied by[0]",
            "not there",
            '"1 / (1 + 0.5 step)"',
        ),
    ),
    "schedule": (
        lambda: rate(DECAY(0.1, 10, 0.5)),
        lambda: rate(DECAY(0.1, 20, 0.5)),
        (RATE + ".config.decay_steps", "10", "20"),
    ),
    "function": (
        lambda: rate(one_rate),
        lambda: rate(another_rate),
        (RATE, f'"{__name__}.one_rate"', f'"{__name__}.another_rate"'),
    ),
    "accumulator": (
        lambda: functools.partial(partial, TPU.Adagrad()),
        lambda: functools.partial(
            partial, TPU.Adagrad(initial_accumulator_value=0.2)
        ),
        (RULE + ".initial_accumulator_value", "0.1", "0.2"),
    ),
    "combiner": (
        lambda: partial,
        lambda: functools.partial(partial, table={"combiner": "mean"}),
        (MOVIES + "combiner", '"sum"', '"mean"'),
    ),
    "seed": (
        lambda: initial(NORMAL(seed=1)),
        lambda: initial(NORMAL(seed=2)),
        (MOVIES + "initializer.config.seed", "1", "2"),
    ),
    "hot rows": (
        lambda: functools.partial(partial, table={"hot_rows": [1, 2]}),
        lambda: functools.partial(partial, table={"hot_rows": [1, 3]}),
        (MOVIES + "hot_rows[1]", "2", "3"),
    ),
    "array": (
        lambda: initial(tf_keras.initializers.Constant(np.ones([50, 3]))),
        lambda: initial(tf_keras.initializers.Constant(np.zeros([50, 3]))),
        (MOVIES + "initializer.config.value.sha256", '"', '"'),
    ),
    "partial": (
        lambda: initial(functools.partial(rows, value=1.0)),
        lambda: initial(functools.partial(rows, value=2.0)),
        (MOVIES + "initializer.partial[2].value", "1", "2"),
    ),
    "invalid ids": (
        lambda: partial,
        lambda: functools.partial(partial, layer={"invalid_ids": "zero"}),
        ("invalid_ids", '"error"', '"zero"'),
    ),
    "threshold": (
        lambda: partial,
        lambda: functools.partial(partial, layer={"size_threshold": 5}),
        ("Table 'genres': optimizer", "null", "not there"),
    ),
    "communication dtype": (
        lambda: partial,
        lambda: functools.partial(
            partial, layer={"communication_dtype": "bfloat16"}
        ),
        ("communication_dtype", '"float32"', '"bfloat16"'),
    ),
    "dtype": (
        lambda: partial,
        lambda: functools.partial(partial, layer={"dtype": "mixed_bfloat16"}),
        ("dtype", '"float32"', '"bfloat16"'),
    ),
    "sequence": (
        lambda: partial,
        lambda: functools.partial(partial, feature={"max_sequence_length": 4}),
        ("Feature 'movie': max_sequence_length", "0", "4"),
    ),
    "uncombined": (
        lambda: partial,
        lambda: functools.partial(partial, feature={"combiner": None}),
        ("Feature 'movie': combiner", '"table"', "null"),
    ),
    "output shape": (
        lambda: functools.partial(partial, feature={"output_shape": (8, 2, 3)}),
        lambda: functools.partial(partial, feature={"output_shape": (8, 4, 3)}),
        ("Feature 'movie': output_shape[1]", "2", "4"),
    ),
    "slots": (
        lambda: keyed,
        lambda: functools.partial(keyed, slot_num=3, nnz_per_slot=2),
        ("slot_num", "2", "3"),
    ),
    "small table": (
        lambda: functools.partial(partial, layer={"size_threshold": None}),
        lambda: functools.partial(
            partial,
            layer={"size_threshold": None},
            table={"combiner": "mean"},
        ),
        (MOVIES + "combiner", '"sum"', '"mean"'),
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_difference_is_named(strategy, kind):
    *makers, (what, first, other) = DIFFERENT[kind]
    me = strategy.cluster_resolver.task_id
    # In the scope all workers would have the first one's Keras variables.
    make = makers[me > 0]()
    with strategy.scope():
        layer = make()
        with pytest.raises(RuntimeError) as caught:
            layer.build()
    text = str(caught.value)
    here, there = (first, other) if me == 0 else (other, first)
    assert re.match(
        "Layer 'layer' must be the same on all workers. What "
        f"differs here, on worker {me}, and on worker {0 if me else 1}: ",
        text,
    ), text
    named = f"{re.escape(what)} is {re.escape(here)}.* here, {re.escape(there)}"
    assert re.search(f"[ ;]{named}", text), text


@pytest.mark.parametrize(
    ("what", "value"),
    [("tfrs_embed", "0.0.1"), ("tensorflow", "2.0"), ("kernels", "none")],
)
def test_another_program_is_refused(strategy, monkeypatch, what, value):
    me = strategy.cluster_resolver.task_id
    if me == 1:
        changed = {**handshake.program(), what: value}
        monkeypatch.setattr(handshake, "program", lambda: changed)
    with strategy.scope():
        layer = partial()
        named = rf'the program\.{what} is .*"{re.escape(value)}"'
        with pytest.raises(RuntimeError, match=named):
            layer.build()


@pytest.mark.parametrize("make", [partial, keyed])
def test_equal_layers_are_built_after_it(strategy, make):
    with strategy.scope():
        layer = make()
        layer.build()
    assert layer.built
