"""`tpu_check` without TensorFlow's wheel for TPUs, and the names of slices."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfrs_embed import __main__ as command
from tfrs_embed import tpu_check
from tfrs_embed.sparsecore import Topology
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.tools.tpu_check.offline import OfflineResolver
from tfrs_embed.tools.tpu_check.rewriting import with_plain_booleans

pytestmark = pytest.mark.tools

Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


@pytest.mark.parametrize(
    ("name", "shape", "replicas", "sparse_cores", "hardware"),
    [
        ("v5p:2x2x1", "v5p:2x2x1", 4, 4, Hardware.V2),
        ("v5p-2", "v5p:1x1x1", 1, 4, Hardware.V2),
        ("v5p-8", "v5p:2x2x1", 4, 4, Hardware.V2),
        ("v5p-16", "v5p:2x2x2", 8, 4, Hardware.V2),
        ("v5p-32", "v5p:2x2x4", 16, 4, Hardware.V2),
        ("v5p-64", "v5p:2x4x4", 32, 4, Hardware.V2),
        ("v5p-128", "v5p:4x4x4", 64, 4, Hardware.V2),
        ("v6e-1", "v6e:1x1", 1, 2, Hardware.V2),
        ("v6e-4", "v6e:2x2", 4, 2, Hardware.V2),
        ("v6e-8", "v6e:2x4", 8, 2, Hardware.V2),
        ("v5litepod-16", "v5e:4x4", 16, 0, Hardware.UNSUPPORTED),
        ("v4-8", "v4:2x2x1", 4, 0, Hardware.V1),
        # Each of a chip's cores is a replica.
        ("v3-8", "v3:2x2", 8, 0, Hardware.V1),
        ("v2-32", "v2:4x4", 32, 0, Hardware.V1),
    ],
)
def test_slices(name, shape, replicas, sparse_cores, hardware):
    found = tpu_check.Slice.of(name)
    assert found.name == shape
    assert found == tpu_check.Slice.of(shape) == tpu_check.Slice.of(found)
    assert found.replicas == replicas
    assert found.sparse_cores == sparse_cores
    assert found.embedding_feature is hardware


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v5p-8", 1),
        ("v5p:2x2x2", 2),
        ("v6e-8", 1),
        ("v6e-16", 4),
        ("v5litepod-16", 4),
        ("v3-8", 1),
        ("v3-32", 4),
    ],
)
def test_the_hosts_of_a_slice(name, hosts):
    assert tpu_check.Slice.of(name).hosts == hosts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "Unknown TPU slice 'v9:2x2'"),
        ("v5p", "Unknown TPU slice 'v5p'"),
        ("v5p:", "Unknown TPU slice"),
        ("v5p:2x2", "torus of 3 dimensions, not 2"),
        ("v6e:2x2x1", "torus of 2 dimensions, not 3"),
        ("v6e:3x2", "has 6 chips; only powers of two"),
        ("v6e:0x2", "has 0 chips; only powers of two"),
        ("v5p-7", "7 is no multiple of that"),
        ("v5p-0", "0 is no multiple of that"),
        ("v6e-6", "only powers of two"),
    ],
)
def test_slices_that_are_not_there(name, message):
    with pytest.raises(ValueError, match=message):
        tpu_check.Slice.of(name)


def test_a_topology_is_a_slice_with_sparse_cores():
    topology = Topology.of("v5p:2x2x1")
    assert (topology.chips, topology.sparse_cores) == (4, 4)
    assert topology.name == "v5p:2x2x1"
    assert Topology.of("v6e-8").shards == 16
    with pytest.raises(ValueError, match="v5e has no SparseCores"):
        Topology.of("v5litepod-4")
    with pytest.raises(ValueError, match="Unknown TPU slice 'v9-8'"):
        Topology.of("v9-8")


def test_a_slice_is_a_name():
    with pytest.raises(TypeError, match="A slice is a name"):
        tpu_check.Slice.of((4, 4))


@pytest.mark.skipif(has_kernels(), reason="TensorFlow's wheel for TPUs is here")
def test_the_wrong_wheel_is_an_error_that_names_the_right_one(tmp_path, capsys):
    with pytest.raises(
        tpu_check.CheckError, match=r"pip install .*tensorflow-tpu==2\.20\.0"
    ):
        tpu_check.check(lambda strategy: None, "v5p-8")
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('It was run.')")
    arguments = ["tpu-check", str(path), "--topology", "v5p-8"]
    assert command.main(arguments) == 1
    assert "tensorflow-tpu==2.20.0" in capsys.readouterr().err


def test_booleans_are_written_in_words():
    values = np.arange(3 * 7).reshape(3, 7) % 3 == 0
    packed = np.packbits(values, bitorder="little").tobytes().hex().upper()
    other = 'dense<"0x00FF"> : tensor<2xi8>'
    text = with_plain_booleans(f'dense<"0x{packed}"> : tensor<3x7xi1>, {other}')
    words, kept = text.split(" : tensor<3x7xi1>, ")
    assert kept == other
    assert json.loads(words.removeprefix("dense<")[:-1]) == values.tolist()


def test_the_resolver_is_as_that_of_local_tpus():
    # Of which TF-models' trainer makes a PreemptionCheckpointHandler.
    resolver = OfflineResolver(tpu_check.Slice.of("v5p-8"))
    assert resolver.cluster_spec().as_dict() == {}
