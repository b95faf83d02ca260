"""What steps, calls and models do to tables with `DynamicKeys`, and don't."""

import gc
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_under_test
import tfrs_embed
from dynamic_layers import normal, train, truncated, uniform
from keras_under_test import keras, layers
from process_tiers import (
    has_kernels,
    nightly,
    on,
    with_kernels,
    without_kernels,
)
from tfrs_embed import DynamicKeys, FrequencyAdmission, kernels
from tfrs_embed.distribution import replicas
from tfrs_embed.storage import plain_keys
from training_helpers import ON_GPU, assert_same, differentiate, state

pytestmark = [
    pytest.mark.usefixtures("both_implementations"),
    on("keras:3", tier="nightly"),
]

InvalidArgument = tf.errors.InvalidArgumentError
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
SEED = 3


def of_other_mode(graph, both_implementations):
    """Whether it is neither a graph with the kernels nor eager without."""
    return has_kernels() and graph == (both_implementations == "tensorflow")


def make(rows=6, optimizer="adagrad", kind=None, **options):
    """A layer with two tables of keys, and a static one."""

    def table(name, keys, rows=rows):
        initializer = keras.initializers.RandomNormal(seed=SEED)
        return tfrs_embed.TableConfig(name, rows, 2, initializer, keys=keys)

    numbers = table("numbers", DynamicKeys())
    words = table("words", DynamicKeys("string", FrequencyAdmission(2), "lfu"))
    static = table("static", None, 5)
    return layers.PartialTPUEmbedding(
        {
            "a": tfrs_embed.FeatureConfig("a", numbers),
            "b": tfrs_embed.FeatureConfig("b", numbers),
            "word": tfrs_embed.FeatureConfig("word", words),
            "static": tfrs_embed.FeatureConfig("static", static),
        },
        optimizer,
        size_threshold=0,
        **options,
    )


def ids(a=(1, 2), b=(2, 3), word=("x", "y"), static=(0, 4)):
    return {
        "a": tf.constant(a, tf.int64),
        "b": tf.constant(b, tf.int64),
        "word": tf.constant(word),
        "static": tf.constant(static, tf.int64),
    }


def loss_of(layer, inputs, training=True):
    vectors = layer(inputs, training=training)
    return tf.add_n([tf.reduce_sum((v - 1) ** 2) for v in vectors.values()])


def step(layer, inputs):
    with tf.GradientTape() as tape:
        loss = loss_of(layer, inputs)
    differentiate(tape, loss, layer.trainable_variables)


def trained():
    layer = make()
    for word in (("x", "x"), ("y", "z")):
        step(layer, ids(word=word))
    return layer


def everything(layer):
    """What a step may change, statistics included."""
    found = state(layer)
    for name in ("numbers", "words"):
        table = layer.tables[name]
        found[f"{name}/statistics"] = str(table.statistics())
        found[f"{name}/capacity"] = table.capacity
    return found


BAD = {
    "static": (ids(static=(0, 5)), "id 5 is out of range"),
    "word": (ids(word=("x", "")), "key number 1 is an empty string"),
    "numbers": (ids(a=range(5), b=(7, 8)), "'?numbers.*no room"),
    "words": (
        ids(a=(9, 9), word=tuple("abcdefg" * 2)),
        "'?words.*no room",
    ),
}


@nightly(lambda bad, graph: graph == (bad in ("word", "numbers")))
@nightly(without_kernels)
@MODES
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_feature_leaves_all_tables_as_they_are(bad, graph):
    layer = trained()
    before = everything(layer)
    run = tf.function(step) if graph else step
    inputs, text = BAD[bad]
    with pytest.raises(InvalidArgument, match=text):
        run(layer, inputs)
    assert_same(everything(layer), before)
    run(layer, ids())
    assert layer.step.numpy() == before["step"] + 1


@nightly(without_kernels)
@MODES
def test_a_step_whose_loss_fails_leaves_all_tables_as_they_are(graph):
    layer = trained()
    before = everything(layer)

    def failing(inputs):
        with tf.GradientTape() as tape:
            loss = loss_of(layer, inputs)
            checked = tf.debugging.assert_less(loss, 0.0, "too large")
            with tf.control_dependencies([checked] if graph else []):
                factor = tf.identity(2.0)
            loss *= factor
        differentiate(tape, loss, layer.trainable_variables)

    with pytest.raises(InvalidArgument, match="too large"):
        (tf.function(failing) if graph else failing)(ids(a=(7, 8)))
    assert_same(everything(layer), before)


@nightly(without_kernels)
@MODES
def test_only_a_gradient_that_is_taken_is_a_step(graph):
    layer = trained()
    before = everything(layer)
    new = ids(a=(50, 51), word=("new", "new"))
    other = tf.Variable(1.0)

    def no_gradient():
        loss_of(layer, new)

    def gradient_of_another():
        with tf.GradientTape() as tape:
            loss = other * loss_of(layer, new)
        return tape.gradient(loss, other)

    def not_training():
        with tf.GradientTape() as tape:
            loss = loss_of(layer, new, training=False)
        return tape.gradient(loss, layer.trainable_variables)[0]

    def no_updates():
        with tfrs_embed.no_updates(), tf.GradientTape() as tape:
            loss = loss_of(layer, new)
        tape.gradient(loss, layer.trainable_variables)

    def no_tape():
        layer(new)

    for function in (
        no_gradient,
        gradient_of_another,
        not_training,
        no_updates,
        no_tape,
    ):
        (tf.function(function) if graph else function)()
        assert_same(everything(layer), before)
    # They see the keys' initial rows if they might be trained.
    found = layer(new, training=True)["a"][0]
    assert_close(found, normal(SEED, 50, 2))
    assert not layer(new, training=False)["a"][0].numpy().any()
    layer.trainable = False
    (tf.function(step) if graph else step)(layer, new)
    assert_same(everything(layer), before)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_call_says_whether_it_trains_by_its_tape():
    layer = make()
    step_without_training = {
        "tape": lambda: loss_of(layer, ids(), None),
        "none": lambda: loss_of(layer, ids(), None),
    }
    step_without_training["none"]()
    assert layer.tables["numbers"].size == 0
    with tf.GradientTape() as tape:
        loss = step_without_training["tape"]()
    differentiate(tape, loss, layer.trainable_variables)
    np.testing.assert_array_equal(layer.tables["numbers"].keys(), [1, 2, 3])


def model_of(layer):
    inputs = {
        "a": keras.Input((), dtype="int64", name="a"),
        "b": keras.Input((), dtype="int64", name="b"),
        "word": keras.Input((), dtype="string", name="word"),
        "static": keras.Input((), dtype="int64", name="static"),
    }
    vectors = keras.layers.Concatenate()(list(layer(inputs).values()))
    head = keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.GlorotUniform(seed=4),
        dtype="float32",
    )
    return keras.Model(inputs, head(vectors))


def data(size=24):
    rng = np.random.default_rng(0)
    words = np.array(["x", "y", "z"], object)[rng.integers(0, 3, size)]
    inputs = {
        "a": tf.constant(rng.integers(-3, 3, size)),
        "b": tf.constant(rng.integers(-3, 3, size)),
        "word": tf.constant(words),
        "static": tf.constant(rng.integers(0, 5, size)),
    }
    return inputs, tf.constant(rng.normal(size=size), tf.float32)


@on("keras:3", tier="more")
@nightly(without_kernels)
def test_evaluate_and_predict_change_nothing():
    layer = make()
    model = model_of(layer)
    model.compile("sgd", "mse")
    inputs, labels = data()
    model.fit(inputs, labels, batch_size=4, verbose=0)
    before = everything(layer)
    others = {**inputs, "a": inputs["a"] + 100, "word": inputs["word"] + "!"}
    model.evaluate(others, labels, batch_size=4, verbose=0)
    predictions = model.predict(others, batch_size=4, verbose=0)
    assert predictions.shape == (24, 1)
    assert_same(everything(layer), before)


@on("keras:3", tier="more")
@nightly(without_kernels)
@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"eager": 1}])
def test_fit_trains_as_plain_steps_do(options):
    if options.pop("eager", False):
        options["run_eagerly"] = True
    inputs, labels = data()
    expected = make()
    plain = model_of(expected)
    optimizer = keras.optimizers.SGD(0.1)
    for first in range(0, 24, 4):
        part = slice(first, first + 4)
        with tf.GradientTape() as tape:
            found = plain(
                {k: v[part] for k, v in inputs.items()}, training=True
            )
            loss = tf.reduce_mean((found[:, 0] - labels[part]) ** 2)
        variables = plain.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    layer = make()
    model = model_of(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    model.fit(inputs, labels, batch_size=4, shuffle=False, verbose=0)
    found = everything(layer)
    for name, value in everything(expected).items():
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            assert_close(found[name], value)
        else:
            np.testing.assert_array_equal(found[name], value, name)


@on("keras:3", tier="more")
@nightly(without_kernels)
def test_an_overflow_of_the_loss_scale_leaves_all_tables_as_they_are():
    layer = make(dtype="mixed_float16")
    model = model_of(layer)
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**120
    )
    model.compile(optimizer, "mse")
    inputs, labels = data()
    before = everything(layer)
    # The loss, scaled, is far above float32's largest number.
    model.fit(inputs, labels * 1e10, batch_size=24, verbose=0)
    assert_same(everything(layer), before)
    assert float(keras_under_test.loss_scale(optimizer)) == 2.0**119
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**4
    )
    model.compile(optimizer, "mse")
    model.fit(inputs, labels, batch_size=24, verbose=0)
    assert layer.step.numpy() == 1
    assert layer.tables["numbers"].size == 6
    assert layer(inputs)["a"].dtype == tf.float16


@nightly(without_kernels)
@MODES
def test_two_calls_in_one_step_are_two_steps_of_their_keys(graph):
    layer = make(optimizer="sgd")
    rate = 0.01

    def twice():
        with tf.GradientTape() as tape:
            first = layer(ids(a=(1, 2), b=(3, 3)), training=True)
            second = layer(ids(a=(4, 1), b=(5, 5)), training=True)
            loss = tf.reduce_sum(first["a"]) + 3 * tf.reduce_sum(second["a"])
        differentiate(tape, loss, layer.trainable_variables)
        return first["a"], second["a"]

    first, second = (tf.function(twice) if graph else twice)()
    initial = {key: normal(SEED, key, 2) for key in range(1, 6)}
    assert_close(first, [initial[1], initial[2]])
    assert_close(second, [initial[4], initial[1]])
    table = layer.tables["numbers"]
    np.testing.assert_array_equal(table.keys(), range(1, 6))
    assert_close(
        table.table.numpy(),
        [
            initial[1] - 4 * rate,
            initial[2] - rate,
            initial[3],
            initial[4] - 3 * rate,
            initial[5],
        ],
    )
    assert layer.step.numpy() == 2
    np.testing.assert_array_equal(
        table.variables["frequency"].numpy(), [2, 1, 2, 1, 2]
    )


def test_a_second_update_of_one_lookup_is_an_error():
    layer = trained()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(layer, ids())
    tape.gradient(loss, layer.trainable_variables)
    before = everything(layer)
    with pytest.raises(RuntimeError, match="a second time"):
        tape.gradient(loss, layer.trainable_variables)
    assert_same(everything(layer), before)


def test_what_happens_between_a_lookup_and_its_update():
    layer = make()
    step(layer, ids(a=(1, 2), b=(1, 2)))
    table = layer.tables["numbers"]
    with tf.GradientTape() as tape:
        loss = loss_of(layer, ids(a=(1, 2), b=(1, 8)))
    # Its key begins anew, and another step takes all rows.
    table.remove([1])
    step(layer, ids(a=(10, 11, 12), b=(13, 14, 15)))
    np.testing.assert_array_equal(table.keys(), range(10, 16))
    differentiate(tape, loss, layer.trainable_variables)
    np.testing.assert_array_equal(table.keys(), [1, 2, 8, 13, 14, 15])
    np.testing.assert_array_equal(
        table.variables["frequency"].numpy()[:3], [2, 1, 1]
    )
    accumulators = table.slots["accumulators"].numpy()
    assert (accumulators[:3] > 0.1).all()  # One update each, of new rows.
    rows = table.table.numpy()
    assert_close(
        rows[2], adagrad(normal(SEED, 8, 2), 2 * (normal(SEED, 8, 2) - 1))
    )


def adagrad(row, gradient):
    return row - 0.001 * gradient / np.sqrt(0.1 + gradient**2)


def test_layers_share_nothing():
    first, second = trained(), make()
    before = everything(first)
    for _ in range(2):
        step(second, ids(a=(7, 8), word=("q", "q")))
    assert_same(everything(first), before)
    np.testing.assert_array_equal(second.tables["numbers"].keys(), [2, 3, 7, 8])


@nightly(without_kernels)
def test_two_layers_train_in_one_step():
    both = [make(), make(optimizer="adam")]
    alone = [make(), make(optimizer="adam")]

    @tf.function
    def together():
        with tf.GradientTape() as tape:
            loss = tf.add_n([loss_of(layer, ids()) for layer in both])
        variables = [v for x in both for v in x.trainable_variables]
        differentiate(tape, loss, variables)

    for _ in range(2):
        together()
        for layer in alone:
            step(layer, ids())
    for layer, other in zip(both, alone, strict=True):
        expected = everything(other)
        for name, value in everything(layer).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(value, expected[name], rtol=1e-5)
            else:
                assert value == expected[name]


@pytest.mark.more
@pytest.mark.skipif(
    ON_GPU, reason="eager threads read wrong numbers: docs/one_device.md"
)
@nightly(of_other_mode)
@MODES
def test_threads_lose_no_key(graph):
    layer = make(rows=400)
    layer.build(None)
    run = tf.function(lambda inputs: step(layer, inputs))
    if graph:
        run(ids(a=(0, 999), b=(0, 999), word=("0", "0")))
    else:
        run = run.python_function
    errors = []

    def train_some(thread):
        try:
            for i in range(10):
                key = 10 * thread + i
                run(ids(a=(key, 999), b=(key, 999), word=(f"{key}", f"{key}")))
                layer.tables["numbers"].keys()
                layer(ids(), training=False)
        except Exception as error:  # To be seen by the test.
            errors.append(error)

    threads = [threading.Thread(target=train_some, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    table = layer.tables["numbers"]
    np.testing.assert_array_equal(table.keys(), [*range(40), 999])
    np.testing.assert_array_equal(
        table.variables["frequency"].numpy()[1:40], [2] * 39
    )
    assert table.variables["frequency"].numpy()[-1] == 80 + 2 * graph
    assert layer.tables["words"].size == 40
    rows = table.table.numpy()
    assert np.isfinite(rows).all()
    assert layer.step.numpy() == 40 + graph


@nightly(without_kernels)
@pytest.mark.parametrize("how", ["eager", "function", "fit"])
def test_tables_end_with_their_model(how):
    def use():
        layer = make()
        if how == "fit":
            model = model_of(layer)
            model.compile("sgd", "mse")
            model.fit(*data(), verbose=0)
            model.predict(data()[0], verbose=0)
        else:
            run = tf.function(step) if how == "function" else step
            run(layer, ids())
            run(layer, ids())
        shard = layer.tables["numbers"]._rows.shards[0]
        [keys] = shard.key_table._tables
        return weakref.ref(keys), weakref.ref(
            shard.variables["parameters"].handle
        )

    ends = use()
    keras.backend.clear_session()
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_both_implementations_are_tested(request):
    [kind] = [
        name
        for name in ("kernels", "tensorflow")
        if f"[{name}" in request.node.nodeid
    ]
    layer = make()
    layer.build(None)
    shard = layer.tables["numbers"]._rows.shards[0]
    [keys] = shard.key_table._tables
    found = isinstance(keys, plain_keys.PlainKeys)
    assert found == (kind == "tensorflow" or not kernels.status().loaded)


def test_a_worker_may_have_tables_of_one_device_that_others_have_not():
    # All workers number their collectives alike.
    before = dict(replicas._numbers)
    step(make(), ids())
    assert replicas._numbers == before


class TestInitialValues:
    def first_rows(self, orders, rows=8, optimizer="sgd", **kwargs):
        """A key's vector at its first sight, for keys in some order."""
        table = tfrs_embed.TableConfig(
            "t", rows, 3, keys=DynamicKeys(), **kwargs
        )
        layer = layers.PartialTPUEmbedding(
            {"f": tfrs_embed.FeatureConfig("f", table)}, optimizer
        )
        found = {}
        for keys in orders:
            vectors = train(
                layer,
                {"f": tf.constant(keys, tf.int64)},
                {"f": tf.ones([len(keys), 3])},
            )["f"].numpy()
            for key, vector in zip(keys, vectors, strict=True):
                found.setdefault(key, []).append(vector)
        return found

    def test_they_depend_on_key_and_seed_alone(self):
        keys = [5, -1, 2**62, 0, 17, -(2**63)]
        orders = {
            "together": [keys],
            "one by one": [[key] for key in keys],
            "backwards": [keys[::-1]],
            "of one row, again and again": [[key] for key in 2 * keys],
        }

        def initializer(seed=3):
            return keras.initializers.TruncatedNormal(stddev=0.5, seed=seed)

        first = self.first_rows([keys], initializer=initializer())
        for name, order in orders.items():
            rows = 1 if "again" in name else 9
            found = self.first_rows(order, rows, initializer=initializer())
            for key, vectors in found.items():
                assert len(vectors) == (2 if "again" in name else 1)
                for vector in vectors:
                    np.testing.assert_array_equal(vector, first[key][0])
        others = self.first_rows([keys], initializer=initializer(4))
        for key in keys:
            assert np.all(others[key][0] != first[key][0])

    @keras_under_test.only_keras_2("it picks a seed where none is given")
    def test_without_a_seed_they_depend_on_the_tables_name(self):
        first, again = (
            self.first_rows(
                [[7]], initializer=keras.initializers.RandomUniform()
            )
            for _ in range(2)
        )
        np.testing.assert_array_equal(first[7], again[7])

    @pytest.mark.parametrize("kind", ["embedding", "all2all"])
    def test_layers_of_one_table_begin_differently(self, kind):
        """Else user 5 would begin as item 5."""

        def vector(seed=None, **name):
            initializer = keras.initializers.RandomUniform(seed=seed)
            if kind == "embedding":
                layer = layers.DynamicEmbedding(
                    4, input_dim=3, embedding_initializer=initializer, **name
                )
                return layer(tf.constant([5], tf.int64), training=True)
            layer = layers.All2AllDenseEmbedding(
                3,
                4,
                1,
                1,
                eviction="lru",
                embedding_initializer=initializer,
                **name,
            )
            return layer(tf.constant([[[5]]], tf.int64), training=True)

        users, items = vector(), vector()
        assert np.all(users != items)
        assert np.all(vector(name="users") != vector(name="items"))
        np.testing.assert_array_equal(
            vector(name="users"), vector(name="users")
        )
        np.testing.assert_array_equal(vector(3), vector(3))

    @on("keras:3", tier="more", when=with_kernels)
    @pytest.mark.parametrize(
        ("name", "settings", "expected"),
        [
            ("Zeros", {}, lambda k: np.zeros(3)),
            ("Ones", {}, lambda k: np.ones(3)),
            ("Constant", {"value": 0.25}, lambda k: np.full(3, 0.25)),
            (
                "RandomUniform",
                {"minval": -2.0, "maxval": 3.0, "seed": 9},
                lambda k: -2 + 5 * uniform(9, k, 3),
            ),
            (
                "RandomNormal",
                {"mean": 1.0, "stddev": 2.0, "seed": 9},
                lambda k: normal(9, k, 3, 1.0, 2.0),
            ),
            (
                "TruncatedNormal",
                {"mean": 1.0, "stddev": 2.0, "seed": 2**40},
                lambda k: truncated(2**40, k, 3, 1.0, 2.0),
            ),
            (
                "VarianceScaling",
                {"scale": 2.0, "distribution": "uniform", "seed": 9},
                lambda k: (2 * uniform(9, k, 3) - 1) * np.sqrt(3 * 2 / 8),
            ),
            (
                "VarianceScaling",
                {
                    "mode": "fan_out",
                    "distribution": "untruncated_normal",
                    "seed": 9,
                },
                lambda k: normal(9, k, 3, 0.0, np.sqrt(1 / 3)),
            ),
            (
                "GlorotNormal",
                {"seed": 9},
                lambda k: truncated(
                    9, k, 3, 0.0, np.sqrt(2 / 11) / 0.87962566103423978
                ),
            ),
            (
                "HeUniform",
                {"seed": 9},
                lambda k: (2 * uniform(9, k, 3) - 1) * np.sqrt(6 / 8),
            ),
        ],
    )
    def test_each_initializer_has_its_distribution(
        self, name, settings, expected
    ):
        initializer = getattr(keras.initializers, name)(**settings)
        found = self.first_rows(
            [[0, -1, 2**50 + 1]], optimizer="adam", initializer=initializer
        )
        for key, [vector] in found.items():
            np.testing.assert_allclose(
                vector, expected(key), rtol=1e-3, atol=1e-5
            )

    def test_moments(self):
        initializer = keras.initializers.RandomNormal(0.5, 2.0, seed=1)
        keys = list(range(4000))
        found = self.first_rows([keys], 4000, initializer=initializer)
        rows = np.concatenate([found[key] for key in keys])
        assert abs(rows.mean() - 0.5) < 0.06 and abs(rows.std() - 2) < 0.06
        correlation = np.corrcoef(rows.T) - np.eye(3)
        assert np.abs(correlation).max() < 0.06
        neighbours = np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]
        assert abs(neighbours) < 0.06


class TestEvict:
    def trained(self, **keys):
        """A layer of whose keys 3 was used in step 1, and 1 and 2 later."""
        table = tfrs_embed.TableConfig(
            "items", 9, 2, keys=tfrs_embed.DynamicKeys(**keys)
        )
        features = {
            "a": tfrs_embed.FeatureConfig("a", table),
            "b": tfrs_embed.FeatureConfig(
                "b", tfrs_embed.TableConfig("s", 5, 2)
            ),
        }
        layer = layers.PartialTPUEmbedding(features, "sgd")
        for step in ([3, 3, 3], [1, 2], [1]):
            inputs = {"a": tf.constant(step), "b": tf.zeros_like(step)}
            with tf.GradientTape() as tape:
                vectors = layer(inputs, training=True)
                loss = tf.reduce_sum(vectors["a"])
            tape.gradient(loss, layer.trainable_variables)
        assert int(layer.step) == 3
        return layer

    @pytest.mark.parametrize(
        ("rule", "count", "left"),
        [
            ("lru", 1, [1, 2]),
            ("lfu", 1, [1, 3]),
            (tfrs_embed.TimeToLive(1), None, [1, 2]),
            ("lru", 0, [1, 2, 3]),
            ("lru", 9, []),
        ],
    )
    def test_keys_go_as_the_rule_says(self, rule, count, left):
        layer = self.trained(eviction=rule)
        assert layer.evict("items", count) == 3 - len(left)
        assert layer.tables["items"].keys().tolist() == left
        statistics = layer.tables["items"].statistics()
        assert statistics["in_all"]["evicted"] == 3 - len(left)

    @pytest.mark.parametrize(
        ("table", "rule", "count", "text"),
        [
            ("s", "lru", 1, r"no table 's' with DynamicKeys.*\['items'\]"),
            ("items", None, 1, "eviction=None"),
            ("items", "lru", None, "say how many"),
            ("items", "lfu", -1, "integer >= 0, got -1"),
        ],
    )
    def test_bad_requests_change_nothing(self, table, rule, count, text):
        layer = self.trained(eviction=rule)
        with pytest.raises(ValueError, match=text):
            layer.evict(table, count)
        assert layer.tables["items"].keys().tolist() == [1, 2, 3]

    def test_not_in_a_step(self):
        layer = self.trained()
        with pytest.raises(RuntimeError, match="between steps"):
            tf.function(lambda: layer.evict("items", 1))()


# Other threads.


def own_key(shape, dtype=None, keys=None):
    """Initial values by which a key's vector is known; none is zeros."""
    return tf.repeat(tf.cast(keys, tf.float32)[:, None] + 1, shape[1], 1)


def make_known(rows=4, optimizer=0.0, combiner="sum"):
    table = tfrs_embed.TableConfig(
        "numbers", rows, 2, own_key, keys=DynamicKeys(), combiner=combiner
    )
    features = {name: tfrs_embed.FeatureConfig(name, table) for name in "ab"}
    sgd = keras.optimizers.SGD(optimizer)
    layer = layers.PartialTPUEmbedding(features, sgd, size_threshold=0)
    layer.build(None)
    return layer


def train_known(layer, keys):
    with tf.GradientTape() as tape:
        vectors = layer({"a": keys, "b": keys[:1]}, training=True)
        loss = tf.reduce_sum(vectors["a"]) + tf.reduce_sum(vectors["b"])
    return differentiate(tape, loss, layer.trainable_variables)


def look_up_known(layer, keys):
    """Looks keys up; each vector must be the key's or zeros."""
    keys = tf.constant(keys, tf.int64)
    found = layer({"a": keys, "b": keys[::-1]}, training=False)
    a, b = found["a"].numpy(), found["b"].numpy()[::-1]
    np.testing.assert_array_equal(a, b)
    own = np.repeat(keys.numpy()[:, None] + 1.0, 2, axis=1)
    known = (a == own).all(1)
    assert (known | (a == 0).all(1)).all(), a
    return known.tolist()


def test_a_key_that_loses_its_row_while_it_is_read_gives_zeros(monkeypatch):
    layer = make_known()
    train_known(layer, tf.constant([1, 2, 3, 4], tf.int64))
    shard = layer._engine_layer.engine._shard.store
    read, pending = shard.lookup, [[3, 4, 5, 6], [3, 4, 1, 2]]

    def after_steps(names, bags, training, dtype):
        # As another thread would, after the rows were found.
        while pending and not training:
            train_known(layer, tf.constant(pending.pop(0), tf.int64))
        return read(names, bags, training, dtype)

    monkeypatch.setattr(shard, "lookup", after_steps)
    # 1 and 2 have lost their rows meanwhile, and got others back.
    assert look_up_known(layer, [1, 2, 3, 4, 5]) == [0, 0, 1, 1, 0]
    assert look_up_known(layer, [1, 2, 3, 4, 5]) == [1, 1, 1, 1, 0]


def test_bags_are_read_again_where_a_key_of_them_loses_its_row(monkeypatch):
    layer = make_known(combiner="mean")
    train_known(layer, tf.constant([1, 2, 3, 4], tf.int64))
    shard = layer._engine_layer.engine._shard.store
    read, pending = shard.lookup, [[3, 4, 5]]

    def after_steps(names, bags, training, dtype):
        while pending and not training:
            train_known(layer, tf.constant(pending.pop(), tf.int64))
        return read(names, bags, training, dtype)

    monkeypatch.setattr(shard, "lookup", after_steps)
    keys = tf.ragged.constant([[1, 3], [], [4, 4, 9]], dtype=tf.int64)
    dense = tf.constant([[1, 3], [9, 5]], tf.int64)
    found = layer({"a": keys, "b": dense}, training=False)
    np.testing.assert_allclose(  # Means of 0 and 4, of none, of 5, 5 and 0.
        found["a"], np.repeat([[2], [0], [10 / 3]], 2, axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(  # 5 came too late to be found.
        found["b"], np.repeat([[[0], [4]], [[0], [0]]], 2, axis=2)
    )


def test_a_key_is_found_when_its_row_is_written(monkeypatch):
    layer = make_known()
    train_known(layer, tf.constant([1, 2, 3, 4], tf.int64))
    [rows] = layer.tables["numbers"]._rows.shards
    give, seen = rows.give, []

    def look_before(*args, parameters_only):
        if not parameters_only:
            seen.append(look_up_known(layer, [1, 2, 7]))
        give(*args, parameters_only=parameters_only)

    monkeypatch.setattr(rows, "give", look_before)
    train_known(layer, tf.constant([2, 7], tf.int64))
    assert seen == [[False, True, False]]
    assert look_up_known(layer, [1, 2, 7]) == [False, True, True]


@nightly(of_other_mode)
@MODES
def test_another_thread_finds_a_keys_vector_or_zeros(graph):
    layer = make_known(rows=64)
    keys = np.arange(300)
    rng = np.random.default_rng(5)
    run = tf.function(train_known) if graph else train_known
    look = tf.function(lambda k: layer({"a": k, "b": k}, training=False))
    wrong, found, stop = [], [0], threading.Event()

    def read():
        try:
            while not stop.is_set():
                call = look if graph else look.python_function
                vectors = call(tf.constant(keys))["a"].numpy()[:, 0]
                bad = (vectors != keys + 1.0) & (vectors != 0)
                wrong.extend(zip(keys[bad], vectors[bad] - 1, strict=True))
                found[0] += np.sum(vectors != 0)
        except BaseException as error:
            wrong.append(error)

    def some_keys():
        return tf.constant(rng.integers(0, 300, 48))

    run(layer, some_keys())
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200 if graph else 30):
        run(layer, some_keys())
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and found[0] > 0


def test_a_table_is_not_saved_while_its_keys_change(tmp_path, monkeypatch):
    layer = make_known()
    train_known(layer, tf.constant([1, 2, 3, 4], tf.int64))
    [rows] = layer.tables["numbers"]._rows.shards
    live = rows.live

    def after_a_step(*keys):
        args = layer, tf.constant([8], tf.int64)
        thread = threading.Thread(target=train_known, args=args)
        thread.start()
        thread.join()
        return live(*keys)

    checkpoint = tf.train.Checkpoint(layer=layer)
    path = checkpoint.save(str(tmp_path / "good"))
    monkeypatch.setattr(rows, "live", after_a_step)
    with pytest.raises(RuntimeError, match="between steps"):
        checkpoint.save(str(tmp_path / "bad"))
    monkeypatch.undo()
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    checkpoint.save(str(tmp_path / "good"))
