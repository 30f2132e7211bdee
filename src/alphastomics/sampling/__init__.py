"""Sampling of positions, expression and whole tissues from a trained network."""
