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
# # Lists: put a user's movies in the right order
#
# A page of recommendations needs an order, not stars. This notebook trains one
# model twice: with the squared error of its stars, and with a loss of pairs
# that asks only which of two movies the user rated better. Both are measured
# by the order of short lists.
#
# The lists, the loss and the metric are in `examples/movielens_lists.py`.

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
import movielens_lists
import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed

plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## From ratings to lists
#
# A list has five movies that one user has rated. Training lists come from the
# ratings to train on, test lists from those held out: a movie of a test list
# is never one that the model has seen this user rate.

# %%
LENGTH = 5
folder = movielens.find()
data = movielens.load(folder)
users, movies = len(data.user_ids), len(data.movie_ids)


def draw(ratings: movielens.Ratings, number: int) -> movielens_lists.Lists:
    """Draws a number of lists of each user."""
    return movielens_lists.draw(
        ratings.user, ratings.movie, ratings.rating, number, LENGTH, seed=0
    )


train, test = draw(data.train, 50), draw(data.test, 20)
titles = [movie.title for movie in movielens.load_movies(folder)]
print(f"{len(train):,} lists to train on, {len(test):,} to test with; one:")
for movie, stars in zip(train.movie[0], train.stars[0], strict=True):
    print(f"  {stars:.0f} stars: {titles[movie]}")

# %% [markdown]
# ## What a good order is worth
#
# **NDCG** adds up the movies' gains, from 0 of one star to 1 of five, each
# divided by a logarithm of its place, and divides the sum by that of the best
# order. 1 is the best order. But 0 is not the worst: of five movies that
# people chose to watch, any order is rather good. So know what a random order
# has before you are glad of a 0.9.
#
# **Pairs** says it more plainly: the part of pairs with different stars that
# are in the right order. A random order has a half of them.
#
# The predictor to beat has no model. It orders all users' lists by the movies'
# mean ratings.


# %%
def pairs(scores: np.ndarray) -> float:
    """The part of the test's pairs that scores put in the right order."""
    better = test.stars[:, :, None] > test.stars[:, None, :]
    right = scores[:, :, None] > scores[:, None, :]
    return float(np.mean(right[better]))


def measure(scores: np.ndarray) -> tuple[float, float]:
    """NDCG and pairs of the test lists."""
    return movielens_lists.ndcg(test.stars, scores), pairs(scores)


mean = float(np.mean(data.train.rating))
total = np.bincount(data.train.movie, data.train.rating, minlength=movies)
count = np.bincount(data.train.movie, minlength=movies)
# A movie with few ratings is drawn to the mean of all.
movie_means = (total + 5 * mean) / (count + 5)
rng = np.random.default_rng(0)
found = {
    "random order": measure(rng.random(test.stars.shape)),
    "movies' means": measure(movie_means[test.movie]),
}
for name, (ndcg, right) in found.items():
    print(f"{name:15} NDCG {ndcg:.4f}, pairs {right:.3f}")

# %% [markdown]
# ## One model, two losses
#
# The score of a movie is a bias plus the product of its vector with the
# user's. `movie` is a dense feature of shape [batch, 5]: the layer gives a
# vector for each place, [batch, 5, dim]. `history` is a ragged feature of the
# same table: the movies that the user has rated, combined into one vector.
#
# Both tables are large (`size_threshold=0`): the layer's Adagrad trains only
# the rows that a step has looked up.

# %%
DIM, BATCH, EPOCHS, PENALTY = 16, 512, 4, 0.1
STEPS = EPOCHS * -(-len(train) // BATCH)
history = data.user_features["history"].ids


class ListScores(tf_keras.Model):
    """Scores a list of movies for a user."""

    def __init__(self) -> None:
        super().__init__()
        tables = {
            name: tfrs_embed.TableConfig(
                name,
                rows,
                DIM + 1,  # The last number is a bias.
                initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
                combiner="sqrtn",
            )
            for name, rows in (("user", users), ("movie", movies))
        }
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                "user": tfrs_embed.FeatureConfig("user", tables["user"]),
                "movie": tfrs_embed.FeatureConfig("movie", tables["movie"]),
                "history": tfrs_embed.FeatureConfig("history", tables["movie"]),
            },
            tf_keras.optimizers.Adagrad(
                # Falls to zero until the end of training.
                tf_keras.optimizers.schedules.PolynomialDecay(0.1, STEPS, 0.0),
                initial_accumulator_value=1e-5,
            ),
            size_threshold=0,
        )

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        ids = {**inputs, "history": tf.gather(history, inputs["user"])}
        vectors = self.embeddings(ids, training=training)
        # Of the rows that were looked up; weight decay would touch all.
        for name in ("user", "movie"):
            squares = tf.reduce_sum(vectors[name] ** 2, axis=-1)
            self.add_loss(PENALTY * tf.reduce_mean(squares))
        user = (vectors["user"] + vectors["history"])[:, :-1]
        movie, bias = vectors["movie"][..., :-1], vectors["movie"][..., -1]
        return bias + tf.einsum("bd,bld->bl", user, movie)


# %% [markdown]
# **The squared error** wants the stars themselves. What a user gives on
# average is a large part of them, and says nothing about the order.
#
# **The hinge loss of pairs** costs max(0, 1 - d) for each pair with different
# stars, where d is how much higher the better movie's score is. It spends the
# vectors on the order alone. Its scores are no stars: take the squared error if
# you want to show stars, too.


# %%
def fit(loss: object, offset: float) -> np.ndarray:
    """Trains the model; returns the scores of the test lists."""
    tf_keras.utils.set_random_seed(0)
    model = ListScores()
    model.compile(loss=loss)  # All of its weights are the layer's tables.
    batches = tf.data.Dataset.from_tensor_slices(
        (train.inputs(), train.stars - offset)
    )
    batches = batches.shuffle(len(train), seed=0).batch(BATCH)
    model.fit(batches, epochs=EPOCHS, verbose=2)
    return model.predict(test.inputs(), batch_size=2048, verbose=0)


scores = {
    "squared error": fit("mse", mean),
    "hinge of pairs": fit(movielens_lists.pairwise_hinge, 0.0),
}
found |= {name: measure(values) for name, values in scores.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
for i, label in enumerate(("NDCG", "pairs in order")):
    column = [values[i] for values in found.values()]
    axes[i].barh(list(found), column)
    axes[i].set(xlabel=label, xlim=(0.95 * min(column), 1.02 * max(column)))
axes[0].invert_yaxis()
figure.tight_layout()

# %% [markdown]
# ## One list
#
# A test list, in the order of the model; the stars are what the user gave.

# %%
row = 20 * 5
for place in np.argsort(-scores["hinge of pairs"][row]):
    stars = test.stars[row, place]
    print(f"{stars:.0f} stars: {titles[test.movie[row, place]]}")

# %% [markdown]
# ## The result

# %%
for name, (ndcg, right) in found.items():
    print(f"{name:15} NDCG {ndcg:.4f}, pairs {right:.3f}")
by_pairs, by_means = found["hinge of pairs"], found["movies' means"]
print(f"NDCG {by_pairs[0]:.4f}, movies' means {by_means[0]:.4f}")
assert by_pairs[0] > by_means[0] + 0.001
assert by_pairs[1] > found["squared error"][1]
