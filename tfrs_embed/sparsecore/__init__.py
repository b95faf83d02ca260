"""TPU SparseCores: layout, host preprocessing, limits.

Example:
    >>> tfrs_embed.sparsecore.Topology.of("v6e-4").sparse_cores
    2
"""

from typing import TYPE_CHECKING

from tfrs_embed.compat import lazy

if TYPE_CHECKING:
    from tfrs_embed.sparsecore.limits.compute import compute_limits
    from tfrs_embed.sparsecore.limits.report import (
        LimitsReport,
        StackLoad,
        TableLoad,
    )
    from tfrs_embed.sparsecore.topology import Topology

__all__ = [
    "LimitsReport",
    "StackLoad",
    "TableLoad",
    "Topology",
    "compute_limits",
]

lazy.import_later(
    __name__,
    {
        "tfrs_embed.sparsecore.limits.compute": ("compute_limits",),
        "tfrs_embed.sparsecore.limits.report": (
            "LimitsReport",
            "StackLoad",
            "TableLoad",
        ),
        "tfrs_embed.sparsecore.topology": ("Topology",),
    },
)
