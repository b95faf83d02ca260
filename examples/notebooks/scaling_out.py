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
# # Scaling out: several workers, and a plan for more of them
#
# A table that is too large, or too busy, for one machine is shared out: each
# replica of a `tf.distribute` strategy holds some of its rows. Here two
# processes on this machine play two machines. They find each other over
# loopback, with TensorFlow's own `MultiWorkerMirroredStrategy`. Then the
# planner says what to do with 8 and with 64 replicas.

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
import contextlib
import inspect
import json
import tempfile
from typing import Any

import matplotlib.pyplot as plt
import movielens
import numpy as np
import tensorflow as tf

import tfrs_embed

NOTEBOOKS = pathlib.Path(movielens.__file__).parent / "notebooks"
sys.path.append(str(NOTEBOOKS))
import pair_model

plt.rcParams.update({"figure.figsize": (6, 3.4), "figure.dpi": 100})

# %% [markdown]
# ## The model
#
# It is in a module, `pair_model.py`, as the workers need it too. Nothing in it
# knows of workers: the layer asks the strategy in whose scope it is made.

# %%
print(inspect.getsource(pair_model.make))

# %% [markdown]
# ## The workers
#
# **Why not in this notebook?** A multi-worker strategy has to be the first
# thing that a process does with TensorFlow, and all workers must run the same
# program. A kernel is one process, in which cells run in any order. So the
# notebook starts two processes of a program, `worker.py`:

# %%
print((NOTEBOOKS / "worker.py").read_text("utf-8"))

# %% [markdown]
# `LocalCluster` starts them, each with a `TF_CONFIG` of its own: the addresses
# of all, and which of them it is. On a real cluster Slurm or Kubernetes does
# that (docs/clusters.md), and the program stays as it is. What the workers
# print goes to files, which are shown if one of them fails; what they have to
# say they write to a report.

# %%
temporary = tempfile.TemporaryDirectory(prefix="workers_")  # For this kernel.
folder = pathlib.Path(temporary.name)
command = [sys.executable, str(NOTEBOOKS / "worker.py"), str(folder)]
with tfrs_embed.testing.LocalCluster(command, workers=2) as cluster:
    codes = cluster.wait(timeout=150)
    assert codes == [0, 0], f"{cluster.output(0)}\n{cluster.output(1)}"
report = json.loads((folder / "report.json").read_text("utf-8"))
print(f"{report['replicas']} replicas")
print(report["placement"])

# %% [markdown]
# Users and movies are above `size_threshold`: they are sharded by row, each
# worker has half of the rows and of Adagrad's slots. A step sends each row that
# it needs once, not the table. Genres are few: each worker has a copy.

# %%
history = report["history"]
epochs = range(1, len(history["rmse"]) + 1)
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(epochs, history["rmse"], "o-", label="train, during the epoch")
axes.plot(epochs, history["val_rmse"], "o-", label="test, after the epoch")
axes.set(xlabel="epoch", ylabel="RMSE in stars", xticks=list(epochs))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## One checkpoint for any number of replicas
#
# Tables are saved whole and by name. What two workers have saved is restored
# here, on one device, and predicts as well.

# %%
data = movielens.load(movielens.find())
model = pair_model.make(data)
tf.train.Checkpoint(model=model).read(str(folder / "model")).expect_partial()
held_out = data.dataset(data.test, 1000).map(pair_model.for_fit)
predicted = model.predict(held_out, verbose=0)[:, 0]


def rmse(stars: np.ndarray) -> float:
    """The root of the mean squared error on the held-out ratings."""
    return float(np.sqrt(np.mean((stars - data.test.rating) ** 2)))


mean = rmse(np.full(len(data.test), np.mean(data.train.rating)))
print(
    f"RMSE on one device {rmse(predicted):.4f}, of the two workers "
    f"{history['val_rmse'][-1]:.4f}, of the mean rating {mean:.4f}"
)
print(model.get_layer("vectors").placement)

# %% [markdown]
# ## A plan
#
# Rows are not the only way: a replica may hold a whole table, some columns of
# one, or each a copy. `tfrs_embed.plan` predicts the time of a step for these,
# and finds the best mix that fits in memory, before there is any table. It is
# arithmetic and needs no cluster. **Its times for GPUs come from data sheets;
# no GPU has checked them.** What they are good for is the order.
#
# First MovieLens itself, on the two CPU replicas from above. The second
# argument has the number of ids of a sample:

# %%
hotness = {"user": 1, "history": 38.0, "movie": 1, "genres": 1.7}
plan = tfrs_embed.plan(
    pair_model.features(data),
    hotness,
    replicas=2,
    topology="cpu",
    optimizer="adagrad",
    batch_size=500,
)
print(plan)

# %% [markdown]
# These tables are tiny. Now a service of the same kind with 40 million users
# and 3 million movies, on 8 and on 64 A100s of which 10 GB each are for tables.
# The global batch is 65,536 samples in both cases.


# %%
def make_service(
    placement: Any = "auto",
) -> dict[str, tfrs_embed.FeatureConfig]:
    users, movies, genres = (
        tfrs_embed.TableConfig(name, rows, 64, placement=placement)
        for name, rows in [
            ("user", 40_000_000),
            ("movie", 3_000_000),
            ("genres", 200),
        ]
    )
    return {
        name: tfrs_embed.FeatureConfig(name, table)
        for name, table in [
            ("user", users),
            ("history", movies),
            ("movie", movies),
            ("genres", genres),
        ]
    }


def make_plan(replicas: int, placement: Any = "auto") -> tfrs_embed.Plan:
    return tfrs_embed.plan(
        make_service(placement),
        hotness,
        replicas=replicas,
        memory_per_replica=10 * 10**9,
        topology="8xA100",
        optimizer="adagrad",
        batch_size=65_536 // replicas,
    )


plans = {replicas: make_plan(replicas) for replicas in (8, 64)}
print(plans[8])

# %%
print(plans[64])

# %% [markdown]
# How to read it: `placement` is the choice, `reason` what the others would cost
# or why they don't fit. Copies of 40 million users fit nowhere. A whole table
# on one replica makes that one do the work of all, the more so the more
# replicas there are. By row, work and memory are shared evenly; what is left is
# sending. Beside it are plans of tables that all have one placement, which
# their configuration asks for; those that don't fit in memory raise an error.

# %%
times = {
    replicas: {"this plan": plan.seconds} for replicas, plan in plans.items()
}
for replicas, of_plans in times.items():
    for placement in ("row", "table", "column", "replicated"):
        with contextlib.suppress(ValueError):
            other = make_plan(replicas, placement)
            of_plans[f"all {placement}"] = other.seconds
figure, both = plt.subplots(1, 2, figsize=(9, 3))
for axes, (replicas, of_plans) in zip(both, times.items(), strict=True):
    for name, seconds in of_plans.items():
        color = "tab:green" if name == "this plan" else "tab:blue"
        axes.barh(name, seconds * 1e3, color=color)
    axes.invert_yaxis()
    axes.set(title=f"{replicas} replicas", xlabel="predicted step, ms")
figure.tight_layout()

# %% [markdown]
# A layer takes a plan as it is: `PartialTPUEmbedding(..., plan=plan)`, and the
# same program runs on a laptop, where a plan says nothing. `plan.to_json()`
# stores it.

# %%
restored = tfrs_embed.Plan.from_json(plans[64].to_json())
assert restored == plans[64]
layer = tfrs_embed.PartialTPUEmbedding(make_service(), "adagrad", plan=restored)

# %% [markdown]
# ## The result
#
# Two workers beat the mean rating by far, one device predicts from their
# checkpoint what they did, and no other placement that fits is faster than a
# plan.

# %%
assert rmse(predicted) < 0.9 * mean
assert abs(rmse(predicted) - history["val_rmse"][-1]) < 0.002
for of_plans in times.values():
    assert of_plans["this plan"] == min(of_plans.values())
print(f"RMSE {rmse(predicted):.4f}, of the mean rating {mean:.4f}")
