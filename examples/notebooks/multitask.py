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
# # Two tasks, one table: what to watch, and how much one will like it
#
# A shop finds some hundred movies for a user, then orders them by the stars
# that the user would give. That is two tasks, but both need to know users and
# movies. This notebook trains a model for each task, and one for both, whose
# tables learn from both.

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

plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## Two measures, and what is easy to reach
#
# - **RMSE** in stars, of the held-out ratings: less is better. The mean rating
#   of each movie is the predictor to beat.
# - **Recall at 20**: the part of a user's held-out movies that is among the 20
#   recommended ones. Movies of the training set are not recommended again. The
#   predictor to beat recommends to everybody what most people watch.

# %%
data = movielens.load(movielens.find())
train, test = data.train, data.test
users, movies = len(data.user_ids), len(data.movie_ids)

seen = np.zeros([users, movies], bool)
seen[train.user, train.movie] = True
watched = np.zeros([users, movies], bool)
watched[test.user, test.movie] = True


def recall(scores: np.ndarray) -> float:
    """Recall at 20 of scores [users, movies], of users with a test movie."""
    best = np.argsort(-np.where(seen, -np.inf, scores), axis=1)[:, :20]
    found = np.take_along_axis(watched, best, axis=1).sum(axis=1)
    number = watched.sum(axis=1)
    return float(np.mean(found[number > 0] / number[number > 0]))


def rmse(predicted: np.ndarray) -> float:
    """The RMSE in stars of predictions for the held-out ratings."""
    return float(np.sqrt(np.mean((predicted - test.rating) ** 2)))


mean = float(np.mean(train.rating))
counts = np.bincount(train.movie, minlength=movies)
total = np.bincount(train.movie, train.rating, minlength=movies)
movie_means = (total + 5 * mean) / (counts + 5)
easy = rmse(movie_means[test.movie]), recall(np.tile(counts, [users, 1]))
print(f"without a model: RMSE {easy[0]:.4f}, recall@20 {easy[1]:.4f}")

# %% [markdown]
# ## One lookup for both tasks
#
# Each feature's vector has two parts. The first 32 numbers are shared: their
# product says how well user and movie go together, for both tasks. The last
# two are biases, one for each task: many people watch Titanic, and many people
# like Schindler's List.
#
# A step looks up each row once, whatever the number of tasks, and the row's
# gradient is the sum of both tasks' gradients. If a task should have vectors of
# its own, give it features with a table of its own.

# %%
FACTORS, BATCH, EPOCHS = 32, 1000, 4
USER = ("user", "age", "gender", "occupation")
MOVIE = ("movie", "year", "genres")
frequency = tf.constant(np.maximum(counts, 1) / len(train), tf.float32)


class TwoTasks(tfrs.Model):
    """Predicts stars, and which movie a user watches.

    Args:
        stars: the weight of the rating task's loss.
        watching: the weight of the retrieval task's loss.
    """

    def __init__(self, stars: float, watching: float) -> None:
        super().__init__()
        self.weights_of_tasks = {"stars": stars, "watching": watching}
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.TableConfig(
                    name,
                    data.features[name].vocabulary_size,
                    FACTORS + 2,
                    initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
                    combiner="mean",
                )
                for name in (*USER, *MOVIE)
            },
            tf_keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-3),
            size_threshold=500,
        )
        self.scale = tf.Variable(0.3, name="scale")
        self.rating = tfrs.tasks.Ranking(tf_keras.losses.MeanSquaredError())
        self.retrieval = tfrs.tasks.Retrieval(remove_accidental_hits=True)

    def tower(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        """The sum of some features' vectors."""
        vectors = self.embeddings(features, partial=True)
        return tf.add_n(list(vectors.values()))

    def predict_stars(self, user: tf.Tensor, movie: tf.Tensor) -> tf.Tensor:
        """The stars of pairs of a user's and a movie's vector."""
        product = tf.reduce_sum(
            user[..., :FACTORS] * movie[..., :FACTORS], axis=-1
        )
        biases = user[..., FACTORS] + movie[..., FACTORS]
        return mean + biases + self.scale * product

    def queries(self, user: tf.Tensor) -> tf.Tensor:
        """What is multiplied with `candidates`; 1 for a movie's bias."""
        return tf.concat([user[:, :FACTORS], tf.ones_like(user[:, :1])], 1)

    def candidates(self, movie: tf.Tensor) -> tf.Tensor:
        """The shared numbers of movies, and their biases of being watched."""
        return tf.concat([movie[:, :FACTORS], movie[:, FACTORS + 1 :]], 1)

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        user = self.tower({name: inputs[name] for name in USER})
        movie = self.tower({name: inputs[name] for name in MOVIE})
        stars = self.rating(
            inputs["rating"][:, None], self.predict_stars(user, movie)[:, None]
        )
        watching = self.retrieval(
            self.queries(user),
            self.candidates(movie),
            candidate_ids=inputs["movie"],
            candidate_sampling_probability=tf.gather(
                frequency, inputs["movie"]
            ),
            compute_metrics=False,
        )
        weights = self.weights_of_tasks
        return weights["stars"] * stars + weights["watching"] * watching / BATCH


# %% [markdown]
# `partial=True` lets a call leave features out: each tower is a call of its
# own, and movies can be indexed without a user.
#
# The weights of the losses are yours to choose: they say what the tables should
# learn first. With 1 for stars and 0.2 for watching, this model recommends
# worse than popularity does; with 1 and 4 it is good at both. Choose them by
# ratings that are neither for training nor for the test.

# %%
batches = data.dataset(train, BATCH, shuffle_seed=0, full_batches=True)


def fit(stars: float, watching: float) -> tuple[float, float]:
    """Trains a model; returns its RMSE and its recall at 20."""
    tf_keras.utils.set_random_seed(0)
    model = TwoTasks(stars, watching)
    model.compile(tf_keras.optimizers.Adam(0.003))
    model.fit(batches, epochs=EPOCHS, verbose=0)
    user, movie = (
        model.tower({name: data.features[name].ids for name in names})
        for names in (USER, MOVIE)
    )
    predicted = model.predict_stars(
        tf.gather(user, test.user), tf.gather(movie, test.movie)
    ).numpy()
    scores = model.queries(user).numpy() @ model.candidates(movie).numpy().T
    return rmse(np.clip(predicted, 1, 5)), recall(scores)


found = {
    "without a model": easy,
    "stars alone": fit(1.0, 0.0),
    "watching alone": fit(0.0, 4.0),
    "both": fit(1.0, 4.0),
}
for name, (error, part) in found.items():
    print(f"{name:15} RMSE {error:.4f}, recall@20 {part:.4f}")

# %% [markdown]
# A model of one task is of no use for the other one: a model of stars alone
# recommends obscure movies, as nothing has told it what people watch. The joint
# model does both with one set of tables: half the memory, and half the lookups.

# %%
figure, axes = plt.subplots()
for name, (error, part) in found.items():
    axes.plot(part, error, "o")
    axes.annotate(f" {name}", (part, error))
axes.set(xlabel="recall at 20, more is better", ylabel="RMSE, less is better")
axes.margins(x=0.3)
figure.tight_layout()

# %% [markdown]
# ## The result

# %%
error, part = found["both"]
print(
    f"RMSE {error:.4f} and recall@20 {part:.4f}; without a model "
    f"{easy[0]:.4f} and {easy[1]:.4f}"
)
assert error < easy[0] - 0.05
assert part > 1.4 * easy[1]
assert part > 2 * found["stars alone"][1]
