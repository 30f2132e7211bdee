"""Ordered chains of residues: simulated data, a training loss and a score.

Public names are :func:`synthetic_chains` and :func:`chain_fape`, a score on NumPy arrays. The frame-aligned loss of training,
``lambda_fape``, is in :mod:`alphastomics.chains.fape`, which imports torch. Nothing else in the package depends on this
subpackage: without it, the loss "fape" in ``train/objective.py`` and the setting ``lambda_fape`` go.
"""

from alphastomics.chains._data import synthetic_chains
from alphastomics.chains._metrics import chain_fape

__all__ = ["chain_fape", "synthetic_chains"]
