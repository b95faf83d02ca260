"""The kernels that route and remember keys, and those in exported graphs."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfrs_embed
from tfrs_embed import kernels
from tfrs_embed.ops import backend, bag_matrix, messages
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import BaggedIds
from training_helpers import operations_run

pytestmark = pytest.mark.usefixtures("needs_kernels")

INT64 = np.iinfo(np.int64)


def make_keys(size, kind):
    rng = np.random.default_rng(size)
    if kind == "few":
        return rng.integers(0, 5, size)
    if kind == "any":
        keys = rng.integers(INT64.min, INT64.max, size)
        keys[:4] = [INT64.min, INT64.max, -1, 0][:size]
        return keys
    return rng.zipf(1.1, size) % 100_000


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["few", "any", "zipf"])
@pytest.mark.parametrize("size", [0, 1, 7, 5000])
@pytest.mark.parametrize("tables", [1, 3])
def test_routes_of_both_implementations(tables, size, kind, world):
    keys = make_keys(size, kind)
    number = np.random.default_rng(size).integers(
        tables, size=size, dtype=np.int32
    )
    given = (tf.constant(keys, tf.int64), world)
    if tables > 1:
        given += (tf.constant(number), tables)
    found = backend.operations("/CPU:0", True).route(*given)
    wanted = messages.route(*given)
    np.testing.assert_array_equal(found.counts, wanted.counts)
    np.testing.assert_array_equal(found.owner, wanted.owner)
    for routed in (found, wanted):
        owner, row = routed.owner.numpy(), routed.row.numpy()
        assert np.all(np.diff(owner) >= 0)
        unique = row * world + owner
        table = np.concatenate(
            [np.repeat(np.arange(tables), each) for each in routed.counts]
        )
        pairs = set(zip(unique.tolist(), table.tolist(), strict=True))
        assert len(pairs) == len(unique)
        np.testing.assert_array_equal(unique[routed.index.numpy()], keys)
        np.testing.assert_array_equal(table[routed.index.numpy()], number)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 7, 5000])
@pytest.mark.parametrize("tables", [1, 3])
def test_messages_of_both_implementations(tables, size, world):
    """Each shard's keys, written and read."""
    keys = make_keys(size, "any")
    operations = backend.operations("/CPU:0", True)
    number = np.random.default_rng(size).integers(
        tables, size=size, dtype=np.int32
    )
    routed = operations.route(
        tf.constant(keys, tf.int64), world, tf.constant(number), tables
    )
    sizes = tf.reduce_sum(routed.counts, 1)
    capacity = tf.cast(tf.reduce_max(sizes) + 3, tf.int32)
    message, position = operations.write_keys(routed, capacity)
    for found, wanted in zip(
        (message, position), messages.write_keys(routed, capacity), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    read, table_of, places = operations.read_keys(message, tables)
    for found, wanted in zip(
        (read, table_of, places),
        messages.read_keys(message, tables),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(read, np.ravel(message[:, tables:]))
    # As the shards are in order, so are their messages' keys.
    np.testing.assert_array_equal(places, position)
    np.testing.assert_array_equal(tf.gather(read, places), routed.row)
    if tables > 1:
        wanted = tf.reshape(routed.counts, [-1])
        np.testing.assert_array_equal(
            tf.gather(table_of, places),
            np.repeat(np.tile(np.arange(tables), world), wanted),
        )
    else:
        assert not len(table_of)


def test_messages_that_do_not_fit_are_errors():
    ops = kernels.operations("/CPU:0")
    invalid = tf.errors.InvalidArgumentError
    keys, counts = tf.constant([1, 2, 3], tf.int64), [[1], [2]]
    for wrong in ([1, 1], [-1, 4], [0, 3], [2, 2]):
        wrong = np.reshape(wrong, [2, 1])
        with pytest.raises(invalid, match="keys"):
            ops.tfrs_embed_write_keys(keys=keys, counts=wrong, capacity=2)
    with pytest.raises(invalid, match="capacity"):
        ops.tfrs_embed_write_keys(keys=keys, counts=counts, capacity=-1)
    with pytest.raises(invalid, match="capacity must be a scalar"):
        ops.tfrs_embed_write_keys(keys=keys, counts=counts, capacity=[2, 2])
    for message in ([[3, 0, 0]], [[-1, 0]], [[1]]):
        with pytest.raises(invalid, match="in a message of"):
            ops.tfrs_embed_read_keys(
                message=tf.constant(message, tf.int64), tables=1
            )
    for shape in ([3], [2, 0]):
        with pytest.raises(invalid, match="messages of shape"):
            ops.tfrs_embed_read_keys(
                message=tf.zeros(shape, tf.int64), tables=1
            )


def random_bags(rng, count, bag_size, weighted):
    """Bags of ids below some number, of which no id need be on any shard."""
    rows = int(rng.choice([1, 5, 1000, 2**31 - 1]))
    n = count * bag_size
    return BaggedIds(
        tf.constant(rng.integers(0, rows, n)),
        None,
        tf.constant(rng.random(n), tf.float32) if weighted else None,
        None,
        tf.constant(count),
        tf.constant([count]),
        tf.TensorShape([count]),
        tf.TensorShape([bag_size]),
    )


@pytest.mark.parametrize("world", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("sizes", [(0,), (1, 3), (50, 700, 0)])
def test_ids_of_a_shard_of_both_implementations(world, sizes):
    """All shards' ids together are those of the bags, weights beside them."""
    rng = np.random.default_rng(len(sizes) * world)
    columns = [
        BagColumns(int(size), bool((i + world) % 3 == 0))
        for i, size in enumerate(
            rng.choice([1, 2, 31, 32, 33, 100], len(sizes))
        )
    ]
    bags = [
        random_bags(rng, count, *c)
        for count, c in zip(sizes, columns, strict=True)
    ]
    matrix = bag_matrix.pack(bags, columns, tf.constant(max(sizes) + 2))
    gathered = [[] for _ in bags]
    for rank in range(world):
        # Each feature's table may begin on another shard.
        shards = [(rank + i) % world for i in range(len(bags))]
        asked = matrix, columns, world, shards
        found = backend.operations("/CPU:0", True).ids_of_shard(*asked)
        wanted = bag_matrix.ids_of_shard(*asked)
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert int(one.count) == int(other.count) == max(sizes) + 2
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.bag_of_id(), other.bag_of_id())
            assert (one.weights is None) == (other.weights is None)
            weights = np.ones(one.ids.shape)
            if one.weights is not None:
                np.testing.assert_array_equal(one.weights, other.weights)
                weights = one.weights.numpy()
            ids = np.asarray(one.ids, np.int64) * world + shards[i]
            gathered[i] += zip(
                one.bag_of_id().numpy(), ids, weights, strict=True
            )
    for bag, all_shards in zip(bags, gathered, strict=True):
        weights = np.ones(bag.ids.shape)
        if bag.weights is not None:
            weights = bag.weights.numpy()
        expected = zip(
            bag.bag_of_id().numpy(), bag.ids.numpy(), weights, strict=True
        )
        assert sorted(all_shards) == sorted(expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bag_sizes": [2]}, "an entry for each feature"),
        ({"bag_sizes": [2, 0]}, "bag_sizes: 0"),
        ({"shards": [0, 2]}, "shard 2 of 2"),
        ({"shards": [0, -1]}, "shard -1 of 2"),
        ({"W": 0}, "1 weighted features for W = 0"),
        ({"matrix": tf.zeros([5, 6])}, r"shape \[5,6\] for 5 columns"),
        ({"matrix": tf.zeros([7])}, r"shape \[7\] for 5 columns"),
    ],
)
def test_bags_that_do_not_fit_are_errors(changed, message):
    arguments = {
        "matrix": tf.zeros([5, 5]),
        "bag_sizes": [2, 1],
        "weighted": [True, False],
        "M": 2,
        "W": 1,
        "world": 2,
        "shards": [0, 1],
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        kernels.operations("/CPU:0").tfrs_embed_ids_of_shard(
            **{**arguments, **changed}
        )


# Graphs that may be exported.


def make_module(dtype="float32"):
    tpu = tf.tpu.experimental.embedding
    shared = tpu.TableConfig(50, 6, combiner="mean", name="shared")
    other = tpu.TableConfig(40, 3, combiner="sum", name="other")
    module = tf.Module()
    module.layer = tfrs_embed.PartialTPUEmbedding(
        {
            "dense": tpu.FeatureConfig(shared, output_shape=[None]),
            "ragged": tpu.FeatureConfig(shared),
            "other": tpu.FeatureConfig(other),
        },
        tpu.Adagrad(0.1),
        size_threshold=0,
        dtype=dtype,
    )

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.TensorSpec([None], tf.int32),
        ]
    )
    def serve(dense, ragged, other):
        return module.layer({"dense": dense, "ragged": ragged, "other": other})

    module.serve = serve
    return module


INPUTS = (
    np.arange(8).reshape(2, 4),
    tf.ragged.constant([[1, 2, 2], []], dtype=tf.int64),
    np.array([5, 39], np.int32),
)


def operations_in(graph):
    """Those that a graph and the functions in it have."""
    nodes = [*graph.node]
    for function in graph.library.function:
        nodes += function.node_def
    return {node.op for node in nodes}


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_graphs_name_no_kernel_and_run_it(dtype):
    module = make_module(dtype)
    # The first call: later ones don't say what they run.
    ran = operations_run(module.serve, *INPUTS)
    found = module.serve(*INPUTS)
    graph = module.serve.get_concrete_function().graph.as_graph_def()
    assert not any("TfrsEmbed" in op for op in operations_in(graph))
    assert "TfrsEmbedLookup" in ran
    with kernels.disabled():
        expected = module.layer(
            dict(zip(["dense", "ragged", "other"], INPUTS, strict=True))
        )
    for name, vectors in found.items():
        np.testing.assert_allclose(
            tf.cast(vectors, tf.float32),
            tf.cast(expected[name], tf.float32),
            rtol=1e-2 if dtype == "mixed_bfloat16" else 1e-6,
        )


LOAD = """
import sys
import numpy as np
import tensorflow as tf

module = tf.saved_model.load(sys.argv[1])
ragged = tf.ragged.constant([[1, 2, 2], []], dtype=tf.int64)
found = module.serve(np.arange(8).reshape(2, 4), ragged, np.int32([5, 39]))
np.savez(sys.argv[2], **found)
"""


@pytest.mark.more
def test_an_exported_model_runs_where_there_are_no_kernels(tmp_path):
    module = make_module()
    expected = module.serve(*INPUTS)
    folder, results = str(tmp_path / "model"), str(tmp_path / "results.npz")
    # Traced before it is saved, as those who serve models do.
    tf.saved_model.save(
        module, folder, signatures=module.serve.get_concrete_function()
    )
    saved = saved_model_pb2.SavedModel()
    with open(os.path.join(folder, "saved_model.pb"), "rb") as file:
        saved.ParseFromString(file.read())
    for meta_graph in saved.meta_graphs:
        used = operations_in(meta_graph.graph_def)
        assert not any("TfrsEmbed" in op for op in used)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, folder, results],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(results)
    for name, vectors in expected.items():
        np.testing.assert_allclose(found[name], vectors, rtol=1e-6)
