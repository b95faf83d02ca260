"""The numpy reference: what every engine must compute.

It is written id by id and row by row, in float64, with no thought of speed and
nothing taken from the library, so that it can be read as the definition.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import zlib

import numpy as np
import tensorflow as tf

from update_rules import RULES


@dataclasses.dataclass
class Ragged:
    """Ragged ids or weights: a list of rows."""

    rows: list
    dtype: str = "int64"

    def to_tf(self):
        return tf.ragged.constant(
            self.rows,
            dtype=self.dtype,
            ragged_rank=1,
            row_splits_dtype=tf.int64,
        )


@dataclasses.dataclass
class Sparse:
    """Sparse ids or weights: (row, column) -> value, sorted by key."""

    cells: dict
    shape: tuple
    dtype: str = "int64"

    def to_tf(self):
        keys = sorted(self.cells)
        return tf.SparseTensor(
            np.array(keys, np.int64).reshape(-1, 2),
            tf.constant([self.cells[k] for k in keys], self.dtype, [len(keys)]),
            self.shape,
        )


def to_tf(value):
    """Ids or weights of the reference as TensorFlow has them."""
    if value is None or isinstance(value, (np.ndarray, np.generic)):
        return value if value is None else tf.constant(value)
    return value.to_tf()


def numbered(weights):
    """Weights' places instead of them, in their order; and how many."""
    if isinstance(weights, np.ndarray):
        return np.arange(weights.size).reshape(weights.shape), weights.size
    if isinstance(weights, Ragged):
        ends = np.cumsum([len(row) for row in weights.rows]).tolist()
        rows = [
            list(range(end - len(row), end))
            for end, row in zip(ends, weights.rows, strict=True)
        ]
        return Ragged(rows), sum(map(len, rows))
    keys = sorted(weights.cells)
    places = {key: place for place, key in enumerate(keys)}
    return Sparse(places, weights.shape), len(keys)


@dataclasses.dataclass
class Feature:
    """A feature: its table, and how its ids become vectors."""

    table: str
    max_sequence_length: int = 0
    output_shape: tuple | None = None
    combiner: str | None = "table"


@dataclasses.dataclass
class Table:
    """A table: rows, slots, and what trains it.

    `rate(step)` is the learning rate, `step` the number of updates made. New
    rows are rounded to the nearest of the dtype's numbers. `options` are what
    comes before and after the rule, by name; those with the same `optimizer`
    share one. `updates` is the number of updates before the last one.
    """

    rows: np.ndarray
    combiner: str = "sum"
    rule: str | None = None
    settings: dict = dataclasses.field(default_factory=dict)
    rate: object = lambda step: 0.01
    slots: dict = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    optimizer: str | None = None
    updates: int = 0

    def __post_init__(self):
        self.rows = np.array(self.rows, np.float64)
        if self.rule is None:
            return
        row = RULES[self.rule]
        defaults = inspect.signature(row.update).parameters
        for name, value in row.slots.items():
            if isinstance(value, str):
                value = self.settings.get(value, defaults[value].default)
            shape = self.rows.shape[: 1 if name in row.by_row else 2]
            self.slots[name] = np.full(shape, value, np.float64)


class Reference:
    """Tables looked up and trained one id and one row at a time."""

    def __init__(self, features, tables, invalid_ids="error", by_sample=False):
        self.by_sample = by_sample  # As keras_rs does with dense ids.
        self.features = features
        self.unweighted = set()  # Features that have weights only if combined.
        self.tables = tables
        self.invalid_ids = invalid_ids
        self.step = 0

    def bags(self, name, ids, weights):
        """The feature's output shape and its bags of (id, weight) pairs."""
        feature = self.features[name]
        if isinstance(ids, np.ndarray):
            return self._dense_bags(feature, ids, weights)
        if isinstance(ids, Ragged):
            cells = {
                (r, c): v
                for r, row in enumerate(ids.rows)
                for c, v in enumerate(row)
            }
            num_rows = len(ids.rows)
            weight = (
                None
                if weights is None
                else (lambda key: weights.rows[key[0]][key[1]])
            )
        else:
            cells, num_rows = ids.cells, ids.shape[0]
            weight = None if weights is None else weights.cells.__getitem__
        weight = weight or (lambda key: 1.0)
        if feature.combiner is None:
            # Padded; a row has no gaps.
            rows = [[] for _ in range(num_rows)]
            for key, v in sorted(cells.items()):
                rows[key[0]].append([(v, weight(key))])
            length = max(map(len, rows), default=0)
            bags = [bag for r in rows for bag in r + [[]] * (length - len(r))]
            return (num_rows, length), self._without_invalid(feature, bags)
        length = feature.max_sequence_length
        if feature.output_shape is not None and len(feature.output_shape) == 2:
            length = feature.output_shape[1]
        if length:
            shape = (num_rows, length)
            bags = [[] for _ in range(num_rows * length)]
            for (r, c), v in sorted(cells.items()):
                if c < length:
                    bags[r * length + c].append((v, weight((r, c))))
        else:
            shape = (num_rows,)
            bags = [[] for _ in range(num_rows)]
            for (r, c), v in sorted(cells.items()):
                bags[r].append((v, weight((r, c))))
        return shape, self._without_invalid(feature, bags)

    def _dense_bags(self, feature, ids, weights):
        if weights is None:
            weights = np.ones(ids.shape)
        shape = ids.shape
        if (
            feature.output_shape is not None
            and len(feature.output_shape) == ids.ndim - 1
        ):
            shape = ids.shape[:-1]
        size = math.prod(ids.shape[len(shape) :])
        bags = [
            list(zip(i, w, strict=True))
            for i, w in zip(
                ids.reshape(-1, size).tolist(),
                weights.reshape(-1, size).tolist(),
                strict=True,
            )
        ]
        return shape, self._without_invalid(feature, bags)

    def _without_invalid(self, feature, bags):
        size = len(self.tables[feature.table].rows)
        valid = [[(i, w) for i, w in bag if 0 <= i < size] for bag in bags]
        assert self.invalid_ids == "zero" or valid == bags
        return valid

    def is_combined(self, feature, ids):
        """Whether the combiner makes one vector of a bag's ids."""
        if feature.combiner is None or feature.max_sequence_length:
            return False
        rank = len(feature.output_shape or ())
        if isinstance(ids, np.ndarray):
            return self.by_sample or rank == ids.ndim - 1 > 0
        return rank < 2

    def gains(self, feature, ids, bag):
        """What each id's row is multiplied by in its bag's vector."""
        combiner = self.tables[feature.table].combiner
        if not self.is_combined(feature, ids):
            combiner = "sum"
        total = {
            "sum": 1.0,
            "mean": sum(w for _, w in bag),
            "sqrtn": math.sqrt(sum(w * w for _, w in bag)),
        }[combiner]
        return [w / total if total else 0.0 for _, w in bag]

    def lookup(self, ids, weights):
        """Each feature's activations."""
        outputs = {}
        for name in self.features:
            feature = self.features[name]
            table = self.tables[feature.table]
            shape, bags = self.bags(name, ids[name], weights[name])
            vectors = np.zeros((len(bags), table.rows.shape[1]))
            for b, bag in enumerate(bags):
                gains = self.gains(feature, ids[name], bag)
                for (i, _), gain in zip(bag, gains, strict=True):
                    vectors[b] += gain * table.rows[i]
            outputs[name] = vectors.reshape(*shape, table.rows.shape[1])
        return outputs

    def row_gradients(self, ids, weights, gradients):
        """Each table's rows' gradients, by id, summed over all features."""
        sums = {name: {} for name in self.tables}
        for name, feature in self.features.items():
            table = self.tables[feature.table]
            _, bags = self.bags(name, ids[name], weights[name])
            gradient = np.asarray(gradients[name], np.float64)
            gradient = gradient.reshape(len(bags), table.rows.shape[1])
            for b, bag in enumerate(bags):
                gains = self.gains(feature, ids[name], bag)
                for (i, _), gain in zip(bag, gains, strict=True):
                    row = sums[feature.table].setdefault(
                        i, np.zeros(table.rows.shape[1])
                    )
                    row += gain * gradient[b]
        return sums

    def weight_gradients(self, ids, weights, gradients):
        """Each feature's weights' gradients, in the order of its weights."""
        found = {}
        for name, feature in self.features.items():
            table = self.tables[feature.table]
            _, bags = self.bags(name, ids[name], weights[name])
            numbers, count = numbered(weights[name])
            _, places = self.bags(name, ids[name], numbers)
            gradient = np.asarray(gradients[name], np.float64)
            gradient = gradient.reshape(len(bags), table.rows.shape[1])
            found[name] = np.zeros(count)
            combiner = "sum"
            if self.is_combined(feature, ids[name]):
                combiner = table.combiner
            for b, bag in enumerate(bags):
                products = [gradient[b] @ table.rows[i] for i, _ in bag]
                weighted = sum(
                    w * p for (_, w), p in zip(bag, products, strict=True)
                )
                mean = sum(w for _, w in bag)
                root = math.sqrt(sum(w * w for _, w in bag))
                for (_, w), (_, place), p in zip(
                    bag, places[b], products, strict=True
                ):
                    if combiner == "mean":
                        p = mean and (p - weighted / mean) / mean
                    elif combiner == "sqrtn":
                        p = root and (p - w * weighted / root**2) / root
                    found[name][place] = p
        return found

    def update(self, sums, step=None):
        """Updates each row that was looked up, once."""
        for name, rows in self.clipped(sums).items():
            table = self.tables[name]
            table.updates = self.step if step is None else step
            rate = table.rate(table.updates)
            for i, g in rows.items():
                decay = table.options.get("weight_decay", 0.0)
                table.rows[i] -= rate * decay * table.rows[i]
                if table.rule is not None:
                    update = RULES[table.rule].update
                    update(table, i, g, rate, **table.settings)
                norm = np.sqrt(np.sum(table.rows[i] ** 2))
                most = table.options.get("max_norm", math.inf)
                if norm > most:
                    table.rows[i] *= most / norm
                if table.dtype != "float32":
                    dtype = tf.as_dtype(table.dtype).as_numpy_dtype
                    row = table.rows[i].astype(np.float32)
                    table.rows[i] = row.astype(dtype).astype(np.float64)
        self.step += 1

    def clipped(self, sums):
        """Rows' gradients, clipped as their tables' options say."""
        squares = {
            name: sum(np.sum(g**2) for g in rows.values())
            for name, rows in sums.items()
        }
        return {
            name: {
                i: self._clipped_row(name, g, squares) for i, g in rows.items()
            }
            for name, rows in sums.items()
        }

    def _clipped_row(self, name, g, squares):
        options = self.tables[name].options
        low, high = options.get("clipvalue", (-math.inf, math.inf))
        g = np.clip(g, low, high)
        of_all = sum(
            square
            for other, square in squares.items()
            if self.tables[other].optimizer == self.tables[name].optimizer
        )
        for option, square in {
            "row_clipnorm": np.sum(g**2),
            "clipnorm": squares[name],
            "global_clipnorm": of_all,
        }.items():
            limit = options.get(option, math.inf)
            if math.sqrt(square) > limit:
                g = g * limit / math.sqrt(square)
        return g

    def copy(self):
        """An independent copy."""
        return copy.deepcopy(self)


# Rows of two bytes.

#: Of each type, its mantissa's bits, smallest normal exponent, largest number.
HALVES = {
    "bfloat16": (7, -126, 2.0**127 * (2 - 2.0**-7)),
    "float16": (10, -14, 65504.0),
}
_WORD = 1 << 64


def _mix(z):
    """splitmix64's next number."""
    z = (z + 0x9E3779B97F4A7C15) % _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % _WORD
    return z ^ z >> 31


def random_bits(table, step, row, column):
    """The 32 random bits of a number of a table in an update."""
    stream = _mix(_mix(zlib.crc32(table.encode())) ^ step)
    x = (_mix(stream ^ row) >> 32) + column * 0x9E3779B9
    x %= 1 << 32
    return (x ^ x >> 15) * 0x846CA68B % (1 << 32)


def round_stochastically(value, dtype, bits):
    """Rounds a float32 to one of the two numbers beside it, by random bits.

    Away from zero if the bits that are cut off, and as many random ones, add up
    to more than fits into them. Of those that a denormal float16 loses, 21
    count.
    """
    mantissa, least, largest = HALVES[dtype]
    value = float(value)
    if math.isnan(value) or abs(value) > largest:
        return float(tf.cast(tf.constant(value, tf.float32), dtype))
    if value == 0:
        return value
    exponent = math.frexp(value)[1] - 1
    cut = 23 - mantissa if exponent >= least else 21
    step = 2.0 ** (max(exponent, least) - mantissa)
    steps = int(abs(value) // step)
    part = int((abs(value) / step - steps) * 2**cut)
    steps += part + (bits >> 32 - cut) >= 2**cut
    return math.copysign(steps * step, value)


def best_ids(scores, k, excluded=None, ids=None):
    """The k best of the scores, and their ids: of equal ones the lower ids.

    Args:
        scores: [batch, n], of all rows.
        k: how many.
        excluded: for each query ids that aren't found; None: none.
        ids: [n], the rows' ids; None: their numbers.

    Returns:
        Scores and ids, [batch, k]; minus infinity and -1 where fewer are left.
    """
    ids = np.arange(scores.shape[1]) if ids is None else ids
    found = np.full([len(scores), k], -np.inf, np.float32)
    numbers = np.full([len(scores), k], -1, np.int64)
    for i, row in enumerate(scores):
        left = np.full(len(ids), True)
        if excluded is not None:
            left = ~np.isin(ids, excluded[i])
        best = np.lexsort((ids[left], -row[left]))[:k]
        found[i, : len(best)] = row[left][best]
        numbers[i, : len(best)] = ids[left][best]
    return found, numbers
