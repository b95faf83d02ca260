"""Commands of `tfrs-embed` that belong to no other package."""
