"""Measures what training loses where a row has fewer bits, in plain numpy.

MovieLens-100K's ratings are predicted by biased factorisation with Adagrad. Its
slots and the biases are float32; the vectors are of each type in turn, with the
same split, initial values and batches. New ones are rounded stochastically.
int8 is a type that the layers don't have: 8 bits for a number, and float32 for
the row's least number and the step between its 256 ones, anew in each update.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import movielens
import numpy as np

BATCH = 128
WIDTH = 32
RATE = np.float32(0.05)
PENALTY = np.float32(0.1)

#: Makes rows' float32 numbers those of a type, by random numbers.
Round = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def float32(rows: np.ndarray, _: np.random.Generator) -> np.ndarray:
    """Rows as they are."""
    return rows


def bfloat16(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of 8 bits of precision."""
    random = rng.integers(0, 1 << 16, rows.shape, np.uint32)
    return ((rows.view(np.uint32) + random) & 0xFFFF0000).view(np.float32)


def int8(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of 256 numbers each, from its least to its largest."""
    least = rows.min(1, keepdims=True)
    step = (rows.max(1, keepdims=True) - least) / np.float32(255)
    step = np.where(step > 0, step, np.float32(1))
    number = np.floor((rows - least) / step + rng.random(rows.shape, "f4"))
    return least + np.clip(number, 0, 255) * step


class Model:
    """Vectors, biases and their slots, of users and of movies."""

    def __init__(
        self, sizes: Sequence[int], mean: float, round_: Round, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self._random = np.random.default_rng([seed, 1])
        self._round = round_
        self._mean = np.float32(mean)
        # The last column is the bias.
        self._rows = [np.zeros([n, WIDTH + 1], np.float32) for n in sizes]
        self._slots = [np.full_like(rows, 0.1) for rows in self._rows]
        for rows in self._rows:
            initial = rng.normal(0, 0.1, [len(rows), WIDTH]).astype(np.float32)
            rows[:, :-1] = round_(initial, self._random)

    def predict(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """The stars that users give movies."""
        users, movies = (r[i] for r, i in zip(self._rows, ids, strict=True))
        product = (users[:, :-1] * movies[:, :-1]).sum(1)
        return self._mean + product + users[:, -1] + movies[:, -1]

    def learn(self, ids: Sequence[np.ndarray], stars: np.ndarray) -> None:
        """Trains on a batch."""
        error = (self.predict(ids) - stars).astype(np.float32)[:, None]
        found = [r[i] for r, i in zip(self._rows, ids, strict=True)]
        for k in (0, 1):
            other = found[1 - k].copy()
            other[:, -1] = 1
            unique, where = np.unique(ids[k], return_inverse=True)
            gradient = np.zeros([len(unique), WIDTH + 1], np.float32)
            np.add.at(gradient, where, error * other + PENALTY * found[k])
            self._slots[k][unique] += gradient**2
            new = self._rows[k][unique]
            new -= RATE * gradient / np.sqrt(self._slots[k][unique])
            new[:, :-1] = self._round(new[:, :-1].copy(), self._random)
            self._rows[k][unique] = new


def measure(
    data: movielens.MovieLens, round_: Round, seed: int, epochs: int
) -> float:
    """The RMSE on what was held out."""
    sizes = len(data.user_ids), len(data.movie_ids)
    train, test = data.train, data.test
    model = Model(sizes, float(train.rating.mean()), round_, seed)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(train))
        for start in range(0, len(train), BATCH):
            batch = train[order[start : start + BATCH]]
            model.learn((batch.user, batch.movie), batch.rating)
    error = model.predict((test.user, test.movie)) - test.rating
    return float(np.sqrt(np.mean(error**2)))


def main() -> None:
    """Prints a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    types = (float32, bfloat16, int8)
    print("seed", *(f"{t.__name__:>9}" for t in types))
    for seed in range(args.seeds):
        data = movielens.load(args.data or movielens.find(), seed)
        found = (measure(data, t, seed, args.epochs) for t in types)
        print(f"{seed:4}", *(f"{rmse:9.4f}" for rmse in found), flush=True)


if __name__ == "__main__":
    main()
