"""What a config names is looked up among its kind, and nothing is imported.

Layers of both Keras versions, in one process: a config may name objects of the
other version.
"""

import base64
import functools
import inspect
import json
import marshal
import pathlib
import subprocess
import sys
import zipfile

import h5py
import keras as keras_3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import tfrs_embed.keras3
from tensorflow.python.ops import init_ops, init_ops_v2

import tfrs_embed
from process_tiers import nightly
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.compat import keras_configs
from tfrs_embed.configs import serialization
from tfrs_embed.optimizers import (
    Regularized,
    RowWiseAdagrad,
    RowWiseAdam,
    conversion,
)

KERAS = {"keras2": tf_keras, "keras3": keras_3}
LAYERS = {tf_keras: tfrs_embed, keras_3: tfrs_embed.keras3}
KINDS = {
    "initializers": "Initializer",
    "regularizers": "Regularizer",
    "constraints": "Constraint",
    "optimizers.schedules": "LearningRateSchedule",
}

BOTH = pytest.mark.parametrize("keras", KERAS.values(), ids=KERAS)


def as_json(config):
    return json.loads(json.dumps(config))


def make_layer(keras, kind="PartialTPUEmbedding", **arguments):
    """A layer with all that a config may have of Keras's objects."""
    kind = getattr(LAYERS[keras], kind)
    if kind.__name__ == "Embedding":
        return kind(9, 4, **arguments)
    if kind.__name__ == "All2AllDenseEmbedding":
        return kind(9, 4, 1, 1, embedding_initializer="uniform", **arguments)
    adam = keras.optimizers.Adam(rate_of(keras))
    scaling = keras.mixed_precision.LossScaleOptimizer
    tables = [
        TableConfig(name, 9, 4, keras.initializers.Zeros(), optimizer)
        for name, optimizer in {
            "movie": adam,
            "user": Regularized(adam, clipvalue=1.0),
            "genre": scaling(keras.optimizers.SGD(rate_of(keras))),
            "year": RowWiseAdagrad(rate_of(keras)),
            "actor": Regularized(RowWiseAdam(rate_of(keras)), max_norm=2.0),
        }.items()
    ]
    features = [FeatureConfig(t.name, t) for t in tables]
    given = {"size_threshold": 0, "optimizer": "adagrad", **arguments}
    return kind(features, **given)


def rate_of(keras):
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


# Where a config has an object of Keras: the layer, and the keys to the object.
TABLE = ("PartialTPUEmbedding", "feature_config", "tables", 0, "initializer")
_OPTIMIZERS = ("PartialTPUEmbedding", "feature_config", "optimizers")
_RATE = ("config", "learning_rate")
_KERAS = ("config", "config")
PLACES = {
    "a table's initializer": TABLE,
    "the layer's initializer": (
        "All2AllDenseEmbedding",
        "embedding_initializer",
    ),
    "the layer's regularizer": (
        "PartialTPUEmbedding",
        "activity_regularizer",
    ),
    "an optimizer": (*_OPTIMIZERS, 0, "config"),
    "a scaled optimizer": (*_OPTIMIZERS, 2, *_KERAS, "inner_optimizer"),
    "a rate": (*_OPTIMIZERS, 0, *_KERAS, "learning_rate"),
    "a rate in Regularized": (
        *(*_OPTIMIZERS, 1, "config", "optimizer"),
        *(*_KERAS, "learning_rate"),
    ),
    "a scaled optimizer's rate": (
        *(*_OPTIMIZERS, 2, *_KERAS, "inner_optimizer", *_RATE),
    ),
    "a table optimizer's rate": (*_OPTIMIZERS, 3, *_RATE),
    **{
        f"Embedding's {name}": ("Embedding", name)
        for name in (
            "embeddings_initializer",
            "embeddings_regularizer",
            "activity_regularizer",
            "embeddings_constraint",
        )
    },
}


@functools.cache
def stored_config(keras, kind):
    """A layer's config as JSON."""
    return json.dumps(make_layer(keras, kind).get_config())


def config_with(keras, place, value):
    """A class, and its layer's config with another value in a place."""
    kind, *keys, last = place
    config = json.loads(stored_config(keras, kind))
    held = config
    for key in keys:
        held = held[key]
    held[last] = value
    return getattr(LAYERS[keras], kind), config


CANARY = """
import pathlib
from tensorflow.python.ops import init_ops_v2
ran = pathlib.Path(__file__).with_name("ran")
ran.touch()

class Evil(init_ops_v2.Ones):
    @classmethod
    def from_config(cls, config=None):
        ran.touch()
        return cls()
    _deserialize = from_config

def evil(*args, **kwargs):
    ran.touch()
"""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The name of a module that nothing may import; `ran` tells by a file."""
    name = "canary_of_configs"
    (tmp_path / f"{name}.py").write_text(CANARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    ran = (tmp_path / "ran").exists()
    imported = sys.modules.pop(name, None)
    assert not ran
    assert imported is None


def code_that_touches(path):
    """A function of a file's, as Keras encodes it."""
    code = compile(
        f"lambda *a, **k: open({str(path)!r}, 'w') and 0.0", "code", "eval"
    ).co_consts[0]
    return base64.b64encode(marshal.dumps(code)).decode()


def old_lambda(path):
    return {
        "module": "tensorflow.python.keras.layers.core",
        "class_name": "Lambda",
        "registered_name": None,
        "config": {
            "name": "l",
            "function": [code_that_touches(path), None, None],
            "function_type": "lambda",
            "module": "json",
            "arguments": {},
            "output_shape": None,
            "output_shape_type": "raw",
            "output_shape_module": None,
        },
    }


def attacks(canary, folder):
    """Configs that import a module, run code, or make what is of no kind."""
    ran = str(folder / "ran")
    evil = {"module": canary, "class_name": "Evil", "config": {}}
    ours = "tfrs_embed>PartialTPUEmbedding"
    builtin = {"module": "keras.initializers", "registered_name": None}

    def constant(value):
        return {**builtin, "class_name": "Constant", "config": {"value": value}}

    def function(module, name):
        return {
            "module": module,
            "class_name": "function",
            "config": name,
            "registered_name": name,
        }

    anonymous = {"value": [code_that_touches(ran), None, None]}
    touch = {"args": ["touch", ran]}
    return {
        "a class": evil,
        "a class with its name": {**evil, "registered_name": "Evil"},
        "a function": function(canary, "evil"),
        "a class by a registered name": {
            **evil,
            "class_name": ours,
            "registered_name": None,
        },
        "a class with a registered name for its config": {
            **evil,
            "registered_name": None,
            "config": ours,
        },
        "a spec": {
            "class_name": "__typespec__",
            "spec_name": "Evil",
            "module": canary,
            "registered_name": None,
            "config": [],
        },
        "nested": constant(evil),
        "nested in a list": constant([1.0, [evil]]),
        "nested in what looks like an array": constant(
            {"class_name": "__numpy__", "value": evil}
        ),
        "nested in a class without a config": constant(
            {"class_name": "Ones", "value": evil}
        ),
        "nested by a registered name": constant(
            {**evil, "class_name": ours, "registered_name": None}
        ),
        "the config itself": {**builtin, "class_name": "Ones", "config": evil},
        "a registered layer": {
            "class_name": "Embedding",
            "registered_name": "tfrs_embed>Embedding",
            "config": {"input_dim": 2, "output_dim": 2},
        },
        "a registered layer with it": {
            "class_name": "Embedding",
            "registered_name": "tfrs_embed>Embedding",
            "config": {
                "input_dim": 2,
                "output_dim": 2,
                "embeddings_initializer": evil,
            },
        },
        "a lambda layer of TensorFlow": old_lambda(ran),
        "a nested lambda layer of TensorFlow": constant(old_lambda(ran)),
        "a lambda": {"class_name": "__lambda__", "config": anonymous},
        "a nested lambda": constant(
            {"class_name": "__lambda__", "config": anonymous}
        ),
        "a class of an imported module": {
            "module": "subprocess",
            "class_name": "Popen",
            "config": touch,
        },
        "a function of an imported module": function("subprocess", "run"),
        "a module in TensorFlow's": {
            "module": init_ops_v2.__name__,
            "class_name": "math_ops",
            "config": {},
        },
        "a function in TensorFlow's": function(
            init_ops_v2.__name__, "_check_distribution_arguments"
        ),
        "a module in Keras's": {"class_name": "deserialize", "config": {}},
        "a dunder name": {"class_name": "__class__", "config": {}},
        "a name that is none": {"class_name": ["Ones"], "config": {}},
        "a module that is none": {
            "module": ["x"],
            "class_name": "Ones",
            "config": {},
        },
        "no name": {"config": {}},
    }


NAMES = list(attacks("canary", pathlib.Path()))


def test_the_canary_sings(tmp_path, canary):
    # As tf_keras itself reads these configs.
    for name in ("a class", "nested", "a class by a registered name"):
        config = attacks(canary, tmp_path)[name]
        try:
            tf_keras.initializers.deserialize(config)
            tf_keras.saving.deserialize_keras_object(config)
        except TypeError:
            pass
        assert canary in sys.modules, name
        assert (tmp_path / "ran").exists()
        del sys.modules[canary]
        (tmp_path / "ran").unlink()


# Where a config may name its Keras: that of the layer, or the other.
OTHERS = ({}, {"keras": "tf_keras"}, {"keras": "keras"})


@BOTH
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attack", NAMES)
def test_a_config_runs_no_code(attack, place, keras, tmp_path, canary):
    value = attacks(canary, tmp_path)[attack]
    for other in OTHERS if place.endswith("'s initializer") else OTHERS[:1]:
        cls, config = config_with(keras, PLACES[place], {**value, **other})
        with pytest.raises(ValueError):
            cls.from_config(config)


@BOTH
@pytest.mark.parametrize("other", [None, "tf_keras", "keras"])
def test_an_unknown_initializer_is_an_error_that_names_the_table(keras, other):
    value = {"module": "nowhere", "class_name": "Evil", "config": {}}
    name = keras.__name__
    if other is not None:
        value["keras"] = name = other
    cls, config = config_with(keras, TABLE, value)
    message = f"Table 'movie': .*nowhere.*Evil.* {name}'s initializers"
    with pytest.raises(ValueError, match=message):
        cls.from_config(config)


@BOTH
def test_an_unknown_keras_is_an_error(keras, canary):
    cls, config = config_with(keras, TABLE, {"keras": canary})
    with pytest.raises(ValueError, match=f"A Keras is one of .*'{canary}'"):
        cls.from_config(config)


def edit_keras_file(path, initializer):
    """Gives the table of a .keras file's model another initializer."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    config = json.loads(contents["config.json"])
    replace(config, initializer)
    contents["config.json"] = json.dumps(config)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in contents.items():
            file.writestr(name, data)


def replace(config, initializer):
    layer = config["config"]["layers"][1]["config"]
    layer["feature_config"]["tables"][0]["initializer"] = initializer


def model_of(keras, table):
    kind = LAYERS[keras].PartialTPUEmbedding
    layer = kind(FeatureConfig("f", table), "adagrad", size_threshold=0)
    ids = keras.Input([], dtype="int64")
    return keras.Model(ids, layer(ids))


# What files add to from_config: each needs one attack in make test.
SOME = ("a class", "nested", "a nested lambda layer of TensorFlow")


@BOTH
@nightly(lambda attack: attack not in SOME)
@pytest.mark.parametrize("attack", NAMES)
def test_a_keras_file_runs_no_code_in_safe_mode(
    attack, keras, tmp_path, canary
):
    path = tmp_path / "model.keras"
    model_of(keras, TableConfig("t", 9, 4)).save(path)
    for other in OTHERS:
        edit_keras_file(path, {**attacks(canary, tmp_path)[attack], **other})
        with pytest.raises((ValueError, TypeError)):
            keras.saving.load_model(path, safe_mode=True)


@nightly(lambda attack: attack not in SOME)
@pytest.mark.parametrize("attack", NAMES)
def test_an_hdf5_file_runs_no_code(attack, tmp_path, canary):
    path = tmp_path / "model.h5"
    model_of(tf_keras, TableConfig("t", 9, 4)).save(path)
    for other in OTHERS:
        with h5py.File(path, "r+") as file:
            config = json.loads(file.attrs["model_config"])
            replace(config, {**attacks(canary, tmp_path)[attack], **other})
            file.attrs["model_config"] = json.dumps(config)
        with pytest.raises(ValueError):
            tf_keras.models.load_model(path)


@BOTH
def test_a_lambda_runs_where_safe_mode_is_off(keras, tmp_path):
    # Keras stores no globals.
    start = lambda shape: __import__("tensorflow").fill(shape, 7.0)  # noqa: E731
    path = tmp_path / "model.keras"
    model_of(keras, TableConfig("t", 9, 4, start)).save(path)
    with pytest.raises((ValueError, TypeError), match="lambda"):
        keras.saving.load_model(path)
    loaded = keras.saving.load_model(path, safe_mode=False)
    np.testing.assert_array_equal(loaded(tf.constant([3])), [[7.0] * 4])


def classes_of(keras, kind):
    """The public classes of a kind, each once."""
    module = keras
    for name in kind.split("."):
        module = getattr(module, name)
    base = getattr(module, KINDS[kind])
    found = [each for each in vars(module).values() if inspect.isclass(each)]
    return sorted(
        {each for each in found if issubclass(each, base) and each is not base},
        key=lambda each: each.__name__,
    )


ARGUMENTS = {
    "Constant": [0.5],
    "CosineDecay": [0.1, 10],
    "CosineDecayRestarts": [0.1, 10],
    "ExponentialDecay": [0.1, 10, 0.5],
    "InverseTimeDecay": [0.1, 10, 0.5],
    "PiecewiseConstantDecay": [[1, 2], [0.3, 0.2, 0.1]],
    "PolynomialDecay": [0.1, 10],
    "STFT": ["real", None],  # Others need scipy.
}


def make(cls):
    return cls(*ARGUMENTS.get(cls.__name__, []))


@pytest.mark.parametrize(
    ("keras", "kind", "cls"),
    [
        pytest.param(keras, kind, cls, id=f"{name}-{cls.__name__}")
        for name, keras in KERAS.items()
        for kind in KINDS
        for cls in classes_of(keras, kind)
    ],
)
def test_every_public_object_of_a_keras_is_made_again(keras, kind, cls):
    given = make(cls)
    module = keras
    for name in kind.split("."):
        module = getattr(module, name)
    stored = as_json(module.serialize(given))
    again = keras_configs.deserialize(stored, kind, keras, "Table 't'")
    assert type(again) is cls
    assert again.get_config() == given.get_config()
    assert as_json(module.serialize(given)) == stored
    # As HDF5 files and SavedModels have it.
    short = {name: stored[name] for name in ("class_name", "config")}
    again = keras_configs.deserialize(short, kind, keras, "Table 't'")
    assert type(again) is cls


@BOTH
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(make(cls), id=f"{cls.__module__}.{cls.__name__}")
        for cls in [
            *classes_of(tf_keras, "initializers"),
            *classes_of(keras_3, "initializers"),
            *(
                each
                for each in vars(init_ops_v2).values()
                if inspect.isclass(each)
                and issubclass(each, init_ops_v2.Initializer)
                and each is not init_ops_v2.Initializer
            ),
            init_ops.RandomNormal,
        ]
    ],
)
def test_every_initializer_is_made_again_in_layers_of_both(keras, given):
    stored = as_json(
        serialization.initializer_to_config(given, keras, "Table 't'")
    )
    again = serialization.initializer_from_config(stored, keras, "Table 't'")
    assert type(again) is type(given)
    assert again.get_config() == given.get_config()


@BOTH
def test_objects_of_a_program_are_taken_as_they_are(keras):
    given = {
        "embeddings_initializer": keras.initializers.Zeros(),
        "embeddings_regularizer": keras.regularizers.L2(0.1),
        "embeddings_constraint": keras.constraints.NonNeg(),
        "activity_regularizer": lambda x: 0.0,
    }
    front = LAYERS[keras]
    config = {**front.Embedding(9, 4).get_config(), **given}
    made = front.Embedding.from_config(config)
    assert {name: getattr(made, name) for name in given} == given


@BOTH
def test_an_initializer_of_the_other_keras_is_made_again(keras):
    other = tf_keras if keras is keras_3 else keras_3
    given = other.initializers.HeNormal(seed=1)
    stored = as_json(keras.initializers.serialize(given))
    again = keras_configs.deserialize(stored, "initializers", keras, "A table")
    assert type(again) is type(given)


ROWS = np.arange(36, dtype="float32").reshape(9, 4)


@BOTH
@pytest.mark.parametrize("array", [np.asarray, np.ndarray.tolist, tf.constant])
@pytest.mark.parametrize(
    "constant",
    [
        tf_keras.initializers.Constant,
        keras_3.initializers.Constant,
        # It takes no tensors.
        lambda rows: tf.constant_initializer(np.asarray(rows)),
    ],
    ids=["tf_keras", "keras_3", "tf"],
)
def test_a_table_that_begins_with_rows_is_made_again(constant, array, keras):
    table = TableConfig("t", 9, 4, constant(array(ROWS)))
    model = model_of(keras, table)
    layer = model.layers[1]
    again = type(layer).from_config(as_json(layer.get_config()))
    again(tf.constant([1]))
    np.testing.assert_array_equal(again.embedding_tables["t"], ROWS)


@BOTH
def test_a_seed_generator_is_made_again(keras):
    given = keras_3.initializers.RandomNormal(
        seed=keras_3.random.SeedGenerator(3)
    )
    stored = as_json(
        serialization.initializer_to_config(given, keras, "Table 't'")
    )
    again = serialization.initializer_from_config(stored, keras, "Table 't'")
    assert again.get_config() == given.get_config()


class Sevens(tf_keras.initializers.Initializer):
    """Is not registered."""

    def __init__(self, value=7.0):
        self.value = value

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.fill(shape, self.value)

    def get_config(self):
        return {"value": self.value}


class SevensOfKeras3(keras_3.initializers.Initializer):
    """Is not registered."""

    __init__ = Sevens.__init__
    __call__ = Sevens.__call__
    get_config = Sevens.get_config


def own_of(keras):
    return Sevens if keras is tf_keras else SevensOfKeras3


def local_initializer(form, keras):
    """A new class, or function, that no module has."""

    class Local(own_of(keras)):
        pass

    class Plain:
        __init__ = Sevens.__init__
        __call__ = Sevens.__call__
        get_config = Sevens.get_config

        @classmethod
        def from_config(cls, config):
            return cls(**config)

    class Bare:
        __init__ = Sevens.__init__
        __call__ = Sevens.__call__
        get_config = Sevens.get_config

    def function(shape, dtype=None):
        return tf.fill(shape, 7.0)

    forms = {"own": Local, "plain": Plain, "bare": Bare, "function": function}
    return forms[form]


def assert_sevens(loaded, keras):
    """A new layer of the model's config begins with 7."""
    layer = loaded.layers[1]
    again = type(layer).from_config(as_json(layer.get_config()))
    again(tf.constant([1]))
    np.testing.assert_array_equal(
        again.embedding_tables["t"], np.full([9, 4], 7.0)
    )


@nightly(
    lambda way, keras: (
        way == ("scope" if keras is KERAS["keras2"] else "custom_objects")
    )
)
@BOTH
@pytest.mark.parametrize("form", ["own", "plain", "bare", "function"])
@pytest.mark.parametrize("way", ["registered", "custom_objects", "scope"])
def test_a_file_with_a_registered_initializer_loads(way, form, keras, tmp_path):
    kind = local_initializer(form, keras)
    given = kind if form == "function" else kind()
    path = tmp_path / "model.keras"
    if way == "registered":
        name = f"{form}_{keras.__name__}"
        keras.saving.register_keras_serializable("tests", name)(kind)
    model = model_of(keras, TableConfig("t", 9, 4, given))
    model.save(path)
    if way == "registered":
        loaded = keras.saving.load_model(path)
        assert_sevens(loaded, keras)
        return
    custom = {keras.saving.get_registered_name(kind): kind}
    if way == "custom_objects":
        loaded = keras.saving.load_model(path, custom_objects=custom)
    else:
        with keras.saving.custom_object_scope(custom):
            loaded = keras.saving.load_model(path)
    with keras.saving.custom_object_scope(custom):
        assert_sevens(loaded, keras)


@BOTH
def test_an_initializer_without_a_config_is_an_error_of_its_table(keras):
    class Unstored:
        __init__ = Sevens.__init__
        __call__ = Sevens.__call__

    layer = model_of(keras, TableConfig("t", 9, 4, Unstored())).layers[1]
    with pytest.raises(
        TypeError, match=r"Table 't': .*Unstored(.|\n)*get_config"
    ):
        layer.get_config()


@BOTH
def test_a_registered_name_is_a_function_or_class_of_its_kind(keras):
    function = local_initializer("function", keras)
    custom = {"one": function, "two": own_of(keras)}
    with keras.saving.custom_object_scope(custom):
        cls, config = config_with(keras, TABLE, "one")
        [again, *_] = cls.from_config(config)._spec.tables
        assert again.initializer is function
        cls, config = config_with(keras, TABLE, "two")
        [again, *_] = cls.from_config(config)._spec.tables
        assert type(again.initializer) is own_of(keras)
    for name in ("tfrs_embed>Embedding", "tfrs_embed>DynamicEmbedding"):
        cls, config = config_with(keras, TABLE, name)
        with pytest.raises(ValueError, match=f"Table 'movie': .*{name}"):
            cls.from_config(config)


@BOTH
@pytest.mark.parametrize("kind", [Sevens, SevensOfKeras3])
def test_a_file_with_an_initializer_of_an_imported_module_loads(
    kind, keras, tmp_path
):
    path = tmp_path / "model.keras"
    model_of(keras, TableConfig("t", 9, 4, kind())).save(path)
    assert_sevens(keras.saving.load_model(path), keras)


@pytest.mark.more
def test_an_initializer_of_a_module_that_was_not_imported_is_an_error(tmp_path):
    (tmp_path / "starts.py").write_text(
        "import tf_keras\nclass Start(tf_keras.initializers.Ones): pass\n"
    )
    code = """
import sys, tf_keras, tfrs_embed
if sys.argv[1] == "save":
    import starts
    table = tfrs_embed.TableConfig("t", 9, 4, starts.Start())
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table), "sgd", size_threshold=0)
    ids = tf_keras.Input([], dtype="int64")
    tf_keras.Model(ids, layer(ids)).save("model.keras")
else:
    try:
        tf_keras.models.load_model("model.keras")
    except ValueError as error:
        assert "Table 't': {'module': 'starts'" in str(error), error
        assert "starts" not in sys.modules
    else:
        raise AssertionError
    import starts
    tf_keras.models.load_model("model.keras")
"""
    for step in ("save", "load"):
        subprocess.run(
            [sys.executable, "-c", code, step], cwd=tmp_path, check=True
        )


@tf_keras.saving.register_keras_serializable("tests")
class Doubled(Sevens):
    """Reads the initializer in its config as programs do."""

    def __call__(self, shape, dtype=None, **kwargs):
        return 2 * self.value(shape)

    def get_config(self):
        return {"value": tf_keras.saving.serialize_keras_object(self.value)}

    @classmethod
    def from_config(cls, config):
        return cls(tf_keras.saving.deserialize_keras_object(config["value"]))


@BOTH
@pytest.mark.parametrize(
    "inner",
    [tf_keras.initializers.Constant(ROWS), Sevens(), Doubled(Sevens())],
    ids=["public", "imported", "registered"],
)
def test_an_initializer_in_an_initializer_is_made_again(inner, keras):
    given = Doubled(inner)
    stored = as_json(
        serialization.initializer_to_config(given, keras, "Table 't'")
    )
    again = serialization.initializer_from_config(stored, keras, "Table 't'")
    np.testing.assert_array_equal(again([9, 4]), given([9, 4]))


@BOTH
@pytest.mark.parametrize("attack", [n for n in NAMES if n != "no name"])
def test_an_initializer_in_an_initializer_runs_no_code(
    attack, keras, tmp_path, canary
):
    stored = {
        "keras": "tf_keras",
        "class_name": "Doubled",
        "registered_name": "tests>Doubled",
        "config": {"value": attacks(canary, tmp_path)[attack]},
    }
    cls, config = config_with(keras, TABLE, stored)
    with pytest.raises(ValueError):
        cls.from_config(config)


@BOTH
def test_a_schedule_of_a_program_is_made_again(keras):
    base = keras.optimizers.schedules.LearningRateSchedule

    @keras.saving.register_keras_serializable("tests", f"R{keras.__name__}")
    class Rate(base):
        def __call__(self, step):
            return 0.25

        def get_config(self):
            return {}

    layer = make_layer(keras, optimizer=keras.optimizers.Adam(Rate()))
    again = type(layer).from_config(as_json(layer.get_config()))
    assert isinstance(again._arguments.optimizer, keras.optimizers.Adam)
    rate = again._arguments.optimizer.get_config()["learning_rate"]
    assert rate["registered_name"] == f"tests>R{keras.__name__}"


@BOTH
def test_a_layer_with_all_of_keras_objects_is_made_again(keras):
    kinds = {
        "PartialTPUEmbedding": {"activity_regularizer": "l2"},
        "All2AllDenseEmbedding": {},
        "Embedding": {
            "embeddings_regularizer": keras.regularizers.L2(0.5),
            "activity_regularizer": keras.regularizers.L1(0.25),
            "embeddings_constraint": keras.constraints.NonNeg(),
        },
    }
    for kind, arguments in kinds.items():
        layer = make_layer(keras, kind, **arguments)
        config = as_json(layer.get_config())
        kept = as_json(config)
        again = type(layer).from_config(config)
        assert config == kept
        assert as_json(again.get_config()) == kept


def test_a_legacy_optimizer_is_made_again():
    given = tf_keras.optimizers.legacy.Adam(rate_of(tf_keras))
    stored = as_json(conversion.serialize(given))
    again = conversion.deserialize(stored, tf_keras, "Table 't'")
    assert type(again) is type(given)
    assert again.get_config() == given.get_config()


@pytest.mark.parametrize("name", ["Adam", "Custom>Adam"])
def test_an_optimizer_of_a_saved_model_is_made_again(name):
    given = tf_keras.optimizers.Adam(rate_of(tf_keras))
    stored = as_json(conversion.serialize(given))
    inner = stored["config"]["config"]
    stored["config"] = {"class_name": name, "config": inner}
    again = conversion.deserialize(stored, tf_keras, "Table 't'")
    assert type(again) is type(given)
    assert again.get_config() == given.get_config()


@BOTH
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (TABLE, 5, "Table 'movie': 5 isn't one of .* initializers"),
        (
            TABLE,
            {"class_name": "Ones", "config": {"x": 1}},
            "Table 'movie': .* Ones can't be made of the config",
        ),
        (
            TABLE,
            {"class_name": "Ones", "config": [1]},
            "Table 'movie': .* Ones can't be made of the config",
        ),
        (
            (*_OPTIMIZERS, 3, "class_name"),
            "Nadam",
            "A table's optimizer must be one of .* 'Nadam'",
        ),
        (
            (*_OPTIMIZERS, 0, "config", "class_name"),
            "Nadam",
            "A table's optimizer must be one of .* 'Nadam'",
        ),
        (
            ("PartialTPUEmbedding", "feature_config"),
            [],
            "PartialTPUEmbedding: its config isn't",
        ),
        (
            (*TABLE[:-1], "storage"),
            {"class": "Path"},
            "declaration's class must be one of .* 'Path'",
        ),
    ],
)
def test_a_value_that_no_layer_stores_is_an_error(place, value, message, keras):
    cls, config = config_with(keras, place, value)
    with pytest.raises(ValueError, match=message):
        cls.from_config(config)


@BOTH
@pytest.mark.parametrize("of", ["keras", "tensorflow"])
def test_an_initializer_of_too_many_numbers_does_not_go_into_json(keras, of):
    values = np.broadcast_to(np.float32(1), [2**21 + 1, 8])  # Takes no memory.
    kind = keras.initializers.Constant
    if of == "tensorflow":
        kind = tf.constant_initializer
    start = kind(values)
    table = TableConfig("t", *values.shape, start)
    own = LAYERS[keras]
    partial = own.PartialTPUEmbedding(FeatureConfig("f", table), "sgd")
    for layer, where in (
        (partial, "Table 't'"),
        (own.Embedding(*values.shape, start, name="e"), "Layer 'e': embedd"),
    ):
        match = f"{where}.* at most 16,777,216 numbers .* has 16,777,224"
        with pytest.raises(NotImplementedError, match=match):
            layer.get_config()
    few = TableConfig("t", 9, 4, kind(np.ones([9, 4], np.float32)))
    layer = own.PartialTPUEmbedding(FeatureConfig("f", few), "sgd")
    again = type(layer).from_config(as_json(layer.get_config()))
    assert np.array_equal(again([[3]]), layer([[3]]))
