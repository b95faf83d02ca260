"""Tables with labels for TensorBoard's projector."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.monitoring.log import make_folder

#: The most rows of a table that TensorBoard's projector shows.
PROJECTED_ROWS = 10_000


def write_projector(
    folder: Any, layer: Any, labels: Mapping[str, Sequence[str]]
) -> None:
    """Writes tables with labels for TensorBoard's projector.

    The projector shows up to 10,000 of a table's rows, the first ones. The
    files of an earlier call are replaced. All of several workers must call this
    function; the first one writes.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> labels = {"movies": ["Toy Story", "GoldenEye"]}
        >>> tfrs_embed.monitoring.write_projector("projected", layer, labels)

    Args:
        folder: TensorBoard's `logdir`.
        layer: a layer whose tables have numbered rows.
        labels: by the table's name, the labels of its first rows; rows without
            a label are left out.

    Raises:
        ValueError: the layer has no table of a name, or the table has
            `DynamicKeys`, no labels, or fewer rows than labels.
    """
    _check_labels(layer, labels)
    folder = make_folder(folder)
    config = ""
    for i, (name, given) in enumerate(labels.items()):
        size = min(len(given), PROJECTED_ROWS)
        table = layer.tables[name].saved[PARAMETERS]
        with table.reading():
            rows = table.read_rows(0, size).numpy().astype(np.float32)
        if worker_number():
            continue
        text = io.StringIO()
        np.savetxt(text, rows, "%.7g", "\t")
        _write(folder, f"projector_{i}.tsv", text.getvalue())
        lines = [" ".join(str(x).split()) + "\n" for x in given[:size]]
        _write(folder, f"projector_{i}_labels.tsv", "".join(lines))
        config += (
            "embeddings {\n"
            f"  tensor_name: {json.dumps(name, ensure_ascii=False)}\n"
            f'  tensor_path: "projector_{i}.tsv"\n'
            f'  metadata_path: "projector_{i}_labels.tsv"\n'
            "}\n"
        )
    if config:
        _write(folder, "projector_config.pbtxt", config)


def _write(folder: str, name: str, text: str) -> None:
    with tf.io.gfile.GFile(tf.io.gfile.join(folder, name), "w") as file:
        file.write(text)


def worker_number() -> int:
    """Returns this process's number among the strategy's workers."""
    strategy = tf.distribute.get_strategy()
    resolver = strategy.cluster_resolver
    return int(resolver.task_id or 0) if resolver is not None else 0


def _check_labels(layer: Any, labels: Mapping[str, Sequence[str]]) -> None:
    specs = {t.name: t for t in layer._spec.tables}
    for name, given in labels.items():
        if name not in specs:
            raise ValueError(
                f"Layer '{layer.name}' has no table '{name}' to label; its "
                f"tables are {list(specs)}."
            )
        if specs[name].keys is not None:
            raise ValueError(
                f"Table '{name}' has DynamicKeys: labels are of tables whose "
                "ids are row numbers."
            )
        if not 0 < len(given) <= specs[name].vocabulary_size:
            raise ValueError(
                f"Table '{name}' has {specs[name].vocabulary_size} rows, and "
                f"{len(given)} labels: give 1 to as many labels as rows."
            )
