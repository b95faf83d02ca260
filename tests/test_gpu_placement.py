"""What a GPU would run of training steps; docs/scaling.md has the table."""

import os
import pathlib

import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from gpu_placement import placement
from helpers import ON_GPU
from plans import on
from tfrs_embed import kernels

PAGE = pathlib.Path(__file__).parents[1] / "docs/scaling.md"
REPLICATED = bool(os.environ.get("TFRS_EMBED_TEST_STRATEGY"))
BATCH, DIM, ROWS = 64, 16, 100_000

#: By what the page calls them, the options of tables and of the layer: on one
#: device, and on two replicas.
ONE_DEVICE = {
    "one device": ({}, {}),
    "Adam, bfloat16": ({"dtype": "bfloat16"}, {"optimizer": "adam"}),
    "row-wise Adagrad": (
        {},
        {"optimizer": tfrs_embed.optimizers.RowWiseAdagrad(0.1)},
    ),
    "`DynamicKeys`": ({"keys": tfrs_embed.DynamicKeys()}, {}),
    "`placement=\"host\"`": ({"placement": "host"}, {}),
    "evaluation": ({}, {}),
}
REPLICAS = {
    "by row": ({"placement": "row"}, {}),
    "by row, hot rows": ({"placement": "row", "hot_rows": range(100)}, {}),
    "by column": ({"placement": "column"}, {}),
    "by table": ({"placement": "table"}, {}),
    "copies": ({"placement": "replicated"}, {}),
}
CASES = REPLICAS if REPLICATED else ONE_DEVICE
#: What finds keys, and makes their rows.
OF_KEYS = "TfrsEmbedKeyTables"


def make_layer(tables, options):
    features = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(f"of_{name}", ROWS, DIM, **tables),
            **kind,
        )
        for name, kind in {
            "dense": {},
            "ragged": {},
            "uncombined": {"combiner": None},
        }.items()
    }
    return tfrs_embed.PartialTPUEmbedding(
        features, size_threshold=0, **{"optimizer": "adagrad", **options}
    )


def trace(strategy, layer, training=True):
    """Returns a step of a model with the layer, as a concrete function."""
    with strategy.scope():
        dense = tf_keras.layers.Dense(1)
        optimizer = tf_keras.optimizers.SGD(0.1)

    def of_replica(ids):
        ragged = tf.RaggedTensor.from_tensor(ids)
        inputs = {"dense": ids[:, 0], "ragged": ragged, "uncombined": ragged}
        with tf.GradientTape() as tape:
            found = layer(inputs, training=training)
            history = tf.reduce_sum(found["uncombined"], 1)
            vectors = [found["dense"], found["ragged"], history]
            loss = tf.reduce_sum(dense(tf.concat(vectors, 1)) ** 2)
        if training:
            variables = layer.trainable_variables + dense.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step = tf.function(lambda ids: strategy.run(of_replica, (ids,)))
    return step.get_concrete_function(
        tf.random.uniform([BATCH, 5], maxval=ROWS, dtype=tf.int64)
    )


def line(name, found):
    """What the page's table says."""
    total = found.on_gpu + sum(map(len, found.on_host.values()))
    numbers = [total, total - found.on_gpu, len(found.down), len(found.up)]
    return "| " + " | ".join([name, *map(str, numbers)]) + " |"


@on("mirrored:2")
@pytest.mark.parametrize("name", CASES)
def test_steps(strategy, monkeypatch, name):
    tables, options = CASES[name]
    if ON_GPU:
        pytest.skip("it is about machines without a GPU")
    if "keys" in tables and not kernels.status().loaded:
        pytest.skip(str(kernels.status()))
    # As where there is a GPU: only keys have kernels, on the host.
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: ["GPU"])
    if REPLICATED:
        monkeypatch.setattr(kernels, "_disabled", True)
    with strategy.scope():
        layer = make_layer(tables, options)
    step = trace(strategy, layer, training=name != "evaluation")
    found = placement(step, pinned=not REPLICATED)
    if "keys" in tables:
        of_keys = [op for op in found.on_host if op.startswith(OF_KEYS)]
        assert sorted(op.removeprefix(OF_KEYS) for op in of_keys) == [
            *("Commit", "Plan", "Publish"),
        ]
    else:
        assert not found.on_host
        copied = {*found.down.values(), *found.up.values()}
        assert not any(dtype.is_floating for dtype in copied)
    if tf.__version__.startswith("2.21."):
        assert line(name, found) in PAGE.read_text()
