"""Replicas and workers train on the rows of files, each row once."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from process_tiers import nightly, on
from strategies.replicas import of_chief

ROWS, STEPS = 23, 6


class Sum(tf_keras.losses.Loss):
    """Adds up predictions, so that an id's gradient is its count."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, labels, predictions):
        return tf.reduce_sum(predictions, axis=-1)


@on("mirrored:2", "workers:2")
@nightly(
    lambda each_reads_its_rows, seed: each_reads_its_rows == (seed is None)
)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("each_reads_its_rows", [True, False])
def test_each_row_once(strategy, each_reads_its_rows, seed, tmp_path):
    """There is one file, and so fewer than workers."""
    folder = of_chief(strategy, tmp_path)
    path = str(folder / "rows.parquet")
    if strategy.extended.should_checkpoint:
        ids = range(ROWS)
        rows = pa.table({"id": ids, "bag": [[i] * (i % 3) for i in ids]})
        pq.write_table(rows, f"{path}.part", row_group_size=5)
        tf.io.gfile.rename(f"{path}.part", path, overwrite=True)
    of_chief(strategy, tmp_path)  # Workers wait for the file.
    replicas = strategy.num_replicas_in_sync

    def read(batch_size, context=None):
        tf.random.set_seed(1)
        dataset = tfrs_embed.data.parquet_dataset(
            path,
            ["id", "bag"],
            batch_size,
            shuffle_seed=seed,
            input_context=context,
        )
        return dataset.map(lambda rows: (rows, tf.zeros_like(rows["id"])))

    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            {
                name: tfrs_embed.FeatureConfig(
                    name,
                    tfrs_embed.TableConfig(
                        name,
                        ROWS,
                        1,
                        tf_keras.initializers.Zeros(),
                        None,
                        "sum",
                    ),
                )
                for name in ("id", "bag")
            },
            "sgd",
            size_threshold=0,
        )

        class Model(tf_keras.Model):
            def __init__(self):
                super().__init__()
                self.embedding = layer

            def call(self, batch):
                return sum(self.embedding(batch).values())

        model = Model()
        model.compile("sgd", Sum())
    if each_reads_its_rows:
        dataset = strategy.distribute_datasets_from_function(
            lambda context: read(2, context)
        )
    else:
        dataset = read(2 * replicas)
    model.fit(dataset, steps_per_epoch=STEPS, verbose=0)
    for name, counts in (
        ("id", [1] * ROWS),
        ("bag", [i % 3 for i in range(ROWS)]),
    ):
        table = layer.embedding_tables[name].numpy()[:, 0]
        assert (table * -100).round().astype(int).tolist() == counts
