"""Plans: placements for tables, and the predicted cost of a step.

A module per idea: `usage` has the numbers of ids, `candidates` the placements
that a table may have, `traffic` collectives and their bytes, `cost` what a
table costs, `prediction` the time of a step, `search` the best choice;
`planning` puts them together. `frequent` finds rows to copy. What they make is
`configs.plan.Plan`, on `configs.hardware.Hardware`.
"""

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.configs.plan import Plan, ReplicaPlan, TablePlan
from tfrs_embed.tools.planner.frequent import hot_rows
from tfrs_embed.tools.planner.planning import plan

__all__ = [
    "Hardware",
    "Plan",
    "ReplicaPlan",
    "TablePlan",
    "hot_rows",
    "plan",
]
