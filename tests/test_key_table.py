"""Which keys have a shard's rows, compared with the reference."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamic_reference import Seen, shard_of
from key_table_comparison import (
    ADMISSIONS,
    EXTREME,
    INT64,
    POLICIES,
    Compared,
    candidates_of,
    int64,
    live_keys,
    run_random_stream,
)
from nightly_flag import ALL
from process_tiers import nightly, without_kernels
from tfrs_embed.distribution import key_shards
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW, KeyRules
from tfrs_embed.storage.key_table import FoundKeys, KeyTable

pytestmark = pytest.mark.usefixtures("both_implementations")


@st.composite
def all_rules(draw):
    capacity = draw(st.integers(1, 12))
    most = draw(st.sampled_from([capacity, 2 * capacity, 5 * capacity + 1]))
    return KeyRules(
        capacity=capacity,
        max_capacity=most,
        candidates=draw(st.integers(1, 15)),
        floor=draw(st.sampled_from([0, 0, 1, most // 2, most])),
        **draw(st.sampled_from(ADMISSIONS)),
        **draw(st.sampled_from(POLICIES)),
    )


KEYS = st.integers(1, 20) | st.sampled_from(EXTREME)
SCORES = st.sampled_from([-(2**31), -5, -1, 0, 1, 2, 2**31 - 1])
SEEN = st.dictionaries(
    KEYS, st.tuples(st.integers(1, 5), st.integers(-3, 12)), max_size=14
)


@st.composite
def operations(draw):
    kind = draw(
        st.sampled_from(
            [
                *("step", "step", "step", "commit", "plan"),
                *("remove", "replace", "score"),
            ]
        )
    )
    if kind == "replace":
        return kind, draw(SEEN), draw(SEEN)
    keys = draw(st.lists(KEYS, max_size=14))
    if kind == "score":
        scores = st.lists(SCORES, min_size=len(keys), max_size=len(keys))
        return kind, keys, draw(scores)
    if kind == "remove":
        return kind, keys, draw(st.booleans())
    counts = draw(
        st.none()
        | st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys))
    )
    # Mostly the next step, but callers may number them as they like, and
    # clocks jump.
    more = [draw(st.sampled_from([1, 1, 1, 0, 5, -2])) for _ in range(2)]
    return kind, keys, counts, more


def run(compared, stream):
    step = np.zeros(2, int)
    for kind, *arguments in stream:
        if kind == "replace":
            live, candidates = arguments
            most = compared.rules.max_capacity
            live = dict(itertools.islice(live.items(), most))
            compared.replace(live, candidates)
        elif kind == "remove":
            compared.remove(*arguments)
        elif kind == "score":
            compared.score(*arguments)
        else:
            keys, counts, more = arguments
            step = step + more
            if kind != "commit":
                compared.plan(keys, counts, step)
                compared.check()
            if kind != "plan":
                compared.commit(keys, counts, step)
            compared.find(keys)
        compared.check()


@settings(
    max_examples=150 if ALL else 25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(all_rules(), st.lists(operations(), max_size=14))
def test_random_streams(rules, stream):
    run(Compared(rules), stream)


@nightly(
    lambda both_implementations, capacity: (
        without_kernels(both_implementations) and capacity in (2, 50)
    )
)
@pytest.mark.parametrize("capacity", [2, 7, 50, 1500])
def test_random_sizes(capacity):
    few = 4 if capacity > 1000 else 25
    for seed in range(few if ALL else few // 4):
        rng = np.random.default_rng([seed, capacity])
        run_random_stream(rng, capacity, 20)


# So many rows that the order of eviction is looked for in parts.
@nightly(without_kernels)
# By day each policy and each admission once.
@nightly(
    lambda policy, admission: (
        POLICIES[1:].index(policy) % 4 != ADMISSIONS.index(admission)
    )
)
@pytest.mark.parametrize("admission", ADMISSIONS, ids=str)
@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_long_streams(policy, admission):
    rng = np.random.default_rng(0)
    rules = KeyRules(
        capacity=3000, max_capacity=3000, candidates=2000, **policy, **admission
    )
    compared = Compared(rules)
    for step in range(1, 61):
        # A Zipf distribution that drifts.
        keys = 10 * step + rng.zipf(1.2, 700) % 6000
        keys[rng.random(700) < 0.2] += 10_000 * step
        counts = rng.integers(0, 4, 700).tolist() if step % 2 else None
        # Each fourth time is a clock's that is late.
        moment = [step, step - 3 * (step % 4 == 0)]
        compared.plan(keys.tolist(), counts, moment)
        compared.commit(keys.tolist(), counts, moment)
        compared.score(keys.tolist(), rng.integers(-9, 9, 700).tolist())
        if step % 20 == 0:
            compared.check()
    assert compared.reference.total[1] > 0 or not rules.evicts


@pytest.mark.more
@nightly(without_kernels)
def test_a_full_table_evicts_for_hundreds_of_steps():
    for by in ("lru", "lfu"):
        rules = KeyRules(4000, 4000, 1, policy=by, evicts=True)
        compared = Compared(rules)
        rng = np.random.default_rng(1)
        seen = {i: (int(rng.integers(1, 4)), 0) for i in range(4000)}
        compared.replace(seen, {})
        for step in range(1, 200):
            used = rng.choice(4000 + 40 * step, 300)
            new = np.arange(40) + 4000 + 40 * step
            keys = np.concatenate([used, new]).tolist()
            compared.commit(keys, None, step, [ABSENT] * len(keys))
            if step % 40 == 0:
                # Those that are forgotten and return are new ones.
                compared.remove(used.tolist())
                compared.commit(used.tolist(), None, step, used.tolist())
        compared.check()


def test_hints_may_be_anything():
    compared = Compared(KeyRules(8, 8, 1, policy="lru", evicts=True))
    compared.commit([1, 2, 3], None, 1)
    hints = [INT64.min, INT64.max, -1, 0, 1, 2, 3, 9, 10, 11, 1000, 4]
    keys = [1, 2, 3, 4] * 3
    compared.commit(keys, None, 2, hints)
    compared.check()


def test_a_step_that_fails_changes_nothing():
    rules = KeyRules(4, 6, 5, threshold=2, policy="lru", evicts=True)
    compared = Compared(rules)
    compared.commit([1, 1, 2, 2, 3], None, 1)
    compared.check()
    keys = [1, 3, 4, 5, 6, 7, 8, 2]
    counts = [1, 1, 2, 2, 2, 2, 2, 1]
    compared.plan(keys, counts, 2)
    assert compared.commit(keys, counts, 2).lacking == 2
    compared.check()
    assert compared.table.numbers().capacity == 4


def test_expired_keys_go_before_the_capacity_grows():
    compared = Compared(KeyRules(3, 12, 1, policy="lru", ttl=2))
    compared.commit([1, 2, 3], None, 1)
    compared.commit([2], None, 3)
    assert compared.commit([4], None, 4).evicted == {1}
    assert compared.commit([5, 6, 7, 8], None, 4).evicted == {3}
    compared.check()
    assert compared.table.numbers().capacity == 6


def test_expired_keys_go_once_where_steps_are_numbered_anew():
    rules = KeyRules(4, 4, 1, policy="lru", ttl=3, evicts=True)
    compared = Compared(rules)
    compared.replace({1: (1, 1), 2: (1, 4), 3: (1, 5), 4: (1, 9)}, {})
    # Key 4 was used in step 9, and is used in an earlier one now.
    assert compared.commit([4, 5, 6], None, 6).evicted == {1, 2}
    compared.check()


def test_a_clock_that_jumps_back_evicts_nothing():
    rules = KeyRules(3, 3, 1, policy="lru", ttl=9, by_time=True, evicts=True)
    compared = Compared(rules)
    for step, key in enumerate([1, 2, 3]):
        compared.commit([key], None, [step, 100 + step])
    assert compared.commit([1], None, [4, 5]).evicted == set()
    compared.check()
    # At 102 since then: 2 is the oldest, and 1 was used after it.
    assert compared.commit([4], None, [5, 6]).evicted == {2}
    assert compared.commit([5], None, [6, 103]).evicted == {1}
    compared.check()


def test_a_restored_table_knows_a_later_time_than_its_clock():
    rules = KeyRules(3, 3, 5, threshold=1, policy="lru", ttl=9, by_time=True)
    for seen in ({1: (1, 50)}, {1: (1, 9)}):
        compared = Compared(rules)
        compared.replace(seen, {7: (1, 40)})
        compared.commit([2], None, [1, 3])
        compared.check()
        compared.replace({}, {})
        compared.commit([2], None, [1, 3])
        compared.check()


def test_expired_keys_go_by_age_and_others_by_frequency():
    rules = KeyRules(4, 4, 1, policy="lfu", ttl=5, evicts=True)
    compared = Compared(rules)
    compared.replace({1: (9, 1), 2: (8, 2), 3: (2, 6), 4: (1, 7)}, {})
    assert compared.commit([5], None, 8).evicted == {1}
    assert compared.commit([6, 7], None, 8).evicted == {2, 4}
    compared.check()


def test_a_full_table_evicts_down_to_its_floor_in_one_step():
    rules = KeyRules(10, 10, 1, policy="lru", evicts=True, floor=6)
    compared = Compared(rules)
    compared.commit(list(range(10)), None, 1)
    assert compared.commit([0, 1, 10], None, 2).evicted == {2, 3, 4, 5, 6}
    assert compared.commit([11, 12, 13, 14], None, 3).evicted == set()
    # No key of the step goes.
    keys = [*range(10, 15), 0, 1, 7, 15]
    assert compared.commit(keys, None, 4).evicted == {8, 9}
    compared.check()


def test_a_table_grows_before_it_evicts_down_to_its_floor():
    rules = KeyRules(3, 6, 1, policy="lru", ttl=5, evicts=True, floor=2)
    compared = Compared(rules)
    compared.commit([1, 2, 3], None, 1)
    assert compared.commit([4, 5, 6], None, 2).evicted == set()
    # Expired keys go first, and others too.
    assert compared.commit([7], None, 7).evicted == {1, 2, 3, 4, 5}
    compared.check()


# So many keys go that their order is looked for in parts.
@nightly(without_kernels)
@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_many_keys_go_together(policy):
    rules = KeyRules(3000, 3000, 1, **policy, floor=2000)
    if not rules.evicts:
        return
    compared = Compared(rules)
    rng = np.random.default_rng(0)
    for step in range(1, 40):
        keys = (rng.zipf(1.3, 200) % 4000).tolist()
        new = range(10_000 + 300 * step, 10_300 + 300 * step)
        compared.commit([*keys, *new], None, [step, step])
        compared.score([*new, *keys], rng.integers(-5, 5, 500).tolist())
    assert compared.reference.total[1] > 6000
    compared.check()


def test_frequencies_decay():
    rules = KeyRules(4, 4, 1, policy="decay", half_life=10, evicts=True)
    compared = Compared(rules)
    # Worth 4, 3, 2 and 0 in step 19, and 0 from the end of four half-lives.
    compared.replace({1: (4, 12), 2: (7, 9), 3: (2, 18), 4: (9, -21)}, {})
    compared.commit([5], [3], 19)
    compared.check()
    assert 4 not in compared.rows
    compared.commit([2, 3, 5], None, 20)
    compared.check()
    assert compared.reference.live[2] == Seen(2, 20)
    assert compared.commit([6], None, 31).evicted == {1}
    compared.check()


def test_frequencies_of_all_sizes_decay_alike():
    rules = KeyRules(400, 400, 1, policy="decay", half_life=7, evicts=True)
    rng = np.random.default_rng(0)
    seen = {
        key: (int(2 ** rng.uniform(0, 62.9)), int(rng.integers(-200, 200)))
        for key in range(399)
    }
    seen[399] = 0, 199
    seen |= {400 - i: (2**i - i % 2, 5) for i in range(1, 63)}
    compared = Compared(rules)
    compared.replace(seen, {})
    for i in range(80):
        compared.commit(list(range(500 + 5 * i, 505 + 5 * i)), None, 200 + i)
    compared.check()


def test_rules_of_two_orders_forget_what_the_other_evicts():
    """Entries of keys that the other order evicts are dropped."""
    rules = KeyRules(4, 4, 1, policy="lfu", ttl=2, evicts=True)
    compared = Compared(rules)
    compared.replace({1: (900, 0)}, {})
    for step in range(1, 200):
        keys = [1, 2 * step, 2 * step + 1]
        compared.commit(keys, [0 if step % 50 else 1, 1, 1], step)
    compared.check()


def test_plans_without_a_commit_between_have_other_rows():
    compared = Compared(KeyRules(10, 10, 1))
    compared.commit([1, 2, 3], None, 1)
    shown = [compared.plan([4, 5, 6], None, 2) for _ in range(2)]
    assert not set(shown[0]) & set(shown[1])
    compared.plan([4, 5, 6], None, 2)  # The free rows begin anew.
    compared.commit([4, 5, 6], None, 2)
    compared.check()
    assert compared.table.numbers().physical == FIRST_ROW + 10


def test_a_plan_of_a_full_table_needs_more_rows_once():
    compared = Compared(KeyRules(5, 5, 1, policy="lru", evicts=True))
    for step in range(1, 8):
        keys = range(2 * step, 2 * step + 5)
        compared.plan(list(keys), None, step)
        compared.commit(list(keys), None, step)
    assert compared.table.numbers().physical == FIRST_ROW + 5 + 2


@pytest.mark.parametrize("occurrences", [1, 4])
def test_admission_has_the_probability(occurrences):
    table = KeyTable(KeyRules(20_000, 20_000, 1, probability=0.2, seed=-3))
    keys = np.arange(10_000, dtype=np.int64).repeat(occurrences)
    commit = table.commit(keys, None, keys, 1)
    chance = 1 - 0.8**occurrences
    assert abs(len(commit.new_keys) / 10_000 - chance) < 0.02


def test_replace_keeps_the_candidates_that_were_seen_last():
    compared = Compared(KeyRules(4, 4, 3, threshold=2))
    seen = {key: (1, 50 - abs(key - 70)) for key in range(100)}
    compared.replace({70: (5, 1)}, seen)
    compared.check()
    candidates = candidates_of(compared.table)
    assert sorted(candidates[:, 0]) == [69, 71, 72]
    compared.commit([69, 72, *range(200, 260)], None, 100)
    compared.check()


def test_functions_run_in_the_order_they_are_traced():
    table = KeyTable(KeyRules(4, 4, 1, policy="lru", evicts=True))

    @tf.function
    def inner(keys, step):
        rows = table.reserve(keys, None, step).rows
        commit = table.commit(keys, None, rows, step)
        table.publish(commit.versions)
        return commit

    @tf.function
    def steps(keys, step):
        before = table.info()[0, 0]
        first = inner(keys, step + 1)
        second = inner(keys + 1, step + 2)
        found = table.lookup(keys).rows
        inner(keys + 2, step + 3)
        return before, first, second, found, table.info()[0, 0]

    for number in range(20):
        base = 10 * number
        before, first, second, found, after = steps(
            int64([base, base + 1, base + 2]), int64(base)
        )
        assert [int(before), int(after)] == [min(4, 10 * number), 4]
        assert first.rows.shape == [3]
        assert len(first.new_keys) == 3
        assert second.new_keys.numpy().tolist() == [base + 3]
        np.testing.assert_array_equal(found, first.rows)
        assert base not in live_keys(table).keys
        assert base + 1 in live_keys(table).keys


def test_rows_that_are_written_for_other_keys_are_found_out():
    table = KeyTable(KeyRules(3, 3, 1, policy="lru", evicts=True))

    def commit(keys, step):
        committed = table.commit(int64(keys), None, int64(keys), step)
        table.publish(committed.versions)

    def check(found):
        rows, changed = table.check(found)
        assert int(changed) == np.sum(rows.numpy() != found.rows.numpy())
        return rows.numpy().tolist()

    keys = int64([1, 2, 9])
    commit([1, 2, 3], 1)
    before = table.lookup(keys)
    first, second, _ = before.rows.numpy().tolist()
    assert check(before) == [first, second, ABSENT]
    # Uses of keys, and evictions as such, write no row.
    commit([2, 3], 2)
    table.remove(np.array([2]))
    assert check(before) == [first, second, ABSENT]
    commit([4, 2], 3)  # 4 gets the row that 2 had, and 2 that of 1.
    assert check(before) == [ABSENT] * 3
    # Not of others since, but of their own.
    after = table.lookup(keys)
    assert check(after) == after.rows.numpy().tolist() == [ABSENT, first, 0]
    # A plan's rows are written when another plan shows them.
    table.remove(np.array([3]))
    plan = table.reserve(int64([2, 10]), None, 4)
    planned = table.check(FoundKeys(plan.rows, keys, None, plan.versions))[0]
    np.testing.assert_array_equal(planned, plan.rows)
    table.reserve(int64([11]), None, 4)
    rows, changed = table.check(FoundKeys(plan.rows, keys, None, plan.versions))
    assert (rows.numpy().tolist(), int(changed)) == ([first, ABSENT], 1)


def test_many_threads():
    table = KeyTable(
        KeyRules(500, 500, 50, threshold=3, policy="lfu", evicts=True)
    )
    threads, steps, n = 6, 25, 300
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(steps):
                keys = int64(rng.zipf(1.3, n) % 1000)
                plan = table.reserve(keys, None, 1)
                table.lookup(keys)
                commit = table.commit(keys, None, plan.rows, 1)
                table.publish(commit.versions)
                assert commit.lacking.numpy().item() == 0
                assert table.numbers().size <= 500
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=work, args=[i]) for i in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not errors
    live, total = live_keys(table), table.numbers().total
    assert len(set(live.rows.tolist())) == len(set(live.keys.tolist()))
    assert total[0] - total[1] == len(live.keys) == table.numbers().size
    np.testing.assert_array_equal(table.lookup(live.keys).rows, live.rows)


def test_sums_of_many_threads():
    # Nothing is evicted: every occurrence is counted.
    table = KeyTable(KeyRules(400, 400, 1))
    keys = np.random.default_rng(0).integers(0, 400, [6, 20, 5000])

    def work(mine):
        for step, some in enumerate(mine):
            rows = table.lookup(some).rows
            table.commit(some, None, rows, step)

    pool = [threading.Thread(target=work, args=[mine]) for mine in keys]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    live = live_keys(table)
    np.testing.assert_array_equal(
        live.frequency[np.argsort(live.keys)], np.bincount(keys.reshape(-1))
    )


def test_a_table_that_nobody_has_is_gone():
    def use_one():
        table = KeyTable(KeyRules(4, 4, 1))

        @tf.function
        def step(keys):
            return table.commit(keys, None, keys, tf.constant(1, tf.int64))

        step(int64([1, 2]))
        return weakref.ref(table)

    table = use_one()
    gc.collect()
    assert table() is None


def test_keys_are_sent_by_numbers_that_give_them_back():
    rng = np.random.default_rng(0)
    keys = np.concatenate([EXTREME, rng.integers(INT64.min, INT64.max, 500)])
    for world in (1, 2, 3, 8):
        numbers = key_shards.numbers_of(tf.constant(keys), world)
        assert len(np.unique(numbers)) == len(np.unique(keys))
        np.testing.assert_array_equal(key_shards.keys_of(numbers, world), keys)
        shards = key_shards.shards_of(keys, world)
        np.testing.assert_array_equal(shards, np.mod(numbers, world))
        assert shards.tolist() == [shard_of(int(k), world) for k in keys]


@pytest.mark.parametrize("step", [1, 8, 1000, 2**32, 2**60, 2**32 + 1, -96])
def test_keys_in_steps_fill_all_shards_alike(step):
    keys = (np.arange(8000) * step).astype(np.int64)
    keys = np.unique(keys)
    for world in (2, 3, 8):
        sizes = np.bincount(key_shards.shards_of(keys, world), minlength=world)
        share = len(keys) / world
        assert np.all(abs(sizes - share) <= 4 * np.sqrt(share) + 1)


@pytest.mark.parametrize("size", [0, 1, 40, 400])
def test_tables_together_are_like_each_alone(size):
    """One operation on several tables does what one on each would do."""
    rules = [
        KeyRules(20, 20, 1, policy="lru", evicts=True),
        KeyRules(500, 500, 30, threshold=2),
        KeyRules(10, 640, 1),
    ]
    alone, members = ([KeyTable(r) for r in rules] for _ in range(2))
    together = KeyTable.joined(members)
    rng = np.random.default_rng(size)
    for step in range(1, 9):
        keys = rng.integers(-30, 30, size)
        table_of = rng.integers(3, size=size, dtype=np.int32)
        if step % 3 == 0:
            table_of.sort()
        counts = rng.integers(0, 3, size) if step % 2 else None
        mine = [np.flatnonzero(table_of == i) for i in range(3)]

        def each(function, *values, mine=mine):
            """Calls a function for each table with its own of the values."""
            return [
                function(
                    table, *(v if v is None else int64(v[part]) for v in values)
                )
                for table, part in zip(alone, mine, strict=True)
            ]

        def same(found, wanted, mine=mine):
            rows = found.rows.numpy()
            for i, (part, of_table) in enumerate(
                zip(mine, wanted, strict=True)
            ):
                np.testing.assert_array_equal(rows[part], of_table.rows)
                assert found.lacking[i] == of_table.lacking[0]
                assert found.physical[i] == of_table.physical[0]
                assert found.new_sizes[i] == len(of_table.new_keys)
            for name in ("new_keys", "new_rows"):
                np.testing.assert_array_equal(
                    getattr(found, name),
                    np.concatenate([getattr(w, name) for w in wanted]),
                )

        given = None if counts is None else int64(counts)
        plan = together.reserve(int64(keys), given, step, table_of)
        same(
            plan, each(lambda t, k, c, n=step: t.reserve(k, c, n), keys, counts)
        )
        commit = together.commit(int64(keys), given, plan.rows, step, table_of)
        wanted = each(
            lambda t, k, c, r, n=step: t.commit(k, c, r, n),
            keys,
            counts,
            plan.rows.numpy(),
        )
        same(commit, wanted)
        assert not np.any(
            together.lookup(
                commit.new_keys, np.repeat(range(3), commit.new_sizes)
            ).rows
        )
        together.publish(commit.versions)
        for table, of_table in zip(alone, wanted, strict=True):
            table.publish(of_table.versions)
        found = together.lookup(int64(keys), table_of)
        for part, there in zip(
            mine, each(lambda t, k: t.lookup(k), keys), strict=True
        ):
            np.testing.assert_array_equal(found.rows.numpy()[part], there.rows)
        assert together.check(found)[1] == 0
        members[0].remove(keys)
        alone[0].remove(keys)
    np.testing.assert_array_equal(
        together.info(), np.concatenate([t.info() for t in alone])
    )
