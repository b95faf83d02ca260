"""`sampled_softmax` beside TensorFlow's own."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import layers
from process_tiers import on
from strategies.replicas import distribute, local
from tfrs_embed import FeatureConfig, TableConfig, sampled_softmax

pytestmark = on("keras:3", tier="more")

ROWS, DIM, SAMPLED = 40, 4, 12
LABELS = [3, 7, 3, 0, 39]


def make(strategy, threshold=0, **options):
    table = TableConfig("t", ROWS, DIM, "uniform", **options)
    with strategy.scope():
        return layers.PartialTPUEmbedding(
            {"x": FeatureConfig("x", table), "y": FeatureConfig("y", table)},
            "sgd",
            size_threshold=threshold,
        )


def inputs(seed=0):
    return np.random.default_rng(seed).normal(size=(5, DIM)).astype("float32")


def candidates(sampler=tf.random.log_uniform_candidate_sampler):
    labels = tf.constant(LABELS, tf.int64)[:, None]
    return sampler(labels, 1, SAMPLED, True, ROWS, seed=1)


def of_tensorflow(table, x, values, hits=True):
    return tf.nn.sampled_softmax_loss(
        table,
        tf.zeros([ROWS]),
        tf.constant(LABELS, tf.int64)[:, None],
        x,
        SAMPLED,
        ROWS,
        sampled_values=values,
        remove_accidental_hits=hits,
    )


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", "workers:2", tier="more", when=lambda hits: hits)
@pytest.mark.parametrize("hits", [True, False])
@pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
def test_its_loss_and_gradients_are_tensorflows(strategy, threshold, hits):
    layer = make(strategy, threshold)
    values = candidates()
    # The labels are among those that are sampled.
    assert set(LABELS) & set(values[0].numpy().tolist())
    batches = [inputs(i) for i in range(strategy.num_replicas_in_sync)]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = sampled_softmax(
                layer,
                "x",
                LABELS,
                x,
                SAMPLED,
                sampled_values=values,
                remove_accidental_hits=hits,
                training=True,
            )
        trained = layer.trainable_variables
        of_x, *of_layer = tape.gradient(loss, [x, *trained])
        rest = [tf.convert_to_tensor(g) for g in of_layer]
        return loss, of_x, rest if threshold is None else []

    with strategy.scope():
        layer.build(None)
    table = layer.embedding_tables["t"].numpy()
    run = tf.function(lambda x: strategy.run(step, (x,)))
    found = local(strategy, run(distribute(strategy, batches)))
    update = 0.0
    for replica, x in enumerate(batches):
        with tf.GradientTape() as tape:
            sources = tf.constant(x), tf.constant(table)
            tape.watch(sources)
            loss = of_tensorflow(sources[1], sources[0], values, hits)
        of_x, of_table = tape.gradient(loss, sources)
        of_table = tf.convert_to_tensor(of_table).numpy()
        update += of_table
        if replica not in found:  # Another worker's.
            continue
        np.testing.assert_allclose(found[replica][0], loss, rtol=1e-5)
        np.testing.assert_allclose(
            found[replica][1], of_x, rtol=1e-4, atol=1e-6
        )
        if threshold is None:
            np.testing.assert_allclose(
                found[replica][2][0], of_table, rtol=1e-4, atol=1e-6
            )
    if threshold == 0:
        np.testing.assert_allclose(
            layer.embedding_tables["t"].numpy(),
            table - 0.01 * update,
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("sampler", ["log_uniform", "uniform", "counts"])
def test_its_mean_is_the_whole_softmax(sampler):
    """With many samples, the loss is that over all rows."""
    layer = make(tf.distribute.get_strategy())
    layer.build(None)
    table, x = layer.embedding_tables["t"].numpy(), inputs()
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(
        LABELS, x @ table.T
    )
    given = sampler
    if sampler == "counts":
        given = np.random.default_rng(1).integers(1, 9, ROWS)
    number = 20_000 if sampler == "counts" else ROWS
    found = [
        # All rows once, or so many that each has its share.
        sampled_softmax(
            layer,
            "x",
            LABELS,
            x,
            number,
            given,
            seed=i,
            remove_accidental_hits=sampler != "counts",
            training=False,
        )
        for i in range(3)
    ]
    if sampler == "counts":
        # The label is one of the sampled ids, too.
        often = number * given[LABELS] / given.sum()
        expected = np.log1p(often * np.exp(expected))
    np.testing.assert_allclose(np.mean(found, 0), expected, atol=0.1)


def test_ids_of_frequency_0_are_never_drawn():
    layer = make(tf.distribute.get_strategy())
    counts = [0, 0, 0, 5, *[0] * 3, 5, *[0] * (ROWS - 8)]
    for seed in range(3):
        loss = sampled_softmax(
            layer, "y", [3, 7], inputs()[:2], 50, counts, seed=seed
        )
        # Half of the sampled ones are the label, and the other row the rest.
        assert np.isfinite(loss).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="frequency 0"):
        sampled_softmax(layer, "y", [3, 8], inputs()[:2], 50, counts)


def test_keys_take_sampled_values():
    keys = tfrs_embed.DynamicKeys(tf.string)
    layer = make(tf.distribute.get_strategy(), keys=keys)
    with pytest.raises(ValueError, match=r"'x'.*sampled_values"):
        sampled_softmax(layer, "x", ["a"], inputs()[:1], 2)
    values = ["b", "a"], [[0.5]], [0.25, 0.5]
    with tf.GradientTape() as tape:
        loss = sampled_softmax(
            layer, "x", ["a"], inputs()[:1], 2, sampled_values=values
        )
    tape.gradient(loss, layer.trainable_variables)
    assert layer.tables["t"].size == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"feature": "z"}, r"no feature with the path 'z', but \['x', 'y'\]"),
        ({"labels": [[3]]}, r"'x'.*labels must have the shape \[batch\]"),
        ({"inputs": [1.0]}, r"'x'.*inputs \[batch, dim\]"),
        ({"num_sampled": 0}, "num_sampled must be an integer >= 1"),
        ({"sampler": "zipf"}, "sampler must be one of"),
        ({"sampler": [1.0, 2.0]}, "a frequency for each of 40 ids"),
    ],
)
def test_wrong_arguments(arguments, said):
    layer = make(tf.distribute.get_strategy())
    right = {
        "feature": "x",
        "labels": [3],
        "inputs": inputs()[:1],
        "num_sampled": 2,
    }
    with pytest.raises(ValueError, match=said):
        sampled_softmax(layer, **(right | arguments))


def test_a_label_outside_of_the_table():
    layer = make(tf.distribute.get_strategy())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'x'.*id 40"):
        sampled_softmax(layer, "x", [40], inputs()[:1], 2, "uniform")
