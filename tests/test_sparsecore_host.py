"""SparseCore's host preprocessing, against buffers worked out by hand.

Where TensorFlow's kernels are, tpu_wheel/test_host_kernels.py compares.
"""

import concurrent.futures
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfrs_embed.sparsecore import Topology, buffers, coo, partitions
from tfrs_embed.sparsecore.layout import Layout
from training_helpers import sparse_core_config

tpu = tf.tpu.experimental.embedding
P = np.iinfo(np.int32).max
GAP = [P] * 7


def layout(combiner="mean", topology=(1, 2), tables=1, **config):
    features = [
        tpu.FeatureConfig(
            tpu.TableConfig(16, 8, combiner=combiner, name=f"t{i}"),
            output_shape=[4],
        )
        for i in range(tables)
    ]
    return Layout(
        features,
        Topology.of(topology),
        sparse_core_config(**config),
    )


def flat(rows, dtype):
    return np.array(list(itertools.chain.from_iterable(rows)), dtype)


def ragged(rows, weights=None):
    splits = np.cumsum([0] + [len(row) for row in rows])
    if weights is not None:
        weights = flat(weights, np.float32)
    return coo.Ids(splits.astype(np.int32), flat(rows, np.int32), weights)


def dense(*ids):
    return ragged([[i] for i in ids])


def assert_buffers(got, pointers, samples, tokens, gains):
    np.testing.assert_array_equal(got.row_pointers, pointers)
    np.testing.assert_array_equal(got.sample_ids, samples)
    np.testing.assert_array_equal(got.token_ids, tokens)
    np.testing.assert_array_equal(got.gains, np.float32(gains))


def test_each_partition_is_padded_and_its_end_pointed_at():
    # SparseCore 0 has the first two samples; even ids are shard 0's.
    ids = ragged([[5], [2, 2], [], [0, 1]])
    assert_buffers(
        buffers.preprocess(layout(), [ids])["t0"],
        [1, 9, *[16] * 6, 17, 25, *[32] * 6],
        [1, *GAP, 0, *GAP, 1, *GAP, 1, *GAP],
        [1, *GAP, 2, *GAP, 0, *GAP, 0, *GAP],
        [1, *GAP, 1, *GAP, 0.5, *GAP, 0.5, *GAP],
    )


@pytest.mark.parametrize(
    ("combiner", "gains"),
    [
        ("sum", [3, 4, 1, -1]),
        ("mean", [3 / 7, 4 / 7, 0, 0]),
        ("sqrtn", [0.6, 0.8, 0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_gains_are_weights_over_what_the_combiner_divides_by(combiner, gains):
    # The weights of sample 2 sum to zero, which counts as no ids.
    ids = ragged([[0, 2], [], [4, 6], []], [[3, 4], [], [1, -1], []])
    got = buffers.preprocess(layout(combiner), [ids])["t0"]
    real = got.gains[got.token_ids != P]
    np.testing.assert_allclose(real, np.float32(gains), rtol=1e-6)


def test_an_id_that_returns_in_a_sample_is_merged():
    ids = ragged([[4, 2, 4], [4], [], []], [[1, 2, 4], [8], [], []])
    got = buffers.preprocess(layout("sum"), [ids])["t0"]
    assert got.sample_ids[:3].tolist() == [0, 0, 1]
    assert got.token_ids[:3].tolist() == [1, 2, 2]
    assert got.gains[:3].tolist() == [2, 5, 8]


def test_neighbours_of_one_id_are_added_before_they_are_scaled():
    weights = np.float32([0.1, 0.2, 0.2])
    ids = ragged([[2, 2, 2], [], [], []], [weights, [], [], []])
    got = buffers.preprocess(layout("sqrtn"), [ids])["t0"]
    total = (weights[0] + weights[1]) + weights[2]
    a, b, c = weights * weights
    scale = np.float32(1) / np.sqrt((a + b) + c)
    assert got.gains[0] == total * scale
    # What the order decides is the last bit.
    a, b, c = weights * scale
    assert got.gains[0] != (a + b) + c


def test_the_second_table_of_a_stack_is_rotated_by_a_chip():
    # Of 4 shards, ids 0 of t0 are shard 0's, those of t1 shard 2's; t1's rows
    # follow t0's 32, of which each shard has 8.
    stack = layout(topology=(2, 2), tables=2)
    ids = [dense(0, 0, 0, 0)] * 2
    got = buffers.preprocess(stack, ids)["t0_t1"]
    assert got.row_pointers[:4].tolist() == [2, 8, 10, 16]
    assert got.sample_ids[[0, 1, 8, 9]].tolist() == [0, 1, 2, 3]
    assert got.token_ids[[0, 1, 8, 9]].tolist() == [0, 0, 8, 8]


def test_statistics_are_those_of_the_buffers():
    ids = [ragged([[5, 3, 3], [2, 5], [], [0, 1]])]
    counts = partitions.partition(layout(), ids, with_gains=False)["t0"]
    assert counts.ids.tolist() == [[1, 3], [1, 1]]
    assert counts.unique_ids.tolist() == [[1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"max_ids_per_table": {"t0": 1}},
            "Sparse core 1 gets 3 ids while the max ids per sparse core is set "
            "to be 1 for table t0",
        ),
        (
            {"max_unique_ids_per_table": {"t0": 1}},
            "Sparse core 1 gets 2 unique ids while the max unique ids per "
            "sparse core is set to be 1 for table t0",
        ),
        (
            {"max_ids_per_chip_per_sample": 2},
            "The max_ids_per_chip is set to be 8 which is not going to fit all "
            "ids. The remaining id count is 5",
        ),
        (
            {"max_ids_per_chip_per_sample": 1},
            "which is not divisible by the xla_pad_size 8",
        ),
    ],
)
def test_exceeded_limits_have_tensorflows_words(config, message):
    ids = [ragged([[5, 3], [2, 5], [], [0, 1]])]
    with pytest.raises(ValueError) as raised:
        buffers.preprocess(layout(**config), ids)
    assert message in str(raised.value)


def test_what_exceeds_the_capacity_is_dropped_if_allowed():
    stack = layout(max_ids_per_chip_per_sample=2, allow_id_dropping=True)
    got = buffers.preprocess(stack, [ragged([[5, 3], [2, 5], [], [0, 1]])])
    assert_buffers(got["t0"], [1, *[8] * 15], [1, *GAP], [1, *GAP], [0.5, *GAP])


def test_more_ids_than_one_integer_has_room_for_are_sorted_as_well():
    # Tables and places together take 33 bits beside the 32 of a col.
    rng = np.random.default_rng(0)
    tables, ids = 1 << 17, 1 << 17
    cols = rng.integers(0, 100, ids).astype(np.int32)
    rows = np.arange(ids, dtype=np.int32)
    got = partitions.sort(rows, cols, None, np.arange(tables), shards=2)
    order = np.lexsort((np.arange(ids), cols >> 1, np.arange(ids), cols & 1))
    np.testing.assert_array_equal(got.rows, order)


def test_threads_may_preprocess_at_once():
    stack = layout(tables=2, topology=(2, 2))
    rng = np.random.default_rng(0)
    steps = [[dense(*rng.integers(0, 16, 4))] * 2 for _ in range(50)]
    want = [buffers.preprocess(stack, ids) for ids in steps]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda ids: buffers.preprocess(stack, ids), steps))
    for g, w in zip(got, want, strict=True):
        for a, b in zip(g["t0_t1"], w["t0_t1"], strict=True):
            np.testing.assert_array_equal(a, b)
