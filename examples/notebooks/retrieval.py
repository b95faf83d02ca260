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
# # Retrieval: which movies to recommend to a user
#
# Two towers: one makes a vector of what is known of a user, the other one of
# what is known of a movie. What goes well together has a large product, so
# that recommending is a search for the movies with the largest products: a
# top-k index. Trained with `tfrs.tasks.Retrieval` on MovieLens-100K.
#
# `TF_USE_LEGACY_KERAS` comes before the import of tensorflow: TFRS needs Keras
# 2, and what `tf.keras` is, is decided there.

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
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## The data
#
# A rating is taken as "this user watched this movie", whatever the stars. A
# fifth of these are held out: the model is good if it recommends the movies
# among them.

# %%
folder = movielens.find()
data = movielens.load(folder)
train, test = data.train, data.test
users, movies = len(data.user_ids), len(data.movie_ids)
with (folder / movielens.MOVIES).open(encoding="utf-8", newline="") as file:
    rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
titles = np.array([f"{title} ({year})" for _, title, year, _ in rows])
main_genre = np.array([row[3].split()[0] for row in rows])

seen = np.zeros([users, movies], bool)  # In training: not recommended again.
seen[train.user, train.movie] = True
watched = np.zeros([users, movies], bool)  # Held out: to be found.
watched[test.user, test.movie] = True
print(f"{users} users, {movies} movies, {len(train):,} to train on")

# %% [markdown]
# ## What is easy to reach
#
# **Recall at k**: of the held-out movies of a user, the part that is among the
# k recommended ones; the mean over users. The predictor to beat recommends to
# everybody what most people watch. That is not a weak one.


# %%
def recalls(ranked: np.ndarray, most: int) -> np.ndarray:
    """Recall at 1 to `most`, of each user's movies, the best one first."""
    tested = watched.any(axis=1)
    hits = np.take_along_axis(watched, ranked[:, :most], axis=1)[tested]
    found = np.cumsum(hits, axis=1)
    return np.mean(found / watched[tested].sum(axis=1, keepdims=True), axis=0)


counts = np.bincount(train.movie, minlength=movies)
popular = np.argsort(np.where(seen, -1, counts), axis=1)[:, ::-1]
popularity = recalls(popular, 100)
print(f"popularity: recall@20 {popularity[19]:.3f}")

# %% [markdown]
# ## Two towers, two layers
#
# A `PartialTPUEmbedding` looks up all of its features in one call. Each tower
# is used alone when recommending (movies are indexed once, users come with the
# requests), so each has a layer of its own.

# %%
DIM, BATCH, EPOCHS = 32, 1000, 8


def embeddings(
    features: dict[str, movielens.Feature],
) -> tfrs_embed.PartialTPUEmbedding:
    """A layer with a table for each feature."""
    configs = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(
                name, feature.vocabulary_size, DIM, combiner="mean"
            ),
        )
        for name, feature in features.items()
    }
    return tfrs_embed.PartialTPUEmbedding(
        configs,
        tf_keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-3),
        size_threshold=500,
    )


# Not a user's history: it holds the very movie that is to be predicted, which
# a model would learn to read off.
user_features = {
    name: data.user_features[name]
    for name in ("user", "age", "gender", "occupation")
}
movie_features = {
    name: data.movie_features[name] for name in ("movie", "year", "genres")
}


class Tower(tf_keras.Model):
    """The sum of the features' vectors."""

    def __init__(self, features: dict[str, movielens.Feature]) -> None:
        super().__init__()
        self.features = features
        self.embeddings = embeddings(features)

    def call(self, rows: tf.Tensor) -> tf.Tensor:
        ids = {
            name: tf.gather(feature.ids, rows)
            for name, feature in self.features.items()
        }
        return tf.add_n(list(self.embeddings(ids).values()))


# %% [markdown]
# `tfrs.tasks.Retrieval` takes the movies of the batch's other users for what a
# user did *not* choose. Popular movies are in most batches, and would be
# punished for it. `candidate_sampling_probability`, how often a movie comes,
# corrects that; without it the model recommends obscure movies. And
# `remove_accidental_hits` spares those that are in the batch twice.

# %%
frequency = tf.constant(np.maximum(counts, 1) / len(train), tf.float32)


class TwoTowers(tfrs.Model):
    """Predicts what a user watches."""

    def __init__(self) -> None:
        super().__init__()
        self.user_tower = Tower(user_features)
        self.movie_tower = Tower(movie_features)
        self.task = tfrs.tasks.Retrieval(remove_accidental_hits=True)

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        user = self.user_tower(inputs["user"])
        movie = self.movie_tower(inputs["movie"])
        return (
            self.task(
                user,
                movie,
                candidate_ids=inputs["movie"],
                candidate_sampling_probability=tf.gather(
                    frequency, inputs["movie"]
                ),
                compute_metrics=False,  # Recall on held-out movies, below.
            )
            / BATCH
        )


pairs = tf.data.Dataset.from_tensor_slices(
    {"user": train.user, "movie": train.movie}
)
batches = pairs.shuffle(len(train), seed=0).batch(BATCH, drop_remainder=True)
model = TwoTowers()
model.compile(tf_keras.optimizers.Adam(0.003))
history = model.fit(batches, epochs=EPOCHS, verbose=2).history
print(model.movie_tower.embeddings.placement)

# %% [markdown]
# ## A top-k index
#
# `BruteForce` of TFRS multiplies a user's vector with those of all movies,
# which is quick for some 100,000 of them; for more there is ScaNN behind the
# same interface. `query_with_exclusions` leaves out what the user has seen. It
# takes a dense matrix, so that short lists are padded with -1, which is nobody.

# %%
all_movies = tf.range(movies)
index = tfrs.layers.factorized_top_k.BruteForce(model.user_tower)
index.index(model.movie_tower(all_movies), all_movies)

exclusions = tf.RaggedTensor.from_row_lengths(
    np.nonzero(seen)[1].astype(np.int32), seen.sum(axis=1)
).to_tensor(-1)
ranked = np.concatenate(
    [  # A hundred users at a time: it compares all movies with all exclusions.
        index.query_with_exclusions(some, exclude, k=100)[1]
        for some, exclude in tf.data.Dataset.from_tensor_slices(
            (tf.range(users), exclusions)
        ).batch(100)
    ]
)
towers = recalls(ranked, 100)
print(f"recall@20: {towers[19]:.3f}, popularity {popularity[19]:.3f}")

# %%
figure, axes = plt.subplots()
axes.plot(np.arange(1, 101), towers, label="two towers")
axes.plot(np.arange(1, 101), popularity, ":", color="grey", label="popularity")
axes.set(xlabel="k, movies recommended", ylabel="recall at k", ylim=(0, None))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What it recommends
#
# A user's best rated movies, and what the index says. A star stands before
# those which the user did watch: they were held out.

# %%
USER = 5
own = train.user == USER
best = np.argsort(-train.rating[own], kind="stable")[:8]
print("liked:")
for movie in train.movie[own][best]:
    print(f"    {titles[movie]}")
print("recommended:")
for movie in ranked[USER, :12]:
    print(f"  {'*' if watched[USER, movie] else ' '} {titles[movie]}")

# %% [markdown]
# ## What it knows of movies
#
# The model was told a movie's year and genres, but not which movies are alike.
# The nearest ones, by the cosine of their vectors, of those with 50 ratings or
# more:

# %%
vectors = model.movie_tower(all_movies).numpy()
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
known = np.flatnonzero(counts >= 50)
for name in ("Star Wars (1977)", "Aladdin (1992)", "Alien (1979)"):
    [movie] = np.flatnonzero(titles == name)
    near = known[np.argsort(-vectors[known] @ vectors[movie])[1:5]]
    print(f"{name}: {', '.join(titles[near])}")

# %% [markdown]
# The two directions in which these movies' vectors differ most; colours are
# genres.

# %%
centred = vectors[known] - vectors[known].mean(axis=0)
directions = np.linalg.svd(centred, full_matrices=False)[2]
x, y = (centred @ directions[:2].T).T
figure, axes = plt.subplots(figsize=(6, 4.5))
for genre in ("Action", "Animation", "Comedy", "Drama", "Horror"):
    among = main_genre[known] == genre
    axes.scatter(x[among], y[among], s=14, label=genre, alpha=0.7)
axes.set(xticks=[], yticks=[], title="Movies by their vectors")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
figure.tight_layout()

# %% [markdown]
# ## The result

# %%
print(f"recall@20 {towers[19]:.4f}, popularity's {popularity[19]:.4f}")
assert towers[19] > 1.2 * popularity[19]
