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
from tfrs_embed.testing import simulated_clock

import tfrs_embed
from dynamic_layers import fingerprint
from dynamic_reference import ReferenceKeys, shard_of
from strategies.replicas import distribute
from tfrs_embed.storage.key_rules import key_rules
from training_helpers import differentiate

#: Rows of each table, and of each key; and by how much an occurrence lowers a
#: row, which is 1 at first: float32 has all numbers that come of it.
ROWS, DIM, RATE = 96, 2, 2.0**-10
#: Of all replicas; 12 is a multiple of 1, 2 and 3.
BATCH = 12
DAYS, STEPS_A_DAY, STEPS_PER_SAVE, STEPS_PER_SCORES = 7, 12, 5, 4
DAY = 86_400
#: From which step to which the clock is two days late.
BACK = (40, 44)

TimeToLive = tfrs_embed.TimeToLive
#: The arguments of `DynamicKeys` of each table.
RULES = {
    "lru": dict(eviction="lru"),
    "lfu": dict(
        eviction="lfu",
        admission=tfrs_embed.FrequencyAdmission(2),
        candidates=60,
    ),
    "steps": dict(eviction=TimeToLive(STEPS_A_DAY)),
    "days": dict(eviction=TimeToLive(days=2)),
    "decay": dict(eviction=tfrs_embed.DecayingFrequency(hours=20)),
    "decay of steps": dict(
        eviction=tfrs_embed.DecayingFrequency(9), floor=0.75
    ),
    "days, lfu": dict(eviction=(TimeToLive(days=3), "lfu"), floor=0.9),
    "shared": dict(
        eviction=(TimeToLive(hours=60), tfrs_embed.DecayingFrequency(days=1)),
        admission=tfrs_embed.FrequencyAdmission(2),
        fallback_rows=12,
    ),
    "score": dict(
        eviction=(TimeToLive(days=3), "score"),
        admission=tfrs_embed.FrequencyAdmission(2),
    ),
    "text": dict(dtype=tf.string, eviction="lru", keep_text=True),
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
            if BACK[0] <= number < BACK[1]:
                now -= 2 * DAY
            yield Step(number, now, pool[chosen], i == STEPS_A_DAY - 1)


def scores(keys, step):
    """What the program says that keys are worth, which changes with steps."""
    worth = (keys % 11 - 5) / 4 * (1 + step.number % 3)
    return np.float32(worth)


def make_layer(names):
    features = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(
                name,
                ROWS,
                DIM,
                initializer=tf_keras.initializers.Ones(),
                keys=tfrs_embed.DynamicKeys(**RULES[name]),
            ),
        )
        for name in names
    }
    return tfrs_embed.PartialTPUEmbedding(
        features, tf_keras.optimizers.SGD(RATE), name="layer"
    )


class Job:
    """A layer that trains on the week's events, and its checkpoint."""

    def __init__(self, strategy):
        self.strategy, self.names = strategy, [*RULES]
        with strategy.scope():
            self.layer = make_layer(self.names)
            self.layer.build(None)
            self.done = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.checkpoint = tf.train.Checkpoint(layer=self.layer, done=self.done)

        def of_replica(keys):
            given = dict.fromkeys(self.names, keys)
            if "text" in given:
                given["text"] = tf.strings.as_string(keys)
            with tf.GradientTape() as tape:
                vectors = self.layer(given, training=True)
                loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
            differentiate(tape, loss, self.layer.trainable_variables)

        self._train = tf.function(lambda keys: strategy.run(of_replica, [keys]))

    def step(self, step):
        with simulated_clock(lambda: step.now):
            parts = np.split(step.keys, self.strategy.num_replicas_in_sync)
            self._train(distribute(self.strategy, parts))
            if step.ends_day:
                for name in ("steps", "days"):
                    self.layer.tables[name].evict()
                self.layer.tables["lru"].remove(step.keys[:5])
            if step.number % STEPS_PER_SCORES == 0:
                table = self.layer.tables["score"]
                keys = table.keys()[:: step.number % 5 + 1]
                table.score(keys, scores(keys, step))
        self.done.assign(step.number)

    def result(self):
        found = {
            f"{name}/{part}": variable.numpy()
            for name in self.names
            for part, variable in self.layer.tables[name].variables.items()
        }
        if "text" in self.names:
            found["text/texts"] = self.layer.tables["text"].keys()
        return found


class ReferenceTable:
    """A table as dicts have it: shards of keys, and each key's row."""

    def __init__(self, spec, world):
        rules = key_rules(spec, world)
        self.rules, self.world, self.keys = rules, world, spec.keys
        self.shards = [ReferenceKeys(rules) for _ in range(world)]
        self.rows, self.texts = {}, {}
        self.shared = [1.0] * (spec.keys.fallback_rows or 0)

    def step(self, step):
        keys, time = step.keys.tolist(), int(step.now * 1_000_000)
        if self.keys.dtype == tf.string:
            texts = [str(key).encode() for key in keys]
            keys = [fingerprint(text) for text in texts]
            self.texts.update(zip(keys, texts, strict=True))
        for rank, shard in enumerate(self.shards):
            mine = [k for k in keys if shard_of(k, self.world) == rank]
            outcome = shard.commit(mine, None, step.number, time)
            assert not outcome.lacking
            for key in outcome.evicted:
                del self.rows[key]
            for key in outcome.admitted:
                self.rows[key] = self.first(key)
            for key in mine:
                if key in self.rows:
                    self.rows[key] -= RATE
                elif self.shared:
                    self.shared[shard_of(key, len(self.shared))] -= RATE

    def first(self, key):
        if self.shared:
            return self.shared[shard_of(key, len(self.shared))]
        return 1.0

    def remove(self, keys):
        for shard in self.shards:
            for key in shard.remove(keys):
                del self.rows[key]

    def score(self, step):
        keys = sorted(key for shard in self.shards for key in shard.live)
        keys = keys[:: step.number % 5 + 1]
        values = scores(np.array(keys), step).tolist()
        for shard in self.shards:
            shard.score(keys, values)

    def evict_expired(self, step):
        now = int(step.now * 1_000_000) if self.rules.by_time else step.number
        expired = [
            key
            for shard in self.shards
            for key, seen in shard.live.items()
            if now - seen.last > self.rules.ttl
        ]
        self.remove(expired)

    def state(self):
        live = {k: s for shard in self.shards for k, s in shard.live.items()}
        seen = {k: s for d in self.shards for k, s in d.candidates.items()}
        keys = sorted(live)
        last_used = "last_used_time" if self.rules.by_time else "last_used"
        counter = "score" if self.rules.policy == "score" else "frequency"
        state = {
            "keys": keys,
            "parameters": [[self.rows[key]] * DIM for key in keys],
            counter: [live[key].frequency for key in keys],
            last_used: [live[key].last for key in keys],
            "candidates": np.reshape(
                [(k, seen[k].frequency, seen[k].last) for k in sorted(seen)],
                [-1, 3],
            ),
        }
        if self.shared:
            state["fallback_parameters"] = [[row] * DIM for row in self.shared]
        if self.texts:
            state["texts"] = np.array([self.texts[k] for k in keys], object)
        return state


def expected(names, world):
    """The result of tables with so many replicas, by dicts."""
    layer = make_layer(names)
    tables = {
        spec.name: ReferenceTable(spec, world) for spec in layer._spec.tables
    }
    for step in week():
        for table in tables.values():
            table.step(step)
        if step.ends_day:
            for name in ("steps", "days"):
                tables[name].evict_expired(step)
            tables["lru"].remove(step.keys[:5].tolist())
        if step.number % STEPS_PER_SCORES == 0:
            tables["score"].score(step)
    return {
        f"{name}/{part}": np.array(value)
        for name, table in tables.items()
        for part, value in table.state().items()
    }


def main(folder, kill):
    # Here, as in pytest the name may be that of another folder's.
    from conftest import STRATEGY

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
