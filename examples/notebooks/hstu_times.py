# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # HSTU: histories with times
#
# SASRec, in the notebook `attention`, knows in which order a user watched
# movies, but not whether two of them are a minute or a year apart. HSTU
# ([Zhai et al. 2024](https://arxiv.org/abs/2402.17152)) reads the times, too,
# and replaces the softmax of attention.
#
# The model is `examples/hstu.py`. Its table, its ragged histories and its loss
# are those of SASRec; read that notebook first.

# %%
import os
import pathlib
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.keras is tf_keras, for TFRS.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors only.

# The model and the data's loader are in the folder examples/.
here = pathlib.Path.cwd()
folders = [here / "examples", here, *here.parents]
sys.path.append(str(next(p for p in folders if (p / "movielens.py").is_file())))

# %%
import statistics
import time

import matplotlib.pyplot as plt
import movielens
import movielens_sequences as sequences
import numpy as np
import tensorflow as tf
import tf_keras
from hstu import HSTU
from sasrec import SASRec

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## When people rate
#
# A history is a user's movies and the second in which each was rated. The last
# movie is for the test, the others are trained on.
#
# Many ratings come within the same second as the previous one, and most within
# a minute: people rated a page of movies, and some came back weeks later.

# %%
path = movielens.find() / movielens.RATINGS
histories, times, movie_ids = sequences.read_with_times(path, 1, min_ratings=5)
gaps = np.concatenate([np.diff(t) for t in times])
bounds = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "year": 3e7}
parts = [np.mean(gaps < bound) for bound in bounds.values()]
figure, axes = plt.subplots()
axes.bar([f"< {name}" for name in bounds], parts)
axes.set(xlabel="since the previous rating", ylabel="part of the ratings")
figure.tight_layout()


# %%
def inputs(part: slice, window: int | None = None) -> dict[str, tf.Tensor]:
    """A part of each history, cut into windows, as the model's inputs."""
    rows = {"history": histories, "time": times}
    rows = {name: [row[part] for row in every] for name, every in rows.items()}
    if window is not None:
        rows = {n: sequences.cut(every, window) for n, every in rows.items()}
    return {name: sequences.ragged(every) for name, every in rows.items()}


train = inputs(slice(0, -1))
right = np.array([history[-1] for history in histories])
print(f"{len(histories)} users, {len(movie_ids):,} movies, {len(gaps):,} gaps")

# %% [markdown]
# ## Attention without a softmax
#
# For each state i, a block of HSTU computes a query, a key, a value and a gate.
# The weight of an earlier state j is
#
# silu(query i · key j + place bias[i - j] + time bias[bucket(t i - t j)]) / n
#
# where bucket is the logarithm of the seconds between both, so it tells 1 s
# from 2 s, and a week from two weeks. The weighted sum of values, normed, times
# the gate is added to state i.
#
# A softmax's weights have a sum of 1: it says which of the earlier movies
# matter most. Here the sum grows with the number of movies that matter, so the
# model can count. The gate does the work of SASRec's dense layers.

# %%
LENGTH, BATCH, EPOCHS = 50, 32, 4
batches = tf.data.Dataset.from_tensor_slices(inputs(slice(0, -1), LENGTH + 1))
batches = batches.shuffle(len(batches), seed=0).ragged_batch(BATCH)


def adam() -> tf_keras.optimizers.Adam:
    """Its rate falls linearly, to zero at the end of training."""
    return tf_keras.optimizers.Adam(
        tf_keras.optimizers.schedules.PolynomialDecay(
            3e-3, EPOCHS * len(batches), 0.0
        )
    )


model = HSTU(len(movie_ids), adam(), length=LENGTH)
model.compile(adam())  # Of all but the table. The model has its loss.
model.fit(batches, epochs=EPOCHS, verbose=2)
print(model.embeddings.placement)

# %% [markdown]
# ## Does it find the next movie?
#
# **HR@10** is the part of users whose next movie is among the first ten of all
# that they had not rated. To see what the model reads, give it the same
# histories with another order, and with another clock: a day between any two
# movies.


# %%
def hits(given: dict[str, tf.Tensor]) -> float:
    """HR@10 of the model's predictions for these inputs."""
    scores = sequences.predict(model, given)
    return sequences.metrics(scores, right, train["history"])[0]


rng = np.random.default_rng(0)
mixed = sequences.ragged([rng.permutation(h[:-1]) for h in histories])
days = sequences.ragged([86_400 * np.arange(len(h) - 1) for h in histories])
popular = np.bincount(train["history"].values, minlength=len(movie_ids))
hit_rates = {
    "popularity": sequences.metrics(
        np.tile(popular, [len(right), 1]), right, train["history"]
    )[0],
    "mixed movies": hits({**train, "history": mixed}),
    "a day apart": hits({**train, "time": days}),
    "HSTU": hits(train),
}
figure, axes = plt.subplots()
axes.barh(list(hit_rates), list(hit_rates.values()))
axes.set(xlabel="HR@10")
figure.tight_layout()

# %% [markdown]
# Without the right order it finds little more than popularity does. Without
# the right times it finds as many movies: in this data, where people rate
# whole pages of movies within minutes, the order says what there is to say.
# Look whether that is so in your data before you pay for times.
#
# ## What it has learned of time
#
# The time biases of both blocks: a high one means that movies rated so long
# before a state count for more, whatever they are. They are numbers next to
# the products of queries and keys.

# %%
seconds = 2.0 ** np.arange(24)
figure, axes = plt.subplots()
for number, block in enumerate(model.blocks, 1):
    bias = block.of_times.numpy()[: len(seconds), 0]
    axes.plot(seconds, bias, "o-", label=f"block {number}", markersize=3)
axes.set(xlabel="seconds between two movies", ylabel="bias", xscale="log")
for name, bound in list(bounds.items())[1:4]:
    axes.axvline(bound, color="grey", linestyle=":")
    axes.annotate(name, (bound, axes.get_ylim()[1]), fontsize="small")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What a step costs
#
# The same 32 histories of 51 movies for both models, which take turns. HSTU
# adds the biases, a number for each pair of movies; it has fewer dense layers.
# Take HSTU if times say something and there is data to tune it. On these
# 100,000 ratings the two find about as many movies when trained for longer: see
# [Published results](../../docs/results.md).

# %%
full = [i for i, h in enumerate(histories) if len(h) > LENGTH][:BATCH]
window = slice(-LENGTH - 1, None)
batch = {
    name: sequences.ragged([rows[i][window] for i in full])
    for name, rows in (("history", histories), ("time", times))
}
steps = {}
cost: dict[str, list[float]] = {"SASRec": [], "HSTU": []}
for name, given in (("SASRec", batch["history"]), ("HSTU", batch)):
    made = {"SASRec": SASRec, "HSTU": HSTU}[name](len(movie_ids), adam())
    made.compile(adam())
    steps[name] = tf.function(made.train_step), given
for _ in range(10):
    for name, (step, given) in steps.items():
        start = time.perf_counter()
        step(given)
        cost[name].append(time.perf_counter() - start)
for name, each in cost.items():
    print(f"{name}: {1e3 * statistics.median(each[2:]):.0f} ms a step")

# %% [markdown]
# ## The result

# %%
print(", ".join(f"{name} {rate:.4f}" for name, rate in hit_rates.items()))
assert hit_rates["HSTU"] > 1.5 * hit_rates["popularity"]
assert hit_rates["HSTU"] > 1.2 * hit_rates["mixed movies"]
