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
# # Moving a trained model here
#
# Three models, trained with the embedding layers of other libraries, go on
# with those of `tfrs_embed`, and predict what they predicted before:
#
# 1. `TPUEmbedding` of TensorFlow Recommenders (TFRS),
# 2. `DistributedEmbedding` of keras_rs,
# 3. `All2AllDenseEmbedding` of NVIDIA's SparseOperationKit (SOK).
#
# **Two versions of Keras in one notebook.** TFRS is written for Keras 2, the
# package tf_keras; keras_rs for Keras 3, which is the package keras. Both may
# be imported side by side. `TF_USE_LEGACY_KERAS` only decides which of them
# `tf.keras` means, when tensorflow is imported, and TFRS says `tf.keras`.

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
import importlib.util
import tempfile
from typing import Any

import matplotlib.pyplot as plt
import movielens
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed
import tfrs_embed_command

tf_keras.utils.set_random_seed(0)
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})
temporary = tempfile.TemporaryDirectory(prefix="moving_")  # For this kernel.
work = pathlib.Path(temporary.name)


def convert(*arguments: object) -> None:
    """Runs `tfrs-embed checkpoint convert ARGUMENTS`, in here."""
    line = ["checkpoint", "convert", *map(str, arguments)]
    assert tfrs_embed_command.main(line) == 0


# %% [markdown]
# ## The data
#
# Ratings of MovieLens-100K, brought to a scale from 0 to 1, of a user and a
# movie. What a model has to beat is the mean rating.

# %%
DIM, BATCH = 16, 1000
data = movielens.load(movielens.find())
train = data.pairs(data.train, BATCH, shuffle_seed=0)
test = data.pairs(data.test, BATCH)
truth = movielens.scale(data.test.rating)
users, movies = len(data.user_ids), len(data.movie_ids)


def rmse(predicted: np.ndarray) -> float:
    """The root of the mean squared error on the held-out ratings."""
    return float(np.sqrt(np.mean((np.ravel(predicted) - truth) ** 2)))


mean_rating = float(np.mean(movielens.scale(data.train.rating)))
results = {"mean rating": rmse(np.full(len(truth), mean_rating))}
print(f"RMSE of the mean rating: {results['mean rating']:.4f}")

# %% [markdown]
# ## 1. From TFRS's TPUEmbedding
#
# The configurations are those of TensorFlow,
# `tf.tpu.experimental.embedding`, and both libraries take them:

# %%
tpu = tf.tpu.experimental.embedding
features = {
    "user": tpu.FeatureConfig(tpu.TableConfig(users, DIM, name="users")),
    "movie": tpu.FeatureConfig(tpu.TableConfig(movies, DIM, name="movies")),
}


class Pairs(tf_keras.Model):
    """Predicts a rating of vectors of a user and a movie.

    Args:
        embedding: the layer that gives the vectors.
    """

    def __init__(self, embedding: tf_keras.layers.Layer) -> None:
        super().__init__()
        self.embedding = embedding
        self.dense = tf_keras.Sequential(
            [
                tf_keras.layers.Dense(32, "relu"),
                tf_keras.layers.Dense(1, bias_initializer="ones"),
            ]
        )

    def call(self, ids: dict[str, tf.Tensor]) -> tf.Tensor:
        vectors = self.embedding(ids)
        return self.dense(tf.concat([vectors["user"], vectors["movie"]], -1))


# %% [markdown]
# The old model. Off-TPU `TPUEmbedding` ignores its own optimizer: its tables
# are dense variables, which the optimizer of `compile` trains, with gradients
# as large as the tables.


# %%
def adagrad() -> tf_keras.optimizers.Optimizer:
    """Next to Keras's initial accumulator, 0.1, rare rows hardly move."""
    return tf_keras.optimizers.Adagrad(0.03, initial_accumulator_value=1e-6)


old = Pairs(tfrs.layers.embedding.TPUEmbedding(features, tpu.Adagrad(0.1)))
old.compile(adagrad(), "mse")
old.fit(train, epochs=3, verbose=2)
results["TFRS"] = rmse(old.predict(test, verbose=0))
old_path = tf.train.Checkpoint(model=old).save(str(work / "tfrs"))

# %% [markdown]
# `convert` makes a checkpoint of tables, under the names that the layers here
# give them, with the slots of the optimizer that trained them. On stderr it
# says what it does not take over: what is no table is restored from the old
# checkpoint.

# %%
convert(old_path, work / "tfrs_converted")

# %% [markdown]
# The new model is the same class with another layer. `size_threshold=0` says
# that all tables are large, as those of `TPUEmbedding` are: the layer's
# optimizer trains them, a row at a time.

# %%
new = Pairs(
    tfrs_embed.PartialTPUEmbedding(features, adagrad(), size_threshold=0)
)
new(next(iter(test))[0])  # Build it.
checkpoint = tf.train.Checkpoint(model=new)
checkpoint.restore(old_path).expect_partial()  # All but the tables,
checkpoint.restore(str(work / "tfrs_converted")).expect_partial()  # and these.
results["TFRS, moved"] = rmse(new.predict(test, verbose=0))
np.testing.assert_allclose(
    new.predict(test, verbose=0), old.predict(test, verbose=0), atol=1e-5
)
print(new.embedding.placement)

# %% [markdown]
# It goes on with training where the old one was: Adagrad's accumulators came
# along.

# %%
accumulators = new.embedding.tables["movies"].slots["accumulators"]
print(
    f"accumulators of movies: 1.0e-06 at first, {np.max(accumulators):.1e} now"
)
assert np.max(accumulators) > 1e-5
new.compile(adagrad(), "mse")
new.fit(train, epochs=1, verbose=2)
results["TFRS, moved, and an epoch"] = rmse(new.predict(test, verbose=0))

# %% [markdown]
# ## 2. From keras_rs's DistributedEmbedding
#
# Models of Keras 3 take their layers from `tfrs_embed.keras3`. keras_rs's own
# `TableConfig` and `FeatureConfig` are taken as they are, so that one word
# changes: where `DistributedEmbedding` comes from.
#
# keras_rs needs Python 3.11; without it this part is left out, and says so.

# %%
HAS_KERAS_RS = importlib.util.find_spec("keras_rs") is not None
if HAS_KERAS_RS:
    import keras
    import keras_rs

    keras.utils.set_random_seed(0)
else:
    print("keras_rs isn't installed: part 2 is left out")


def rating_model(module: Any) -> Any:
    """Makes a model with `module`'s DistributedEmbedding."""
    configs, inputs = {}, {}
    for name, rows in (("user", users), ("movie", movies)):
        table = keras_rs.layers.TableConfig(f"{name}s", rows, DIM)
        configs[name] = keras_rs.layers.FeatureConfig(
            name, table, (BATCH,), (BATCH, DIM)
        )
        inputs[name] = keras.Input([], dtype="int32", name=name)
    vectors = module.DistributedEmbedding(configs, name="embeddings")(inputs)
    x = keras.layers.Concatenate()([vectors["user"], vectors["movie"]])
    x = keras.layers.Dense(32, "relu", name="hidden")(x)
    x = keras.layers.Dense(1, bias_initializer="ones", name="rating")(x)
    return keras.Model(inputs, x)


if HAS_KERAS_RS:
    theirs = rating_model(keras_rs.layers)
    theirs.compile(keras.optimizers.Adam(0.005), "mse")
    theirs.fit(train, epochs=2, shuffle=False, verbose=2)  # `train` shuffles.
    results["keras_rs"] = rmse(theirs.predict(test, verbose=0))
    theirs.save_weights(work / "theirs.weights.h5")

# %% [markdown]
# The converter reads `.keras` and `.weights.h5` files, and checkpoints. Of the
# first two it takes the tables alone; a `tf.train.Checkpoint` of the compiled
# model has their slots too. Keras loads all else itself: `skip_mismatch` has it
# pass over the layer that it can't fill, with a warning.

# %%
if HAS_KERAS_RS:
    convert(work / "theirs.weights.h5", work / "keras_rs_converted")
    ours = rating_model(tfrs_embed.keras3)
    ours.load_weights(work / "theirs.weights.h5", skip_mismatch=True)
    embeddings = ours.get_layer("embeddings")
    tf.train.Checkpoint(embeddings=embeddings).restore(
        str(work / "keras_rs_converted")
    ).expect_partial()
    results["keras_rs, moved"] = rmse(ours.predict(test, verbose=0))
    np.testing.assert_allclose(
        ours.predict(test, verbose=0),
        theirs.predict(test, verbose=0),
        atol=1e-5,
    )
    print(embeddings.placement)

# %% [markdown]
# ## 3. From SparseOperationKit
#
# SOK needs a GPU and its own build of TensorFlow, so that its side is code to
# read here. In a training step:
#
# - `sok.Init(global_batch_size=1000)`: there is nothing to initialise.
# - `sok.All2AllDenseEmbedding(3000, 16, slot_num=1, nnz_per_slot=1)` becomes
#   `tfrs_embed.All2AllDenseEmbedding` with the same arguments, and `optimizer`.
# - `sok.optimizers.Adam(1e-3)`, and splitting the variables in two: the layer's
#   `optimizer`, and `fit` does the rest.
# - Horovod or MPI: a strategy of `tf.distribute`, or none.
#
# ```python
# # SOK 1: a step
# with tf.GradientTape() as tape:
#     loss = loss_of(model(keys, training=True))
# tables, others = sok.split_embedding_variable_from_others(
#     model.trainable_variables
# )
# of_tables, of_others = tape.gradient(loss, [tables, others])
# table_optimizer.apply_gradients(
#     zip(of_tables, tables), experimental_aggregate_gradients=False
# )
# optimizer.apply_gradients(zip(of_others, others))
# sok.Saver().dump_to_file(table, "sok_files")
# ```
#
# And here, all of it:
#
# ```python
# model.compile(optimizer, loss)
# model.fit(keys_and_labels)
# ```
#
# Its `Saver` writes two files for each table: the keys, and the rows in the
# same order, both without a header. The next cell writes what a job of SOK's
# would have written of the movies' table of part 1. Its keys are MovieLens's
# own numbers: such tables need no vocabulary.

# %%
(work / "sok").mkdir()
keys = data.movie_ids.astype(np.int64)
order = np.random.default_rng(0).permutation(movies)  # A hash table's order.
movie_table = old.embedding.embedding_tables[features["movie"].table].numpy()
keys[order].tofile(work / "sok" / "movies_keys.file")
movie_table[order].tofile(work / "sok" / "movies_values.file")

convert(work / "sok", work / "sok_converted", "--layer", "movies=layer")

# %%
layer = tfrs_embed.All2AllDenseEmbedding(
    3000, DIM, slot_num=1, nnz_per_slot=1, optimizer="adagrad"
)
layer(tf.constant([[[1]]], tf.int64))  # Build it.
tf.train.Checkpoint(layer=layer).restore(str(work / "sok_converted"))
print(f"{layer.size} keys of 3,000 rows")
# Dense keys [batch, slots, 1] give [batch, slots, 1, dim]. An unknown key,
# outside of training, gives zeros.
print(layer(tf.constant([[[50]], [[10**12]]], tf.int64))[:, 0, 0, :4].numpy())

# %% [markdown]
# Looked up by their keys, the movies' vectors give the old model's predictions.

# %%
user_table = old.embedding.embedding_tables[features["user"].table]
test_keys = data.movie_ids[data.test.movie][:, None, None]
pair = [
    tf.gather(user_table, data.test.user),
    layer(tf.constant(test_keys))[:, 0, 0],
]
predicted = old.dense(tf.concat(pair, axis=-1)).numpy()
results["SOK's files"] = rmse(predicted)

# %% [markdown]
# ## The result

# %%
figure, axes = plt.subplots(figsize=(6.5, 3))
colours = [
    "tab:green" if "moved" in name or "SOK" in name else "tab:blue"
    for name in results
]
bars = axes.barh(list(results), list(results.values()), color=colours)
axes.bar_label(bars, fmt="%.4f", padding=3)
axes.invert_yaxis()
axes.set(xlabel="RMSE of ratings from 0 to 1", xlim=(0, 0.34))
figure.tight_layout()

# %%
for name, value in results.items():
    print(f"{name}: RMSE {value:.4f}")
for name in ("TFRS", "keras_rs")[: 1 + HAS_KERAS_RS]:
    assert results[name] < 0.95 * results["mean rating"], name
    assert abs(results[f"{name}, moved"] - results[name]) < 1e-5, name
assert abs(results["SOK's files"] - results["TFRS"]) < 1e-5
