"""The numpy host ops give what the tensorflow-tpu wheel's kernels give.

Bit for bit, errors included. Needs that wheel, but no TPU.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu.ops import gen_xla_ops

from tfrs_embed.sparsecore import Topology, buffers, compute_limits, coo
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.testing import host_ops, tensorflow_host

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
    """Weights with zeros, negatives and ties, None for ones, or a scalar."""
    kind = rng.integers(4)
    if kind == 0:
        return None
    if kind == 1:
        return np.float32(rng.choice([0.0, 1.0, 0.3]))
    if kind == 2:
        return rng.choice([-1, 0, 0.5, 1, 3], n).astype(np.float32)
    return rng.normal(0, rng.choice([1e-3, 1, 1e3]), n).astype(np.float32)


def random_ids(rng, samples, rows, spoil=False):
    """Dense, sparse or ragged ids, many equal; or unsorted ones."""
    kind = rng.choice(["dense", "sparse", "ragged", "empty"])
    if kind == "dense":
        lengths = None
        n = samples
        where = np.zeros(0, np.int32)
    else:
        lengths = rng.integers(0, rng.choice([2, 4, 9]), samples)
        if kind == "empty":
            lengths[:] = 0
        n = lengths.sum()
        if rng.random() < 0.5:
            where = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        else:
            sample = np.repeat(np.arange(samples), lengths)
            if spoil and n > 1:
                if rng.random() < 0.5:
                    rng.shuffle(sample)
                else:
                    sample[-1] = samples + rng.integers(3)
            where = np.stack([sample, np.zeros_like(sample)], 1)
            where = where.reshape(-1, 2).astype(np.int32)
    different = max(1, int(rows * rng.choice([0.05, 0.5, 1])))
    values = rng.integers(0, different, n).astype(np.int32)
    if lengths is not None and rng.random() < 0.5:
        # Runs of equal ids within samples, which conversion merges.
        values = np.repeat(values[::3], 3)[:n]
    return host_ops.Ids(where, values, random_weights(rng, n))


def kernel_weights(ids):
    if ids.weights is None:
        return np.ones(ids.values.size, np.float32)
    return ids.weights


def random_stack(rng, chips, cores):
    """Features of a stack: (samples, row_offset, col_offset, shift, ...)."""
    shards = chips * cores
    tables = []
    col_offset = 0
    for i in range(rng.integers(1, 4)):
        rows = 8 * shards * int(rng.integers(1, 5))
        tables.append((col_offset, i * cores % shards, rows))
        col_offset += rows
    features = []
    row_offset = 0
    for _ in range(rng.integers(1, 6)):
        samples = cores * int(rng.integers(1, 9))
        combiner = str(rng.choice(["sum", "mean", "sqrtn"]))
        table = tables[rng.integers(len(tables))]
        features.append((samples, row_offset, *table, combiner))
        row_offset += samples
    return features, row_offset, col_offset


def converted(rng, feature, chips, cores, stack_samples, spoil=False):
    """Converts random ids both ways, and compares."""
    samples, row_offset, col_offset, shift, rows, combiner = feature
    ids = random_ids(rng, samples, rows, spoil)
    attributes = dict(
        sample_count=samples,
        num_sc_per_chip=cores,
        row_offset=row_offset,
        col_offset=col_offset,
        col_shift=shift,
        num_sc_shards=chips * cores,
        stacked_table_sample_count=stack_samples,
        combiner=combiner,
    )
    want = outcome(
        gen_xla_ops.convert_to_list_of_sparse_core_coo_tensors,
        ids.indices_or_row_splits,
        ids.values,
        kernel_weights(ids),
        **attributes,
    )
    got = outcome(host_ops.convert_to_coo, *ids, **attributes)
    assert_same_bits(got, want)
    if isinstance(want, str):
        return None
    return want[:cores], want[cores : 2 * cores], want[2 * cores :]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(8))
def test_each_op_gives_the_kernels_bits(topology, seed):
    chips, cores = topology
    rng = np.random.default_rng([seed, chips, cores])
    for _ in range(40):
        features, samples, rows = random_stack(rng, chips, cores)
        coos = [converted(rng, f, chips, cores, samples) for f in features]
        tight = rng.random() < 0.3
        attributes = dict(
            sample_count_list=[f[0] // cores for f in features],
            col_offset_list=[f[2] for f in features],
            num_replica=chips,
            num_sc_per_chip=cores,
            table_name="a_b",
        )
        unused = dict(table_vocab_size=rows, feature_width=8)
        limits = dict(
            max_ids_per_sparse_core=int(rng.integers(1, 9)) if tight else 999,
            max_unique_ids_per_sparse_core=(
                int(rng.integers(1, 9)) if tight else 999
            ),
        )
        partitions = []
        for sc in range(cores):
            lists = [[c[part][sc] for c in coos] for part in range(3)]
            want = outcome(
                gen_xla_ops.sort_list_of_sparse_core_coo_tensors,
                *lists,
                **attributes,
                **unused,
                **limits,
            )
            got = outcome(host_ops.sort_coo, *lists, **attributes, **limits)
            assert_same_bits(got, want)
            partitions.append(want)
            want = outcome(
                gen_xla_ops.get_stats_from_list_of_sparse_core_coo_tensors,
                *lists,
                **attributes,
                **unused,
            )
            got = outcome(
                host_ops.coo_stats,
                *lists,
                col_offset_list=attributes["col_offset_list"],
                num_replica=chips,
                num_sc_per_chip=cores,
            )
            assert_same_bits(got, want)
        if any(isinstance(p, str) for p in partitions):
            continue
        lists = [[p[part] for p in partitions] for part in range(4)]
        attributes = dict(
            sample_count_per_sc=samples // cores,
            num_replica=chips,
            max_minibatches_per_sc=int(rng.choice([1, 64])),
            max_ids_per_chip_per_sample=int(rng.choice([1, 2, 8, 64])),
            allow_id_dropping=bool(rng.random() < 0.5),
        )
        want = outcome(
            gen_xla_ops.convert_to_sparse_core_csr_wrapped_coo_tensor,
            *lists,
            splits=np.int64(0),
            table_name="a_b",
            **attributes,
            **unused,
        )
        got = outcome(host_ops.wrap_coo, *lists, **attributes)
        assert_same_buffers(got, want)


def assert_same_buffers(got, want):
    """Compares buffers up to their unpadded sizes; beyond it TF has garbage."""
    if isinstance(want, str) or isinstance(got, str):
        assert_same_bits(got, want)
        return
    assert [g.shape for g in got] == [w.shape for w in want]
    pointers, ids = int(want[4]), int(want[5])
    sizes = [pointers, ids, ids, ids]
    assert_same_bits(
        [g[:n] for g, n in zip(got[:4], sizes, strict=True)] + got[4:],
        [w[:n] for w, n in zip(want[:4], sizes, strict=True)] + want[4:],
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bad_indices_are_refused_by_both(topology):
    chips, cores = topology
    rng = np.random.default_rng(chips * cores)
    refused = 0
    for _ in range(100):
        feature = (cores * 3, 0, 0, 0, 64, "mean")
        refused += (
            converted(rng, feature, chips, cores, cores * 3, spoil=True) is None
        )
    assert refused > 10


@pytest.mark.parametrize(
    ("where", "values", "weights"),
    [
        (np.zeros(0, np.int32), [1, 2, 3], np.ones(3)),
        (np.zeros(0, np.int32), [[1, 2]], np.ones(2)),
        (np.zeros(0, np.int32), [1, 2], np.ones(3)),
        (np.zeros(0, np.int32), [1, 2], np.ones((2, 1))),
        (np.array([0, 2]), [1, 2], np.ones(2)),
        (np.zeros((1, 2, 1)), [1, 2], np.ones(2)),
        (np.array([[1, 0], [0, 0]]), [1, 2], np.ones(2)),
        (np.array([[0, 0], [7, 0]]), [1, 2], np.ones(2)),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_both(where, values, weights):
    args = (
        np.asarray(where, np.int32),
        np.asarray(values, np.int32),
        np.asarray(weights, np.float32),
    )
    attributes = dict(
        sample_count=2,
        num_sc_per_chip=2,
        row_offset=0,
        col_offset=0,
        col_shift=0,
        num_sc_shards=2,
        stacked_table_sample_count=2,
        combiner="sum",
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        gen_xla_ops.convert_to_list_of_sparse_core_coo_tensors(
            *args, **attributes
        )
    with pytest.raises(ValueError):
        host_ops.convert_to_coo(*args, **attributes)


@pytest.mark.parametrize("width", [1, 3])
def test_sparse_ids_that_are_no_matrix_are_refused(width):
    # The kernel would read the first column alone.
    with pytest.raises(ValueError, match=r"need the shape \[2, 2\]"):
        coo.convert(
            host_ops.Ids(np.zeros((2, width), np.int32), np.ones(2, np.int32)),
            sample_count=2,
            num_sc=2,
            row_offset=0,
            col_offset=0,
            col_shift=0,
            shards=2,
            combiner="sum",
        )


def test_ids_outside_the_table_wrap_around_as_in_the_kernels():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
        values[rng.random(64) < 0.3] = rng.choice([-1, 0, 2**31 - 1])
        where = np.zeros(0, np.int32)
        weights = rng.normal(size=64).astype(np.float32)
        attributes = dict(
            sample_count=64,
            num_sc_per_chip=2,
            row_offset=0,
            col_offset=int(rng.integers(0, 2**20)) * 64,
            col_shift=2,
            num_sc_shards=8,
            stacked_table_sample_count=64,
            combiner="sum",
        )
        inputs = where, values, weights
        want = outcome(
            gen_xla_ops.convert_to_list_of_sparse_core_coo_tensors,
            *inputs,
            **attributes,
        )
        got = outcome(host_ops.convert_to_coo, *inputs, **attributes)
        assert_same_bits(got, want)
        attributes = dict(
            sample_count_list=[32],
            col_offset_list=[0],
            num_replica=4,
            num_sc_per_chip=2,
            max_ids_per_sparse_core=999,
            max_unique_ids_per_sparse_core=999,
            table_name="t",
        )
        lists = [[got[i]] for i in (0, 2, 4)]
        want = outcome(
            gen_xla_ops.sort_list_of_sparse_core_coo_tensors,
            *lists,
            **attributes,
            table_vocab_size=64,
            feature_width=8,
        )
        got = outcome(host_ops.sort_coo, *lists, **attributes)
        assert_same_bits(got, want)


def kernel_buffers(layout, inputs, weights):
    return cut(tensorflow_host.preprocess(layout, inputs, weights))


def numpy_buffers(layout, ids):
    return cut(buffers.preprocess(layout, ids))


def cut(stacks):
    """Buffers up to their unpadded sizes."""
    flat = []
    for chip in stacks.values():
        pointers, size = chip[4], chip[5]
        flat += [chip[0][:pointers], *[a[:size] for a in chip[1:4]], *chip[4:]]
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


def as_tensors(ids, samples):
    where, values, weights = ids
    weights = np.broadcast_to(kernel_weights(ids), values.shape)
    if where.ndim == 2:
        # Only rows matter to the kernels; layers refuse an index twice.
        columns = np.arange(len(where))
        indices = np.stack([where[:, 0], columns], 1).astype(np.int64)
        return tuple(
            tf.SparseTensor(indices, v, [samples, len(where)])
            for v in (values, weights)
        )
    if where.size:
        return tuple(
            tf.RaggedTensor.from_row_splits(v, where) for v in (values, weights)
        )
    return tf.constant(values), tf.constant(weights)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_whole_chips_give_the_kernels_bits(topology):
    rng = np.random.default_rng(topology)
    errors = 0
    for _ in range(40):
        configs = random_features(rng, topology[1])
        config = tpu.SparseCoreEmbeddingConfig(
            disable_table_stacking=bool(rng.random() < 0.3),
            max_ids_per_chip_per_sample=int(rng.choice([8, 16, 64])),
            allow_id_dropping=bool(rng.random() < 0.5),
        )
        layout = Layout(configs, tpu.SGD(), Topology.of(topology), config)
        if rng.random() < 0.5:
            limit = int(rng.integers(1, 12))
            config = dataclasses.replace(
                config, max_ids_per_table=dict.fromkeys(layout.stacks, limit)
            )
            layout = Layout(configs, tpu.SGD(), Topology.of(topology), config)
        ids = [
            random_ids(rng, f.samples, f.config.table.vocabulary_size)
            for f in layout.features
        ]
        tensors = [
            as_tensors(i, f.samples)
            for i, f in zip(ids, layout.features, strict=True)
        ]
        inputs, weights = zip(*tensors, strict=True)
        want = outcome(kernel_buffers, layout, inputs, weights)
        got = outcome(numpy_buffers, layout, ids)
        if isinstance(want, str):
            errors += 1
            assert_same_bits(got, want)
            continue
        assert len(want) == 7 * len(layout.stacks)
        assert_same_bits(got, want)
    assert 0 < errors < 40


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
                ids = random_ids(rng, samples, f.table.vocabulary_size)
                batch[name] = as_tensors(ids, samples)[0]
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
