"""Measures what tables with few rows predict of a stream: dynamic and hashed.

MovieLens-100K's ratings in the order in which they were given, in one pass:
each day is predicted from the days before, then trained on. All contenders have
the model of examples/movielens_stream.py, its optimizer, batches and rows, for
a tenth of the users and of the movies; they differ in whose rows these are.

- hashed: a user has the row that a hash of the id says, and shares it.
- lru, lfu: tables with DynamicKeys, which give a row to whoever comes;
- the same, admitted: to whoever came often enough;
- the same, with shared rows: a part of the rows is for those who have none, who
  share these rows by a hash.
- all rows: a row for each, which is what the others would like to be.
- no rows: the mean of all ratings before.

Each has the learning rate and the penalty that were best for it over the first
days, and RMSEs, in stars, are over the days after those. Seeds decide about
initial values, the order of a day's ratings, and the hash.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import pathlib
import sys

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from movielens_stream import ROW, StreamModel

import tfrs_embed

BATCH = 64
HASHED = "hashed"
LEARNING_RATES = (0.03, 0.1, 0.3)
PENALTIES = (0.02, 0.1, 0.4, 1.6)
# The parts of the rows that keys without a row share.
SHARED = (0.0, 0.01, 0.25, 0.5)
# Of the run that tunes, which is none of those that are reported.
TUNING_SEED = 1000


def contenders(
    admission: int,
) -> dict[str, tuple[tfrs_embed.DynamicKeys | None, float]]:
    """The keys of the tables of each, and the part of rows that keys share.

    None: no keys, but hashed ids.
    """
    often = tfrs_embed.FrequencyAdmission(admission)
    found: dict[str, tuple[tfrs_embed.DynamicKeys | None, float]] = {
        HASHED: (None, 0.0)
    }
    for rule in ("lru", "lfu"):
        always = tfrs_embed.DynamicKeys(eviction=rule)
        admitted = tfrs_embed.DynamicKeys(eviction=rule, admission=often)
        for shared in SHARED:
            words = f", {shared:.0%} of the rows shared" if shared else ""
            found[rule + words] = always, shared
            after = f", admitted after {admission} ratings{words}"
            found[rule + after] = admitted, shared
    found["all rows"] = (
        tfrs_embed.DynamicKeys(eviction=None, when_full="grow"),
        0.0,
    )
    return found


def hashed(ids: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """The rows that a hash gives ids, one of many hashes."""
    salted = tf.strings.join([str(seed), ":", tf.strings.as_string(ids)])
    return tf.strings.to_hash_bucket_fast(salted, rows).numpy()


def run(
    stream: movielens.Stream,
    hours: int,
    part: float,
    keys: tfrs_embed.DynamicKeys | None,
    learning_rate: float,
    penalty: float,
    seed: int,
    periods: int | None = None,
    shared: float = 0.0,
) -> np.ndarray:
    """Predicts each period, then trains on it.

    Args:
        stream: all ratings.
        hours: those of a period.
        part: rows, as a part of all ids.
        keys: of both tables; None: ids are hashed.
        learning_rate: of the tables.
        penalty: of the vectors.
        seed: of all that is random.
        periods: ends after so many; None: goes on to the end.
        shared: the part of the rows that keys without a row share.

    Returns:
        Of each period the mean squared error; the part of its ratings whose
        user, and whose movie, has a row; and the number of ratings. [n, 4].
    """
    tables = []
    for name in ("user", "movie"):
        ids = getattr(stream, f"{name}_id")
        rows = int(np.ceil(part * len(np.unique(ids))))
        own, of_table = rows, keys
        if keys is None:
            ids = hashed(ids, rows, seed)
            stream = dataclasses.replace(stream, **{f"{name}_id": ids})
        elif shared:
            own = rows - round(shared * rows)
            of_table = dataclasses.replace(keys, fallback_rows=rows - own)
        tables.append(
            tfrs_embed.TableConfig(
                name,
                own,
                ROW,
                initializer=tf_keras.initializers.RandomNormal(
                    stddev=0.03, seed=seed
                ),
                keys=of_table,
            )
        )
    model = StreamModel(tables, BATCH, learning_rate, penalty)
    rng = np.random.default_rng(seed)
    found = []
    for period in stream.periods(hours)[:periods]:
        errors = model.rate(_ids(period)) - period.rating
        ids, live = _ids(period), model.embeddings.tables
        known = [
            1.0 if keys is None else np.mean(live[n].lookup(ids[n]) >= 0)
            for n in ("user", "movie")
        ]
        found.append((float(tf.reduce_mean(errors**2)), *known, len(period)))
        order = rng.permutation(len(period))
        for start in range(0, len(order), BATCH):
            batch = period[order[start : start + BATCH]]
            model.learn(_ids(batch), tf.constant(batch.rating))
    return np.array(found)


def _ids(ratings: movielens.Stream) -> dict[str, tf.Tensor]:
    return {
        "user": tf.constant(ratings.user_id),
        "movie": tf.constant(ratings.movie_id),
    }


def over(found: np.ndarray) -> np.ndarray:
    """RMSE, known users and known movies over periods, as `run` has them."""
    error, users, movies = np.average(found[:, :3], 0, weights=found[:, 3])
    return np.array([np.sqrt(error), users, movies])


def of_means(stream: movielens.Stream, hours: int) -> np.ndarray:
    """What the mean of all ratings before predicts, as `run` returns it."""
    found, total, count = [], 3.5, 1
    for period in stream.periods(hours):
        errors = period.rating - total / count
        found.append((np.mean(errors**2), 0, 0, len(period)))
        total += float(np.sum(period.rating))
        count += len(period)
    return np.array(found)


def main() -> None:
    """Prints a table of RMSEs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER")
    add = parser.add_argument
    add("--seeds", type=int, default=5)
    add("--part", type=float, default=0.1, help="rows, as a part of the ids")
    add("--hours", type=int, default=24, help="those of a period")
    add("--tuned", type=int, default=60, help="days that settings are for")
    add("--admission", type=int, default=4, help="ratings before a row")
    add("--only", default="", help="contenders whose names contain this")
    args = parser.parse_args()

    stream = movielens.load_stream(args.data or movielens.find())
    tuned = sum(
        period.time[0] - stream.time[0] < args.tuned * 86_400
        for period in stream.periods(args.hours)
    )
    print(
        f"rows for {args.part:.0%} of the ids; each {args.hours} hours are "
        f"predicted from all before; {args.seeds} seeds"
    )
    print("| | learning rate, penalty | RMSE | of seeds | ratings whose user "
          "| and movie has a row |\n|---|---|---|---|---|---|")  # fmt: skip
    for name, (keys, shared) in contenders(args.admission).items():
        if args.only not in name:
            continue

        def measure(
            settings: tuple[float, float],
            seed: int,
            periods: int | None = None,
            keys: tfrs_embed.DynamicKeys | None = keys,
            shared: float = shared,
        ) -> np.ndarray:
            return run(
                stream,
                args.hours,
                args.part,
                keys,
                *settings,
                seed,
                periods,
                shared,
            )

        # A rate may be too much for a contender: that is no best one.
        best = min(
            itertools.product(LEARNING_RATES, PENALTIES),
            key=lambda s: np.nan_to_num(
                over(measure(s, TUNING_SEED, tuned))[0], nan=np.inf
            ),
        )
        results = np.array(
            [over(measure(best, seed)[tuned:]) for seed in range(args.seeds)]
        )
        mean, [least, _, _], [most, _, _] = (
            f(results, axis=0) for f in (np.mean, np.min, np.max)
        )
        print(
            f"| {name} | {best[0]:g}, {best[1]:g} | {mean[0]:.4f} "
            f"| {least:.4f} to {most:.4f} | {mean[1]:.0%} | {mean[2]:.0%} |",
            flush=True,
        )
    print(
        f"| no rows | | {over(of_means(stream, args.hours)[tuned:])[0]:.4f} "
        "| | | |"
    )


if __name__ == "__main__":
    main()
