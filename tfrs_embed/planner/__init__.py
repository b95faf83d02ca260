"""Placements for tables, and the cost of a step on them, before any is made."""
