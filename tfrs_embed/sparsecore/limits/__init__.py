"""The limits that a data set needs on SparseCores."""
