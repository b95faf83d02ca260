"""Checkpoints of other libraries are restored into this package's layers."""

import os
import string
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed
from run_in_processes import environment
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, merge
from tfrs_embed.compat.private_tensorflow import (
    sparse_core_layout_pb2,
    trackable_object_graph_pb2,
)
from tfrs_embed.tools.conversion.objects import GRAPH
from training_helpers import checkpoint_command as main
from training_helpers import differentiate

pytestmark = pytest.mark.tools

tpu = tf.tpu.experimental.embedding
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def features(seed=0):
    movies = tpu.TableConfig(200, 8, name="movies")
    genres = tpu.TableConfig(20, 4, name="genres")
    for table in (movies, genres):
        table.initializer = tf.random_normal_initializer(seed=seed)
    return {
        "movie": tpu.FeatureConfig(movies),
        "seen": tpu.FeatureConfig(movies),
        "genre": tpu.FeatureConfig(genres),
    }


INPUTS = {
    "movie": tf.constant([3, 7, 7, 199]),
    "seen": tf.constant([7, 8, 9, 10]),
    "genre": tf.constant([0, 19, 4, 4]),
}


class Model(tf_keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.dense = tf_keras.layers.Dense(
            1, kernel_initializer=tf_keras.initializers.GlorotUniform(1)
        )

    def call(self, inputs):
        vectors = self.embedding(inputs)
        return self.dense(tf.concat([vectors[n] for n in sorted(vectors)], -1))


LAYERS = {
    "all_large": lambda optimizer: tfrs.layers.embedding.TPUEmbedding(
        features(), optimizer
    ),
    "partial": lambda optimizer: (
        tfrs.experimental.layers.embedding.PartialTPUEmbedding(
            features(), optimizer, size_threshold=100
        )
    ),
}


def train_tfrs(layer, optimizer, steps=3):
    """A model of tfrs's layer, trained off-TPU: by Keras."""
    model = Model(LAYERS[layer](tpu.Adagrad(0.1)))
    model.compile(optimizer, "mse")
    for _ in range(steps):
        model.train_on_batch(INPUTS, tf.ones([4, 1]))
    return model


def tfrs_table(model, name):
    embedding = model.embedding
    if hasattr(embedding, "tpu_embedding"):
        if name == "genres":
            return embedding.keras_embedding_layers["genre"].embeddings
        embedding = embedding.tpu_embedding
    tables = {c.name: v for c, v in embedding.embedding_tables.items()}
    return tables[name]


def make_model(optimizer, size_threshold=0):
    model = Model(
        tfrs_embed.PartialTPUEmbedding(
            features(seed=5), optimizer, size_threshold=size_threshold
        )
    )
    # Keras restores a legacy optimizer into one only.
    model.compile(tf_keras.optimizers.legacy.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize(
    "layer, legacy, kind",
    [
        ("all_large", True, "Adagrad"),
        ("all_large", True, "Ftrl"),
        ("all_large", False, "Adam"),
        ("all_large", False, "Ftrl"),
        ("partial", True, "Adam"),
        ("partial", False, "Adagrad"),
        ("all_large", True, "SGD"),
        ("partial", False, "SGD"),
        ("all_large", True, "RMSprop"),
        ("partial", False, "RMSprop"),
    ],
)
def test_tables_trained_by_tfrs_are_restored(
    layer, legacy, kind, tmp_path, capsys
):
    keras = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    settings = {"momentum": 0.8} if kind == "SGD" else {}
    optimizer = getattr(keras, kind)(0.1, **settings)
    trained = train_tfrs(layer, optimizer)
    path = tf.train.Checkpoint(model=trained, optimizer=optimizer).save(
        str(tmp_path / "old")
    )
    names = ["--table", "genre=genres"] if layer == "partial" else []
    assert main(["convert", path, str(tmp_path / "new"), *names]) == 0
    err = capsys.readouterr().err
    assert "not taken over: 'model/dense/kernel'" in err
    assert ("name of its feature" in err) == (layer == "partial")
    assert "its own, accumulators, are initial" in err

    model = make_model(getattr(tf_keras.optimizers, kind)(0.1, **settings))
    model(INPUTS)
    embedding = model.embedding
    tables = tf.train.Checkpoint(embedding=embedding)
    tf.train.Checkpoint(model=tables).restore(
        str(tmp_path / "new")
    ).assert_consumed()
    assert int(embedding.step) == 3
    for name in ("movies", "genres"):
        table = tfrs_table(trained, name)
        np.testing.assert_array_equal(embedding.embedding_tables[name], table)
        slots = embedding.tables[name].slots
        assert slots
        for slot, value in slots.items():
            expected = keras_slot(optimizer, table, slot)
            np.testing.assert_array_equal(value, expected, err_msg=slot)

    # The next step is the same, as far as the looked up rows go: of the others
    # Keras's Adam changes some.
    # What is no table is restored from the old checkpoint.
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    for each in (model, trained):
        each.train_on_batch(INPUTS, tf.ones([4, 1]))
    for name, ids in (("movies", [3, 7, 8, 9, 10, 199]), ("genres", [0, 4])):
        np.testing.assert_allclose(
            tf.gather(embedding.embedding_tables[name], ids),
            tf.gather(tfrs_table(trained, name), ids),
            rtol=1e-4,
            atol=1e-6,
        )


def keras_slot(optimizer, table, slot):
    name = {
        "accumulators": "accumulator",
        "momenta": "m",
        "velocities": "v",
        "linears": "linear",
    }[slot]
    if isinstance(optimizer, tf_keras.optimizers.legacy.SGD):
        name = "momentum"
    if isinstance(optimizer, tf_keras.optimizers.legacy.RMSprop):
        name = "rms"
    if isinstance(optimizer, tf_keras.optimizers.RMSprop):
        name = "velocity"
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return optimizer.get_slot(table, name)
    suffix = f"/{name}/{table.name.split(':')[0]}"
    [found] = [
        v
        for v in optimizer.variables
        if f"/{v.name.split(':')[0]}".endswith(suffix)
    ]
    return found


def test_small_tables_of_both_are_restored(tmp_path):
    trained = train_tfrs("partial", tf_keras.optimizers.legacy.Adagrad(0.1))
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "old"))
    new = str(tmp_path / "new")
    assert main(["convert", path, new, "--table", "genre=genres"]) == 0
    model = make_model("adagrad", size_threshold=100)
    model(INPUTS)
    tf.train.Checkpoint(model=model).restore(new).expect_partial()
    for name in ("movies", "genres"):
        np.testing.assert_array_equal(
            model.embedding.embedding_tables[name], tfrs_table(trained, name)
        )


def test_weights_and_an_optimizer_of_the_table(tmp_path):
    # Slots of the table's own are trained on a TPU; nothing of Keras here.
    config = tpu.TableConfig(50, 4, name="a/b.c")
    layer = tfrs.layers.embedding.TPUEmbedding(
        {"x": tpu.FeatureConfig(config)}, tpu.Adam(0.1)
    )
    model = tf_keras.Sequential([layer])
    model({"x": tf.constant([1, 2])})
    rng = np.random.default_rng(0)
    variables = layer._tpu_embedding._variables["a/b.c"]
    for variable in variables.values():
        variable.assign(rng.random(variable.shape))
    model.save_weights(str(tmp_path / "weights"))
    new = str(tmp_path / "new")
    assert main(["convert", str(tmp_path / "weights"), new]) == 0

    mine = tfrs_embed.PartialTPUEmbedding(
        {"x": tpu.FeatureConfig(config)}, tpu.Adam(0.1), size_threshold=0
    )
    restored = tf_keras.Sequential([mine])
    restored({"x": tf.constant([1, 2])})
    restored.load_weights(new).expect_partial()
    for name, variable in mine.tables["a/b.c"].variables.items():
        np.testing.assert_array_equal(variable, variables[name])


@pytest.mark.parametrize("layer", LAYERS)
def test_saved_models_of_tfrs_are_restored(layer, tmp_path):
    trained = train_tfrs(layer, tf_keras.optimizers.Adam(0.1), steps=1)
    tf.saved_model.save(trained, str(tmp_path / "old"))
    new = str(tmp_path / "new")
    names = ["--table", "genre=genres"] if layer == "partial" else []
    assert main(["convert", str(tmp_path / "old"), new, *names]) == 0
    model = make_model(tf_keras.optimizers.Adam(0.1))
    model(INPUTS)
    embedding = model.embedding
    tf.train.Checkpoint(embedding=embedding).restore(new).expect_partial()
    assert int(embedding.step) == 1
    for name in ("movies", "genres"):
        table = tfrs_table(trained, name)
        np.testing.assert_array_equal(embedding.embedding_tables[name], table)
        for slot, value in embedding.tables[name].slots.items():
            expected = keras_slot(trained.optimizer, table, slot)
            np.testing.assert_array_equal(value, expected, err_msg=slot)


@pytest.mark.parametrize("make", [tpu.TPUEmbedding, tpu.TPUEmbeddingForServing])
@pytest.mark.parametrize("at_root", [False, True])
def test_tables_of_the_mid_level_api_are_restored(make, at_root, tmp_path):
    tables = [tpu.TableConfig(20, 4, name=n) for n in ("movies", "a/b.c")]
    there = make([tpu.FeatureConfig(t) for t in tables], tpu.Adagrad(0.1))
    there.build()
    expected = {t.name: v for t, v in there.embedding_tables.items()}
    # On TPUs it has slots, which go by these names beside the tables.
    slots = {name: tf.Variable(v + 1.0) for name, v in expected.items()}
    for name, slot in slots.items():
        there._variables[name]["accumulators"] = slot
    checkpoint = tf.train.Checkpoint(embedding=there)
    if at_root:
        checkpoint = tf.train.Checkpoint(there)
    path = checkpoint.write(str(tmp_path / "old"))
    new = str(tmp_path / "new")
    assert main(["convert", path, new, "--layer", "emb"]) == 0
    layer = tfrs_embed.PartialTPUEmbedding(
        [tpu.FeatureConfig(t) for t in tables],
        tpu.Adagrad(0.1),
        size_threshold=0,
    )
    layer([tf.constant([0])] * 2)
    tf.train.Checkpoint(emb=layer).restore(new).expect_partial()
    for name, table in expected.items():
        np.testing.assert_array_equal(layer.embedding_tables[name], table)
        found = layer.tables[name].slots["accumulators"]
        np.testing.assert_array_equal(found, slots[name])


def test_layers_and_tables_get_new_names(tmp_path, capsys):
    def layer(rows):
        config = tpu.TableConfig(rows, 4, name="t")
        made = tfrs.layers.embedding.TPUEmbedding(
            {"x": tpu.FeatureConfig(config)}, tpu.SGD(0.1)
        )
        made({"x": tf.constant([1, 2])})
        return made

    old = tf.train.Checkpoint(query=layer(10), candidate=layer(20)).write(
        str(tmp_path / "old")
    )
    new = str(tmp_path / "new")
    assert main(["convert", old, new, "--layer", "model/one"]) == 2
    assert "['candidate', 'query']" in capsys.readouterr().err
    both = ["--layer", "query=model/one", "--layer", "candidate=model/one"]
    assert main(["convert", old, new, *both]) == 2
    assert "Two tables would become 'model/one/t'" in capsys.readouterr().err
    assert main(["convert", old, new, "--layer", "who=model"]) == 2
    assert "no layer 'who', but ['candidate'," in capsys.readouterr().err
    assert main(["convert", old, new, "--table", "t"]) == 2
    assert "--table must be OLD=NEW, got 't'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [
        n for n in os.listdir(tmp_path) if n.startswith("old.")
    ]
    both[-1] = "candidate="
    assert main(["convert", old, new, *both, "--table", "t=a/b"]) == 0
    shapes = tf.train.load_checkpoint(new).get_variable_to_shape_map()
    assert shapes[f"model/one/tables/a.Sb/parameters{VALUE}"] == [10, 4]
    assert shapes[f"tables/a.Sb/parameters{VALUE}"] == [20, 4]
    assert main(["convert", old, new]) == 2
    assert f"There is a checkpoint '{new}' already" in capsys.readouterr().err


STACKED = """
import sys
import tensorflow as tf
import tensorflow_recommenders as tfrs
from tfrs_embed.testing import EmulatedTPUStrategy

tpu = tf.tpu.experimental.embedding
strategy = EmulatedTPUStrategy((2, 4))
with strategy.scope():
    tables = {
        name: tpu.TableConfig(
            rows, dim, tf.constant_initializer(float(rows)), name=name
        )
        for name, rows, dim in [("a", 100, 5), ("b", 37, 5), ("c", 64, 16)]
    }
    features = {
        name: tpu.FeatureConfig(table, output_shape=[4])
        for name, table in tables.items()
    }
    layer = tfrs.layers.embedding.TPUEmbedding(features, tpu.Adagrad(0.1))

@tf.function
def step(ids):
    def replica(ids):
        with tf.GradientTape() as tape:
            found = layer({name: ids for name in tables})
            loss = tf.add_n([tf.reduce_sum(v ** 2) for v in found.values()])
        tape.gradient(loss, layer.trainable_variables)
    strategy.run(replica, (ids,))

step(tf.constant([1, 36, 36, 8]))
tf.train.Checkpoint(model=tf.train.Checkpoint(emb=layer)).write(sys.argv[1])
"""


def test_stacked_tables_are_restored(tmp_path):
    # Of TensorFlow's own class, on two chips of four SparseCores.
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    done = subprocess.run(
        [sys.executable, "-c", STACKED, old],
        env={**os.environ, **environment("one")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert main(["convert", old, new, "--layer", "layer"]) == 0

    reader = tf.train.load_checkpoint(old)
    stack = reader.get_tensor(f"model/emb/_tpu_embedding/a_b{VALUE}")
    assert stack.shape[1] == 8
    tables = {
        name: tpu.TableConfig(rows, dim, name=name)
        for name, rows, dim in [("a", 100, 5), ("b", 37, 5), ("c", 64, 16)]
    }
    layer = tfrs_embed.PartialTPUEmbedding(
        {n: tpu.FeatureConfig(t) for n, t in tables.items()},
        tpu.Adagrad(0.1),
        size_threshold=0,
    )
    layer({name: tf.constant([0]) for name in tables})
    tf.train.Checkpoint(layer=layer).restore(new).assert_consumed()
    for name, config in tables.items():
        rows = config.vocabulary_size
        # Both chips looked up what began as `rows`: row 36 twice.
        gradient = np.zeros(rows, np.float32)
        gradient[[1, 8]] = 4 * rows
        gradient[36] = 8 * rows
        accumulators = 0.1 + gradient**2
        values = rows - 0.1 * gradient / np.sqrt(accumulators)
        found = layer.tables[name].variables
        for column, expected in [
            ("accumulators", accumulators),
            ("parameters", values),
        ]:
            np.testing.assert_allclose(
                found[column],
                np.repeat(expected[:, None], config.dim, 1),
                rtol=1e-5,
                err_msg=f"{name}/{column}",
            )


@pytest.mark.parametrize("topology", [(1, 4), (2, 2), (4, 4)])
def test_every_row_is_unstacked(topology, tmp_path):
    sizes = [("a", 100, 5), ("b", 37, 5), ("c", 64, 16), ("d", 9, 5)]
    tables = [tpu.TableConfig(r, d, name=n) for n, r, d in sizes]
    there = tfrs_embed.TPUEmbeddingV2(
        {t.name: tpu.FeatureConfig(t, output_shape=[4]) for t in tables},
        tpu.Adam(0.1),
        topology=topology,
    )
    rng = np.random.default_rng(0)
    for of_stack in there.variables.values():
        for variable in of_stack.values():
            variable.assign(rng.random(variable.shape))
    path = tf.train.Checkpoint(emb=there).write(str(tmp_path / "old"))
    assert main(["convert", path, str(tmp_path / "new")]) == 0

    layer = tfrs_embed.PartialTPUEmbedding(
        {t.name: tpu.FeatureConfig(t) for t in tables},
        tpu.Adam(0.1),
        size_threshold=0,
    )
    ids = {t.name: tf.constant([1, 8, 8, 3]) for t in tables}
    layer(ids)
    tf.train.Checkpoint(emb=layer).restore(
        str(tmp_path / "new")
    ).assert_existing_objects_matched()

    def compare(**tolerance):
        for name, expected in there.unstacked_variables.items():
            for column, value in layer.tables[name].variables.items():
                np.testing.assert_allclose(
                    value, expected[column], err_msg=column, **tolerance
                )

    compare(rtol=0)
    # And the next step is the same.
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in layer(ids).values()])
    differentiate(tape, loss, layer.trainable_variables)
    chips = topology[0]
    spread = {n: tf.tile(i, [chips]) for n, i in ids.items()}
    activations, buffers = there(spread)
    ones = {
        n: tf.concat([tf.ones([4, v.shape[1]]), tf.zeros(v.shape)[4:]], 0)
        for n, v in activations.items()
    }
    there.apply_gradients(ones, buffers)
    compare(rtol=1e-5)


def test_a_stack_that_is_not_as_its_layout_is_refused(tmp_path, capsys):
    there = tfrs_embed.TPUEmbeddingV2(
        {
            "x": tpu.FeatureConfig(
                tpu.TableConfig(9, 5, name="t"), output_shape=[4]
            )
        },
        tpu.SGD(0.1),
        topology=(1, 4),
    )
    there.build()
    layouts = there._trackable_children()["_sparse_core_table_layouts"]
    stack = tf.train.Checkpoint(parameters=tf.Variable(tf.zeros([4, 8])))
    for stacks, message in [
        ({}, "but not its stack 't'"),
        (
            {"t": stack},
            r"has the shape [4, 8]. Its layout says that it has 32 rows",
        ),
    ]:
        old = tf.train.Checkpoint(
            _sparse_core_table_layouts=layouts,
            _variables=tf.train.Checkpoint(**stacks),
        ).write(str(tmp_path / "old"))
        assert main(["convert", old, str(tmp_path / "new")]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_sparse_cores": 0}, "0 rows in 0 parts"),
        (
            {"num_sparse_cores": -4, "total_rows_per_sparse_core_shard": -8},
            "32 rows in -4 parts",
        ),
        ({"unsharded_shape": [2**50, 5]}, "takes 1125899906842624 of them"),
        ({"unsharded_shape": [9, -5]}, "and -5 columns"),
        ({"unsharded_shape": [9]}, "not enough values to unpack"),
    ],
)
def test_a_layout_that_its_stack_cannot_have_is_refused(
    change, message, tmp_path, capsys
):
    there = tfrs_embed.TPUEmbeddingV2(
        {
            "x": tpu.FeatureConfig(
                tpu.TableConfig(9, 5, name="t"), output_shape=[4]
            )
        },
        tpu.SGD(0.1),
        topology=(1, 4),
    )
    there.build()
    path = tf.train.Checkpoint(there).write(str(tmp_path / "old"))
    assert main(["inspect", path]) == 0
    reader = BundleReader(path)
    writer = BundleWriter(str(tmp_path / "part"))
    for name in reader.shapes:
        value = reader.read(name)
        if name.startswith("_sparse_core_table_layouts"):
            layouts = sparse_core_layout_pb2.SparseCoreTableLayouts()
            layouts.ParseFromString(value.numpy())
            for field, new in change.items():
                if isinstance(new, list):
                    getattr(layouts.tables[0], field)[:] = new
                else:
                    setattr(layouts.tables[0], field, new)
            value = layouts.SerializeToString()
        writer.add(name, value)
    merge(writer.finish(), str(tmp_path / "bad"))
    assert main(["inspect", str(tmp_path / "bad")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def rewrite_graph(path, new, change):
    """Writes a checkpoint again, with another graph of objects."""
    reader, writer = BundleReader(path), BundleWriter(f"{new}-part")
    for name in reader.shapes:
        value = reader.read(name)
        if name == GRAPH:
            graph = trackable_object_graph_pb2.TrackableObjectGraph()
            graph.ParseFromString(value.numpy())
            change(graph)
            value = graph.SerializeToString()
        writer.add(name, value)
    merge(writer.finish(), str(new))


def _negative(graph):
    for node in graph.nodes:
        for child in node.children:
            child.node_id = -1


def _without_layouts(graph):
    graph.nodes[0].children.add(
        node_id=0, local_name="_sparse_core_table_layouts"
    )


def _deep(graph):
    for name in ("a" * 90_000, *"b" * 3000):
        node = graph.nodes.add()
        node.children.add(node_id=len(graph.nodes), local_name=name)
    graph.nodes.add()
    graph.nodes[0].children.add(node_id=len(graph.nodes) - 3002, local_name="c")


@pytest.mark.parametrize(
    "change, status, message",
    [
        (_negative, 2, "has no tables of this package"),
        (_without_layouts, 1, "don't fit together: KeyError"),
        (_deep, 1, "their paths need more than"),
    ],
)
def test_objects_that_nobody_saves_are_refused(
    change, status, message, tmp_path, capsys
):
    layer = tfrs_embed.All2AllDenseEmbedding(10, 4, 1, 1)
    layer(KEYS[:, None, None])
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "old"))
    rewrite_graph(path, tmp_path / "bad", change)
    bad, new = str(tmp_path / "bad"), str(tmp_path / "new")
    assert main(["convert", bad, new]) == status
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert not list(tmp_path.glob("new*"))


# SOK's files, as its sources write them.


def write_saver(folder, name, keys, values):
    """`sok.Saver().dump_to_file`, of SOK 1."""
    folder.mkdir(exist_ok=True)
    keys.tofile(folder / f"{name}_keys.file")
    values.tofile(folder / f"{name}_values.file")


TYPES = ["int32", "int64", "uint32", "uint64", "float16", "float32", "float64"]


def write_dump(folder, name, keys, values, slots=None):
    """`sok.dump`, of SOK 2; slots by "optimizer-slot"."""
    folder.mkdir(exist_ok=True)
    for char in string.punctuation:
        name = name.replace(char, "_")
    files = {"key": (0, keys), "weight": (1, values)}
    files.update({k: (2, v) for k, v in (slots or {}).items()})
    for kind, (number, array) in files.items():
        slot = kind.split("-")[1] if number == 2 else ""
        header = b"".join(
            [
                "".rjust(256, " ").encode(),
                number.to_bytes(4, "big", signed=False),
                slot.rjust(32, " ").encode(),
                TYPES.index(array.dtype.name).to_bytes(4, "big", signed=False),
            ]
        )
        assert len(header) == 296
        with open(folder / f"{name}-{kind}", "wb") as file:
            file.write(header)
            array.tofile(file)


KEYS = np.array([7, 2**40, 3, 11, -5], np.int64)
VALUES = np.random.default_rng(0).random((5, 4), np.float32)


def restore_by_key(path, optimizer="sgd"):
    layer = tfrs_embed.All2AllDenseEmbedding(100, 4, 1, 1, optimizer=optimizer)
    layer(tf.constant([[[99]]], tf.int64), training=True)
    tf.train.Checkpoint(layer=layer).restore(
        path
    ).assert_existing_objects_matched()
    return layer


def assert_has_rows(layer, keys=KEYS, values=VALUES):
    assert layer.size == len(keys)
    found = layer(keys[:, None, None], training=False)
    np.testing.assert_array_equal(tf.squeeze(found, [1, 2]), values)


def test_files_of_sok_saver_are_restored(tmp_path, capsys):
    write_saver(tmp_path / "sok", "EmbeddingVariable", KEYS, VALUES)
    new = str(tmp_path / "new")
    args = ["convert", str(tmp_path / "sok"), new, "--layer", "layer"]
    assert main(args) == 0
    err = capsys.readouterr().err
    assert "is read as int64, with rows 4 wide" in err
    assert "The step of 'layer' is not known" in err
    assert_has_rows(restore_by_key(new))


@pytest.mark.parametrize(
    "optimizer, kind, slots",
    [
        ("adagrad", "Adagrad", {"accumulator": "accumulators"}),
        ("adam", "Adam", {"m": "momenta", "v": "velocities"}),
        (
            tf_keras.optimizers.Ftrl(0.1),
            "Ftrl",
            {"accumulator": "accumulators", "linear": "linears"},
        ),
    ],
)
def test_files_of_sok_dump_are_restored(optimizer, kind, slots, tmp_path):
    states = {name: np.float32(VALUES + i + 1) for i, name in enumerate(slots)}
    write_dump(
        tmp_path / "sok",
        "DynamicVariable_1:0",
        KEYS,
        VALUES,
        {f"{kind}-{name}": state for name, state in states.items()},
    )
    args = ["convert", str(tmp_path / "sok"), str(tmp_path / "new")]
    args += ["--layer", "layer", "--step", "12"]
    assert main(args) == 0
    layer = restore_by_key(str(tmp_path / "new"), optimizer)
    assert_has_rows(layer)
    assert int(layer.step) == 12
    order = np.argsort(KEYS)
    np.testing.assert_array_equal(
        np.sort(layer.table.variables["keys"]), KEYS[order]
    )
    by_key = np.argsort(np.asarray(layer.table.variables["keys"]))
    for name, ours in slots.items():
        np.testing.assert_array_equal(
            np.asarray(layer.table.slots[ours])[by_key], states[name][order]
        )


def test_a_static_variable_of_sok_becomes_a_table(tmp_path, capsys):
    # Of two GPUs, each of which has every second row.
    keys = np.array([0, 2, 4, 1, 3, 5], np.int64)
    values = np.random.default_rng(0).random((6, 8)).astype(np.float16)
    write_dump(tmp_path / "sok", "movies:0", keys, values)
    args = ["convert", str(tmp_path / "sok"), str(tmp_path / "new"), "--ids"]
    args += ["--table", "movies_0=movies", "--layer", "emb"]
    assert main(args) == 0
    config = tpu.TableConfig(6, 8, name="movies")
    layer = tfrs_embed.PartialTPUEmbedding(
        {"x": tpu.FeatureConfig(config)}, "sgd", size_threshold=0
    )
    layer({"x": tf.constant([0])})
    checkpoint = tf.train.Checkpoint(emb=layer)
    checkpoint.restore(str(tmp_path / "new")).assert_consumed()
    np.testing.assert_array_equal(
        layer.embedding_tables["movies"], values[np.argsort(keys)]
    )
    write_dump(tmp_path / "sok", "movies:0", keys + 1, values)
    args[2] += "2"
    assert main(args) == 2
    assert "not the ids 0 to 5 in their order" in capsys.readouterr().err


@pytest.mark.parametrize("write", [write_saver, write_dump])
def test_empty_files_of_sok_are_refused(write, tmp_path, capsys):
    write(tmp_path / "sok", "v", KEYS[:0], VALUES[:0])
    args = ["convert", str(tmp_path / "sok"), str(tmp_path / "new")]
    assert main(args) == 2
    assert (
        "'v' has no rows, so their width is not known"
        in capsys.readouterr().err
    )


def test_what_sok_has_besides_is_reported(tmp_path, capsys):
    write_dump(
        tmp_path / "sok",
        "v",
        KEYS,
        VALUES,
        {"Adamax-m": VALUES, "Adamax-norm": VALUES},
    )
    (tmp_path / "sok" / "notes").write_text("hello")
    assert main(["convert", str(tmp_path / "sok"), str(tmp_path / "new")]) == 0
    err = capsys.readouterr().err
    assert "not taken over: 'v-Adamax-norm'" in err
    assert "not taken over: 'notes'" in err
    assert "not taken over: 'v-Adamax-m'" not in err


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda f: cut(f / "v-weight", 296 + 77), "v-weight' is cut off"),
        (lambda f: cut(f / "v-weight", 296 + 76), "v-weight' has 19 numbers"),
        (lambda f: cut(f / "v-weight", 200), "it ends within its header"),
        (lambda f: cut(f / "v-key", 296 + 36), "v-key' is cut off"),
        (lambda f: (f / "v-weight").unlink(), "but no 'v-weight'"),
        (
            lambda f: (f / "v-key").write_bytes(bytes(400)),
            "which do not divide among the 26 keys",
        ),
        (
            lambda f: (f / "v-weight").write_bytes(b"\xff" * 376),
            "v-weight' has no header of SOK's",
        ),
        (
            lambda f: write_dump(f, "v", KEYS * 0 + 3, VALUES),
            "has the key 3 more than once",
        ),
        (
            lambda f: write_dump(f, "v", KEYS.astype(np.uint64), VALUES),
            "which is no int64",
        ),
        (
            lambda f: write_dump(f, "v", KEYS, VALUES.astype(np.int32)),
            "v-weight' holds int32",
        ),
        (
            lambda f: write_dump(
                f, "v", KEYS, VALUES, {"Adagrad-accumulator": VALUES[:, :2]}
            ),
            "but accumulators of shape [5, 2]",
        ),
    ],
)
def test_damaged_files_of_sok_are_refused(break_it, message, tmp_path, capsys):
    folder = tmp_path / "sok"
    write_dump(folder, "v", KEYS, VALUES)
    break_it(folder)
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["sok"]


@pytest.mark.parametrize("name", ["v-key", "v-weight"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_files_of_sok_are_in_their_folder(name, kind, tmp_path, capsys):
    folder = tmp_path / "sok"
    write_dump(folder, "v", KEYS, VALUES)
    (folder / name).rename(tmp_path / name)
    if kind == "link":
        (folder / name).symlink_to(tmp_path / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        os.mkfifo(folder / name)  # Reading it would wait for ever.
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
    err = capsys.readouterr().err
    assert f"'{folder / name}' is no file, or a link to one outside" in err
    assert not list(tmp_path.glob("new*"))
