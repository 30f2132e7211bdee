"""Tissues to try things on: simulated ones, chains of residues, and public atlases."""

from __future__ import annotations

from ._chains import synthetic_chains
from ._public import drosophila_embryo, merfish_hypothalamus, seqfish_embryo, slideseqv2_hippocampus
from ._synthetic import synthetic_tissue

__all__ = [
    "drosophila_embryo",
    "merfish_hypothalamus",
    "seqfish_embryo",
    "slideseqv2_hippocampus",
    "synthetic_chains",
    "synthetic_tissue",
]
