"""Ordered chains of residues: simulated data, frame-aligned losses and scores."""

from alphastomics.chains._data import synthetic_chains
from alphastomics.chains._metrics import chain_fape

__all__ = ["chain_fape", "synthetic_chains"]
