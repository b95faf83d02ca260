"""MovieLens-100K in the order of GroupLens's file, and published splits of it.

A split is a pair of arrays: rows of the file to train on, and rows to test on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import _examples  # noqa: F401  # Before TensorFlow.
import movielens
import numpy as np

USERS, MOVIES, RATINGS = 943, 1682, 100_000
FOLDS = 5

Split = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ratings:
    """All ratings in the order of u.data.

    Attributes:
        user: MovieLens's number of each rating's user, less 1.
        movie: MovieLens's number of each rating's movie, less 1.
        stars: 1 to 5.
        time: in seconds since 1970.
    """

    user: np.ndarray
    movie: np.ndarray
    stars: np.ndarray
    time: np.ndarray


def check(body: bytes) -> None:
    """Checks that ratings are those of u.data, in its order.

    Args:
        body: the file without its header.

    Raises:
        ValueError: they are other ones.
    """
    found = hashlib.md5(body).hexdigest()
    if found != movielens.U_DATA_MD5:
        raise ValueError(
            f"The ratings have the MD5 {found}; u.data has "
            f"{movielens.U_DATA_MD5}. Published splits are of u.data's order."
        )


def read(folder: pathlib.Path | None = None) -> Ratings:
    """Reads the ratings.

    Args:
        folder: where the file is; None: in the package recbole.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is not u.data in its order.
    """
    path = (folder or movielens.find()) / movielens.RATINGS
    _, body = path.read_bytes().split(b"\n", 1)
    check(body)
    columns = np.loadtxt(body.decode().splitlines(), dtype=np.int64)
    user, movie, stars, time = columns.T
    return Ratings(user - 1, movie - 1, stars, time)


def fold(number: int) -> Split:
    """Returns GroupLens's split u1, u2, u3, u4 or u5.

    The file uN.test has a fifth of u.data's rows; uN.base has the others.

    Args:
        number: 1 to 5.
    """
    if not 1 <= number <= FOLDS:
        raise ValueError(f"fold {number}: there are the folds 1 to {FOLDS}.")
    rows = np.arange(RATINGS)
    is_test = rows // (RATINGS // FOLDS) == number - 1
    return rows[~is_test], rows[is_test]


def validation(split: Split, seed: int = 99, part: float = 0.1) -> Split:
    """Splits the training rows of `split`; its test rows are left out."""
    order = np.random.default_rng(seed).permutation(split[0])
    held_out = int(part * len(order))
    return order[held_out:], order[:held_out]


def random(seed: int, test: int = 20_000) -> Split:
    """Returns a random split with `test` rows to test on."""
    order = np.random.default_rng(seed).permutation(RATINGS)
    return order[test:], order[:test]


def leaking(seed: int, test: int = 20_000) -> Split:
    """Returns two random choices that overlap: a wrong split.

    keras_rs's DCN program takes 80,000 ratings for training of one shuffled
    pass over the data, and skips 80,000 for the test in another pass, which is
    shuffled anew. About 80% of its test is in its training set.
    """
    rng = np.random.default_rng(seed)
    one, other = rng.permutation(RATINGS), rng.permutation(RATINGS)
    return one[test:], other[:test]


def recommenders_team(ratings: Ratings) -> Split:
    """Returns the split of recommenders-team's benchmark.

    It is random within each movie: at most 75% of the movie's ratings are for
    training. The random numbers are those of `python_stratified_split` with
    its seed, 42.
    """
    random_numbers = np.random.RandomState(42).rand(RATINGS)
    order = np.lexsort((random_numbers, ratings.movie))
    movie = ratings.movie[order]
    place = np.arange(RATINGS) - np.searchsorted(movie, movie) + 1
    is_train = np.empty(RATINGS, bool)
    is_train[order] = place / np.bincount(movie)[movie] <= 0.75
    return np.flatnonzero(is_train), np.flatnonzero(~is_train)


def cornac(seed: int = 123) -> Split:
    """Returns the split of Cornac's `RatioSplit(test_size=0.2)`."""
    order = np.random.RandomState(seed).permutation(RATINGS)
    return order[:80_000], order[80_000:]


def matrix(ratings: Ratings, rows: np.ndarray) -> np.ndarray:
    """Returns which user rated which movie in `rows`, [users, movies]."""
    rated = np.zeros([USERS, MOVIES], bool)
    rated[ratings.user[rows], ratings.movie[rows]] = True
    return rated
