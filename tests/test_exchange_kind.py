"""Which exchange tables by row have: by vectors or rows, in how many stages."""

import pytest

from tfrs_embed.distribution.exchange_kind import first_stage, vectors_are_less


def test_hosts_are_groups_and_join_where_there_are_many():
    assert first_stage(8, 8) == 1
    assert first_stage(8, 1) == 1
    assert first_stage(16, 8) == 8
    assert first_stage(64, 8) == 8
    assert first_stage(128, 8) == 16
    assert first_stage(1024, 8) == 32
    # Groups are of one size.
    assert first_stage(7 * 9, 7) == 7
    assert first_stage(7 * 36, 7) == 28


@pytest.mark.parametrize(
    ("bag_size", "dim", "world", "less"),
    [
        (10, 64, 2, True),
        (10, 64, 4, True),
        (10, 64, 8, False),  # A vector of each shard is more than ten rows.
        (10, 16, 4, True),
        (4, 64, 2, False),  # Two of four rows are enough, if half are repeated.
        (100, 64, 8, True),
        (100, 1, 8, False),  # Ids are more than their rows.
        (1, 64, 2, False),
        (10, 64, 1, False),  # Nothing is sent.
    ],
)
def test_vectors_are_exchanged_where_they_are_fewer_bytes(
    bag_size, dim, world, less
):
    assert vectors_are_less(bag_size, dim, world) == less


def test_smaller_rows_are_sent_where_ids_are_what_costs():
    """Each replica gets the ids of all bags, in 4 bytes whatever is sent."""
    assert vectors_are_less(5, 8, 2)
    assert not vectors_are_less(5, 8, 2, element=2)
    assert vectors_are_less(10, 64, 4, element=2)
