"""The log of reports in a folder: for programs, and for TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import strict_json
from tfrs_embed.tools.monitoring.reports import StatisticsReport, flatten

#: The name of the first worker's file; other workers' names have a suffix.
FILE = "tables.jsonl"


class StatisticsLog:
    """Writes reports to a folder.

    `tables.jsonl` has a line for each report; TensorBoard's files have scalars
    "tables/<layer>/<table>/<field>".

    Args:
        folder: the folder, in any file system of TensorFlow. It is made if it
            doesn't exist.
        worker: this worker's number. Each worker has files of its own.
    """

    def __init__(self, folder: Any, worker: int = 0) -> None:
        folder = os.fspath(folder)
        tf.io.gfile.makedirs(folder)
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
        with (
            tf.init_scope(),
            tf.device("CPU:0"),
            self._writer.as_default(report.step),
        ):
            for tag, value in _scalars(report).items():
                # tf.summary.scalar needs TensorBoard to be installed.
                metadata = tf.compat.v1.SummaryMetadata(data_class=1)
                metadata.plugin_data.plugin_name = "scalars"
                tf.summary.write(
                    tag, tf.constant(value, tf.float32), metadata=metadata
                )
            self._writer.flush()

    def close(self) -> None:
        """Closes TensorBoard's file."""
        self._writer.close()


def _scalars(report: StatisticsReport) -> dict[str, float]:
    """Returns all numbers of a report, by TensorBoard's tags."""
    found = report.to_dict()
    objects = {
        **{f"tables/{report.layer}/{t['table']}": t for t in found["tables"]},
        **{
            f"replicas/{report.layer}/{r['replica']}": r
            for r in found["replicas"]
        },
        f"replicas/{report.layer}": {"imbalance": found["imbalance"]},
    }
    return {
        tag: value
        for tag, value in flatten(objects).items()
        if isinstance(value, int | float)
    }


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
    with tf.io.gfile.GFile(path, "rb") as file:
        lines = file.read().splitlines()
    return [
        _report(f"'{path}', line {number},", line)
        for number, line in enumerate(lines, 1)
        # A line without an end is from a process that was killed.
        if not line.startswith(b"{") or line.endswith(b"}")
    ]


def _report(where: str, line: bytes) -> dict[str, Any]:
    report = strict_json.parse(line, where)
    wanted = {"layer", "step", "tables"}
    if not isinstance(report, dict) or not wanted <= set(report):
        raise ValueError(
            f"{where} is not a report of tables: it must have 'layer', 'step' "
            "and 'tables'."
        )
    return report


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
