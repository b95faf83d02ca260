"""A table's initial rows: in blocks, the same whoever keeps which of them."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import init_ops_v2

from keras_under_test import keras, only_keras_2
from process_tiers import on
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.configs.parsing import parse
from tfrs_embed.storage import initial_values

pytestmark = on("keras:3", tier="nightly")

initializers = keras.initializers

RANDOM = [
    initializers.RandomNormal,
    initializers.RandomUniform,
    initializers.TruncatedNormal,
    initializers.VarianceScaling,
    initializers.GlorotUniform,
    tf.random_normal_initializer,
    tf.random_uniform_initializer,
    init_ops_v2.TruncatedNormal,
    init_ops_v2.VarianceScaling,
    init_ops_v2.GlorotNormal,
]


def of_keras(kind):
    """Whether an initializer is Keras's; for `on`."""
    return kind in RANDOM[:5]


RANDOM_KINDS = pytest.mark.parametrize(
    "kind", RANDOM, ids=lambda k: f"{k.__module__.split('.')[0]}-{k.__name__}"
)


@pytest.fixture(autouse=True)
def blocks_of_three_rows(monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 12)


def spec(initializer, rows=10, dim=4):
    config = TableConfig("user", rows, dim, initializer)
    return parse({"id": FeatureConfig("id", config)}).tables[0]


def blocks(table):
    return [(i, b.numpy()) for i, b in initial_values.initial_blocks(table)]


def values(table):
    return np.concatenate([b for _, b in blocks(table)])


def digest():
    tables = [spec(kind(seed=2**40 + 1)) for kind in RANDOM]
    data = b"".join(values(table).tobytes() for table in tables)
    return hashlib.sha256(data).hexdigest()


# Blocks.


@on(
    "keras:3",
    tier="more",
    when=lambda initializer: isinstance(initializer, initializers.RandomNormal),
)
@pytest.mark.parametrize(
    "rows, dim, sizes",
    [
        (3, 4, [3]),
        (4, 4, [3, 1]),
        (9, 4, [3, 3, 3]),
        (10, 4, [3, 3, 3, 1]),
        (5, 5, [2, 2, 1]),
        (2, 13, [1, 1]),
    ],
)
@pytest.mark.parametrize(
    "initializer",
    [initializers.RandomNormal(), tf.random_normal_initializer(), tf.ones],
    ids=["keras", "tf", "function"],
)
def test_blocks_cover_the_table_in_order(initializer, rows, dim, sizes):
    found = blocks(spec(initializer, rows, dim))
    assert [b.shape for _, b in found] == [(n, dim) for n in sizes]
    assert [i for i, _ in found] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert all(b.dtype == np.float32 for _, b in found)


@on("keras:3", tier="more", when=of_keras)
@RANDOM_KINDS
def test_a_table_of_one_block_has_what_its_initializer_returns(kind):
    expected = kind(seed=1)((3, 4), tf.float32)
    np.testing.assert_array_equal(values(spec(kind(seed=1), 3)), expected)


# Random initializers.


@on("keras:3", tier="more", when=of_keras)
@RANDOM_KINDS
@pytest.mark.parametrize("seed", [None, 0, 7])
def test_blocks_differ(kind, seed):
    found = values(spec(kind(seed=seed), rows=30))
    # Float32 numbers may meet by chance; blocks that repeat would halve them.
    assert len(np.unique(found)) > 0.9 * found.size


@on("keras:3", tier="more", when=of_keras)
@RANDOM_KINDS
def test_a_seed_decides_the_values(kind):
    first, again, other = (values(spec(kind(seed=s))) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.isin(first, other).mean() < 0.1


@on("keras:3", tier="more", when=of_keras)
@RANDOM_KINDS
def test_tables_without_a_seed_start_different(kind):
    shared = kind()
    first, second = values(spec(shared)), values(spec(shared))
    assert np.isin(first, second).mean() < 0.1


@pytest.mark.more
def test_values_do_not_depend_on_the_process():
    # Nor on Python's hashes, which the seeds of blocks are made of.
    code = (
        "import test_initial_values as test;"
        "test.initial_values.BLOCK_ELEMENTS = 12;"
        "print(test.digest())"
    )
    path = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == digest()


@on("keras:3", tier="more", when=of_keras)
@RANDOM_KINDS
@pytest.mark.parametrize("replicas", [2, 3])
def test_values_do_not_depend_on_who_keeps_which_rows(kind, replicas):
    whole = values(spec(kind(seed=1)))
    for replica in range(replicas):
        mine = [
            rows[(replica - first) % replicas :: replicas].numpy()
            for first, rows in initial_values.initial_blocks(spec(kind(seed=1)))
        ]
        np.testing.assert_array_equal(
            np.concatenate(mine), whole[replica::replicas]
        )


@on("keras:3", tier="more")
@only_keras_2("its initializers know of no partitions")
@pytest.mark.parametrize("kind", RANDOM[:2])
def test_blocks_are_what_keras_gives_for_their_partition(kind):
    for first, rows in blocks(spec(kind(seed=1))):
        expected = kind(seed=1)(
            rows.shape, partition_shape=rows.shape, partition_offset=(first, 0)
        )
        np.testing.assert_array_equal(rows, expected)


@on("keras:3", tier="more", when=lambda module: module is initializers)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    "distribution", ["uniform", "truncated_normal", "untruncated_normal"]
)
@pytest.mark.parametrize(
    "mode, fan", [("fan_in", 4097), ("fan_out", 8), ("fan_avg", 4105 / 2)]
)
@pytest.mark.parametrize(
    "module", [initializers, init_ops_v2], ids=["keras", "tf"]
)
def test_variance_scaling_takes_its_fans_from_the_whole_table(
    module, mode, fan, distribution, seed, monkeypatch
):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 1024 * 8)
    initializer = module.VarianceScaling(2.0, mode, distribution, seed)
    found = blocks(spec(initializer, 4097, 8))
    for _, block in found[:-1]:
        np.testing.assert_allclose(block.std(), (2 / fan) ** 0.5, rtol=0.05)
        assert abs(block.mean()) < 0.08 * block.std()
    (_, last) = found[-1]  # A single row.
    assert np.abs(last).max() < 6 * (2 / fan) ** 0.5


@pytest.mark.parametrize(
    "initializer, mean, std",
    [
        (initializers.RandomNormal(1.0, 2.0, seed=1), 1, 2),
        (tf.random_normal_initializer(1.0, 2.0, seed=1), 1, 2),
        (initializers.RandomUniform(0.0, 2.0, seed=1), 1, 3**-0.5),
        (tf.random_uniform_initializer(0.0, 2.0, seed=1), 1, 3**-0.5),
        (init_ops_v2.TruncatedNormal(1.0, 2.0, seed=1), 1, 2 * 0.8796),
    ],
)
def test_blocks_have_the_initializers_distribution(
    initializer, mean, std, monkeypatch
):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 1000 * 8)
    for _, block in blocks(spec(initializer, 3000, 8)):
        np.testing.assert_allclose(block.mean(), mean, atol=0.08)
        np.testing.assert_allclose(block.std(), std, rtol=0.05)


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.TruncatedNormal(1.0, 2.0, seed=1),
        init_ops_v2.TruncatedNormal(1.0, 2.0),
        initializers.VarianceScaling(mode="fan_out", seed=1),
        init_ops_v2.VarianceScaling(mode="fan_out"),
    ],
)
def test_truncated_numbers_are_spread_as_in_one_call(initializer, monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 1000 * 8)
    shares = np.linspace(0, 1, 21)
    expected = np.quantile(initializer((30_000, 8), tf.float32), shares)
    found = np.quantile(values(spec(initializer, 30_000, 8)), shares)
    width = expected[-1] - expected[0]
    np.testing.assert_allclose(found, expected, atol=0.005 * width)


def test_the_global_seed_decides_the_values_of_tfs_default():
    def draw():
        tf.random.set_seed(3)
        config = tf.tpu.experimental.embedding.TableConfig(10, 4, name="t")
        return values(spec(config.initializer))

    np.testing.assert_array_equal(draw(), draw())


# Other initializers.

ARRAY = np.arange(40, dtype=np.float32).reshape(10, 4)


@pytest.mark.parametrize(
    "initializer, expected",
    [
        (initializers.Zeros(), np.zeros((10, 4))),
        (tf.ones_initializer(), np.ones((10, 4))),
        (initializers.Constant(3), np.full((10, 4), 3)),
        (tf.constant_initializer(3), np.full((10, 4), 3)),
        (initializers.Constant(ARRAY), ARRAY),
        (tf.constant_initializer(ARRAY), ARRAY),
        (tf.constant_initializer(ARRAY, support_partition=True), ARRAY),
        (initializers.Identity(), np.eye(10, 4)),
        (lambda shape: ARRAY, ARRAY),
    ],
)
def test_constants_are_as_in_one_call(initializer, expected):
    np.testing.assert_array_equal(values(spec(initializer)), expected)


def test_an_initializer_that_refuses_partitions_is_called_for_the_table():
    found = values(spec(initializers.Orthogonal(seed=1)))
    # A GPU's last bits are not those of the host, which fills tables.
    np.testing.assert_allclose(
        found, initializers.Orthogonal(seed=1)((10, 4)), rtol=1e-5
    )


class Own(initializers.RandomNormal):
    """Ignores what it is asked for, as the example in Keras's docs does."""

    def __call__(self, shape, dtype=None, **kwargs):
        return record(shape, dtype, **kwargs)


CALLS = []


def record(shape, dtype=None, **kwargs):
    CALLS.append((shape, dtype, kwargs))
    return ARRAY


@pytest.mark.parametrize(
    "initializer, dtype",
    [(record, tf.float32), (Own(), tf.float32), (lambda s: record(s), None)],
    ids=["function", "subclass", "shape_alone"],
)
def test_any_other_initializer_is_called_once_for_the_table(initializer, dtype):
    CALLS.clear()
    found = list(initial_values.initial_blocks(spec(initializer)))
    assert [((10, 4), dtype, {})] == CALLS
    np.testing.assert_array_equal(tf.concat([b for _, b in found], 0), ARRAY)
    assert all("CPU:0" in rows.device for _, rows in found)


def test_a_function_with_partition_parameters_is_called_for_each_block():
    def initializer(shape, dtype, partition_shape, partition_offset):
        assert (shape, dtype) == ((10, 4), tf.float32)
        assert partition_offset[1] == 0
        return ARRAY[partition_offset[0] :][: partition_shape[0]]

    def of_a_shape(shape, partition_shape=None, partition_offset=None):
        return initializer(shape, tf.float32, partition_shape, partition_offset)

    for function in (initializer, of_a_shape):
        np.testing.assert_array_equal(values(spec(function)), ARRAY)


# Mistakes.


@pytest.mark.parametrize("rows", [3, 10], ids=["one_block", "blocks"])
@pytest.mark.parametrize(
    "initializer, found",
    [
        (lambda s: tf.zeros(s[::-1]), r"float32 of shape \(4, "),
        (lambda s: tf.zeros(s[:1]), r"float32 of shape \(\d+,\)"),
        (lambda s: tf.zeros(s, tf.float64), r"float64 of shape"),
        (lambda s, dtype: np.zeros(s, np.int32), r"int32 of shape"),
    ],
    ids=["transposed", "rank", "float64", "int32"],
)
def test_a_wrong_shape_or_dtype_is_an_error_that_names_the_table(
    initializer, found, rows
):
    message = rf"'user'.* returned {found}.*not float32 of shape \({rows}, 4\)"
    with pytest.raises(ValueError, match=message):
        blocks(spec(initializer, rows))


@pytest.mark.parametrize("rows", [2, 10])
@pytest.mark.parametrize(
    ("dtype", "most", "more", "limit"),
    [
        ("float16", 65519.0, 65520.0, "65504"),
        ("bfloat16", 3.39e38, 3.4e38, r"3.38953e\+38"),
    ],
)
def test_a_number_that_becomes_infinite_is_an_error(
    dtype, most, more, limit, rows
):
    def rows_of(initializer):
        config = TableConfig("user", rows, 4, initializer, dtype=dtype)
        features = {"id": FeatureConfig("id", config)}
        return values(parse(features).tables[0])

    def initializer_with(last):
        found = np.zeros((rows, 4), "f")
        found[0] = np.inf, np.nan, -most, most
        found[-1, 2] = last
        return lambda shape, dtype=None: tf.constant(found)

    assert np.isfinite(rows_of(initializer_with(-most))[-1]).all()
    message = (
        rf"^Table 'user': its initializer returned -.* for row {rows - 1}, "
        rf"beyond {dtype}'s largest number, {limit}\.$"
    )
    with pytest.raises(ValueError, match=message):
        rows_of(initializer_with(-more))


def test_a_wrong_block_is_an_error_that_names_the_table_and_rows():
    def initializer(shape, dtype, partition_shape, partition_offset):
        whole = tf.zeros(shape, dtype)
        return whole if partition_offset[0] else whole[:3]

    with pytest.raises(
        ValueError, match=r"'user'.*\(10, 4\), not .*\(3, 4\), .*rows 3 to 5"
    ):
        blocks(spec(initializer))
