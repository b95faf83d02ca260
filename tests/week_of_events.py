"""A week of events, by a simulated clock, through tables of many rules.

    python week_of_events.py FOLDER KILL

It trains in the folder and goes on from its last checkpoint; after KILL steps
it kills itself with SIGKILL, unless KILL is 0. At the end it writes
`result.npz`. With several workers each of them does. `expected` says by dicts
what the result must be, to the bit.
"""

import os
import pathlib
import signal
import sys
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from conftest import STRATEGY
from dynamic_reference import ReferenceKeys, shard_of
from strategies.replicas import distribute
from tfrs_embed.storage.key_rules import key_rules
from training_helpers import differentiate

#: Rows of each table, and of each key; and by how much an occurrence lowers a
#: row, which is 1 at first: float32 has all numbers that come of it.
ROWS, DIM, RATE = 96, 2, 2.0**-10
#: Of all replicas; 12 is a multiple of 1, 2 and 3.
BATCH = 12
DAYS, STEPS_A_DAY, STEPS_PER_SAVE = 7, 12, 5
DAY = 86_400

#: The arguments of `DynamicKeys` of each table.
RULES = {
    "lru": dict(eviction="lru"),
    "lfu": dict(
        eviction="lfu",
        admission=tfrs_embed.FrequencyAdmission(2),
        candidates=60,
    ),
    "ttl": dict(eviction=tfrs_embed.TimeToLive(STEPS_A_DAY)),
}


class Step(NamedTuple):
    """What happens in a step.

    Attributes:
        number: 1 for the first.
        now: the time, in seconds since 1970.
        keys: [BATCH] int64, those of all replicas.
        ends_day: whether it is the last one of its day.
    """

    number: int
    now: float
    keys: np.ndarray
    ends_day: bool


def week():
    """The steps of a week: what people look at changes with the days."""
    rng = np.random.default_rng(7)
    universe = rng.integers(-(2**63), 2**63 - 1, 1000)
    start = 1_700_000_000
    for day in range(DAYS):
        # Popular ones of all days, and this day's own.
        pool = np.append(universe[:20], universe[60 * day :][:150])
        hours = np.sort(rng.uniform(7, 23, STEPS_A_DAY))
        for i, hour in enumerate(hours):
            number = day * STEPS_A_DAY + i + 1
            chosen = (len(pool) * rng.random(BATCH) ** 2).astype(int)
            now = start + day * DAY + 3600 * hour
            yield Step(number, now, pool[chosen], i == STEPS_A_DAY - 1)


def make_layer():
    features = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(
                name,
                ROWS,
                DIM,
                initializer=tf_keras.initializers.Ones(),
                keys=tfrs_embed.DynamicKeys(**rules),
            ),
        )
        for name, rules in RULES.items()
    }
    return tfrs_embed.PartialTPUEmbedding(
        features, tf_keras.optimizers.SGD(RATE), name="layer"
    )


class Job:
    """A layer that trains on the week's events, and its checkpoint."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.layer = make_layer()
            self.layer.build(None)
            self.done = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.checkpoint = tf.train.Checkpoint(layer=self.layer, done=self.done)

        def of_replica(keys):
            with tf.GradientTape() as tape:
                vectors = self.layer(dict.fromkeys(RULES, keys), training=True)
                loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
            differentiate(tape, loss, self.layer.trainable_variables)

        self._train = tf.function(lambda keys: strategy.run(of_replica, [keys]))

    def step(self, step):
        parts = np.split(step.keys, self.strategy.num_replicas_in_sync)
        self._train(distribute(self.strategy, parts))
        if step.ends_day:
            self.end_day(step)
        self.done.assign(step.number)

    def end_day(self, step):
        del step
        self.layer.tables["ttl"].evict()

    def result(self):
        return {
            f"{name}/{part}": variable.numpy()
            for name in RULES
            for part, variable in self.layer.tables[name].variables.items()
        }


class ReferenceTable:
    """A table as dicts have it: shards of keys, and each key's row."""

    def __init__(self, spec, world):
        rules = key_rules(spec, world)
        self.rules, self.world = rules, world
        self.shards = [ReferenceKeys(rules) for _ in range(world)]
        self.rows = {}

    def step(self, step):
        for rank, shard in enumerate(self.shards):
            mine = [k for k in step.keys.tolist() if self.shard_of(k) == rank]
            outcome = shard.commit(mine, None, step.number)
            assert not outcome.lacking
            for key in outcome.evicted:
                del self.rows[key]
            self.rows.update(dict.fromkeys(outcome.admitted, 1.0))
            for key in mine:
                if key in self.rows:
                    self.rows[key] -= RATE

    def shard_of(self, key):
        return shard_of(key, self.world)

    def evict_expired(self, step):
        for shard in self.shards:
            expired = [
                key
                for key, seen in shard.live.items()
                if step.number - seen.last > self.rules.ttl
            ]
            for key in shard.remove(expired, evicted=True):
                del self.rows[key]

    def state(self):
        live = {k: s for shard in self.shards for k, s in shard.live.items()}
        seen = {k: s for d in self.shards for k, s in d.candidates.items()}
        keys = sorted(live)
        return {
            "keys": keys,
            "parameters": [[self.rows[key]] * DIM for key in keys],
            "frequency": [live[key].frequency for key in keys],
            "last_used": [live[key].last for key in keys],
            "candidates": np.reshape(
                [(k, seen[k].frequency, seen[k].last) for k in sorted(seen)],
                [-1, 3],
            ),
        }


def expected(world):
    """The result with so many replicas, by dicts."""
    tables = {
        spec.name: ReferenceTable(spec, world)
        for spec in make_layer()._spec.tables
    }
    for step in week():
        for table in tables.values():
            table.step(step)
        if step.ends_day:
            tables["ttl"].evict_expired(step)
    return {
        f"{name}/{part}": np.array(value)
        for name, table in tables.items()
        for part, value in table.state().items()
    }


def main(folder, kill):
    strategy = STRATEGY or tf.distribute.get_strategy()
    job, left = Job(strategy), int(kill)
    # All restore the chief's checkpoint, which has all tables.
    latest = tf.train.latest_checkpoint(folder)
    if latest is not None:
        job.checkpoint.restore(latest).assert_consumed()
    number = task_of(strategy)
    mine = folder if number == 0 else str(pathlib.Path(folder, str(number)))
    manager = tf.train.CheckpointManager(job.checkpoint, mine, max_to_keep=2)
    for step in week():
        if step.number <= int(job.done.numpy()):
            continue
        job.step(step)
        if step.number % STEPS_PER_SAVE == 0:
            manager.save()
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    np.savez(pathlib.Path(mine, "result.npz"), **job.result())


def task_of(strategy):
    """The number of this worker; 0 is the chief's."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return strategy.cluster_resolver.task_id
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
