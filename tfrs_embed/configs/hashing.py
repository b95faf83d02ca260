"""Declarations of hashed features: ids of any range in tables of few rows.

A `FeatureConfig` with `hashing=...` computes rows from ids. `Hash` gives each
id one row, possibly shared with others. `QuotientRemainder` and `Multiplex`
give each id several rows, so that few ids share all of them. `PrefixNGrams`
gives ids of similar items some rows in common.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from tfrs_embed.compat.arguments import (
    as_int,
    choice,
    convert_fields,
    flag,
    integer,
    integer_or_none,
    padding,
)

#: One salt of SipHash: 128 bits as two integers, or one that is both.
Salt = int | Sequence[int] | None

#: How a quotient's and a remainder's vector become one.
Operation = Literal["mult", "add", "concat"]

_MOST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Hash:
    """Gives each id, an integer or a string, the row of its hash.

    This is feature hashing (Weinberger et al. 2009, "Feature Hashing for Large
    Scale Multitask Learning"). Rows are those of Keras's `Hashing` layer with
    as many bins, the same salt and no mask: FarmHash64 of the id's text, or
    SipHash64 with a salt, modulo the buckets. An integer's text is its decimal
    digits, whatever its dtype.

    Example:
        >>> table = tfrs_embed.TableConfig("queries", 1000, 16)
        >>> feature = tfrs_embed.FeatureConfig(
        ...     "query", table, hashing=tfrs_embed.Hash(salt=7)
        ... )
        >>> layer = tfrs_embed.PartialTPUEmbedding(feature, "adagrad")
        >>> layer(tf.constant(["red shoes", "日本"])).shape
        TensorShape([2, 16])

    Attributes:
        buckets: the number of rows in use, from row 0. None: all.
        salt: an integer, or two; None: FarmHash64. Features that share a table
            need different salts, unless an id means the same to them.
        padding_value: the id, an integer or a string, that counts as absent:
            alone it gives a zero vector; combiners and masks leave it out.
            None: none.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong kind.
    """

    buckets: int | None = None
    salt: Salt = None
    padding_value: int | str | None = None

    def __post_init__(self) -> None:
        convert_fields(
            self,
            "Hash",
            buckets=integer_or_none,
            salt=_salt,
            padding_value=padding,
        )


@dataclasses.dataclass(frozen=True)
class QuotientRemainder:
    """Gives each id two rows, a pair that no other id has.

    They are the rows of its quotient and its remainder by `num_collisions` (Shi
    et al. 2020, "Compositional Embeddings Using Complementary Partitions for
    Memory-Efficient Recommendation Systems"). With `m = num_collisions` the
    table's rows 0 to m - 1 are for remainders, and the next ceil(num_categories
    / m) for quotients: id i has rows i % m and m + i // m.

    Example:
        >>> hashing = tfrs_embed.QuotientRemainder(1_000_000)
        >>> table = tfrs_embed.TableConfig("items", 2000, 16)
        >>> feature = tfrs_embed.FeatureConfig("item", table, hashing=hashing)
        >>> layer = tfrs_embed.PartialTPUEmbedding(feature, "adagrad")
        >>> layer(tf.constant([7, 999_999])).shape
        TensorShape([2, 16])

    Attributes:
        num_categories: the number of ids, from 0, unless `hashed`.
        num_collisions: the number of remainders, and so of ids that share a
            quotient's row. None: the smallest with which all rows fit in the
            table.
        operation: how an id's two vectors become one: "mult", their product by
            element; "add", their sum; "concat", one after the other, twice as
            wide as the table. The table's combiner then combines a sample's
            ids.
        hashed: whether ids are first hashed into [0, num_categories), as `Hash`
            does. They may then be any integers, or strings.
        salt: the salt of this hash; see `Hash`.
        padding_value: see `Hash`.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong kind.
    """

    num_categories: int
    num_collisions: int | None = None
    operation: Operation = "mult"
    hashed: bool = False
    salt: Salt = None
    padding_value: int | str | None = None

    def __post_init__(self) -> None:
        where = "QuotientRemainder"
        convert_fields(
            self,
            where,
            num_categories=integer,
            num_collisions=integer_or_none,
            hashed=flag,
            salt=_salt,
            padding_value=padding,
        )
        choice(self.operation, get_args(Operation), f"{where}: operation")
        if (self.num_collisions or 0) > self.num_categories:
            raise ValueError(
                f"{where}: num_collisions={self.num_collisions} is above "
                f"num_categories={self.num_categories}."
            )
        if self.salt is not None and not self.hashed:
            raise ValueError(
                f"{where}: salt={self.salt} is for hashed=True. Without a hash "
                "an id has its own quotient and remainder."
            )
        if not self.hashed:
            _require_integer_padding(
                self.padding_value, where, " without hashed=True"
            )


@dataclasses.dataclass(frozen=True)
class Multiplex:
    """Gives each id several rows, side by side in its vector.

    This is the unified embedding of Coleman et al. 2023, "Unified Embedding:
    Battle-Tested Feature Representations for Web-Scale ML Systems": all
    features share one table, each with its own hashes. A feature's width is its
    number of chunks times the table's. Rows are those of
    tensorflow_recommenders' `UnifiedEmbedding` with one table, whose n-th
    feature has `salts=n`.

    Example:
        >>> shared = tfrs_embed.TableConfig("shared", 1000, 8)
        >>> features = {
        ...     "user": tfrs_embed.FeatureConfig(
        ...         "user", shared, hashing=tfrs_embed.Multiplex(2, salts=0)
        ...     ),
        ...     "city": tfrs_embed.FeatureConfig(
        ...         "city", shared, hashing=tfrs_embed.Multiplex(1, salts=1)
        ...     ),
        ... }
        >>> layer = tfrs_embed.PartialTPUEmbedding(features, "adagrad")
        >>> ids = {"user": tf.constant([5, -3]), "city": tf.constant(["A", ""])}
        >>> {name: vector.shape for name, vector in layer(ids).items()}
        {'user': TensorShape([2, 16]), 'city': TensorShape([2, 8])}

    Attributes:
        chunks: the number of rows of an id.
        salts: a number n for the salts (n, 0), (n, 1), ...; or a salt for each
            chunk, as in `Hash`. Features that share a table need different
            salts, unless an id means the same to them.
        buckets: see `Hash`.
        padding_value: see `Hash`.

    Raises:
        ValueError: a value is out of its range, or two chunks have one salt.
        TypeError: a value is of the wrong kind.
    """

    chunks: int
    salts: int | Sequence[int | Sequence[int]] = 0
    buckets: int | None = None
    padding_value: int | str | None = None

    def __post_init__(self) -> None:
        where = "Multiplex"
        convert_fields(
            self,
            where,
            chunks=integer,
            buckets=integer_or_none,
            padding_value=padding,
        )
        given: Any = self.salts
        if isinstance(given, str) or not isinstance(given, Iterable):
            number = _salt_number(given, f"{where}: salts")
            given = [(number, chunk) for chunk in range(self.chunks)]
        salts = tuple(_salt(s, f"{where}: a chunk's salt") for s in given)
        if None in salts:
            raise TypeError(
                f"{where}: each chunk must have a salt, got {given!r}."
            )
        if len(salts) != self.chunks:
            raise ValueError(
                f"{where}: chunks={self.chunks}, but there are {len(salts)} "
                "salts: give one for each chunk, or one number for all."
            )
        if len(set(salts)) < len(salts):
            raise ValueError(
                f"{where}: two chunks have one salt, which would give them "
                f"the same rows: {list(salts)}."
            )
        object.__setattr__(self, "salts", salts)


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixNGrams:
    """Gives each id a row for each prefix of its item's code.

    A code, or semantic id, is a short list of integers made of an item's
    content, from coarse to fine, such as the numbers of its nested clusters:
    similar items begin alike (Rajput et al. 2023, "Recommender Systems with
    Generative Retrieval"; Singh et al. 2023, "Better Generalization with
    Semantic IDs"). With a row for each prefix (Zheng et al. 2025, "Enhancing
    Embedding Representation Stability in Recommendation Systems with Semantic
    ID") items share what their common prefixes learn, so an item without a
    training example begins with the vector of its kind.

    Rows are exact: no two prefixes share one. Prefixes are numbered from row 0
    in the order in which `codes` has them, item after item and from short to
    long. Codes of new items at the end of `codes` leave the rows of the others
    as they are. Items of one code have one vector. For fewer rows give fewer
    levels: `codes[:, :2]`.

    Example:
        >>> codes = [[0, 3], [0, 4], [1, 3], [0, 3]]
        >>> hashing = tfrs_embed.PrefixNGrams(codes)
        >>> hashing.rows.tolist()
        [[0, 1], [0, 2], [3, 4], [0, 1]]
        >>> table = tfrs_embed.TableConfig("movies", 5, 16)
        >>> feature = tfrs_embed.FeatureConfig("movie", table, hashing=hashing)
        >>> layer = tfrs_embed.PartialTPUEmbedding(feature, "adagrad")
        >>> layer(tf.constant([2, 0])).shape
        TensorShape([2, 16])

    Attributes:
        codes: the code of item i at [i], integers of at least 0,
            [items, levels]; ids are 0 to items - 1. Kept as a read-only array.
        operation: how the vectors of a code's prefixes become one: "add", their
            sum; "concat", one after the other, from short to long, so levels
            times as wide as the table. The table's combiner then combines a
            sample's ids.
        padding_value: see `Hash`; an integer.

    Raises:
        ValueError: `codes` has another shape or a negative number, or
            `operation` is unknown.
        TypeError: `codes` has no integers, or `padding_value` is none.
    """

    codes: Any = dataclasses.field(repr=False)
    operation: Literal["add", "concat"] = "add"
    padding_value: int | None = None

    def __post_init__(self) -> None:
        where = "PrefixNGrams"
        convert_fields(self, where, codes=_codes, padding_value=padding)
        choice(self.operation, ("add", "concat"), f"{where}: operation")
        _require_integer_padding(self.padding_value, where, "")

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows of each item's prefixes, [items, levels] int64."""
        items, levels = self.codes.shape
        prefix = np.zeros(items, np.int64)
        prefixes = []
        for level in range(levels):
            _, code = np.unique(self.codes[:, level], return_inverse=True)
            _, prefix = np.unique(prefix * items + code, return_inverse=True)
            prefixes.append(prefix * levels + level)
        _, first, index = np.unique(
            np.stack(prefixes, 1), return_index=True, return_inverse=True
        )
        # The rank of each prefix's first occurrence.
        row = np.argsort(np.argsort(first))
        return row[index].reshape(self.codes.shape)

    @property
    def num_rows(self) -> int:
        """The number of different prefixes of all codes."""
        return int(self.rows.max()) + 1


#: How a feature's ids become rows of its table.
Hashing = Hash | QuotientRemainder | Multiplex | PrefixNGrams

KINDS = get_args(Hashing)


def lookups(hashing: Hashing) -> tuple[str, ...]:
    """Returns the names of an id's rows; "" for the only one."""
    if isinstance(hashing, QuotientRemainder):
        return ("remainder", "quotient")
    if isinstance(hashing, Multiplex):
        return tuple(f"chunk_{i}" for i in range(hashing.chunks))
    if isinstance(hashing, PrefixNGrams):
        return tuple(f"prefix_{i + 1}" for i in range(hashing.codes.shape[1]))
    return ("",)


def width(hashing: Hashing | None, dim: int) -> int:
    """Returns the width of a feature's vectors, for a table of width `dim`."""
    if hashing is None:
        return dim
    side_by_side = getattr(hashing, "operation", "concat") == "concat"
    return dim * (len(lookups(hashing)) if side_by_side else 1)


def multiplies(hashing: Hashing | None) -> bool:
    """Whether an id's rows are multiplied, before ids are combined."""
    return (
        isinstance(hashing, QuotientRemainder) and hashing.operation == "mult"
    )


def num_ids(hashing: Hashing | None, rows: int) -> int | None:
    """Returns the number of ids, from 0; None: integers and strings are ids.

    `rows` is the table's number of rows.
    """
    if hashing is None:
        return rows
    if isinstance(hashing, QuotientRemainder):
        return None if hashing.hashed else hashing.num_categories
    return len(hashing.codes) if isinstance(hashing, PrefixNGrams) else None


def num_collisions(hashing: QuotientRemainder, rows: int) -> int:
    """Returns the number of remainders: the smallest with which rows fit.

    If none does, the one with the fewest rows.
    """
    if hashing.num_collisions is not None:
        return hashing.num_collisions
    count = hashing.num_categories

    def needed(collisions: int) -> int:
        return collisions + -(-count // collisions)

    # The number of rows is least about the square root.
    middle = math.isqrt(count)
    best = min(middle, middle + 1, key=needed)
    smaller = range(-(-count // rows), best)
    return next((m for m in smaller if needed(m) <= rows), best)


def check(hashing: Any, rows: int, where: str) -> None:
    """Checks a feature's hashing against its table's number of rows."""
    if not isinstance(hashing, KINDS):
        raise TypeError(
            f"{where}: hashing must be a Hash, a QuotientRemainder, a "
            f"Multiplex, a PrefixNGrams or None, got {hashing!r}."
        )
    if isinstance(hashing, QuotientRemainder):
        remainders = num_collisions(hashing, rows)
        quotients = -(-hashing.num_categories // remainders)
        need = remainders + quotients
        reason = f"{remainders} for remainders and {quotients} for quotients "
        reason += f"of {hashing.num_categories} categories"
    elif isinstance(hashing, PrefixNGrams):
        need, reason = hashing.num_rows, "one for each prefix of its codes"
    else:
        need, reason = hashing.buckets or 0, "one for each of its buckets"
    if need > rows:
        raise ValueError(
            f"{where}: {type(hashing).__name__} needs at least {need} rows, "
            f"{reason}; the table has {rows}."
        )


def _codes(value: Any, what: str) -> np.ndarray:
    """Returns a copy of codes as int64 that nobody can write to."""
    try:
        given = np.asarray(value)
    except ValueError:  # NumPy's own words are of inhomogeneous shapes.
        raise ValueError(f"{what} must be of one length.") from None
    if given.ndim != 2 or not given.size:
        raise ValueError(
            f"{what} must be [items, levels] with at least one of each, got "
            f"the shape {list(given.shape)}."
        )
    if given.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, got {given.dtype.name}.")
    wrong = (given < 0) | (given > _MOST)
    if wrong.any():
        item, level = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{what} must be from 0 to 2^63 - 1, got "
            f"{given[item, level]} for item {item} at level {level}."
        )
    codes = np.array(given, np.int64)
    codes.setflags(write=False)
    return codes


def _require_integer_padding(value: Any, where: str, when: str) -> None:
    if isinstance(value, str):
        raise TypeError(
            f"{where}: padding_value={value!r} is a string, but ids are "
            f"integers{when}."
        )


def _salt_number(value: Any, what: str) -> int:
    number = as_int(value)
    if number is None or not 0 <= number <= _MOST:
        kind = TypeError if number is None else ValueError
        raise kind(
            f"{what} must be of integers from 0 to 2^63 - 1, got {value!r}."
        )
    return number


def _salt(value: Any, what: str) -> tuple[int, int] | None:
    """Returns a salt as the two integers that SipHash takes."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        number = _salt_number(value, what)
        return number, number
    numbers = [_salt_number(each, what) for each in value]
    if len(numbers) != 2:
        raise ValueError(
            f"{what} must be an integer or two, got {len(numbers)}."
        )
    return numbers[0], numbers[1]
