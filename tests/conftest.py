"""Set before anything imports tensorflow."""

import os

# tensorflow_recommenders needs tf.keras to be Keras 2.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A test works on little data: more threads only cost.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
