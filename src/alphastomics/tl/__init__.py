"""Tools: place cells, and judge what was sampled."""

from alphastomics.tl._agreement import modality_agreement
from alphastomics.tl._clusters import cluster_scores
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._expression import expression_scores
from alphastomics.tl._moran import morans_i
from alphastomics.tl._reconstruct import reconstruct

__all__ = [
    "cluster_scores",
    "evaluate",
    "expression_scores",
    "modality_agreement",
    "morans_i",
    "reconstruct",
]
