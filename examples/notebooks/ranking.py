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
# # Ranking: predict the stars that a user gives a movie
#
# A model of [TensorFlow Recommenders](https://www.tensorflow.org/recommenders)
# (TFRS) whose embeddings are one `tfrs_embed.PartialTPUEmbedding`, on the
# 100,000 real ratings of MovieLens-100K.
#
# The first cell comes before everything else for a reason: since TensorFlow
# 2.16 `tf.keras` is Keras 3, but TFRS is written for Keras 2, the package
# tf_keras. **What `tf.keras` is, is decided when tensorflow is imported**, so
# the variable has to be set before. If you forget it, restart the kernel.

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
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## The data
#
# `movielens.load` holds out a fifth of the ratings, and makes categorical
# features of what is known of users and movies.

# %%
data = movielens.load(movielens.find())
print(data)
for name, feature in data.features.items():
    kind = "ragged" if isinstance(feature.ids, tf.RaggedTensor) else "one id"
    print(f"{name:12}{feature.vocabulary_size:6,} ids, {kind}")

# %% [markdown]
# A few movies have most of the ratings. A row of an embedding table learns from
# the ratings of its own movie only, so most rows have little to learn from.

# %%
counts = np.sort(np.bincount(data.train.movie))[::-1]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.loglog(np.arange(1, len(counts) + 1), counts)
left.set(
    xlabel="movies, most rated first", ylabel="ratings", title="A long tail"
)
stars, number = np.unique(data.train.rating, return_counts=True)
right.bar(stars, number)
right.set(xlabel="stars", ylabel="ratings", title="People rate what they like")
figure.tight_layout()

# %% [markdown]
# ## What is easy to reach
#
# A number says little without one to compare it with. Two simple predictors:
# the mean of all ratings, and the mean plus how much more than that the user
# usually gives, and the movie usually gets.


# %%
def rmse(predicted: np.ndarray) -> float:
    """The root of the mean squared error, in stars, on what was held out."""
    return float(np.sqrt(np.mean((predicted - data.test.rating) ** 2)))


def offsets(ids: np.ndarray, residuals: np.ndarray, prior: int) -> np.ndarray:
    """Mean residual of each id, drawn to zero where there are few."""
    return np.bincount(ids, residuals) / (np.bincount(ids) + prior)


train, test = data.train, data.test
mean = float(np.mean(train.rating))
movie_offset = offsets(train.movie, train.rating - mean, prior=5)
# Movies that only the held-out ratings have get no offset.
movie_offset = np.pad(
    movie_offset, [0, len(data.movie_ids) - len(movie_offset)]
)
user_offset = offsets(
    train.user, train.rating - mean - movie_offset[train.movie], prior=5
)
baselines = {
    "the mean": rmse(np.full(len(test), mean)),
    "mean and offsets": rmse(
        mean + movie_offset[test.movie] + user_offset[test.user]
    ),
}
for name, value in baselines.items():
    print(f"{name}: RMSE {value:.4f}")

# %% [markdown]
# ## Tables and features
#
# A **table** has a row for each id. A **feature** is an input that is looked up
# in a table. The movies that a user has rated (`history`, a ragged feature of
# up to 50 ids) and the movie at hand are two features of *one* table: what is
# learnt of a movie from one helps the other. The combiner makes one vector of
# the many rows of a ragged feature.
#
# The last of each row's 33 numbers is a bias, the others are factors.

# %%
FACTORS = 32
NAMES = ("user", "age", "history", "movie", "genres", "year")


def table(name: str) -> tfrs_embed.TableConfig:
    """Declares the table of a feature's ids."""
    return tfrs_embed.TableConfig(
        name,
        data.features[name].vocabulary_size,
        FACTORS + 1,
        initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
        # For histories; of a single id it makes the id's row, as any does.
        combiner="sqrtn" if name == "movie" else "mean",
    )


tables = {name: table(name) for name in NAMES if name != "history"}
tables["history"] = tables["movie"]
features = {
    name: tfrs_embed.FeatureConfig(name, tables[name]) for name in NAMES
}

# %% [markdown]
# ## The model
#
# A `tfrs.Model` says in `compute_loss` what a batch costs; `fit` is Keras's.
# Three things are worth a look:
#
# - **Two optimizers.** Tables of more than `size_threshold` rows are *large*:
#   the layer's own optimizer trains only the rows that a step looked up. Small
#   tables are ordinary Keras variables, and `compile`'s optimizer trains them.
# - **Adagrad's initial accumulator.** The loss is a mean over 1,000 ratings, so
#   the gradient of one movie's row is tiny. Next to Keras's default
#   accumulator, 0.1, a rare row would hardly move.
# - **A penalty in place of weight decay.** Weight decay would touch every row
#   in every step. This penalises the vectors that were looked up.

# %%
BATCH, EPOCHS = 1000, 5


class RatingModel(tfrs.Model):
    """Mean + biases + the product of a user's and a movie's vector."""

    def __init__(self, optimizer: tf_keras.optimizers.Optimizer) -> None:
        super().__init__()
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            features, optimizer, size_threshold=500
        )
        self.task = tfrs.tasks.Ranking(
            loss=tf_keras.losses.MeanSquaredError(),
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        vectors = self.embeddings({name: inputs[name] for name in NAMES})
        for vector in vectors.values():
            self.add_loss(0.05 * tf.reduce_sum(vector**2) / BATCH)
        user = vectors["user"] + vectors["age"] + vectors["history"]
        movie = vectors["movie"] + vectors["genres"] + vectors["year"]
        product = tf.reduce_sum(user[:, :-1] * movie[:, :-1], axis=-1)
        return mean + user[:, -1] + movie[:, -1] + product

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        # [batch, 1], as Keras's losses take the mean over the last axis.
        return self.task(inputs["rating"][:, None], self(inputs)[:, None])


batches = data.dataset(train, BATCH, shuffle_seed=0)
held_out = data.dataset(test, BATCH)


def decay(rate: float) -> tf_keras.optimizers.schedules.LearningRateSchedule:
    """Falls to zero until the end of training."""
    return tf_keras.optimizers.schedules.PolynomialDecay(
        rate, EPOCHS * len(batches), 0.0
    )


model = RatingModel(
    tf_keras.optimizers.Adagrad(decay(0.05), initial_accumulator_value=1e-5)
)
model.compile(tf_keras.optimizers.Adam(decay(0.004)))

# %% [markdown]
# `placement` says of each table where it went, and why. Here "one device" is
# this CPU; under a strategy of two GPUs the same line would say that the table
# is sharded by row.

# %%
print(model.embeddings.placement)

# %%
fitted = model.fit(
    batches, epochs=EPOCHS, validation_data=held_out, verbose=2
).history

# %%
epochs = range(1, EPOCHS + 1)
figure, axes = plt.subplots()
axes.plot(epochs, fitted["rmse"], "o-", label="train, during the epoch")
axes.plot(epochs, fitted["val_rmse"], "o-", label="test, after the epoch")
axes.axhline(
    baselines["mean and offsets"],
    color="grey",
    linestyle=":",
    label="mean and offsets",
)
axes.set(xlabel="epoch", ylabel="RMSE in stars", xticks=list(epochs))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Where it errs
#
# A model that minimises squared errors is careful: it predicts less than five
# stars where people gave five, and more than one where they gave one. What it
# predicts should still rise with what people gave.

# %%
predicted = np.clip(model.predict(held_out, verbose=0), 1, 5)
figure, axes = plt.subplots()
axes.boxplot(
    [predicted[test.rating == s] for s in stars],
    positions=stars,
    sym="",
    manage_ticks=False,
)
axes.plot(stars, stars, color="grey", linestyle=":")
axes.set(xlabel="stars given", ylabel="stars predicted", ylim=(0.8, 5.2))
figure.tight_layout()

# %% [markdown]
# ## The result
#
# The notebook ends with a check, so that it fails where its numbers no longer
# hold. `make demo` trains a model of this kind for longer and with ten
# features, which reaches 0.896; plain matrix factorisation is at 0.934.

# %%
result = rmse(predicted)
best = baselines["mean and offsets"]
print(f"RMSE {result:.4f}, of mean and offsets {best:.4f}")
assert result < best - 0.01
