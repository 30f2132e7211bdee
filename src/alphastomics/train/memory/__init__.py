"""Memory of a training step: its estimate, the sizes that fit, and recomputed blocks."""
