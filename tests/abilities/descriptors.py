"""What layers can do in Keras: the layers and the abilities, as data.

An ability is a function of a `Case` that raises an error if the layer lacks it.
Numbers are compared with `rows_after`, which is numpy; Keras's own `Embedding`
goes through the same functions.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fronts import NUMBER, keras, layers
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig

ROWS, DIM, RATE = 20, 2, 2.0
IDS = np.array([[1, 2, 3], [4, 1, 5]])
TARGETS = np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 10


class Case(NamedTuple):
    """A layer: its name, how it is made, and the shape of a sample's ids."""

    name: str
    make: Callable
    shape: tuple = (3,)

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


def _of_feature(kind, threshold, keys=None):
    def make(**kwargs):
        ones = keras.initializers.Ones()
        table = TableConfig("t", ROWS, DIM, initializer=ones, keys=keys)
        return kind(
            FeatureConfig("f", table),
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


_PARTIAL = layers.PartialTPUEmbedding
CASES = (
    Case("Keras's Embedding", _keras),
    Case("Embedding", _embedding),
    Case("PartialTPUEmbedding, large", _of_feature(_PARTIAL, 0)),
    Case("PartialTPUEmbedding, small", _of_feature(_PARTIAL, None)),
    Case(
        "PartialTPUEmbedding, DynamicKeys",
        _of_feature(_PARTIAL, 0, DynamicKeys()),
    ),
    Case(
        "DistributedEmbedding", _of_feature(layers.DistributedEmbedding, 0), ()
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


def equal(vectors, steps, **kwargs):
    """Compares a case's vectors of its ids with numpy's."""
    kwargs = {"rtol": 1e-5, "atol": 1e-5, **kwargs}
    vectors = np.asarray(vectors, np.float32).reshape(TARGETS.shape)
    np.testing.assert_allclose(vectors, rows_after(steps), **kwargs)


def functional(case, layer=None, **kwargs):
    ids = keras.Input(case.shape, dtype="int64")
    layer = layer or case.make(**kwargs)
    return keras.Model(ids, layer(ids))


def fit(model, case, steps=1, **kwargs):
    """Trains a model; eagerly, as tracing takes long, unless told otherwise."""
    kwargs = kwargs or {"run_eagerly": True}
    model.compile(keras.optimizers.SGD(RATE), "mse", **kwargs)
    data = tf.data.Dataset.from_tensors((case.ids, case.targets))
    model.fit(data.repeat(steps), verbose=0)
    return model


_trained = {}


def trained(case):
    """A model after one step, which abilities only read."""
    if case.name not in _trained:
        _trained[case.name] = fit(functional(case), case, run_eagerly=False)
    return _trained[case.name]


def layer_of(model):
    return model.layers[-1]


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embedding = layer

    def call(self, inputs):
        return self.embedding(inputs)


ABILITIES = {}


#: Abilities whose checks trace much.
COSTLY = (
    "a tf.function of one's own that makes the variables",
    "a training loop in a tf.function",
    "fit under OneDeviceStrategy",
    "jit_compile=True",
    "save as a SavedModel",
    "steps_per_execution=2",
)
#: The layers whose costly abilities each change's tests check.
EACH_CHANGE = (
    "Embedding",
    "PartialTPUEmbedding, large",
    "PartialTPUEmbedding, DynamicKeys",
)


def is_costly(title, case):
    """Whether only `make nightly` runs a cell."""
    return title in COSTLY and case.name not in EACH_CHANGE


def ability(title):
    return lambda check: ABILITIES.setdefault(title, check)


@ability("train in a functional model, traced")
def _(case):
    equal(trained(case)(case.ids), 1)


@ability("train in a Sequential model, run_eagerly")
def _(case):
    start = keras.Input(case.shape, dtype="int64")
    model = keras.Sequential([start, case.make()])
    equal(fit(model, case)(case.ids), 1)


@ability("train in a subclassed model")
def _(case):
    equal(fit(Subclassed(case.make()), case)(case.ids), 1)


@ability("be called twice in one model")
def _(case):
    inputs = [keras.Input(case.shape, dtype="int64") for _ in range(2)]
    layer = case.make()
    model = keras.Model(inputs, [layer(each) for each in inputs])
    for each in model([case.ids, case.ids], training=True):
        equal(each, 0)


@ability("be in TimeDistributed")
def _(case):
    ids = keras.Input(case.ids.shape, dtype="int64")
    model = keras.Model(ids, keras.layers.TimeDistributed(case.make())(ids))
    equal(model(case.ids[None], training=True)[0], 0)


@ability("compute_output_shape")
def _(case):
    shape = case.make().compute_output_shape((None, *case.shape))
    assert tuple(shape) == (None, *case.shape, DIM), shape


@ability("compute_mask")
def _(case):
    assert case.make().compute_mask(tf.constant(case.ids)) is None


@ability("count_params")
def _(case):
    assert layer_of(trained(case)).count_params() == ROWS * DIM


@ability("from_config(get_config())")
def _(case):
    layer = case.make()
    again = type(layer).from_config(layer.get_config())
    equal(again(tf.constant(case.ids), training=True), 0)


@ability("clone_model")
def _(case):
    model = keras.models.clone_model(trained(case))
    equal(fit(model, case)(case.ids), 1)


@ability("copy.deepcopy of a layer that isn't built")
def _(case):
    equal(fit(functional(case, copy.deepcopy(case.make())), case)(case.ids), 1)


@ability("copy.deepcopy of a trained layer")
def _(case):
    equal(copy.deepcopy(layer_of(trained(case)))(tf.constant(case.ids)), 1)


@ability("copy.deepcopy of a trained model")
def _(case):
    equal(copy.deepcopy(trained(case))(case.ids), 1)


@ability("pickle of a trained layer")
def _(case):
    layer = pickle.loads(pickle.dumps(layer_of(trained(case))))
    equal(layer(tf.constant(case.ids)), 1)


@ability("pickle of a trained model")
def _(case):
    equal(pickle.loads(pickle.dumps(trained(case)))(case.ids), 1)


def _saves(title, name, save, load):
    def check(case):
        with tempfile.TemporaryDirectory() as folder:
            save(trained(case), f"{folder}/{name}")
            equal(load(case, f"{folder}/{name}")(case.ids), 1)

    ABILITIES[title] = check


def _load_model(_, path):
    return keras.models.load_model(path, compile=False)


def _load_weights(case, path):
    model = functional(case)
    model.load_weights(path)
    return model


def _restore(case, path):
    model = functional(case)
    status = tf.train.Checkpoint(model=model).restore(path + "-1")
    status.assert_existing_objects_matched()
    return model


def _serve(_, path):
    loaded = tf.saved_model.load(path)
    return lambda ids: loaded.serve(tf.constant(ids))


_saves("save as .keras", "m.keras", lambda m, p: m.save(p), _load_model)
_saves("save as .h5", "m.h5", lambda m, p: m.save(p), _load_model)
_saves(
    "save_weights as .weights.h5",
    "m.weights.h5",
    lambda m, p: m.save_weights(p),
    _load_weights,
)
_saves(
    "tf.train.Checkpoint",
    "m",
    lambda m, p: tf.train.Checkpoint(model=m).save(p),
    _restore,
)
_saves("model.export", "m", lambda m, p: m.export(p), _serve)
if NUMBER == 2:
    _saves("save as a SavedModel", "m", lambda m, p: m.save(p), _load_model)


@ability("mixed_bfloat16")
def _(case):
    vectors = functional(case, dtype="mixed_bfloat16")(case.ids)
    assert vectors.dtype == tf.bfloat16, vectors.dtype


@ability("jit_compile=True")
def _(case):
    equal(fit(functional(case), case, jit_compile=True)(case.ids), 1)


@ability("steps_per_execution=2")
def _(case):
    model = fit(functional(case), case, 2, steps_per_execution=2)
    equal(model(case.ids), 2)


def _step(case, layer):
    with tf.GradientTape() as tape:
        vectors = layer(tf.constant(case.ids))
        loss = tf.reduce_mean((vectors - case.targets) ** 2)
    weights = layer.trainable_variables
    for weight, gradient in zip(
        weights, tape.gradient(loss, weights), strict=True
    ):
        weight.assign_sub(RATE * tf.convert_to_tensor(gradient))


@ability("a loop of one's own, eager")
def _(case):
    layer = layer_of(functional(case))
    _step(case, layer)
    equal(layer(tf.constant(case.ids)), 1)


@ability("a tf.function of one's own that makes the variables")
def _(case):
    layer = case.make()
    tf.function(lambda: _step(case, layer))()
    equal(layer(tf.constant(case.ids)), 1)


@ability("a training loop in a tf.function")
def _(case):
    layer = layer_of(functional(case))

    @tf.function
    def train():
        for _ in tf.range(2):
            _step(case, layer)

    train()
    equal(layer(tf.constant(case.ids)), 2)


@ability("tf.cond")
def _(case):
    layer, ids = layer_of(trained(case)), tf.constant(case.ids)
    look_up = tf.function(
        lambda yes: tf.cond(
            yes, lambda: layer(ids), lambda: tf.zeros([*ids.shape, DIM])
        )
    )
    equal(look_up(tf.constant(True)), 1)


@ability("tf.map_fn")
def _(case):
    layer, ids = layer_of(trained(case)), tf.constant(case.ids[:, None])
    equal(tf.map_fn(layer, ids, fn_output_signature=tf.float32), 1)


@ability("tf.vectorized_map")
def _(case):
    layer, ids = layer_of(trained(case)), tf.constant(case.ids[:, None])
    equal(tf.vectorized_map(layer, ids), 1)


@ability("tf.data's map")
def _(case):
    layer = layer_of(trained(case))
    data = tf.data.Dataset.from_tensors(case.ids).map(layer)
    equal(next(iter(data)), 1)


@ability("frozen in fit")
def _(case):
    layer = case.make()
    model = functional(case, layer)
    layer.trainable = False
    # New keys get rows in training only.
    equal(fit(model, case)(case.ids, training=True), 0)


@ability("frozen, then unfrozen, in fit")
def _(case):
    layer = case.make()
    model = functional(case, layer)
    layer.trainable = False
    fit(model, case)
    layer.trainable = True
    equal(fit(model, case)(case.ids), 1)


@ability("fit under OneDeviceStrategy")
def _(case):
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = fit(functional(case), case)
    equal(model(case.ids), 1)


def _takes(title, convert):
    def check(case):
        vectors = layer_of(trained(case))(convert(case.ids))
        if isinstance(vectors, tf.RaggedTensor):
            vectors = vectors.to_tensor()
        if tuple(vectors.shape) == (2, DIM):  # Combined, by "mean".
            return np.testing.assert_allclose(
                vectors, rows_after(1).mean(1), rtol=1e-5
            )
        return equal(vectors, 1)

    ABILITIES[title] = check


for _dtype in ("int8", "uint8", "int16", "int32", "uint32", "uint64"):
    _takes(f"ids of {_dtype}", lambda ids, d=_dtype: tf.constant(ids, d))
for _dtype in ("float32", "float64"):
    _takes(f"ids of {_dtype}", lambda ids, d=_dtype: tf.constant(ids, d))
_takes("ids in numpy", lambda ids: ids)
_takes("ids in lists", lambda ids: ids.tolist())
_takes("ragged ids", lambda ids: tf.RaggedTensor.from_tensor(IDS))
_takes("sparse ids", lambda ids: tf.sparse.from_dense(IDS))
