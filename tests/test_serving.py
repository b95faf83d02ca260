"""Exported models, in a process that doesn't know this library."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfrs_embed
from keras_under_test import keras, layers, only_keras_2, signature_of
from nightly_flag import ALL
from process_tiers import on
from tfrs_embed import kernels
from tfrs_embed.checkpoint import bundle
from tfrs_embed.ops.stored_table import decode
from tfrs_embed.serving import export
from tfrs_embed.tools.conversion import reading
from training_helpers import differentiate, files_in, train

pytestmark = [
    pytest.mark.tools,
    pytest.mark.xdist_group("serving"),
    on("keras:3", tier="nightly"),
]

ROWS, DIM = 50, 4
#: Dtypes of exported rows: all at night, else those that differ in kind.
DTYPES = ["float32", "float16", "int8", "int4", *(["bfloat16"] if ALL else [])]
MAPPED = DTYPES if ALL else ["float32", "int4"]
KINDS = ("dense", "combined", "ragged", "sparse", "sequence", "small")
WEIGHTED = ("ragged", "sparse")

LOAD = """
import json, sys
import numpy as np
import tensorflow as tf

from tensorflow.python.eager import context

folder, names = sys.argv[1], json.loads(sys.argv[2])
given = dict(np.load(folder + "/inputs.npz"))
for library in (None, sys.argv[3]):
    if library:
        tf.load_op_library(library)
    for name in names:
        signature = tf.saved_model.load(folder + "/" + name).signatures
        signature = signature["serving_default"]
        inputs = {k: tf.constant(v) for k, v in given.items()}
        context.enable_run_metadata()
        found = signature(**inputs)
        ran = [
            node.op
            for function in context.export_run_metadata().function_graphs
            for graph in function.partition_graphs
            for node in graph.node
        ]
        context.disable_run_metadata()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            path = folder + "/" + name
            loaded = tf.compat.v1.saved_model.load(session, ["serve"], path)
            tensors = loaded.signature_def["serving_default"]
            metadata = tf.compat.v1.RunMetadata()
            in_session = session.run(
                {k: t.name for k, t in tensors.outputs.items()},
                {tensors.inputs[k].name: v for k, v in given.items()},
                tf.compat.v1.RunOptions(output_partition_graphs=True),
                metadata,
            )
            with open("/proc/self/maps") as maps:
                mapped = maps.read().count(path + "/assets/")
        in_session["ran"] = [
            node.op for g in metadata.partition_graphs for node in g.node
        ]
        found |= {k + "_in_session": v for k, v in in_session.items()}
        inputs["ids_dense"] += 47
        try:
            signature(**inputs)
        except tf.errors.InvalidArgumentError as error:
            message = error.message
        np.savez(
            folder + "/" + name + "_kernels" * bool(library) + ".npz",
            ran=ran,
            message=message,
            mapped=mapped,
            **found,
        )
    if not sys.argv[3]:
        break
assert not {"tfrs_embed", "tf_keras"} & set(sys.modules)
"""


def make_layer(**kwargs):
    """Six features in three tables: one shared, one small, one of its own."""
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            rows,
            DIM,
            combiner=combiner,
            initializer=keras.initializers.RandomNormal(seed=seed),
        )
        for seed, (name, rows, combiner) in enumerate(
            [
                ("shared", ROWS, "mean"),
                ("own", ROWS, "sqrtn"),
                ("few", 7, "sum"),
            ]
        )
    }
    feature = tfrs_embed.FeatureConfig
    return layers.PartialTPUEmbedding(
        {
            "dense": feature("dense", tables["shared"]),
            "combined": feature(
                "combined", tables["shared"], output_shape=[3, DIM]
            ),
            "ragged": feature("ragged", tables["shared"]),
            "sparse": feature("sparse", tables["own"]),
            "sequence": feature(
                "sequence", tables["own"], max_sequence_length=2
            ),
            "small": feature("small", tables["few"]),
        },
        "adam",
        size_threshold=20,
        **kwargs,
    )


IDS = {
    "dense": tf.constant([3, 49, 3], tf.int64),
    "combined": tf.constant([[1, 1], [2, 5], [0, 49]]),
    "ragged": tf.ragged.constant([[4, 4, 1], [], [7]], dtype=tf.int64),
    "sparse": tf.SparseTensor([[0, 1], [2, 0], [2, 3]], [9, 48, 9], [3, 4]),
    "sequence": tf.ragged.constant([[1], [2, 3, 4], []], dtype=tf.int64),
    "small": tf.constant([6, 0, 6]),
}
WEIGHTS = {
    name: (
        IDS[name].with_values(tf.constant([0.5, 2.0, -1.0, 0.25]))
        if name == "ragged"
        else IDS[name].with_values(tf.constant([0.5, 2.0, -1.0]))
        if name in WEIGHTED
        else None
    )
    for name in KINDS
}


def spec_of(value):
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], value.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], value.dtype)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def trained(**kwargs):
    layer = make_layer(**kwargs)
    outputs = layer(IDS, weights=WEIGHTS)
    train(layer, IDS, {k: tf.ones_like(v) for k, v in outputs.items()}, WEIGHTS)
    return layer


def export_layer(layer, path, **kwargs):
    def serve(ids, weights):
        return layer(ids, weights={**dict.fromkeys(KINDS), **weights})

    specs = [
        {name: spec_of(ids) for name, ids in IDS.items()},
        {name: spec_of(WEIGHTS[name]) for name in WEIGHTED},
    ]
    export(
        layer, path, signatures={"serving_default": (serve, specs)}, **kwargs
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A trained layer, and what its exported models answer elsewhere."""
    folder = tmp_path_factory.mktemp("models")
    layer = trained()
    names = []
    for rows in DTYPES:
        names += [rows]
        export_layer(layer, folder / rows, rows=rows)
    for rows in MAPPED:
        names += [f"{rows}_mapped"]
        export_layer(layer, folder / names[-1], rows=rows, mapped=True)
    values = {f"ids_{name}": ids for name, ids in IDS.items()}
    values |= {f"weights_{name}": WEIGHTS[name] for name in WEIGHTED}
    tensors = {}
    for name, value in values.items():
        if isinstance(value, tf.RaggedTensor):
            tensors[f"{name}_values"] = value.values
            tensors[f"{name}_row_splits"] = value.row_splits
        elif isinstance(value, tf.SparseTensor):
            tensors[f"{name}_indices"] = value.indices
            tensors[f"{name}_values"] = value.values
            tensors[f"{name}_dense_shape"] = value.dense_shape
        else:
            tensors[name] = value
    np.savez(folder / "inputs.npz", **tensors)
    library = kernels.status().path or ""
    command = [sys.executable, "-c", LOAD]
    command += [str(folder), json.dumps(names), library]
    environment = {
        k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names += [f"{rows}_kernels" for rows in names if library]
    found = {rows: dict(np.load(folder / f"{rows}.npz")) for rows in names}
    return layer, folder, found


def unpacked(bytes_, dim):
    """The integers of int4 rows."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], 1)[:, :dim] - 8.0


def test_predictions_are_those_of_the_layer(served):
    layer, _, found = served
    expected = layer(IDS, weights=WEIGHTS)
    outputs = {*KINDS, "ran"}
    outputs |= {f"{name}_in_session" for name in outputs}
    assert set(found["float32"]) == {*outputs, "message", "mapped"}
    for name, vectors in expected.items():
        np.testing.assert_allclose(
            found["float32"][name], vectors, rtol=1e-6, atol=1e-7, err_msg=name
        )


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("rows", DTYPES)
def test_one_kernel_looks_everything_up_where_there_are_kernels(served, rows):
    _, _, found = served
    stock, kernel = found[rows], found[f"{rows}_kernels"]
    assert "TfrsEmbedLookup" not in stock["ran"]
    assert "ResourceGather" in stock["ran"]
    assert list(kernel["ran"]).count("TfrsEmbedLookup") == 1
    assert "ResourceGather" not in kernel["ran"]
    for name in ("dense", "sequence", "small"):
        np.testing.assert_array_equal(kernel[name], stock[name], name)
    for name in KINDS:  # TensorFlow sums bags in another order.
        np.testing.assert_allclose(
            kernel[name], stock[name], rtol=1e-6, atol=1e-7, err_msg=name
        )
    # As servers in C++ do.
    assert "TfrsEmbedLookup" not in stock["ran_in_session"]
    ran = {"TfrsEmbedLookup", "TfrsEmbedLookupConcat"}
    assert ran & {*kernel["ran_in_session"]}
    assert "ResourceGather" not in kernel["ran_in_session"]
    for name in KINDS:
        for each in (stock, kernel):
            np.testing.assert_allclose(
                each[f"{name}_in_session"], each[name], rtol=1e-6, atol=1e-7
            )
    for each in (stock, kernel):
        assert "id 50 is out of range; the table has 50" in str(each["message"])


@pytest.mark.parametrize("rows", MAPPED)
def test_a_mapped_model_answers_as_another(served, rows):
    _, folder, found = served
    for suffix in ("", "_kernels") if "int4_kernels" in found else ("",):
        expected, mapped = found[rows + suffix], found[f"{rows}_mapped{suffix}"]
        for name in [*KINDS, *(f"{name}_in_session" for name in KINDS)]:
            np.testing.assert_array_equal(mapped[name], expected[name], name)
        assert expected["mapped"] == 0
        # Three tables, with their scales, of the loaded model and the session.
        files = list((folder / f"{rows}_mapped" / "assets").iterdir())
        assert len(files) == (6 if rows in ("int8", "int4") else 3)
        assert mapped["mapped"] == (2 * len(files) if suffix else 0)


@pytest.mark.parametrize("rows", ["float16", "int8", "int4"])
def test_rows_of_few_bits_are_as_near_as_is_said(served, rows):
    layer, folder, found = served
    model = tf.saved_model.load(str(folder / rows))
    [tables] = model.tables.values()
    for name, table in layer.embedding_tables.items():
        exact = table.numpy()
        stored = tables[name].parameters
        assert stored.dtype == {"int4": "uint8"}.get(rows, rows)
        if rows == "float16":
            near, bound = stored.numpy(), np.abs(exact) / 2**11 + 2**-25
        else:
            most = 127 if rows == "int8" else 7
            scale = np.abs(exact).max(1, keepdims=True) / most
            np.testing.assert_allclose(tables[name].scale, scale, rtol=1e-6)
            steps = stored.numpy()
            steps = unpacked(steps, DIM) if rows == "int4" else steps
            near, bound = steps.astype(np.float32) * scale, scale * 0.5001
        assert np.all(np.abs(near - exact) <= bound)
    assert not np.array_equal(found[rows]["dense"], found["float32"]["dense"])
    for name in ("dense", "small"):
        np.testing.assert_allclose(
            found[rows][name],
            found["float32"][name],
            atol=0.2 if rows == "int4" else 0.02,
        )


@pytest.mark.parametrize("dim", [1, 3, 64, 65])
def test_rows_of_int4(tmp_path, dim):
    model = make_ranker(dim=dim)
    model(INPUTS)
    [table] = model.layer.embedding_tables.values()
    rows = np.random.default_rng(0).normal(size=[30, dim]).astype(np.float32)
    rows[0] = 0
    table.assign(rows)
    signatures = {
        "serving_default": (
            lambda movie: model.layer({"movie": movie})["movie"],
            [tf.TensorSpec([None], tf.int32)],
        )
    }
    export(model, tmp_path / "model", signatures=signatures, rows="int4")
    served = tf.saved_model.load(str(tmp_path / "model"))
    [[stored]] = [tables.values() for tables in served.tables.values()]
    assert stored.parameters.shape == [30, (dim + 1) // 2]
    if dim == 64:
        bytes_ = stored.parameters.numpy().nbytes + stored.scale.numpy().nbytes
        assert bytes_ <= rows.nbytes / 7
    steps = unpacked(stored.parameters.numpy(), dim)
    assert np.abs(steps).max() == 7 and not steps[0].any()
    expected = steps.astype(np.float32) * stored.scale.numpy()
    np.testing.assert_array_equal(
        decode(stored.parameters[:], dim) * stored.scale[:], expected
    )
    found = (
        reading.read(str(tmp_path / "model")).tables[0].columns["parameters"]
    )
    assert found.shape == (30, dim)
    assert found.nbytes == 30 * ((dim + 1) // 2)
    np.testing.assert_array_equal(found.read(3, 9), expected[3:12])
    signature = served.signatures["serving_default"]
    [found] = signature(movie=tf.range(30)).values()
    np.testing.assert_array_equal(found, expected)
    bound = np.abs(rows).max(1, keepdims=True) / 14 * 1.0001
    assert np.all(np.abs(expected - rows) <= bound)


@pytest.mark.parametrize(
    ("rows", "size", "extra"),
    [("float32", 4, 0), ("float16", 2, 0), ("int8", 1, 4), ("int4", 0.5, 4)],
)
def test_each_table_is_stored_once(served, rows, size, extra):
    _, folder, _ = served
    prefix = str(folder / rows / "variables" / "variables")
    found = {k: shape for k, shape in tf.train.list_variables(prefix) if shape}
    per_table = 2 if extra else 1
    assert len(found) == 3 * per_table
    stored = sum(
        file.stat().st_size
        for file in (folder / rows / "variables").glob("*.data-*")
    )
    tables = (2 * ROWS + 7) * (DIM * size + extra)
    # And the description of the objects.
    graph = tf.train.load_checkpoint(prefix).get_tensor(
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    )
    assert tables < stored <= tables + len(graph) + 100


def test_operations_are_tensorflows_own(served):
    _, folder, _ = served
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "int8" / "saved_model.pb").read_bytes())
    [meta_graph] = saved.meta_graphs
    used = {op.name for op in meta_graph.meta_info_def.stripped_op_list.op}
    assert "ResourceGather" in used
    assert not {op for op in used if "Tfrs" in op or "PyFunc" in op}


class Ranker(keras.Model):
    """A subclassed model, whose call is a tf.function of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.words = keras.layers.StringLookup(vocabulary=["a", "b"])
        self.normalization = keras.layers.BatchNormalization()

    @tf.function
    def call(self, inputs, training=False):
        vectors = self.layer({"movie": inputs["movie"]}, training=training)
        word = tf.cast(self.words(inputs["word"]), tf.float32)
        return self.normalization(vectors["movie"]) * word[:, None]


def make_ranker(rows=30, dim=3):
    table = tfrs_embed.TableConfig("movie", rows, dim)
    layer = layers.PartialTPUEmbedding(
        {"movie": tfrs_embed.FeatureConfig("movie", table)},
        "adagrad",
        size_threshold=0,
    )
    return Ranker(layer)


INPUTS = {"movie": tf.constant([0, 29]), "word": tf.constant(["b", "?"])}


def test_a_model_is_exported_with_what_it_was_called_with(tmp_path):
    model = make_ranker()
    expected = model(INPUTS)
    # Twice: a trace of the first must not be in the second.
    for name in ("1", "2"):
        export(model, tmp_path / name, signature_of(INPUTS))
        served = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(served.serve(INPUTS), expected, rtol=1e-6)
        [output] = served.signatures["serving_default"](**INPUTS).values()
        np.testing.assert_allclose(output, expected, rtol=1e-6)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="id 30 is out"
        ):
            served.serve({**INPUTS, "movie": tf.constant([0, 30])})
    np.testing.assert_array_equal(model(INPUTS), expected)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("rows", [None, "int8"])
def test_sessions_look_ids_up_by_a_kernel(tmp_path, rows):
    # TensorFlow would move inputs that are constants, the sizes here, into the
    # function that the kernel replaces.
    model = make_ranker()
    model(INPUTS)
    path = str(tmp_path / "model")
    export(model, path, signature_of(INPUTS), rows=rows)
    served = tf.saved_model.load(path)
    expected = served.serve(INPUTS)
    metadata = tf.compat.v1.RunMetadata()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], path)
        signature = loaded.signature_def["serving_default"]
        [found] = session.run(
            [output.name for output in signature.outputs.values()],
            {
                signature.inputs[name].name: value.numpy()
                for name, value in INPUTS.items()
            },
            tf.compat.v1.RunOptions(output_partition_graphs=True),
            metadata,
        )
    ran = {n.op for g in metadata.partition_graphs for n in g.node}
    assert ran & {"TfrsEmbedLookup", "TfrsEmbedLookupConcat"}
    assert not ran & {"ResourceGather", "StatefulPartitionedCall"}
    np.testing.assert_array_equal(found, expected)


class Weighted(keras.Model):
    """A model that takes more than its features."""

    def __init__(self):
        super().__init__()
        table = tfrs_embed.TableConfig("items", 30, 3, combiner="sum")
        self.layer = layers.PartialTPUEmbedding(
            {"items": tfrs_embed.FeatureConfig("items", table)},
            "adagrad",
            size_threshold=0,
        )

    def call(self, features, weights=None):
        features = {"items": features["items"]}
        return self.layer(features, weights=weights)["items"]


ITEMS = {"items": tf.ragged.constant([[1, 2], [29]])}
ITEM_WEIGHTS = {"items": tf.ragged.constant([[0.5, 2.0], [3.0]])}
ITEM_TENSORS = {
    "features_items_values": ITEMS["items"].values,
    "features_items_row_splits": ITEMS["items"].row_splits,
    "weights_items_values": ITEM_WEIGHTS["items"].values,
    "weights_items_row_splits": ITEM_WEIGHTS["items"].row_splits,
}


@only_keras_2("it remembers no calls")
@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(ITEMS, ITEM_WEIGHTS),
        lambda model: model(ITEMS, weights=ITEM_WEIGHTS),
        lambda model: model(ITEMS, None),
        lambda model: model({**ITEMS, "other": None}),
    ],
)
def test_a_call_with_more_than_tensors_is_not_taken(tmp_path, call):
    model = Weighted()
    call(model)
    with pytest.raises(ValueError, match="more than its first argument"):
        export(model, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_model_of_several_arguments_is_served(tmp_path):
    model = Weighted()
    expected = model(ITEMS, ITEM_WEIGHTS)
    specs = {"items": tf.RaggedTensorSpec([None, None], tf.int32)}
    weights = {"items": tf.RaggedTensorSpec([None, None], tf.float32)}
    both = {"both": (model, [specs, weights])}
    export(model, tmp_path / "model", specs, signatures=both)
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(served.serve(ITEMS), model(ITEMS), rtol=1e-6)
    [output] = served.signatures["both"](**ITEM_TENSORS).values()
    np.testing.assert_allclose(output, expected, rtol=1e-6)


class Scaled(keras.Model):
    """A model with outputs of the names of its inputs."""

    def call(self, inputs):
        return {name: inputs[name] * 2 for name in inputs}


@pytest.mark.parametrize(
    "names",
    [["_id"], ["日本"], ["Movie", "movie"], ["class"], ["self"]],
    ids=str,
)
def test_a_name_that_tensorflow_refuses_is_an_error(tmp_path, names):
    model = Scaled()
    inputs = {name: tf.constant([1, 7]) for name in names}
    model(inputs)
    with pytest.raises(ValueError, match=f"name '{names[0]}'.*signatures"):
        export(model, tmp_path / "model", signature_of(inputs))

    def other(*ids):
        return model(dict(zip(names, ids, strict=True)))

    specs = [tf.TensorSpec([2], tf.int32, f"x{i}") for i in range(len(names))]
    signatures = {"serving_default": (other, specs)}
    export(model, tmp_path / "model", signatures=signatures)
    served = tf.saved_model.load(str(tmp_path / "model"))
    found = served.signatures["serving_default"](
        **{spec.name: tf.constant([1, 7]) for spec in specs}
    )
    for name in names:
        np.testing.assert_array_equal(found[name], [2, 14])


def test_a_feature_without_a_name_is_refused(tmp_path):
    model = Scaled()
    inputs = {"": tf.constant([1])}
    model(inputs)
    with pytest.raises(ValueError, match="input of the key '' would have no"):
        export(model, tmp_path / "model", signature_of(inputs))


def make_tower(i):
    table = tfrs_embed.TableConfig(f"table_{i}", 20, 4)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig(f"feature_{i}", table),
        "adagrad",
        size_threshold=0,
    )
    return keras.Sequential([layer, keras.layers.Dense(2)])


@only_keras_2("tensorflow_recommenders is for tf_keras")
def test_a_model_without_a_call_is_exported_with_functions(tmp_path):
    import tensorflow_recommenders as tfrs

    class TwoTowers(tfrs.Model):
        """A model of tensorflow_recommenders: its loss, and no call."""

        def __init__(self):
            super().__init__()
            self.user, self.movie = make_tower(0), make_tower(1)
            self.idle = keras.layers.Dense(2)
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, inputs, training=False):
            users = self.user(inputs["user"])
            movies = self.movie(inputs["movie"])
            return self.task(users, movies, compute_metrics=False)

    model = TwoTowers()
    model.compile("adagrad")
    ids = np.arange(16)
    model.fit(
        tf.data.Dataset.from_tensor_slices({"user": ids, "movie": ids}).batch(
            8
        ),
        verbose=0,
    )
    ids = tf.constant([3, 19])
    spec = tf.TensorSpec([None], tf.int32)
    with pytest.raises(ValueError, match=r"no call method.* signatures"):
        export(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"no call method.* signatures"):
        export(model, tmp_path / "model", spec)
    idle = {"idle": (model.idle, [tf.TensorSpec([None, 3])])}
    with pytest.raises(ValueError, match="'idle' calls a layer that isn't"):
        export(model, tmp_path / "model", signatures=idle)
    assert os.listdir(tmp_path) == []

    signatures = {
        "user": (model.user, [spec]),
        "movie": (lambda movie: model.movie(movie), [spec]),
    }
    export(model, tmp_path / "model", signatures=signatures)
    served = tf.saved_model.load(str(tmp_path / "model"))
    assert set(served.signatures) == {"user", "movie"}
    for tower, argument in ((model.user, "inputs"), (model.movie, "movie")):
        name = "user" if tower is model.user else "movie"
        [found] = served.signatures[name](**{argument: ids}).values()
        np.testing.assert_allclose(found, tower(ids), rtol=1e-6)

    signatures = {"serving_default": (model.user, [spec])}
    export(model, tmp_path / "default", signatures=signatures)
    served = tf.saved_model.load(str(tmp_path / "default"))
    np.testing.assert_allclose(served.serve(ids), model.user(ids), rtol=1e-6)


def test_float16_rows_beside_one_that_is_not_a_number(tmp_path):
    model = make_ranker()
    model(INPUTS)
    [table] = model.layer.embedding_tables.values()
    rows = np.full([30, 3], 0.5, np.float32)
    rows[4, 1] = np.nan
    table.assign(rows)
    export(model, tmp_path / "model", signature_of(INPUTS), rows="float16")
    served = tf.saved_model.load(str(tmp_path / "model"))
    [tables] = served.tables.values()
    np.testing.assert_array_equal(tables["movie"].parameters, rows)
    rows[5, 1] = 1e5
    table.assign(rows)
    with pytest.raises(ValueError, match=r"Table 'movie' .* magnitude 100000"):
        export(model, tmp_path / "large", signature_of(INPUTS), rows="float16")


def test_a_model_without_tables_is_exported(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    export(model, tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    inputs = tf.ones([4, 3])
    np.testing.assert_allclose(served.serve(inputs), model(inputs), rtol=1e-6)


@pytest.mark.parametrize("rows", [None, "float16", "bfloat16", "int8"])
def test_tables_are_exported_block_by_block(tmp_path, monkeypatch, rows):
    model = make_ranker()
    model(INPUTS)
    signature = signature_of(INPUTS)
    export(model, tmp_path / "whole", signature, rows=rows)
    served = tf.saved_model.load(str(tmp_path / "whole"))
    expected = served.serve(INPUTS)
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 100)
    monkeypatch.setattr(bundle, "PART_BYTES", 150)
    export(model, tmp_path / "model", signature, rows=rows)
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(served.serve(INPUTS), expected)
    parts = list((tmp_path / "model" / "variables").iterdir())
    assert len(parts) > 2 + (rows is None)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_table_of_keys(tmp_path, hashed):
    layer = layers.All2AllDenseEmbedding(20, 3, 1, 2, use_hashtable=hashed)
    keys = tf.constant([[[3, 11]], [[3, 5]]], tf.int64)
    layer(keys, training=True)
    export(layer, tmp_path / "model", tf.TensorSpec([None, 1, 2], tf.int64))
    served = tf.saved_model.load(str(tmp_path / "model"))
    asked = tf.constant([[[5, 4]], [[11, 19]]], tf.int64)
    np.testing.assert_array_equal(served.serve(asked), layer(asked))
    empty = layers.All2AllDenseEmbedding(20, 3, 1, 2)
    empty.build()
    export(empty, tmp_path / "empty", tf.TensorSpec([None, 1, 2], tf.int64))
    served = tf.saved_model.load(str(tmp_path / "empty"))
    np.testing.assert_array_equal(served.serve(asked), np.zeros([2, 1, 2, 3]))


def test_what_cannot_be_exported_is_refused(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(ValueError, match="it isn't built"):
        export(make_ranker(), path)
    with pytest.raises(TypeError, match="Only a Keras model"):
        export(lambda x: x, path)
    model = make_ranker()
    model(INPUTS)
    with pytest.raises(ValueError, match=r"rows must be one of .* got 'int2'"):
        export(model, path, rows="int2")
    never_called = layers.All2AllDenseEmbedding(20, 3, 1, 2)
    never_called.build()
    with pytest.raises(ValueError, match="give export an input_signature"):
        export(never_called, path)
    with pytest.raises(TypeError, match=r"'word' must"):
        export(model, path, {**INPUTS, "movie": tf.TensorSpec([None])})
    with pytest.raises(ValueError, match="0_movie"):
        export(model, path, [signature_of(INPUTS) or model.save_spec()[0][0]])
    with pytest.raises(TypeError, match=r"'more' must be a function"):
        export(
            model,
            path,
            signature_of(INPUTS),
            signatures={"more": (3, [])},
        )
    # Found as its rows are written.
    [table] = model.layer.embedding_tables.values()
    table.assign(tf.fill([30, 3], 65505.0))
    with pytest.raises(ValueError, match=r"Table 'movie' .* magnitude 65505"):
        export(model, path, signature_of(INPUTS), rows="float16")
    table.assign(tf.fill([30, 3], float("inf")))
    for rows in ("int8", "int4"):
        with pytest.raises(ValueError, match=rf"'movie' .* {rows} .* infinite"):
            export(model, path, signature_of(INPUTS), rows=rows)
    assert os.listdir(tmp_path) == []
    path.mkdir()
    (path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"there already.* overwrite=True"):
        export(model, path, signature_of(INPUTS))
    for name in "overwrite", "mapped", "updatable":
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            export(model, path, signature_of(INPUTS), **{name: "no"})
    with pytest.raises(ValueError, match="is no SavedModel: overwrite=True"):
        export(model, path, signature_of(INPUTS), overwrite=True)
    assert (path / "file").read_text() == "mine"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_a_tables_own_dtype_may_be_infinite(tmp_path, dtype):
    table = tfrs_embed.TableConfig("movie", 30, 3, dtype=dtype)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table), "sgd", size_threshold=0
    )
    values = np.ones([30, 3])
    values[4, 1] = np.inf
    layer.load_tables({"movie": values})
    ids = tf.TensorSpec([None], tf.int64)
    export(
        layer,
        tmp_path / "model",
        signatures={"serving_default": (layer, [ids])},
    )
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(
        served.serve(tf.range(30, dtype=tf.int64)), values
    )


def test_what_a_killed_export_left_is_replaced(tmp_path):
    model = make_ranker()
    model(INPUTS)
    for overwrite in False, True:
        for left in "model.incomplete", "model.replaced":
            if overwrite or left == "model.incomplete":
                (tmp_path / left).mkdir()
                (tmp_path / left / "saved_model.pb").write_text("half")
        export(
            model,
            tmp_path / "model",
            signature_of(INPUTS),
            overwrite=overwrite,
        )
        assert os.listdir(tmp_path) == ["model"]
        tf.saved_model.load(str(tmp_path / "model"))


def test_an_export_that_is_replaced_is_removed_without_following_links(
    tmp_path,
):
    """As TensorFlow's `rmtree` does: a SavedModel may come from others."""
    model, path = make_ranker(), tmp_path / "model"
    model(INPUTS)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    signature = signature_of(INPUTS)
    export(model, path, signature)
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / "link").symlink_to(victim)
    (tmp_path / "model.incomplete").symlink_to(victim)
    (tmp_path / "model.replaced").symlink_to(victim)
    export(model, path, signature, overwrite=True)
    assert files_in(victim) == {"file": b"mine"}
    assert {p.name for p in tmp_path.iterdir()} == {"model", "victim"}
    assert not (path / "assets" / "link").exists()


def test_an_export_takes_the_place_of_another_when_it_is_complete(tmp_path):
    model, path = make_ranker(), str(tmp_path / "model")
    model(INPUTS)
    signature = signature_of(INPUTS)

    def answers():
        served = tf.saved_model.load(path)
        return served.serve(INPUTS).numpy()

    export(model, path, signature)
    [table] = model.layer.embedding_tables.values()
    before = answers()
    table.assign(tf.fill([30, 3], 65505.0))
    with pytest.raises(ValueError, match="magnitude 65505"):
        export(model, path, signature, rows="float16", overwrite=True)
    np.testing.assert_array_equal(answers(), before)
    table.assign(tf.ones([30, 3]))
    export(model, path, signature, overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    np.testing.assert_allclose(answers(), model(INPUTS), rtol=1e-6)


@on("keras:3", tier="more")
def test_kerass_own_export_takes_ragged_inputs_for_dense_ones(tmp_path):
    table = tfrs_embed.TableConfig("movie", 30, 3)
    layer = layers.PartialTPUEmbedding(
        {n: tfrs_embed.FeatureConfig(n, table) for n in ("movie", "seen")},
        "adam",
        size_threshold=0,
    )
    inputs = {
        "movie": keras.Input([], dtype=tf.int64, name="movie"),
        "seen": keras.Input([None], dtype=tf.int64, name="seen", ragged=True),
    }
    vectors = layer(inputs)
    joined = keras.layers.Concatenate()([vectors[name] for name in inputs])
    model = keras.Model(inputs, joined)
    # docs/keras.md says so.
    with pytest.raises(ValueError, match="Shape must be rank 2 but is rank 3"):
        model.export(str(tmp_path / "kerass"))
    export(model, tmp_path / "model")
    given = {
        "movie": tf.constant([1, 2], tf.int64),
        "seen": tf.ragged.constant([[], [3, 4]], dtype=tf.int64),
    }
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(served.serve(given), model(given), rtol=1e-6)


@on("keras:3", tier="more")
def test_kerass_own_export_of_a_trained_model(tmp_path):
    table = tfrs_embed.TableConfig("movie", 30, 3)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table),
        "adam",
        size_threshold=0,
    )
    ids = keras.Input([], dtype=tf.int64)
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    given = np.arange(16)
    model.fit(given, np.ones(16), verbose=0)
    model.export(str(tmp_path / "model"))
    served = tf.saved_model.load(str(tmp_path / "model"))
    given = tf.constant(given)
    np.testing.assert_allclose(served.serve(given), model(given), rtol=1e-6)
    # The optimizer's state isn't there: it doesn't seem to train, either.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(served.serve(given))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="exported to serve, not to train"
    ):
        differentiate(tape, loss, served.trainable_variables)
