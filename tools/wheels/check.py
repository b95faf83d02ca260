"""Uses an installed wheel where there is no compiler.

run.py has the Python of each TensorFlow run it.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfrs_embed
from tfrs_embed import kernels
from tfrs_embed.kernels import build, files

ROWS, DIM, BATCH = 20_000, 32, 512
OPTIMIZERS = ("sgd", "adagrad", "adagrad_momentum", "adam", "ftrl")


def make_layer():
    """A large table for each optimizer, and one of keys that come and go."""
    features = {}
    for name in OPTIMIZERS:
        table = tfrs_embed.TableConfig(
            name, ROWS, DIM, optimizer=name, initializer="ones"
        )
        features[name] = tfrs_embed.FeatureConfig(name, table)
    table = tfrs_embed.TableConfig(
        "keys",
        ROWS,
        DIM,
        optimizer="sgd",
        initializer="ones",
        keys=tfrs_embed.DynamicKeys(),
    )
    features["keys"] = tfrs_embed.FeatureConfig("keys", table)
    return tfrs_embed.PartialTPUEmbedding(features, "sgd", size_threshold=0)


def make_batches():
    rng = np.random.default_rng(7)
    names = [*OPTIMIZERS, "keys"]
    return [
        {
            name: tf.RaggedTensor.from_row_lengths(
                rng.integers(ROWS, size=2 * BATCH), [1, 3] * (BATCH // 2)
            )
            for name in names
        }
        for _ in range(4)
    ]


def train(batches):
    """Trains; returns activations and tables, a step's operations, its time."""
    layer = make_layer()
    weights = tf.random.stateless_normal([BATCH, DIM], [1, 2])

    @tf.function(reduce_retracing=True)
    def step(ids):
        with tf.GradientTape() as tape:
            found = tf.nest.flatten(layer(ids, training=True))
            loss = tf.add_n([tf.reduce_mean(v**2 * weights) for v in found])
        # Who asks for gradients and doesn't use them trains no table.
        return found, tape.gradient(loss, layer.trainable_variables)

    numbers = []
    for ids in batches:
        numbers += [found.numpy() for found in step(ids)[0]]
    times = []
    for ids in batches * 5:
        begin = time.perf_counter()
        step(ids)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    numbers += [layer.embedding_tables[name].numpy() for name in OPTIMIZERS]
    graph = step.get_concrete_function(batches[0]).graph.as_graph_def()
    nodes = [*graph.node]
    for function in graph.library.function:
        nodes += function.node_def
    operations = {node.op for node in nodes}
    return numbers, operations, seconds


def main():
    package = Path(tfrs_embed.__file__).parent
    assert package.is_relative_to(sys.prefix), package
    assert build.find_compiler() is None, build.find_compiler()
    status = kernels.status()
    assert status.loaded, status
    assert status.origin == "wheel", status
    assert Path(status.path) == files.FROM_WHEEL / files.file_name(), status

    batches = make_batches()
    with kernels.disabled():
        expected, stock, slow = train(batches)
    numbers, used, fast = train(batches)
    assert not any(o.startswith("TfrsEmbed") for o in stock), stock
    assert {"TfrsEmbedLookup", "TfrsEmbedUpdate"} <= used, used
    assert any(o.startswith("TfrsEmbedKeyTable") for o in used), used
    for mine, theirs in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)
    changed = [np.any(table != 1) for table in numbers[-len(OPTIMIZERS) :]]
    assert all(changed), changed
    print(
        f"TensorFlow {tf.__version__} ({tf.version.GIT_VERSION}): a step in "
        f"{1000 * fast:.1f} ms, without kernels {1000 * slow:.1f} ms; {status}"
    )


if __name__ == "__main__":
    main()
