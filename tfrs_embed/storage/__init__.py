"""Rows of tables and their slots on one device, whatever keeps them."""
