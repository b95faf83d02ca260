"""Statistics written to a folder: for programs, and for TensorBoard."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import Rows, VariableRows
from tfrs_embed.tools.monitoring.reports import StatisticsReport, TableReport

#: The name of the first worker's file; others' have a suffix.
FILE = "tables.jsonl"
#: TensorBoard's projector shows no more points than these.
PROJECTED_ROWS = 10_000


class StatisticsLog:
    """Writes reports to a folder.

    `tables.jsonl` has a line for each report; TensorBoard's files have scalars
    "tables/<layer>/<table>/...", and histograms.

    Args:
        folder: the folder, of any file system that TensorFlow has. It is made
            if it isn't there.
        worker: this worker's number; all but the first have files of their own.
    """

    def __init__(self, folder: Any, worker: int = 0) -> None:
        self._folder = _make_folder(folder)
        self._suffix = f".worker-{worker}" if worker else ""
        self._path = _join(self._folder, FILE + self._suffix)
        self._begins_anew = _ends_within_a_line(self._path)
        self._writer: Any = None

    def write(self, report: StatisticsReport) -> None:
        """Writes a report."""
        # JSON has no NaN; a report has none.
        line = json.dumps(report.to_dict(), allow_nan=False) + "\n"
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write("\n" * self._begins_anew + line)
        self._begins_anew = False
        with tf.init_scope(), tf.device("CPU:0"):
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(
                    self._folder, filename_suffix=f".tables{self._suffix}"
                )
            with self._writer.as_default(report.step):
                for table in report.tables:
                    _write_table(f"tables/{report.layer}/{table.table}", table)
                for each in report.replicas:
                    where = f"replicas/{report.layer}/{each.replica}"
                    _scalar(f"{where}/unique_keys", each.unique_keys)
                    _scalar(f"{where}/bytes", each.bytes)
                if report.imbalance is not None:
                    _scalar(
                        f"replicas/{report.layer}/imbalance", report.imbalance
                    )
            self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _write_table(where: str, table: TableReport) -> None:
    numbers: dict[str, Any] = {
        "bytes": table.bytes,
        "rows": table.rows,
        "nonfinite_rows": table.nonfinite_rows,
        "untouched_share": table.untouched_share,
        "changed_share": table.changed_share,
    }
    numbers |= {f"idle_{n}": share for n, share in table.idle_shares.items()}
    for kind in ("norms", "update_norms"):
        found = getattr(table, kind)
        if found:
            numbers |= {f"{kind}/{p}": found[p] for p in (0.01, 0.5, 0.99)}
            _histogram(f"{where}/{kind}", found)
    for part in (table.lookups, table.keys):
        kind = "lookups" if part is table.lookups else "keys"
        if part is not None:
            found = dict(vars(part))
            curve = found.pop("top_shares")
            numbers |= {f"{kind}/{k}": v for k, v in found.items()}
            numbers |= {f"{kind}/top_share_{p:g}": v for p, v in curve.items()}
    for name, value in numbers.items():
        if value is not None:
            _scalar(f"{where}/{name}", value)


def _metadata(plugin: str, kind: Any) -> Any:
    metadata = tf.compat.v1.SummaryMetadata(data_class=kind)
    metadata.plugin_data.plugin_name = plugin
    return metadata


def _scalar(tag: str, value: float) -> None:
    # tf.summary.scalar is TensorBoard's, which TensorFlow no longer brings.
    tf.summary.write(
        tag, tf.constant(value, tf.float32), metadata=_metadata("scalars", 1)
    )


def _histogram(tag: str, found: Mapping[float, float]) -> None:
    """Writes quantiles as TensorBoard's buckets: left, right, share."""
    buckets = [
        [found[low], found[high], high - low]
        for low, high in zip(list(found), list(found)[1:], strict=False)
    ]
    tf.summary.write(
        tag,
        tf.constant(buckets, tf.float64),
        metadata=_metadata("histograms", 2),
    )


def read_log(folder: Any) -> list[dict[str, Any]]:
    """Reads the reports that were written to a folder.

    Example:
        >>> import pathlib
        >>> line = '{"layer": "embedding", "step": 1000, "tables": []}'
        >>> pathlib.Path("runs").mkdir()
        >>> written = pathlib.Path("runs/tables.jsonl").write_text(line)
        >>> [report] = tfrs_embed.monitoring.read_log("runs")
        >>> report["step"]
        1000

    Args:
        folder: the `log_dir` of a `TableStatistics`.

    Returns:
        `StatisticsReport.to_dict()` of each, in the order they were written;
        of several workers, one worker's after the other's. A line that a
        process was killed in is left out.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a line is no report.
    """
    return [report for worker in read_workers(folder) for report in worker]


def read_workers(folder: Any) -> list[list[dict[str, Any]]]:
    """Reads the reports that were written to a folder, of each worker.

    Args:
        folder: the folder.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a line is no report.
    """
    folder = os.fspath(folder)
    names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    names = sorted(name for name in names if name.startswith(FILE))
    if not names:
        raise FileNotFoundError(f"'{folder}' has no {FILE}.")
    return [_read(_join(folder, name)) for name in names]


def _read(path: str) -> list[dict[str, Any]]:
    with tf.io.gfile.GFile(path, "r") as file:
        lines = file.read().splitlines()
    return [
        _report(path, number, line)
        for number, line in enumerate(lines, 1)
        # A process was killed while it wrote one that has no end.
        if not line.startswith("{") or line.endswith("}")
    ]


def _join(folder: str, name: str) -> str:
    return tf.io.gfile.join(folder, name)


def _make_folder(folder: Any) -> str:
    folder = os.fspath(folder)
    tf.io.gfile.makedirs(folder)
    return folder


def _ends_within_a_line(path: str) -> bool:
    """Whether a file's last line is one that a process was killed in."""
    if not tf.io.gfile.exists(path) or not tf.io.gfile.stat(path).length:
        return False
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(tf.io.gfile.stat(path).length - 1)
        return file.read(1) != b"\n"


def _report(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"'{path}', line {number}, is no JSON: {error}."
        ) from None
    if not isinstance(report, dict) or not {"layer", "step", "tables"} <= set(
        report
    ):
        raise ValueError(
            f"'{path}', line {number}, is no report of tables: it must have "
            "'layer', 'step' and 'tables'."
        )
    return report


def write_projector(
    folder: Any, layer: Any, labels: Mapping[str, Sequence[str]]
) -> None:
    """Writes tables with labels for TensorBoard's projector.

    The projector shows up to 10,000 of a table's rows, the first ones. What an
    earlier call wrote to the folder is replaced. With several workers all must
    call it, and the first writes.

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
        labels: for each table's name its rows' labels, from row 0 on; rows
            beyond the last are left out.

    Raises:
        ValueError: a table is none of the layer's, or it has keys, or fewer
            rows than labels, or there are none.
    """
    check_labels(layer, labels)
    write_projectors(folder, [(layer, labels)])


def write_projectors(
    folder: Any, layers: Iterable[tuple[Any, Mapping[str, Sequence[str]]]]
) -> None:
    """Writes tables of several layers; see `write_projector`.

    Args:
        folder: TensorBoard's `logdir`.
        layers: layers, and the labels of their tables.
    """
    folder = _make_folder(folder)
    chosen = [
        (layer, name, labels[name])
        for layer, labels in layers
        for name in labels
    ]
    names = [name for _, name, _ in chosen]
    config = ""
    for i, (layer, name, given) in enumerate(chosen):
        size = min(len(given), PROJECTED_ROWS)
        table = layer.embedding_tables[name]
        held = table if isinstance(table, Rows) else VariableRows(name, table)
        with held.reading():
            rows = held.read_rows(0, size).numpy().astype(np.float32)
        if worker_number():
            continue
        text = io.StringIO()
        np.savetxt(text, rows, "%.7g", "\t")
        _write(folder, f"projector_{i}.tsv", text.getvalue())
        lines = [" ".join(str(x).split()) + "\n" for x in given[:size]]
        _write(folder, f"projector_{i}_labels.tsv", "".join(lines))
        # Tables of two layers may have one name.
        shown = name if names.count(name) == 1 else f"{layer.name}/{name}"
        config += (
            "embeddings {\n"
            f"  tensor_name: {json.dumps(shown, ensure_ascii=False)}\n"
            f'  tensor_path: "projector_{i}.tsv"\n'
            f'  metadata_path: "projector_{i}_labels.tsv"\n'
            "}\n"
        )
    if config:
        _write(folder, "projector_config.pbtxt", config)


def _write(folder: str, name: str, text: str) -> None:
    with tf.io.gfile.GFile(_join(folder, name), "w") as file:
        file.write(text)


def worker_number() -> int:
    """This process's number among a strategy's workers."""
    strategy = tf.distribute.get_strategy()
    resolver = strategy.cluster_resolver
    return int(resolver.task_id or 0) if resolver is not None else 0


def check_labels(layer: Any, labels: Mapping[str, Sequence[str]]) -> None:
    """Checks the labels of a layer's tables; see `write_projector`."""
    specs = {t.name: t for t in layer._spec.tables}
    for name, given in labels.items():
        if name not in specs:
            raise ValueError(
                f"Layer '{layer.name}' has no table '{name}' to label; its "
                f"tables are {list(specs)}."
            )
        if specs[name].keys is not None:
            raise ValueError(
                f"Table '{name}' has keys: its rows can't be labelled by "
                "number."
            )
        if not 0 < len(given) <= specs[name].vocabulary_size:
            raise ValueError(
                f"Table '{name}' has {specs[name].vocabulary_size} rows, and "
                f"{len(given)} labels."
            )
