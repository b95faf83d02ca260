"""Keras 3's own conventions: what its models and optimizers do with layers.

What holds for both versions is in the other files, which run on either.
"""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import keras, layers, only_keras_3
from process_tiers import nightly, on
from tfrs_embed import FeatureConfig, TableConfig
from training_helpers import tables_of

pytestmark = [
    only_keras_3("its own conventions are in test_keras.py"),
    on("keras:3"),
]

BATCH, STEPS = 16, 4


def make_layer(optimizer="sgd", **kwargs):
    """A large table of two features, a small one of two."""
    tables = {
        name: TableConfig(
            name, rows, 4, keras.initializers.RandomUniform(seed=rows)
        )
        for name, rows in (("large", 60), ("small", 7))
    }
    return layers.PartialTPUEmbedding(
        {
            "dense": FeatureConfig("dense", tables["large"]),
            "ragged": FeatureConfig("ragged", tables["large"]),
            "sparse": FeatureConfig("sparse", tables["small"]),
            "short": FeatureConfig("short", tables["small"]),
        },
        optimizer,
        size_threshold=20,
        **kwargs,
    )


def make_data(number=BATCH * STEPS, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, number)
    cells = np.sort(rng.choice(number * 5, number, replace=False))
    inputs = {
        "dense": tf.constant(rng.integers(0, 60, number)),
        "ragged": tf.RaggedTensor.from_row_lengths(
            rng.integers(0, 60, lengths.sum()), lengths
        ),
        "sparse": tf.SparseTensor(
            np.stack([cells // 5, cells % 5], 1),
            rng.integers(0, 7, number),
            [number, 5],
        ),
        "short": tf.constant(rng.integers(0, 7, number)),
    }
    return inputs, tf.constant(rng.normal(size=[number, 1]), tf.float32)


def batches(seed=0):
    return tf.data.Dataset.from_tensor_slices(make_data(seed=seed)).batch(BATCH)


def sgd():
    return keras.optimizers.SGD(0.1)


def make_head():
    return keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.GlorotUniform(seed=4),
        name="head",
    )


def functional(layer):
    inputs = {
        "dense": keras.Input((), dtype="int64", name="dense"),
        "ragged": keras.Input(
            (None,), dtype="int64", ragged=True, name="ragged"
        ),
        "sparse": keras.Input((5,), dtype="int64", sparse=True, name="sparse"),
        "short": keras.Input((), dtype="int64", name="short"),
    }
    vectors = keras.layers.Concatenate()(list(layer(inputs).values()))
    return keras.Model(inputs, make_head()(vectors))


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embeddings = layer
        self.dense = make_head()

    def call(self, inputs):
        vectors = self.embeddings(inputs)
        return self.dense(tf.concat(list(vectors.values()), -1))


class OwnStep(Subclassed):
    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(
                inputs, labels, self(inputs, training=True)
            )
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_weights
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


def by_hand(layer, epochs=1):
    """The tables after plain steps, and the head's kernel."""
    head = make_head()
    for _ in range(epochs):
        for inputs, labels in batches():
            with tf.GradientTape() as tape:
                vectors = tf.concat(list(layer(inputs).values()), -1)
                loss = tf.reduce_mean((head(vectors) - labels) ** 2)
            weights = [
                *(w.value for w in layer.trainable_weights),
                head.kernel.value,
                head.bias.value,
            ]
            for weight, gradient in zip(
                weights, tape.gradient(loss, weights), strict=True
            ):
                weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return tables_of(layer), head.kernel.numpy()


def assert_close(found, expected, rtol=1e-4, atol=1e-6):
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=rtol, atol=atol, err_msg=name
        )


def assert_trained(model, layer, epochs=1, **tolerance):
    tables, kernel = by_hand(make_layer(sgd()), epochs)
    assert_close(tables_of(layer), tables, **tolerance)
    np.testing.assert_allclose(
        model.layers[-1].kernel, kernel, rtol=1e-3, atol=1e-5
    )


LOOPS = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 2},
    "compiled if it can be": {"jit_compile": "auto"},
}


@nightly(
    lambda model_of, loop: (
        (model_of, loop)
        in (
            (functional, "eager"),
            (functional, "compiled if it can be"),
            (Subclassed, "graph"),
            (Subclassed, "several steps"),
            (OwnStep, "compiled if it can be"),
        )
    )
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model_of", [functional, Subclassed, OwnStep])
def test_fit_trains_dense_ragged_and_sparse_ids(model_of, loop):
    layer = make_layer(sgd())
    model = model_of(layer)
    # Nothing has been called: what is no functional model is built by this.
    model.compile(sgd(), "mse", **LOOPS[loop])
    model.fit(batches(), shuffle=False, verbose=0)
    assert not model.jit_compile
    assert int(layer.step) == STEPS
    assert_trained(model, layer)


@pytest.mark.parametrize("first", ["evaluate", "predict", "train_on_batch"])
def test_a_model_that_another_loop_builds_goes_on_as_fit_does(first):
    layer = make_layer(sgd())
    model = Subclassed(layer)
    model.compile(sgd(), "mse")
    before = tables_of(layer)
    if first == "train_on_batch":
        for inputs, labels in batches():
            model.train_on_batch(inputs, labels)
        assert_trained(model, layer)
        return
    getattr(model, first)(batches(), verbose=0)
    assert_close(tables_of(layer), before, rtol=0)
    model.fit(batches(), shuffle=False, verbose=0)
    assert_trained(model, layer)


def test_a_model_is_built_while_keras_traces_it_for_a_strategy():
    # There it makes no variables of its own. It takes all ids for dense ones.
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        table = TableConfig("t", 60, 4, "uniform")
        layer = layers.PartialTPUEmbedding(
            FeatureConfig("f", table), "sgd", size_threshold=20
        )
        small = layers.PartialTPUEmbedding(
            FeatureConfig("f", table), "sgd", size_threshold=None
        )
        dense = keras.layers.Dense(1)

        class Towers(keras.Model):
            def __init__(self):
                super().__init__()
                self.parts = [layer, small, dense]

            def call(self, inputs):
                return dense(layer(inputs) * small(inputs))

        model = Towers()
        model.compile("sgd", "mse")
    ids = np.arange(60)
    model.fit(ids, np.ones([60, 1]), batch_size=20, verbose=0)
    assert int(layer.step) == 3
    before = tables_of(layer), tables_of(small)
    model.fit(ids, np.ones([60, 1]), batch_size=20, verbose=0)
    for each, was in zip((layer, small), before, strict=True):
        assert np.abs(tables_of(each)["t"] - was["t"]).max() > 0


def test_early_stopping_restores_the_best_tables():
    layer = make_layer("adam")
    model = functional(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensor_slices(make_data()).batch(BATCH)
    best = []

    class Remember(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            best.append((logs["val_loss"], tables_of(layer), int(layer.step)))
            if epoch == 1:  # From here on it gets worse.
                table = layer.embedding_tables["large"]
                table.assign(table + 50.0)

    stop = keras.callbacks.EarlyStopping(
        "val_loss", patience=2, restore_best_weights=True
    )
    # First: EarlyStopping must find what there was.
    model.fit(
        data,
        validation_data=data,
        epochs=9,
        shuffle=False,
        verbose=0,
        callbacks=[stop, Remember()],
    )
    found = min(best, key=lambda each: each[0])
    assert len(best) == 4 and found is best[1]
    assert_close(tables_of(layer), found[1], rtol=0)
    assert int(layer.step) == found[2]


def test_weights_are_tables_slots_and_the_step_and_can_be_set():
    layer = make_layer("adagrad")
    model = functional(layer)
    model.compile("sgd", "mse")
    model.fit(batches(), shuffle=False, verbose=0)
    names = {weight.path.rpartition("/")[2] for weight in layer.weights}
    assert names >= {"large_parameters", "large_accumulators", "step"}
    other = make_layer("adagrad")
    another = functional(other)
    another.set_weights(model.get_weights())
    assert_close(tables_of(other), tables_of(layer), rtol=0)
    np.testing.assert_array_equal(
        other.tables["large"].slots["accumulators"],
        layer.tables["large"].slots["accumulators"],
    )
    assert int(other.step) == STEPS
    inputs, _ = make_data()
    np.testing.assert_array_equal(another(inputs), model(inputs))


def test_an_exported_model_needs_nothing_of_this_library(tmp_path):
    layer = make_layer("adam")
    inputs = {
        name: keras.Input((3,), dtype="int64", name=name)
        for name in ("dense", "ragged", "sparse", "short")
    }
    vectors = keras.layers.Concatenate()(list(layer(inputs).values()))
    model = keras.Model(inputs, make_head()(vectors))
    model.export(str(tmp_path / "model"), verbose=False)
    ids = {name: np.array([[1, 2, 6], [0, 0, 5]]) for name in inputs}
    np.savez(tmp_path / "ids.npz", **ids)
    code = """if True:
        import sys
        import numpy as np
        import tensorflow as tf
        served = tf.saved_model.load(sys.argv[1] + "/model")
        found = served.serve(dict(np.load(sys.argv[1] + "/ids.npz")))
        np.save(sys.argv[1] + "/found.npy", found)
        assert "tfrs_embed" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    found = np.load(tmp_path / "found.npy")
    assert found.shape == (2, 3, 1)
    np.testing.assert_allclose(found, model(ids), rtol=1e-5, atol=1e-6)


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@nightly(lambda model_of: model_of is Subclassed)
@pytest.mark.parametrize("model_of", [functional, Subclassed, OwnStep])
def test_compiling_for_mixed_float16_scales_no_tables_gradient(
    mixed_float16, model_of
):
    layer = make_layer(sgd())
    model = model_of(layer)
    model.compile(sgd(), "mse")
    assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    model.fit(batches(), shuffle=False, verbose=0)
    assert layer.compute_dtype == "float16"
    keras.config.set_dtype_policy("float32")
    assert_trained(model, layer, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("model_of", [functional, OwnStep])
def test_an_overflow_skips_a_step_of_the_tables_too(mixed_float16, model_of):
    layer = make_layer("adagrad")
    before = tables_of(layer)
    model = model_of(layer)
    model.compile(
        keras.mixed_precision.LossScaleOptimizer(sgd(), initial_scale=2.0**40),
        "mse",
    )
    [(inputs, labels)] = batches().take(1)
    data = tf.data.Dataset.from_tensors((inputs, labels * 1e4))
    model.fit(data, shuffle=False, verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2.0**39
    assert_close(tables_of(layer), before, rtol=0)
    assert int(layer.step) == 0
    model.optimizer.dynamic_scale.assign(2.0)
    model.fit(batches(), shuffle=False, verbose=0)
    assert int(layer.step) == STEPS
    after = tables_of(layer)
    for name, table in before.items():
        assert np.isfinite(after[name]).all()
        assert np.abs(after[name] - table).max() > 1e-4, name


@pytest.mark.parametrize("model_of", [functional, Subclassed, OwnStep])
def test_a_fixed_loss_scale_reaches_no_table(model_of):
    layer = make_layer(sgd())
    model = model_of(layer)
    model.compile(keras.optimizers.SGD(0.1, loss_scale_factor=256.0), "mse")
    model.fit(batches(), shuffle=False, verbose=0)
    assert_trained(model, layer)


def test_a_scheduler_of_the_models_optimizer_sets_its_tables_rate():
    optimizer = sgd()
    layer = make_layer(optimizer)
    model = functional(layer)
    model.compile(optimizer, "mse")
    model.fit(
        batches(),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda i, _: [0.1, 0.0][i])
        ],
    )
    assert int(layer.step) == 2 * STEPS
    assert_trained(model, layer)


def test_a_tables_schedule_follows_its_own_steps():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [STEPS - 1], [0.1, 0.0]
    )
    layer = make_layer(keras.optimizers.SGD(schedule))
    model = functional(layer)
    model.compile(sgd(), "mse")
    model.fit(batches(), shuffle=False, verbose=0)
    assert_trained(model, layer)
    before = tables_of(layer)
    model.fit(batches(), shuffle=False, verbose=0)
    after = tables_of(layer)
    np.testing.assert_array_equal(after["large"], before["large"])
    assert np.abs(after["small"] - before["small"]).max() > 1e-4


def test_keras_random_seed_gives_equal_tables():
    def tables():
        keras.utils.set_random_seed(7)
        configs = [TableConfig(f"t{n}", n, 3) for n in (60, 50, 6)]
        layer = layers.PartialTPUEmbedding(
            [FeatureConfig(t.name, t) for t in configs],
            "sgd",
            size_threshold=20,
        )
        return tables_of(layer)

    first, second = tables(), tables()
    assert_close(second, first, rtol=0)
    assert not np.array_equal(first["t60"][:50], first["t50"])


def test_an_activity_regularizer_adds_to_the_loss():
    losses = []
    for regularizer in (None, keras.regularizers.L2(0.5)):
        model = functional(make_layer(activity_regularizer=regularizer))
        model.compile("sgd", "mse")
        losses.append(model.evaluate(batches(), verbose=0))
    assert losses[1] > losses[0] + 1e-4


def test_arrays_beside_tensors_are_ids():
    layer = make_layer()
    inputs, _ = make_data()
    expected = layer(inputs)
    mixed = {**inputs, "dense": inputs["dense"].numpy()}
    weights = {
        "dense": None,
        "ragged": None,
        "sparse": None,
        "short": np.ones(BATCH * STEPS, np.float32),
    }
    assert_close(layer(mixed, weights=weights), expected)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_that_a_batch_has_twice_gets_the_sum_of_its_gradients(
    kind, scaled
):
    options = {"loss_scale_factor": 8.0} if scaled else {}
    optimizer = getattr(keras.optimizers, kind)(0.1, clipnorm=5.0, **options)
    layer = layers.Embedding(6, 2, embeddings_initializer="ones")
    layer.build(None)
    optimizer.build(layer.trainable_variables)
    dense = keras.Variable(np.ones([6, 2], "float32"))
    expected = getattr(keras.optimizers, kind)(0.1, clipnorm=5.0)
    expected.build([dense])
    ids = tf.constant([1, 1, 2, 1])
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(layer(ids) ** 3))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables))
        with tf.GradientTape() as tape:
            rows = tf.matmul(tf.one_hot(ids, 6), dense.value)
            loss = tf.reduce_sum(rows**3)
        expected.apply([tape.gradient(loss, dense.value)])
    np.testing.assert_allclose(layer.embeddings, dense, rtol=1e-5)
    assert np.abs(np.array(dense)[1] - 1.0).min() > 0.05
