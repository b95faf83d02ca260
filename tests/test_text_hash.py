"""The kernel that hashes ids gives the rows of TensorFlow's operations."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from tfrs_embed import kernels
from tfrs_embed.ops import backend
from training_helpers import operations_run

pytestmark = pytest.mark.usefixtures("needs_kernels")

#: FarmHash, SipHash, and rows by several SipHashes at once.
SALTS = [[None], [(0, 0)], [(7, 7), (3, 2**63 - 1), (2**62, 1)]]


def require_equal(ids, salts, buckets=1000):
    ids = tf.constant(ids)
    found = backend.operations(None, True).hash_ids(ids, buckets, salts)
    with kernels.disabled():
        expected = backend.operations(None, True).hash_ids(ids, buckets, salts)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("salts", SALTS)
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_integers(kind, bits, salts):
    limits = np.iinfo(f"{kind}{bits}")
    edges = {
        sign * 10**k + d
        for k in range(20)
        for d in (-1, 0, 1)
        for sign in (-1, 1)
    }
    edges |= {limits.min, limits.min + 1, limits.max - 1, limits.max}
    edges = [n for n in edges if limits.min <= n <= limits.max]
    rng = np.random.default_rng(bits)
    numbers = rng.integers(limits.min, limits.max, 3000, limits.dtype, True)
    numbers >>= rng.integers(0, bits, numbers.shape, limits.dtype)
    ids = np.concatenate([np.array(edges, limits.dtype), numbers])
    for buckets in (1, 1000, 2**63 - 1):
        require_equal(ids, salts, buckets)


@pytest.mark.parametrize("salts", SALTS)
def test_strings_of_any_bytes(salts):
    rng = np.random.default_rng(0)
    texts = [rng.bytes(size) for size in range(301) for _ in range(3)]
    require_equal([*texts, b"\0" * 9, "日本", "", "-1", "7"], salts)


@pytest.mark.parametrize("ids", [5, "a", np.zeros([3, 0], np.int32)])
def test_ids_of_any_shape(ids):
    require_equal(ids, SALTS[-1])


def test_many_ids_are_hashed_on_several_threads():
    numbers = np.arange(-(10**5), 10**5).reshape(100, -1)
    require_equal(numbers, SALTS[-1])
    require_equal(numbers.astype(str), [None])


@pytest.mark.parametrize("arguments", [{"salts": [1]}, {"N": 2, "salts": []}])
def test_salts_that_do_not_fit_are_errors(arguments):
    module = kernels.operations("CPU:0")
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows of an id"):
        module.tfrs_embed_hash(
            **{"ids": tf.constant([1]), "N": 1, "buckets": 5} | arguments
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ids", [[5, -3], ["a", ""]], ids=["int", "string"])
def test_graphs_hash_by_the_kernel(ids, training):
    table = tfrs_embed.TableConfig("t", 50, 4)
    feature = tfrs_embed.FeatureConfig("f", table, hashing=tfrs_embed.Hash())
    layer = tfrs_embed.PartialTPUEmbedding(feature, "sgd", size_threshold=0)
    ids = tf.constant(ids)
    expected = layer(ids)

    @tf.function
    def look_up():
        # Constant ids would be hashed before the graph runs.
        given = tf.raw_ops.PlaceholderWithDefault(input=ids, shape=ids.shape)
        return layer(given, training=training)

    used = operations_run(look_up)
    assert "TfrsEmbedHash" in used
    assert not {op for op in used if "AsString" in op or "ToHash" in op}
    np.testing.assert_array_equal(look_up(), expected)
