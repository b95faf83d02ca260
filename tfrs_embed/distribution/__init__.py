"""Collectives on tf.distribute: the replicas, and the exchange between them."""
