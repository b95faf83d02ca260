"""The package's version, which setup.py reads too."""

__version__ = "0.1.0"

#: The TensorFlow releases that the tests pass on, from the oldest to the
#: newest. CONTRIBUTING.md says how to raise the latter.
OLDEST_TENSORFLOW = "2.16"
NEWEST_TENSORFLOW = "2.21"
