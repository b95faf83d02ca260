"""Tables as one variable each, however engines hold their rows."""
