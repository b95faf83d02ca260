"""The norm of the last update's gradient."""

import contextlib
import warnings

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import keras, layers
from layers_by_place import DIM, PLACES, ROWS
from process_tiers import on
from strategies.replicas import distribute
from tfrs_embed import (
    DynamicKeys,
    FeatureConfig,
    FileStorage,
    TableConfig,
    kernels,
)
from tfrs_embed.optimizers import Regularized
from training_helpers import (
    assert_trained_alike,
    differentiate,
    small_model,
    state,
)

pytestmark = on("keras:3", tier="more")

IDS = [[3, 7, 3, 20], [7, 1, 40, 3]]
OPTIONS = {
    **{k: v for k, v in PLACES.items() if k not in ("keras", "bfloat16")},
    "keys": {"keys": DynamicKeys()},
}


def make(strategy, optimizer="adagrad", folder=None, kind=None, **options):
    """A layer of tables "t", of a place, and "u", by row."""
    if folder is not None:
        options["storage"] = FileStorage(str(folder))
    tables = [
        TableConfig("t", ROWS, DIM, "uniform", **options),
        TableConfig("u", ROWS, 2 * DIM, "uniform"),
    ]
    with strategy.scope():
        layer = (kind or layers.PartialTPUEmbedding)(
            {t.name: FeatureConfig(t.name, t) for t in tables},
            optimizer=optimizer,
            **({} if kind else {"size_threshold": 0}),
        )
        layer.build(None)
    return layer


def loss_of(layer, ids):
    vectors = layer({"t": ids, "u": ids}, training=True)
    return tf.add_n([tf.reduce_sum(tf.sin(v)) for v in vectors.values()])


def trainer(strategy, layer, read=True):
    """Returns a function that trains once, and returns all replicas' norms."""

    def replica_step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(layer, ids)
        differentiate(tape, loss, layer.trainable_variables)
        return layer.gradient_norm() if read else 0.0

    run = tf.function(lambda ids: strategy.run(replica_step, (ids,)))
    world = strategy.num_replicas_in_sync
    return lambda ids: strategy.experimental_local_results(
        run(distribute(strategy, [tf.constant(ids)] * world))
    )


def expected_norm(strategy, layer, ids, tables):
    """The global norm of the gradients that the tables have as variables."""
    squares, world = 0.0, strategy.num_replicas_in_sync
    for name in tables:
        rows = np.asarray(state(layer)[f"{name}/parameters"], np.float32)
        gradient = np.zeros_like(rows)
        np.add.at(gradient, ids, world * np.cos(rows[ids]))
        squares += np.sum(gradient**2)
    return np.sqrt(squares)


def check(strategy, layer, step, ids, tables=("t", "u")):
    """Trains once; compares the norms."""
    expected = expected_norm(strategy, layer, ids, tables)
    norms = [float(norm) for norm in step(ids)]
    np.testing.assert_allclose(norms[0], expected, rtol=1e-5)
    assert set(norms) == {float(layer.gradient_norm())}


def load(layer):
    """Gives a layer's tables their first values."""
    rng = np.random.default_rng(0)
    for table in layer.tables.values():
        values = rng.normal(size=[ROWS, table.spec.dim])
        table.assign(range(ROWS), values.astype(np.float32))


@on("mirrored:2", tier="nightly")
@on(
    "mirrored:2",
    tier="more",
    when=lambda place, compiled: compiled and place in ("column", "hot"),
)
@on(
    "workers:2",
    tier="more",
    when=lambda place, compiled: (place, compiled) == ("row", True),
)
@pytest.mark.parametrize(
    ("place", "compiled"),
    [
        *((place, True) for place in OPTIONS),
        ("row", False),
        ("keys", False),
    ],
)
def test_it_is_the_global_norm_of_dense_gradients(
    strategy, place, compiled, files_folder
):
    folder = files_folder if place == "files" else None
    with contextlib.nullcontext() if compiled else kernels.disabled():
        layer = make(strategy, folder=folder, **OPTIONS[place])
        load(layer)
        assert np.isnan(layer.gradient_norm())
        step = trainer(strategy, layer)
        for ids in IDS:
            check(strategy, layer, step, ids)


@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("place", ["row", "keys"])
def test_measuring_changes_no_update(place):
    strategy, states = tf.distribute.get_strategy(), []
    for read in (True, False):
        layer = make(strategy, **OPTIONS[place])
        load(layer)
        if read:
            layer.gradient_norm()
        step = trainer(strategy, layer, read)
        for ids in IDS:
            step(ids)
        states.append(state(layer))
    assert_trained_alike(*states)


@on("mirrored:2", tier="more")
@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_it_is_before_the_optimizers_own_options(strategy, options):
    layer = make(strategy, Regularized("sgd", **options))
    assert np.isnan(layer.gradient_norm())
    step = trainer(strategy, layer)
    for ids in IDS:
        check(strategy, layer, step, ids)


def test_frozen_tables_have_no_part():
    strategy = tf.distribute.get_strategy()
    layer = make(strategy)
    layer.tables["t"].trainable = False
    assert np.isnan(layer.gradient_norm())
    check(strategy, layer, trainer(strategy, layer), IDS[0], ["u"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "xla"])
def test_it_is_read_eagerly_after_a_step(compiled):
    strategy = tf.distribute.get_strategy()
    layer = make(strategy)
    assert np.isnan(layer.gradient_norm())

    def train(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(layer, ids)
        differentiate(tape, loss, layer.trainable_variables)

    step = tf.function(train, jit_compile=True) if compiled else train
    for ids in IDS:
        expected = expected_norm(strategy, layer, ids, ("t", "u"))
        step(tf.constant(ids))
        np.testing.assert_allclose(layer.gradient_norm(), expected, rtol=1e-5)


def test_functions_that_can_not_measure_it():
    strategy = tf.distribute.get_strategy()
    layer = make(strategy)
    message = "'partial_tpu_embedding.*': gradient_norm is called for the first"
    with pytest.raises(RuntimeError, match=message):
        trainer(strategy, layer)(IDS[0])
    unread = trainer(strategy, layer, read=False)
    unread(IDS[0])
    with pytest.warns(UserWarning, match="functions that were traced before"):
        assert np.isnan(layer.gradient_norm())
    unread(IDS[0])
    assert np.isnan(layer.gradient_norm())
    step = trainer(strategy, layer)
    check(strategy, layer, step, IDS[0])
    # No norm of an earlier update.
    unread(IDS[0])
    assert np.isnan(layer.gradient_norm())
    check(strategy, layer, step, IDS[1])


def test_fit_measures_it_after_compile():
    layer = make(tf.distribute.get_strategy())
    model, data = small_model(keras, layer, ("t", "u"))
    model.compile("sgd", "mse")
    model.fit(data, verbose=0)
    with pytest.warns(UserWarning, match="model.compile again"):
        assert np.isnan(layer.gradient_norm())
    model.compile("sgd", "mse")
    norms = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: norms.append(
            float(layer.gradient_norm())
        )
    )
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    assert len(norms) == 2 and min(norms) > 0


def test_small_tables_have_no_part():
    table = TableConfig("s", 9, DIM)
    layer = layers.PartialTPUEmbedding(FeatureConfig("s", table), "sgd")
    assert float(layer.gradient_norm()) == 0


def test_a_restored_layer_has_no_norm_yet(tmp_path):
    strategy = tf.distribute.get_strategy()
    layer = make(strategy)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    assert np.isnan(layer.gradient_norm())
    step = trainer(strategy, layer)
    step(IDS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tf.train.Checkpoint(layer=layer).restore(path).assert_consumed()
        assert np.isnan(layer.gradient_norm())
    check(strategy, layer, step, IDS[0])
