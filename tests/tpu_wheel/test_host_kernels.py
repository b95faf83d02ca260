"""The host's work in numpy gives what the tensorflow-tpu wheel's kernels give.

Bit for bit, errors included. Needs that wheel, but no TPU.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tensorflow_host
from process_tiers import nightly
from tfrs_embed.sparsecore import Topology, compute_limits
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.tools.testing import emulated_host

tpu = tf.tpu.experimental.embedding
TOPOLOGIES = [(chips, cores) for chips in (1, 2, 4) for cores in (2, 4)]


if not has_kernels():
    pytest.skip(
        "needs the kernels of the tensorflow-tpu wheel", allow_module_level=True
    )


def outcome(call, *args, **kwargs):
    """Returns a call's results as arrays, or its error's text."""
    try:
        flat = tf.nest.flatten(call(*args, **kwargs))
    except tf.errors.InvalidArgumentError as error:
        return error.message.split("{{function_node")[-1].partition("}} ")[2]
    except ValueError as error:
        return str(error)
    return [np.asarray(x) for x in flat]


def assert_same_bits(got, want):
    if isinstance(want, str) or isinstance(got, str):
        assert isinstance(got, str), f"no error, but the kernel's {want!r}"
        assert isinstance(want, str), f"error {got!r}, but none of the kernel"
        assert got.strip() in want
        return
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_array_equal(g.view(np.int32), w.view(np.int32))


def random_weights(rng, n):
    """Weights with zeros, negatives and ties, or None for ones."""
    kind = rng.integers(4)
    if kind == 0:
        return None
    if kind == 1:
        return np.full(n, rng.choice([0.0, 1.0, 0.3]), np.float32)
    if kind == 2:
        return rng.choice([-1, 0, 0.5, 1, 3], n).astype(np.float32)
    return rng.normal(0, rng.choice([1e-3, 1, 1e3]), n).astype(np.float32)


def random_ids(rng, samples, rows, spoil=False):
    """Dense, sparse or ragged ids, many equal, and their weights or None.

    Those to spoil are sparse, and most of them unsorted or of no sample.
    """
    kind = "sparse" if spoil else rng.choice(["dense", "rows", "none"])
    different = max(1, int(rows * rng.choice([0.05, 0.5, 1])))
    if kind == "dense":
        values = rng.integers(0, different, samples).astype(np.int32)
        weights = random_weights(rng, samples)
        return [
            None if v is None else tf.constant(v) for v in (values, weights)
        ]
    lengths = rng.integers(0, rng.choice([2, 4, 9]), samples)
    if kind == "none":
        lengths[:] = 0
    n = lengths.sum()
    values = rng.integers(0, different, n).astype(np.int32)
    if rng.random() < 0.5:
        # Runs of equal ids within samples, which conversion merges.
        values = np.repeat(values[::3], 3)[:n]
    weights = random_weights(rng, n)
    if not spoil and rng.random() < 0.5:
        return [
            None if v is None else tf.RaggedTensor.from_row_lengths(v, lengths)
            for v in (values, weights)
        ]
    sample = np.repeat(np.arange(samples), lengths)
    if spoil and n > 1:
        if rng.random() < 0.5:
            rng.shuffle(sample)
        else:
            sample[-1] = samples + rng.integers(3)
    # Only rows matter to the kernels; layers refuse an index twice.
    indices = np.stack([sample, np.arange(n)], 1).astype(np.int64)
    return [
        None if v is None else tf.SparseTensor(indices, v, [samples, max(n, 1)])
        for v in (values, weights)
    ]


def kernel_buffers(layout, inputs, weights):
    return cut(tensorflow_host.preprocess(layout, inputs, weights))


def numpy_buffers(layout, inputs, weights):
    return cut(emulated_host.fill(layout, inputs, weights))


def cut(filled):
    """Stacks' buffers up to their unpadded sizes; beyond TF has garbage."""
    flat = []
    for csr, pointers, size in filled.values():
        flat += [csr.row_pointers[: int(pointers)]]
        flat += [buffer[: int(size)] for buffer in csr[1:4]]
        flat += [pointers, size, csr.num_minibatches_per_physical_sparse_core]
    return flat


def random_features(rng, cores):
    """Tables of two widths, so that there are several stacks."""
    tables = [
        tpu.TableConfig(
            int(rng.integers(1, 200)),
            int(rng.choice([5, 8, 16])),
            combiner=str(rng.choice(["sum", "mean", "sqrtn"])),
            name=f"t{i}",
        )
        for i in range(rng.integers(1, 6))
    ]
    return [
        tpu.FeatureConfig(
            tables[i] if i < len(tables) else tables[rng.integers(len(tables))],
            output_shape=[cores * int(rng.integers(1, 9))],
        )
        for i in range(len(tables) + rng.integers(0, 4))
    ]


@nightly(lambda seed: seed > 0)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(4))
def test_whole_chips_give_the_kernels_bits(topology, seed):
    rng = np.random.default_rng([seed, *topology])
    errors = 0
    for _ in range(40):
        configs = random_features(rng, topology[1])
        config = tpu.SparseCoreEmbeddingConfig(
            disable_table_stacking=bool(rng.random() < 0.3),
            max_ids_per_chip_per_sample=int(rng.choice([1, 2, 8, 16, 64])),
            allow_id_dropping=bool(rng.random() < 0.5),
        )
        layout = Layout(configs, Topology.of(topology), config)
        if rng.random() < 0.5:
            limit = int(rng.integers(1, 12))
            field = rng.choice(
                ["max_ids_per_table", "max_unique_ids_per_table"]
            )
            config = dataclasses.replace(
                config, **{field: dict.fromkeys(layout.stacks, limit)}
            )
            layout = Layout(configs, Topology.of(topology), config)
        given = [
            random_ids(rng, f.samples, f.config.table.vocabulary_size)
            for f in layout.features
        ]
        inputs, weights = zip(*given, strict=True)
        want = outcome(kernel_buffers, layout, inputs, weights)
        got = outcome(numpy_buffers, layout, inputs, weights)
        if isinstance(want, str):
            errors += 1
            assert_same_bits(got, want)
            continue
        assert len(want) == 7 * len(layout.stacks)
        assert_same_bits(got, want)
    assert 0 < errors < 40


def one_feature(samples, cores, **table):
    table = tpu.TableConfig(64, 8, name="t", **table)
    feature = tpu.FeatureConfig(table, output_shape=[samples])
    limits = {"t": 10_000}
    config = tpu.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits, max_unique_ids_per_table=limits
    )
    return Layout([feature], Topology.of((2, cores)), config)


@pytest.mark.parametrize("cores", [2, 4])
def test_bad_indices_are_refused_by_both(cores):
    layout = one_feature(cores * 3, cores)
    rng = np.random.default_rng(cores)
    refused = 0
    for _ in range(100):
        ids, weights = random_ids(rng, cores * 3, 64, spoil=True)
        want = outcome(kernel_buffers, layout, [ids], [weights])
        got = outcome(numpy_buffers, layout, [ids], [weights])
        if isinstance(want, str):
            assert isinstance(got, str)
            refused += 1
        else:
            assert_same_bits(got, want)
    assert refused > 10


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (tf.constant([1, 2, 3]), None),
        (tf.constant([1, 2]), tf.ones([3])),
        (tf.ragged.constant([[1, 2]]), None),
        (tf.ragged.constant([[1], [2]]), tf.ones([2])),
        (tf.ragged.constant([[1], [2]]), tf.ragged.constant([[1.0], []])),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_both(ids, weights):
    layout = one_feature(2, 2)
    errors = (tf.errors.InvalidArgumentError, ValueError, TypeError)
    for preprocess in (kernel_buffers, numpy_buffers):
        with pytest.raises(errors):
            preprocess(layout, [ids], [weights])


def test_ids_outside_the_table_wrap_around_as_in_the_kernels():
    layout = one_feature(64, 4, combiner="sum")
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
        values[rng.random(64) < 0.3] = rng.choice([-1, 0, 2**31 - 1])
        inputs = [tf.constant(values)], [tf.constant(rng.normal(size=64))]
        want = outcome(kernel_buffers, layout, *inputs)
        assert not isinstance(want, str)
        assert_same_bits(outcome(numpy_buffers, layout, *inputs), want)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_limits_are_the_most_of_tensorflows_own(topology):
    rng = np.random.default_rng(topology)
    for _ in range(8):
        # TensorFlow's statistics fail where features share a table.
        config = {f.table.name: f for f in random_features(rng, topology[1])}
        batches = []
        most = [{}, {}]
        for _ in range(4):
            batch = {}
            for name, f in config.items():
                samples = f.output_shape[0]
                ids, _ = random_ids(rng, samples, f.table.vocabulary_size)
                batch[name] = ids
            batches.append(batch)
            stats = tpu.TPUEmbeddingV2.compute_sparse_core_stats(
                batch, config, *topology
            )
            for most_of, of_batch in zip(most, stats, strict=True):
                for stack, value in of_batch.items():
                    most_of[stack] = max(most_of.get(stack, 1), int(value))
        got, _ = compute_limits(batches, config, topology, progress=False)
        assert got.max_ids_per_table == most[0]
        assert got.max_unique_ids_per_table == most[1]
