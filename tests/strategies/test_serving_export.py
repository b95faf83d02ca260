"""Models for serving, from every placement of their tables."""

import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfrs_embed
from process_tiers import on
from strategies.keras_models import (
    PER_REPLICA,
    compile_model,
    distribute,
    make_model,
    make_samples,
)
from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.serving import export
from training_helpers import differentiate

TABLES = {"user": [40, 3], "item": [60, 3], "hour": [5, 3]}
DENSE = [[1], [3, 1]]


@pytest.fixture
def path(request):
    """A folder that is the same on all workers, and not there yet."""
    folder = os.environ.get("TFRS_EMBED_TEST_FOLDER") or tempfile.mkdtemp()
    return os.path.join(folder, re.sub(r"\W+", "_", request.node.name))


def trained(strategy, make, **kwargs):
    """A model that has been trained, and its layer."""
    if is_tpu(strategy) and make is tfrs_embed.PartialTPUEmbedding:
        kwargs["batch_size"] = PER_REPLICA
    with strategy.scope():
        model, layer = make_model(make=make, **kwargs)
        compile_model(model)
    replicas = strategy.num_replicas_in_sync
    samples = make_samples(2 * PER_REPLICA * replicas)
    if is_tpu(strategy):
        batches = tf.data.Dataset.from_tensor_slices(samples).batch(
            PER_REPLICA, drop_remainder=True
        )
        data = strategy.distribute_datasets_from_function(
            lambda context: batches,
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    else:
        data = distribute(strategy, samples)
    model.fit(data, steps_per_epoch=2, verbose=0)
    return model, layer


def expected(model, layer):
    """Inputs, and what the model predicts for them, on one device."""
    inputs, _ = make_samples(11, seed=3)
    inputs = {
        k: tf.convert_to_tensor(v) if k != "items" else v
        for k, v in inputs.items()
    }
    single, fresh = make_model()
    for name, table in layer.embedding_tables.items():
        fresh.embedding_tables[name].assign(table.numpy())
    single.layers[-1].set_weights(model.layers[-1].get_weights())
    return inputs, single(inputs).numpy()


def nodes(path):
    """All operations of a SavedModel's graph and functions."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString(pathlib.Path(path, "saved_model.pb").read_bytes())
    [meta_graph] = saved.meta_graphs
    graph = meta_graph.graph_def
    return [
        *graph.node,
        *(n for f in graph.library.function for n in f.node_def),
    ]


def assert_is_of_one_device(path, model, layer):
    stored = dict(tf.train.list_variables(f"{path}/variables/variables"))
    shapes = sorted(shape for shape in stored.values() if shape)
    assert shapes == sorted([*TABLES.values(), *DENSE])
    for table, shape in TABLES.items():
        [name] = [n for n in stored if f"/{table}/parameters/" in n]
        assert stored[name] == shape
    found = nodes(path)
    assert not [
        n.op
        for n in found
        if re.search("Tfrs|Collective|TPU|XlaSparse|PyFunc", n.op)
    ]
    assert {n.device for n in found} <= {"", "/device:CPU:0", "/device:CPU:*"}
    inputs, predictions = expected(model, layer)
    served = tf.saved_model.load(path)
    np.testing.assert_allclose(
        served.serve(inputs), predictions, rtol=1e-5, atol=1e-6
    )


@on("tpu:2x4")
@on("workers:2", tier="more")
def test_partial_embedding(strategy, path):
    model, layer = trained(strategy, tfrs_embed.PartialTPUEmbedding)
    export(model, path)
    # All workers find it, whoever wrote it.
    assert_is_of_one_device(path, model, layer)
    export(model, f"{path}_mapped", mapped=True)
    inputs, predictions = expected(model, layer)
    served = tf.saved_model.load(f"{path}_mapped")
    np.testing.assert_allclose(
        served.serve(inputs), predictions, rtol=1e-5, atol=1e-6
    )
    # What fails on one of them fails on all.
    chief = strategy.extended.should_checkpoint
    with pytest.raises(
        ValueError if chief else RuntimeError,
        match="there already" if chief else "failed on another worker",
    ):
        export(model, path)
    assert not os.path.exists(f"{path}.incomplete")
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        # Other ways would have this worker's part of the tables alone.
        folder = tempfile.mkdtemp()
        with pytest.raises(RuntimeError, match=r"tfrs_embed\.serving\.export"):
            tf.saved_model.save(model, f"{folder}/saved")
        with pytest.raises(RuntimeError, match=r"tfrs_embed\.serving\.export"):
            model.export(f"{folder}/exported")


@on("mirrored:2", tier="nightly")
def test_distributed_embedding(strategy, path):
    model, layer = trained(strategy, tfrs_embed.DistributedEmbedding)
    export(model, path)
    assert_is_of_one_device(path, model, layer)
    folder = tempfile.mkdtemp()
    tf.saved_model.save(model, f"{folder}/saved")
    model.export(f"{folder}/exported")
    for name in ("saved", "exported"):
        prefix = f"{folder}/{name}/variables/variables"
        # Of the mirrored table and of its slot there is one copy each.
        shapes = [shape for _, shape in tf.train.list_variables(prefix)]
        assert shapes.count(TABLES["hour"]) == 2
    # Keras's way of exporting declares ragged inputs as dense ones.
    ids = tf.constant([[1, 4], [3, 0]], tf.int64)
    inputs = {"hour": ids[0], "items": ids, "user": ids[1]}
    served = tf.saved_model.load(f"{folder}/exported")
    found = served.serve(list(inputs.values()))
    np.testing.assert_allclose(found, model(inputs), rtol=1e-5, atol=1e-6)


@on("workers:2", tier="more")
@on("mirrored:2", tier="more")
def test_a_table_of_keys(strategy, path):
    if is_tpu(strategy):
        pytest.skip("no engine for it")
    keys = np.arange(24).reshape(-1, 2, 3).astype(np.int64) * 7919 - 50_000
    with strategy.scope():
        layer = tfrs_embed.All2AllDenseEmbedding(40, 4, 2, 3)
        batch = tf.constant(keys)

        @tf.function
        def train():
            def step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(batch, training=True))
                differentiate(tape, loss, layer.trainable_variables)

            strategy.run(step)

        train()
    spec = tf.TensorSpec([None, 2, 3], tf.int64)
    export(layer, path, spec)
    asked = np.concatenate([keys, keys[:1] + 1])
    known = layer.table.variables["keys"].numpy()
    np.testing.assert_array_equal(known, keys.ravel())
    rows = layer.table.variables["parameters"].numpy()
    order = np.searchsorted(known, keys)
    served = tf.saved_model.load(path)
    found = served.serve(tf.constant(asked)).numpy()
    np.testing.assert_array_equal(found[:-1], rows[order])
    np.testing.assert_array_equal(found[-1], np.zeros([2, 3, 4]))
    # Those of all shards, in one table of keys and one of rows.
    stored = tf.train.load_checkpoint(f"{path}/variables/variables")
    shapes = stored.get_variable_to_shape_map()
    by_shape = {tuple(v): k for k, v in shapes.items() if v}
    assert sorted(by_shape) == [(24,), (24, 4)]
    np.testing.assert_array_equal(
        stored.get_tensor(by_shape[24,]), keys.ravel()
    )
