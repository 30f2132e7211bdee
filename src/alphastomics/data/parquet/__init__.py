"""Tissues on disk: the columns of a dataset, what its ``metadata.json`` says, and cells read from it."""
