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
# # Attention: long histories without padding
#
# SASRec reads a user's history by self-attention and predicts the next movie.
# Here histories are up to 736 movies long and 105 on average, so a batch padded
# to the longest would be mostly empty. The embedding layer gives ragged vectors
# (`combiner=None`): one for each movie that there is.
#
# The model is `examples/sasrec.py`. `examples/sequences.py` trains it longer,
# and tests it as papers do.

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
import tempfile

import matplotlib.pyplot as plt
import movielens
import movielens_sequences as sequences
import numpy as np
import tensorflow as tf
import tf_keras
from sasrec import SASRec

import tfrs_embed

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## Histories
#
# A user's movies in the order of time. The last one is for the test; the rest
# is trained on. (`sequences.py` keeps one more, for validation.)

# %%
folder = movielens.find()
histories, movie_ids = sequences.read(folder / movielens.RATINGS, header=1)
title_of = movielens.load_titles(folder)
titles = [title_of[i] for i in movie_ids]
train = sequences.ragged([h[:-1] for h in histories])
right = np.array([h[-1] for h in histories])

lengths = train.row_lengths().numpy()
figure, axes = plt.subplots()
axes.hist(lengths, bins=50)
axes.set(xlabel="movies of a user", ylabel="users")
figure.tight_layout()
padded = len(lengths) * lengths.max()
print(
    f"{len(lengths)} users, {len(titles):,} movies, {lengths.sum():,} ratings; "
    f"padded, {padded:,} places: {1 - lengths.sum() / padded:.0%} empty"
)

# %% [markdown]
# ## One table, two features
#
# `history` are the movies that were rated, `choice` the movies to choose from.
# Both are looked up in one table: what a movie says about its user, and what
# its score is computed with. So the softmax needs no second matrix, and its
# gradients reach the table like those of any lookup, wherever the table is.

# %%
LENGTH, EPOCHS = 50, 8
windows = sequences.cut([h[:-1] for h in histories], LENGTH + 1)
batches = (
    tf.data.Dataset.from_tensor_slices(sequences.ragged(windows))
    .shuffle(len(windows), seed=0)
    .ragged_batch(32)
)


def adam() -> tf_keras.optimizers.Adam:
    """Its rate falls linearly, to zero at the end of training."""
    return tf_keras.optimizers.Adam(
        tf_keras.optimizers.schedules.PolynomialDecay(
            3e-3, EPOCHS * len(batches), 0.0
        )
    )


model = SASRec(len(titles), adam(), length=LENGTH)
model.compile(adam())  # Of all but the table. The model has its loss.
losses = model.fit(batches, epochs=EPOCHS, verbose=2).history["loss"]
print(model.embeddings.placement)

# %% [markdown]
# ## Does it find the next movie?
#
# **HR@10** is the part of users whose next movie is among the first ten of all
# that they had not rated. Popularity does not look at the history.

# %%
counts = np.bincount(train.values, minlength=len(titles))
hit_rates = {
    name: sequences.metrics(scores, right, train)[0]
    for name, scores in {
        "popularity": np.tile(counts, [len(right), 1]),
        "SASRec": sequences.predict(model, train),
    }.items()
}
figure, axes = plt.subplots()
axes.barh(list(hit_rates), list(hit_rates.values()))
axes.set(xlabel="HR@10")
figure.tight_layout()

# %% [markdown]
# ## Order matters
#
# The same movies in another order: what came last counts most.

# %%
rng = np.random.default_rng(0)
mixed = sequences.ragged([rng.permutation(h[:-1]) for h in histories])
of_mixed, _ = sequences.metrics(sequences.predict(model, mixed), right, train)
print(f"HR@10 {hit_rates['SASRec']:.3f}; of mixed histories {of_mixed:.3f}")

# %% [markdown]
# ## Serving
#
# The export takes histories of MovieLens's own numbers, of any length, empty
# ones too, and returns ten movies that aren't among them.

# %%
recommender = sequences.Recommender(model, movie_ids, titles)
spec = tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1)
path = pathlib.Path(tempfile.mkdtemp()) / "model"
tfrs_embed.serving.export(
    model, path, signatures={"serving_default": (recommender, [spec])}
)
serve = tf.saved_model.load(str(path)).signatures["serving_default"]
found = serve(
    # Star Wars and The Empire Strikes Back; Snow White, Dumbo and The Lion
    # King; none.
    history_values=tf.constant([50, 172, 99, 501, 71], tf.int64),
    history_row_splits=tf.constant([0, 2, 5, 5], tf.int64),
)
for row in found["title"].numpy():
    print(*(title.decode() for title in row[:5]), sep=", ")

# %% [markdown]
# ## The result

# %%
print(
    f"HR@10 {hit_rates['SASRec']:.4f}, popularity's "
    f"{hit_rates['popularity']:.4f}, of mixed histories {of_mixed:.4f}"
)
assert hit_rates["SASRec"] > 1.5 * hit_rates["popularity"]
assert hit_rates["SASRec"] > 1.2 * of_mixed
