"""Tables whose keys come and go, step by step against the reference."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import NoRoom, TableCase, Tables, assert_close, train
from process_tiers import nightly, without_kernels
from reference import Feature, Ragged, Sparse, to_tf
from tfrs_embed import DynamicKeys, FrequencyAdmission, TimeToLive
from training_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("both_implementations")

BATCH = 4
# Both ends, both signs, and keys that differ in few bits.
NUMBERS = (-(2**63), 2**63 - 1, 0, 1, -1, 2**40, 2**40 + 2**20, -7, 5, 99, 3, 8)
WORDS = (*(f"word {i}".encode() for i in range(11)), "ä/\0".encode())

FEATURES = {
    "scalars": Feature("numbers"),
    "ragged": Feature("numbers"),
    "sequence": Feature("numbers", max_sequence_length=2),
    "words": Feature("words", output_shape=(BATCH,)),
    "sparse": Feature("words"),
    "static": Feature("static"),
}
WEIGHTED = ("ragged", "sparse", "words")


def draw(rng, universe, spread):
    """Random ids of all features, and weights of some.

    Each step draws from a few keys, of which there are others in each step.
    """
    first = rng.integers(0, universe)

    def one():
        return int(first + rng.integers(0, spread)) % universe

    def row():
        return [one() for _ in range(rng.integers(0, 4))]

    cells = {
        (r, c): one()
        for r in range(BATCH)
        for c in range(3)
        if rng.random() < 0.4
    }
    ids = {
        "scalars": np.array([one() for _ in range(BATCH)]),
        "ragged": Ragged([row() for _ in range(BATCH)]),
        "sequence": Ragged([row() for _ in range(BATCH)]),
        "words": np.array([[one(), one()] for _ in range(BATCH)]),
        "sparse": Sparse(cells, (BATCH, 3)),
        "static": rng.integers(0, 12, BATCH),
    }

    def weight(_=None):
        return float(rng.uniform(0.5, 2))

    weights = dict.fromkeys(ids)
    weights["ragged"] = Ragged(
        [[weight() for _ in row] for row in ids["ragged"].rows], "float32"
    )
    weights["sparse"] = Sparse(
        {at: weight() for at in cells}, (BATCH, 3), "float32"
    )
    weights["words"] = rng.uniform(0.5, 2, (BATCH, 2)).astype(np.float32)
    return ids, weights


# Rules of the table of numbers and of that of words, and their optimizers.
STREAMS = {
    "lru": (
        DynamicKeys(),
        DynamicKeys("string", FrequencyAdmission(3), "lfu", candidates=3),
        ("adagrad", "adam"),
    ),
    "ttl": (
        DynamicKeys(eviction=TimeToLive(2)),
        DynamicKeys("string", tfrs_embed.ProbabilisticAdmission(0.3)),
        ("ftrl", "sgd"),
    ),
    "ttl_grow": (
        DynamicKeys(eviction=TimeToLive(1), when_full="grow", max_rows=10),
        DynamicKeys("string", FrequencyAdmission(2), "lru", "grow", max_rows=9),
        ("momentum", "rmsprop"),
    ),
    "ttl_error": (
        DynamicKeys(eviction=TimeToLive(1), when_full="error"),
        DynamicKeys("string", eviction=None, when_full="grow"),
        ("adagrad_momentum", "ftrl_linear"),
    ),
    "shared": (
        DynamicKeys(fallback_rows=3),
        DynamicKeys("string", FrequencyAdmission(3), "lfu", fallback_rows=2),
        ("adagrad", "adam"),
    ),
    "shared_grow": (
        DynamicKeys(
            eviction=TimeToLive(1),
            when_full="grow",
            max_rows=10,
            fallback_rows=1,
        ),
        DynamicKeys(
            "string",
            tfrs_embed.ProbabilisticAdmission(0.3),
            eviction=None,
            when_full="grow",
            fallback_rows=5,
        ),
        ("row_wise_adagrad", "adagrad_clipnorm_decay"),
    ),
    "decay_floor": (
        DynamicKeys(eviction=tfrs_embed.DecayingFrequency(3), floor=0.7),
        DynamicKeys("string", eviction=(TimeToLive(3), "lfu"), floor=0.9),
        ("adagrad", "sgd"),
    ),
    "error": (
        DynamicKeys(admission=FrequencyAdmission(4), eviction=None),
        DynamicKeys("string", tfrs_embed.ProbabilisticAdmission(0.2), None),
        # A norm is of the keys that have rows.
        ("adagrad_clipnorm_decay", "adam_outside"),
    ),
}


def make_tables(name):
    numbers, words, optimizers = STREAMS[name]
    return Tables(
        FEATURES,
        {
            "numbers": TableCase(6, numbers, optimizers[0], NUMBERS, 3, "mean"),
            "words": TableCase(
                5, words, optimizers[1], WORDS, 2, "sqrtn", 2**63 + 11
            ),
            "static": TableCase(12, None, optimizers[0]),
        },
    )


def train_or_fail(tables, layer, step, ids, weights, rng):
    """Trains; whether there was room, without which nothing has changed."""
    before = state(layer)
    try:
        tables.run(layer, step, ids, weights, rng)
    except NoRoom as error:
        one = dict.fromkeys(FEATURES, tf.constant(1.0))
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"{error}\\?': no room"
        ):
            step(layer, tables.given(ids), one)
        assert_same(state(layer), before)
        return False
    return True


def look_up(tables, layer, ids, weights):
    """Looks up outside of training, which changes nothing."""
    before = state(layer)
    expected = tables.lookup(ids, weights)
    for training in (False, None):
        found = layer(
            tables.given(ids),
            weights={k: to_tf(w) for k, w in weights.items()},
            training=training,
        )
        for name, vectors in expected.items():
            assert_close(found[name], vectors, name)
    assert_same(state(layer), before)


@nightly(
    lambda both_implementations, name: (
        # Its rules are each in another stream too.
        name == "ttl"
        or (name != "lru" and without_kernels(both_implementations))
    )
)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_calls(name):
    tables = make_tables(name)
    layer = tables.layer()
    layer.build(None)
    rng = np.random.default_rng(len(name))
    failed = 0
    for number in range(30):
        ids, weights = draw(rng, 12, rng.integers(3, 6))
        failed += not train_or_fail(tables, layer, train, ids, weights, rng)
        if number % 3 == 1:
            look_up(tables, layer, *draw(rng, 12, 12))
        if number % 5 == 2:
            some = rng.choice(12, 4, replace=False)
            for table in tables.keys:
                keys = tables.cases[table].given(some)
                found = layer.tables[table].remove(keys)
                assert found == tables.remove(table, some)
        if number % 5 == 4:
            for table, keys in tables.keys.items():
                count = int(rng.integers(0, 4))
                if keys.rules.ttl and number % 2:
                    count = None
                if keys.rules.policy != "none":
                    found = layer.tables[table].evict(count)
                    assert found == tables.evict(table, count)
        tables.assert_statistics(layer)
        tables.assert_same(layer)
    # What the stream is to have: it is random.
    assert (failed > 0) == ("error" in name)
    for keys in tables.keys.values():
        admitted, evicted, _, hits = keys.statistics()[4:]
        assert admitted > keys.rules.capacity and hits > 40
        assert evicted > 0 or keys.rules.policy == "none"


@nightly(without_kernels)
@pytest.mark.parametrize(
    "name", ["lru", "ttl_grow", "ttl_error", "shared", "shared_grow"]
)
def test_a_stream_of_steps_in_a_function(name):
    tables = make_tables(name)
    layer = tables.layer()
    layer.build(None)
    step = tf.function(train, reduce_retracing=True)
    rng = np.random.default_rng(1)
    failed = 0
    for _ in range(12):
        ids, weights = draw(rng, 12, rng.integers(3, 6))
        failed += not train_or_fail(tables, layer, step, ids, weights, rng)
        tables.assert_statistics(layer)
    tables.assert_same(layer)
    assert (failed > 0) == ("error" in name)
