"""SparseCores are refused by name on TensorFlow 2.16, and nothing else is."""

import pytest
import tensorflow as tf
from tfrs_embed.testing import EmulatedTPUStrategy

import tfrs_embed
from tfrs_embed.compat.strategies import NO_SPARSE_CORES
from tfrs_embed.configs import serialization
from tfrs_embed.sparsecore import compute_limits
from tfrs_embed.sparsecore.host_kernels import require_kernels

tpu = tf.tpu.experimental.embedding


def feature():
    table = tpu.TableConfig(16, 8, optimizer=tpu.SGD(0.1), name="t")
    return tpu.FeatureConfig(table, output_shape=[4])


@pytest.fixture
def without_sparse_cores(monkeypatch):
    """What TensorFlow 2.16 lacks, taken from a newer one."""
    monkeypatch.delattr(tpu, "SparseCoreEmbeddingConfig", raising=False)


@pytest.mark.parametrize(
    "use",
    [
        lambda: tfrs_embed.TPUEmbeddingV2(feature(), topology=(1, 2)),
        lambda: EmulatedTPUStrategy((1, 2)),
        lambda: compute_limits([], feature(), (1, 2), progress=False),
        lambda: require_kernels(tf.distribute.get_strategy()),
        lambda: serialization.sparse_core_from_config(
            {"disable_table_stacking": True}
        ),
    ],
    ids=["class", "slice", "limits", "engine", "stored_config"],
)
def test_sparse_cores_are_refused_by_name(without_sparse_cores, use):
    with pytest.raises(RuntimeError) as caught:
        use()
    text = str(caught.value)
    assert text.startswith(NO_SPARSE_CORES)
    assert f"this is TensorFlow {tf.__version__}" in text


def test_layers_need_none_of_it(without_sparse_cores):
    layer = tfrs_embed.PartialTPUEmbedding(feature(), "sgd")
    assert layer(tf.constant([1, 2, 3, 4])).shape == (4, 8)
