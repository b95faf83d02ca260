"""Gradients of all kinds: a table behaves as a Keras variable, or raises."""

import gc
import threading
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_under_test
import tfrs_embed
from gradient_scenarios import (
    BATCH,
    DIM,
    ROWS,
    SCENARIOS,
    Program,
    batches,
    expected,
    initial,
    optimizer,
    train,
)
from keras_under_test import keras, layers
from process_tiers import nightly, on, without_kernels
from tfrs_embed.gradients import table_update
from training_helpers import tables_of

BOTH_IMPLEMENTATIONS = pytest.mark.usefixtures("both_implementations")

pytestmark = on("keras:3", tier="nightly")

MODES = [
    "eager",
    "function",
]


def make_layer(kind=None, **kwargs):
    table = tfrs_embed.TableConfig("table", ROWS, DIM)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("feature", table),
        optimizer=kind or optimizer(legacy=True),
        size_threshold=0,
        **kwargs,
    )
    layer.embedding_tables["table"].assign(initial())
    return layer


def make_program(layer, nested=False):
    program = Program(
        layer,
        lambda: layer.trainable_variables,
        optimizer(legacy=True),
        tf.function if nested else (lambda function: function),
    )
    # An optimizer's variables are made outside of functions.
    with tf.GradientTape():
        layer(tf.zeros([2], tf.int32))
    program.build()
    return program


def run(mode, function, *args):
    if mode.endswith("function"):
        function = tf.function(function)
    return function(*args)


def table_of(layer):
    return layer.embedding_tables["table"].numpy()


# Without the kernels, which only the update sees, these find what others do.
@nightly(without_kernels)
@pytest.mark.parametrize(
    "mode",
    [
        *MODES,
        # The forward pass is a function of its own.
        pytest.param("nested", marks=pytest.mark.more),
        "nested_in_function",
    ],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@BOTH_IMPLEMENTATIONS
def test_a_table_is_as_a_variable_of_keras(scenario, mode):
    nested = mode.startswith("nested")
    if nested and scenario.__name__ == "jacobian":
        pytest.skip("an error, which another test takes")
    steps = batches(3)
    layer = make_layer()
    program = make_program(layer, nested)

    def step(ids, x):
        scenario(program, ids, x)

    if mode.endswith("function"):
        step = tf.function(step)
    for ids, x in steps:
        step(tf.constant(ids), tf.constant(x))
    table, head, other = expected(scenario, len(steps))
    np.testing.assert_allclose(table_of(layer), table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(program.head, head, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(program.other, other, rtol=1e-4, atol=1e-5)
    if nested:
        # The scalar tells functions whether to update, only in a pass.
        np.testing.assert_array_equal(layer.trainable_variables[0].numpy(), 0)


@pytest.mark.parametrize("watch", [True, False], ids=["all", "x_only"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_function_of_its_own_updates_what_a_gradient_is_of(mode, watch):
    """Whichever gradient TensorFlow has traced the function's own for."""
    layer = make_layer()
    program = make_program(layer)
    # Two functions deep, and one that recomputes the layer in its gradient.
    inner = tf.function(program.predict, reduce_retracing=True)
    outer = tf.function(lambda ids, x: 2.0 * inner(ids, x), jit_compile=False)
    again = tf.function(
        lambda ids, x: tf.recompute_grad(lambda x: program.predict(ids, x))(x)
    )
    ids, x = (tf.constant(v) for v in batches(1)[0])
    sources = {"x": x, "head": program.head, "variables": program.variables}

    def step(function, of):
        with tf.GradientTape(watch_accessed_variables=watch) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(ids, x))
        return tape.gradient(loss, sources[of])

    updates = 0
    for function in (inner, outer, again):
        for of in sources:
            run(mode, lambda f=function, of=of: step(f, of))
            updates += watch and of == "variables"
            assert int(layer.step) == updates, (function, of)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_functions_of_their_own_update_once_for_each_backward_pass(mode):
    ids = tf.constant([1, 2])
    several = [make_layer(keras.optimizers.SGD(0.1)) for _ in range(2)]
    several[0].build(None)
    several[1].build(None)

    # Both layers; the first one is called twice.
    @tf.function
    def forward_pass():
        first, second = (layer(ids) for layer in several)
        return first + several[0](ids + 1) + 2.0 * second

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(forward_pass())
        for layers_of in (several, several[1:]):
            tape.gradient(loss, [m.trainable_variables for m in layers_of])

    run(mode, step)
    wanted = initial()
    wanted[1:4] -= np.array([[0.1], [0.2], [0.1]])
    np.testing.assert_allclose(table_of(several[0]), wanted, rtol=1e-5)
    wanted = initial()
    wanted[1:3] -= 2 * 0.2
    np.testing.assert_allclose(table_of(several[1]), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "how", ["jacobian", "branch", "loop", "gradients", "tpu"]
)
def test_a_function_of_its_own_is_refused_in(how, monkeypatch):
    layer = make_layer()
    program = make_program(layer)
    predict = tf.function(program.predict)
    ids, x = (tf.constant(v) for v in batches(1)[0])
    # The function's own gradient is traced for a tape.
    with tf.GradientTape() as tape:
        loss = predict(ids, x)
    tape.gradient(loss, program.variables)
    table = table_of(layer)
    [weight] = layer.trainable_variables
    weight = weight.value if keras_under_test.NUMBER == 3 else weight

    @tf.function
    def step():
        with tf.GradientTape(persistent=how == "jacobian") as tape:
            if how == "branch":
                loss = tf.cond(
                    tf.reduce_sum(x) > -1e9,
                    lambda: predict(ids, x),
                    lambda: 0.0,
                )
            elif how == "loop":
                loss = tf.map_fn(
                    lambda one: predict(ids, x * one), tf.ones([2, 1])
                )
            else:
                loss = predict(ids, x)
        if how == "gradients":
            return tf.gradients(loss, weight)
        take = tape.jacobian if how == "jacobian" else tape.gradient
        return take(loss, program.variables)

    if how == "tpu":
        tpu = types.SimpleNamespace(
            in_tpu_replica=lambda: True, in_pfor=lambda: False
        )
        monkeypatch.setattr(table_update, "strategies", tpu)
    kind, text = {
        "tpu": (NotImplementedError, "in a TPU's program"),
        "jacobian": (NotImplementedError, "in a Jacobian"),
        "gradients": (tf.errors.InvalidArgumentError, "by tf.gradients"),
    }.get(how, (NotImplementedError, "tf.cond or tf.while_loop"))
    with pytest.raises(kind, match=text):
        step()
    np.testing.assert_array_equal(table_of(layer), table)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_trains_a_model_whose_call_is_a_function(run_eagerly):
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = make_layer()
            self.head = keras.layers.Dense(1, kernel_initializer="ones")
            # Keras 3 trains no layer that a function builds as it should.
            self.head.build([None, DIM])

        def call(self, ids):
            return self.head(self.layer(ids))

    class Decorated(Plain):
        call = tf.function(Plain.call)

    found = []
    ids, x = batches(1)[0]
    for kind in (Plain, Decorated):
        model = kind()
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        model.fit(ids, x[:, 0], BATCH // 2, epochs=2, shuffle=False, verbose=0)
        assert int(model.layer.step) == 4
        found.append([table_of(model.layer), *model.head.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    "use", ["nothing", "apply", "apply the head's", "return", "norm"]
)
def test_a_gradient_that_is_asked_for_updates_whatever_its_use(use, mode):
    layer = make_layer()
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        gradients = tape.gradient(loss, program.variables)
        norm = tf.linalg.global_norm(gradients)
        if use == "apply":
            program.apply(gradients, program.variables)
        if use == "apply the head's":
            program.apply(gradients[1:], program.variables[1:])
        return {"return": gradients, "norm": norm}.get(use, loss)

    run(mode, step)
    assert int(layer.step) == 1


def test_tf_gradients_update_what_they_are_taken_of():
    layer = make_layer()
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])
    [weight] = layer.trainable_variables
    weight = weight.value if keras_under_test.NUMBER == 3 else weight

    @tf.function
    def step(of):
        loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        return tf.gradients(loss, {"x": x, "table": weight}[of])

    step("x")
    assert int(layer.step) == 0
    step("table")
    assert int(layer.step) == 1
    train(program, ids, x)


@pytest.mark.parametrize("mode", MODES)
def test_training_false_makes_tables_constants(mode):
    layer = make_layer()
    head = tf.Variable(tf.ones([DIM, 1]))

    def look_up(ids):
        return layer(ids, training=False)

    if mode == "function":
        # A layer in a function of its own may be a constant, too.
        look_up = tf.function(look_up)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(look_up(ids), head))
        return tape.gradient(loss, [*layer.trainable_variables, head])

    def only_the_head(ids):
        of_table, of_head = step(ids)
        assert of_table is None
        return of_head

    before = table_of(layer)
    found = run(mode, only_the_head, tf.constant([1, 1, 3]))
    np.testing.assert_allclose(found[:, 0], before[[1, 1, 3]].sum(0), rtol=1e-5)
    np.testing.assert_array_equal(table_of(layer), before)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_need_not_say_that_it_trains(mode):
    table = tfrs_embed.TableConfig("table", ROWS, DIM)
    shapes = {"input_shape": (2, 1), "output_shape": (2, DIM)}
    kinds = [
        make_layer(),
        layers.DistributedEmbedding(
            tfrs_embed.FeatureConfig("feature", table, **shapes),
            optimizer="sgd",
            size_threshold=0,
        ),
        layers.All2AllDenseEmbedding(ROWS, DIM, 1, 1, optimizer="sgd"),
    ]
    inputs = [
        tf.constant([1, 3]),
        tf.constant([[1], [3]]),
        tf.constant([[[1]], [[3]]], tf.int64),
    ]
    for layer, ids in zip(kinds, inputs, strict=True):
        layer(ids)

        def step(ids, layer=layer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) ** 2)
            return tape.gradient(loss, layer.trainable_variables)

        run(mode, lambda ids, step=step: step(ids), ids)
        assert int(layer.step) == 1, type(layer)


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("part", ["forward", "backward", "both"])
def test_no_updates(mode, part):
    layer = make_layer()
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def step():
        context = tfrs_embed.no_updates
        with tf.GradientTape() as tape:
            if part == "backward":
                loss = tf.reduce_sum(program.predict(ids, x))
            else:
                with context():
                    loss = tf.reduce_sum(program.predict(ids, x))
        if part == "forward":
            gradients = tape.gradient(loss, program.variables)
        else:
            with context():
                gradients = tape.gradient(loss, program.variables)
        return gradients[1]

    before = table_of(layer)
    run(mode, step)
    np.testing.assert_array_equal(table_of(layer), before)
    # It ends with its block, and is of one thread.
    train(program, ids, x)
    assert int(layer.step) == 1
    with tfrs_embed.no_updates():
        thread = threading.Thread(target=train, args=(program, ids, x))
        thread.start()
        thread.join()
    assert int(layer.step) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["persistent", "two_tapes"])
def test_a_second_update_of_one_lookup_is_an_error(how, mode):
    layer = make_layer()
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def step():
        persistent = how == "persistent"
        with (
            tf.GradientTape() as other,
            tf.GradientTape(persistent=persistent) as tape,
        ):
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        first = tape.gradient(loss, program.embedding())
        again = tape if persistent else other
        second = again.gradient(loss, program.embedding())
        return first, second

    with pytest.raises(RuntimeError, match="a second time"):
        run(mode, step)
    # The eager one was made before it is known of another.
    assert int(layer.step) <= 1
    train(program, ids, x)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_two_lookups_of_a_persistent_tape_have_one_update_each(mode):
    layer = make_layer(keras.optimizers.SGD(0.1))
    program = make_program(layer)

    def step(again):
        with tf.GradientTape(persistent=True) as tape:
            losses = [
                tf.reduce_sum(program.vectors(tf.constant(ids)))
                for ids in ([1, 2], [2, 3])
            ]
        losses += losses[-1:] if again else []
        return [tape.gradient(loss, program.embedding()) for loss in losses]

    for number in (1, 2):
        run(mode, lambda: step(again=False))
        wanted = initial()
        wanted[1:4] -= number * np.array([[0.1], [0.2], [0.1]])
        np.testing.assert_allclose(table_of(layer), wanted, rtol=1e-5)
        assert int(layer.step) == 2 * number
    with pytest.raises(RuntimeError, match="a second time"):
        run(mode, lambda: step(again=True))


def forward(function, primal, target_of):
    """The derivative of `target_of()` along ones; returns both."""
    with tf.autodiff.ForwardAccumulator(
        primal, tf.nest.map_structure(tf.ones_like, primal)
    ) as accumulator:
        result = function()
        target = target_of(result)
    return result, accumulator.jvp(target)


@pytest.mark.parametrize("of", ["x", "head"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_forward_derivatives_update_nothing(mode, of):
    """First ones, and products with the Hessian in either order."""
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def derivatives(layer):
        program = make_program(layer)
        primal = x if of == "x" else program.head

        def loss():
            return tf.reduce_sum(program.predict(ids, x) ** 2)

        def gradient():
            with tf.GradientTape() as tape:
                tape.watch(x)
                target = loss()
            return tape.gradient(target, primal)

        def step():
            first, product = forward(gradient, primal, lambda result: result)
            with tf.GradientTape() as tape:
                tape.watch(x)
                _, slope = forward(loss, primal, lambda result: result)
            return first, product, slope, tape.gradient(slope, primal)

        return run(mode, step)

    layer, constant = make_layer(), make_layer()
    constant.trainable = False
    found, wanted = derivatives(layer), derivatives(constant)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], found[3], rtol=1e-4, atol=1e-4)
    assert int(layer.step) == 0


@pytest.mark.parametrize("order", ["in", "of"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_step_in_and_of_an_accumulator_updates_once(mode, order):
    """`in`: of the loss. `of`: of the loss's forward derivative."""
    tables = []
    ids, x = (tf.constant(v) for v in batches(1)[0])
    for is_forward in (True, False):
        layer = make_layer(keras.optimizers.SGD(0.1))
        program = make_program(layer)

        def loss(program=program, is_forward=is_forward):
            if order == "in":
                return tf.reduce_sum(program.predict(ids, x) ** 2)
            if is_forward:
                return forward(
                    lambda: tf.reduce_sum(program.predict(ids, x)),
                    x,
                    lambda result: result,
                )[1]
            # The prediction is linear in x.
            return tf.reduce_sum(program.predict(ids, tf.ones_like(x)))

        def gradients(program=program, loss=loss):
            with tf.GradientTape() as tape:
                target = loss()
            return tape.gradient(target, program.variables)

        def step(is_forward=is_forward, gradients=gradients):
            if order == "in" and is_forward:
                return forward(gradients, x, lambda result: result[1])
            return gradients()

        run(mode, step)
        assert int(layer.step) == 1
        tables.append(table_of(layer))
    np.testing.assert_allclose(*tables, rtol=1e-5)
    assert np.any(tables[0] != initial())


@on("keras:3", tier="more")
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_forward_derivative_of_a_scaled_loss_sets_no_scale(mode):
    scaler = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    layer = make_layer(keras.optimizers.SGD(0.1))
    program = make_program(layer)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.vectors(tf.constant([1, 2])))
        return tape.gradient(loss, program.embedding())

    step()
    x = tf.constant([1.0, 2.0])
    found = run(
        mode,
        lambda: forward(
            lambda: keras_under_test.scale_loss(scaler, tf.reduce_sum(x**2)),
            x,
            lambda result: result,
        ),
    )
    np.testing.assert_allclose(found, [5 * 2.0**10, 6 * 2.0**10])
    step()
    moved = initial()[[1, 2]] - table_of(layer)[[1, 2]]
    np.testing.assert_allclose(moved, 0.2, rtol=1e-4)


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_forward_derivative_of_a_table_is_an_error(mode, product):
    layer = make_layer()
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])
    weights = [
        each.value if keras_under_test.NUMBER == 3 else each
        for each in layer.trainable_variables
    ]

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        return tape.gradient(loss, weights) if product else [loss]

    def step():
        return forward(gradient, weights, lambda result: result)[1]

    with pytest.raises(
        NotImplementedError, match=r"ForwardAccumulator.* its tables\. Leave"
    ):
        run(mode, step)
    assert int(layer.step) == 0


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("pfor", [True, False])
def test_the_jacobian_of_a_table_is_an_error(mode, pfor):
    layer = make_layer()

    def jacobian():
        with tf.GradientTape(persistent=not pfor) as tape:
            outputs = layer(tf.constant([1, 2]))
        return tape.jacobian(
            outputs, layer.trainable_variables, experimental_use_pfor=pfor
        )

    before = int(layer.step)
    with pytest.raises((NotImplementedError, RuntimeError)):
        run(mode, jacobian)
    assert int(layer.step) <= before + (mode == "eager" and not pfor)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_two_calls_under_one_tape_are_two_updates(mode):
    layer = make_layer(keras.optimizers.SGD(0.1))
    program = make_program(layer)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.vectors(tf.constant([1, 2])))
            loss += tf.reduce_sum(2 * program.vectors(tf.constant([2])))
        program.apply(
            tape.gradient(loss, program.embedding()), program.embedding()
        )

    run(mode, step)
    wanted = initial()
    wanted[1] -= 0.1
    wanted[2] -= 0.3
    np.testing.assert_allclose(table_of(layer), wanted, rtol=1e-5)
    assert int(layer.step) == 2


@on("keras:3", tier="more")
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_two_loss_scale_optimizers_in_one_step(mode):
    """As in a GAN: each pass is divided by its own loss's scale."""
    trained, programs = [], []
    for _ in range(2):
        trained.append(make_layer(keras.optimizers.SGD(0.1)))
        programs.append(make_program(trained[-1]))
    scalers = [
        keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=scale
        )
        for scale in (2.0**15, 2.0**4)
    ]
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def step():
        with tf.GradientTape() as first, tf.GradientTape() as second:
            losses = [tf.reduce_sum(p.predict(ids, x) ** 2) for p in programs]
            scaled = [
                keras_under_test.scale_loss(s, loss)
                for s, loss in zip(scalers, losses, strict=True)
            ]
        found = [
            tape.gradient(loss, p.variables)
            for tape, loss, p in zip(
                (first, second), scaled, programs, strict=True
            )
        ]
        for s, gradients, p in zip(scalers, found, programs, strict=True):
            keras_under_test.apply_scaled(s, gradients, p.variables)

    def plain(program):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        tape.gradient(loss, program.variables)

    alone = make_layer(keras.optimizers.SGD(0.1))
    plain(make_program(alone))
    if mode == "function":
        step = tf.function(step)
    step()
    for layer in trained:
        np.testing.assert_allclose(
            table_of(layer), table_of(alone), rtol=1e-4, atol=1e-6
        )


@on("keras:3", tier="more")
def test_losses_of_two_scales_together_are_an_error():
    layer = make_layer(keras.optimizers.SGD(0.1))
    scalers = [
        keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=scale
        )
        for scale in (2.0**15, 2.0**4)
    ]
    with tf.GradientTape() as tape:
        vectors = layer(tf.constant([1]))
        loss = tf.add_n(
            [keras_under_test.scale_loss(s, vectors[0, 0]) for s in scalers]
        )
    with pytest.raises(ValueError, match="differentiated together"):
        tape.gradient(loss, layer.trainable_variables)
    assert int(layer.step) == 0


@on("keras:3", tier="more")
def test_a_scale_is_of_its_thread_and_its_step():
    scaler = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    layer = make_layer(keras.optimizers.SGD(0.1))
    program = make_program(layer)
    other = make_layer(keras.optimizers.SGD(0.1))
    others = make_program(other)
    ids, x = (tf.constant(v) for v in batches(1)[0])

    def step(program):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        tape.gradient(loss, program.variables)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        scaled = keras_under_test.scale_loss(scaler, loss)
    # Another thread, and another model, before the scaled loss's gradient.
    thread = threading.Thread(target=step, args=(others,))
    thread.start()
    thread.join()
    alone = make_layer(keras.optimizers.SGD(0.1))
    step(make_program(alone))
    np.testing.assert_allclose(table_of(other), table_of(alone), rtol=1e-5)
    # The scaled gradient is taken, and something raises before the rest.
    tape.gradient(scaled, program.variables)
    np.testing.assert_allclose(table_of(layer), table_of(alone), rtol=1e-4)
    step(program)
    step(others)
    np.testing.assert_allclose(
        table_of(layer), table_of(other), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_function_of_its_own_knows_the_loss_scale(dynamic, mode):
    if dynamic:
        scaler = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**10
        )
    else:
        scaler = keras_under_test.with_fixed_scale(
            keras.optimizers.SGD, 0.1, 2.0**10
        )
    ids, x = (tf.constant(v) for v in batches(1)[0])
    tables = []
    for nested in (False, True):
        layer = make_layer(keras.optimizers.SGD(0.1))
        program = make_program(layer, nested)

        def step(factor, program=program):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(program.predict(ids, x) ** 2)
                scaled = keras_under_test.scale_loss(scaler, factor * loss)
            return tape.gradient(scaled, program.embedding())[0]

        assert float(run(mode, lambda step=step: step(1.0))) == 0
        assert int(layer.step) == 1
        tables.append(table_of(layer))
        if dynamic:
            # The optimizer is told to skip the step, as the table does.
            found = run(mode, lambda step=step: step(float("inf")))
            assert np.isinf(float(found))
            assert int(layer.step) == 1
        train(program, ids, x)
        tables.append(table_of(layer))
    np.testing.assert_allclose(tables[0], tables[2], rtol=1e-5)
    np.testing.assert_allclose(tables[1], tables[3], rtol=1e-5)


@on("keras:3", tier="more")
def test_a_loss_that_a_function_scales_is_an_error():
    scaler = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    layer = make_layer(keras.optimizers.SGD(0.1))
    program = make_program(layer)
    ids, x = (tf.constant(v) for v in batches(1)[0])

    @tf.function
    def scaled_loss():
        loss = tf.reduce_sum(program.predict(ids, x) ** 2)
        return keras_under_test.scale_loss(scaler, loss)

    with pytest.raises(NotImplementedError, match="in the function that takes"):
        with tf.GradientTape() as tape:
            loss = scaled_loss()
        tape.gradient(loss, program.variables)
    np.testing.assert_array_equal(table_of(layer), initial())
    # Where it calls no layer, it is scaled as Keras scales it.
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.function(
            lambda: keras_under_test.scale_loss(scaler, tf.reduce_sum(x))
        )()
    np.testing.assert_array_equal(tape.gradient(loss, x), 2.0**10 + 0 * x)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_threads_train_models_of_their_own(mode):
    number, threads = 40, 3
    layers_of = [make_layer(keras.optimizers.SGD(0.1)) for _ in range(threads)]

    def work(layer):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant([1, 2])))
            gradients = tape.gradient(loss, layer.trainable_variables)
            return [tf.identity(g) for g in gradients]

        step = tf.function(step) if mode == "function" else step
        for _ in range(number):
            step()

    running = [
        threading.Thread(target=work, args=(each,)) for each in layers_of
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for layer in layers_of:
        assert int(layer.step) == number
        moved = initial()[[1, 2]] - table_of(layer)[[1, 2]]
        np.testing.assert_allclose(moved, 0.1 * number, rtol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
def test_a_training_function_is_saved(tmp_path, nested):
    ids = tf.constant([1, 3])
    module = tf.Module()
    module.layer = make_layer()
    look_up = tf.function(module.layer) if nested else module.layer
    module.step = training_function(module.layer, look_up)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    losses = [[float(m.step(ids)) for _ in range(3)] for m in (module, loaded)]
    assert losses[0][0] > losses[0][1] > losses[0][2]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def training_function(layer, look_up):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(ids, training=True) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        with tf.control_dependencies(gradients):
            return tf.identity(loss)

    return step


@nightly(lambda mode: mode == "eager")
@pytest.mark.parametrize("mode", ["eager", "function", "nested", "fit"])
def test_tables_end_with_their_model(mode):
    def use():
        layer = make_layer()
        if mode == "fit":
            ids = keras.Input((), dtype=tf.int32)
            model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
            model.compile("sgd", "mse")
            model.fit(tf.constant([1, 2]), tf.constant([1.0, 2.0]), verbose=0)
            model.predict(tf.constant([1, 2]), verbose=0)
        else:
            program = Program(
                layer,
                lambda: layer.trainable_variables,
                keras.optimizers.SGD(0.1),
                tf.function if mode == "nested" else (lambda f: f),
            )
            program.optimizer.build(program.variables)
            ids, x = (tf.constant(v) for v in batches(1)[0])

            def step():
                train(program, ids, x)

            if mode == "nested":
                step()
            step = step if mode == "eager" else tf.function(step)
            step()
            step()
        return table_handle(layer)

    # A table lives as long as one tensor of its handle.
    handle = use()
    keras.backend.clear_session()
    gc.collect()
    assert handle() is None


def table_handle(layer):
    """A weak reference to what keeps the memory of a layer's table."""
    return weakref.ref(layer.embedding_tables["table"].handle)


@pytest.mark.parametrize("how", ["made", "set", "cloned"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_frozen_layer_trains_no_table(how, mode):
    def make(**kwargs):
        big = tfrs_embed.TableConfig("table", ROWS, DIM)
        small = tfrs_embed.TableConfig("small", 3, DIM)
        return layers.PartialTPUEmbedding(
            {
                "big": tfrs_embed.FeatureConfig("big", big),
                "small": tfrs_embed.FeatureConfig("small", small),
            },
            optimizer="sgd",
            size_threshold=5,
            **kwargs,
        )

    layer = make(trainable=how == "set")
    if how == "set":
        layer.trainable = False
    if how == "cloned":
        layer = type(layer).from_config(layer.get_config())
    ids = {"big": tf.constant([1]), "small": tf.constant([2])}
    layer(ids)
    assert layer.trainable_variables == []
    before = tables_of(layer)
    factor = tf.Variable(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = factor * tf.add_n(
                [tf.reduce_sum(v) for v in layer(ids).values()]
            )
        variables = [*layer.variables[:0], factor]
        return tape.gradient(loss, variables)

    run(mode, step)
    for name, value in layer.embedding_tables.items():
        np.testing.assert_array_equal(value.numpy(), before[name])
    layer.trainable = True
    assert layer.trainable_variables


@BOTH_IMPLEMENTATIONS
def test_rows_are_looked_up_before_they_are_updated():
    table = tfrs_embed.TableConfig("table", ROWS, DIM, "uniform")
    layer = layers.PartialTPUEmbedding(
        {
            name: tfrs_embed.FeatureConfig(name, table)
            for name in ("known", "unknown")
        },
        optimizer="sgd",
        size_threshold=0,
    )
    layer.build(None)

    # The gradient of "known" depends on nothing: its loss is linear, and its
    # batch is known.
    @tf.function(
        input_signature=[
            tf.TensorSpec([2], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def step(known, unknown):
        with tf.GradientTape() as tape:
            outputs = layer({"known": known, "unknown": unknown}, training=True)
            loss = tf.add_n(
                [tf.reduce_sum(v * tf.ones([2, DIM])) for v in outputs.values()]
            )
        variables = layer.trainable_variables
        return outputs, [tf.identity(g) for g in tape.gradient(loss, variables)]

    ids = tf.constant([1, 2], tf.int64)
    for _ in range(50):
        before = tables_of(layer)["table"][1:3]
        outputs, _ = step(ids, ids)
        for output in outputs.values():
            np.testing.assert_array_equal(output, before)


READS = {
    "convert": lambda table, ids: tf.convert_to_tensor(table),
    "value": lambda table, ids: table.value(),
    "read_value": lambda table, ids: table.read_value(),
    "gather": tf.gather,
    "gather_nd": lambda table, ids: tf.gather_nd(table, ids[:, None]),
    "lookup": tf.nn.embedding_lookup,
    "row": lambda table, ids: table[0],
    "product": lambda table, ids: table @ tf.ones([DIM, 1]),
    "scores": lambda table, ids: tf.matmul(
        tf.ones([1, DIM]), table, transpose_b=True
    ),
    "sampled": lambda table, ids: tf.nn.sampled_softmax_loss(
        table, tf.zeros([ROWS]), ids[:, None], tf.ones([2, DIM]), 3, ROWS
    ),
}


# By day each read is tried eagerly, every second one in a function too.
@nightly(
    lambda read, mode: mode == "function" and list(READS).index(read) % 2 == 1
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", READS)
def test_to_train_by_a_read_of_a_table_is_an_error(read, mode):
    layer = make_layer()
    ids = tf.constant([1, 2])

    def step(constant):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
            rows = READS[read](layer.embedding_tables["table"], ids)
            rows = tf.stop_gradient(rows) if constant else rows
            loss += tf.reduce_sum(rows**2)
        tape.gradient(loss, layer.trainable_variables)

    with pytest.raises(
        NotImplementedError, match=r"'table'.*second feature.*range\(20\)"
    ):
        run(mode, step, False)
    if mode == "function":  # Eagerly, the lookup's update may come first.
        assert int(layer.step) == 0
        np.testing.assert_array_equal(table_of(layer), initial())
    run(mode, step, True)
    assert (table_of(layer) != initial()).any(1).nonzero()[0].tolist() == [1, 2]


def test_to_train_by_a_read_in_a_function_of_its_own_is_an_error():
    layer = make_layer()
    head = tf.Variable(tf.ones([DIM, 1]))

    @tf.function
    def score():
        return layer.embedding_tables["table"] @ head

    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(score())
    sums = initial().sum(0)[:, None]
    np.testing.assert_allclose(tape.gradient(loss, head), sums, rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="second feature"):
        tape.gradient(loss, [head, *layer.trainable_variables])
    np.testing.assert_array_equal(table_of(layer), initial())


@pytest.mark.parametrize("mode", MODES)
def test_a_read_of_a_table_is_a_constant_to_other_gradients(mode):
    layer = make_layer()
    head = tf.Variable(tf.ones([DIM, 1]))

    def of_head():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer.embedding_tables["table"] @ head)
        return tape.gradient(loss, head)

    def of_table():
        table = layer.embedding_tables["table"]
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(table**2)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    def frozen():
        layer.trainable = False
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer.embedding_tables["table"] @ head)
        return tape.gradient(loss, [*layer.trainable_variables, head])[-1]

    sums = initial().sum(0)[:, None]
    np.testing.assert_allclose(run(mode, of_head), sums, rtol=1e-5)
    np.testing.assert_allclose(run(mode, of_table), 2 * initial(), rtol=1e-6)
    np.testing.assert_allclose(run(mode, frozen), sums, rtol=1e-5)
    assert int(layer.step) == 0


@pytest.mark.parametrize("kind", ["table", "keys"])
def test_a_function_reads_a_table_as_it_is_when_it_runs(kind):
    keys = tfrs_embed.DynamicKeys() if kind == "keys" else None
    table = tfrs_embed.TableConfig("table", ROWS, DIM, keys=keys)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("feature", table), "sgd", size_threshold=0
    )
    layer.build(None)
    read = tf.function(
        lambda: tf.convert_to_tensor(layer.embedding_tables["table"])
    )
    if keys is not None:
        with pytest.raises(NotImplementedError, match=r"eagerly.*top_k"):
            read()
        return
    read()
    layer.embedding_tables["table"].assign(initial())
    np.testing.assert_array_equal(read(), initial())


def test_a_second_feature_trains_a_table_by_all_its_rows():
    table = tfrs_embed.TableConfig(
        "table",
        ROWS,
        DIM,
        initializer=keras.initializers.RandomNormal(seed=1),
    )
    features = {
        name: tfrs_embed.FeatureConfig(name, table) for name in ("one", "all")
    }
    layer = layers.PartialTPUEmbedding(
        features, keras.optimizers.SGD(0.1), size_threshold=0
    )
    layer.build(None)
    layer.embedding_tables["table"].assign(initial())
    ids, labels = tf.constant([1, 2, 1]), tf.constant([4, 4, 0])

    def loss_of(one, every):
        return tf.reduce_sum(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, tf.matmul(one, every, transpose_b=True)
            )
        )

    with tf.GradientTape() as tape:
        vectors = layer({"one": ids, "all": tf.range(ROWS)})
        loss = loss_of(vectors["one"], vectors["all"])
    tape.gradient(loss, layer.trainable_variables)
    variable = tf.Variable(initial())
    with tf.GradientTape() as tape:
        loss = loss_of(tf.gather(variable, ids), variable)
    variable.assign_sub(0.1 * tape.gradient(loss, variable))
    assert int(layer.step) == 1
    np.testing.assert_allclose(table_of(layer), variable, rtol=1e-4, atol=1e-6)
