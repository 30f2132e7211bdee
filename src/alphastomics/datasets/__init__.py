"""Data sets: simulated tissues and public atlases."""

from __future__ import annotations

from alphastomics.datasets._dissociated import osmfish_cortex
from alphastomics.datasets._public import (
    drosophila_embryo,
    merfish_hypothalamus,
    seqfish_embryo,
    slideseqv2_hippocampus,
)
from alphastomics.datasets._synthetic import synthetic_tissue

__all__ = [
    "drosophila_embryo",
    "merfish_hypothalamus",
    "osmfish_cortex",
    "seqfish_embryo",
    "slideseqv2_hippocampus",
    "synthetic_tissue",
]
