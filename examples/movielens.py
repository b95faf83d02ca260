"""MovieLens-100K (Harper & Konstan 2015) as categorical features.

The files are those in the PyPI package recbole, tab-separated with one header
line: `.inter` (user, movie, rating, time), `.user` and `.item`.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import hashlib
import importlib.util
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

RATINGS, USERS, MOVIES = "ml-100k.inter", "ml-100k.user", "ml-100k.item"
TEST_PART = 0.2
MAX_HISTORY = 50
#: The MD5 of GroupLens's u.data: of the file of ratings without its header.
U_DATA_MD5 = "6e47046882bad158b0efbb84cd5cb987"
#: The features that tell users, and movies, one from the other.
IDS = ("user", "movie")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A categorical feature of users or of movies.

    Attributes:
        ids: a row per user or movie: one id, or if ragged, any number.
        vocabulary_size: ids are below it.
    """

    ids: tf.Tensor | tf.RaggedTensor
    vocabulary_size: int


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Who rated what: a user's row, a movie's row and the stars they gave."""

    user: np.ndarray
    movie: np.ndarray
    rating: np.ndarray

    def __len__(self) -> int:
        return len(self.rating)

    def __getitem__(self, rows: np.ndarray) -> Ratings:
        return Ratings(self.user[rows], self.movie[rows], self.rating[rows])


@dataclasses.dataclass(frozen=True)
class Stream:
    """All ratings, in the order in which they were given.

    Attributes:
        user_id: MovieLens's number for who rated.
        movie_id: MovieLens's number for what was rated.
        rating: the stars.
        time: when, in seconds since 1970.
    """

    user_id: np.ndarray
    movie_id: np.ndarray
    rating: np.ndarray
    time: np.ndarray

    def __len__(self) -> int:
        return len(self.rating)

    def __getitem__(self, rows: np.ndarray | slice) -> Stream:
        return Stream(
            self.user_id[rows],
            self.movie_id[rows],
            self.rating[rows],
            self.time[rows],
        )

    def periods(self, hours: int) -> list[Stream]:
        """Cuts it into periods; those without ratings are left out.

        Args:
            hours: the hours of a period; the first begins with the first
                rating.
        """
        number = (self.time - self.time[0]) // (hours * 3600)
        cuts = np.flatnonzero(np.diff(number)) + 1
        bounds = [0, *cuts.tolist(), len(self)]
        return [self[slice(*pair)] for pair in itertools.pairwise(bounds)]


@dataclasses.dataclass(frozen=True)
class Movie:
    """What people know of a movie."""

    title: str
    genres: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MovieLens:
    """The data set.

    Attributes:
        user_ids: MovieLens's number for the user of each row.
        movie_ids: MovieLens's number for the movie of each row.
        user_features: features of users by name.
        movie_features: features of movies by name.
        train: the ratings to learn from.
        test: the ratings held out.
    """

    user_ids: np.ndarray
    movie_ids: np.ndarray
    user_features: dict[str, Feature]
    movie_features: dict[str, Feature]
    train: Ratings
    test: Ratings

    @property
    def features(self) -> dict[str, Feature]:
        """All features by name."""
        return self.user_features | self.movie_features

    def join(self, user: tf.Tensor, movie: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the features of pairs of a user's and a movie's row."""
        sides = ((self.user_features, user), (self.movie_features, movie))
        return {
            name: tf.gather(feature.ids, rows)
            for features, rows in sides
            for name, feature in features.items()
        }

    def dataset(
        self,
        ratings: Ratings,
        batch_size: int,
        shuffle_seed: int | None = None,
        context: tf.distribute.InputContext | None = None,
        full_batches: bool = False,
    ) -> tf.data.Dataset:
        """Batches of features and "rating", shuffled if a seed is given.

        Args:
            ratings: what to make batches of.
            batch_size: the number of ratings in a batch.
            shuffle_seed: None: in order.
            context: the replicas that read the data set, if there are several.
                Each batch becomes one part for each of this process's replicas;
                all replicas' parts are the batch. All processes must give the
                same seed, and have the same `tf.random.set_seed`.
            full_batches: drop a last batch that is smaller, so that shapes are
                fixed, as on TPUs; `batch_size` must divide by the replicas.

        Returns:
            The data set; it repeats forever if a context is given.
        """

        def inputs(rows: tf.Tensor) -> dict[str, tf.Tensor]:
            user = tf.gather(ratings.user, rows)
            movie = tf.gather(ratings.movie, rows)
            rating = tf.gather(ratings.rating, rows)
            return {**self.join(user, movie), "rating": rating}

        dataset = tf.data.Dataset.range(len(ratings))
        if shuffle_seed is not None:
            dataset = dataset.shuffle(len(ratings), shuffle_seed)
        dataset = dataset.batch(batch_size, drop_remainder=full_batches)
        if context is not None:
            # Strategies ask for the number of steps, and read past no end.
            dataset = dataset.repeat().flat_map(_parts(context))
            if full_batches:
                part = batch_size // context.num_replicas_in_sync
                dataset = dataset.map(
                    lambda rows: tf.ensure_shape(rows, [part])
                )
        # Mapped after batching: a few gathers per batch, not per rating.
        dataset = dataset.map(inputs)
        if full_batches:
            dataset = dataset.map(_with_static_rows)
        return dataset.prefetch(tf.data.AUTOTUNE)

    def pairs(
        self,
        ratings: Ratings,
        batch_size: int,
        shuffle_seed: int | None = None,
    ) -> tf.data.Dataset:
        """Batches of ids of user and movie, and of ratings on a scale to 1.

        Args:
            ratings: see `dataset`.
            batch_size: see `dataset`.
            shuffle_seed: see `dataset`.

        Returns:
            The data set, of (ids by name, ratings [batch, 1]).
        """

        def for_fit(
            batch: dict[str, tf.Tensor],
        ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            ids = {name: batch[name] for name in IDS}
            return ids, scale(batch["rating"][:, None])

        return self.dataset(ratings, batch_size, shuffle_seed).map(for_fit)

    def __str__(self) -> str:
        lengths = {
            name: np.mean(feature.ids.row_lengths())
            for name, feature in self.features.items()
            if isinstance(feature.ids, tf.RaggedTensor)
        }
        return (
            f"MovieLens-100K: {len(self.user_ids):,} users, "
            f"{len(self.movie_ids):,} movies, "
            f"{len(self.train) + len(self.test):,} ratings: "
            f"{len(self.train):,} to train on, {len(self.test):,} to test\n"
            f"mean rating {np.mean(self.train.rating):.3f}, "
            f"standard deviation {np.std(self.train.rating):.3f}; mean length "
            f"of {', '.join(f'{n} {v:.1f}' for n, v in lengths.items())}"
        )


def scale(stars: Any) -> Any:
    """Brings ratings of 1 to 5 stars to a scale from 0 to 1."""
    return (stars - 1.0) / 4.0


def check_saved(
    model: Any,
    test: tf.data.Dataset,
    load_model: Callable[[pathlib.Path], Any],
) -> None:
    """Saves a model, loads it on one device and checks its predictions.

    Args:
        model: the model.
        test: what to predict.
        load_model: its Keras's.

    Raises:
        AssertionError: they are not the model's.
    """
    with tempfile.TemporaryDirectory(prefix="movielens_") as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        size = path.stat().st_size
        loaded = load_model(path)
    np.testing.assert_allclose(
        loaded.predict(test, verbose=0),
        model.predict(test, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )
    print(f"saved as .keras, {size:,} bytes; loaded, it predicts the same")


def find() -> pathlib.Path:
    """Returns the folder of the files in the installed package recbole.

    Raises:
        FileNotFoundError: it isn't installed.
    """
    # Only its files are of use: importing recbole would ask for PyTorch.
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "MovieLens-100K is read from the package recbole, which is not "
            "installed: pip install --no-deps recbole==1.2.1"
        )
    root = pathlib.Path(spec.submodule_search_locations[0])
    return root / "dataset_example" / "ml-100k"


def load(
    folder: pathlib.Path,
    seed: int = 0,
    split: tuple[np.ndarray, np.ndarray] | None = None,
) -> MovieLens:
    """Reads the data set and holds out a fifth of the ratings.

    Args:
        folder: where the files are.
        seed: of the split, and of the choice of long histories.
        split: rows of the file of ratings to train on, and rows to hold out,
            in place of the drawn fifth.

    Returns:
        The data set.

    Raises:
        FileNotFoundError: a file is missing.
    """
    for name in (RATINGS, USERS, MOVIES):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no file {name}.")
    user_id, movie_id, stars, _ = _read(folder / RATINGS)
    user_ids, age, gender, occupation, zip_code = _read(folder / USERS)
    movie_ids, title, year, genres = _read(folder / MOVIES)
    ratings = Ratings(
        _rows(user_id, user_ids),
        _rows(movie_id, movie_ids),
        np.array(stars, np.float32),
    )

    rng = np.random.default_rng(seed)
    if split is None:
        order = rng.permutation(len(ratings))
        held_out = int(TEST_PART * len(ratings))
        split = order[held_out:], order[:held_out]
    else:
        split = rng.permutation(split[0]), split[1]
    train, test = ratings[split[0]], ratings[split[1]]

    # That a user rated a movie tells something beyond the stars (SVD++, Koren
    # 2008). What is held out must not show; `train` is in random order, so a
    # long history becomes a sample.
    history: list[list[int]] = [[] for _ in user_ids]
    for user, movie in zip(train.user, train.movie, strict=True):
        if len(history[user]) < MAX_HISTORY:
            history[user].append(movie)

    return MovieLens(
        user_ids=np.array(user_ids, np.int64),
        movie_ids=np.array(movie_ids, np.int64),
        user_features={
            "user": _one(user_ids),
            "gender": _one(gender),
            "age": _one([min(int(a) // 5, 12) for a in age]),
            "occupation": _one(occupation),
            "zip": _one([z[:2] for z in zip_code]),
            "history": Feature(
                tf.ragged.constant(history, dtype=tf.int32), len(movie_ids)
            ),
        },
        movie_features={
            "movie": _one(movie_ids),
            "year": _one(year),
            "genres": _many([g.split() for g in genres]),
            # A word of a single title tells no more than the movie's id.
            "title": _many(
                [re.findall(r"[a-z0-9']+", t.lower()) for t in title],
                min_count=2,
            ),
        },
        train=train,
        test=test,
    )


def fold_u1(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray] | None:
    """GroupLens's fold u1, on which several publications test their models.

    Args:
        folder: where the files are.

    Returns:
        Rows of the file of ratings to train on, and rows to hold out: the first
        fifth. None: the file's ratings are not those of u.data in its order.

    Raises:
        FileNotFoundError: the file is missing.
    """
    if not (folder / RATINGS).is_file():
        raise FileNotFoundError(f"{folder} has no file {RATINGS}.")
    _, _, body = (folder / RATINGS).read_bytes().partition(b"\n")
    if hashlib.md5(body).hexdigest() != U_DATA_MD5:
        return None
    rows = np.arange(body.count(b"\n"))
    held_out = int(TEST_PART * len(rows))
    return rows[held_out:], rows[:held_out]


def load_movies(folder: pathlib.Path) -> list[Movie]:
    """Reads titles and genres.

    Args:
        folder: where the files are.

    Returns:
        The movies, in the order of their rows.

    Raises:
        FileNotFoundError: the file is missing.
    """
    if not (folder / MOVIES).is_file():
        raise FileNotFoundError(f"{folder} has no file {MOVIES}.")
    _, title, _, genres = _read(folder / MOVIES)
    return [
        Movie(t, tuple(g.split())) for t, g in zip(title, genres, strict=True)
    ]


def load_years(folder: pathlib.Path) -> np.ndarray:
    """Reads the year of each movie, of an unknown one 1990.

    Args:
        folder: where the files are.

    Returns:
        The years, in the order of the movies' rows.
    """
    _, _, years, _ = _read(folder / MOVIES)
    return np.array([int(y) if y.isdigit() else 1990 for y in years], float)


def load_titles(folder: pathlib.Path) -> dict[int, str]:
    """Reads each movie's title and year, by MovieLens's number.

    Args:
        folder: where the files are.

    Raises:
        FileNotFoundError: the file is missing.
    """
    if not (folder / MOVIES).is_file():
        raise FileNotFoundError(f"{folder} has no file {MOVIES}.")
    movie_id, title, year, _ = _read(folder / MOVIES)
    return {
        int(i): f"{t} ({y})"
        for i, t, y in zip(movie_id, title, year, strict=True)
    }


def load_stream(folder: pathlib.Path) -> Stream:
    """Reads all ratings, by time; those of one second by user and movie.

    Args:
        folder: where the files are.

    Raises:
        FileNotFoundError: the file is missing.
    """
    if not (folder / RATINGS).is_file():
        raise FileNotFoundError(f"{folder} has no file {RATINGS}.")
    user_id, movie_id, stars, time = _read(folder / RATINGS)
    ratings = Stream(
        np.array(user_id, np.int64),
        np.array(movie_id, np.int64),
        np.array(stars, np.float32),
        np.array(time, np.float64).astype(np.int64),
    )
    order = (ratings.movie_id, ratings.user_id, ratings.time)
    return ratings[np.lexsort(order)]


def _read(path: pathlib.Path) -> Iterable[tuple[str, ...]]:
    """Returns a file's columns."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(reader)
        return zip(*reader, strict=True)


def _rows(ids: Sequence[Hashable], all_ids: Sequence[Hashable]) -> np.ndarray:
    row = {id_: i for i, id_ in enumerate(all_ids)}
    return np.array([row[id_] for id_ in ids], np.int32)


def _with_static_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Gives ragged features the static number of rows that dense ones have.

    Under TPUStrategy one feature of a batch whose number isn't known makes
    that of all unknown.
    """
    rows = batch["rating"].shape[0]

    def fixed(value: Any) -> Any:
        if not isinstance(value, tf.RaggedTensor):
            return value
        splits = tf.ensure_shape(value.row_splits, [rows + 1])
        return tf.RaggedTensor.from_row_splits(
            value.values, splits, validate=False
        )

    return {name: fixed(value) for name, value in batch.items()}


def _parts(
    context: tf.distribute.InputContext,
) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Splits a batch's rows; returns the parts of this process's replicas."""
    replicas = context.num_replicas_in_sync
    here = replicas // context.num_input_pipelines
    first = context.input_pipeline_id * here

    def parts(rows: tf.Tensor) -> tf.data.Dataset:
        mine = tf.data.Dataset.range(first, first + here)
        return mine.map(lambda replica: rows[replica::replicas])

    return parts


def _one(values: Sequence[Hashable]) -> Feature:
    """A feature with one value per row."""
    vocabulary = list(dict.fromkeys(values))
    return Feature(tf.constant(_rows(values, vocabulary)), len(vocabulary))


def _many(lists: Sequence[Sequence[str]], min_count: int = 1) -> Feature:
    """A feature with any number of values per row; rare ones are dropped."""
    counts = collections.Counter(v for values in lists for v in set(values))
    kept = [v for v, count in counts.items() if count >= min_count]
    index = {v: i for i, v in enumerate(sorted(kept))}
    ids = [sorted({index[v] for v in vs if v in index}) for vs in lists]
    return Feature(tf.ragged.constant(ids, dtype=tf.int32), len(index))
