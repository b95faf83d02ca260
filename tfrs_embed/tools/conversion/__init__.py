"""The inspection and conversion of checkpoints, other libraries' too."""
