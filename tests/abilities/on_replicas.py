"""What layers can do under a strategy of this process: the abilities, as data.

An ability is a function of a `Case` and the strategy that raises an error if
the layer lacks it. Numbers are those of one device.
"""

import functools
import tempfile

import numpy as np
import tensorflow as tf

from abilities.cases import (
    RATE,
    TARGETS,
    NoMasksError,
    equal,
    equal_means,
    fit,
    functional,
    masked,
)
from abilities.saving import WAYS
from keras_under_test import keras

ABILITIES = {}


def is_costly(title, case):
    """Whether only `make nightly` runs a cell."""
    return (title, case.name) not in (
        ("fit, with a mask", "PartialTPUEmbedding, large"),
        ("model.export, load on one device", "PartialTPUEmbedding, large"),
    )


def ability(title):
    return lambda check: ABILITIES.setdefault(title, check)


def _copies(values, replicas):
    """A batch for each replica: copies, as TPUs need some; the mean stays."""
    return np.concatenate([values] * 8 * replicas)


def _batch_size(case, strategy):
    """What an input must be given: TPUs have to know it."""
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    return 16 * len(case.ids) if on_tpu else None


def _functional(case, strategy):
    return functional(case, batch_size=_batch_size(case, strategy))


def _fit(model, ids, targets, replicas=2):
    batch = _copies(ids, replicas), _copies(targets, replicas)
    return fit(model, None, 1, *batch, run_eagerly=False)


def _predict(model, ids):
    batch = tf.data.Dataset.from_tensors(_copies(ids, 2))
    return model.predict(batch, verbose=0)[: len(ids)]


@functools.cache
def _trained(case, strategy):
    with strategy.scope():
        return _fit(_functional(case, strategy), case.ids, case.targets)


@ability("fit")
def _(case, strategy):
    equal(_predict(_trained(case, strategy), case.ids), 1)


@ability("fit, with a mask")
def _(case, strategy):
    if not case.masked:
        raise NoMasksError
    with strategy.scope():
        model = masked(case, batch_size=_batch_size(case, strategy))
        _fit(model, case.padded_ids, TARGETS[:, 0])
    equal_means(_predict(model, case.padded_ids), 1)


@ability("frozen in fit")
def _(case, strategy):
    with strategy.scope():
        model = _fit(_functional(case, strategy), case.ids, case.targets)
        model.layers[-1].trainable = False
        _fit(model, case.ids, case.targets)
    equal(_predict(model, case.ids), 1)


@ability("a loop of one's own")
def _(case, strategy):
    with strategy.scope():
        layer = _functional(case, strategy).layers[-1]
        optimizer = keras.optimizers.SGD(RATE)
    pair = _copies(case.ids, 2), _copies(case.targets, 2)
    data = tf.data.Dataset.from_tensors(pair)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            squares = (layer(ids, training=True) - targets) ** 2
            loss = tf.reduce_sum(squares) / pair[1].size
        weights = layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    @tf.function
    def train(batch):
        strategy.run(step, batch)

    @tf.function
    def look_up(batch):
        return strategy.run(lambda ids, _: layer(ids), batch)

    for batch in strategy.experimental_distribute_dataset(data):
        train(batch)
        vectors = strategy.experimental_local_results(look_up(batch))
    equal(np.concatenate(vectors)[: len(case.ids)], 1)


def _load_on_one_device(title, case, strategy):
    way = WAYS[title]
    with tempfile.TemporaryDirectory() as folder:
        way.save(_trained(case, strategy), f"{folder}/{way.name}")
        make = functools.partial(functional, case)
        model = way.load(make, f"{folder}/{way.name}")
        equal(model(_copies(case.ids, 1))[: len(case.ids)], 1)


def _load_under_it(title, case, strategy):
    way = WAYS[title]
    with tempfile.TemporaryDirectory() as folder:
        model = _fit(functional(case), case.ids, case.targets, replicas=1)
        way.save(model, f"{folder}/{way.name}")
        with strategy.scope():
            make = functools.partial(_functional, case, strategy)
            model = way.load(make, f"{folder}/{way.name}")
        equal(_predict(model, case.ids), 1)


for _title in WAYS:
    ABILITIES[f"{_title}, load on one device"] = functools.partial(
        _load_on_one_device, _title
    )
for _title in WAYS:
    if _title != "model.export":
        ABILITIES[f"{_title} on one device, load under it"] = functools.partial(
            _load_under_it, _title
        )
