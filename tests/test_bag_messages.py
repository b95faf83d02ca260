"""Messages of bags, written by several sources and read by each owner."""

import numpy as np
import pytest
import tensorflow as tf

import random_kernel_calls as cases
from tfrs_embed.distribution import bag_messages
from tfrs_embed.distribution.bag_messages import Piece
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.compiled import CompiledOperations
from tfrs_embed.ops.stock import Stock

WORLD = 3
#: Feature 0 is on two replicas, and no replica has the rank 1.
PIECES = [
    Piece(0, "a", 0, 4),
    Piece(1, "b", 0, 4),
    Piece(2, "c", 0, 2),
    Piece(0, "a", 2, 4),
    Piece(3, "d", 2, 8),
    Piece(4, "e", 2, 8),
]
WEIGHTED = (2, 3)
KINDS = ("even", "splits", "bag_ids")


def make_bags(rng, feature, kind, dtype):
    """A feature's bags, and the same as lists of ids and of weights."""
    count = int(rng.integers(0, 5))
    even = int(rng.integers(1, 4))
    lengths = [
        even if kind == "even" else int(n) for n in rng.integers(0, 4, count)
    ]
    ids = rng.integers(0, 2**31, sum(lengths))
    weights = rng.random(len(ids), np.float32) if feature in WEIGHTED else None
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    bags = BaggedIds(
        tf.constant(ids, dtype),
        tf.constant(np.repeat(np.arange(count), lengths), tf.int32)
        if kind == "bag_ids"
        else None,
        None if weights is None else tf.constant(weights),
        None,
        tf.constant(count),
        tf.constant([count]),
        tf.TensorShape([None]),
        tf.TensorShape([even if kind == "even" else None]),
        splits=tf.constant(ends) if kind == "splits" else None,
    )
    return bags, (lengths, ids, weights)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda d: d.name)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("implementation", ["kernels", "tensorflow"])
def test_each_owner_reads_what_all_sources_wrote(
    implementation, seed, dtype, request
):
    rng = np.random.default_rng(seed)
    operations = Stock()
    if implementation == "kernels":
        request.getfixturevalue("needs_kernels")
        operations = CompiledOperations(cases.module())
    made = [
        [
            make_bags(rng, feature, KINDS[(source + feature + seed) % 3], dtype)
            for feature in range(5)
        ]
        for source in range(WORLD)
    ]
    sent, sizes = [], []
    for source in range(WORLD):
        bags = [b for b, _ in made[source]]
        written = bag_messages.write(PIECES, bags)
        words = written.words
        of_rank = [
            int(
                tf.reduce_sum(
                    written.sizes.numpy()[[p.rank == r for p in PIECES]]
                )
            )
            for r in range(WORLD)
        ]
        assert sum(of_rank) == words.shape[0]
        sizes.append(of_rank)
        sent.append(np.split(words.numpy(), np.cumsum(of_rank)[:-1]))
    capacity = max(map(max, sizes)) + 3
    for rank in range(WORLD):
        mine = [p for p in PIECES if p.rank == rank]
        message = operations.pad_runs(
            tf.concat([sent[s][rank] for s in range(WORLD)], 0),
            tf.constant([sizes[s][rank] for s in range(WORLD)]),
            tf.constant(capacity),
        )
        found, counts = bag_messages.read(
            operations,
            mine,
            [b for b, _ in made[rank]],
            tf.ensure_shape(message, [WORLD, None]),
            tf.constant(capacity),
        )
        assert len(found) == len(mine)
        for i, (piece, bags) in enumerate(zip(mine, found, strict=True)):
            wanted = [made[s][piece.feature][1] for s in range(WORLD)]
            lengths = [n for each in wanted for n in each[0]]
            np.testing.assert_array_equal(
                counts[i], [len(each[0]) for each in wanted]
            )
            assert int(bags.count) == len(lengths) == int(bags.shape[0])
            np.testing.assert_array_equal(
                bags.splits, np.concatenate([[0], np.cumsum(lengths)])
            )
            np.testing.assert_array_equal(
                bags.ids, np.concatenate([each[1] for each in wanted])
            )
            if piece.feature in WEIGHTED:
                np.testing.assert_array_equal(
                    bags.weights, np.concatenate([each[2] for each in wanted])
                )
            else:
                assert bags.weights is None


RUNS = {"values": np.ones((4, 2), np.float32), "capacity": 3, "padded": False}


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"starts": [0, 2], "sizes": [1]}, "2 starts and 1 sizes"),
        (
            {"starts": [0, 2], "sizes": [4, 3]},
            "Run 1 has 3 rows from 2 on, of 4",
        ),
        ({"starts": [-1], "sizes": [1]}, "Run 0 has 1 rows from -1 on"),
        ({"starts": [0], "sizes": [-1]}, "Run 0 has -1 rows"),
        ({"starts": [0], "sizes": [4], "padded": True}, "there is room for 3"),
        (
            {"starts": [0], "sizes": [1], "capacity": -1, "padded": True},
            "is -1",
        ),
        ({"starts": [], "sizes": [], "values": np.float32(1)}, "scalar"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_runs_that_are_not_there_are_errors(given, message):
    module = cases.module()
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match=message
    ):
        module.tfrs_embed_copy_runs(
            **{
                **RUNS,
                **given,
                "starts": tf.constant(given["starts"], tf.int32),
                "sizes": tf.constant(given["sizes"], tf.int32),
            }
        )


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("lengths", "counts", "numbers", "message"),
    [
        ([2, 1], [[2]], [[4]], "1 ids too few"),
        ([2, 3], [[2]], [[4]], "Bag 1 of source 0 has 3 ids of 2"),
        ([2, -1], [[2]], [[1]], "Bag 0 of source 0 has 2 ids of 1"),
        ([2, 1], [[3]], [[4]], "3 bags of 4 ids at 0 of 2"),
        ([2, 1], [[2, 0]], [[3, 0]], r"must be \[1,1\], got \[1,2\]"),
    ],
)
def test_lengths_that_do_not_add_up_are_errors(
    lengths, counts, numbers, message
):
    module = cases.module()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        module.tfrs_embed_read_splits(
            words=np.array(lengths, np.int32).view(np.float32),
            starts=[[0]],
            has_lengths=[[1]],
            counts=counts,
            numbers=numbers,
        )
