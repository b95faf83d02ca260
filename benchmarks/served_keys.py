"""Measures exports of the keys that matter: size against metric.

    python benchmarks/served_keys.py

Trains MovieLens-100K's ratings in the order in which they were given, in one
pass, with rows for all users and movies. The model of the first --part of the
ratings is exported with smaller and smaller parts of each table's keys
(`max_keys`), and the SavedModel predicts the other ratings. Without a row a
user's or movie's vector and bias are zeros.

The keys that are left are the most frequent ones ("lfu"), the last used ones
("lru"), or, to compare, random ones. Learning rate and penalty are those with
which a model of nine tenths of the first part predicts the tenth best.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from movielens_stream import ROW, SPECS, StreamModel

import tfrs_embed

BATCH = 64
LEARNING_RATES = (0.03, 0.1, 0.3)
PENALTIES = (0.02, 0.1, 0.4)
RANDOM = "random"
# Of the run that tunes, which is none of those that are reported.
TUNING_SEED = 1000


def train(
    ratings: movielens.Stream,
    rule: str,
    learning_rate: float,
    penalty: float,
    seed: int,
) -> StreamModel:
    """Trains a model in one pass.

    Args:
        ratings: what to learn from, in order.
        rule: the tables' eviction rule, which orders their keys.
        learning_rate: of the tables.
        penalty: of the vectors.
        seed: of initial values.
    """
    tables = [
        tfrs_embed.TableConfig(
            name,
            1024,
            ROW,
            initializer=tf_keras.initializers.RandomNormal(
                stddev=0.03, seed=seed
            ),
            keys=tfrs_embed.DynamicKeys(eviction=rule, when_full="grow"),
        )
        for name in SPECS
    ]
    model = StreamModel(tables, BATCH, learning_rate, penalty)
    for start in range(0, len(ratings), BATCH):
        batch = ratings[start : start + BATCH]
        model.learn(ids_of(batch), tf.constant(batch.rating))
    return model


def ids_of(ratings: movielens.Stream) -> dict[str, tf.Tensor]:
    """The ids of users and movies as the model takes them."""
    return {
        "user": tf.constant(ratings.user_id),
        "movie": tf.constant(ratings.movie_id),
    }


def rmse(rated: tf.Tensor, ratings: movielens.Stream) -> float:
    """The root of the mean squared error, in stars."""
    return float(np.sqrt(np.mean((rated.numpy() - ratings.rating) ** 2)))


def keep_random(model: StreamModel, counts: dict[str, int], seed: int) -> None:
    """Removes random keys from the model's tables until `counts` are left."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        table = model.embeddings.tables[name]
        keys = rng.permutation(table.keys())
        table.remove(tf.constant(keys[count:]))


def served(
    model: StreamModel, ratings: movielens.Stream, counts: dict[str, int]
) -> tuple[float, ...]:
    """Exports a model with so many keys of each table.

    Returns:
        The RMSE; the parts of the ratings whose user, and whose movie, has a
        row; and the bytes of all variables' files, and of the SavedModel.
    """
    with tempfile.TemporaryDirectory() as folder:
        tfrs_embed.serving.export(
            model,
            f"{folder}/model",
            signatures={"serving_default": (model.rate, [SPECS])},
            max_keys=counts,
            progress=False,
        )
        sizes = {
            path: path.stat().st_size
            for path in pathlib.Path(folder).rglob("*")
            if path.is_file()
        }
        reader = tf.train.load_checkpoint(f"{folder}/model/variables/variables")
        known = []
        for table in SPECS:
            [name] = [
                name
                for name in reader.get_variable_to_shape_map()
                if f"/{table}/keys" in name
            ]
            keys = reader.get_tensor(name)
            known.append(
                np.mean(np.isin(getattr(ratings, f"{table}_id"), keys))
            )
        signature = tf.saved_model.load(f"{folder}/model").signatures[
            "serving_default"
        ]
        [rated] = signature(**ids_of(ratings)).values()
    variables = [n for p, n in sizes.items() if p.parent.name == "variables"]
    return rmse(rated, ratings), *known, sum(variables), sum(sizes.values())


def main() -> None:
    """Prints a table of sizes and RMSEs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=pathlib.Path, metavar="FOLDER")
    add("--seeds", type=int, default=5)
    add("--part", type=float, default=0.9, help="of the ratings, to train on")
    add("--keys", type=float, nargs="+", default=[1, 0.5, 0.2, 0.1, 0.05])
    args = parser.parse_args()

    stream = movielens.load_stream(args.data or movielens.find())
    cut = round(args.part * len(stream))
    first, last = stream[:cut], stream[cut:]
    tuned = round(0.9 * cut)

    def tuning_error(settings: tuple[float, float]) -> float:
        model = train(first[:tuned], "lfu", *settings, TUNING_SEED)
        found = rmse(model.rate(ids_of(first[tuned:])), first[tuned:])
        return float(np.nan_to_num(found, nan=np.inf))

    best = min(itertools.product(LEARNING_RATES, PENALTIES), key=tuning_error)
    print(
        f"trained on {len(first):,} ratings, RMSE of the {len(last):,} after; "
        f"learning rate {best[0]:g}, penalty {best[1]:g}; {args.seeds} seeds"
    )
    mean = rmse(tf.fill([len(last)], first.rating.mean()), last)
    print(f"the mean of the first ratings: {mean:.4f}")
    print("| keys | chosen by | RMSE | of seeds | ratings whose user, movie "
          "has a row | variables, bytes | SavedModel, bytes |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    for rule in ("lfu", "lru", RANDOM):
        found: dict[float, list[tuple[float, ...]]] = {}
        for seed in range(args.seeds):
            trained = "lfu" if rule == RANDOM else rule
            model = train(first, trained, *best, seed)
            sizes = {n: t.size for n, t in model.embeddings.tables.items()}
            for part in sorted(args.keys, reverse=True):
                counts = {n: int(np.ceil(part * k)) for n, k in sizes.items()}
                if rule == RANDOM:
                    keep_random(model, counts, seed)
                found.setdefault(part, []).append(served(model, last, counts))
        for part, each in found.items():
            error, users, movies, variables, size = np.mean(each, 0)
            errors = [result[0] for result in each]
            print(
                f"| {part:.0%} | {rule} | {error:.4f} "
                f"| {min(errors):.4f} to {max(errors):.4f} "
                f"| {users:.0%}, {movies:.0%} "
                f"| {variables:,.0f} | {size:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
