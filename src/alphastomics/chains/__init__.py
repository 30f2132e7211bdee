"""Ordered chains of residues: simulated data, a training loss and a score.

:func:`synthetic_chains` simulates data and :func:`chain_fape` is a score on NumPy arrays. The training loss, weighted by
``lambda_fape``, is in :mod:`alphastomics.chains.fape`, which imports torch; ``train/objective.py`` is its only user.
"""

from alphastomics.chains._data import synthetic_chains
from alphastomics.chains._metrics import chain_fape

__all__ = ["chain_fape", "synthetic_chains"]
