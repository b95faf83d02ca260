"""The log of reports in a folder: for programs, and for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.tools.monitoring.reports import StatisticsReport, TableReport

#: The name of the first worker's file; other workers' names have a suffix.
FILE = "tables.jsonl"


class StatisticsLog:
    """Writes reports to a folder.

    `tables.jsonl` has a line for each report; TensorBoard's files have scalars
    "tables/<layer>/<table>/...", and histograms.

    Args:
        folder: the folder, in any file system of TensorFlow. It is made if it
            doesn't exist.
        worker: this worker's number. Each worker has files of its own.
    """

    def __init__(self, folder: Any, worker: int = 0) -> None:
        folder = make_folder(folder)
        suffix = f".worker-{worker}" if worker else ""
        self._path = tf.io.gfile.join(folder, FILE + suffix)
        _end_last_line(self._path)
        with tf.init_scope(), tf.device("CPU:0"):
            self._writer = tf.summary.create_file_writer(
                folder, filename_suffix=f".tables{suffix}"
            )

    def write(self, report: StatisticsReport) -> None:
        """Writes a report."""
        # JSON has no NaN, and neither have reports.
        line = json.dumps(report.to_dict(), allow_nan=False) + "\n"
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write(line)
        replicas = f"replicas/{report.layer}"
        with (
            tf.init_scope(),
            tf.device("CPU:0"),
            self._writer.as_default(report.step),
        ):
            for table in report.tables:
                _write_table(f"tables/{report.layer}/{table.table}", table)
            for each in report.replicas:
                where = f"{replicas}/{each.replica}"
                _scalar(f"{where}/unique_keys", each.unique_keys)
                _scalar(f"{where}/bytes", each.bytes)
            if report.imbalance is not None:
                _scalar(f"{replicas}/imbalance", report.imbalance)
            self._writer.flush()

    def close(self) -> None:
        """Closes TensorBoard's file."""
        self._writer.close()


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
    for kind in ("lookups", "keys"):
        if part := getattr(table, kind):
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
    # tf.summary.scalar needs TensorBoard to be installed.
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
    """Reads the reports in a log's folder.

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
        `StatisticsReport.to_dict()` of each report, in the order they were
        written, one worker's after the other's. A last line without an end,
        from a process that was killed, is left out.

    Raises:
        FileNotFoundError: the folder has no reports.
        ValueError: a line is not a report.
    """
    return [report for worker in read_workers(folder) for report in worker]


def read_workers(folder: Any) -> list[list[dict[str, Any]]]:
    """Reads the reports of each worker; see `read_log`."""
    folder = os.fspath(folder)
    names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    names = sorted(name for name in names if name.startswith(FILE))
    if not names:
        raise FileNotFoundError(f"'{folder}' has no {FILE}.")
    return [_read(tf.io.gfile.join(folder, name)) for name in names]


def _read(path: str) -> list[dict[str, Any]]:
    with tf.io.gfile.GFile(path, "r") as file:
        lines = file.read().splitlines()
    return [
        _report(f"'{path}', line {number},", line)
        for number, line in enumerate(lines, 1)
        # A line without an end is from a process that was killed.
        if not line.startswith("{") or line.endswith("}")
    ]


def _report(where: str, line: str) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    wanted = {"layer", "step", "tables"}
    if not isinstance(report, dict) or not wanted <= set(report):
        raise ValueError(
            f"{where} is not a report of tables: it must have 'layer', 'step' "
            "and 'tables'."
        )
    return report


def make_folder(folder: Any) -> str:
    """Makes a folder if it doesn't exist, and returns its path."""
    folder = os.fspath(folder)
    tf.io.gfile.makedirs(folder)
    return folder


def _end_last_line(path: str) -> None:
    """Ends the last line of a file, as a killed process may not have done."""
    if not tf.io.gfile.exists(path):
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(max(0, file.size() - 1))
        last = file.read(1)
    if last not in (b"", b"\n"):
        with tf.io.gfile.GFile(path, "a") as file:
            file.write("\n")
