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
# # SparseCores: finding their limits, and training on an emulated slice
#
# TPUs v5p and v6e have SparseCores: processors for embedding tables. They work
# in buffers of fixed sizes, and a batch that does not fit **ends the program**.
# This notebook computes the sizes from data, and then trains with them on a TPU
# slice that is emulated on this machine. No TPU is needed for either, and no
# TPU has run this library yet: docs/tpu.md says what has been shown, and how.

# %%
import os
import pathlib
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.keras is tf_keras.
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
from tfrs_embed import sparsecore, testing

# The slice is emulated by a MirroredStrategy, which logs each of its sums.
tf.get_logger().setLevel("ERROR")
plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## The slice
#
# A v6e has 2 SparseCores on each chip. "v6e-2" has 2 chips: 4 SparseCores among
# which each table's rows are dealt out. Like a real slice it comes **before
# anything else that touches TensorFlow's devices**, and it stays for as long as
# the process runs: to try another one, restart the kernel.

# %%
strategy = testing.EmulatedTPUStrategy("v6e-2")
CHIPS = strategy.num_replicas_in_sync
tf_keras.utils.set_random_seed(0)
print(f"{CHIPS} chips")

# %% [markdown]
# ## The data
#
# Users, movies, and the movies that a user has rated before: up to 50 ids in
# one sample. A TPU's shapes are fixed, so that each batch has the same size,
# and what is left over at the end is dropped.

# %%
BATCH = 1000  # Of the slice: 500 on each chip.
data = movielens.load(movielens.find())
NAMES = ("user", "history", "movie", "genres")
tables = {
    name: tfrs_embed.TableConfig(
        name,
        data.features[name].vocabulary_size,
        16,
        initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
        combiner="mean",
    )
    for name in ("user", "movie", "genres")
}
tables["history"] = tables["movie"]
features = {
    name: tfrs_embed.FeatureConfig(name, tables[name]) for name in NAMES
}
THRESHOLD = 500  # Genres stay off the SparseCores: Keras holds them.


def for_fit(
    batch: dict[str, tf.Tensor],
) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Makes inputs and labels."""
    return {name: batch[name] for name in NAMES}, batch["rating"][:, None]


# %% [markdown]
# ## The limits
#
# Every SparseCore asks every other one for rows. The limits are about one such
# pair in one step: how many ids at most, and how many different ones. They are
# not the batch's ids divided by the number of cores: some movies come in nearly
# every history, and all of one movie's requests go to the core that has it.
#
# `compute_limits` reads batches **of one chip** and counts as the hardware
# does. It needs the same features, optimizer and threshold as the layer, since
# these decide which tables are stacked. `safety=1.5` leaves room for batches
# that are worse than those that were seen.

# %%
chip_batches = data.dataset(
    data.train, BATCH // CHIPS, shuffle_seed=0, full_batches=True
)
config, report = sparsecore.compute_limits(
    (for_fit(batch)[0] for batch in chip_batches.take(60)),
    features,
    "v6e-2",
    size_threshold=THRESHOLD,
    safety=1.5,
    progress=False,
)
print(report)
print("max ids:", config.max_ids_per_table)
print("max unique ids:", config.max_unique_ids_per_table)

# %% [markdown]
# TensorFlow's defaults are 256 and 256. With these, and histories of up to 50
# movies, the first step would end the program. Limits for other slices come
# from the same data: more cores, fewer ids for each pair of them.

# %%
slices = {
    "v6e-1": (1, 2),
    "v6e-2": (2, 2),
    "v6e-4": (4, 2),
    "v6e-8": (8, 2),
    "v6e-16": (16, 2),
}
found = {}
for name, (chips, cores) in slices.items():
    some = data.dataset(
        data.train, BATCH // chips, shuffle_seed=0, full_batches=True
    )
    of_slice, _ = sparsecore.compute_limits(
        (for_fit(batch)[0] for batch in some.take(20)),
        features,
        (chips, cores),
        size_threshold=THRESHOLD,
        progress=False,
    )
    found[name] = (
        max(of_slice.max_ids_per_table.values()),
        max(of_slice.max_unique_ids_per_table.values()),
    )
figure, axes = plt.subplots()
x = np.arange(len(found))
axes.bar(x - 0.2, [ids for ids, _ in found.values()], 0.4, label="ids")
axes.bar(
    x + 0.2, [unique for _, unique in found.values()], 0.4, label="unique ids"
)
axes.axhline(256, color="grey", linestyle=":", label="TensorFlow's default")
axes.set_yscale("log")
axes.set(
    ylabel="most between two cores",
    title=f"What {BATCH:,} samples of a slice need",
)
axes.set_xticks(x, list(found))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## The model
#
# Under the slice's strategy the layer puts its large tables on the SparseCores.
# Two things are particular to TPUs: `batch_size`, of one chip, since shapes are
# fixed, and that ids stay on the host (`experimental_fetch_to_device=False`),
# which sorts them into the buffers.

# %%
on_host = tf.distribute.InputOptions(experimental_fetch_to_device=False)


def distribute(
    ratings: movielens.Ratings, seed: int | None = None
) -> tf.distribute.DistributedDataset:
    """Batches for the slice; ids stay on the host, which prepares them."""
    return strategy.distribute_datasets_from_function(
        lambda context: data.dataset(
            ratings, BATCH, seed, context, full_batches=True
        ).map(for_fit),
        on_host,
    )


class Rating(tf_keras.Model):
    """Predicts stars.

    Args:
        limits: of the SparseCores' buffers.
    """

    def __init__(
        self, limits: tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig
    ) -> None:
        super().__init__()
        self.vectors = tfrs_embed.PartialTPUEmbedding(
            features,
            tf_keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-5),
            size_threshold=THRESHOLD,
            batch_size=BATCH // CHIPS,
            sparse_core_embedding_config=limits,
            pipeline_execution_with_tensor_core=True,
        )
        self.dense = tf_keras.Sequential(
            [
                tf_keras.layers.Dense(64, "relu"),
                tf_keras.layers.Dense(
                    1, bias_initializer=tf_keras.initializers.Constant(3.5)
                ),
            ]
        )

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        vectors = self.vectors(inputs)
        return self.dense(tf.concat([vectors[n] for n in NAMES], axis=-1))


def compiled(
    limits: tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig,
) -> Rating:
    """Makes a model; 20 steps at a time, as pipelining takes more than one."""
    with strategy.scope():
        model = Rating(limits)
        model.compile(
            tf_keras.optimizers.Adam(0.003),
            "mse",
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
            steps_per_execution=20,
        )
    return model


# %% [markdown]
# ## What happens without
#
# The emulated slice refuses what a real one refuses: a batch that needs more
# than the limits, here of 64, is an error that names the table and both
# numbers. It comes before anything is trained.

# %%
tight = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
    max_ids_per_table=dict.fromkeys(config.max_ids_per_table, 64),
    max_unique_ids_per_table=dict.fromkeys(config.max_unique_ids_per_table, 64),
    max_ids_per_chip_per_sample=config.max_ids_per_chip_per_sample,
)
refusal = ""
try:
    compiled(tight).fit(
        distribute(data.train, seed=0), steps_per_epoch=20, verbose=0
    )
except tf.errors.OpError as error:
    refusal = next(
        line for line in error.message.splitlines() if "max ids" in line
    )
print(refusal.split("Error: ")[-1])

# %% [markdown]
# ## Training with the limits computed
#
# `placement` says "sparsecore". With
# `pipeline_execution_with_tensor_core` the tables' updates of one step overlap
# the dense layers of the next one, which emulation does in the same order, but
# not faster.

# %%
EPOCHS = 2
model = compiled(config)
history = model.fit(
    distribute(data.train, seed=0),
    epochs=EPOCHS,
    steps_per_epoch=len(data.train) // BATCH,
    verbose=2,
).history
print(model.vectors.placement)

# %%
result = model.evaluate(
    distribute(data.test),
    steps=len(data.test) // BATCH,
    return_dict=True,
    verbose=0,
)["rmse"]
mean = float(np.mean(data.train.rating))
baseline = float(np.sqrt(np.mean((data.test.rating - mean) ** 2)))
figure, axes = plt.subplots(figsize=(5, 2.4))
bars = axes.barh(
    ["the mean rating", f"after {EPOCHS} epochs"], [baseline, result]
)
axes.bar_label(bars, fmt="%.3f", padding=3)
axes.set(xlabel="RMSE in stars, held-out ratings", xlim=(0, 1.3))
axes.invert_yaxis()
figure.tight_layout()

# %% [markdown]
# ## On a real TPU
#
# Two things change: the slice comes from
# `tf.distribute.cluster_resolver.TPUClusterResolver`, and `tensorflow-tpu` is
# installed in place of `tensorflow`. `examples/tpu_ranking.py` takes either
# slice.
#
# ## The result

# %%
print(f"RMSE {result:.4f}, of the mean rating {baseline:.4f}")
assert "64" in refusal
assert max(config.max_ids_per_table.values()) > 256
assert result < 0.9 * baseline
