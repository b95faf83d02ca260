"""The package's version, which setup.py reads too."""

__version__ = "0.1.0"

#: The oldest and the newest TensorFlow release that the library takes. CI runs
#: the newest; CONTRIBUTING.md says how to raise it.
OLDEST_TENSORFLOW = "2.16"
NEWEST_TENSORFLOW = "2.21"

#: The wheels for a TPU VM. With a libtpu newer than the newest, TensorFlow's
#: import aborts the process: it asks libtpu for a function that is gone.
TENSORFLOW_TPU = "2.20.0"
LIBTPU = "0.0.20"
NEWEST_LIBTPU = "0.0.31"

#: The oldest Keras 3 that `tfrs_embed.keras3` was tried with.
OLDEST_KERAS_3 = "3.12"
