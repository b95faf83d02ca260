"""The part of a page about a statistics log."""

from __future__ import annotations

import pathlib

from tfrs_embed.tools.monitoring.log import FILE, read_workers
from tfrs_embed.tools.report import page

_COLUMNS = {
    "Tables by size": ("rows", "dim", "dtype", "bytes"),
    "Norms": (
        *("norms/0.5", "norms/0.99", "norms/1.0"),
        *("update_norms/0.5", "update_norms/1.0", "nonfinite_rows"),
    ),
    "Dead rows": (
        "untouched_share",
        "changed_share",
        "idle_shares",
        "idle_days",
    ),
    "Hot rows": (
        *("lookups/ids", "lookups/unique_share", "lookups/invalid_share"),
        *("lookups/top_shares", "keys/top_shares"),
    ),
    "Files": ("files", "lookups/in_memory_share"),
    "Keys": (
        *("keys/size", "keys/capacity", "keys/admitted", "keys/evicted"),
        *("keys/rejected", "keys/hits", "keys/spill", "keys/text"),
    ),
}
_REPLICAS = {"Replicas": ("unique_keys", "bytes")}
_LAYERS = {
    "Imbalance of replicas": ("imbalance",),
    "Disks": ("disk",),
}

# By an object's name, by step.
_Records = dict[str, dict[int, page.Record]]


def is_log(path: str) -> bool:
    """Whether a path is a log's folder, or the file in it."""
    here = pathlib.Path(path)
    return here.name.startswith(FILE) or any(here.glob(f"{FILE}*"))


def statistics_log(path: str) -> page.PagePart:
    """Returns the part of a log, given its folder or file.

    Raises:
        OSError: it can't be read.
        ValueError: it has no reports, or other lines.
    """
    here = pathlib.Path(path)
    folder = str(here.parent if here.name.startswith(FILE) else here)
    try:
        return _part(folder)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{folder}': a line of {FILE} is not a report of "
            f"tfrs_embed.monitoring: {type(error).__name__} {error}."
        ) from None


def _part(folder: str) -> page.PagePart:
    workers = read_workers(folder)
    tables: _Records = {}
    replicas: _Records = {}
    layers: _Records = {}
    for worker, reports in enumerate(workers):
        end = f" of worker {worker}" if len(workers) > 1 else ""
        for report in reports:
            layer, step = report["layer"], report["step"]
            layers.setdefault(f"{layer}{end}", {})[step] = report
            for each in report["tables"]:
                name = f"{layer}/{each['table']}{end}"
                # A step that was trained again replaces the earlier one.
                tables.setdefault(name, {})[step] = each
            for each in report.get("replicas", ()):
                name = f"{layer}/replica {each['replica']}{end}"
                replicas.setdefault(name, {})[step] = each
    if not tables:
        raise ValueError(f"'{folder}': {FILE} has no reports of tables yet.")
    steps = sorted({step for found in tables.values() for step in found})
    facts = {
        "steps": f"{steps[0]:,} to {steps[-1]:,}",
        "reports": len(steps),
        "workers": len(workers),
        "tables": len(tables),
    }
    made = [
        *page.sections("table", tables, _COLUMNS, "step"),
        *page.sections("replica", replicas, _REPLICAS, "step"),
        *page.sections("layer", layers, _LAYERS, "step"),
    ]
    return page.PagePart("Statistics", folder, facts, made)
