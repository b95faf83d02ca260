"""Looking into checkpoints, of other libraries too, and converting them."""
