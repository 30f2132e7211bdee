"""Scores of predicted tissue: functions on arrays whose memory does not grow with the square of the number of cells."""

from __future__ import annotations

from alphastomics.metrics._agreement import modality_agreement
from alphastomics.metrics._align import RigidTransform, aligned_rmsd, procrustes_disparity, rigid_align, rigid_rmsd
from alphastomics.metrics._clusters import cluster_scores, matched_accuracy
from alphastomics.metrics._distances import contact_precision, distance_matrix_mse, distance_spearman, subsample_cells
from alphastomics.metrics._expression import (
    cosine_per_cell,
    expression_mse,
    expression_scores,
    pearson_per_cell,
    pearson_per_gene,
    variance_ratio_per_gene,
)
from alphastomics.metrics._matrix import log1p_normalized, median_library_size
from alphastomics.metrics._moran import moran_correlation, morans_i
from alphastomics.metrics._neighbors import knn_preservation, nearest_neighbor_ks
from alphastomics.metrics._niches import niche_scores
from alphastomics.metrics._position import chance_positions, oracle_positions, position_scores
from alphastomics.metrics._spread import spread_scores

__all__ = [
    "RigidTransform",
    "aligned_rmsd",
    "chance_positions",
    "cluster_scores",
    "contact_precision",
    "cosine_per_cell",
    "distance_matrix_mse",
    "distance_spearman",
    "expression_mse",
    "expression_scores",
    "knn_preservation",
    "log1p_normalized",
    "matched_accuracy",
    "median_library_size",
    "modality_agreement",
    "moran_correlation",
    "morans_i",
    "nearest_neighbor_ks",
    "niche_scores",
    "oracle_positions",
    "pearson_per_cell",
    "pearson_per_gene",
    "position_scores",
    "procrustes_disparity",
    "rigid_align",
    "rigid_rmsd",
    "spread_scores",
    "subsample_cells",
    "variance_ratio_per_gene",
]
