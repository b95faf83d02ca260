"""What layers can do in Keras on one device: the abilities, as data.

An ability is a function of a `Case` that raises an error if the layer lacks it.
Numbers are compared with numpy's.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import pickle
import re
import tempfile
import warnings
from unittest import mock

import numpy as np
import tensorflow as tf

from abilities.cases import (
    DIM,
    IDS,
    RATE,
    ROWS,
    NoMasksError,
    Subclassed,
    equal,
    equal_means,
    fit,
    fit_masked,
    functional,
    layer_of,
    masked,
    rows_after,
    trained,
    trained_masked,
)
from abilities.saving import (
    EACH_CHANGE,
    WAYS,
    loads,
    loads_afresh,
    loads_masked,
)
from keras_under_test import keras

ABILITIES = {}


#: Abilities whose checks trace much.
COSTLY = (
    "a lookup in tf.function(jit_compile=True)",
    "a step in tf.function(jit_compile=True)",
    "a tf.function of one's own that makes the variables",
    "a training loop in a tf.function",
    "fit under OneDeviceStrategy",
    "jit_compile=True",
    "save as a SavedModel",
    "steps_per_execution=2",
)


def is_costly(title, case):
    """Whether only `make nightly` runs a cell."""
    if "fresh" in title:  # test_two_keras_versions.py loads by day.
        return True
    if case.name in EACH_CHANGE:
        return False
    if title.startswith("a mask"):
        return True
    return title in COSTLY and case.name != "PartialTPUEmbedding, DynamicKeys"


def ability(title):
    return lambda check: ABILITIES.setdefault(title, check)


def masking(title):
    """Registers an ability of layers that have masks."""

    def register(check):
        def has(case):
            if not case.masked:
                raise NoMasksError
            check(case)

        return ability(title)(has)

    return register


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


for _title in WAYS:
    ABILITIES[_title] = functools.partial(loads, _title)
for _title in WAYS:
    ABILITIES[f"{_title}, load in a fresh process"] = functools.partial(
        loads_afresh, _title
    )


@ability("mixed_bfloat16")
def _(case):
    vectors = functional(case, dtype="mixed_bfloat16")(case.ids)
    assert vectors.dtype == tf.bfloat16, vectors.dtype


@ability("jit_compile=True")
def _(case):
    with warnings.catch_warnings():
        # Keras 3 turns it off.
        warnings.filterwarnings("error", "Model doesn't support `jit_compile")
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


@ability("a step in tf.function(jit_compile=True)")
def _(case):
    layer = layer_of(functional(case))
    tf.function(lambda: _step(case, layer), jit_compile=True)()
    equal(layer(tf.constant(case.ids)), 1)


@ability("a lookup in tf.function(jit_compile=True)")
def _(case):
    layer = layer_of(trained(case))
    equal(tf.function(layer, jit_compile=True)(tf.constant(case.ids)), 1)


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
    model = functional(case)
    layer_of(model).trainable = False
    # Keys without rows have zeros, and frozen tables give them none.
    before = np.asarray(model(case.ids))
    np.testing.assert_array_equal(fit(model, case)(case.ids), before)
    layer_of(model).trainable = True
    fit(model, case)
    layer_of(model).trainable = False
    equal(fit(model, case)(case.ids), 1)


@ability("frozen, then unfrozen, in fit")
def _(case):
    model = functional(case)
    layer_of(model).trainable = False
    fit(model, case)
    layer_of(model).trainable = True
    equal(fit(model, case)(case.ids), 1)


@ability("fit under OneDeviceStrategy")
def _(case):
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = fit(functional(case), case)
    equal(model(case.ids), 1)


for _kind in ("functional", "Sequential", "subclassed"):
    masking(f"a mask, in a {_kind} model")(
        lambda case, kind=_kind: equal_means(
            fit_masked(masked(case, kind), case)(case.padded_ids), 1
        )
    )


@masking("a mask, traced")
def _(case):
    equal_means(trained_masked(case)(case.padded_ids), 1)


@masking("a mask, in a model that is called in TimeDistributed")
def _(case):
    days = keras.Input((2, 3), dtype="int64")
    model = keras.layers.TimeDistributed(trained_masked(case))
    equal_means(keras.Model(days, model(days))(case.padded_ids[None])[0], 1)


@masking("a mask, clone_model")
def _(case):
    model = keras.models.clone_model(trained_masked(case))
    equal_means(fit_masked(model, case)(case.padded_ids), 1)


@masking("a mask, copy.deepcopy of a trained model")
def _(case):
    equal_means(copy.deepcopy(trained_masked(case))(case.padded_ids), 1)


@masking("a mask, pickle of a trained model")
def _(case):
    model = pickle.loads(pickle.dumps(trained_masked(case)))
    equal_means(model(case.padded_ids), 1)


for _title in WAYS:
    masking(f"a mask, {_title}")(functools.partial(loads_masked, _title))


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


@ability("totals of summary()")
def _(case):
    model, lines = trained(case), []
    model.summary(print_fn=lines.append)
    totals = re.findall(
        r"^ *(?:Non-t|T)rainable params: ([\d,]+)", "\n".join(lines), re.M
    )
    sizes = [np.size(weight) for weight in model.get_weights()]
    assert sum(int(n.replace(",", "")) for n in totals) == sum(sizes)


@ability("set_weights(get_weights()) of another model")
def _(case):
    model = functional(case)
    model.set_weights(trained(case).get_weights())
    equal(model(case.ids), 1)


@ability("TensorBoard's histograms and images")
def _(case):
    model, found = trained(case), {}
    # TensorFlow's own need TensorBoard, which isn't installed.
    modules = (
        importlib.import_module("tensorflow.summary"),
        tf.compat.v2.summary,
    )
    written = {"histogram": found.__setitem__, "image": _draw, "scalar": _draw}
    with contextlib.ExitStack() as stack:
        for module, (name, write) in itertools.product(
            modules, written.items()
        ):

            def summary(tag, data, write=write, **_):
                write(tag, np.asarray(data))

            stack.enter_context(mock.patch.object(module, name, summary))
        callback = keras.callbacks.TensorBoard(
            stack.enter_context(tempfile.TemporaryDirectory()),
            histogram_freq=1,
            write_images=True,
        )
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, {})
        callback.on_train_end()
    for data, weight in zip(found.values(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(data, weight)


def _draw(_, data):
    # TensorFlow's encoder of PNG ends the process.
    if not data.size:
        raise ValueError("an image without rows ends the process")
