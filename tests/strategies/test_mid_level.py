"""Programs of TPUEmbeddingV2 as users of TensorFlow's own class write them.

The scenarios are those of TensorFlow's tests of it, which need a TPU.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_replication

import tfrs_embed
from process_tiers import nightly, on
from training_helpers import sparse_core_config

pytestmark = on("tpu:2x4", tier="more")

tpu = tf.tpu.experimental.embedding
ROWS, DIM, SAMPLES, IDS = 4096, 9, 16, 256
CLASSES = pytest.mark.parametrize(
    "cls", [tpu.TPUEmbeddingV2, tfrs_embed.TPUEmbeddingV2], ids=["tf", "ours"]
)


def feature(*tables):
    """A feature of each table, by its name, which is a letter."""
    configs = {
        name: tpu.TableConfig(
            ROWS,
            DIM,
            tf.random_uniform_initializer(seed=ord(name)),
            combiner="sum",
            name=name,
        )
        for name in tables
    }
    return [
        tpu.FeatureConfig(configs[name], output_shape=[SAMPLES])
        for name in tables
    ]


def ids(number=IDS):
    """Id i is in sample i % SAMPLES."""
    return tf.sparse.reorder(
        tf.SparseTensor(
            [[i % SAMPLES, i] for i in range(number)],
            np.arange(number),
            [SAMPLES, number],
        )
    )


def batches(strategy, whole):
    """An iterator over one batch, the same for each replica."""
    data = tf.data.Dataset.from_tensors(whole).unbatch().repeat()
    size = SAMPLES * strategy.num_replicas_in_sync
    return iter(
        strategy.experimental_distribute_dataset(
            data.batch(size, drop_remainder=True),
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )


def make(cls, strategy, features, rate=1.0, **arguments):
    with strategy.scope():
        embedding = cls(features, tpu.SGD(rate), **arguments)
        embedding.build()
    return embedding


def read(embedding):
    """Each table's rows, from the chips' shards of the stacks."""
    found = {}
    for name, layout in embedding.embedding_layouts.items():
        stack = embedding.embedding_tables[layout.stacked_table_name]
        shards = np.concatenate([chip.numpy() for chip in stack.values])
        shards = shards.reshape(layout.num_sparse_cores, -1, shards.shape[-1])
        shards = np.roll(shards, -layout.sparse_core_shard_rotation, 0)
        first = layout.sparse_core_shard_row_offset
        size = ROWS // layout.num_sparse_cores
        mine = shards[:, first : first + size, :DIM]
        found[name] = mine.transpose(1, 0, 2).reshape(-1, DIM)
    return found


def sums(rows, number=IDS):
    """Activations of `ids(number)`."""
    return np.stack([rows[s:number:SAMPLES].sum(0) for s in range(SAMPLES)])


def assert_activations(strategy, found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for mine in strategy.experimental_local_results(ours):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@CLASSES
@nightly(lambda tables: tables == "a")
@pytest.mark.parametrize("tables", ["a", "aa", "ab"])
@pytest.mark.parametrize("apart", [False, True], ids=["call", "enqueue"])
def test_lookups(strategy, cls, tables, apart):
    embedding = make(cls, strategy, feature(*tables))
    data = [next(batches(strategy, ids()))] * len(tables)
    [device, *_] = strategy.extended.worker_devices

    @tf.function
    def lookup():
        if not apart:
            return strategy.run(embedding, (data,))[0]
        # The host's part is outside of the step.
        buffers = embedding.enqueue([ids()] * len(tables), device=device)
        return strategy.run(lambda b: embedding.dequeue(b)[0], (buffers,))

    rows = read(embedding)
    assert_activations(strategy, lookup(), [sums(rows[n]) for n in tables])


@CLASSES
@pytest.mark.parametrize("tables", ["aa", "ab"])
def test_updates_without_a_lookup(strategy, cls, tables):
    with strategy.scope():
        rate = tf.Variable(0.5)
    embedding = make(cls, strategy, feature(*tables), rate.read_value)
    data = next(batches(strategy, ids()))
    rng = np.random.default_rng(0)
    gradients = [rng.uniform(size=[SAMPLES, DIM]).astype("f4") for _ in "ab"]
    expected = read(embedding)

    @tf.function
    def train(gradients):
        def step(data, gradients):
            buffers = tpu_replication.outside_compilation(
                embedding._copy_tensors_to_device,
                partitioned_tensors=embedding.enqueue([data, data]),
            )
            embedding.apply_gradients(gradients, buffers)

        strategy.run(step, (data, gradients))

    train(gradients)
    for name, gradient in zip(tables, gradients, strict=True):
        change = np.tile(gradient, (IDS // SAMPLES, 1))
        expected[name][:IDS] -= 0.5 * strategy.num_replicas_in_sync * change
    found = read(embedding)
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-5, atol=1e-5)


@CLASSES
def test_stats_of_a_batch_are_limits_for_it(strategy, cls):
    features = feature("a")
    with strategy.scope():
        most, unique = cls.compute_sparse_core_stats(
            [ids()],
            features,
            strategy.num_replicas_in_sync,
            strategy.topology.sparse_cores,
            tpu.SGD(1.0),
        )
    assert features[0].table.dim == DIM
    config = sparse_core_config(
        max_ids_per_table=most, max_unique_ids_per_table=unique
    )
    embedding = make(
        cls, strategy, features, sparse_core_embedding_config=config
    )
    data = [next(batches(strategy, ids()))]
    found, _ = tf.function(lambda: strategy.run(embedding, (data,)))()
    assert_activations(strategy, found, [sums(read(embedding)["a"])])


@CLASSES
def test_a_loop_whose_ids_are_enqueued_by_another_function(strategy, cls):
    embedding = make(
        cls,
        strategy,
        feature("a"),
        0.1,
        pipeline_execution_with_tensor_core=True,
    )
    [device, *_] = strategy.extended.worker_devices
    start = read(embedding)["a"]

    @tf.function
    def enqueue(data):
        data, *_ = strategy.experimental_local_results(data)  # All are alike.
        return embedding.enqueue([data], device=device)

    def step(buffers):
        embedding.apply_gradients(*embedding.dequeue(buffers))

    @tf.function
    def loop(iterator):
        for _ in tf.range(3):
            strategy.run(step, (enqueue(next(iterator)),))

    loop(batches(strategy, ids(SAMPLES)))
    lost = 0.1 * strategy.num_replicas_in_sync  # By a step, of a row's value.
    start[:SAMPLES] *= 1 - lost * (1 + 1 + (1 - lost))
    np.testing.assert_allclose(read(embedding)["a"], start, rtol=1e-5)


@CLASSES
@nightly(lambda weighted: not weighted)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_sparse_and_a_ragged_feature(strategy, cls, weighted):
    """The last sample of both is empty; one of them has weights."""
    embedding = make(cls, strategy, feature("a", "b"))
    ragged = tf.ragged.constant(
        [[i] * (i % 3) for i in range(SAMPLES - 1)] + [[]], dtype=tf.int64
    )
    weights = tf.cast(ragged, tf.float32)
    data = [next(batches(strategy, w)) for w in (ids(SAMPLES - 1), ragged)]
    given = [None, next(batches(strategy, weights))] if weighted else None
    found, _ = tf.function(lambda: strategy.run(embedding, (data, given)))()
    rows = read(embedding)
    number = np.array([i % 3 for i in range(SAMPLES - 1)] + [0])
    factor = number * np.arange(SAMPLES) if weighted else number
    expected = [sums(rows["a"], SAMPLES - 1)]
    expected.append(rows["b"][:SAMPLES] * factor[:, None])
    assert_activations(strategy, found, expected)
