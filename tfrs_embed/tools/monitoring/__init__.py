"""What tables do, seen between steps: norms, dead rows, lookups, replicas.

`reports` is the result, `rows` measures what tables hold, `lookups` what
batches ask of them, `monitor` both from one report to the next; `log` writes
reports and `callback` has Keras do so while it trains.

Example:
    >>> statistics = tfrs_embed.monitoring.TableStatistics("logs", every=1000)
"""

from tfrs_embed.tools.monitoring.callback import TableStatistics
from tfrs_embed.tools.monitoring.log import read_log, write_projector
from tfrs_embed.tools.monitoring.lookups import lookup_statistics
from tfrs_embed.tools.monitoring.monitor import TableMonitor
from tfrs_embed.tools.monitoring.reports import (
    KeyReport,
    LookupReport,
    ReplicaReport,
    StatisticsReport,
    TableReport,
)

__all__ = [
    "KeyReport",
    "LookupReport",
    "ReplicaReport",
    "StatisticsReport",
    "TableMonitor",
    "TableReport",
    "TableStatistics",
    "lookup_statistics",
    "read_log",
    "write_projector",
]
