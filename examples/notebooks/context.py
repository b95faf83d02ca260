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
# # Context: who watches, and when
#
# Somebody who has never been here opens the page. There is no history and no
# row for the user's id. But age and occupation may be known, and the hour, the
# day of the week and the date are. This notebook recommends movies by them, and
# measures what each is worth.

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
import matplotlib.pyplot as plt
import movielens
import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed

plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## Numbers become ids
#
# An embedding table has rows for ids, so an age or a time is cut into parts
# first. The size of a part is a choice: what falls into one part is alike for
# the model, and each part needs enough ratings to learn its row.
#
# - **Age** in steps of five years, `movielens.load` has it already.
# - **Hour** and **weekday** of the rating, in UTC: they come again, and can be
#   used tomorrow.
# - **Week** since the first rating: what is new or in the news. A week comes
#   once, and a coming week has no row yet. See the end for what that means.

# %%
folder = movielens.find()
data = movielens.load(folder)
ratings = movielens.load_stream(folder)
user = np.searchsorted(data.user_ids, ratings.user_id)
movie = np.searchsorted(data.movie_ids, ratings.movie_id)
hours = ratings.time // 3600
days = hours // 24
columns = {
    **{
        name: data.user_features[name].ids.numpy()[user]
        for name in ("age", "gender", "occupation")
    },
    "hour": hours % 24,
    "weekday": (days + 3) % 7,  # 1970 began with a Thursday; Monday is 0.
    "week": (days - days[0]) // 7,
}
columns = {name: ids.astype(np.int32) for name, ids in columns.items()}

figure, axes = plt.subplots(1, 3, figsize=(9, 2.6))
for axis, name in zip(axes, ("hour", "weekday", "week"), strict=True):
    axis.bar(*np.unique(columns[name], return_counts=True))
    axis.set(xlabel=name)
axes[0].set(ylabel="ratings")
figure.tight_layout()

# %% [markdown]
# A fifth of the users is held out, with all that they rated: to the model they
# are new. What one of them watches is hard to guess among 1,682 movies, so the
# measure is a fine one: **perplexity**, the exponential of the mean loss. A
# perplexity of 500 is as if the model chose between 500 movies that are all as
# likely: less is better. The predictor to beat gives each movie its part of
# the training set's ratings, the same for everybody.

# %%
users, movies = len(data.user_ids), len(data.movie_ids)
is_new = np.random.default_rng(0).permutation(users) < users // 5
test, train = np.flatnonzero(is_new[user]), np.flatnonzero(~is_new[user])
counts = np.bincount(movie[train], minlength=movies)
# One rating more for each: some movies have none.
popularity = np.log((counts + 1) / np.sum(counts + 1)).astype(np.float32)
found = {"popularity": float(np.exp(-np.mean(popularity[movie[test]])))}
print(f"{sum(is_new)} new users; perplexity {found['popularity']:.1f}")

# %% [markdown]
# ## One vector for all that is known
#
# Each feature has a table, and the query is the sum of the vectors. Its product
# with a movie's vector is then a sum, too: how well the movie suits the age,
# the hour and so on. What is learnt of an hour holds for all ages.
#
# The movies to choose from are a feature as well: all ids, [movies]. A softmax
# over all of them is the loss; for millions of movies one would draw some.

# %%
DIM, BATCH, EPOCHS = 8, 1000, 3


class WhatIsWatched(tf_keras.Model):
    """Scores all movies for a context.

    Args:
        names: the features that it reads.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        rows = {name: int(columns[name].max()) + 1 for name in names}
        rows["movie"] = movies
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.TableConfig(
                    name,
                    size,
                    DIM,
                    initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
                )
                for name, size in rows.items()
            },
            tf_keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-6),
            size_threshold=0,
        )

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        ids = {name: inputs[name] for name in self.names}
        ids["movie"] = tf.range(movies)
        vectors = self.embeddings(ids, training=training)
        choice = vectors.pop("movie")
        query = tf.add_n(list(vectors.values()))
        # Popularity is there already: the tables learn what differs from it.
        return tf.matmul(query, choice, transpose_b=True) + popularity


def inputs(rows: np.ndarray) -> dict[str, np.ndarray]:
    """All features of some ratings."""
    return {name: ids[rows] for name, ids in columns.items()}


def fit(names: list[str]) -> WhatIsWatched:
    """Trains a model that reads some features."""
    tf_keras.utils.set_random_seed(0)
    model = WhatIsWatched(names)
    model.compile(  # All weights are the layer's tables.
        loss=tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(
        inputs(train),
        movie[train],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
    )
    return model


def perplexity(model: tf_keras.Model, given: dict[str, np.ndarray]) -> float:
    """The perplexity of what new users watch, less is better."""
    loss = model.evaluate(given, movie[test], BATCH, verbose=0)
    return float(np.exp(loss))


# %% [markdown]
# ## What each is worth
#
# One model for each set of features, each with more than the one before.

# %%
more = {
    "age, gender": ["age", "gender"],
    "+ occupation": ["occupation"],
    "+ hour, weekday": ["hour", "weekday"],
    "+ week": ["week"],
}
names: list[str] = []
for label, added in more.items():
    names = [*names, *added]
    model = fit(names)
    found[label] = perplexity(model, inputs(test))
    print(f"{label:18} perplexity {found[label]:.1f}")

# %%
figure, axes = plt.subplots()
axes.barh(list(found), list(found.values()))
axes.invert_yaxis()
axes.set(xlabel="perplexity", xlim=(0.95 * min(found.values()), None))
figure.tight_layout()

# %% [markdown]
# ## Does the last model read the week?
#
# The same users with the week of another rating: if the model reads it, it now
# errs more.

# %%
wrong = inputs(test)
wrong["week"] = np.random.default_rng(0).permutation(wrong["week"])
of_wrong = perplexity(model, wrong)
print(f"perplexity {found['+ week']:.1f}, of wrong weeks {of_wrong:.1f}")

# %% [markdown]
# ## The movies of a week
#
# For which movies the week matters most: the largest product of a week's vector
# and a movie's, less the mean over weeks, of movies with 100 ratings or more.

# %%
week, vectors = model.embeddings(
    {"week": tf.range(columns["week"].max() + 1), "movie": tf.range(movies)},
    partial=True,
).values()
products = week.numpy() @ vectors.numpy().T
products -= products.mean(axis=0)
products[:, counts < 100] = -np.inf
titles = movielens.load_titles(folder)
for number in range(0, len(products), 8):
    best = np.argsort(-products[number])[:3]
    some = "; ".join(titles[data.movie_ids[i]] for i in best)
    print(f"week {number:2}: {some}")

# %% [markdown]
# ## What to take from it
#
# - The week is worth most here, age and gender come next, and the others help
#   little. All of it together leaves a new user hard to guess. Once somebody
#   has rated movies, read those, as the notebook `attention` does.
# - The test is drawn from the same weeks as the training. For predictions of
#   the next week a row for each week says nothing, as its row is untrained;
#   train day by day then, as `examples/streaming.py` does.
# - A feature that doesn't help costs a table and a lookup. Leave it out.
#
# ## The result

# %%
print(", ".join(f"{name} {value:.1f}" for name, value in found.items()))
assert found["age, gender"] < 0.99 * found["popularity"]
assert found["+ week"] < 0.99 * found["age, gender"]
assert found["+ week"] < 0.98 * of_wrong
