"""What a GPU would run of steps and exports; docs/scaling.md has the table."""

import os
import pathlib
import re
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfrs_embed
import update_rules
from conformance import descriptors
from gpu_placement import placement
from keras_under_test import NUMBER, keras, layers
from process_tiers import on
from tfrs_embed import kernels
from training_helpers import ON_GPU, assert_same, state

PAGE = pathlib.Path(__file__).parents[1] / "docs/scaling.md"
BATCH, DIM, ROWS = 64, 16, 100_000


class Case(NamedTuple):
    """A step, by the options of its tables, layer and features."""

    tables: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    features: dict[str, Any] = {}  # noqa: RUF012
    ids: tf.DType = tf.int64
    training: bool = True


def placed(place, **tables):
    return Case({"placement": place, **tables})


HASHED = {"hashing": tfrs_embed.Hash()}
HOST = '`placement="host"`'
KEYS = "`DynamicKeys`"
#: By the process, "" for one device, what the page calls steps.
ALL_CASES = {
    "": {
        "one device": Case(),
        "evaluation": Case(training=False),
        "Adam, bfloat16": Case({"dtype": "bfloat16"}, {"optimizer": "adam"}),
        "hashed integers": Case(features=HASHED),
        "hashed strings": Case(features=HASHED, ids=tf.string),
        KEYS: Case({"keys": tfrs_embed.DynamicKeys()}),
        HOST: placed("host"),
    },
    "keras:3": {"Keras 3": Case()},
    "mirrored": {
        "by row": placed("row"),
        "by row, hot rows": placed("row", hot_rows=range(100)),
        "by row, bfloat16": placed("row", dtype="bfloat16"),
        "by column": placed("column"),
        "by table": placed("table"),
        "copies": placed("replicated"),
    },
    "workers": {"by row, one of two workers": placed("row")},
}
KIND = os.environ.get("TFRS_EMBED_TEST_STRATEGY", "").partition(":")[0]
CASES = ALL_CASES[KIND or ("keras:3" if NUMBER == 3 else "")]
#: The dtypes of NCCL's collectives in TensorFlow: kValidDataTypes of its
#: core/nccl/nccl_manager.cc.
OF_NCCL = {tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}


pytestmark = pytest.mark.skipif(
    ON_GPU, reason="it is about machines without a GPU"
)


@pytest.fixture
def beside_gpus(monkeypatch):
    """Has kernels where they are beside GPUs: on the host alone."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: ["GPU"])
    monkeypatch.setattr(kernels, "_disabled", bool(KIND))


def make_layer(case):
    features = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(f"of_{name}", ROWS, DIM, **case.tables),
            **case.features,
            **kind,
        )
        for name, kind in {
            "dense": {},
            "ragged": {},
            "uncombined": {"combiner": None},
        }.items()
    }
    options = {"optimizer": "adagrad", **case.options}
    return layers.PartialTPUEmbedding(features, size_threshold=0, **options)


def vectors_of(layer, ids, **options):
    """One vector for each sample."""
    ragged = tf.RaggedTensor.from_tensor(ids)
    inputs = {"dense": ids[:, 0], "ragged": ragged, "uncombined": ragged}
    found = layer(inputs, **options)
    history = tf.reduce_sum(found["uncombined"], 1)
    return tf.concat([found["dense"], found["ragged"], history], 1)


def make_step(strategy, layer, training=True):
    """Returns a step of a model with the layer."""
    with strategy.scope():
        dense = keras.layers.Dense(1)
        dense.build([None, 3 * DIM])
        layer.build(None)
        trained = [*layer.trainable_variables, *dense.trainable_variables]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(trained)
    sources = [v.value for v in trained] if NUMBER == 3 else trained

    def of_replica(ids):
        with tf.GradientTape() as tape:
            found = vectors_of(layer, ids, training=training)
            loss = tf.reduce_sum(dense(found) ** 2)
        if training:
            gradients = tape.gradient(loss, sources)
            optimizer.apply_gradients(zip(gradients, trained, strict=True))
        return loss

    return tf.function(lambda ids: strategy.run(of_replica, (ids,)))


def place(strategy, case):
    """Returns the placement of a case's step."""
    with strategy.scope():
        layer = make_layer(case)
    step = make_step(strategy, layer, case.training)
    traced = step.get_concrete_function(tf.TensorSpec([BATCH, 5], case.ids))
    hosted = ()
    if case.tables.get("placement") == "host":
        hosted = variables_of(layer)
    return placement(traced, None if KIND else "CPU:0", hosted)


def variables_of(layer):
    """The tables' variables, and the step."""
    tables = (t.variables.values() for t in layer.tables.values())
    return [layer.step, *(v for each in tables for v in each)]


def numbers(found):
    total = found.on_gpu + sum(map(len, found.on_host.values()))
    return total, total - found.on_gpu, len(found.down), len(found.up)


def check_page(name, counts):
    """The page's table has the counts of this TensorFlow."""
    line = "| " + " | ".join([name, *map(str, counts)]) + " |"
    if tf.__version__.startswith("2.21."):
        assert line in PAGE.read_text()


def check_on_gpu(name, found):
    """All runs on GPUs; only integers and lengths are copied."""
    assert not found.on_host, f"{name}: no kernels for GPUs: {found.on_host}"
    copied = {**found.down, **found.up}
    floats = [value for value, dtype in copied.items() if dtype.is_floating]
    assert not floats, f"{name}: copies of {floats}"


@on("workers:2", "keras:3")
# The others run the operations of one of these.
@on("mirrored:2", tier="nightly")
@on(
    "mirrored:2", when=lambda name: name not in ("by row, bfloat16", "by table")
)
@pytest.mark.usefixtures("beside_gpus")
@pytest.mark.parametrize("name", CASES)
def test_steps(strategy, name):
    case = CASES[name]
    if "keys" in case.tables and not kernels.status().loaded:
        pytest.skip(str(kernels.status()))
    found = place(strategy, case)
    for what, dtype in found.collectives.items():
        assert dtype in OF_NCCL, f"{name}: NCCL has no {what} of {dtype.name}"
    assert bool(found.collectives) == bool(KIND)
    if name == KEYS:
        of_keys = [op for op in found.on_host if "KeyTables" in op]
        assert sorted(op.partition("Tables")[2] for op in of_keys) == [
            *("Commit", "Publish", "Reserve"),
        ]
        # The keys and the step's number; for each table a number of rows.
        assert len(found.down) == 2 + 3
        always = [value for value in found.up if "cond" not in value]
        # Rows to read and to write; numbers of rows.
        assert len(always) == 2 + 4
    elif name == HOST:
        # Vectors of each feature; what the model concatenates has one gradient.
        assert [*found.up.values()] == 3 * [tf.float32]
        # Ids, two gradients, and the learning rate.
        assert sorted(dtype.name for dtype in found.down.values()) == [
            *("float32", "float32", "float32", "int64", "int64"),
        ]
    elif case.features:
        # Texts; of strings, the model's own operations too.
        texts = {"AsString", "StringToHashBucketFast"}
        assert found.on_host.keys() <= texts | {"Reshape", "StridedSlice"}
    else:
        check_on_gpu(name, found)
    check_page(name, numbers(found))


@pytest.mark.skipif(bool(KIND), reason="of one device")
@pytest.mark.usefixtures("beside_gpus")
def test_update_rules(strategy):
    counts = []
    for rule in update_rules.RULES.values():
        [*_, name] = rule.cases
        given = descriptors.OPTIMIZERS[name].optimizer
        optimizer = descriptors.fresh(given)
        found = place(strategy, Case(options={"optimizer": optimizer}))
        check_on_gpu(name, found)
        counts.append(numbers(found))
    most = [max(each) for each in zip(*counts, strict=True)]
    check_page("any update rule, at most", most)


@pytest.mark.skipif(bool(KIND), reason="of one device")
def test_export(tmp_path):
    layer, dense = make_layer(Case()), keras.layers.Dense(1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = layer, dense

        def call(self, ids):
            return self.dense(vectors_of(self.embedding, ids))

    model = Model()
    model(tf.zeros([BATCH, 5], tf.int64))
    signature = tf.TensorSpec([None, 5], tf.int64)
    with kernels.disabled():
        tfrs_embed.serving.export(model, tmp_path / "model", signature)
    loaded = tf.saved_model.load(tmp_path / "model")
    found = placement(loaded.signatures["serving_default"], "CPU:0")
    check_on_gpu("export", found)
    check_page("export", numbers(found))


def copies(step, *args):
    """How many values a step's first call sends between two CPUs.

    By TensorFlow's own placer: down to the first CPU, and up to the second.
    Without those of branches that raise an error.
    """
    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # What ran before.
        step(*args)
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    sent = [
        node.attr["recv_device"].s[-5:]
        for graph in graphs
        for part in graph.partition_graphs
        for node in part.node
        # Some only say that something has happened.
        if node.op == "_Send" and not re.search("ctrl|Func", str(node.input))
    ]
    return sent.count(b"CPU:0"), sent.count(b"CPU:1")


@on("mirrored:2")
@pytest.mark.skipif(KIND != "mirrored", reason="needs two logical CPUs")
@pytest.mark.parametrize("with_kernels", [True, False])
def test_tables_of_the_host_train_as_others(monkeypatch, with_kernels):
    """Numbers are equal; TensorFlow's placer makes the counted copies."""
    monkeypatch.setattr(kernels, "_disabled", not with_kernels)
    trained, sent = [], (0, 0)
    other = tf.distribute.OneDeviceStrategy("CPU:1")
    for case, device in ((Case(), "CPU:1"), (placed("host"), "CPU:0")):
        tf.keras.utils.set_random_seed(1)
        with other.scope():
            layer = make_layer(case)
        step = make_step(other, layer)
        places = {variable.device[-5:] for variable in variables_of(layer)}
        assert places == {device}
        with tf.device("CPU:1"):
            ids = tf.random.uniform([BATCH, 5], 0, ROWS, tf.int64, seed=1)
        sent = copies(step, ids)
        losses = [step(ids).numpy() for _ in range(3)]
        trained.append({**state(layer), "losses": losses})
    assert_same(*trained)
    if with_kernels:
        traced = step.get_concrete_function(ids)
        # The learning rate, too.
        hosted = [v for v in traced.graph.variables if "CPU:0" in v.device]
        found = placement(traced, "CPU:0", hosted)
        # The loss goes down, and up again.
        assert sent == (len(found.down) + 1, len(found.up) + 1)


@on("mirrored:2")
@pytest.mark.skipif(not KIND, reason="of several replicas")
def test_several_replicas_have_no_tables_of_the_host(strategy):
    message = (
        "Table 'of_dense': placement='host' is not available under "
        "MirroredStrategy of 2 replicas"
    )
    with strategy.scope(), pytest.raises(ValueError, match=message):
        make_layer(placed("host"))


@pytest.mark.skipif(bool(KIND), reason="of one device")
@pytest.mark.usefixtures("beside_gpus", "needs_kernels")
def test_files_beside_a_gpu(tmp_path):
    """Tables in files are the host's."""
    storage = tfrs_embed.FileStorage(tmp_path)
    make_layer(placed("host", storage=storage)).build(None)
    with pytest.raises(RuntimeError, match="compiled kernels"):
        make_layer(placed("auto", storage=storage)).build(None)
