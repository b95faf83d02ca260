"""What `tpu_check` finds in users' programs, and what it says of it."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
import tensorflow as tf
import tf_keras
from promises import BATCH, make_layer
from tf_keras import layers

import tfrs_embed
from process_tiers import nightly
from run_in_processes import environment
from small_tpu_programs import BATCH as FLOATS
from small_tpu_programs import STEPS, traced
from tfrs_embed import tpu_check
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.tools.tpu_check import passes, tpu_library
from tfrs_embed.tools.tpu_check.command import _as_json
from tfrs_embed_command import main
from training_helpers import sparse_core_config

if not has_kernels():
    pytest.skip(
        "needs the kernels of the tensorflow-tpu wheel", allow_module_level=True
    )

SLICE = "v5p:2x2x1"


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_refused_as_by_the_emulated_slice(name, soft_placement):
    step = STEPS[name]

    def program(strategy):
        traced(strategy, step)(FLOATS)

    if step.error is not None:
        with pytest.raises(TypeError, match=step.error):
            tpu_check.check(program, SLICE)
    elif step.on_host is not None and not soft_placement:
        with pytest.raises(tpu_check.CheckError, match=f"'tf.{step.on_host}'"):
            tpu_check.check(program, SLICE)
    else:
        report = tpu_check.check(program, SLICE)
        [checked] = report.programs
        assert step.on_host not in checked.program.operations


def test_the_kernels_of_tpus_are_those_that_the_emulation_knows():
    tf.config.set_soft_device_placement(True)
    tpu_check.check(lambda s: traced(s, STEPS["add"])(FLOATS), SLICE)
    from tensorflow.python.framework import kernels

    from tfrs_embed.tools.testing import emulated_program

    of_tpus = {
        kernel.op
        for kernel in kernels.get_all_registered_kernels().kernel
        if kernel.device_type == "XLA_TPU_JIT"
    }
    known = emulated_program._kernels()
    others = emulated_program._LEFT_TO_HOSTS | {"ResizeNearestNeighborGrad"}
    assert of_tpus - known == others
    assert not known - of_tpus


def look_up(layer, change=lambda ids: ids, number=BATCH, training=True):
    """A program with a step that looks ids up and trains."""

    def program(strategy):
        with strategy.scope():
            made = layer()

        def step(ids):
            with tf.GradientTape() as tape:
                vectors = made({"dense_big": change(ids)}, training=training)
                loss = tf.reduce_sum(vectors["dense_big"])
            gradients = tape.gradient(loss, made.trainable_variables)
            return [g for g in gradients if g is not None]

        @tf.function
        def train(ids):
            strategy.run(step, (ids,))

        train(tf.range(number, dtype=tf.int64))

    return program


def one_layer(**options):
    return lambda: make_layer(["dense"], ["big"], **options)


def test_an_error_of_the_code_is_raised_as_it_is():
    with pytest.raises(
        ValueError,
        match=r"Feature 'dense_big' .*: ids: they are computed inside "
        r"strategy.run, by the operation FloorMod 'mod'",
    ):
        tpu_check.check(look_up(one_layer(), lambda ids: ids % 7), SLICE)


def test_an_error_names_the_operations_line():
    def program(strategy):
        @tf.function
        def train(x):
            def step(x):
                size = tf.cast(tf.reduce_sum(x), tf.int32)
                return tf.reshape(x, [size, -1])

            strategy.run(step, (x,))

        train(tf.ones([4, 2]))

    with pytest.raises(
        tpu_check.CheckError,
        match=r"no TPU has a kernel for Reshape with these inputs.\n"
        r"Operations of these kinds:\n  Reshape 'Reshape', .*_checks.py:\d+",
    ):
        tpu_check.check(program, SLICE)


LOOPS = {
    "while_loop": lambda x: tf.while_loop(
        lambda i, y: i < 12,
        lambda i, y: (i + 1, tf.tanh(y)),
        (0, x),
        maximum_iterations=12,
    )[1],
    "map_fn": lambda x: tf.map_fn(tf.tanh, x),
    "scan": lambda x: tf.scan(lambda a, b: tf.tanh(a + b), x),
    "scan_in_map_fn": lambda x: tf.map_fn(
        lambda row: tf.scan(lambda a, b: a * b, row), x
    ),
    "cond": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x**2, lambda: -x),
    "causal": lambda x: tf.where(
        tf.linalg.band_part(tf.ones([12, 16], tf.bool), -1, 0), x, 0.0
    ),
}
RECURRENT = {
    "lstm": lambda: layers.LSTM(16),
    "gru": lambda: layers.GRU(16, return_sequences=True),
    "rnn": lambda: layers.RNN(layers.LSTMCell(16)),
    "bidirectional": lambda: layers.Bidirectional(
        layers.RNN(layers.GRUCell(16), return_sequences=True)
    ),
}


def array(x):
    written = tf.TensorArray(tf.float32, 12)
    for i in tf.range(12):
        written = written.write(i, tf.tanh(x[:, i]))
    return written.stack()


LOOPS["array"] = array


def derivative(make):
    """A program that takes the gradient of a function that `make` makes."""

    def program(strategy):
        with strategy.scope():
            function = tf.function(make())
            function(tf.ones([8, 12, 16]))  # It makes the variables.

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) ** 2)
            return tape.gradient(loss, x)

        @tf.function
        def train(x):
            return strategy.run(step, (x,))

        train(tf.ones([8, 12, 16]))

    return program


@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_their_gradients(name):
    program = derivative(lambda: LOOPS[name])
    if name == "scan_in_map_fn":
        with pytest.raises(
            tpu_check.CheckError, match="whether a TPU takes it is unknown"
        ):
            tpu_check.check(program, SLICE)
    else:
        assert len(tpu_check.check(program, SLICE).programs) == 1


# Each layer with a mask, or without.
@nightly(lambda name, masked: masked == (name in ("gru", "rnn")))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_and_their_gradients(name, masked):
    def make():
        before = [layers.Masking()] if masked else []
        return tf_keras.Sequential([*before, RECURRENT[name]()])

    report = tpu_check.check(derivative(make), SLICE)
    assert len(report.programs) == 1


def test_a_crash_is_an_error_that_names_the_program():
    program = derivative(lambda: tf.tanh)
    tpu_check.check(program, SLICE)
    text = "module {}"
    os.kill(passes._process._process.pid, signal.SIGSEGV)
    with pytest.raises(
        tpu_check.CheckError,
        match=r"program 'p': the stage crashed \(SIGSEGV\): .* is unknown",
    ):
        passes.run_passes(text, "canonicalize", "program 'p'", "the stage")
    assert passes.run_passes(text, "canonicalize", "", "").startswith("module")
    assert len(tpu_check.check(program, SLICE).programs) == 1


def test_a_width_that_is_unknown_is_not_called_a_number():
    def program(shape):
        def run(strategy):
            with strategy.scope():
                layer = one_layer()()

            @tf.function(input_signature=[tf.TensorSpec(shape, tf.int64)])
            def train(ids):
                strategy.run(lambda ids: layer({"dense_big": ids}), (ids,))

            train(tf.ones([BATCH, 3], tf.int64))

        return run

    for shape, message in [
        ([BATCH, None], "ids: the size of dimension 1 isn't known when"),
        ([None, 3], "ids: the number of samples isn't known when"),
    ]:
        with pytest.raises(ValueError, match=message):
            tpu_check.check(program(shape), SLICE)


def test_a_large_table_takes_no_memory():
    table = tfrs_embed.TableConfig("items", 2_000_000_000, 128)

    def program(strategy):
        with strategy.scope():
            layer = tfrs_embed.PartialTPUEmbedding(
                {"dense_big": tfrs_embed.FeatureConfig("dense_big", table)},
                "adam",
            )
        look_up(lambda: layer)(strategy)

    report = tpu_check.check(program, SLICE)
    [checked] = report.programs
    [update] = checked.program.calls  # The loss needs no values.
    assert update.slots == 2
    assert update.rows == 500_000_000
    # A chip's quarter of the table and its two slots.
    assert checked.program.argument_bytes > 3 * 500_000_000 * 128 * 4
    assert "715.3 GiB" in str(report)


def test_a_loop_and_a_step_outside_of_it():
    def program(strategy):
        with strategy.scope():
            layer = one_layer(pipelined=True)()

        def step(ids):
            with tf.GradientTape() as tape:
                vectors = layer({"dense_big": ids}, training=True)
                loss = tf.reduce_sum(vectors["dense_big"])
            return tape.gradient(loss, layer.trainable_variables)

        @tf.function
        def one(ids):
            strategy.run(step, (ids,))

        @tf.function
        def loop(ids):
            for _ in tf.range(3):
                strategy.run(step, (ids,))

        # TensorFlow can't pipeline what a loop calls: its steps are sequential.
        @tf.function
        def loop_of_calls(ids):
            for _ in tf.range(3):
                one(ids)

        for function in (one, loop, loop_of_calls):
            function(tf.range(BATCH))

    report = tpu_check.check(program, SLICE)
    assert {f.name: len(f.programs) for f in report.functions} == {
        "one": 1,
        "loop": 5,
        "loop_of_calls": 1,
    }


def limits(**others):
    """A layer with limits for all its buffers."""
    of_stack = {"big": 8}
    return one_layer(
        sparse_core_embedding_config=sparse_core_config(
            **{
                "max_ids_per_table": of_stack,
                "max_unique_ids_per_table": of_stack,
                "max_ids_per_chip_per_sample": 1,
                **others,
            }
        )
    )


@pytest.mark.parametrize(
    ("program", "warning"),
    [
        (look_up(limits()), None),
        (
            look_up(limits(allow_id_dropping=True)),
            r"allow_id_dropping=True: .* above max_ids_per_chip_per_sample=1 "
            r".* are dropped",
        ),
        (
            look_up(limits(), training=False),
            r"train looks tables up on a gradient tape, but updates none",
        ),
    ],
)
def test_warnings(program, warning):
    report = tpu_check.check(program, SLICE)
    wanted = [] if warning is None else [warning]
    for found, pattern in zip(report.warnings, wanted, strict=True):
        assert re.match(pattern, found)
        assert f"\nwarning: {found}" in str(report)
    assert _as_json(report)["warnings"] == report.warnings


def test_an_evaluation_needs_no_update():
    def program(strategy):
        with strategy.scope():
            layer = limits()()

        @tf.function
        def evaluate(ids):
            return strategy.run(layer, ({"dense_big": ids},))

        evaluate(tf.range(BATCH))

    assert tpu_check.check(program, SLICE).warnings == ()


def test_summaries_turn_pipelining_off(tmp_path):
    def program(strategy):
        with strategy.scope():
            layer = one_layer(pipelined=True)()

        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer({"dense_big": ids})["dense_big"])
            return tape.gradient(loss, layer.trainable_variables)

        @tf.function
        def loop(ids):
            for _ in tf.range(3):
                strategy.run(step, (ids,))

        writer = tf.summary.create_file_writer(str(tmp_path))
        with writer.as_default(), tf.summary.record_if(True):
            loop(tf.range(BATCH))

    report = tpu_check.check(program, SLICE)
    [function] = report.functions
    assert len(function.programs) < 5


def test_gradients_of_other_things_and_a_tape_around():
    def program(strategy):
        with strategy.scope():
            weight = tf.Variable(2.0)

        @tf.function
        def square(x):
            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((weight * x) ** 2)
                gradient = tape.gradient(loss, weight)
                context = tf.distribute.get_replica_context()
                weight.assign_sub(0.1 * context.all_reduce("MEAN", gradient))
                return loss

            return strategy.reduce("SUM", strategy.run(step, (x,)), axis=None)

        with tf.GradientTape() as tape:
            tape.watch(x := tf.ones([4]))
            loss = square(x)
        assert float(loss) == 0.0  # Nothing has run.

    assert len(tpu_check.check(program, SLICE).programs) == 1


def test_results_of_unknown_shape_and_strings():
    def program(strategy):
        @tf.function
        def step(x):
            def unknown(x):
                return tf.numpy_function(lambda x: x, [x], tf.string)

            strategy.run(lambda x: x + 1.0, (x,))
            return unknown(tf.strings.as_string(x)), tf.unique(x)[0]

        text, values = step(tf.ones([4]))
        assert text.numpy() == b""
        assert values.shape == [1]

    assert len(tpu_check.check(program, SLICE).programs) == 1


def test_functions_of_one_name_are_told_apart():
    def program(strategy):
        for size in (2, 3):
            traced(strategy, STEPS["add"])(tf.ones([size]))

    report = tpu_check.check(program, SLICE)
    assert [f.name for f in report.functions] == ["function", "function_2"]


def test_code_without_a_tpu_program_is_an_error():
    with pytest.raises(tpu_check.CheckError, match="no TPU program to check"):
        tpu_check.check(lambda strategy: tf.constant(1) + 1, SLICE)


def test_other_wheels_are_errors(monkeypatch):
    def program(strategy):
        raise AssertionError("It was run.")

    with monkeypatch.context() as patch:
        patch.setattr(tf, "__version__", "2.19.1")
        with pytest.raises(
            tpu_check.CheckError, match=r"tensorflow-tpu 2.20.0, found 2.19.1"
        ):
            tpu_check.check(program, SLICE)
    monkeypatch.setattr(tpu_library, "has_kernels", lambda: False)
    with pytest.raises(
        tpu_check.CheckError, match=r"pip install .*tensorflow-tpu==2.20.0"
    ):
        tpu_check.check(program, SLICE)


SCRIPT = """
    import sys

    import tensorflow as tf
    import tf_keras
    import tfrs_embed

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    strategy = tf.distribute.TPUStrategy(resolver)
    table = tfrs_embed.TableConfig("items", 100_000, 16)
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            {"item": tfrs_embed.FeatureConfig("item", table)}, "adagrad", True
        )
        model = tf_keras.Sequential([layer, helper.Take("item")])
        model.compile("sgd", "mse", steps_per_execution=5)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensors(
            ({"item": tf.range(64)}, tf.ones([64, 16]))
        ).repeat(100).map(lambda x, y: (x, y)).unbatch().batch(
            64, drop_remainder=True
        )
    )
    print("arguments", sys.argv[1:])
    if len(sys.argv) > 2:
        sys.exit(sys.argv[2])
    history = model.fit(data, epochs=int(sys.argv[1]), steps_per_epoch=50)
    model.save_weights("model.weights.h5")
    raise AssertionError("A table without values was saved.")
"""
HELPER = """
    import tf_keras

    class Take(tf_keras.layers.Layer):
        def __init__(self, key):
            super().__init__()
            self.key = key

        def call(self, inputs):
            return inputs[self.key]
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_model.py"
    (tmp_path / "helper.py").write_text(textwrap.dedent(HELPER))
    text = textwrap.dedent(SCRIPT)
    path.write_text(text.replace("import sys\n", "import sys\nimport helper\n"))
    return path


def command(*arguments, legacy="1"):
    return subprocess.run(
        [sys.executable, "-m", "tfrs_embed", "tpu-check", *map(str, arguments)],
        env={**environment("tpu:1x1"), "TF_USE_LEGACY_KERAS": legacy}
        | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tempfile.gettempdir(),
    )


def test_the_command_runs_a_script(script):
    done = command(script, "--topology", "v6e-4", "--", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "arguments ['3']" in done.stdout
    assert "v6e:2x2 (4 chips of 2 SparseCores): 5 programs" in done.stdout
    assert "not compiled: no jax and libtpu" in done.stdout
    assert "stopped at the second call of train_function" in done.stdout
    assert re.search(r"stopped: 'items/\w+' has no values", done.stdout)
    assert "items" in done.stdout
    # The lowering's own lines for each operation are left out.
    assert "Lowering Xla" not in done.stderr


def test_the_commands_errors(script, tmp_path, capsys):
    nothing = str(tmp_path / "nothing.py")
    assert main(["tpu-check", nothing, "--topology", SLICE]) == 2
    assert "error: there is no file" in capsys.readouterr().err
    done = command(script, "--topology", SLICE, "--", "3", "went wrong")
    assert done.returncode == 1
    assert "ended with went wrong" in done.stderr
    done = command(script, "--topology", SLICE, "--", "not a number")
    assert done.returncode == 1
    assert "invalid literal for int()" in done.stderr
    assert "my_model.py failed; see above" in done.stderr


OF_KERAS_3 = """
    import keras
    import tensorflow as tf

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            return inputs * tf.cast(
                tf.histogram_fixed_width(inputs, [0.0, 9.0])[0], tf.float32
            )

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    strategy = tf.distribute.TPUStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4), Counted()])
        model.compile("sgd", "mse")
    x = tf.ones([32, 4])
    model.fit(
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensors((x, x)).repeat()
        ),
        steps_per_epoch=2,
    )
"""


def test_an_error_names_the_line_of_a_layer_of_keras_3(tmp_path):
    path = tmp_path / "of_keras_3.py"
    path.write_text(textwrap.dedent(OF_KERAS_3).strip())
    done = command(path, "--topology", SLICE, legacy="")
    assert done.returncode == 1
    assert re.search(
        r"HistogramFixedWidth '\S*counted\S*', \S*of_keras_3.py:7\n",
        done.stderr,
    ), done.stderr[-3000:]


def test_keras_names_are_kept():
    # Nothing of TensorFlow's is left replaced behind a check.
    before = tf.distribute.cluster_resolver.TPUClusterResolver
    call = tf_keras.layers.Layer.__call__
    tpu_check.check(look_up(one_layer()), SLICE)
    assert tf.distribute.cluster_resolver.TPUClusterResolver is before
    assert tf_keras.layers.Layer.__call__ is call
    layer = one_layer()()
    assert layer({"dense_big": tf.range(3)})["dense_big"].shape == (3, 8)
    assert pathlib.Path(tpu_check.__file__).is_file()
