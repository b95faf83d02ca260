"""Engines: they hold tables, look ids up in them, and train them."""
