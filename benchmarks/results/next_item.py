"""Ranks each user's next movie: SASRec and HSTU on the same histories.

    python benchmarks/results/next_item.py

The data and the split are those of examples/sequences.py: movies with five
ratings or more, each user's last movie for the test. Both models have its
defaults, chosen for SASRec by the validation. A step's cost is the median of 50
steps of 32 full histories, after 10, without a strategy.
"""

from __future__ import annotations

import argparse
import statistics
import time

import _examples  # noqa: F401  # Before TensorFlow.
import hstu
import movielens
import movielens_sequences as sequences
import numpy as np
import record
import sasrec
import splits
import tensorflow as tf
import tf_keras

LENGTH, BATCH, EPOCHS, LEARNING_RATE = 50, 32, 20, 3e-3
MODELS = {"SASRec": sasrec.SASRec, "HSTU": hstu.HSTU}
STEPS, WARM = 50, 10
#: What a run that only measures steps is called.
COST = "cost"


class Data:
    """Histories with their times.

    Args:
        histories: each user's movies by their rows, the oldest first.
        times: the second of each.
    """

    def __init__(
        self, histories: list[np.ndarray], times: list[np.ndarray]
    ) -> None:
        self.histories, self.times = histories, times

    def inputs(self, part: slice, window: int | None = None) -> dict:
        """Returns a part of each history as a model's inputs.

        Args:
            part: which of each user's movies.
            window: the length of the pieces that histories are cut into; None:
                they are left whole.
        """
        columns = {"history": self.histories, "time": self.times}
        rows = {name: [r[part] for r in c] for name, c in columns.items()}
        if window is not None:
            rows = {n: sequences.cut(r, window) for n, r in rows.items()}
        return {name: sequences.ragged(r) for name, r in rows.items()}


def of_model(name: str, inputs: dict) -> dict | tf.RaggedTensor:
    """Returns what the model takes of `inputs`: SASRec knows no times."""
    return inputs if name == "HSTU" else inputs["history"]


def train(name: str, data: Data, movies: int, seed: int) -> tf_keras.Model:
    """Returns a trained model."""
    tf_keras.utils.set_random_seed(seed)
    windows = of_model(name, data.inputs(slice(0, -2), LENGTH + 1))
    batches = tf.data.Dataset.from_tensor_slices(windows)
    batches = batches.shuffle(len(batches), seed).ragged_batch(BATCH)

    def adam() -> tf_keras.optimizers.Adam:
        return tf_keras.optimizers.Adam(
            tf_keras.optimizers.schedules.PolynomialDecay(
                LEARNING_RATE, EPOCHS * len(batches), 0.0
            )
        )

    model = MODELS[name](movies, adam(), length=LENGTH)
    model.compile(adam())
    model.fit(batches, epochs=EPOCHS, verbose=0)
    return model


def results(name: str, model: tf_keras.Model, data: Data) -> dict[str, float]:
    """Returns HR@10 and NDCG@10 of all movies, and of those not rated."""
    inputs = data.inputs(slice(0, -1))
    scores = sequences.predict(model, of_model(name, inputs))
    right = np.array([history[-1] for history in data.histories])
    found = {}
    for what, seen in (("", None), (" of unrated", inputs["history"])):
        hr, ndcg = sequences.metrics(scores, right, seen)
        found |= {f"HR@10{what}": hr, f"NDCG@10{what}": ndcg}
    return found


def milliseconds(data: Data, movies: int) -> dict[str, float]:
    """Returns the median time of each model's training step.

    The models take turns, so that what else the machine does meets both alike.
    """
    full = [i for i, h in enumerate(data.histories) if len(h) > LENGTH][:BATCH]
    chosen = Data(
        [data.histories[i] for i in full], [data.times[i] for i in full]
    )
    inputs = chosen.inputs(slice(-LENGTH - 1, None))
    steps, times = {}, {}
    for name, make in MODELS.items():
        model = make(movies, tf_keras.optimizers.Adam(), length=LENGTH)
        model.compile(tf_keras.optimizers.Adam())
        steps[name] = tf.function(model.train_step), of_model(name, inputs)
        times[name] = []
    for _ in range(WARM + STEPS):
        for name, (step, batch) in steps.items():
            start = time.perf_counter()
            step(batch)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t[WARM:]) for name, t in times.items()}


def main() -> None:
    """Trains both models with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=3, help="0: the cost alone"
    )
    parser.add_argument("--only", choices=MODELS)
    arguments = parser.parse_args()
    splits.read()  # It is u.data.
    path = movielens.find() / movielens.RATINGS
    histories, times, movie_ids = sequences.read_with_times(path, 1, 5)
    data, timer = Data(histories, times), record.Timer()
    for name in [arguments.only] if arguments.only else MODELS:
        for seed in range(arguments.seeds):
            model = train(name, data, len(movie_ids), seed)
            found = results(name, model, data)
            timer.report("next_item", name, f"seed {seed}", **found)
    if not arguments.only:
        for name, cost in milliseconds(data, len(movie_ids)).items():
            timer.report("next_item", name, COST, **{"ms a step": cost})


if __name__ == "__main__":
    main()
