"""Gradients that are clipped by norms over rows which replicas share."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from conformance.descriptors import (
    OPTIMIZERS,
    RATE,
    Optimizer,
    TableCase,
)
from conformance.harness import assert_tables, build, train, trainer
from process_tiers import on
from tfrs_embed.optimizers import Regularized

pytestmark = on("mirrored:2", "workers:2", tier="nightly")

tpu = tf.tpu.experimental.embedding

#: Small enough to clip in each step.
GLOBAL = {"global_clipnorm": 0.5}
KINDS = ("dense", "ragged")
ENGINES = ("sharded", "hot_rows", "columns", "distributed_mirrored")


@pytest.fixture(autouse=True)
def _global_norm(monkeypatch):
    made = Regularized(tpu.Adagrad(RATE), **GLOBAL)
    monkeypatch.setitem(
        OPTIMIZERS, "global", Optimizer(made, "Adagrad", {}, GLOBAL)
    )


def tables():
    """Tables of two widths that share an optimizer, one cut into columns."""
    return {
        name: TableCase(rows, dim, "sum", "global", KINDS)
        for name, (rows, dim) in {
            "x": (50, 16),
            "y": (7, 3),
            "z": (30, 3),
        }.items()
    }


@on(
    "workers:2",
    tier="more",
    when=lambda engine: engine == "distributed_mirrored",
)
@on(
    "mirrored:2",
    tier="more",
    when=lambda engine: engine in ("hot_rows", "columns"),
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_global_norm_is_of_the_rows_of_all_replicas(engine, strategy):
    with strategy.scope():
        layer, reference = build(engine, tables())
    step = trainer(strategy, layer)
    train(step, reference, strategy, 3)
    assert_tables(layer, reference)


@on("mirrored:2", tier="more")
def test_a_global_norm_over_two_placements_is_an_error_that_names_both(
    strategy,
):
    made = {
        name: tfrs_embed.TableConfig(name, 20, 16, placement=name)
        for name in ("row", "table")
    }
    with strategy.scope(), pytest.raises(ValueError) as e:
        tfrs_embed.PartialTPUEmbedding(
            [tfrs_embed.FeatureConfig(n, t) for n, t in made.items()],
            Regularized("sgd", **GLOBAL),
            size_threshold=0,
        )
    for part in ("'row'", "'table'", "global_clipnorm=0.5", "use clipnorm"):
        assert part in str(e.value)


@on("mirrored:2", tier="more")
@pytest.mark.parametrize("option", ["row_clipnorm", "max_norm"])
def test_a_rows_norm_of_a_table_that_is_cut_is_an_error(strategy, option):
    table = tfrs_embed.TableConfig("t", 20, 16, placement="column")
    with strategy.scope(), pytest.raises(ValueError) as e:
        tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table),
            Regularized("sgd", **{option: 1.0}),
            size_threshold=0,
        )
    assert "'t': placement='column' cuts" in str(e.value)
    assert f"{option} needs all columns" in str(e.value)


@on("workers:2", tier="more")
def test_copies_of_a_table_stay_equal(strategy):
    with strategy.scope():
        layer, reference = build("distributed_mirrored", tables())
    train(trainer(strategy, layer), reference, strategy, 3)
    for name in layer.embedding_tables:
        for variable in layer.tables[name].variables.values():
            first, *others = variable._variables
            for other in others:
                np.testing.assert_array_equal(other, first)
