"""Placements for tables, and the cost of a step on them, before any is made.

A module per idea: `usage` says how often tables are looked up, `hardware` on
what, `candidates` where tables can be, `traffic` what a step sends, `cost` what
a table costs, `parts` and `prediction` how long a step takes, `search` what is
best; `planning` puts them together, and `plans`
is the result. `frequent` says which rows to copy.
"""

from typing import TYPE_CHECKING

from tfrs_embed.compat import lazy

if TYPE_CHECKING:
    from tfrs_embed.configs.hardware import Hardware
    from tfrs_embed.configs.plan import (
        Plan,
        PlanAlternative,
        ReplicaPlan,
        TablePlan,
    )
    from tfrs_embed.tools.planner.frequent import hot_rows
    from tfrs_embed.tools.planner.planning import plan

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
        "tfrs_embed.tools.planner.frequent": ("hot_rows",),
        "tfrs_embed.configs.hardware": ("Hardware",),
        "tfrs_embed.tools.planner.planning": ("plan",),
        "tfrs_embed.configs.plan": (
            "Plan",
            "PlanAlternative",
            "ReplicaPlan",
            "TablePlan",
        ),
    },
)
