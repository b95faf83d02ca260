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
# # Sequences: which movie comes next
#
# What somebody watches next depends on what came before. This notebook reads a
# user's last movies, in order, with a GRU, and predicts the next one. The
# embedding layer gives sequences (`max_sequence_length`) and their masks.
#
# The model is of tf_keras, as the layers of `tfrs_embed` are. It never says
# `tf.keras`, so it would work without `TF_USE_LEGACY_KERAS`; it is set as in
# the other notebooks, so that cells can be moved between them.

# %%
import os
import pathlib
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.keras is tf_keras, for TFRS.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors only.

# The data's loader is in the folder examples/ of the repository.
here = pathlib.Path.cwd()
folders = [here / "examples", here, *here.parents]
sys.path.append(str(next(p for p in folders if (p / "movielens.py").is_file())))

# %%
import csv

import matplotlib.pyplot as plt
import movielens
import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## The data
#
# `load_stream` has all ratings by time. Here they become one list of movies for
# each user. Each user's last five are held out.

# %%
folder = movielens.find()
stream = movielens.load_stream(folder)
with (folder / movielens.MOVIES).open(encoding="utf-8", newline="") as file:
    rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
title_of = {int(row[0]): f"{row[1]} ({row[2]})" for row in rows}

HELD_OUT = 5
user_ids = np.unique(stream.user_id)
# MovieLens's numbers begin with 1: row 0 stays free, for "no movie" in labels.
watched = [stream.movie_id[stream.user_id == user] for user in user_ids]
movies = 1 + int(stream.movie_id.max())
train = [movie_ids[:-HELD_OUT] for movie_ids in watched]
lengths = [len(movie_ids) for movie_ids in train]
print(
    f"{len(watched)} users, {movies - 1} movies; {min(lengths)} to "
    f"{max(lengths)} movies of a user to train on"
)

# %% [markdown]
# ## A sequence and its mask
#
# Ids of a sequence come as a ragged tensor, one row for each user. A feature
# with `max_sequence_length` gives a vector for each of them, in place of the
# one that a combiner would make: `[batch, length, dim]`. Short ones are padded
# with zeros, long ones are cut **at the end**: cut them yourself where the
# latest ids are the ones that matter, as here.
#
# The mask says what is padding. Keras's layers behind pass it on, and take it
# into account, without a line of code.

# %%
LENGTH, DIM = 40, 48


def sequence_layer() -> tfrs_embed.PartialTPUEmbedding:
    """Vectors of the movies of a sequence."""
    table = tfrs_embed.TableConfig("movies", movies, DIM)
    return tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movies", table, max_sequence_length=LENGTH),
        tf_keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-3),
        size_threshold=1000,
        name="movies",
    )


ids = tf.ragged.constant([[7, 50, 181], [98], []], dtype=tf.int64)
layer = sequence_layer()
print("vectors:", layer(ids).shape)
print("mask, first 6 of", LENGTH)
print(layer.compute_mask(ids).numpy()[:, :6].astype(int))

# %% [markdown]
# ## Examples for training
#
# Each user's list is cut into windows. In a window every movie is what the ones
# before it should predict: the inputs are all but the last, the labels all but
# the first. So one window gives up to 40 predictions to learn from.

# %%
windows = [
    movie_ids[max(0, end - LENGTH - 1) : end]
    for movie_ids in train
    for end in range(len(movie_ids), 1, -LENGTH)
]
inputs = tf.ragged.constant([w[:-1] for w in windows], dtype=tf.int64)
labels = np.zeros([len(windows), LENGTH], np.int64)
for label, window in zip(labels, windows, strict=True):
    label[: len(window) - 1] = window[1:]
batches = (
    tf.data.Dataset.from_tensor_slices((inputs, labels))
    .shuffle(len(windows), seed=0)
    .batch(64)
)
print(f"{len(windows):,} windows, {np.count_nonzero(labels):,} movies to learn")

# %% [markdown]
# ## The model
#
# The GRU reads the vectors in order; behind each movie its state scores all
# movies. It gets the layer's mask, and hands it on to the loss, which then
# leaves padding out: no `sample_weight` is needed.
#
# The table is large (more than `size_threshold` rows), and trained by the
# layer's Adagrad; the GRU and the dense layer by Adam.

# %%
movie_ids = tf_keras.Input([None], dtype="int64", ragged=True, name="ids")
layer = sequence_layer()
states = tf_keras.layers.GRU(96, return_sequences=True)(layer(movie_ids))
states = tf_keras.layers.Dropout(0.2)(states)
scores = tf_keras.layers.Dense(movies)(states)
model = tf_keras.Model(movie_ids, scores)
model.compile(
    tf_keras.optimizers.Adam(0.006),
    tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
EPOCHS = 5
losses = model.fit(batches, epochs=EPOCHS, verbose=2).history["loss"]
print(layer.placement)

# %%
figure, axes = plt.subplots()
axes.plot(range(1, EPOCHS + 1), losses, "o-", label="GRU")
axes.axhline(
    np.log(movies - 1), color="grey", linestyle=":", label="any movie alike"
)
axes.set(xlabel="epoch", ylabel="cross-entropy", xticks=range(1, EPOCHS + 1))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Does it find the next movie?
#
# For each held-out movie the model reads the 40 before it. **Hits at k**: how
# often the movie is among the k best. Movies that the user has seen are left
# out. Popularity, the predictor to beat, does not look at the order.

# %%
cases = [
    (movie_ids_[:at], movie_ids_[at])
    for movie_ids_ in watched
    for at in range(len(movie_ids_) - HELD_OUT, len(movie_ids_))
]
before = tf.ragged.constant([c[0][-LENGTH:] for c in cases], dtype=tf.int64)
nexts = np.array([c[1] for c in cases])
last = np.array([min(len(c[0]), LENGTH) - 1 for c in cases])

seen = np.zeros([len(cases), movies], bool)
seen[:, 0] = True  # No movie.
for row, (movie_ids_, _) in zip(seen, cases, strict=True):
    row[movie_ids_] = True


def hits(scores: np.ndarray) -> np.ndarray:
    """Hits at 1 to 50."""
    scores = np.where(seen, -np.inf, scores)
    of_next = np.take_along_axis(scores, nexts[:, None], axis=1)
    rank = np.count_nonzero(scores > of_next, axis=1)
    return np.array([np.mean(rank < k) for k in range(1, 51)])


# A model that answers with the last movie's scores only: 40 times less memory.
state = tf_keras.layers.Lambda(lambda each: tf.gather(*each, batch_dims=1))
position = tf_keras.Input([], dtype="int64", name="position")
answer = tf_keras.Model(
    [movie_ids, position], model.layers[-1](state([states, position]))
)
predicted = answer.predict(
    tf.data.Dataset.from_tensor_slices(((before, last),)).batch(256), verbose=0
)
found = hits(predicted)
counts = np.bincount(np.concatenate(train), minlength=movies)
popular = hits(np.tile(counts.astype(float), [len(cases), 1]))
print(f"hits@10: GRU {found[9]:.3f}, popularity {popular[9]:.3f}")

# %%
figure, axes = plt.subplots()
axes.plot(range(1, 51), found, label="GRU")
axes.plot(range(1, 51), popular, ":", color="grey", label="popularity")
axes.set(xlabel="k, movies proposed", ylabel="hits at k", ylim=(0, None))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## An example
#
# In MovieLens the order is that of rating, not of watching: people go through
# lists which the site showed them. That is part of what the model has learnt.

# %%
case = 5 * 100
best = np.argsort(np.where(seen[case], -np.inf, predicted[case]))[::-1]
print("last rated:", *(title_of[m] for m in cases[case][0][-5:]), sep="\n    ")
print("proposed next:", *(title_of[m] for m in best[:8]), sep="\n    ")
print(f"in truth:\n    {title_of[int(nexts[case])]}")

# %% [markdown]
# ## The result

# %%
print(f"hits@10 {found[9]:.4f}, popularity's {popular[9]:.4f}")
assert found[9] > 1.5 * popular[9]
