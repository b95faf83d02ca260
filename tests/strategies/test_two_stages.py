"""Rows exchanged in two stages: inside groups of replicas, then between them.

The groups are of two logical CPUs of one process, where hosts have GPUs.
"""

import numpy as np
import pytest
import tensorflow as tf

from process_tiers import nightly, on
from strategies.replicas import distribute, local, local_ids
from strategies.test_sharded_traffic import DIM, draw, make_step
from tfrs_embed.distribution import row_exchange
from tfrs_embed.distribution.replicas import bucket_of

pytestmark = on("mirrored:4", tier="nightly")

SIZE = 2


@pytest.fixture(autouse=True)
def two_stages(strategy, monkeypatch):
    if strategy.num_replicas_in_sync <= SIZE:
        pytest.skip("one group")
    monkeypatch.setattr(row_exchange, "first_stage", lambda *_: SIZE)


def longest(by_group):
    """The capacity of messages of these keys, by sender and receiver."""
    sizes = [len(keys) for messages in by_group for keys in messages]
    return int(bucket_of(tf.constant(max(sizes), tf.int64))[0])


def by_owner(keys, number):
    return [
        {k // number for k in keys if k % number == r} for r in range(number)
    ]


@on("mirrored:4", tier="more")
@nightly(lambda dtype: dtype == "float16")
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2)])
def test_bytes_are_those_of_the_formula(strategy, dtype, size):
    """A key that both replicas of a group look up leaves the group once."""
    world = strategy.num_replicas_in_sync
    ids = draw(strategy, 1, 300)
    layer, step = make_step(strategy, [DIM], communication_dtype=dtype)
    step(distribute(strategy, ids))
    unique = [set(each.ravel().tolist()) for each in ids]
    first = [by_owner(keys, SIZE) for keys in unique]
    collected = [
        set().union(
            *(first[rank - rank % SIZE + i][rank % SIZE] for i in range(SIZE))
        )
        for rank in range(world)
    ]
    second = [by_owner(keys, world // SIZE) for keys in collected]
    sent = 0
    for peers, messages in ((SIZE, first), (world // SIZE, second)):
        capacity = longest(messages)
        sent += (peers - 1) * (8 * (1 + capacity) + 2 * size * DIM * capacity)
    found = layer.tpu_embedding.engine.traffic()
    for rank, traffic in zip(local_ids(strategy), found, strict=True):
        assert traffic.bytes == sent
        # A consensus, and the second stage's sizes; keys, rows and gradients,
        # each twice.
        assert traffic.collectives == 8
        assert traffic.unique_keys == len(unique[rank])


@on("mirrored:4", tier="more")
def test_lookups_outside_of_replicas_and_bad_ids(strategy):
    layer, step = make_step(strategy, [DIM, DIM + 1])
    ids = draw(strategy, 2, 20)
    step(distribute(strategy, ids))
    before = layer.embedding_tables
    tables = [np.asarray(table) for table in before.values()]
    bad = [each.copy() for each in ids]
    bad[-1][1, 3] = 1000
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="id 1000 is out of range"
    ):
        step(distribute(strategy, bad))
    for table, now in zip(tables, layer.embedding_tables.values(), strict=True):
        np.testing.assert_array_equal(table, np.asarray(now))
    look_up = tf.function(
        lambda ids: strategy.run(
            lambda ids: layer(
                dict(zip("01", tf.unstack(ids), strict=True)), training=False
            ),
            (ids,),
        )
    )
    for replica, found in local(
        strategy, look_up(distribute(strategy, ids))
    ).items():
        for i in range(2):
            np.testing.assert_array_equal(
                found[str(i)], tables[i][ids[replica][i]]
            )
