"""What a type checker says of the public API, and errors of misspelt names."""

import pathlib
import re

import pytest
import tensorflow as tf
import tf_keras

import public_names
import tfrs_embed
from tfrs_embed import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    Embedding,
    FeatureConfig,
    PartialTPUEmbedding,
    TableConfig,
    TPUEmbeddingV2,
)

TABLE = TableConfig("movies", 100, 4)
FEATURE = FeatureConfig("movie", TABLE)

# Lines that a type checker must complain about say of what.
CODE = """
import tensorflow as tf
import tf_keras
import tfrs_embed as te

adam = tf_keras.optimizers.Adam(0.1)
tpu = tf.tpu.experimental.embedding
table = te.TableConfig("t", 10, 4, optimizer=adam, combiner="sum")
te.TableConfig("t", 10, 4, combiner="max")  # error: arg-type
te.TableConfig("t", 10, 4, placement="gpu")  # error: arg-type
te.TableConfig("t", 10, 4, optimizer=3)  # error: arg-type
te.TableConfig("t", "10", 4)  # error: arg-type
te.TableConfig("t", 10, dim=4)  # error: call-arg
feature = te.FeatureConfig("f", table, max_sequence_length=3)
te.FeatureConfig("f", tpu.TableConfig(10, 4), output_shape=[None, 4])
te.FeatureConfig("f", "table")  # error: arg-type
te.PartialTPUEmbedding(feature, None, size_threshold=None, name="x")
te.PartialTPUEmbedding(feature, tpu.Adagrad(), dtype="float16", trainable=False)
te.PartialTPUEmbedding(feature, "adam", activity_regularizer="l2")
te.PartialTPUEmbedding(feature, 3)  # error: arg-type
te.PartialTPUEmbedding(feature, "nadam")  # error: arg-type
te.PartialTPUEmbedding(feature, adam, size_treshold=3)  # error: call-arg
te.PartialTPUEmbedding(feature, adam, name=3)  # error: arg-type
te.PartialTPUEmbedding(feature, adam, invalid_ids="no")  # error: arg-type
layer = te.DistributedEmbedding(feature, optimizer=adam)
te.DistributedEmbedding(feature, optimizer=3)  # error: arg-type
te.DistributedEmbedding(feature, update_stat=True)  # error: call-arg
layer({"f": [1]}, weights={"f": [1.0]}, training=True, partial=True)
layer({"f": [1]}, weigths=None)  # error: call-arg
layer({"f": [1]}, training="yes")  # error: arg-type
te.Embedding(10, 4, combiner="mean", dtype=tf.float16)([[1]])
te.Embedding(10, 4, combiner="max")  # error: arg-type
te.Embedding(10, 4, mask_zeros=True)  # error: call-arg
te.embedding_lookup(tf.zeros([3, 2]), [[1]], "max")  # error: arg-type
te.All2AllDenseEmbedding(10, 4, 1, 1, optimizer="sgd", name="a")([1])
te.All2AllDenseEmbedding(10, 4, 1, 1, optimiser="sgd")  # error: call-arg
name: te.types.Combiner = "mean"
optimizer: te.types.Optimizer = adam
te.PartialTPUEmbeding  # error: attr-defined
te.keras3.PartialTPUEmbeding  # error: attr-defined
te.optimizers.RowwiseAdagrad  # error: attr-defined
te.serving.exprt  # error: attr-defined
te.sparsecore.Topologie  # error: attr-defined
te.checkpoint.DeltaManger  # error: attr-defined
"""


@pytest.mark.more
def test_mypy_knows_what_arguments_may_be(tmp_path):
    api = pytest.importorskip("mypy.api")
    root = pathlib.Path(tfrs_embed.__file__).parents[1]
    snippet = tmp_path / "snippet.py"
    snippet.write_text(CODE)
    found, problems, _ = api.run(
        [
            "--config-file",
            str(root / "pyproject.toml"),
            "--follow-imports=silent",
            "--no-error-summary",
            str(snippet),
        ]
    )
    assert not problems
    errors = {
        (int(line), kind)
        for line, kind in re.findall(r"snippet\.py:(\d+): .*\[(.*)\]", found)
    }
    expected = {
        (number, line.partition("# error: ")[2])
        for number, line in enumerate(snippet.read_text().splitlines(), 1)
        if "# error: " in line
    }
    assert errors == expected, found


def test_public_names_and_signatures_are_those_of_the_list():
    listed = pathlib.Path(__file__).with_name("public_names.txt")
    # `python tests/public_names.py > tests/public_names.txt` writes it anew.
    assert list(public_names.lines()) == listed.read_text().splitlines()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda **k: TableConfig("t", 10, 4, **k), "combinr"),
        (lambda **k: FeatureConfig("f", TABLE, **k), "max_seq_length"),
        (
            lambda **k: PartialTPUEmbedding(FEATURE, "sgd", **k),
            "size_treshold",
        ),
        (lambda **k: DistributedEmbedding(FEATURE, **k), "table_staking"),
        (lambda **k: All2AllDenseEmbedding(9, 4, 1, 1, **k), "nnz"),
        (lambda **k: Embedding(9, 4, **k), "mask_zeros"),
        (lambda **k: TPUEmbeddingV2(FEATURE, **k), "topologie"),
        (
            lambda **k: PartialTPUEmbedding(FEATURE, "sgd")([1], **k),
            "weigths",
        ),
        (lambda **k: DistributedEmbedding(FEATURE)([1], **k), "partail"),
        (lambda **k: Embedding(9, 4)([1], **k), "weight"),
    ],
)
def test_a_misspelt_argument_is_an_error_that_names_it(make, name):
    with pytest.raises(TypeError, match=rf"argument.*'{name}'"):
        make(**{name: 3})


def test_layers_of_ones_own_have_arguments_of_their_own():
    class Own(PartialTPUEmbedding):
        def __init__(self, config, extra, **kwargs):
            super().__init__(config, "sgd", **kwargs)
            self.extra = extra

        def call(self, inputs, scale=1.0):
            return super().call(inputs) * scale

    layer = Own(FEATURE, extra=3, name="own", dtype="mixed_float16")
    assert layer(tf.constant([1]), scale=2.0).dtype == tf.float16
    assert isinstance(layer, tf_keras.layers.Layer)
    with pytest.raises(TypeError, match="'extr'"):
        Own(FEATURE, extra=3, extr=4)
