"""The layers whose abilities are measured, their models, and numpy's numbers.

Keras's own `Embedding` is among the layers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_under_test import keras, layers
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig

ROWS, DIM, RATE = 20, 2, 2.0
IDS = np.array([[1, 2, 3], [4, 1, 5]])
TARGETS = np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 10
#: Which of the ids the tests of masks leave out.
PADDED = np.array([[False, False, True], [False, True, True]])


class NoMasksError(Exception):
    """The layer has no masks, of which the check would be."""


class Case(NamedTuple):
    """A layer: its name, how it is made, and the shape of a sample's ids.

    `masked` makes the layer so that it masks the id `padding`; None: it has no
    masks.
    """

    name: str
    make: Callable
    shape: tuple = (3,)
    masked: Callable | None = None
    padding: int = -1

    @property
    def padded_ids(self):
        return np.where(PADDED, self.padding, IDS)

    @property
    def ids(self):
        return IDS.reshape(-1, *self.shape)

    @property
    def targets(self):
        return TARGETS.reshape(-1, *self.shape, DIM)


def _keras(**kwargs):
    start = {"embeddings_initializer": "ones"}
    return keras.layers.Embedding(ROWS, DIM, **start, **kwargs)


def _embedding(**kwargs):
    start = {"embeddings_initializer": "ones"}
    return layers.Embedding(ROWS, DIM, **start, **kwargs)


def _of_feature(kind, threshold, keys=None, **feature):
    def make(**kwargs):
        ones = keras.initializers.Ones()
        table = TableConfig("t", ROWS, DIM, initializer=ones, keys=keys)
        return kind(
            FeatureConfig("f", table, **feature),
            optimizer=keras.optimizers.SGD(RATE),
            size_threshold=threshold,
            **kwargs,
        )

    return make


def _dynamic(**kwargs):
    return layers.DynamicEmbedding(
        DIM,
        input_dim=ROWS,
        embedding_initializer=keras.initializers.Ones(),
        optimizer=keras.optimizers.SGD(RATE),
        **kwargs,
    )


def _all2all(**kwargs):
    return layers.All2AllDenseEmbedding(
        ROWS,
        DIM,
        1,
        3,
        embedding_initializer=keras.initializers.Ones(),
        optimizer=keras.optimizers.SGD(RATE),
        **kwargs,
    )


def _masking(make, **kwargs):
    return functools.partial(make, **kwargs)


def _sequence(kind, threshold, keys=None):
    options = {"max_sequence_length": 3, "padding_value": -1}
    return _of_feature(kind, threshold, keys, **options)


_PARTIAL, _DISTRIBUTED = layers.PartialTPUEmbedding, layers.DistributedEmbedding
CASES = (
    Case(
        "Keras's Embedding",
        _keras,
        masked=_masking(_keras, mask_zero=True),
        padding=0,
    ),
    Case(
        "Embedding",
        _embedding,
        masked=_masking(_embedding, mask_zero=True),
        padding=0,
    ),
    Case(
        "PartialTPUEmbedding, large",
        _of_feature(_PARTIAL, 0),
        masked=_sequence(_PARTIAL, 0),
    ),
    Case(
        "PartialTPUEmbedding, small",
        _of_feature(_PARTIAL, None),
        masked=_sequence(_PARTIAL, None),
    ),
    Case(
        "PartialTPUEmbedding, DynamicKeys",
        _of_feature(_PARTIAL, 0, DynamicKeys()),
        masked=_sequence(_PARTIAL, 0, DynamicKeys()),
    ),
    Case(
        "DistributedEmbedding",
        _of_feature(_DISTRIBUTED, 0),
        (),
        masked=_sequence(_DISTRIBUTED, 0),
    ),
    Case("DynamicEmbedding", _dynamic),
    Case("All2AllDenseEmbedding", _all2all, (1, 3)),
)


def rows_after(steps, ids=IDS, targets=TARGETS):
    """The vectors of ids after steps of SGD on "mse", in numpy."""
    table = np.ones([ROWS, DIM])
    for _ in range(steps):
        gradients = 2 * (table[ids] - targets) / targets.size
        np.add.at(table, ids, -RATE * gradients)
    return table[ids]


def means_after(steps):
    """The means of ids that aren't padded, after steps as above, in numpy."""
    table, kept = np.ones([ROWS, DIM]), ~PADDED[..., None]
    share = kept / kept.sum(1, keepdims=True)
    for _ in range(steps):
        means = (table[IDS] * share).sum(1)
        gradients = 2 * (means - TARGETS[:, 0]) / means.size
        np.add.at(table, IDS, -RATE * gradients[:, None] * share)
    return (table[IDS] * share).sum(1)


def equal(vectors, steps, **kwargs):
    """Compares a case's vectors of its ids with numpy's."""
    kwargs = {"rtol": 1e-5, "atol": 1e-5, **kwargs}
    vectors = np.asarray(vectors, np.float32).reshape(TARGETS.shape)
    np.testing.assert_allclose(vectors, rows_after(steps), **kwargs)


def equal_means(means, steps):
    """Compares the means of a case's padded ids with numpy's."""
    np.testing.assert_allclose(
        np.asarray(means), means_after(steps), rtol=1e-5, atol=1e-5
    )


def functional(case, layer=None, batch_size=None, **kwargs):
    ids = keras.Input(case.shape, batch_size, dtype="int64")
    layer = layer or case.make(**kwargs)
    return keras.Model(ids, layer(ids))


def masked(case, kind="functional", batch_size=None):
    """A model, of one kind, of the means of ids that aren't padding."""
    ids = keras.Input((3,), batch_size, dtype="int64")
    layer, mean = case.masked(), keras.layers.GlobalAveragePooling1D()
    if kind == "Sequential":
        return keras.Sequential([ids, layer, mean])
    if kind == "subclassed":
        return Subclassed(layer, mean)
    return keras.Model(ids, mean(layer(ids)))


def fit(model, case, steps=1, ids=None, targets=None, **kwargs):
    """Trains a model; eagerly, as tracing takes long, unless told otherwise."""
    kwargs = kwargs or {"run_eagerly": True}
    model.compile(keras.optimizers.SGD(RATE), "mse", **kwargs)
    batch = (case.ids, case.targets) if ids is None else (ids, targets)
    data = tf.data.Dataset.from_tensors(batch)
    model.fit(data.repeat(steps), verbose=0)
    return model


def fit_masked(model, case, steps=1, **kwargs):
    """Trains a model of `masked`."""
    return fit(model, case, steps, case.padded_ids, TARGETS[:, 0], **kwargs)


@functools.cache
def trained(case):
    """A model after one step, which abilities only read."""
    return fit(functional(case), case, run_eagerly=False)


@functools.cache
def trained_masked(case):
    """A model of `masked` after one step, which abilities only read."""
    return fit_masked(masked(case), case, run_eagerly=False)


def layer_of(model):
    return model.layers[-1]


class Subclassed(keras.Model):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs
