"""TensorFlow's mid-level API for SparseCores, with and without TPUs."""
