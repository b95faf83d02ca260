"""Tables on TPUs, held by TensorFlow's own embedding classes."""
