"""Layers that are made by a plan: places, and the bytes that were predicted."""

import dataclasses
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from numpy_step_messages import Place, simulate
from process_tiers import nightly, on
from reference import Ragged
from strategies.replicas import distribute
from traffic_of_ids import FeatureIds, exchange_of_ids
from training_helpers import differentiate

pytestmark = on("mirrored:2", "mirrored:4", tier="nightly")

TABLES = {"big": (300, 16), "cut": (60, 32), "whole": (50, 5), "small": (9, 16)}
BATCH = 12
#: Sharded by row, "more" and "small" are exchanged by vectors.
HOTNESS = {"big": 4, "cut": 4, "whole": 4, "small": 16, "more": 12}
PLACES = {
    "rows": dict.fromkeys(TABLES, "row"),
    "tables": dict.fromkeys(TABLES, "table"),
    "copies": dict.fromkeys(TABLES, "replicated"),
    "hot rows": dict.fromkeys(TABLES, "row"),
    "mixed": {
        "big": "row",
        "cut": "column",
        "whole": "table",
        "small": "replicated",
    },
}


def features():
    """Two features in the first table, one in each of the others."""
    tables = {
        name: tfrs_embed.TableConfig(name, rows, dim, "uniform")
        for name, (rows, dim) in TABLES.items()
    }
    names = {**{name: name for name in TABLES}, "more": "big"}
    return {
        name: tfrs_embed.FeatureConfig(name, tables[table])
        for name, table in names.items()
    }


def plan_for(strategy, places, **options):
    """A plan with these placements."""
    configs = features()
    for config in configs.values():
        object.__setattr__(config.table, "placement", places[config.table.name])
        if places is PLACES["hot rows"]:
            rows = tuple(range(0, config.table.vocabulary_size, 4))
            object.__setattr__(config.table, "hot_rows", rows)
    return tfrs_embed.plan(
        configs,
        HOTNESS,
        replicas=strategy.num_replicas_in_sync,
        batch_size=BATCH,
        optimizer="adagrad",
        **options,
    )


def train(strategy, layer, batches):
    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(ids)
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)

    tf.function(lambda ids: strategy.run(step, (ids,)))(
        distribute(strategy, batches)
    )


def draw(rng, name):
    rows, _ = TABLES.get(name, TABLES["big"])
    if name == "whole":
        return Ragged(
            [rng.integers(0, rows, n).tolist() for n in rng.integers(0, 6, 7)]
        )
    return rng.integers(0, rows, [BATCH, HOTNESS[name]])


@on(
    "mirrored:4",
    tier="more",
    when=lambda name, dtype: (name, dtype) == ("mixed", "bfloat16"),
)
@on("mirrored:2", tier="more", when=lambda name: name in ("tables", "hot rows"))
@nightly(
    lambda name, dtype: (
        (name, dtype) in (("mixed", "float32"), ("rows", "bfloat16"))
    )
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in PLACES),
        ("rows", "bfloat16"),
        ("mixed", "bfloat16"),
    ],
)
def test_predicted_bytes_are_those_that_are_counted(strategy, name, dtype):
    plan = plan_for(strategy, PLACES[name], communication_dtype=dtype)
    assert {t.table: t.placement for t in plan.tables} == PLACES[name]
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            features(), optimizer="adagrad", plan=plan
        )
    assert layer.placement.communication_dtype == dtype
    rng = np.random.default_rng(1)
    batches = [
        {name: draw(rng, name) for name in features()}
        for _ in range(strategy.num_replicas_in_sync)
    ]
    train(strategy, layer, batches)
    ids = []
    for batch in batches:
        ids.append([])
        for feature, config in features().items():
            given = batch[feature]
            ragged = isinstance(given, Ragged)
            flat = np.concatenate(given.rows) if ragged else given.ravel()
            bags = len(given.rows) if ragged else len(given)
            ids[-1].append(FeatureIds(config.table.name, flat, bags, ragged))
    if name == "hot rows":
        hot = {t.table: t.hot_rows for t in plan.tables}
        exchange, _ = exchange_of_ids(TABLES, ids, hot)
        assert exchange.messages[-1].kind == "all_reduce"
        sent, collectives = exchange.bytes, exchange.collectives
    else:
        places = {t.table: Place(t.placement, t.ranks) for t in plan.tables}
        number = np.float32 if dtype == "float32" else np.float16
        [sent, *_], collectives = simulate(TABLES, places, ids, number)
    for traffic in layer._engine_layer.engine.traffic():
        assert traffic.bytes == sent
        assert traffic.collectives == collectives == plan.collectives


@on("mirrored:2", tier="more")
def test_tables_are_on_the_ranks_of_the_plan(strategy):
    plan = plan_for(strategy, PLACES["mixed"])
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            features(), optimizer="adagrad", plan=plan
        )
    engines = {t.table: t.engine for t in layer.placement.tables}
    assert engines == {
        "big": "row",
        "cut": "column",
        "whole": "table",
        "small": "replicated",
    }
    [engine] = [
        e for e in layer._engine_layer.engine._engines if hasattr(e, "slices")
    ]
    assert engine.ranks == {t.table: t.ranks for t in plan.tables if t.ranks}
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again._arguments.plan == plan


@on("mirrored:2", tier="more")
def test_a_plan_of_a_cluster_is_for_one_replica_too(strategy):
    plan = plan_for(strategy, PLACES["mixed"], communication_dtype="bfloat16")
    layer = tfrs_embed.PartialTPUEmbedding(features(), "adagrad", plan=plan)
    assert layer.placement.communication_dtype is None
    assert {t.engine for t in layer.placement.tables} == {"Keras"}


@on("mirrored:2", tier="more")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 301}, "Table 'big' has 300 rows x 16.* 301 x 16"),
        ({"table": "other"}, "The plan is for other tables: .*'big'"),
    ],
)
def test_plans_of_other_tables_are_refused(strategy, change, message):
    plan = plan_for(strategy, PLACES["rows"])
    first, *rest = plan.tables
    plan = dataclasses.replace(
        plan, tables=(dataclasses.replace(first, **change), *rest)
    )
    with strategy.scope(), pytest.raises(ValueError, match=message):
        tfrs_embed.PartialTPUEmbedding(features(), "adagrad", plan=plan)


@on("mirrored:2", tier="more")
def test_a_layer_that_differs_from_its_plan_says_so(strategy):
    plan = plan_for(strategy, PLACES["rows"])

    def make(optimizer, plan, changed=None):
        configs = features()
        if changed == "dtype":
            table = configs["whole"].table
            object.__setattr__(table, "dtype", "bfloat16")
        elif changed == "features":
            del configs["more"]
        with strategy.scope():
            return tfrs_embed.DistributedEmbedding(
                configs, optimizer=optimizer, plan=plan
            )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("adagrad", plan)
    for changed, optimizer, texts in (
        (
            None,
            "adam",
            ["Table 'big': optimizer Adam, planned for Adagrad."],
        ),
        (
            "dtype",
            "adagrad",
            ["Table 'whole': dtype bfloat16, planned for float32."],
        ),
        (
            "features",
            "adagrad",
            ["Table 'big': features ['big'], planned for ['big', 'more']."],
        ),
    ):
        with pytest.warns(UserWarning, match="placements are used") as caught:
            layer = make(optimizer, plan, changed)
        [warning] = caught
        for text in texts:
            assert text in str(warning.message)
        assert "Table 'cut'" not in str(warning.message) or optimizer == "adam"
        assert {t.engine for t in layer.placement.tables} == {"row"}


@on("mirrored:2", tier="more")
def test_a_plan_of_other_replicas_is_refused(strategy):
    plan = tfrs_embed.plan(features(), 1, replicas=7, batch_size=4)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="is for 7 replicas, and the strategy"),
    ):
        tfrs_embed.PartialTPUEmbedding(features(), "adagrad", plan=plan)
    with pytest.raises(TypeError, match=r"plan must be.*str"):
        tfrs_embed.PartialTPUEmbedding(features(), "adagrad", plan="plan.json")
