"""tf_keras's layers and Keras 3's: imports, and what moves between them.

Which versions of Keras a program has is decided as it imports them, so each of
these programs is a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

from nightly_flag import ALL
from process_tiers import nightly
from run_in_processes import TESTS

pytestmark = pytest.mark.xdist_group("two_keras_versions")


def run(code, *arguments, **env):
    """Runs a program in which nothing says which Keras is tf.keras.

    Args:
        code: the program.
        *arguments: its arguments.
        **env: environment variables.

    Returns:
        The finished process.
    """
    kept = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    path = os.pathsep.join([str(TESTS.parent), kept.pop("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**kept, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def require(code, *arguments, **env):
    done = run(code, *arguments, **env)
    assert done.returncode == 0, done.stderr[-3000:]


USE = """
import sys
import numpy as np
import tensorflow as tf
import tfrs_embed
{imports}
table = tfrs_embed.TableConfig("t", 100, 4, "uniform")
plain = tfrs_embed.TableConfig("p", 100, 4)
small = tfrs_embed.TableConfig("s", 5, 4)
layer = {layers}.PartialTPUEmbedding(
    [tfrs_embed.FeatureConfig(t.name, t) for t in (table, plain, small)],
    keras.optimizers.Adagrad(0.1),
    size_threshold=9,
)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(layer([tf.constant([1, 2])] * 3)[0])
tape.gradient(loss, [v.value if hasattr(v, "path") else v
                     for v in layer.trainable_variables])
assert layer.step.numpy() == 1
layer.from_config(layer.get_config())
assert "{other}" not in sys.modules
"""


def test_keras_3_needs_no_tf_keras():
    code = USE.format(
        imports="import keras, tfrs_embed.keras3",
        layers="tfrs_embed.keras3",
        other="tf_keras",
    )
    require(code)


def test_tf_keras_needs_no_keras_3():
    # Without the variable TensorFlow itself imports Keras 3.
    code = USE.format(
        imports="import tf_keras as keras", layers="tfrs_embed", other="keras"
    )
    require(code, TF_USE_LEGACY_KERAS="1")


SAVE = """
import sys
import tensorflow as tf
import tf_keras
import tfrs_embed
x = tf_keras.Input([], dtype=tf.int64)
feature = tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 100, 4))
layer = tfrs_embed.PartialTPUEmbedding(feature, "sgd", size_threshold=9)
model = tf_keras.Model(x, layer(x))
model.save(sys.argv[1])
"""
LOAD = """
import sys
import tfrs_embed
layers = "tfrs_embed.layers.keras2"
assert (layers in sys.modules) == ("tf_keras" in sys.modules)
import tf_keras
model = tf_keras.models.load_model(sys.argv[1])
assert model.layers[1].__class__ is tfrs_embed.PartialTPUEmbedding
"""


@pytest.mark.more
@nightly(lambda name: name != "model.keras")
@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model"])
def test_tf_keras_finds_the_layers_of_a_file(name, tmp_path):
    require(SAVE, tmp_path / name)
    if ALL:
        require(LOAD, tmp_path / name, "", TF_USE_LEGACY_KERAS="1")
    # Where tf_keras is imported later.
    require(LOAD, tmp_path / name, "")


MOVE = """
import keras
import numpy as np
import tensorflow as tf
import tf_keras
import tfrs_embed
import tfrs_embed.keras3

tables = [
    tfrs_embed.TableConfig(n, r, 4) for n, r in (("a.b/c", 100), ("s", 5))
]
features = {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables}
KINDS = {
    "PartialTPUEmbedding": dict(
        feature_config=features, optimizer="adam", size_threshold=9),
    "DistributedEmbedding": dict(
        feature_configs=features, optimizer="adagrad", size_threshold=9),
    "All2AllDenseEmbedding": dict(
        max_vocabulary_size_per_gpu=50, embedding_vec_size=4, slot_num=1,
        nnz_per_slot=1, optimizer="adagrad"),
    "Embedding": dict(input_dim=10, output_dim=4),
}


def train(layer, rows):
    if hasattr(layer, "table"):
        ids = tf.constant(rows, tf.int64)[:, None, None]
    elif hasattr(layer, "tables"):
        ids = {n: tf.constant(rows, tf.int64) for n in features}
    else:
        ids = tf.constant(rows, tf.int64)
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(layer(ids))
        loss = tf.add_n([tf.reduce_sum(o * o) for o in outputs])
    weights = [getattr(v, "value", v) if hasattr(v, "path") else v
               for v in layer.trainable_variables]
    gradients = tape.gradient(loss, weights)
    for weight, gradient in zip(weights, gradients):
        weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return outputs


for name, arguments in KINDS.items():
    for there, here in (
        (tfrs_embed, tfrs_embed.keras3), (tfrs_embed.keras3, tfrs_embed)
    ):
        old, new = (getattr(m, name)(**arguments) for m in (there, here))
        train(old, [1, 2])
        path = tf.train.Checkpoint(layer=old).save(f"{name}/{there.__name__}")
        status = tf.train.Checkpoint(layer=new).restore(path)
        # Other keys would get random rows.
        for rows in ([1, 2], [2, 1], [1, 1]):
            for a, b in zip(train(old, rows), train(new, rows)):
                np.testing.assert_array_equal(a, b)
        status.assert_consumed()
"""


def test_checkpoints_move_from_one_keras_to_the_other(tmp_path):
    """Their keys are the same, and training goes on as it would have."""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{MOVE}"
    require(code)


WRONG = {
    "t3.Embedding(5, 2)(tf_keras.Input([], dtype='int64'))": (
        "TypeError",
        ("KerasTensor of tf_keras", "keras.Input", "tfrs_embed itself"),
    ),
    "inside(t3.Embedding(5, 2))([1])": (
        "TypeError",
        ("called by Inside 'inside'", "keras.Model", "tfrs_embed itself"),
    ),
    "t3.PartialTPUEmbedding(feature, tf_keras.optimizers.Adam())": (
        "TypeError",
        ("tf_keras's", "Keras 3 layer", "keras.optimizers"),
    ),
    "tfrs_embed.PartialTPUEmbedding(feature, keras.optimizers.Adam())": (
        "TypeError",
        ("Keras 3's", "tf_keras layer", "tf_keras.optimizers"),
    ),
    "t3.PartialTPUEmbedding(feature, keras.optimizers.Lion())": (
        "TypeError",
        (
            "Lion can't train a table",
            "use SGD, Adagrad, Adam, ",
        ),
    ),
    "t3.PartialTPUEmbedding(feature, keras.optimizers.Adam(use_ema=True))": (
        "ValueError",
        ("Keras Adam", "use_ema=True"),
    ),
    "t3.PartialTPUEmbedding(feature, 'sgd', size_treshold=9)": (
        "ValueError",
        ("size_treshold",),
    ),
    "t3.Embedding(5, 2)([1, 7])": ("InvalidArgumentError", ("id 7",)),
    "under(tfrs_embed.testing.EmulatedTPUStrategy((1, 1)))": (
        "NotImplementedError",
        ("EmulatedTPUStrategy", "in a model of tf_keras"),
    ),
}


@pytest.fixture(scope="module")
def printed():
    """What goes wrong first, as lines, and then, by the code of WRONG."""
    script = """
import json, sys, unittest.mock
import keras, tensorflow as tf, tf_keras
import tfrs_embed
for owner, name, value in (
    (keras, "__version__", "3.11.3"), (keras.backend, "backend", lambda: "jax")
):
    with unittest.mock.patch.object(owner, name, value):
        try:
            import tfrs_embed.keras3
        except ImportError as error:
            print(error)
import tfrs_embed.keras3 as t3
feature = tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 100, 4))

def inside(layer):
    class Inside(tf_keras.Model):
        def call(self, inputs):
            return layer(inputs)

    return Inside()

def under(strategy):
    with strategy.scope():
        t3.DistributedEmbedding(feature)

raised = {}
for code in json.loads(sys.argv[1]):
    try:
        eval(code)
    except Exception as error:
        raised[code] = [type(error).__name__, str(error)]
print("RAISED", json.dumps(raised))
"""
    done = run(script, json.dumps(list(WRONG)))
    imports, _, found = done.stdout.partition("RAISED ")
    assert found, done.stderr[-3000:]
    return imports.splitlines(), json.loads(found)


@pytest.mark.parametrize("code", WRONG)
def test_what_goes_wrong_says_so(printed, code):
    found, message = printed[1][code]
    kind, words = WRONG[code]
    assert found == kind
    for word in words:
        assert word in message


def test_an_older_keras_3_or_another_backend_is_an_error(printed):
    """Stand-ins for these: neither is a dependency of anything here."""
    old, backend = printed[0]
    assert "tfrs_embed.keras3 needs Keras 3.12" in old
    assert "here is 3.11.3" in old
    assert "tfrs_embed.keras3 needs Keras 3 on TensorFlow" in backend
    assert "KERAS_BACKEND=tensorflow" in backend


SAVE_IN_ONE = """
import sys, importlib
keras = importlib.import_module(sys.argv[1])
import tfrs_embed
layers = tfrs_embed.keras3 if sys.argv[1] == "keras" else tfrs_embed
table = tfrs_embed.TableConfig("t", 20, 4)
layer = layers.PartialTPUEmbedding(tfrs_embed.FeatureConfig("f", table), "sgd")
ids = keras.Input([], dtype="int64")
model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
for kind in (".keras", ".h5"):
    model.save(sys.argv[2] + kind)
"""
LOAD_IN_ANOTHER = """
import sys, importlib
import tfrs_embed
keras = importlib.import_module(sys.argv[1])
for kind in (".keras", ".h5"):
    model = keras.models.load_model(sys.argv[2] + kind)
    assert type(model.layers[1]).__module__ == sys.argv[3]
"""


# Of tf_keras's, test_tf_keras_finds_the_layers_of_a_file shows it.
@pytest.mark.more
@nightly(lambda keras: keras == "tf_keras")
@pytest.mark.parametrize(
    ("keras", "layers"), [("keras", "keras3"), ("tf_keras", "keras2")]
)
def test_a_keras_imported_later_finds_the_layers_of_a_file(
    keras, layers, tmp_path
):
    path = str(tmp_path / "model")
    require(SAVE_IN_ONE, keras, path)
    require(LOAD_IN_ANOTHER, keras, path, f"tfrs_embed.layers.{layers}")
