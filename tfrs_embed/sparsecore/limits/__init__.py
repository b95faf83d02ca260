"""The limits that a data set needs on SparseCores."""

from tfrs_embed.sparsecore.limits.compute import compute_limits
from tfrs_embed.sparsecore.limits.report import (
    LimitsReport,
    StackLoad,
    TableLoad,
)

__all__ = ["LimitsReport", "StackLoad", "TableLoad", "compute_limits"]
