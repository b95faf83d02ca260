"""Plans: what they count, what they choose, what they refuse, how they read."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfrs_embed
from numpy_step_messages import Place, padded, simulate
from tfrs_embed import FeatureConfig, Hardware, Plan, TableConfig, plan
from tfrs_embed.configs.hardware import hardware
from tfrs_embed.configs.parsing import parse
from tfrs_embed.distribution import (
    bag_exchange,
    hot_rows,
    row_exchange,
    vector_exchange,
)
from tfrs_embed.distribution.traffic import Traffic, capacity_of
from tfrs_embed.engines import data_parallel
from tfrs_embed.tools.planner import batches, cost, traffic, usage
from tfrs_embed.tools.planner.candidates import Candidate, Demand, candidates
from tfrs_embed.tools.planner.prediction import CostModel
from tfrs_embed.tools.planner.search import best_step
from traffic_of_ids import FeatureIds, exchange_of_ids, expected_traffic

pytestmark = pytest.mark.tools

few = settings(max_examples=20, deadline=None, derandomize=True, database=None)

CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683]
CRITEO += [8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18]
CRITEO += [15, 286181, 105, 142572]
GPUS = hardware("8xA100")


def features_of(rows, dim=16, **arguments):
    """A feature and a table for each number of rows."""
    return {
        f"f{i}": FeatureConfig(
            f"f{i}", TableConfig(f"t{i}", n, dim, **arguments)
        )
        for i, n in enumerate(rows)
    }


def make_plan(rows=(1000, 50_000), dim=16, **arguments):
    given = {"replicas": 4, "batch_size": 256, "optimizer": "adagrad"}
    return plan(features_of(rows, dim), 1, **{**given, **arguments})


def demands_of(tables, replicas, batch_size=256, exponent=1.05, slots=1):
    """Demands of tables [(rows, dim, hotness)]."""
    found = []
    for i, (rows, dim, hotness) in enumerate(tables):
        table = TableConfig(f"t{i}", rows, dim)
        spec = parse(FeatureConfig(f"f{i}", table))
        used = usage.expected_usage(
            spec.tables[0],
            [(spec.features[0], hotness)],
            batch_size,
            exponent,
            replicas,
        )
        found.append(Demand(f"t{i}", rows, dim, slots * dim, used))
    return found


def predict(demands, places, machine, model=None):
    """The cost of a step with each table in its place."""
    model = model or CostModel(demands, machine, None)
    options = [
        of_table[
            Candidate("table", 1)
            if len(place.ranks) == 1
            else Candidate(place.placement, len(place.ranks))
        ]
        for of_table, place in zip(model.options, places, strict=True)
    ]
    ranks = {i: place.ranks for i, place in enumerate(places) if place.ranks}
    return model.step_on(tuple(options), ranks)


# What a step sends.


@few
@given(st.data())
def test_bytes_and_collectives_by_row_are_those_of_the_messages(data):
    world = data.draw(st.integers(2, 5))
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    tables, places = {}, {}
    for i in range(data.draw(st.integers(1, 5))):
        dim = int(rng.choice([4, 8, 16]))
        rows = int(rng.choice([3, 50, 1000, 2**31 - 1]))
        tables[f"t{i}"] = rows, dim
        places[f"t{i}"] = Place("row")
    ids = [[] for _ in range(world)]
    for table, (rows, _) in tables.items():
        for _ in range(2):
            ragged, weighted = map(bool, rng.integers(2, size=2))
            size = int(rng.choice([1, 3, 12, 20]))
            for features in ids:
                bags = int(rng.integers(1, 20))
                count = int(rng.integers(1, 60)) if ragged else size * bags
                each = rng.integers(0, rows, size=count)
                features.append(FeatureIds(table, each, bags, ragged, weighted))
    exchange = exchange_of_ids(tables, ids)[0]
    sent, calls = simulate(tables, places, ids)
    assert [exchange.bytes] * world == sent
    assert exchange.collectives == calls


def test_the_formulas_by_hand():
    messages = [
        *row_exchange.collectives(8, 16, 4, 4),
        *row_exchange.collectives(10, 32, 4, 4),
        *vector_exchange.collectives(4, 6, 12, 4),
        *bag_exchange.collectives(12, 64, 8, 4),
        *data_parallel.collectives({16: 9}, 4),
        *hot_rows.collectives(100),
    ]
    exchange = traffic.StepTraffic(4, tuple(messages))
    row = 3 * (8 * 9 + 8 * 16 * 8) + 3 * (8 * 11 + 8 * 32 * 10)
    vectors = 4 * 24 + 3 * 4 * 48 + 4 * 48
    slices = 3 * (4 * 12 + 2 * 4 * 64)
    replicated = 9 * (8 + 4 * 16)
    hot = 2 * 3 * 4 * 25
    sent = row + vectors + slices + replicated + hot
    assert exchange.bytes == sent
    passed_on = 2 * (4 * 24 + 4 * 48 + replicated)
    assert exchange.passed_bytes == sent + passed_on
    assert exchange.collectives == 3 * 2 + 3 + (3 + 1) + (2 + 1) + 1 + 1
    assert exchange.rounds == 3 * 2 + 3 + 3 + 2 + 2


def test_what_sharded_tables_alone_send():
    rng = np.random.default_rng(0)
    tables = {"a": (90, 8), "b": (90, 8), "c": (90, 16)}
    sizes = {"a": 3, "b": 3, "c": 15}
    ids = [
        [
            FeatureIds(table, rng.integers(0, 90, (r + 5, size)), r + 5)
            for table, size in sizes.items()
        ]
        for r in range(3)
    ]
    for rank, counted in enumerate(expected_traffic(tables, ids)):
        *by_rows, by_vectors = ids[rank]
        keys = [np.unique(f.ids) for f in by_rows]
        assert counted.unique_keys == sum(map(len, keys)) + 15 * by_vectors.bags
        assert counted.collectives == (1 + 3) + 3
    assert expected_traffic(tables, ids[:1]) == [Traffic(0, 0, 0)]


def test_replicas_without_bags_send_vectors_too():
    ids = [
        [FeatureIds("t", np.zeros((bags, 12), np.int64), bags)]
        for bags in (3, 0)
    ]
    exchange = exchange_of_ids({"t": (100, 16)}, ids)[0]
    assert [m.size for m in exchange.messages] == [4 * 36, 4 * 48, 4 * 48]


def test_on_one_replica_nothing_is_sent():
    ids = [[FeatureIds("t", [1, 2, 3], 3)]]
    exchange = exchange_of_ids({"t": (100, 8)}, ids)[0]
    assert (exchange.bytes, exchange.collectives) == (0, 0)
    assert exchange.rounds == 0


def test_counts_are_rounded_up_to_eight_sizes_per_power_of_two():
    for count in range(0, 2000):
        assert capacity_of(count) == padded(count)


def test_the_longest_of_many_messages():
    rng = np.random.default_rng(0)
    for mean, messages in ((1.4, 256), (30.0, 64), (2000.0, 16)):
        expected = traffic.longest_message(mean, messages)
        longest = rng.poisson(mean, (400, messages)).max(1)
        assert np.mean(longest > expected) < 0.55
        assert np.mean(longest > expected - 1) > 0.45


# How tables are used.


@pytest.mark.parametrize("exponent", [0, 0.8, 1.0, 1.05, 2])
@pytest.mark.parametrize("rows", [1, 5, 4096, 100_000])
def test_unique_ids_are_those_of_the_law(rows, exponent):
    p = np.arange(1, rows + 1) ** -float(exponent)
    p /= p.sum()
    for draws in (1, 100, 20_000):
        occurs = 1 - (1 - p) ** draws
        mean, variance = usage.zipf_unique(rows, exponent, draws)
        assert mean == pytest.approx(occurs.sum(), rel=1e-5)
        wanted = (occurs * (1 - occurs)).sum()
        assert variance == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_unique_ids_are_those_of_samples():
    rng = np.random.default_rng(0)
    p = np.arange(1, 50_001) ** -1.05
    p /= p.sum()
    counts = [np.unique(rng.choice(50_000, 3000, p=p)).size for _ in range(40)]
    mean, variance = usage.zipf_unique(50_000, 1.05, 3000)
    # Of draws without replacement counts vary a little less.
    assert abs(np.mean(counts) - mean) < 4 * math.sqrt(variance / 40)
    assert np.std(counts) < 1.5 * math.sqrt(variance)


def test_no_more_unique_ids_than_rows_or_draws():
    for rows, draws in ((3, 1e6), (10**9, 2.5), (10, 0.5)):
        mean, _ = usage.zipf_unique(rows, 1.05, draws)
        assert 0 < mean <= min(rows, draws)


def test_no_replica_has_more_unique_ids_than_there_are():
    # Nearly all of 1,000 rows occur, and one replica of 1,024 has them all.
    [demand] = demands_of([(1000, 8, 1)], 1024, batch_size=7000, exponent=0)
    assert 999 < demand.usage.unique < demand.usage.most_unique == 1000


FORMS = {
    "dense": np.array([[1, 2], [3, 3], [5, 1]]),
    "tensor": tf.constant([[1, 2], [3, 3], [5, 1]]),
    "lists": [[1, 2], [3, 3], [5, 1]],
    "ragged": tf.ragged.constant([[1, 2], [3, 3], [5, 1]]),
    "sparse": tf.sparse.from_dense([[1, 2], [3, 3], [5, 1]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_in_any_form(form):
    feature = parse(FeatureConfig("f", TableConfig("t", 6, 4)))
    [bags] = batches.read(FORMS[form], feature.features[0], "batches[0]")
    assert bags.values.tolist() == [1, 2, 3, 3, 5, 1]
    assert (bags.samples, bags.bags) == (3, 3)
    assert bags.ragged == (form in ("ragged", "sparse"))
    parts = [bags.part(rank, 2) for rank in range(2)]
    assert [p.values.tolist() for p in parts] == [[1, 2, 3, 3], [5, 1]]


def test_bags_follow_the_feature():
    table = TableConfig("t", 10, 4)

    def read(ids, **arguments):
        spec = parse(FeatureConfig("f", table, **arguments))
        [bags] = batches.read(ids, spec.features[0], "batches[0]")
        return bags

    grid = np.ones((5, 3), np.int32)
    assert read(grid).bags == 5
    assert read(grid, output_shape=[5, 3, 4]).bags == 15
    assert read(grid, output_shape=[5, 4]).bags == 5
    assert read(np.ones(5, np.int64)).bags == 5
    cut = read([[1, 2, 3], [4], []], max_sequence_length=2)
    assert (cut.values.tolist(), cut.bags, cut.ragged) == ([1, 2, 4], 6, True)


def test_batches_are_divided_among_replicas():
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 1000, (64, 3)) for _ in range(4)]
    made = plan(features_of([1000]), [{"f0": i} for i in ids], replicas=4)
    [table] = made.tables
    uniques = [np.unique(p).size for i in ids for p in np.split(i, 4)]
    assert table.hotness == 3
    assert table.unique_share == pytest.approx(np.mean(uniques) / 48)
    assert made.batch_size == 16
    [same] = plan(
        features_of([1000]),
        tf.data.Dataset.from_tensor_slices({"f0": np.stack(ids)}),
        replicas=4,
    ).tables
    assert same == table


def test_batches_with_one_frequent_owner_cost_more_by_row():
    everywhere = {"f0": np.arange(4000)}
    one_owner = {"f0": np.arange(4000) // 1 * 4 % 4000}
    spread, skewed = (
        plan(
            features_of([4000], placement="row"),
            [b],
            replicas=4,
            batch_size=None,
        )
        for b in (everywhere, one_owner)
    )
    assert skewed.sent_bytes > 2 * spread.sent_bytes


def test_features_of_one_table_share_its_rows():
    table = TableConfig("t", 5000, 8)
    features = [FeatureConfig(n, table) for n in "ab"]
    [both] = plan(features, 2, replicas=2, batch_size=100).tables
    [one] = plan(features[0], 4, replicas=2, batch_size=100).tables
    assert both.features == ("0", "1")
    assert (both.hotness, one.hotness) == (4, 4)
    assert both.unique_share == pytest.approx(one.unique_share)


def test_a_hotness_for_each_feature_by_name_or_nesting():
    table = TableConfig("t", 5000, 8)
    nested = {"user": {"id": FeatureConfig("x", table)}}
    nested["item"] = FeatureConfig("y", table)
    for hotness in ({"user/id": 1, "item": 3}, {"x": 1, "y": 3}):
        made = plan(nested, hotness, replicas=2, batch_size=10)
        assert made.tables[0].hotness == 4
    hotness = {"user": {"id": 1}, "item": 3}
    assert plan(nested, hotness, replicas=2, batch_size=10) == made


def test_the_expected_exchange_is_near_that_of_ids():
    world, batch, rows = 4, 2000, 20_000
    demands = demands_of(
        [(rows, 16, 2), (500, 8, 1), (rows, 32, 12)], world, batch
    )
    rng = np.random.default_rng(0)

    def draw(rows, count):
        p = np.arange(1, rows + 1) ** -1.05
        return rng.permutation(rows)[rng.choice(rows, count, p=p / p.sum())]

    order = [
        [
            FeatureIds("t0", draw(rows, 2 * batch), batch),
            FeatureIds("t1", draw(500, batch), batch),
            FeatureIds("t2", draw(rows, 12 * batch), batch),
        ]
        for _ in range(world)
    ]
    for places in (
        [Place("row"), Place("row"), Place("row")],
        [Place("replicated"), Place("replicated"), Place("row")],
        [Place("replicated"), Place("replicated"), Place("replicated")],
        [Place("column", (0, 2)), Place("table", (1,)), Place("row")],
        [Place("column", (0, 2)), Place("table", (1,)), Place("table", (3,))],
    ):
        expected = predict(demands, places, GPUS).exchange
        [exact, *_], calls = simulate(
            {"t0": (rows, 16), "t1": (500, 8), "t2": (rows, 32)},
            dict(zip(["t0", "t1", "t2"], places, strict=True)),
            order,
        )
        assert expected.collectives == calls
        assert expected.bytes == pytest.approx(exact, rel=0.15)
        if places[2].placement == "row":
            vectors = set(vector_exchange.collectives(batch, 12, 32, 4))
            assert vectors <= {*expected.messages}
        if places[0].ranks:
            assert expected.bytes == exact


def test_a_table_may_be_asked_for_rows_and_for_vectors():
    table = TableConfig("t", 10**6, 16)
    features = [FeatureConfig(name, table) for name in ("one", "many")]

    def expected(hotness, keyed=False):
        spec = parse(features)
        used = usage.expected_usage(
            spec.tables[0],
            list(zip(spec.features, hotness, strict=True)),
            1000,
            1.05,
            2,
        )
        demand = Demand("t", 10**6, 16, 16, used, keyed=keyed)
        machine = hardware("cpu")
        found = predict([demand], [Place("row")], machine)
        return found.exchange, found.time

    (both, both_time), (rows, rows_time) = (
        expected([4, 12]),
        expected([8.5, 7.5]),
    )
    # Of all ids a fourth is by rows.
    assert [each.size for each in both.messages[3:]] == [
        4 * capacity_of(12_000),
        4 * capacity_of(16_000),
        4 * capacity_of(16_000),
    ]
    assert both.messages[1].size == pytest.approx(
        rows.messages[1].size / 4, rel=0.15
    )
    assert both.collectives == rows.collectives + 3 == 7
    assert both_time.memory < rows_time.memory
    assert both_time.operations > rows_time.operations
    vectors, _ = expected([12, 12])
    kinds = [each.kind for each in vectors.messages]
    assert kinds == ["all_gather", "all_to_all", "all_gather"]
    assert vectors.bytes < rows.bytes
    # Of keys all go by rows, and so do bags of different numbers of ids.
    for others in (expected([12, 12], keyed=True), expected([12.5, 12.5])):
        assert {m.kind for m in others[0].messages} == {"all_to_all"}


def test_the_longest_message_is_that_of_all_pairs():
    [demand] = demands_of([(10**6, 16, 1)], 8, batch_size=200)
    mean = demand.usage.unique / 8
    exchange = predict([demand], [Place("row")], GPUS).exchange
    longest = traffic.longest_message(mean, 64)
    assert [*exchange.messages] == row_exchange.collectives(longest, 16, 4, 4)
    assert capacity_of(longest) > 1.3 * capacity_of(mean)


# What is chosen.


def test_candidates():
    names = [
        (c.placement, c.slices)
        for c in candidates(demands_of([(100, 24, 1)], 8)[0], 8)
    ]
    assert names == [
        ("table", 1),
        ("column", 2),
        ("column", 4),
        ("row", 0),
        ("replicated", 0),
    ]
    [two] = demands_of([(100, 64, 1)], 2)
    assert Candidate("column", 4) not in candidates(two, 2)
    [narrow] = demands_of([(100, 4, 1)], 8)
    assert not [c for c in candidates(narrow, 8) if c.placement == "column"]
    [large] = demands_of([(2**31, 24, 1)], 8)
    assert candidates(large, 8) == (
        Candidate("row"),
        Candidate("replicated"),
    )


TABLES = st.lists(
    st.tuples(
        st.sampled_from([3, 50, 1000, 40_000, 2_000_000]),
        st.sampled_from([4, 8, 32]),
        st.sampled_from([1, 3, 20]),
    ),
    min_size=1,
    max_size=4,
)


@few
@given(TABLES, st.sampled_from(["8xA100", "cpu"]), st.floats(0.3, 3.0))
def test_a_plan_is_within_five_percent_of_the_best_of_all(
    tables, topology, room
):
    world, machine = 2, hardware(topology)
    demands = demands_of(tables, world)
    limit = int(room * sum(d.bytes for d in demands) / world) + 1
    options = [
        [
            Place("row"),
            Place("replicated"),
            Place("table", (0,)),
            Place("table", (1,)),
            *([Place("column", (0, 1))] if d.dim >= 8 else []),
        ]
        for d in demands
    ]
    best, model = math.inf, CostModel(demands, machine, None)
    for places in itertools.product(*options):
        predicted = predict(demands, places, machine, model)
        if predicted.memory.max() <= limit:
            best = min(best, predicted.seconds)
    found = best_step(CostModel(demands, machine, limit))
    if best == math.inf:
        assert found.excess
    else:
        assert not found.excess
        assert best * (1 - 1e-12) <= found.seconds <= best * 1.05


@few
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3_000_000),
            st.sampled_from([4, 8, 12, 64]),
            st.sampled_from([0.5, 1, 7]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1, 2, 7, 16, 64]),
    st.sampled_from(["8xA100", "cpu", "2xV100", "4xcpu"]),
    st.one_of(st.none(), st.floats(1.05, 4.0)),
)
def test_no_alternative_that_fits_is_better(tables, world, topology, room):
    features = {
        f"f{i}": FeatureConfig(f"f{i}", TableConfig(f"t{i}", rows, dim))
        for i, (rows, dim, _) in enumerate(tables)
    }
    # What sharding by row takes is enough.
    limit = None
    if room is not None:
        limit = int(sum(-(-r // world) * d * 8 for r, d, _ in tables) * room)
    made = plan(
        features,
        {f"f{i}": hotness for i, (*_, hotness) in enumerate(tables)},
        replicas=world,
        topology=topology,
        memory_per_replica=limit,
        optimizer="adagrad",
        batch_size=128,
    )
    held = [0] * world
    for table in made.tables:
        size = table.dim * 4 * 2
        for row in range(world):
            rows = len(range(row, table.rows, world))
            held[row] += size * rows if table.placement == "row" else 0
        for rank in table.ranks:
            held[rank] += table.rows * size // len(table.ranks)
        if table.placement == "replicated":
            held = [h + table.rows * size for h in held]
    assert held == [r.bytes for r in made.per_replica]
    if limit is not None:
        assert max(held) <= limit
    assert made.total_bytes == sum(r * d * 8 for r, d, _ in tables)
    assert Plan.from_json(made.to_json()) == made


def test_one_demand_has_one_plan():
    one, other = (
        make_plan(CRITEO, 64, replicas=16, memory_per_replica=3 * 10**9)
        for _ in range(2)
    )
    assert one == other
    assert str(one) == str(other)


def test_a_thousand_replicas_take_seconds():
    start = time.perf_counter()
    made = make_plan(CRITEO, 128, replicas=1024, batch_size=64)
    assert time.perf_counter() - start < 30
    assert "least" in str(made)
    assert len(made.per_replica) == 1024


def mixed_tables(seed, count):
    rng = np.random.default_rng(seed)
    return [
        (
            int(10 ** rng.uniform(1, 6)),
            int(rng.choice([8, 16, 64])),
            float(rng.choice([1, 1, 5, 20])),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "world, topology, room",
    [
        (3, "8xA100", None),
        (4, "cpu", 1.5),
        (4, "2xcpu", None),
        (3, "2xcpu", 1.1),
        (4, "8xH100", 1.2),
    ],
)
def test_a_plan_is_near_the_best_of_all_choices(world, topology, room):
    machine, ratios = hardware(topology), []
    for seed in range(5 - world):
        demands = demands_of(mixed_tables(seed, 5), world)
        limit = None
        if room is not None:
            limit = int(room * sum(d.bytes for d in demands) / world)
        model = CostModel(demands, machine, limit)
        choices = itertools.product(*(o.values() for o in model.options))
        best = min(model.step(choice).key for choice in choices)
        found = best_step(CostModel(demands, machine, limit))
        assert found.excess == best[0]
        ratios.append(found.seconds / best[1])
        places = [
            Place(model.candidates[option].placement, found.ranks.get(i, ()))
            for i, option in enumerate(found.choice)
        ]
        predicted = predict(demands, places, machine)
        assert predicted.seconds == pytest.approx(found.seconds, rel=1e-12)
        assert predicted.most == found.most
    assert max(ratios) < 1.05


def test_no_group_of_tables_is_faster_elsewhere_where_memory_is_short():
    demands = demands_of(mixed_tables(6, 16), 8)
    limit = int(1.03 * sum(-(-d.rows // 8) * d.state_bytes for d in demands))
    model = CostModel(demands, GPUS, limit)
    best = best_step(model)
    assert not best.excess
    groups = {}
    for i, option in enumerate(best.choice):
        kind = demands[i].dim, model.candidates[option].placement
        groups.setdefault(kind, []).append(i)
    for group in [*groups.values(), *([i] for i in range(16))]:
        for candidate in model.options[group[0]]:
            choice = list(best.choice)
            for i in group:
                choice[i] = model.options[i].get(candidate, choice[i])
            assert model.step(choice).key >= best.key


def test_a_hundred_tables_take_a_second_or_two():
    """Eight, if each table of a choice would be predicted by itself."""
    tables = mixed_tables(0, 100)
    features = {
        f"f{i}": FeatureConfig(f"f{i}", TableConfig(f"t{i}", rows, dim))
        for i, (rows, dim, _) in enumerate(tables)
    }
    start = time.process_time()
    plan(
        features,
        {f"f{i}": hotness for i, (*_, hotness) in enumerate(tables)},
        replicas=8,
        batch_size=1024,
        optimizer="adagrad",
    )
    assert time.process_time() - start < 5


def test_less_memory_is_never_faster():
    seconds = [
        make_plan(CRITEO, 16, memory_per_replica=limit).seconds
        for limit in (2 * 10**9, 3 * 10**9, 6 * 10**9)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_owners_are_chosen_by_load_among_those_with_memory():
    """A has most to do; B and C are large; all replicas have a copy of D."""
    a, b, c, d = demands_of(
        [(10, 8, 50), (1000, 8, 1), (990, 8, 1), (5000, 8, 1)], 2
    )
    choice = (*[Candidate("table", 1)] * 3, Candidate("replicated"))

    def owners(limit):
        model = CostModel([a, b, c, d], GPUS, limit)
        options = zip(model.options, choice, strict=True)
        found = model.step(of_table[each] for of_table, each in options)
        return [found.ranks.get(i, ()) for i in range(4)]

    assert owners(None) == [(0,), (1,), (1,), ()]
    limit = d.bytes + b.bytes + a.bytes
    assert owners(limit) == [(0,), (1,), (0,), ()]


def test_owners_are_balanced():
    made = plan(
        features_of([1000] * 8, 8),
        1,
        replicas=4,
        batch_size=1000,
        # Memory for a fourth of the tables, and nothing to gain by columns.
        memory_per_replica=2 * 1000 * 8 * 4,
        topology=Hardware("slow", 4, None, 1e9, 1e12, 1e12, 0.0, 0.0, 0.0),
    )
    assert {t.placement for t in made.tables} == {"table"}
    assert sorted(t.ranks[0] for t in made.tables) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert made.imbalance == 1
    assert [r.lookups for r in made.per_replica] == [8000] * 4


def test_numbers_of_two_bytes_halve_what_is_sent_but_keys():
    features = features_of([10**6], 64, placement="row")
    exact, made = (
        plan(features, 1, replicas=4, batch_size=256, communication_dtype=dtype)
        for dtype in ("float32", tf.bfloat16)
    )
    keys = 2 * made.sent_bytes - exact.sent_bytes
    assert exact.sent_bytes / 70 < keys < exact.sent_bytes / 60
    assert made.seconds < exact.seconds
    assert "sent per replica as bfloat16," in str(made)
    assert Plan.from_json(made.to_json()) == made
    stored = json.loads(made.to_json())
    del stored["communication_dtype"]  # As of an older version.
    older = Plan.from_json(json.dumps(stored))
    assert older.communication_dtype == "float32"
    with pytest.raises(ValueError, match="communication_dtype must be one of"):
        make_plan(communication_dtype="int8")


def test_one_replica_has_all_tables():
    made = make_plan(replicas=1)
    assert {(t.placement, t.ranks) for t in made.tables} == {("table", (0,))}
    assert (made.sent_bytes, made.collectives) == (0, 0)
    assert made.per_replica[0].bytes == 51_000 * 16 * 4 * 2


def test_a_tables_own_wishes_are_kept():
    keys = tfrs_embed.DynamicKeys()
    tables = [
        TableConfig("sharded", 10, 8, placement="sharded"),
        TableConfig("copied", 10**6, 8, placement="default_device"),
        TableConfig("keyed", 10, 8, keys=keys),
        TableConfig("free", 1000, 8),
    ]
    made = plan(
        {t.name: FeatureConfig(t.name, t) for t in tables},
        1,
        replicas=4,
        batch_size=100,
    )
    places = {t.table: (t.placement, t.reason) for t in made.tables}
    assert places["sharded"] == ("row", "placement='sharded'")
    assert places["copied"] == ("replicated", "placement='default_device'")
    assert places["keyed"] == ("row", "its keys are int64")
    assert "more" in places["free"][1]


def users(hot_rows, placement="auto", rows=10**6):
    table = TableConfig(
        "users", rows, 128, placement=placement, hot_rows=hot_rows
    )
    return {"user": FeatureConfig("user", table)}


def frequent_of_one_owner():
    """Batches of 8 replicas whose 4,000 frequent ids are all of rank 0."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4000, [2, 8 * 16384]) * 8
    ids[:, ::32] = rng.integers(0, 10**6, ids[:, ::32].shape)
    return [{"user": each} for each in ids]


def test_hot_rows_are_copied_where_that_pays():
    arguments = {"replicas": 8, "optimizer": "adagrad"}
    limited = {**arguments, "memory_per_replica": 300_000_000}
    made = plan(users(4000), frequent_of_one_owner(), **limited)
    [table] = made.tables
    assert table.placement == "row"
    assert set(range(0, 32000, 8)) >= set(table.hot_rows)
    assert len(table.hot_rows) == 4000
    assert table.hot_rows == tuple(sorted(table.hot_rows))
    assert "row takes" in table.reason
    assert "row, 4,000 hot" in str(made)
    assert Plan.from_json(made.to_json()) == made
    # Where frequent ids have different owners, copies save next to nothing.
    spread = [
        {"user": ids["user"] * 7919 % 999_983}
        for ids in frequent_of_one_owner()
    ]
    free = plan(users(4000), spread, **limited)
    assert free.tables[0].placement == "row"
    assert free.tables[0].hot_rows == ()
    assert "row with hot rows takes" in free.tables[0].reason
    # What a user asks for is kept, and counted.
    asked = plan(users(4000, "row"), spread, **limited)
    assert len(asked.tables[0].hot_rows) == 4000
    assert asked.tables[0].reason == "placement='row'"
    copies = asked.per_replica[0].bytes - free.per_replica[0].bytes
    assert copies == 4000 * 128 * 4 * 2
    assert asked.seconds > free.seconds


def test_hot_rows_count_as_memory():
    arguments = {"batch_size": 64, "optimizer": "adagrad"}
    table = users(range(500), "row", 1000)
    [alone] = plan(table, 1, replicas=1, **arguments).per_replica
    assert alone.bytes == 1000 * 128 * 4 * 2
    limit = (100 + 500) * 128 * 4 * 2
    with pytest.raises(ValueError, match="or 10 replicas, sharded by row"):
        plan(table, 1, replicas=9, memory_per_replica=limit, **arguments)
    made = plan(table, 1, replicas=10, memory_per_replica=limit, **arguments)
    assert {each.bytes for each in made.per_replica} == {limit}


def test_the_expected_exchange_with_hot_rows_is_near_that_of_ids():
    ids = [
        [FeatureIds("users", part, part.size)]
        for part in np.split(frequent_of_one_owner()[0]["user"], 8)
    ]
    hot = tuple(range(0, 8000, 8))
    exact, _ = exchange_of_ids({"users": (10**6, 128)}, ids, {"users": hot})
    assert exact.messages[-1] == ("all_reduce", 4 * 1000 * 129)
    expected = plan(users(hot, "row"), frequent_of_one_owner(), replicas=8)
    assert expected.collectives == exact.collectives == 1 + 3 + 1
    assert abs(expected.sent_bytes / exact.bytes - 1) < 0.1


def test_hot_rows_of_a_hotness_are_the_most_frequent():
    ranks = np.arange(1, 10_001) ** -1.05
    p = ranks / ranks.sum()
    known = (1 - np.exp(5000 * np.log1p(-p)))[:200].sum()
    found, _ = usage.zipf_unique(10_000, 1.05, 5000, 200)
    assert abs(found / known - 1) < 1e-6
    far, _ = usage.zipf_unique(10_000, 1.05, 5000, 10_000)
    every, _ = usage.zipf_unique(10_000, 1.05, 5000)
    assert abs(far / every - 1) < 1e-6


def test_the_most_frequent_rows_are_counted():
    tables = [
        TableConfig("a", 50, 8, hot_rows=3),
        TableConfig("b", 50, 8, hot_rows=9),
        TableConfig("c", 50, 8),
    ]
    features = [FeatureConfig(t.name, t) for t in (*tables, tables[0])]
    batches_read = 0

    def stream():  # Of more batches than a plan reads.
        nonlocal batches_read
        for _ in range(50):
            batches_read += 1
            ragged = tf.ragged.constant([[7, 4], [7]])
            yield [[1, 7, 2], ragged, [[1], [2]], np.array([2, 2, 1])]

    # Equally frequent ones in order; no more than there are.
    expected = {"a": (2, 1, 7), "b": (7, 4)}
    assert tfrs_embed.hot_rows(features, stream()) == expected
    assert batches_read == 50
    for features, ids, message in (
        (FeatureConfig("f", tables[2]), [[1]], r"least one of \['c'\] a Table"),
        (FeatureConfig("f", tables[0]), [], "batches has no batches"),
        (FeatureConfig("f", tables[0]), [[1, 50]], r"id 50 is not in \[0, 50"),
    ):
        with pytest.raises(ValueError, match=message):
            tfrs_embed.hot_rows(features, ids)
    with pytest.raises(TypeError, match=r"batches must be a list or dataset"):
        tfrs_embed.hot_rows(FeatureConfig("f", tables[0]), 3)


def test_keys_of_strings():
    table = TableConfig("t", 100, 8, keys=tfrs_embed.DynamicKeys(tf.string))
    for ids in (
        ["a", "b", "a"],
        tf.constant(["a", "b", "a"]),
        [["a"], ["b", "a"]],
    ):
        made = plan({"f": FeatureConfig("f", table)}, [{"f": ids}], replicas=2)
        assert made.tables[0].placement == "row"


def test_slots_are_those_of_the_optimizer():
    tables = [
        TableConfig("own", 1000, 8, optimizer="adam"),
        TableConfig("the layer's", 1000, 8),
    ]
    features = {t.name: FeatureConfig(t.name, t) for t in tables}

    def sizes(optimizer):
        made = plan(features, 1, replicas=2, batch_size=10, optimizer=optimizer)
        return [t.bytes // (1000 * 8 * 4) for t in made.tables]

    assert sizes(None) == [3, 1]
    assert sizes("adagrad") == [3, 2]
    assert sizes(tf.tpu.experimental.embedding.FTRL()) == [3, 3]


def test_a_small_hot_table_is_copied_and_a_large_one_is_not():
    made = plan(
        features_of([200, 20_000_000], 64),
        {"f0": 30, "f1": 1},
        replicas=8,
        batch_size=4096,
        memory_per_replica=2 * 10**9,
        optimizer="adagrad",
    )
    small, large = made.tables
    assert small.placement == "replicated"
    assert large.placement == "row"
    assert "replicated" in large.reason and "fit" in large.reason


def test_time_is_shared_on_one_machine():
    demands = demands_of([(100_000, 32, 1)], 4)
    places = [Place("row")]
    alone = dataclasses.replace(hardware("cpu"), shared=False)
    one, other = (
        predict(demands, places, machine).time
        for machine in (hardware("cpu"), alone)
    )
    assert one.memory == pytest.approx(4 * other.memory)
    assert one.transfer == pytest.approx(4 * other.transfer)
    assert one.latency == other.latency


def test_each_machine_has_its_own_memory():
    demands = demands_of([(100_000, 32, 1)], 8)
    one, two, uneven = (
        predict(demands, [Place("row")], hardware(name)).time
        for name in ("cpu", "4xcpu", "5xcpu")
    )
    assert one.memory == pytest.approx(2 * two.memory)
    # The fullest of them decides.
    assert uneven.memory == pytest.approx(5 / 4 * two.memory)
    assert two.latency == pytest.approx(2 * one.latency)


def test_the_fitted_times_on_a_cpu():
    """Seconds of a byte in memory, an id, a table, a byte sent, a call."""
    [demand] = demands_of([(100_000, 32, 1)], 2)
    ids = 2 * demand.usage.ids  # Of both replicas.
    for place, a_byte, an_id, a_table in (
        (Place("row"), 3.46e-11, 5.15e-8, 7.7e-5),
        (Place("table", (0,)), 1.92e-11, 7.69e-9, 6.3e-5),
        # Columns that cannot be cut are a whole table.
        (Place("column", (0,)), 1.92e-11, 7.69e-9, 6.3e-5),
        # Either slice is half a row, and finds the id for itself.
        (Place("column", (0, 1)), 1.92e-11, 2.31e-8, 8.4e-5),
    ):
        predicted = predict([demand], [place], hardware("cpu"))
        # Eight passes.
        assert predicted.time.memory == pytest.approx(
            ids * (8 * 32 * 4 * a_byte + an_id), rel=0.01
        )
        assert predicted.time.operations == pytest.approx(a_table, rel=0.05)
        sent = 2 * predicted.exchange.bytes
        assert predicted.time.transfer == pytest.approx(
            sent * 2.95e-11, rel=0.01
        )
        assert predicted.time.latency == pytest.approx(
            predicted.exchange.collectives * 8e-4
        )
    [many] = demands_of([(100_000, 32, 12)], 2)
    predicted = predict([many], [Place("row")], hardware("cpu"))
    # Eight passes over rows; on both replicas eight over vectors of all bags.
    assert predicted.time.memory == pytest.approx(
        2 * many.usage.ids * (8 * 32 * 4 * 3.85e-12 + 1.69e-8)
        + 2 * 2 * 256 * 8 * 32 * 4 * 7.69e-11,
        rel=0.01,
    )
    assert predicted.time.operations == pytest.approx(1.75e-4)
    predicted = predict([demand], [Place("replicated")], hardware("cpu"))
    # Four passes over a replica's own ids, four over the unique ids of both.
    moved = 4 * (ids + 2 * 2 * demand.usage.unique) * 32 * 4
    assert predicted.time.memory == pytest.approx(
        moved * 3.46e-11 + ids * 6.92e-8, rel=0.01
    )
    assert predicted.time.operations == pytest.approx(9.1e-5)


def test_the_page_has_the_weights():
    page = pathlib.Path(__file__).parents[1] / "docs/planning.md"
    text = " ".join(page.read_text("utf-8").split())
    w, b, o = (
        {kind: weights[i] for kind, weights in cost.WEIGHTS.items()}
        for i in range(3)
    )
    for sentence in (
        f"row {w['row']}, table {w['table']}, column {w['column']}, replicated "
        f"{w['replicated']}, by vectors {w['vectors']}.",
        f"{b['row']} bytes by row, {b['table']} on its table's replica, "
        f"{b['column']} for each slice of columns, {b['replicated']} in a "
        f"copy, {b['vectors']} by vectors",
        f"{o['row']:g} for each table that is sharded by row, "
        f"{o['replicated']:g} more with hot rows, {o['vectors']:g} for each "
        f"feature that is exchanged by vectors, {o['table']:g} for each whole "
        f"table, {o['column']:g} for each slice of columns, "
        f"{o['replicated']:g} for a replicated table.",
    ):
        assert sentence in text


@pytest.mark.parametrize(("dim", "replicas"), [(5, 4), (64, 1)])
def test_columns_that_cannot_be_cut_are_one_slice(dim, replicas):
    table = TableConfig("t", 100, dim, placement="column")
    made = plan(FeatureConfig("f", table), 1, replicas=replicas, batch_size=10)
    assert made.tables[0].placement == "table"
    assert made.tables[0].ranks == (0,)
    assert made.tables[0].reason == "placement='column'"


def test_bytes_leave_the_host_on_its_slower_links():
    [demand] = demands_of([(1_000_000, 32, 4)], 16, 4096)
    predicted = predict([demand], [Place("row")], GPUS)
    share = 8 / 15
    assert predicted.time.transfer == pytest.approx(
        predicted.exchange.bytes * share / GPUS.outside_bandwidth
    )
    assert predicted.exchange.replicas == 16


# What can't be.


def numbers_in(message):
    return [int(n) for n in re.findall(r"memory_per_replica=(\d+)", message)]


@pytest.mark.parametrize("rows", [[1000, 50_000], [7] * 5, CRITEO])
def test_what_would_fit_fits(rows):
    total = sum(rows) * 16 * 4 * 2
    limit = total // 8
    with pytest.raises(ValueError, match="don't fit") as error:
        make_plan(rows, memory_per_replica=limit)
    message = str(error.value)
    assert f"{total} bytes" in message
    given, enough = numbers_in(message)
    assert given == limit
    assert f"{enough - limit} bytes" in message
    make_plan(rows, memory_per_replica=enough)
    if found := re.search(r"or ([\d,]+) replicas", message):
        replicas = int(found[1].replace(",", ""))
        made = make_plan(rows, replicas=replicas, memory_per_replica=limit)
        assert made.replicas == replicas


def test_the_memory_that_would_do_is_that_of_rows():
    """Where whole tables would be faster, and take more on one replica."""
    with pytest.raises(ValueError, match=f"={4000 * 16 * 4 // 2} would do"):
        plan(
            features_of([1000, 3000], 16),
            10,
            replicas=2,
            batch_size=2048,
            topology="cpu",
            memory_per_replica=1000,
        )


def test_what_no_number_of_replicas_can_hold():
    table = TableConfig("t", 1000, 8, placement="default_device")
    with pytest.raises(ValueError, match="no number of replicas would"):
        plan(
            FeatureConfig("f", table),
            1,
            replicas=4,
            batch_size=10,
            memory_per_replica=1000 * 8 * 4 - 1,
        )


TWO = features_of([10, 20], 8)
#: What is wrong, the arguments, and what the error says.
WRONG = [
    (
        "hotness",
        (TWO, {"f0": 1, "f1": 0}),
        {},
        "Feature 'f1' .table 't1'.: hot",
    ),
    ("hotness", (TWO, {"f0": 1, "f1": math.nan}), {}, "be finite, got nan"),
    ("keys", (TWO, {"f0": 1}), {}, r"missing keys \['f1'\]"),
    ("keys", (TWO, {"f0": 1, "f1": 1, "f2": 1}), {}, r"unknown keys \['f2'\]"),
    ("keys", (list(TWO.values()), {"a": 1}), {}, r"keys \['a'\]"),
    (
        "no batch_size",
        (TWO, 1),
        {"batch_size": None},
        "batch_size must be given",
    ),
    (
        "batch_size",
        (TWO, 1),
        {"batch_size": 0},
        "batch_size must be an integer",
    ),
    ("batch_size", (TWO, [{"f0": [1], "f1": [1]}]), {}, "is for a hotness"),
    ("exponent", (TWO, 1), {"zipf_exponent": -1}, "zipf_exponent must be"),
    ("replicas", (TWO, 1), {"replicas": 0}, "replicas must be an integer >= 1"),
    ("replicas", (TWO, 1), {"replicas": True}, "replicas must be an integer"),
    (
        "replicas",
        (TWO, 1),
        {"replicas": None, "topology": "cpu"},
        "replicas must be given",
    ),
    ("memory", (TWO, 1), {"memory_per_replica": 0}, "memory_per_replica must"),
    ("topology", (TWO, 1), {"topology": "8xB9"}, "Known are 8xV100, 8xA100"),
    ("optimizer", (TWO, 1), {"optimizer": "adgrad"}, "unknown optimizer"),
    ("no features", ({}, 1), {}, "has no features"),
    (
        "hot rows",
        (features_of([10], 8, hot_rows=3), 1),
        {},
        "Table 't0': hot_rows=3 .* give batches, or the rows' ids",
    ),
    (
        "place",
        (FeatureConfig("f", TableConfig("t", 9, 8, placement="sparsecore")), 1),
        {},
        "Table 't': placement='sparsecore' can't be planned",
    ),
]


@pytest.mark.parametrize("arguments, changes, message", [w[1:] for w in WRONG])
def test_wrong_values(arguments, changes, message):
    given = {"replicas": 2, "batch_size": 10}
    with pytest.raises(ValueError, match=message):
        plan(*arguments, **{**given, **changes})


@pytest.mark.parametrize(
    "given, kind, message",
    [
        ([], ValueError, "has no batches"),
        ([{"f0": [1]}], ValueError, r"missing keys \['f1'\]"),
        ([{"f0": [], "f1": []}], ValueError, r"batches\[0\] has no samples"),
        (
            [{"f0": [1], "f1": [20]}],
            ValueError,
            r"batches\[0\]: Feature 'f1' \(table 't1'\): id 20 is not in",
        ),
        ([{"f0": [-1], "f1": [2]}], ValueError, "id -1 is not in"),
        ([{"f0": [0.5], "f1": [2]}], TypeError, "integers, got float64"),
        ([{"f0": ["a"], "f1": [2]}], TypeError, "ids must be integers"),
        ([{"f0": 3, "f1": [2]}], ValueError, "no batch dimension"),
        ([{"f0": [object()], "f1": [2]}], TypeError, "got object"),
        ([{"f0": [[[1], [1, 2]]], "f1": [2]}], ValueError, "Feature 'f0'"),
        (
            [{"f0": tf.ragged.constant([[[1]]]), "f1": [2]}],
            ValueError,
            "Feature 'f0' .* must have rank 2",
        ),
        ({"f0": 1, "f1": [2]}, TypeError, "Feature 'f1' .*must be a number"),
        (np.ones(3), TypeError, "list or dataset of global batches"),
        (None, TypeError, "got NoneType"),
        (True, TypeError, "got bool"),
    ],
)
def test_wrong_batches(given, kind, message):
    with pytest.raises(kind, match=message):
        plan(TWO, given, replicas=2)


def test_no_more_batches_are_read_than_needed():
    def endless():
        while True:
            yield {"f0": [1, 2], "f1": [3, 4]}

    assert plan(TWO, endless(), replicas=2).batch_size == 1


# Hardware.


def test_topologies():
    assert hardware("8xA100").memory_bandwidth == 2.0e12
    assert hardware("H100").inside_bandwidth == 450e9
    assert hardware("16xh100").replicas_per_host == 16
    assert hardware("cpu").replicas_per_host is None
    assert hardware("4xcpu").on_host(16) == 4
    assert [GPUS.levels(n) for n in (8, 9, 256, 257)] == [1, 2, 2, 3]
    assert hardware(GPUS) is GPUS
    with pytest.raises(TypeError, match="string such as '8xA100'"):
        hardware(8)


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"name": ""}, TypeError),
        ({"replicas_per_host": 0}, ValueError),
        ({"memory": 1.5}, ValueError),
        ({"memory_bandwidth": 0}, ValueError),
        ({"latency": -1}, ValueError),
        ({"message": math.inf}, ValueError),
        ({"shared": 1}, TypeError),
        ({"bandwidth": 1}, TypeError),
    ],
)
def test_wrong_hardware(changes, kind):
    with pytest.raises(kind, match=next(iter(changes))):
        Hardware(**{**dataclasses.asdict(GPUS), **changes})


# JSON.


def change(path, value):
    """A plan's JSON with another value in one place; ... removes it."""
    made = json.loads(make_plan(memory_per_replica=4_000_000).to_json())
    node = made
    *folders, last = path
    for key in folders:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(made)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["replicas"], ..., r"plan lacks the fields \['replicas'\]"),
        (["cost"], 1, r"plan has the unknown fields \['cost'\]"),
        (["replicas"], 4.0, "plan.replicas must be an integer, got 4.0"),
        (["replicas"], True, "plan.replicas must be an integer, got true"),
        (["replicas"], 3, "plan: A plan for 3 replicas must have one entry"),
        (["seconds"], "1", 'plan.seconds must be a number, got "1"'),
        (["tables"], {}, "plan.tables must be a list"),
        (["tables"], [], "different names"),
        (["tables", 1, "rows"], None, r"plan.tables\[1\].rows must be an int"),
        (["tables", 1, "place"], 1, r"plan.tables\[1\] has the unknown"),
        (["tables", 1, "placement"], "rows", r"\[1\].placement must be one of"),
        (["tables", 1, "ranks"], [0, 1, 2], "can't have the ranks"),
        (["tables", 0, "features"], "f0", "features must be a list"),
        (["tables", 0, "features"], [1], r"features\[0\] must be a string"),
        (["tables", 0, "table"], "t1", "different names"),
        (["hardware", "latency"], -1, "plan.hardware: Hardware: latency"),
        (["hardware", "shared"], 0, "must be true or false, got 0"),
        (["per_replica", 2, "rank"], 1, "one entry for each"),
        (["tables", 0, "hot_rows"], [1000], "'t0': hot_rows has the id 1000"),
        (["tables", 1, "hot_rows"], [1.5], r"hot_rows\[0\] must be an integer"),
    ],
)
def test_wrong_json(path, value, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(change(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"replicas": NaN}'])
def test_no_json(text):
    with pytest.raises(ValueError, match=r"^(The )?plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 200_000, "recursion"),
        ('{"seconds": 1%s}' % ("0" * 400), "more than 64 bits"),
        ("1" * 5000, "more than 64 bits"),
        ('{"seconds": 1e400}', "1e400 is no finite number"),
        ('{"seconds": -Infinity}', "-Infinity is no finite number"),
        ('{"a": 1, "b": 2, "a": 3}', "the field 'a' twice"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"\0", "Expecting value"),
        (7, "must be str"),
    ],
    ids=str,
)
def test_json_of_anybody_is_refused_with_a_value_error(text, message):
    with pytest.raises(ValueError, match=f"The plan is not JSON.*{message}"):
        Plan.from_json(text)


def test_a_plan_has_each_tables_optimizer_and_dtype():
    features = features_of([100], 8, optimizer="adam", dtype="bfloat16")
    features["g"] = FeatureConfig("g", TableConfig("g", 100, 8))
    made = plan(features, 1, replicas=2, batch_size=8)
    assert [(t.optimizer, t.dtype) for t in made.tables] == [
        ("Adam", "bfloat16"),
        ("none", "float32"),
    ]


def test_ranks_are_replicas():
    made = make_plan(replicas=1).to_json()
    values = json.loads(made)
    values["tables"][0]["ranks"] = [1]
    with pytest.raises(ValueError, match=r"'t0': rank 1 is not in \[0, 1\)"):
        Plan.from_json(json.dumps(values))


def test_plans_are_immutable():
    made = make_plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.replicas = 2
    assert hash(made) == hash(make_plan())


# Reports.


# Tables in files.


def in_files(rows, dim=64, **arguments):
    """A plan of tables in files, on one replica with 512 MB of memory."""
    given = {"replicas": 1, "batch_size": 4096, "optimizer": "adagrad"}
    given |= {"topology": "cpu", "memory_per_replica": 512 * 10**6}
    storage = tfrs_embed.FileStorage("files")
    features = features_of(rows, dim, storage=storage)
    return plan(features, 1, **{**given, **arguments})


def test_tables_in_files_take_no_memory():
    made = in_files([1_000_000, 1_000_000], replicas=2)
    assert [r.bytes for r in made.per_replica] == [0, 0]
    assert made.total_bytes == 1024 * 10**6
    assert ", in files" in str(made)
    features = features_of([1_000_000], 64)
    features |= {
        "g": FeatureConfig(
            "g",
            TableConfig("g", 10**6, 64, storage=tfrs_embed.FileStorage("f")),
        )
    }
    given = {"replicas": 1, "topology": "cpu", "batch_size": 64}
    both = plan(features, 1, memory_per_replica=256 * 10**6, **given)
    assert [r.bytes for r in both.per_replica] == [256 * 10**6]
    with pytest.raises(ValueError, match="don't fit"):
        plan(features, 1, memory_per_replica=255 * 10**6, **given)


def test_files_need_cpus():
    with pytest.raises(ValueError, match=r"'t0' has a FileStorage.*'8xA100'"):
        in_files([1000], topology="8xA100")


def test_the_report():
    made = make_plan(memory_per_replica=4_000_000)
    text = str(made)
    assert " for 4 replicas of 8xA100, 256 samples each" in text
    for table in made.tables:
        [line] = [n for n in text.splitlines() if n.startswith(table.table)]
        assert f"{table.rows:,}" in line
        assert str(table) in line
        assert table.reason in line
    assert re.search(r"^3  +\d", text, re.M)


@pytest.mark.parametrize(
    "rows, exponent", [(1, 1.05), (50, 0.0), (60_000, 1.05), (60_000, 1.0)]
)
def test_draws_have_the_unique_ids_that_are_expected(rows, exponent):
    draws, generator = 5000, np.random.default_rng(0)
    weights = np.arange(1.0, rows + 1) ** -exponent
    ids = generator.choice(rows, draws, p=weights / weights.sum())
    mean, variance = usage.zipf_unique(rows, exponent, draws)
    assert abs(np.unique(ids).size - mean) <= 5 * variance**0.5 + 1e-6
