"""Tools that no training step needs: plans, reports, checks, conversions.

They are imported when a program asks for one: `tfrs_embed.plan` is
`tfrs_embed.tools.planner.plan`.
"""
