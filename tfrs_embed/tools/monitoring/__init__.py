"""Statistics of tables between steps: norms, dead rows, lookups, replicas.

`monitor` makes the reports of `reports`: `rows` reads tables, and `lookups`
counts the lookups of batches. `callback` makes reports while Keras trains,
and `log` writes them.

Example:
    >>> statistics = tfrs_embed.monitoring.TableStatistics("logs", every=1000)
"""

from tfrs_embed.tools.monitoring.callback import TableStatistics
from tfrs_embed.tools.monitoring.log import read_log
from tfrs_embed.tools.monitoring.lookups import lookup_statistics
from tfrs_embed.tools.monitoring.monitor import TableMonitor
from tfrs_embed.tools.monitoring.reports import (
    DiskReport,
    FileReport,
    KeyReport,
    LookupReport,
    ReplicaReport,
    StatisticsReport,
    TableReport,
)

__all__ = [
    "DiskReport",
    "FileReport",
    "KeyReport",
    "LookupReport",
    "ReplicaReport",
    "StatisticsReport",
    "TableMonitor",
    "TableReport",
    "TableStatistics",
    "lookup_statistics",
    "read_log",
]
