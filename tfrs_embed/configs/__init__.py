"""Declarations of users, and the decisions made from them.

`tables` has the declarations and their checked form, `placement` each table's
sharding and its reason, `plan` a plan's data. No module creates a table.
"""
