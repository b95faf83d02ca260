"""Layers with tables whose keys come and go, and the reference of both.

The reference of the keys says which keys have rows, and that of the engines
what happens to rows, which it knows by number: a key's number is its place
among all keys that a test uses. The row of a key that has none is zeros; or, in
a table with fallback rows, one of these, which follow all keys.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import types

import numpy as np
import tensorflow as tf

import tfrs_embed
from conformance.descriptors import OPTIMIZERS, RATE, fresh
from dynamic_reference import MASK, ReferenceKeys, mix, shard_of
from keras_under_test import keras, layers
from reference import Ragged, Reference, Sparse, Table, to_tf
from training_helpers import differentiate

#: What is exact: the others are sums of float32.
COLUMNS = ("keys", "frequency", "last_used", "candidates")


def uniform(seed, key, dim):
    """The numbers in (0, 1) that a key's initial row is made of."""
    state = mix((seed & MASK) ^ mix(key & MASK))
    bits = [mix((state + j) & MASK) >> 41 for j in range(dim)]
    return (np.array(bits) + 0.5) * 2.0**-23


def normal(seed, key, dim, mean=0.0, stddev=0.05):
    """A key's initial row under RandomNormal."""
    quantile = statistics.NormalDist(mean, stddev).inv_cdf
    return np.array([quantile(u) for u in uniform(seed, key, dim)])


def truncated(seed, key, dim, mean=0.0, stddev=0.05):
    """A key's initial row under TruncatedNormal."""
    tail = math.erfc(math.sqrt(2)) / 2
    quantile = statistics.NormalDist(mean, stddev).inv_cdf
    u = tail + (1 - 2 * tail) * uniform(seed, key, dim)
    return np.array([quantile(x) for x in u])


def fingerprint(key):
    """The int64 that a key is known by."""
    if isinstance(key, bytes):
        return int(tf.fingerprint([key]).numpy().view(np.int64)[0, 0])
    return int(np.uint64(int(key) & MASK).view(np.int64))


@dataclasses.dataclass
class TableCase:
    """A table, declared to the library and to the reference.

    Attributes:
        rows: its rows at the beginning.
        keys: its `DynamicKeys`; None: a static table.
        optimizer: the name of one of the conformance tests' optimizers.
        universe: all keys that are looked up in it, integers or bytes.
        dim: the width of its rows.
        combiner: how its rows are combined.
        seed: of its initializer.
    """

    rows: int
    keys: tfrs_embed.DynamicKeys | None
    optimizer: str = "sgd"
    universe: tuple = tuple(range(12))
    dim: int = 2
    combiner: str = "sum"
    seed: int = 7

    def config(self, name):
        return tfrs_embed.TableConfig(
            name,
            self.rows,
            self.dim,
            initializer=keras.initializers.RandomNormal(seed=self.seed),
            optimizer=fresh(OPTIMIZERS[self.optimizer].optimizer),
            combiner=self.combiner,
            keys=self.keys,
        )

    @property
    def dtype(self):
        return self.keys.dtype if self.keys else tf.int64

    def rules(self):
        """The fields of `KeyRules`."""
        keys = self.keys
        kinds = tfrs_embed.FrequencyAdmission, tfrs_embed.ProbabilisticAdmission
        frequency, probability = (
            keys.admission if isinstance(keys.admission, kind) else None
            for kind in kinds
        )
        rules = keys.rules
        spans = [r for r in rules if not isinstance(r, str)]
        lives = [r for r in spans if isinstance(r, tfrs_embed.TimeToLive)]
        grows = keys.when_full == "grow"
        named = [r for r in rules if isinstance(r, str)]
        kind = tfrs_embed.DecayingFrequency
        decays = [r for r in spans if isinstance(r, kind)]
        policy = [
            *named,
            "decay" if decays else "lru" if lives else "none",
        ][0]
        most = (keys.max_rows or 2**40) if grows else self.rows
        return types.SimpleNamespace(
            capacity=self.rows,
            max_capacity=most,
            floor=max(1, int(keys.floor * most)) if keys.floor else 0,
            candidates=keys.candidates or 4 * self.rows,
            threshold=frequency.threshold if frequency else 0,
            probability=probability.probability if probability else 1.0,
            seed=self.seed,
            policy=policy,
            ttl=sum(r.length for r in lives),
            half_life=sum(r.length for r in decays),
            by_time=any(r.by_time for r in spans),
            evicts=keys.when_full != "error" and bool(rules),
        )

    def initial(self, place):
        """The initial row of the key at a place among all."""
        return normal(self.seed, fingerprint(self.universe[place]), self.dim)

    @property
    def fallback_rows(self):
        """How many rows the keys without one share."""
        return (self.keys and self.keys.fallback_rows) or 0

    def shared(self, place):
        """The fallback row of the key at a place; None: it has none."""
        count = self.fallback_rows
        if not count:
            return None
        key = fingerprint(self.universe[place])
        return len(self.universe) + shard_of(key, count)

    def reference(self):
        _, rule, settings, options = OPTIMIZERS[self.optimizer]
        shape = (len(self.universe) + self.fallback_rows, self.dim)
        rows = np.zeros(shape)
        for number in range(self.fallback_rows):
            row = normal(self.seed, number, self.dim)
            rows[len(self.universe) + number] = row
        if self.keys is None:
            initial = keras.initializers.RandomNormal(seed=self.seed)
            rows = initial(shape).numpy()
        return Table(
            rows,
            self.combiner,
            rule,
            settings,
            lambda step: RATE,
            options=options,
        )

    def given(self, ids):
        """Ids of the reference as the layer takes them."""

        def key(place):
            return self.universe[place]

        if isinstance(ids, Ragged):
            rows = [[key(i) for i in row] for row in ids.rows]
            return Ragged(rows, self.dtype.name).to_tf()
        if isinstance(ids, Sparse):
            cells = {at: key(i) for at, i in ids.cells.items()}
            return Sparse(cells, ids.shape, self.dtype.name).to_tf()
        flat = [key(i) for i in ids.ravel().tolist()]
        return tf.reshape(tf.constant(flat, self.dtype), ids.shape)


class NoRoom(Exception):
    """A step needs more rows than there are."""


class Tables:
    """A layer's tables as the references have them.

    Args:
        features: the features by name, of the reference.
        cases: the tables by name.
    """

    def __init__(self, features, cases):
        self.features, self.cases = features, cases
        self.reference = Reference(
            features, {name: case.reference() for name, case in cases.items()}
        )
        self.keys = {
            name: ReferenceKeys(case.rules())
            for name, case in cases.items()
            if case.keys
        }
        self.place = {
            name: {fingerprint(k): i for i, k in enumerate(case.universe)}
            for name, case in cases.items()
        }
        self.begin = {
            name: {k: v[0].copy() for k, v in table.slots.items()}
            for name, table in self.reference.tables.items()
        }

    def layer(self, kind=layers.PartialTPUEmbedding, **kwargs):
        """A layer with these tables."""
        tables = {name: case.config(name) for name, case in self.cases.items()}
        features = {
            name: tfrs_embed.FeatureConfig(
                name,
                tables[f.table],
                max_sequence_length=f.max_sequence_length,
                output_shape=f.output_shape
                and (*f.output_shape, self.cases[f.table].dim),
            )
            for name, f in self.features.items()
        }
        return kind(features, None, size_threshold=0, **kwargs)

    def given(self, ids):
        """Ids by feature, as the layer takes them."""
        return {
            name: self.cases[self.features[name].table].given(i)
            for name, i in ids.items()
        }

    def used(self, ids):
        """Each table's keys of a step, every occurrence of them."""
        used = {name: [] for name in self.keys}
        for name, feature in self.features.items():
            if feature.table in used:
                _, bags = self.reference.bags(name, ids[name], None)
                case = self.cases[feature.table]
                used[feature.table] += [
                    fingerprint(case.universe[i]) for b in bags for i, _ in b
                ]
        return used

    def lookup(self, ids, weights):
        """The vectors of a lookup that is no training step."""
        return self.reference.lookup(self.rows(ids), weights)

    def rows(self, ids):
        """Ids by feature, with fallback rows for keys without a row."""
        found = {}
        for name, given in ids.items():
            table = self.features[name].table
            case, keys = self.cases[table], self.keys.get(table)

            def row(place, case=case, keys=keys):
                has_own = fingerprint(case.universe[place]) in keys.live
                return place if has_own else case.shared(place)

            if not case.fallback_rows:
                found[name] = given
            elif isinstance(given, Ragged):
                found[name] = dataclasses.replace(
                    given, rows=[[row(i) for i in each] for each in given.rows]
                )
            elif isinstance(given, Sparse):
                cells = {at: row(i) for at, i in given.cells.items()}
                found[name] = dataclasses.replace(given, cells=cells)
            else:
                flat = [row(i) for i in given.ravel().tolist()]
                found[name] = np.reshape(flat, given.shape)
        return found

    def train(self, ids, weights, gradient_of):
        """A training step.

        Args:
            ids: the ids by feature.
            weights: their weights, or None, by feature.
            gradient_of: makes an activation's gradient of its shape.

        Returns:
            The features' activations and their gradients.

        Raises:
            NoRoom: a table has none; nothing has changed.
        """
        number = self.reference.step + 1
        used = self.used(ids)
        for name, keys in self.keys.items():
            if keys.plan(used[name], None, number).lacking:
                raise NoRoom(name)
        for name, keys in self.keys.items():
            outcome = keys.commit(used[name], None, number)
            self.forget(name, outcome.evicted)
            for key in outcome.admitted:
                self._begin(name, key)
        vectors = self.lookup(ids, weights)
        gradients = {k: gradient_of(v.shape) for k, v in vectors.items()}
        sums = self.reference.row_gradients(self.rows(ids), weights, gradients)
        for name, keys in self.keys.items():
            if self.cases[name].fallback_rows:
                continue  # All keys have rows, of their own or shared ones.
            live = {self.place[name][key] for key in keys.live}
            sums[name] = {i: g for i, g in sums[name].items() if i in live}
        self.reference.update(sums)
        return vectors, gradients

    def forget(self, name, keys):
        """Takes the rows of keys."""
        for key in keys:
            self.reference.tables[name].rows[self.place[name][key]] = 0.0

    def _begin(self, name, key):
        table, place = self.reference.tables[name], self.place[name][key]
        shared = self.cases[name].shared(place)
        table.rows[place] = (
            self.cases[name].initial(place)
            if shared is None
            else table.rows[shared]
        )
        for slot, values in table.slots.items():
            values[place] = self.begin[name][slot]

    def evict(self, name, count):
        """The table's `evict`; returns how many went."""
        keys, now = self.keys[name], self.reference.step
        if count is None:
            count = keys.expired(now)
        gone = keys.remove(keys.order(now)[:count], evicted=True)
        self.forget(name, gone)
        return len(gone)

    def remove(self, name, places):
        """The table's `remove`; returns how many went."""
        case = self.cases[name]
        gone = self.keys[name].remove(
            [fingerprint(case.universe[i]) for i in places]
        )
        self.forget(name, gone)
        return len(gone)

    def stored(self, name):
        """What a checkpoint has of a table with keys."""
        keys = self.keys[name]
        return copy.deepcopy(
            (
                keys.live,
                keys.candidates,
                self.reference.tables[name],
                self.reference.step,
            )
        )

    def restore(self, name, stored):
        """Puts what `stored` returned in the place of what there is."""
        live, candidates, table, step = copy.deepcopy(stored)
        self.keys[name].replace(live, candidates)
        self.reference.tables[name] = table
        self.reference.step = step

    def contents(self, name):
        """What the variables of a dynamic table hold."""
        keys, table = self.keys[name], self.reference.tables[name]
        live = sorted(keys.live)
        places = [self.place[name][key] for key in live]
        first = len(self.cases[name].universe)
        values = {"parameters": table.rows, **table.slots}
        shared = {f"fallback_{k}": v[first:] for k, v in values.items()}
        return {
            "keys": np.array(live, np.int64),
            **{part: rows[places] for part, rows in values.items()},
            **(shared if self.cases[name].fallback_rows else {}),
            "frequency": np.array([keys.live[k].frequency for k in live], int),
            "last_used": np.array([keys.live[k].last for k in live], int),
            "candidates": np.array(
                [
                    (k, s.frequency, s.last)
                    for k, s in sorted(keys.candidates.items())
                ],
                np.int64,
            ).reshape(-1, 3),
        }

    def assert_same(self, layer):
        """Asserts that a layer's tables hold what these do."""
        for name, table in self.reference.tables.items():
            state = layer.tables[name]
            expected = {"parameters": table.rows, **table.slots}
            if name in self.keys:
                expected = self.contents(name)
                assert state.size == len(self.keys[name].live)
                assert state.capacity == self.keys[name].capacity
            assert sorted(state.variables) == sorted(expected)
            for variable, value in expected.items():
                found = state.variables[variable].numpy()
                what = f"{name}/{variable}"
                if variable in COLUMNS:
                    np.testing.assert_array_equal(found, value, what)
                else:
                    assert_close(found, value, what)
        assert layer.step.numpy() == self.reference.step

    def assert_statistics(self, layer):
        for name, keys in self.keys.items():
            found = layer.tables[name].statistics()
            numbers = [*found["last_step"].values(), *found["in_all"].values()]
            assert numbers == keys.statistics(), name
            assert list(found["in_all"]) == [
                "admitted",
                "evicted",
                "rejected",
                "hits",
            ]

    def run(self, layer, step, ids, weights, rng):
        """Trains the layer and the reference, and compares the vectors.

        Args:
            layer: the layer.
            step: trains it: `helpers.train`, or a function of it.
            ids: the ids by feature.
            weights: their weights by feature, or None.
            rng: makes the gradients.

        Raises:
            NoRoom: a table has none.
        """

        def gradient(shape):
            return rng.normal(size=shape).astype(np.float32)

        weights = weights or dict.fromkeys(self.features)
        expected, gradients = self.train(ids, weights, gradient)
        found = step(
            layer,
            self.given(ids),
            {k: tf.constant(gradients[k]) for k in self.features},
            {k: to_tf(w) for k, w in weights.items()},
        )
        for name, vectors in expected.items():
            assert_close(found[name].numpy(), vectors, name)


def train(layer, ids, gradients, weights=None, training=True):
    """Trains a layer with these gradients; returns its activations."""
    with tf.GradientTape() as tape:
        vectors = layer(ids, weights=weights, training=training)
        loss = tf.add_n(
            [tf.reduce_sum(vectors[k] * gradients[k]) for k in vectors]
        )
    differentiate(tape, loss, layer.trainable_variables)
    return vectors


def assert_close(found, expected, what):
    np.testing.assert_allclose(
        found, expected, rtol=3e-4, atol=3e-5, err_msg=what
    )
