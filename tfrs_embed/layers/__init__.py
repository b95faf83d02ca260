"""Keras layers: thin, without table logic."""
