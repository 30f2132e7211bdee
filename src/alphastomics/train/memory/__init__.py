"""Memory of a training step: what it needs, what fits, and what is recomputed."""
