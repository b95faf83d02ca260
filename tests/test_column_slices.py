"""Which replicas hold tables by columns."""

import dataclasses

import pytest

import tfrs_embed
from tfrs_embed.configs.parsing import parse
from tfrs_embed.engines.column_slices import assign, most_slices
from tfrs_embed.optimizers import Regularized


def specs(*tables):
    """Specs of tables: (rows, dim, placement, ranks) each."""
    features = {
        f"t{i}": tfrs_embed.FeatureConfig(
            f"t{i}",
            tfrs_embed.TableConfig(f"t{i}", rows, dim, placement=place),
        )
        for i, (rows, dim, place, _) in enumerate(tables)
    }
    made = parse(features).tables
    return [
        dataclasses.replace(spec, ranks=ranks)
        for spec, (*_, ranks) in zip(made, tables, strict=True)
    ]


def places(tables, world):
    found = assign(tables, world)
    return [found[table.name] for table in tables]


@pytest.mark.parametrize(
    ("dim", "world", "expected"),
    [
        (64, 1, 1),
        (64, 2, 2),
        (64, 3, 2),
        (64, 8, 8),
        (64, 1024, 8),
        (24, 8, 2),
        (16, 8, 2),
        (15, 8, 1),
        (8, 8, 1),
    ],
)
def test_columns_are_cut_by_powers_of_two(dim, world, expected):
    assert most_slices(dim, world) == expected


@pytest.mark.parametrize("place", ["table", "column"])
def test_ids_of_64_bits_are_refused(place):
    places(specs((2**31 - 1, 8, place, ())), 2)
    with pytest.raises(
        ValueError,
        match=rf"'t0'.*placement='{place}' takes at most 2147483647 rows, and "
        "vocabulary_size is 2147483648; use placement='row'",
    ):
        places(specs((2**31, 8, place, ())), 2)


def test_the_largest_tables_go_to_the_emptiest_replicas():
    tables = specs(
        (10, 4, "table", ()), (90, 4, "table", ()), (80, 4, "table", ())
    )
    assert places(tables, 2) == [(1,), (0,), (1,)]
    # One after the other where they are alike.
    tables = specs(*[(10, 4, "table", ())] * 5)
    assert places(tables, 3) == [(0,), (1,), (2,), (0,), (1,)]


def test_slices_are_on_different_replicas():
    tables = specs((10, 32, "column", ()), (11, 32, "table", ()))
    assert assign(tables, 8) == {"t0": (1, 2, 3, 4), "t1": (0,)}


def test_given_ranks_are_kept_and_counted():
    tables = specs(
        (50, 8, "column", (2, 0)), (10, 8, "table", ()), (9, 8, "table", (1,))
    )
    # Shard 1 has 72 numbers; shards 0 and 2 have 200.
    assert places(tables, 3) == [(2, 0), (1,), (1,)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 0), r"Table 't0'.*must be unique, from 0 to 1, got \[0, 0\]"),
        ((2,), r"Table 't0'.*from 0 to 1, got \[2\]"),
        ((-1,), r"Table 't0'.*got \[-1\]"),
        ((0, 1), r"Table 't0': 5 columns.*among 2 replicas"),
    ],
)
def test_ranks_that_cannot_be(ranks, message):
    with pytest.raises(ValueError, match=message):
        assign(specs((10, 5, "column", ranks)), 2)


@pytest.mark.parametrize(
    ("optimizer", "needs"),
    [
        ("sgd", None),
        ("row_wise_adagrad", "RowWiseAdagrad"),
        ("row_wise_adam", "RowWiseAdam"),
        (Regularized("sgd", row_clipnorm=1.0), "row_clipnorm"),
        (Regularized("sgd", max_norm=1.0), "max_norm"),
        (Regularized("sgd", clipnorm=1.0), None),
    ],
    ids=str,
)
def test_a_plan_refuses_columns_where_whole_rows_are_needed(optimizer, needs):
    table = tfrs_embed.TableConfig(
        "t", 100, 32, placement="column", optimizer=optimizer
    )

    def plan():
        return tfrs_embed.plan(
            tfrs_embed.FeatureConfig("f", table),
            1,
            replicas=2,
            topology="cpu",
            batch_size=8,
        )

    if needs is None:
        assert [t.placement for t in plan().tables] == ["column"]
    else:
        with pytest.raises(ValueError, match=f"and {needs} needs all columns"):
            plan()
