"""Hashed features, and what their vectors are, id by id."""

import dataclasses

import numpy as np
import tensorflow as tf

from reference import Ragged, Sparse, to_tf
from tfrs_embed import (
    FeatureConfig,
    Hash,
    Multiplex,
    PrefixNGrams,
    QuotientRemainder,
    TableConfig,
)

ROWS, DIM, BATCH = 23, 4, 4
CATEGORIES = 60

#: A code of three levels for each id, and the row of each of its 20 prefixes.
CODES = [[7 * (i % 2), i // 2 % 3, i // 6 % 2] for i in range(CATEGORIES)]
PREFIXES: dict[tuple, int] = {}
for _code in CODES:
    for _length in (1, 2, 3):
        PREFIXES.setdefault(tuple(_code[:_length]), len(PREFIXES))

HASHINGS = {
    "hash": Hash(19, salt=3),
    "multiplex": Multiplex(2, salts=[5, (6, 7)]),
    "mult": QuotientRemainder(CATEGORIES),
    "add": QuotientRemainder(CATEGORIES, 10, "add", hashed=True, salt=2),
    "concat": QuotientRemainder(CATEGORIES, 7, "concat"),
    "prefixes": PrefixNGrams(CODES),
    "prefixes_concat": PrefixNGrams(CODES, "concat"),
}


def rows_of(hashing, key):
    """The rows of an id, or of a string."""

    def bucket(buckets, salt):
        text = tf.constant([str(key)])
        if isinstance(salt, int):
            salt = [salt, salt]
        return int(
            tf.strings.to_hash_bucket_strong(text, buckets, list(salt))[0]
        )

    if isinstance(hashing, PrefixNGrams):
        code = CODES[key]
        return [PREFIXES[tuple(code[:length])] for length in (1, 2, 3)]
    if isinstance(hashing, Hash):
        return [bucket(hashing.buckets, hashing.salt)]
    if isinstance(hashing, Multiplex):
        return [bucket(hashing.buckets or ROWS, s) for s in hashing.salts]
    if hashing.hashed:
        key = bucket(hashing.num_categories, hashing.salt)
    # 3 + 60 / 3 rows are the first that fit in 23.
    collisions = hashing.num_collisions or 3
    return [key % collisions, collisions + key // collisions]


def width_of(hashing):
    wide = getattr(hashing, "operation", "concat") == "concat"
    return DIM * (len(rows_of(hashing, 0)) if wide else 1)


def vectors(table, hashing, bags, combiner):
    """The vectors of bags of (id, weight) pairs, [bags, width]."""
    result = []
    for bag in bags:
        total, norm = tf.zeros([width_of(hashing)]), 0.0
        for key, weight in bag:
            parts = [table[row] for row in rows_of(hashing, key)]
            operation = getattr(hashing, "operation", "concat")
            if operation == "mult":
                vector = parts[0] * parts[1]
            elif operation == "add":
                vector = tf.add_n(parts)
            else:
                vector = tf.concat(parts, 0)
            total += weight * vector
            norm += weight**2 if combiner == "sqrtn" else weight
        if combiner == "sqrtn":
            norm = norm**0.5
        if combiner == "sum":
            norm = 1.0
        result.append(total / norm if norm else tf.zeros_like(total))
    return tf.stack(result)


@dataclasses.dataclass
class Batch:
    """A batch of a feature.

    Attributes:
        ids: as a layer takes them.
        weights: theirs, or None.
        bags: what the ids mean: (id, weight) pairs for each vector.
        slopes: the gradient of each vector.
    """

    ids: object
    weights: object
    bags: list
    slopes: np.ndarray


def make_batch(hashing, form, rng, strings=False):
    """A batch, whose ids are strings of digits or integers."""
    anything = getattr(hashing, "hashed", not hasattr(hashing, "codes"))
    low, high = (-(2**40), 2**40) if anything else (0, CATEGORIES)
    grid = rng.integers(low, high, (BATCH, 3))
    grid[1] = grid[0]  # Some come twice.
    scales = rng.uniform(0.5, 2, grid.shape).astype(np.float32)
    lengths = [2, 0, 3, 1]
    ids, weights = grid, None
    if form == "dense":
        ids = grid[:, 0]
        bags = [[(i, 1.0)] for i in ids]
    elif form == "combined":
        weights = scales
        bags = [list(zip(*row, strict=True)) for row in zip(ids, weights)]  # noqa: B905
    else:
        rows = [r[:n].tolist() for r, n in zip(grid, lengths, strict=True)]
        bags = [[(i, 1.0) for i in row] for row in rows]
        if form == "ragged":
            parts = [w[:n].tolist() for w, n in zip(scales, lengths)]  # noqa: B905
            weights = Ragged(parts, "float32").to_tf()
            bags = [list(zip(*both, strict=True)) for both in zip(rows, parts)]  # noqa: B905
        elif form == "sequence":
            bags = [
                [(row[k], 1.0)] if k < len(row) else []
                for row in rows
                for k in range(2)
            ]
        ids = Ragged(rows)
        if form == "sparse":
            cells = {
                (r, c): i
                for r, row in enumerate(rows)
                for c, i in enumerate(row)
            }
            ids = Sparse(cells, grid.shape)
    ids = to_tf(ids)
    if strings:
        ids = as_strings(ids)
    slopes = rng.normal(size=(len(bags), width_of(hashing)))
    return Batch(ids, weights, bags, slopes.astype(np.float32))


def as_strings(ids):
    """Ids as strings of their digits."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_values(tf.strings.as_string(ids.values))
    if isinstance(ids, tf.SparseTensor):
        return ids.with_values(tf.strings.as_string(ids.values))
    return tf.strings.as_string(ids)


def feature_of(hashing, form, combiner="mean", batch=BATCH, placement="auto"):
    """The feature, with a table of its own; `batch` is the global one."""
    table = TableConfig(
        "t",
        ROWS,
        DIM,
        lambda shape, dtype=None, **_: tf.random.stateless_uniform(
            shape, [1, 2], -1, 1, dtype or tf.float32
        ),
        combiner=combiner,
        placement=placement,
    )
    shape = [batch, width_of(hashing)] if form == "combined" else None
    return FeatureConfig(
        "f",
        table,
        output_shape=shape,
        max_sequence_length=2 if form == "sequence" else 0,
        hashing=hashing,
    )


def expected(table, hashing, batches, combiner):
    """The batches' vectors, and the gradient of the table, [ROWS, DIM]."""
    table = tf.constant(table)
    with tf.GradientTape() as tape:
        tape.watch(table)
        outputs = [vectors(table, hashing, b.bags, combiner) for b in batches]
        loss = tf.add_n(
            [
                tf.reduce_sum(output * b.slopes)
                for output, b in zip(outputs, batches, strict=True)
            ]
        )
    gradient = tf.convert_to_tensor(tape.gradient(loss, table))
    return [output.numpy() for output in outputs], gradient.numpy()
