"""Tools: predict positions, transfer labels and genes, score predictions, compare models, and inspect attention and experts."""

from alphastomics._provenance import Provenance, provenance
from alphastomics.tl._agreement import modality_agreement
from alphastomics.tl._compare import compare
from alphastomics.tl._compare_configurations import Configuration
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._expression import expression_scores
from alphastomics.tl._impute import impute
from alphastomics.tl._layers import attention_gates, attention_maps, attention_sinks, expert_usage
from alphastomics.tl._outline import fit_outline
from alphastomics.tl._reconstruct import reconstruct
from alphastomics.tl._scores import cluster_scores, morans_i, position_scores
from alphastomics.tl._transfer_labels import transfer_labels

__all__ = [
    "Configuration",
    "Provenance",
    "attention_gates",
    "attention_maps",
    "attention_sinks",
    "cluster_scores",
    "compare",
    "evaluate",
    "expert_usage",
    "expression_scores",
    "fit_outline",
    "impute",
    "modality_agreement",
    "morans_i",
    "position_scores",
    "provenance",
    "reconstruct",
    "transfer_labels",
]
