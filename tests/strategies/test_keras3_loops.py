"""`tfrs_embed.keras3.fit` on replicas, against Keras's own on one device."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import keras, layer_of_one_table, layers
from process_tiers import on
from strategies.replicas import of_chief
from tfrs_embed import FeatureConfig, TableConfig
from training_helpers import tables_of

pytestmark = on("keras:3 mirrored:2", "keras:3 workers:2", tier="nightly")

# The last batch of 8 has one sample, so that a replica has none.
SAMPLES, BATCH = 17, 8


def make(sparse=False, **options):
    """A compiled model of two large tables and a small one."""
    kind = {"sparse" if sparse else "ragged": True}
    tables = {
        name: TableConfig(
            name, rows, 4, keras.initializers.RandomNormal(seed=rows)
        )
        for name, rows in (("user", 50), ("item", 70), ("hour", 5))
    }
    inputs = {
        "user": keras.Input([], dtype="int64", name="user"),
        "item": keras.Input([None], dtype="int64", name="item", **kind),
        "hour": keras.Input([], dtype="int64", name="hour"),
    }
    layer = layers.PartialTPUEmbedding(
        {name: FeatureConfig(name, table) for name, table in tables.items()},
        "adagrad",
        size_threshold=20,
    )
    vectors = layer(inputs)
    dense = keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.RandomNormal(seed=7),
        kernel_regularizer="l2",
    )
    model = keras.Model(
        inputs, dense(vectors["user"] * vectors["hour"] + vectors["item"])
    )
    options = {"optimizer": keras.optimizers.Adam(0.05), **options}
    model.compile(
        **{
            "loss": "mse",
            "metrics": ["mae", keras.metrics.AUC(name="auc")],
            **options,
        }
    )
    return model, layer


def data(weighted=False, sparse=False, drop_remainder=False):
    rng = np.random.default_rng(0)
    items = [rng.integers(0, 70, i % 4).tolist() for i in range(SAMPLES)]
    items = tf.ragged.constant(items, dtype=tf.int64)
    inputs = {
        "user": rng.integers(0, 50, SAMPLES),
        "item": items.to_sparse() if sparse else items,
        "hour": rng.integers(0, 5, SAMPLES),
    }
    labels = rng.integers(0, 2, [SAMPLES, 1]).astype(np.float32)
    weights = rng.uniform(size=SAMPLES).astype(np.float32)
    samples = (inputs, labels, weights) if weighted else (inputs, labels)
    return tf.data.Dataset.from_tensor_slices(samples).batch(
        BATCH, drop_remainder=drop_remainder
    )


def assert_equal(found, expected, loss, losses):
    assert list(losses) == list(loss)
    for name, values in loss.items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        (*tables_of(found[1]).values(), *found[0].trainable_weights),
        (*tables_of(expected[1]).values(), *expected[0].trainable_weights),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def unknown(batches):
    """The same batches in a dataset that doesn't know their number."""
    return batches.filter(lambda *_: True)


# Of 17 samples, one is left for the last batch, or dropped.
@on("keras:3 workers:2", tier="more", when=lambda steps: steps == 1)
@on("keras:3 mirrored:2", tier="more", when=lambda steps: steps == 2)
@pytest.mark.parametrize("steps", [1, 2], ids=["steps", "executions"])
def test_fit_equals_one_device(strategy, steps):
    if steps == 1:
        batches = data(drop_remainder=True)
        options = {"class_weight": {0: 0.5, 1: 3.0}}
    else:
        batches = data(weighted=True, sparse=True)
        options = {"validation_freq": 3}
    kind = {"sparse": steps == 2, "steps_per_execution": steps}
    options.update(epochs=3, validation_data=batches, verbose=0)
    expected = make(**kind)
    # Of an unknown number of batches Keras counts one too many.
    alone = expected[0].fit(batches, shuffle=False, **options).history
    with strategy.scope():
        found = make(**kind)
    options["validation_data"] = batches = unknown(batches)
    fit = layers.fit(found[0], batches, strategy, **options)
    assert_equal(found, expected, alone, fit.history)
    made = expected[0].optimizer.iterations.numpy()
    for each in strategy.experimental_local_results(
        found[0].optimizer.iterations.value
    ):
        assert each.numpy() == made
    ours = layers.evaluate(found[0], batches, strategy, verbose=0)
    theirs = {name: fit.history[f"val_{name}"][-1] for name in ours}
    assert ours == pytest.approx(theirs, abs=1e-6)


@on("keras:3 mirrored:2", tier="more")
@pytest.mark.parametrize("known", [True, False])
def test_uneven_batches_and_scalar_losses_are_those_of_one_device(
    strategy, known
):
    ids, labels = np.arange(17) % 11, np.arange(17.0)[:, np.newaxis]
    # The first worker, or replica, has fewer samples than the second one.
    parts = [np.arange(8), np.arange(8, 17)]

    def batches(numbers):
        found = tf.data.Dataset.from_tensor_slices(numbers).batch(4)
        found = found.map(lambda i: (tf.gather(ids, i), tf.gather(labels, i)))
        return found if known else unknown(found)

    def model():
        layer = layer_of_one_table("sgd", 11, 4)
        inputs = keras.Input([], dtype="int64")
        made = keras.Model(
            inputs, keras.layers.Dense(1, "linear", False)(layer(inputs))
        )
        made.layers[-1].set_weights([np.ones([4, 1])])
        made.compile(
            "sgd", lambda y, found: tf.reduce_mean(tf.square(y - found))
        )
        return made, layer

    def mine(context):
        if context.num_input_pipelines == 2:
            return batches(parts[context.input_pipeline_id])
        # Replicas take batches in turns, and the last one has none.
        first, second = (np.split(part[:8], 2) for part in parts)
        turns = np.concatenate([first[0], second[0], first[1], second[1], [16]])
        return batches(turns)

    expected = model()
    whole = [
        np.concatenate([part[i : i + 4] for part in parts]) for i in (0, 4, 8)
    ]
    losses = [expected[0].train_on_batch(ids[i], labels[i]) for i in whole]
    with strategy.scope():
        found = model()
    data = strategy.distribute_datasets_from_function(mine)
    fit = layers.fit(found[0], data, strategy, verbose=0)
    mean = np.average(losses, weights=[8, 8, 1])
    assert_equal(found, expected, {"loss": [mean]}, fit.history)


@on("keras:3 mirrored:2", tier="more")
def test_callbacks_act_as_on_one_device(strategy):
    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda i, _: 0.1 / (i + 1)),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=0, restore_best_weights=True
            ),
        ]

    options = {"epochs": 30, "validation_data": data(), "verbose": 0}
    expected = make()
    alone = expected[0].fit(
        data(), callbacks=callbacks(), shuffle=False, **options
    )
    with strategy.scope():
        found = make()
    fit = layers.fit(
        found[0], data(), strategy, callbacks=callbacks(), **options
    )
    assert 1 < len(fit.history["loss"]) < 30
    assert_equal(found, expected, alone.history, fit.history)


@on("keras:3 mirrored:2", tier="more")
def test_a_callback_may_evaluate(strategy):
    seen = []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            found = layers.evaluate(self.model, data(), strategy, verbose=0)
            seen.append(found["loss"])

    with strategy.scope():
        model, _ = make()
    fit = layers.fit(
        model,
        data(),
        strategy,
        epochs=3,
        callbacks=[Evaluates()],
        validation_data=data(),
        verbose=0,
    )
    np.testing.assert_allclose(seen[1:], fit.history["val_loss"][:-1])


@on("keras:3 workers:2", tier="more")
def test_the_first_worker_writes_files_and_all_go_on(strategy, tmp_path):
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    first = not several or strategy.cluster_resolver.task_id == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    shared = of_chief(strategy, mine)
    with strategy.scope():
        expected = make()
    layers.fit(expected[0], data(), strategy, epochs=4, verbose=0)

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def train(*more):
        with strategy.scope():
            model, layer = make()
        saved = keras.callbacks.ModelCheckpoint(str(mine / "{epoch}.keras"))
        callbacks = [
            # All read the first one's.
            keras.callbacks.BackupAndRestore(str(shared / "backup")),
            saved,
            keras.callbacks.CSVLogger(str(mine / "log.csv")),
            *more,
        ]
        layers.fit(
            model,
            data(),
            strategy,
            epochs=4,
            callbacks=callbacks,
            verbose=0,
        )
        assert saved.filepath == str(mine / "{epoch}.keras")
        return model, layer

    with pytest.raises(KeyboardInterrupt):
        train(Fails())
    if first:
        metadata = mine / "backup/training_metadata.json"
        assert json.loads(metadata.read_text())["epoch"] == 2
    found = train()
    assert_equal(found, expected, {}, {})
    names = {"1.keras", "2.keras", "3.keras", "4.keras", "log.csv"}
    assert {path.name for path in mine.iterdir()} == (names if first else set())
    tables = tables_of(found[1])  # Which takes all workers.
    if first:
        model = keras.models.load_model(mine / "4.keras")
        [layer] = [e for e in model.layers if isinstance(e, type(found[1]))]
        for name, table in tables_of(layer).items():
            np.testing.assert_array_equal(table, tables[name])


class Step(keras.Model):
    def train_step(self, batch):
        return {"own": tf.constant(1.0)}


def _errors(strategy):
    """What is refused: the arguments of fit, an error and its text."""
    with strategy.scope():
        model, _ = make()
        unbuilt, _ = make()
        unbuilt.compiled = False
        dense = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        dense.compile("sgd", "mse", jit_compile=True)
        inputs = keras.Input([2])
        own = Step(inputs, keras.layers.Dense(1)(inputs))
        own.compile("sgd", "mse")
    outside, _ = make()
    adam = keras.optimizers.Adam()
    with strategy.scope():
        mixed, _ = make(optimizer=adam)
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    floats = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
    logger = object()
    small = data().unbatch().batch(1)
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    yield (unbuilt, data()), {}, ValueError, "is not compiled"
    yield (outside, data()), {}, ValueError, "not made in the scope"
    yield (mixed, data()), {}, ValueError, "The optimizer of Model 'functional"
    yield (dense, floats), {}, ValueError, "jit_compile=True"
    yield (own, floats), {}, ValueError, r"a dict of its metrics, some of \['l"
    yield (model, 3), {}, TypeError, "data must be a tf.data.Dataset .* got int"
    yield (model, small), {}, ValueError, "have 1 samples, fewer than the 2"
    arguments = {"callbacks": [logger]}
    yield (model, data()), arguments, TypeError, re.escape(repr(logger))
    distributed = strategy.experimental_distribute_dataset(data())
    arguments = {"class_weight": {0: 1.0}}
    yield (model, distributed), arguments, ValueError, "is distributed already"
    arguments = {"validation_data": small}
    yield (model, data()), arguments, ValueError, "batches of validation_data"
    yield (logger, data()), {}, TypeError, "must be a keras.Model of Keras 3"
    yield (model, data(), other), {}, NotImplementedError, "OneDeviceStrategy"
    if several:
        task = strategy.cluster_resolver.task_id
        arguments = {"epochs": 2 + task}
        text = f"epochs is {2 + task} here, {3 - task} there"
        yield (model, data()), arguments, RuntimeError, text
        arguments = {"validation_data": None if task else data()}
        text = "validation_data is .* here, .* there"
        yield (model, data()), arguments, RuntimeError, text


@on("keras:3 mirrored:2", tier="more")
def test_errors_come_before_anything_is_trained(strategy):
    for arguments, more, error, text in _errors(strategy):
        model = arguments[0]
        weights = getattr(model, "get_weights", list)()
        if len(arguments) == 2:
            arguments = (*arguments, strategy)
        with pytest.raises(error, match=text):
            layers.fit(*arguments, verbose=0, **more)
        after = getattr(model, "get_weights", list)()
        for was, now in zip(weights, after, strict=True):
            np.testing.assert_array_equal(was, now)


@on("keras:3 workers:2", tier="more")
def test_keras_own_fit_says_what_to_call(strategy):
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    with strategy.scope():
        model, _ = make()
    # Keras 3.15 raises an error of its own, with the text of ours in it.
    errors = NotImplementedError, RuntimeError
    with pytest.raises(errors, match=r"tfrs_embed.keras3.fit\("):
        model.fit(data(), verbose=0)
    with strategy.scope():
        model, _ = make(steps_per_execution=2)
    with pytest.raises(NotImplementedError, match="steps_per_execution=1 only"):
        model.predict(data(), verbose=0)
    model.steps_per_execution = 1
    whole = data().unbatch().batch(BATCH, drop_remainder=True)
    assert len(model.predict(whole, verbose=0)) >= BATCH


@on("keras:3 mirrored:2", tier="more")
def test_keras_exports_the_rows_of_all_replicas(strategy, tmp_path):
    with strategy.scope():
        layer = layer_of_one_table("sgd", 50, 4)
        ids = keras.Input([], dtype="int64")
        model = keras.Model(ids, layer(ids))
    path = str(tmp_path / "model")
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        with pytest.raises(RuntimeError, match=r"tfrs_embed.serving.export"):
            model.export(path, verbose=False)
        return
    model.export(path, verbose=False)
    loaded = tf.saved_model.load(path)
    np.testing.assert_array_equal(
        loaded.serve(tf.range(50, dtype=tf.int64)), tables_of(layer)["t"]
    )
