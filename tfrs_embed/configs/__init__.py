"""Configurations that users declare, and the decisions made from them.

`tables` has the declarations and their checked form, `placement` each table's
sharding and the reason for it, `plan` the data of a plan. No module here
creates a table.
"""
