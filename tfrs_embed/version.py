"""The package's version, which setup.py reads too."""

__version__ = "0.1.0"
