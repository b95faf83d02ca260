"""The package's version, which setup.py reads too."""

__version__ = "0.1.0"

#: The oldest and the newest TensorFlow release that the library takes. CI runs
#: the newest; CONTRIBUTING.md says how to raise it.
OLDEST_TENSORFLOW = "2.16"
NEWEST_TENSORFLOW = "2.21"

#: The oldest Keras 3 that `tfrs_embed.keras3` was tried with.
OLDEST_KERAS_3 = "3.12"
