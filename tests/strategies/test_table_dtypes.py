"""Tables of two bytes on replicas: one device's rows, to the bit."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import on
from reference import HALVES, random_bits, round_stochastically
from strategies.replicas import distribute
from training_helpers import differentiate

pytestmark = on("mirrored:2", tier="nightly")

ROWS, DIM, BATCH = 48, 16, 8
RATE = np.float32(0.3)
tpu = tf.tpu.experimental.embedding


def make_tables(dtypes, places, **options):
    """A layer with a table of each name, of its dtype and in its place."""
    tables = [
        tfrs_embed.TableConfig(
            name,
            ROWS,
            DIM,
            tf.random_normal_initializer(seed=1),
            combiner="sum",
            placement=place,
            dtype=dtype,
        )
        for (name, dtype), place in zip(dtypes.items(), places, strict=True)
    ]
    layer = tfrs_embed.DistributedEmbedding(
        {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables}, **options
    )
    layer.build(None)
    return layer


def rows_of(layer, name):
    return np.asarray(layer.embedding_tables[name]).astype(np.float32)


@on(
    "mirrored:2",
    tier="more",
    when=lambda place, dtype, bag: (
        (place, dtype, bag)
        in (("row", "float16", 6), ("column", "bfloat16", 6))
    ),
)
@on(
    "workers:3",
    tier="more",
    when=lambda dtype, bag: dtype == "bfloat16" and bag == 1,
)
@on("workers:3", tier="nightly")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("place", ["row", "column", "table", "replicated"])
@pytest.mark.parametrize("bag", [1, 6])
def test_rows_are_those_of_the_reference(strategy, place, dtype, bag):
    """Bags of six ids are exchanged by vectors, where tables are by row."""
    names = ["one", "two"]
    with strategy.scope():
        layer = make_tables(
            {"one": dtype, "two": "float32"},
            [place] * 2,
            optimizer=tpu.SGD(float(RATE)),
        )
    found = layer.embedding_tables
    assert found["one"].dtype == dtype and found["two"].dtype == tf.float32
    rows = {n: rows_of(layer, n) for n in names}
    world = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)

    def step(batch):
        ids, gradients = batch
        with tf.GradientTape() as tape:
            outputs = layer(ids)
            loss = tf.add_n(
                [tf.reduce_sum(outputs[n] * gradients[n]) for n in names]
            )
        differentiate(tape, loss, layer.trainable_variables)

    function = tf.function(lambda batch: strategy.run(step, (batch,)))
    for number in range(2):
        # Each row once in all batches, so that no sum has an order.
        size = min(BATCH * bag, ROWS // world // bag * bag)
        ids = rng.permutation(ROWS)[: size * world].reshape(world, -1, bag)
        given = rng.normal(size=(*ids.shape[:2], DIM)).astype(np.float32)
        batches = [
            ({n: i for n in names}, {n: g for n in names})
            for i, g in zip(ids, given, strict=True)
        ]
        function(distribute(strategy, batches))
        per_row = np.repeat(given.reshape(-1, DIM), bag, 0)
        for name in names:
            new = rows[name][ids.ravel()] - RATE * per_row
            if name == "one":
                for i, values in zip(ids.ravel(), new, strict=True):
                    for j, value in enumerate(values):
                        bits = random_bits("one", number, int(i), j)
                        values[j] = round_stochastically(value, dtype, bits)
            rows[name][ids.ravel()] = new
    for name in names:
        np.testing.assert_array_equal(rows_of(layer, name), rows[name])


@on("mirrored:2", tier="more")
@pytest.mark.parametrize(
    ("saved", "restored"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_checkpoints_move_between_dtypes_and_places(
    strategy, saved, restored, tmp_path
):
    """From parts to others, to one device, and back."""
    names = ("a", "b", "c")

    def make(dtype, *places):
        return make_tables(dict.fromkeys(names, dtype), places, optimizer="sgd")

    def move(source, target):
        path = tf.train.Checkpoint(source).write(str(tmp_path / "c"))
        tf.train.Checkpoint(target).read(path).assert_consumed()
        for name in names:
            table = target.embedding_tables[name]
            expected = tf.cast(rows_of(source, name), table.dtype)
            np.testing.assert_array_equal(
                rows_of(target, name), tf.cast(expected, tf.float32)
            )

    with strategy.scope():
        source = make(saved, "row", "column", "replicated")
        values = np.random.default_rng(0).normal(size=(ROWS, DIM))
        source.load_tables(dict.fromkeys(names, values.astype(np.float32)))
        move(source, make(restored, "column", "replicated", "row"))
    alone = make(restored, "auto", "auto", "auto")
    move(source, alone)
    with strategy.scope():
        move(alone, source)
