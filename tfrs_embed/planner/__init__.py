"""Placements for tables, and the cost of a step on them, before any is made.

A module per idea: `usage` says how often tables are looked up, `hardware` on
what, `candidates` where tables can be, `traffic` what a step sends, `cost` what
a table costs, `parts` and `prediction` how long a step takes, `search` what is
best; `planning` puts them together, and `plans`
is the result. `frequent` says which rows to copy.
"""

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
