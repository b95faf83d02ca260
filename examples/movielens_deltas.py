"""A model that is served while it is trained: the server gets deltas.

The server rates what people will rate next, as those have who asked it. Then
the model, that of movielens_stream.py, is trained on these ratings, and what
has changed in it goes to the server. Users and movies come, and others lose
their rows to them.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence

import movielens
import movielens_server
import numpy as np
import tensorflow as tf
import tf_keras
from movielens_stream import ROW, SPECS, StreamModel

import tfrs_embed

#: A table has rows for this part of all users, and of all movies.
CAPACITY = 0.5
BATCH = 64


def run(
    ratings: movielens.Stream,
    hours: int,
    command: Sequence[str],
    folder: pathlib.Path,
) -> float:
    """Trains, serves and sends deltas.

    Args:
        ratings: all ratings.
        hours: the hours between two deltas.
        command: the server's.
        folder: where the model and the deltas go.

    Returns:
        The RMSE of the server's ratings, of stars scaled to 0..1.
    """
    model = make_model(ratings)
    first, *periods = ratings.periods(hours)
    train(model, first)
    base = folder / "model"
    tfrs_embed.serving.export(
        model,
        base,
        signatures={
            "serving_default": (
                lambda ids: {"rating": model.rate(ids)},
                [SPECS],
            )
        },
        updatable=True,
    )
    size = sum(file.stat().st_size for file in base.glob("variables/*"))
    print(f"exported after {len(first):,} ratings: {size:,} bytes")
    print("delta  ratings      bytes  written  applied  server - model   rmse")
    errors, since, steps = [], base, len(first)
    with (
        movielens_server.serving(command, base) as port,
        others_asking(port, first) as asked,
    ):
        client = movielens_server.Client(port)
        for number, period in enumerate(periods, 1):
            served = rate(client, period)
            errors.append(
                movielens.scale(served) - movielens.scale(period.rating)
            )
            train(model, period)
            steps += len(period)
            delta, start = folder / f"delta-{number}", time.perf_counter()
            tfrs_embed.serving.export_delta(model, delta, since=since)
            written = time.perf_counter()
            answer = client.ask("apply_delta", path=str(delta))
            applied = time.perf_counter()
            assert answer["number"] == number, answer
            served = rate(client, period)
            difference = np.abs(served - model.rate(ids_of(period))).max()
            # A float32's last digits: the two compute in another order.
            assert difference < 1e-5, difference
            size = sum(f.stat().st_size for f in folder.glob(f"{delta.name}.*"))
            print(
                f"{number:5}  {steps:7,}  {size:9,}  {written - start:5.2f} s"
                f"  {applied - written:5.3f} s  {difference:14.0e}"
                f"  {np.sqrt(np.mean(errors[-1] ** 2)):.4f}",
                flush=True,
            )
            since = delta
        # The server says no, and goes on as before.
        try:
            client.ask("apply_delta", path=str(folder / "none"))
        except movielens_server.Refused:
            np.testing.assert_array_equal(rate(client, period), served)
        else:
            raise AssertionError("The server has applied nothing.")
    print(f"meanwhile the server answered {len(asked):,} other requests")
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))


def make_model(ratings: movielens.Stream) -> StreamModel:
    """Makes a model whose tables note which rows change."""
    ids = {"user": ratings.user_id, "movie": ratings.movie_id}
    tables = [
        tfrs_embed.TableConfig(
            name,
            vocabulary_size=int(CAPACITY * len(np.unique(values))),
            embedding_dim=ROW,
            initializer=tf_keras.initializers.RandomNormal(stddev=0.03, seed=0),
            keys=tfrs_embed.DynamicKeys(eviction="lfu"),
        )
        for name, values in ids.items()
    ]
    model = StreamModel(tables, BATCH, learning_rate=0.1, penalty=0.1)
    for table in model.embeddings.tables.values():
        table.track_changes()
    return model


def train(model: StreamModel, period: movielens.Stream) -> None:
    """Trains on a period's ratings, in their order."""
    for start in range(0, len(period), BATCH):
        batch = period[start : start + BATCH]
        model.learn(ids_of(batch), tf.constant(batch.rating))


def rate(
    client: movielens_server.Client, period: movielens.Stream
) -> np.ndarray:
    """Asks the server for a period's ratings."""
    answer = client.ask(user=period.user_id, movie=period.movie_id)
    return answer["rating"]


def ids_of(period: movielens.Stream) -> dict[str, tf.Tensor]:
    """The ids of ratings, as the model takes them."""
    return {
        "user": tf.constant(period.user_id),
        "movie": tf.constant(period.movie_id),
    }


@contextlib.contextmanager
def others_asking(
    port: int, ratings: movielens.Stream
) -> Iterator[list[float]]:
    """Asks a server some 50 times a second; yields the answers' seconds."""
    seconds: list[float] = []
    failed: list[Exception] = []
    end = threading.Event()

    def ask() -> None:
        client = movielens_server.Client(port)
        try:
            while not end.wait(0.02):
                start = time.perf_counter()
                rate(client, ratings[:20])
                seconds.append(time.perf_counter() - start)
        except Exception as error:
            failed.append(error)
        finally:
            client.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        end.set()
        thread.join()
    if failed:
        raise failed[0]
