"""Placements for tables, and the cost of a step on them, before any is made.

A module per idea: `usage` says how often tables are looked up, `hardware` on
what, `candidates` where tables can be, `traffic` what a step sends, `cost` what
a table costs, `parts` and `prediction` how long a step takes, `search` what is
best; `planning` puts them together, and `plans`
is the result. `frequent` says which rows to copy.
"""

from typing import TYPE_CHECKING

from tfrs_embed import lazy

if TYPE_CHECKING:
    from tfrs_embed.planner.frequent import hot_rows
    from tfrs_embed.planner.hardware import Hardware
    from tfrs_embed.planner.planning import plan
    from tfrs_embed.planner.plans import (
        Plan,
        PlanAlternative,
        ReplicaPlan,
        TablePlan,
    )

__all__ = [
    "Hardware",
    "Plan",
    "PlanAlternative",
    "ReplicaPlan",
    "TablePlan",
    "hot_rows",
    "plan",
]

__getattr__ = lazy.importer(
    __name__,
    {
        "tfrs_embed.planner.frequent": ("hot_rows",),
        "tfrs_embed.planner.hardware": ("Hardware",),
        "tfrs_embed.planner.planning": ("plan",),
        "tfrs_embed.planner.plans": (
            "Plan",
            "PlanAlternative",
            "ReplicaPlan",
            "TablePlan",
        ),
    },
)
